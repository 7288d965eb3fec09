"""Differential privacy of single rows (patients): each site clips and noises its gradients row by row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fednmap.core import Algorithm, Oracle, ProblemInfo, info_of
from fednmap.data.sparse import is_sparse
from fednmap.names import InputError
from fednmap.privacy import accounting
from fednmap.privacy.client_level import SITE, gaussian, without_phi
from fednmap.problems import FiniteSum, Network
from fednmap.regularizers.parameters import nonnegative, plain, positive, wrong
from fednmap.simulation.uplink import Federation, Stage

AT_ONCE_BYTES = 8 << 20  # of gradients, a vector for each row
TRIED = 20  # rounds in which a method's gradients are counted


class PrivateRows:
    r"""The problem with private gradients: all that a site sends hardly depends on any single row.

    In each local step site i draws each row with probability `rate` and takes, with C the `clip` and $\sigma$ the
    `noise_multiplier`,

    $$g_i(x) = \frac{\sum_j g_{ij} \min(1, C / |g_{ij}|) + N(0, (\sigma C)^2 I)}{\text{rate} \cdot N_i},
        \qquad g_{ij} = \nabla \text{loss}(x; \text{row } j).$$

    All that leaves the site is made of these, so every method may run on it, with its corrections, and nothing need be
    forgotten. The sites' sizes $N_i$ are taken as known. `loss` and `gradient`, by which runs are measured, are those
    of the problem itself: they are NOT private, and not for publication.

    problem: of rows; weights of rows and batch normalisation do not go with it.
    seed:    decides coins and noise, with site, round and step. A real site's is its secret.

    >>> from fednmap.problems import LeastSquares
    >>> private = PrivateRows(LeastSquares([(torch.eye(2), torch.ones(2))]), clip=1.0, noise_multiplier=3.0)
    >>> round(private.epsilon(rounds=10, steps=1, delta=1e-5).pld, 1)
    4.7
    """

    exact_gradients = False

    def __init__(
        self, problem: FiniteSum, clip: float, noise_multiplier: float = 0.0, *, rate: float = 1.0, seed: int = 0
    ) -> None:
        self.problem, self.clip, self.noise_multiplier = problem, clip, noise_multiplier
        self.rate, self.seed = rate, seed
        positive(self, "clip")
        nonnegative(self, "noise_multiplier")
        number = plain(self, "rate")
        if number is None or not 0 < number <= 1:
            raise wrong(self, "rate", "above 0 and at most 1")
        if not isinstance(problem, FiniteSum):
            raise InputError(f"PrivateRows clips row by row, and {type(problem).__name__} is not a problem of rows")
        if problem.made_of()["sample_weights"] is not None:
            raise InputError("PrivateRows: every row counts the same; leave sample_weights out")
        if isinstance(problem, Network) and not problem.concurrent:
            raise InputError("PrivateRows needs rows in memory and a module without dropout; give tensors, and eval()")
        if is_sparse(problem.data.x):
            raise InputError("PrivateRows needs dense rows; use to_dense() on the features")
        if problem.data.batch_rows:
            raise InputError(
                "batch normalisation mixes rows, so none can be clipped by itself; use group normalisation, or "
                "freeze it by eval()"
            )
        self.n, self.dim, self.start, self.weights = problem.n, problem.dim, problem.start, problem.weights
        self.loss, self.gradient, self.predict = problem.loss, problem.gradient, problem.predict

    def info(self) -> ProblemInfo:
        """Return that of the problem, without what would give exact gradients or Hessians of the sites."""
        hidden = dict.fromkeys(("exact", "exact_gradients", "steps_per_round", "module", "hessian", "hessians"))
        return replace(info_of(self.problem), made_of=self.made_of, **hidden)

    def made_of(self) -> Mapping[str, Any]:
        """Return what decides f and its gradients, apart from the data."""
        own = {"clip": self.clip, "noise_multiplier": self.noise_multiplier, "rate": self.rate, "noise_seed": self.seed}
        return self.problem.made_of() | own

    def alone(self, i: int) -> PrivateRows:
        """Return the problem of site i alone, with the same draws and noise."""
        return PrivateRows(self.problem.alone(i), self.clip, self.noise_multiplier, rate=self.rate, seed=self.seed)

    def epsilon(self, rounds: int, steps: int, delta: float) -> accounting.Epsilon:
        """Return a row's epsilon after `rounds` rounds of `steps` gradients. A row is at one site only."""
        accounting.check_delta(delta, 1)
        return accounting.epsilon(self.noise_multiplier, self.rate, rounds * steps, delta)

    def oracle(self, clients: Tensor, t: int) -> Oracle:
        """Return the gradients of round t for `clients`, see `fednmap.core.Problem`."""
        ids = clients.reshape(-1).tolist()

        def g(x: Tensor, q: int) -> Tensor:
            points = x.expand(len(ids), -1)
            each = [self._private(i, t, q, point) for i, point in zip(ids, points, strict=True)]
            return torch.stack(each) if clients.ndim else each[0]

        return g

    def _private(self, i: int, t: int, q: int, x: Tensor) -> Tensor:
        a, b = self.problem.data[i]
        site, rows = self.problem.first + i, len(b)
        if self.rate < 1:
            coins = np.random.default_rng((self.seed, SITE, site, t, q, 0)).random(rows)
            drawn = torch.from_numpy(np.flatnonzero(coins < self.rate)).to(b.device)
            a, b = a[drawn], b[drawn]
        total = torch.zeros_like(x)
        step = max(1, min(AT_ONCE_BYTES // (x.element_size() * self.dim), self.problem.rows_at_once()))
        for first in range(0, len(b), step):
            rows_a, rows_b = (v[first : first + step].to(x.dtype if v.is_floating_point() else v.dtype) for v in (a, b))
            # every row as a client with one sample
            points = x.expand(len(rows_b), -1)
            each = self.problem.batch_gradient(points, rows_a.unsqueeze(1), rows_b.unsqueeze(1), 1.0)
            total += torch.matmul(self.clip / each.norm(dim=-1).clamp_min(self.clip), each)
        if self.noise_multiplier:
            total += gaussian(x, self.noise_multiplier * self.clip, self.seed, SITE, site, t, q, 1)
        return total / (self.rate * rows)


@dataclass(frozen=True)
class Counted(Stage):
    """A report of the epsilon of every row during a run, as `uplink` of `run` on a `PrivateRows`.

    steps: gradients of a round, as many as the method's Q.

    >>> from fednmap.testing import heterogeneous
    >>> Counted(PrivateRows(heterogeneous(), clip=1.0, noise_multiplier=3.0), steps=5).delta
    1e-05
    """

    problem: PrivateRows
    steps: int
    delta: float = 1e-5

    def check(self, algorithm: Algorithm, federation: Federation) -> None:
        accounting.check_delta(self.delta, int(self.problem.problem.data.sizes.min()))
        if (asked := gradients_per_round(algorithm)) != self.steps:
            raise InputError(
                f"{type(algorithm).__name__} asks for {asked} gradients per round, and steps is {self.steps}; "
                f"give steps = {asked}"
            )

    def spent(self, federation: Federation, rounds: int) -> dict[str, float]:
        if not self.problem.noise_multiplier:
            return {}
        found = self.problem.epsilon(rounds, self.steps, self.delta)
        return {"epsilon": found.pld, "epsilon_rdp": found.rdp}


def gradients_per_round(algorithm: Algorithm) -> int:
    """Return how often a client asks for a gradient in a round; refused where that changes from round to round."""
    calls: list[int] = []

    def g(x: Tensor, q: int) -> Tensor:
        if q in calls:
            raise InputError(
                f"{type(algorithm).__name__} asks twice for step {q} of a round, whose rows and noise are the same, so "
                "that the difference has none; use FedNMap"
            )
        calls.append(q)
        return torch.zeros_like(x)

    if algorithm.traits.hessians:
        raise InputError(f"{type(algorithm).__name__} takes Hessians, which are not made private; use FedNMap")
    algorithm, counts = without_phi(algorithm), set[int]()
    server, client = algorithm.init(torch.zeros(1, device="cpu"))
    for _ in range(TRIED):
        calls.clear()
        up, client = algorithm.local(algorithm.broadcast(server), client, g)
        server = algorithm.aggregate(server, up, 1.0)
        counts.add(len(calls))
    if len(counts) > 1:
        raise InputError(
            f"{type(algorithm).__name__} takes {min(counts)} to {max(counts)} gradients in a round, at random, and "
            "what it spends is counted for as many in each; use FedNMap, or Q = 1"
        )
    return counts.pop()
