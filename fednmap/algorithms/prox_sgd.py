"""Prox-SGD: the central reference, run as one client that holds all data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fednmap.algorithms.hyperparameters import check, weakly_convex
from fednmap.algorithms.kernels import LocalSteps
from fednmap.core import Algorithm, FixedPoint, NoState, Oracle, Regularizer, Traits


@dataclass(frozen=True)
class ProxSGD(Algorithm):
    """Prox-SGD solves min f(x) + phi(x) where all data is in one place; a round is Q steps of::

        x = prox_{eta_a phi}(x - eta_a g(x))

    Run it on `fednmap.problems.Pooled(problem)`. Reference: Beck, First-Order Methods in Optimization, 2017, ch. 10.

    >>> from fednmap.regularizers import L1
    >>> ProxSGD(L1(0.1), eta_a=0.05).traits.central
    True
    """

    phi: Regularizer
    eta_a: float = 0.1
    Q: int = 1

    traits = Traits(composite=True, up=1, down=1, prox="Q + 0", fixed_point=FixedPoint.EXACT, rate="-", central=True)

    class Server(NamedTuple):
        x: Tensor

    class Up(NamedTuple):
        x: Tensor

    def __post_init__(self) -> None:
        check(self, "eta_a", "Q")
        weakly_convex(self, "eta_a", self.eta_a)

    def init(self, start: Tensor) -> tuple[Server, NoState]:
        return self.Server(start), NoState()

    def local(self, down: Server, client: NoState, g: Oracle) -> tuple[Up, NoState]:
        x, step = down.x, LocalSteps(self.eta_a, g)
        for q in range(self.Q):
            x = self.phi.prox(step.down(x, x, q), self.eta_a)
        return self.Up(x), client

    def aggregate(self, server: Server, up: Up, share: float) -> Server:
        return self.Server(up.x)

    def model(self, server: Server) -> Tensor:
        return server.x
