"""f and its gradient on all data, divided between processes and threads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fednmap.core import Problem, declared
from fednmap.simulation import distributed
from fednmap.simulation.threads import Crew


def divided(problem: Problem, crew: Crew) -> Problem:
    """The problem with its sums over all data in pieces, if it says how; added in the pieces' order."""
    about = declared(problem)
    if about.part is None:
        return problem
    pieces = (about.pieces or 1) if about.concurrent else 1
    return problem if distributed.size() * pieces == 1 else _Divided(problem, about.part, pieces, crew)


class _Divided:
    def __init__(self, problem: Problem, part: Callable[[int, int], Problem], pieces: int, crew: Crew) -> None:
        self.n, self.dim, self.oracle = problem.n, problem.dim, problem.oracle
        self._crew, rank, size = crew, distributed.rank(), distributed.size()
        self._parts = [part(rank + k * size, pieces * size) for k in range(pieces)]

    def loss(self, x: Tensor) -> Tensor:
        return self._sum(x.new_zeros(()), lambda part: part.loss(x))

    def gradient(self, x: Tensor) -> Tensor:
        return self._sum(torch.zeros_like(x), lambda part: part.gradient(x))

    def _sum(self, total: Tensor, term: Callable[[Problem], Tensor]) -> Tensor:
        self._crew.share(self._parts, term, total.add_)
        return distributed.all_sum([total])[0]
