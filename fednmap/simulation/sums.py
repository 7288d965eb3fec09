"""f and its gradient on all data, divided between processes and threads."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fednmap.core import Problem, ProblemInfo, info_of
from fednmap.simulation import distributed
from fednmap.simulation.client_groups import TreeSum
from fednmap.simulation.threads import ThreadPool, one_thread


def divided(problem: Problem, pool: ThreadPool, *, here: bool = False) -> Problem:
    """Return the problem with its sums over all data in pieces, if it says how; added in the pieces' order.

    here: between the threads of this process alone, also in a process group.
    """
    about, size = info_of(problem), 1 if here else distributed.size()
    if about.part is None:
        return problem
    on_cpu = about.start is None or about.start.device.type == "cpu"
    pieces = about.pieces or size  # else every process has one part
    alone = ThreadPool(1) if not about.concurrent or not on_cpu else pool
    return problem if pieces == 1 and size == 1 else _Divided(problem, about.part, pieces, here or size == 1, alone)


class _Divided:
    def __init__(
        self, problem: Problem, part: Callable[[int, int], Problem], pieces: int, here: bool, pool: ThreadPool
    ) -> None:
        self.n, self.dim, self.oracle = problem.n, problem.dim, problem.oracle
        self._pool, self._pieces, self._here = pool, pieces, here
        self._parts = [(k, part(k, pieces)) for k in (range(pieces) if here else distributed.share(pieces))]
        self._problem = problem

    def info(self) -> ProblemInfo:
        about = info_of(self._problem)
        smaller = about.subsample
        return ProblemInfo(
            value_and_gradient=None if about.value_and_gradient is None else self._both,
            subsample=None if smaller is None else lambda: divided(smaller(), self._pool, here=self._here),
        )

    def loss(self, x: Tensor) -> Tensor:
        return self._sum([x.new_zeros(())], lambda part: [part.loss(x)])[0]

    def gradient(self, x: Tensor) -> Tensor:
        return self._sum([x], lambda part: [part.gradient(x)])[0]

    def _both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """f and its gradient, each part in one pass over its data."""

        def both(part: Problem) -> list[Tensor]:
            asked = info_of(part).value_and_gradient
            assert asked is not None  # a part is of the problem's own kind
            return list(asked(x))

        loss, gradient = self._sum([x.new_zeros(()), x], both)
        return loss, gradient

    def _sum(self, like: list[Tensor], terms: Callable[[Problem], list[Tensor]]) -> list[Tensor]:
        tree = TreeSum(self._pieces, like, alone=self._here)
        with one_thread():
            with self._pool.map_in_order(lambda piece: (piece[0], terms(piece[1])), self._parts) as results:
                for k, values in results:
                    tree.add(k, values)
            return tree.total()
