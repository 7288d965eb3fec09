"""FedNMap, Zhang and FedCanon train MobileNetV3-Small with an l1 norm on CIFAR-10: Hoyer's sparsity and training loss.

Step sizes eta_a = 1/Q and eta_s = 1, gamma = 2.5; three pairs (n, Q).
"""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

import torch
from matplotlib.figure import Figure as Picture
from torch import nn

from fednmap.algorithms import FedCanon, FedNMap, Zhang
from fednmap.core import Algorithm
from fednmap.data import ClientData, Dataset, load, partition
from fednmap.measure import hoyer
from fednmap.models import mobilenet_v3_small
from fednmap.paper.figure import Figure, caption, lines, panels
from fednmap.paper.trials import Curve, Job, select
from fednmap.paper.verdict import RULE, Claim, Verdict, compare, finals, number
from fednmap.problems import Network
from fednmap.regularizers import L1
from fednmap.simulation import Record, simulate

METHODS = ("FedNMap", "Zhang", "FedCanon")
GAMMA = 2.5
WEIGHT = 1e-4
TRAINED = 1.8  # a training loss above it, of log(10) = 2.30 at the start, is too early to judge by


class Size(NamedTuple):
    panels: tuple[tuple[int, int], ...]
    images: int
    batch: int
    rounds: int
    every: int


SIZES = {
    "quick": Size(((4, 10),), images=600, batch=8, rounds=100, every=5),
    "paper": Size(((20, 10), (20, 20), (50, 10)), images=50_000, batch=32, rounds=1000, every=25),
}


def jobs(scale: str, trials: int) -> list[Job]:
    size = SIZES[scale]
    return [
        Job(
            {"method": method, "n": n, "Q": Q, "images": size.images, "batch": size.batch, "l1": WEIGHT}
            | {"rounds": size.rounds, "trial": trial},
            partial(measure, method, n, Q, size, trial),
        )
        for trial in range(trials)
        for n, Q in size.panels
        for method in METHODS
    ]


def measure(method: str, n: int, Q: int, size: Size, trial: int) -> list[Record]:
    """Hoyer's sparsity and f(x_t) along one trial."""
    phi = L1(WEIGHT)
    problem = _problem(n, size, trial)
    algorithm: Algorithm
    if method == "FedNMap":
        algorithm, start = FedNMap(phi, eta_a=1 / Q, Q=Q, gamma=GAMMA), problem.start
    else:
        kind = {"Zhang": Zhang, "FedCanon": FedCanon}[method]
        algorithm, start = kind(phi, eta_a=1 / Q, Q=Q), phi.prox(problem.start, GAMMA)
    first = algorithm.model(algorithm.init(start)[0])
    records = [{"round": 0.0, "hoyer": float(hoyer(first)), "loss": float(problem.loss(first))}]
    for r in simulate(algorithm, problem, rounds=size.rounds, start=start, chunk=5):
        if (r.t + 1) % size.every == 0:
            x = algorithm.model(r.server)
            records.append({"round": r.t + 1.0, "hoyer": float(hoyer(x)), "loss": float(problem.loss(x))})
    return records


def _problem(n: int, size: Size, trial: int) -> Network:
    data = _cifar()
    x, y = data.x_train[: size.images], data.y_train[: size.images]
    mixed = torch.Generator().manual_seed(0)  # the loss takes batch norm's statistics of rows that stand together
    parts = [part[torch.randperm(len(part), generator=mixed)] for part in partition("dirichlet:0.5", y, n)]
    clients = ClientData.split(x, y, parts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(trial)
        module = mobilenet_v3_small(10)
    return Network(module, nn.functional.cross_entropy, clients, batch_size=size.batch, seed=trial)


@cache
def _cifar() -> Dataset:
    return load("cifar10")


def _shown(curves: list[Curve]) -> list[tuple[int, int]]:
    found = dict.fromkeys((int(c.setting["n"]), int(c.setting["Q"])) for c in curves)
    return [panel for panel in found if all(select(curves, method=m, n=panel[0], Q=panel[1]) for m in METHODS)]


def judge(curves: list[Curve]) -> Verdict:
    claims = []
    for n, Q in _shown(curves):
        of = {method: select(curves, method=method, n=n, Q=Q) for method in METHODS}
        loss, sparsity = ({m: finals(c, metric) for m, c in of.items()} for metric in ("loss", "hoyer"))
        early = any(min(values.values()) > TRAINED for values in loss.values())
        for name, values, better in (("Hoyer sparsity", sparsity, "higher"), ("training loss", loss, "lower")):
            text = "; ".join(f"{m} {number(v)}" for m, v in values.items())
            order = [compare(values["FedNMap"], values[m]) for m in METHODS[1:]]
            text += f"; FedNMap {order[0]} than Zhang, {order[1]} than FedCanon".replace("level than", "level with")
            text += f"; too early: a training loss is above {TRAINED:g}" if early else ""
            holds = None if early else all(word == better for word in order)
            claims.append(Claim(f"FedNMap: {better} {name}, n = {n}, Q = {Q}", f"{better} than both", text, holds))
    return Verdict(claims, {}, f"{RULE}\n\nNothing is judged while a training loss is above {TRAINED:g}.")


def draw(curves: list[Curve]) -> Picture:
    """Above sparsity, below training loss."""
    shown = _shown(curves)
    picture, axes = panels(2, len(shown))
    for row, (metric, name) in enumerate((("hoyer", "Hoyer's Sparsity"), ("loss", "Training Loss"))):
        for k, (n, Q) in enumerate(shown, start=row * len(shown)):
            groups = {method: select(curves, method=method, n=n, Q=Q) for method in METHODS}
            lines(axes[k], groups, metric, log=metric == "loss")
            caption(axes[k], k, f"{name}, $n={n}$, $Q={Q}$", y=name)
    return picture


FIGURE = Figure(
    name="mobilenet",
    title="FedNMap against Zhang and FedCanon on MobileNetV3-Small",
    jobs=jobs,
    judge=judge,
    draw=draw,
    choices=f"""\
Given by the paper: CIFAR-10, MobileNetV3-Small, l1 norm, eta_a = 1/Q, eta_s = 1, gamma = {GAMMA:g}.

Chosen here: l1 weight {WEIGHT:g}; labels shared out by Dirichlet(0.5), as batch norm fails on clients with one label;
batch norm by the statistics of the minibatch, and of fixed chunks of the batch size in the loss, for which each
client's pictures were shuffled once; the common start
x_0 = prox(z_0, gamma). quick: n = 4, Q = 10, the first {SIZES["quick"].images} pictures, batch {SIZES["quick"].batch},
{SIZES["quick"].rounds} rounds. paper: the three pairs (n, Q), all 50,000 pictures, batch {SIZES["paper"].batch},
{SIZES["paper"].rounds} rounds.""",
    trials={"quick": 1, "paper": 3},
)
