"""All clients' data in one place, for central methods."""

from __future__ import annotations

import torch
from torch import Tensor

from fednmap.core import Oracle, Problem, ProblemInfo, declared


class Pooled:
    """The same f as one client: its stochastic gradient is the mean of the clients' at one common point.

    Sees the minibatches that the clients of `problem` would see.
    """

    n = 1

    def __init__(self, problem: Problem) -> None:
        self.problem, self.dim = problem, problem.dim
        said = declared(problem)
        self.start, self.module, self.digest, self.made_of = said.start, said.module, said.digest, said.made_of
        self.part, self.pieces, self.concurrent = said.part, said.pieces, said.concurrent
        self.steps_per_round = said.steps_per_round
        self.smoothness, self.hessian, self.value_and_gradient = said.smoothness, said.hessian, said.value_and_gradient
        self.subsample = said.subsample
        equal = torch.full((problem.n,), 1 / problem.n, dtype=torch.float64, device="cpu")
        self._weights = equal if said.weights is None else said.weights

    def info(self) -> ProblemInfo:
        return ProblemInfo.of(self)

    def exact(self) -> Pooled:
        """The same with the exact gradient, where the clients' can be had."""
        make = declared(self.problem).exact
        return self if make is None else Pooled(make())

    def oracle(self, clients: Tensor, t: int) -> Oracle:
        each = self.problem.oracle(torch.arange(self.problem.n, device="cpu"), t)

        def g(x: Tensor, q: int) -> Tensor:
            mean: Tensor = torch.tensordot(self._weights.to(x), each(x.reshape(-1), q), dims=([0], [0]))
            return mean.expand(*clients.shape, -1)

        return g

    def loss(self, x: Tensor) -> Tensor:
        return self.problem.loss(x)

    def gradient(self, x: Tensor) -> Tensor:
        return self.problem.gradient(x)
