"""FedMiD: federated mirror descent.

Yuan, Zaheer and Reddi, Federated Composite Optimization, ICML 2021, Algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from fednmap.algorithms.hyperparameters import check, convex
from fednmap.algorithms.kernels import LocalSteps
from fednmap.core import Algorithm, FixedPoint, NoState, Oracle, Regularizer, Traits


@dataclass(frozen=True)
class FedMiD(Algorithm):
    """FedMiD: local proximal gradient steps, averaging, and a prox on the server; for convex phi::

        client i:  w = w_r;  Q times:  w = prox_{eta_a phi}(w - eta_a g_i(w));  send w - w_r
        server:    w = prox_{eta_s eta_a Q phi}(w_r + eta_s mean (w_i - w_r))

    As published, with the prox on both sides, phi is counted twice: as eta_a falls the method tends to the optimum
    of f + 2 phi. `server_only=True` leaves the prox to the server; what remains is a bias of order eta_a.

    >>> from fednmap.regularizers import L1
    >>> FedMiD(L1(0.1), server_only=True).server_only
    True
    """

    phi: Regularizer
    eta_a: float = 0.1
    eta_s: float = 1.0
    Q: int = 10
    server_only: bool = False

    traits = Traits(
        composite=True,
        up=1,
        down=1,
        prox="Q + 1",
        fixed_point=FixedPoint.OF_F_PLUS_2_PHI,
        rate="-",
    )

    class Server(NamedTuple):
        w: Tensor

    class Up(NamedTuple):
        change: Tensor

    def __post_init__(self) -> None:
        check(self, "eta_a", "eta_s", "Q")
        convex(self)
        if self.server_only:
            object.__setattr__(self, "traits", replace(self.traits, prox="0 + 1", fixed_point=FixedPoint.BIASED))

    def init(self, start: Tensor) -> tuple[Server, NoState]:
        return self.Server(start), NoState()

    def local(self, down: Server, client: NoState, g: Oracle) -> tuple[Up, NoState]:
        w, step = down.w, LocalSteps(self.eta_a, g)
        for q in range(self.Q):
            w = step.down(w, w, q)
            if not self.server_only:
                w = self.phi.prox(w, self.eta_a)
        return self.Up(w - down.w), client

    def aggregate(self, server: Server, up: Up, share: float) -> Server:
        w = server.w + self.eta_s * up.change
        return self.Server(self.phi.prox(w, self.eta_s * self.eta_a * self.Q))

    def model(self, server: Server) -> Tensor:
        return server.w
