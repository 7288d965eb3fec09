"""What is run under sampling and lost replies: exact gradients to the end, and networks on minibatches."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fednmap.algorithms import SCAFFOLD, FedAvg, FedNMap, Zhang
from fednmap.core import Algorithm, Oracle, ProblemInfo
from fednmap.data import ClientData, Dataset, load, partition
from fednmap.measure import accuracy
from fednmap.models import build
from fednmap.problems import FiniteSum, Logistic, Network
from fednmap.regularizers import SquaredL2, Zero
from fednmap.simulation import Diverged, Record, simulate
from reproduction import niid_bench
from reproduction.runs import computed
from reproduction.trials import Setting, Trial

CLIENTS = 100
METHODS = ("NIID-2021", "NIID-2023", "SCAFFOLD", "FedAvg", "FedNMap", "Zhang")
"""NIID-2021 and NIID-2023 are SCAFFOLD as in `reproduction.niid_bench`, until and since August 2022."""
SETTINGS = tuple((share, drop) for share in (0.1, 0.02) for drop in (0.0, 0.1, 0.3))
MOMENTUM = 0.9


class Part(NamedTuple):
    """A data set with a model and a way to train it."""

    data: str
    test: str | None
    model: str
    batch: int | None
    """None: exact gradients."""
    Q: int
    eta_a: float
    """The local step without momentum; with momentum it is (1 - MOMENTUM) times that."""
    nu: float
    """Of phi = nu |x|^2."""
    rounds: Mapping[float, int]
    """By the share of clients that is sampled."""
    measured: int
    """How often."""
    chance: float
    """The accuracy of always saying the label that is most frequent in the test."""
    settings: tuple[tuple[float, float], ...] = SETTINGS
    """(share sampled, share of replies lost)."""
    partition: str = "dirichlet:0.5"
    trials: int = 10
    """At most."""
    at_least: int = 0
    """Trials at the paper's scale, where fewer are asked for: short ones can be many."""
    methods: tuple[str, ...] = METHODS


A9A, CHANCE = ("svm:libsvm/a9a", "libsvm/a9a.t"), 12435 / 16281
LENET = "lenet"
PARTS = {
    "exact": Part(*A9A, "logistic", None, 5, 0.2, 0.02, {0.1: 400, 0.02: 2000}, 40, CHANCE),
    "a9a": Part(*A9A, "mlp:32,16,8:relu", 64, 51, 0.1, 5e-6, {0.1: 30, 0.02: 90}, 6, CHANCE),
    "mnist": Part("mnist", None, "mlp:32:relu", 64, 47, 0.1, 5e-6, {0.1: 15, 0.02: 45}, 3, 0.1135),
    "cifar10": Part(
        *("cifar10", None, LENET, 64, 80, 0.1, 5e-6, {0.1: 6}, 6, 0.1),
        settings=((0.1, 0.0),),
        partition="iid",
        trials=1,
    ),
}
OURS = METHODS[2:]
NOISY = PARTS["exact"]._replace(batch=16, settings=((0.1, 0.0), (0.02, 0.0)), at_least=10, methods=OURS)
PARTS |= {"noisy": NOISY, "noisy-quarter": NOISY._replace(eta_a=NOISY.eta_a / 4)}
QUICK = {"exact": {0.1: 200, 0.02: 800}, "a9a": {0.1: 10, 0.02: 20}}


def jobs(scale: str, trials: int) -> list[Trial]:
    """At the paper's scale all; for a quick look exact gradients and a9a with fewer rounds, without the middle loss."""
    parts = PARTS
    if scale == "quick":
        some = tuple(s for s in SETTINGS if s[1] != 0.1)
        parts = {name: PARTS[name]._replace(rounds=rounds, settings=some) for name, rounds in QUICK.items()}
    return [
        _job(name, method, share, drop, part.rounds[share], trial)
        for trial in range(max(trials, *(part.at_least for part in parts.values())))
        for name, part in parts.items()
        if trial < min(max(trials, part.at_least), part.trials)
        for share, drop in part.settings
        for method in part.methods
    ]


def _job(name: str, method: str, share: float, drop: float, rounds: int, trial: int) -> Trial:
    setting: Setting = {"figure": "sampling", "part": name, "method": method, "share": share, "drop": drop}
    setting |= {"rounds": rounds, "trial": trial}
    measure = partial(measured, name, method, share, drop, rounds, trial)
    return Trial(setting, partial(computed, measure), made_from(name) | setting, partial(_digest, name))


def made_from(name: str) -> dict[str, Any]:
    """What the numbers of a part follow from besides the setting, as JSON has it."""
    given = ("data", "model", "batch", "Q", "eta_a", "nu", "measured", "partition")
    return {k: getattr(PARTS[name], k) for k in given} | {"clients": CLIENTS, "momentum": MOMENTUM}


def measured(name: str, method: str, share: float, drop: float, rounds: int, trial: int) -> list[Record]:
    """|grad psi(x)|^2, the accuracy on the test rows, and what was sent."""
    part = PARTS[name]
    f, data = problem(name, trial), dataset(name)
    ridged = Ridged(f, part.nu)

    def record(t: int, x: Tensor, sent: int) -> Record:
        finite = bool(torch.isfinite(x).all())
        residual = float(ridged.gradient(x).square().sum()) if finite else math.inf
        guessed = accuracy(f.predict(x, data.x_test), data.y_test) if finite else part.chance
        return {"round": float(t), "stationarity": residual, "accuracy": guessed, "bytes_up": float(sent)}

    every, sent, last = max(1, rounds // part.measured), 0, 0
    records = [record(0, f.start, 0)]
    try:
        for t, x, up in _rounds(part, method, ridged, share, drop, rounds, trial):
            sent, last = sent + up, t + 1
            if last % every == 0 or last == rounds:
                records.append(record(last, x, sent))
    except Diverged:
        later = range(every * (last // every + 1), rounds, every)
        for t in (*later, rounds):
            records.append({"round": float(t), "stationarity": math.inf, "accuracy": part.chance, "bytes_up": sent})
    return records


def _rounds(
    part: Part, method: str, f: Ridged, share: float, drop: float, rounds: int, trial: int
) -> Iterator[tuple[int, Tensor, int]]:
    who: dict[str, Any] = {"rounds": rounds, "participation": share, "drop": drop, "seed": trial}
    if method.startswith("NIID"):
        step, old = (1 - MOMENTUM) * part.eta_a, method == "NIID-2021"
        options: dict[str, Any] = {"control": control(f.f, trial), "weights": f.weights, "over_sampled": old}
        yield from niid_bench.scaffold(f, f.start, eta_a=step, Q=part.Q, momentum=MOMENTUM, **options, **who)
        return
    kind = algorithm(part, method)
    for r in simulate(kind, f.f if kind.traits.composite else f, threads=1, **who):
        yield r.t, kind.model(r.server), r.bytes_up


def algorithm(part: Part, method: str) -> Algorithm:
    """FedNMap and Zhang have phi = nu |x|^2 in their prox, the others in f: psi is the same."""
    kinds: dict[str, type[SCAFFOLD | FedAvg | FedNMap | Zhang]] = {
        "SCAFFOLD": SCAFFOLD,
        "FedAvg": FedAvg,
        "FedNMap": FedNMap,
        "Zhang": Zhang,
    }
    kind = kinds[method]
    return kind(SquaredL2(part.nu) if kind.traits.composite else Zero(), eta_a=part.eta_a, Q=part.Q)


class Ridged:
    """f + nu |x|^2, for methods that have no regularizer."""

    def __init__(self, f: FiniteSum, nu: float) -> None:
        self.f, self.nu, self.n, self.dim = f, nu, f.n, f.dim
        assert f.weights is not None
        self.start, self.weights, self.chunk = f.start, f.weights, f.chunk

    def info(self) -> ProblemInfo:
        return ProblemInfo(start=self.start, weights=self.weights, chunk=self.chunk, concurrent=True)

    def oracle(self, clients: Tensor, t: int) -> Oracle:
        g = self.f.oracle(clients, t)
        return lambda x, q: torch.add(g(x, q), x, alpha=2 * self.nu)

    def loss(self, x: Tensor) -> Tensor:
        return self.f.loss(x) + self.nu * x.square().sum()

    def gradient(self, x: Tensor) -> Tensor:
        return self.f.gradient(x) + 2 * self.nu * x


@cache
def dataset(name: str) -> Dataset:
    part = PARTS[name]
    found = load(part.data) if part.test is None else load(part.data, test=part.test, dense=True)
    if found.x_train.ndim == 4 and found.x_train.shape[1] == 3:  # colours, each with mean 0 and deviation 1
        mean, deviation = (v[:, None, None] for v in (found.x_train.mean((0, 2, 3)), found.x_train.std((0, 2, 3))))
        x_train, x_test = ((x - mean) / deviation for x in (found.x_train, found.x_test))
        return replace(found, x_train=x_train, x_test=x_test)
    return found


@cache
def problem(name: str, trial: int) -> FiniteSum:
    """100 clients with unlike labels and numbers of rows, each weighing what it holds; logistic losses in float64."""
    part, data = PARTS[name], dataset(name)
    clients = ClientData.split(data.x_train, data.y_train, partition(part.partition, data.y_train, CLIENTS, seed=trial))
    if part.model == "logistic":
        wide = ClientData(clients.x.double(), clients.y, clients.sizes)
        return Logistic(wide, classes=data.classes, weights="samples", batch_size=part.batch, seed=trial)
    return Network(
        _network(part.model, data, trial),
        nn.functional.cross_entropy,
        clients,
        batch_size=part.batch,
        seed=trial,
        weights=clients.sizes.double() / len(clients.x),
    )


def control(f: FiniteSum, trial: int) -> Tensor:
    """Where the controls of NIID-Bench begin: the weights of a network, drawn as torch draws them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 + trial)
        if not isinstance(f, Network):
            return (2 * torch.rand(f.dim, dtype=f.start.dtype) - 1) / math.sqrt(f.dim)
        drawn = [_drawn(layer) for layer in f.architecture.modules()]
    return torch.cat([values for layer in drawn for values in layer])


def _drawn(layer: nn.Module) -> list[Tensor]:
    """A layer's weights and biases, drawn anew."""
    if not isinstance(layer, nn.Linear | nn.Conv2d):
        return []
    fresh = copy.deepcopy(layer)
    fresh.reset_parameters()
    return [values.detach().reshape(-1) for values in fresh.parameters()]


def _network(model: str, data: Dataset, trial: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(trial)
        return lenet() if model == LENET else build(model, data)


def lenet() -> nn.Module:
    """The small network of NIID-Bench for colour pictures of 32 x 32: two convolutions, three linear layers."""
    seen = [nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
    said = [nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(*seen, *said)


def _digest(name: str) -> str:
    return dataset(name).digest
