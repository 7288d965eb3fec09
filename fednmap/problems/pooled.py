"""All clients' data in one place, for central methods."""

from __future__ import annotations

import torch
from torch import Tensor

from fednmap.core import Oracle, Problem


class Pooled:
    """The same f as one client: its stochastic gradient is the mean of the clients' at one common point.

    Sees the minibatches that the clients of `problem` would see.
    """

    n = 1

    def __init__(self, problem: Problem) -> None:
        self.problem, self.dim = problem, problem.dim
        self.start = getattr(problem, "start", None)
        weights = getattr(problem, "weights", None)
        self._weights = torch.full((problem.n,), 1 / problem.n, dtype=torch.float64) if weights is None else weights

    def oracle(self, clients: Tensor, t: int) -> Oracle:
        each = self.problem.oracle(torch.arange(self.problem.n), t)

        def g(x: Tensor, q: int) -> Tensor:
            mean: Tensor = torch.tensordot(self._weights.to(x), each(x.reshape(-1), q), dims=([0], [0]))
            return mean.expand(*clients.shape, -1)

        return g

    def loss(self, x: Tensor) -> Tensor:
        return self.problem.loss(x)

    def gradient(self, x: Tensor) -> Tensor:
        return self.problem.gradient(x)
