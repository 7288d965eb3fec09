"""The two tabular sets of FLamby as problems: its model, its loss on a minibatch, its minibatches, its metrics.

du Terrail et al., FLamby: Datasets and Benchmarks for Cross-Silo Federated Learning in Realistic Healthcare Settings,
NeurIPS 2022.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.data import DataLoader, TensorDataset

from fednmap.core import Oracle, ProblemInfo
from fednmap.data import ClientData, Dataset, load
from fednmap.data.heart_disease import held_out
from fednmap.problems import GLM, Cox

UPDATES = 100
"""Local steps of a round."""
KEPT_BACK, CUT_SEED = 0.2, 42
"""What is cut from training to choose step sizes by, and the seed of the cut."""

Whole = GLM | Cox


class Score(NamedTuple):
    """A metric on test rows, and its standard error from their number."""

    value: float
    error: float


@dataclass(frozen=True)
class Task:
    """One of the data sets, with what FLamby fixes for it."""

    data: str
    pooled: str
    """The same rows as the pooled test has them."""
    batch: int
    rounds: int
    metric: str
    features: int
    intercept: bool
    whole: Callable[[ClientData, bool], Whole]
    """f on some rows of the clients; True: clients weigh what they hold, else the same."""
    slope: Callable[[Tensor, Tensor, Tensor], Tensor]
    """The derivative of a minibatch's loss in its scores (k, B), by targets (k, B, ...) and weights (k, B)."""
    score: Callable[[Tensor, Tensor], Score]
    """From the scores of test rows and their targets."""
    stratum: Callable[[Tensor], Tensor]
    """The labels by which rows are kept back."""

    @property
    def loaded(self) -> Dataset:
        return _load(self.data)

    def clients(self, rows: Tensor | None = None) -> ClientData:
        """The training rows by client, or some of them."""
        data = self.loaded
        assert data.clients is not None
        mine = torch.ones(len(data.clients), dtype=torch.bool) if rows is None else rows
        parts = [((data.clients == i) & mine).nonzero().squeeze(1) for i in range(len(data.sites))]
        return ClientData.split(data.x_train, data.y_train, parts)

    def kept_back(self) -> Tensor:
        """Which training rows choose the step sizes."""
        data = self.loaded
        assert data.clients is not None
        return held_out(self.stratum(data.y_train), data.clients, KEPT_BACK, CUT_SEED)

    def scores(self, x: Tensor, rows: Tensor) -> Tensor:
        return rows @ x[:-1] + x[-1] if self.intercept else rows @ x

    def mean_metric(self, x: Tensor, clients: ClientData) -> float:
        """The mean of the metric over those clients in whose rows it can be had."""
        each = [self.score(self.scores(x, a), b).value for a, b in clients]
        return float(np.nanmean(each))

    def measure(self, x: Tensor) -> dict[str, float]:
        """The mean of the centres' metrics, each on its own test rows, and the metric of the pooled test."""
        data, pooled = self.loaded, _load(self.pooled)
        assert data.test_clients is not None
        mine = [data.test_clients == i for i in range(len(data.sites))]
        each = [self.score(self.scores(x, data.x_test[rows]), data.y_test[rows]) for rows in mine]
        joint = self.score(self.scores(x, pooled.x_test), pooled.y_test)
        return {
            "mean": float(np.mean([s.value for s in each])),
            "pooled": joint.value,
            "mean_error": float(np.sqrt(np.sum([s.error**2 for s in each])) / len(each)),
            "pooled_error": joint.error,
        }


class Loaded:
    """A task whose minibatches and start are those that a seed gives in FLamby's program.

    Its clients draw from torch's DataLoader, one after another, each going on where it stopped in the round before; so
    all draws of a run are one stream of random numbers, made here in advance.

    rows: which training rows there are; None for all.
    """

    def __init__(self, task: Task, seed: int, rows: Tensor | None = None) -> None:
        data = task.clients(rows)
        self.task, self.whole = task, task.whole(data, True)
        self.n, self.dim, self.weights = self.whole.n, self.whole.dim, self.whole.weights
        self.start = first_model(task.features, task.intercept, seed)
        drawn = draws(tuple(data.sizes.tolist()), task.batch, task.rounds, seed)
        there = drawn >= 0
        places = drawn.clamp_min(0) + data.offsets[:, None, None]
        self._x, self._y = data.x[places], data.y[places].to(data.x.dtype)  # (n, steps, batch, ...)
        if task.intercept:
            self._x = pad(self._x, (0, 1), value=1.0)
        self._weight = (there / there.sum(-1, keepdim=True)).to(data.x.dtype)

    def info(self) -> ProblemInfo:
        return ProblemInfo(start=self.start, weights=self.weights, concurrent=True)

    def oracle(self, clients: Tensor, t: int) -> Oracle:
        def g(x: Tensor, q: int) -> Tensor:
            k = t * UPDATES + q
            a, b, weight = self._x[clients, k], self._y[clients, k], self._weight[clients, k]
            eta = torch.matmul(a, x.unsqueeze(-1)).squeeze(-1)
            return torch.matmul(self.task.slope(eta, b, weight).unsqueeze(-2), a).squeeze(-2)

        return g

    def loss(self, x: Tensor) -> Tensor:
        return self.whole.loss(x)

    def gradient(self, x: Tensor) -> Tensor:
        return self.whole.gradient(x)


def first_model(features: int, intercept: bool, seed: int) -> Tensor:
    """The first values of torch's linear layer after `manual_seed(seed)`: weights, then the intercept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = nn.Linear(features, 1)
    parts = (layer.weight.detach()[0], layer.bias.detach())
    return torch.cat(parts) if intercept else parts[0]


@cache
def draws(sizes: tuple[int, ...], batch: int, rounds: int, seed: int) -> Tensor:
    """Row numbers (clients, rounds * UPDATES, batch), -1 where an epoch's last minibatch is smaller."""
    found = torch.full((len(sizes), rounds * UPDATES, batch), -1)
    with torch.random.fork_rng(devices=[]):
        loaders = [DataLoader(TensorDataset(torch.arange(m)), batch_size=batch, shuffle=True) for m in sizes]
        epochs = [iter(loader) for loader in loaders]
        torch.manual_seed(seed)  # after the first iterators are made, which has drawn from the stream
        for t, i, q in product(range(rounds), range(len(sizes)), range(UPDATES)):
            drawn = next(epochs[i], None)
            if drawn is None:
                epochs[i] = iter(loaders[i])
                drawn = next(epochs[i])
            found[i, t * UPDATES + q, : len(drawn[0])] = drawn[0]
    return found


def logistic_slope(eta: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return (torch.sigmoid(eta) - y) * weight


def cox_slope(eta: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Of the mean over a minibatch of event_j (log(sum of exp(eta_k) over rows k at risk) - eta_j).

    At risk are the rows that come not after j when sorted from the last time to the first: those with a time of their
    own that is later, and of tied ones the ones before. A row of weight 0 is not there.
    """
    there = weight > 0
    order = torch.where(there, -y[..., 0], torch.inf).sort(dim=-1, stable=True).indices
    sorted_eta = torch.where(there, eta, -torch.inf).gather(-1, order)
    event = (y[..., 1] * there).gather(-1, order)
    hazard = torch.log(event) - torch.logcumsumexp(sorted_eta, -1)
    cumulative = torch.logcumsumexp(hazard.flip(-1), -1).flip(-1)
    slope = torch.exp(sorted_eta + cumulative) - event
    return torch.zeros_like(eta).scatter(-1, order, slope) * weight


def accuracy(scores: Tensor, y: Tensor) -> Score:
    """The share of rows on the right side of probability 0.5; the standard error of a share."""
    share = float(((scores > 0) == (y == 1)).double().mean())
    return Score(share, float(np.sqrt(share * (1 - share) / len(y))))


def concordance(scores: Tensor, y: Tensor) -> Score:
    """Harrell's concordance for targets (time, event); the standard error of a jackknife over rows.

    With one event there is no telling what another would have given: the error is then too small.
    """
    time, event = y[:, 0].numpy(), y[:, 1].numpy() == 1
    s = scores.double().numpy()
    later = (time[None] > time[:, None]) | ((time[None] == time[:, None]) & ~event[None])
    pairs = (event[:, None] & later).astype(float)
    right = pairs * ((s[:, None] > s[None]) + 0.5 * (s[:, None] == s[None]))
    total, good = pairs.sum(), right.sum()
    if total == 0:
        return Score(math.nan, math.nan)
    left = total - pairs.sum(0) - pairs.sum(1)  # pairs without row i
    without = (good - right.sum(0) - right.sum(1))[left > 0] / left[left > 0]
    spread = float(((without - without.mean()) ** 2).sum())
    return Score(float(good / total), float(np.sqrt((len(without) - 1) / max(len(without), 1) * spread)))


@cache
def _load(name: str) -> Dataset:
    return load(name)


def _logistic(data: ClientData, by_size: bool) -> GLM:
    return GLM(data, "logistic", intercept=True, weights="samples" if by_size else None)


def _cox(data: ClientData, by_size: bool) -> Cox:
    return Cox(data, ties="breslow", weights="samples" if by_size else None)


HEART = Task(
    data="heart-disease:flamby",
    pooled="heart-disease:flamby-pooled",
    batch=4,
    rounds=15,
    metric="accuracy",
    features=13,
    intercept=True,
    whole=_logistic,
    slope=logistic_slope,
    score=accuracy,
    stratum=lambda y: y,
)
TCGA = Task(
    data="tcga-brca",
    pooled="tcga-brca",
    batch=8,
    rounds=5,
    metric="concordance",
    features=39,
    intercept=False,
    whole=_cox,
    slope=cox_slope,
    score=concordance,
    stratum=lambda y: y[:, 1],
)
TASKS = {"heart": HEART, "tcga": TCGA}
