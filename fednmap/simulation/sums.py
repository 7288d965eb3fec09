"""f and its gradient on all data, divided between processes and threads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fednmap.core import Problem, declared
from fednmap.simulation import distributed
from fednmap.simulation.threads import Crew


def divided(problem: Problem, crew: Crew, *, here: bool = False) -> Problem:
    """The problem with its sums over all data in pieces, if it says how; added in the pieces' order.

    here: between the threads of this process alone, also in a process group.
    """
    about, size = declared(problem), 1 if here else distributed.size()
    if about.part is None:
        return problem
    on_cpu = about.start is None or about.start.device.type == "cpu"
    pieces = (about.pieces or 1) if about.concurrent and on_cpu else 1
    return problem if size * pieces == 1 else _Divided(problem, about.part, pieces, size, crew)


class _Divided:
    def __init__(
        self, problem: Problem, part: Callable[[int, int], Problem], pieces: int, size: int, crew: Crew
    ) -> None:
        self.n, self.dim, self.oracle = problem.n, problem.dim, problem.oracle
        self._crew, self._total = crew, distributed.all_sum if size > 1 else list[Tensor]
        rank = distributed.rank() if size > 1 else 0
        self._parts = [part(rank + k * size, pieces * size) for k in range(pieces)]
        said = [declared(part).value_and_gradient for part in self._parts]
        self._together = [both for both in said if both is not None]
        self.value_and_gradient = self._both if len(self._together) == len(self._parts) else None

    def loss(self, x: Tensor) -> Tensor:
        return self._sum(x.new_zeros(()), lambda part: part.loss(x))

    def gradient(self, x: Tensor) -> Tensor:
        return self._sum(torch.zeros_like(x), lambda part: part.gradient(x))

    def _sum(self, total: Tensor, term: Callable[[Problem], Tensor]) -> Tensor:
        self._crew.share(self._parts, term, total.add_)
        return self._total([total])[0]

    def _both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """f and its gradient, each part in one pass over its data."""
        totals = [x.new_zeros(()), torch.zeros_like(x)]

        def add(found: tuple[Tensor, Tensor]) -> None:
            for total, value in zip(totals, found, strict=True):
                total.add_(value)

        self._crew.share(self._together, lambda both: both(x), add)
        loss, gradient = self._total(totals)
        return loss, gradient
