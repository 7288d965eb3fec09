"""All clients' data in one place, for central methods."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fednmap.core import Oracle, Problem, ProblemInfo, info_of


class Pooled:
    """The same f as one client: its stochastic gradient is the mean of those of all clients, on the same minibatches.

    >>> from fednmap.testing import heterogeneous
    >>> Pooled(heterogeneous()).n
    1
    """

    n = 1

    def __init__(self, problem: Problem) -> None:
        self.problem, self.dim = problem, problem.dim
        info = info_of(problem)
        self.start, weights = info.start, info.weights
        equal = torch.full((problem.n,), 1 / problem.n, dtype=torch.float64, device="cpu")
        self._weights = equal if weights is None else weights
        self.loss, self.gradient = problem.loss, problem.gradient

    def info(self) -> ProblemInfo:
        """Return that of the clients' problem, without what is about single clients."""
        whole = info_of(self.problem)
        return replace(whole, weights=None, chunk=None, exact=self.exact, exact_gradients=None, hessians=None)

    def exact(self) -> Pooled:
        """Return the same with the exact gradient, where the clients' can be had."""
        make = info_of(self.problem).exact
        return self if make is None else Pooled(make())

    def oracle(self, clients: Tensor, t: int) -> Oracle:
        """Return the gradients of round t for `clients`, see `fednmap.core.Problem`."""
        each = self.problem.oracle(torch.arange(self.problem.n, device="cpu"), t)

        def g(x: Tensor, q: int) -> Tensor:
            mean: Tensor = torch.tensordot(self._weights.to(x), each(x.reshape(-1), q), dims=([0], [0]))
            return mean.expand(*clients.shape, -1)

        return g
