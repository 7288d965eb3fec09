"""The network of four figures: MNIST, one hidden sigmoid layer, an elastic net, clients sorted by label."""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import nn

from fednmap.algorithms import FedCanon, FedNMap, Zhang
from fednmap.core import Algorithm
from fednmap.data import ClientData, Dataset, load, partition
from fednmap.models import mlp
from fednmap.paper.trials import Job
from fednmap.problems import Network
from fednmap.regularizers import ElasticNet
from fednmap.simulation import Record, run

PHI = ElasticNet(0.001, 0.01)
GAMMA = 4.0
HIDDEN = 32
BATCH = 8
EVERY = 10

CHOICES = f"""\
Given by the paper: MNIST (60,000 pictures), one hidden sigmoid layer, elastic net 0.001 |x|_1 + 0.01 |x|_2^2,
samples sorted by label and cut into n equal parts, gamma = {GAMMA:g}, eta_s = 1, all clients in every round.

Chosen here: {HIDDEN} hidden units; {BATCH} samples a local step, drawn with replacement, where nothing else is said;
pixels in [0, 1]; cross-entropy; PyTorch's default initialisation. A trial has its own initialisation and its own
minibatches, the same for all methods; the partition is the same in all trials. All methods start at the model
x_0 = prox(z_0, gamma), where z_0 is the initialisation. |F_nat(x_t)|^2 uses the exact gradient on all 60,000 pictures
and gamma = {GAMMA:g} for all methods, every {EVERY} rounds."""


def algorithm(method: str, Q: int, eta_a: float) -> Algorithm:
    if method == "FedNMap":
        return FedNMap(PHI, eta_a=eta_a, eta_s=1.0, Q=Q, gamma=GAMMA)
    kind = Zhang if method == "Zhang" else FedCanon
    return kind(PHI, eta_a=eta_a, eta_s=1.0, Q=Q)


def job(*, method: str = "FedNMap", n: int, Q: int, eta_a: float, batch: int = BATCH, rounds: int, trial: int) -> Job:
    setting = {"method": method, "n": n, "Q": Q, "eta_a": round(eta_a, 6), "batch": batch, "rounds": rounds}
    return Job({**setting, "trial": trial}, partial(measure, method, n, Q, eta_a, batch, rounds, trial))


def measure(method: str, n: int, Q: int, eta_a: float, batch: int, rounds: int, trial: int) -> list[Record]:
    """|F_nat(x_t)|^2 and f(x_t) along one trial."""
    problem = _problem(n, batch, trial)
    start = problem.start if method == "FedNMap" else PHI.prox(problem.start, GAMMA)
    result = run(
        algorithm(method, Q, eta_a), problem, rounds=rounds, every=EVERY, phi=PHI, measure_gamma=GAMMA, start=start
    )
    return [{name: record[name] for name in ("round", "stationarity", "objective")} for record in result.records]


def _problem(n: int, batch: int, trial: int) -> Network:
    data = _mnist()
    clients = ClientData.split(data.x_train, data.y_train, partition("sorted", data.y_train, n))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(trial)
        module = mlp(784, 10, (HIDDEN,), "sigmoid")
    return Network(module, nn.functional.cross_entropy, clients, batch_size=batch, seed=trial)


@cache
def _mnist() -> Dataset:
    return load("mnist")
