"""FedProx: local SGD held near the server's model.

Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith, Federated Optimization in Heterogeneous Networks, MLSys 2020.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from fednmap.algorithms.hyperparameters import check
from fednmap.algorithms.kernels import LocalSteps
from fednmap.core import Algorithm, FixedPoint, NoState, Oracle, Regularizer, Traits
from fednmap.regularizers import Zero
from fednmap.regularizers.parameters import nonnegative


@dataclass(frozen=True)
class FedProx(Algorithm):
    """FedProx solves min f(x), up to a bias on heterogeneous clients::

        client i:  y = x;  Q times:  y = y - eta_a (g_i(y) + mu (y - x));  send y - x
        server:    x = x + eta_s mean (y_i - x)

    mu: weight of (mu/2) |y - x|^2 in the local problem; mu = 0 is FedAvg.

    >>> FedProx(eta_a=0.1, Q=5, mu=0.1).traits.composite
    False
    """

    phi: Regularizer = field(default_factory=Zero)
    eta_a: float = 0.1
    eta_s: float = 1.0
    Q: int = 10
    local_momentum: float = field(default=0.0, kw_only=True)
    local_decay: float = field(default=1.0, kw_only=True)
    mu: float = 0.01

    traits = Traits(
        composite=False, up=1, down=1, prox="0 + 0", fixed_point=FixedPoint.BIASED, rate="-", server_variable="x"
    )

    class Server(NamedTuple):
        x: Tensor

    class Up(NamedTuple):
        change: Tensor

    def __post_init__(self) -> None:
        check(self, "eta_a", "eta_s", "Q", "local_momentum", "local_decay")
        nonnegative(self, "mu")

    def init(self, start: Tensor) -> tuple[Server, NoState]:
        return self.Server(start), NoState()

    def local(self, down: Server, client: NoState, g: Oracle) -> tuple[Up, NoState]:
        y, step = down.x, LocalSteps(self.eta_a, g, self.local_momentum, self.local_decay)
        for q in range(self.Q):
            y = step.down(y, y, q, self.mu * (y - down.x))
        return self.Up(y - down.x), client

    def aggregate(self, server: Server, up: Up, share: float) -> Server:
        return self.Server(server.x + self.eta_s * up.change)

    def model(self, server: Server) -> Tensor:
        return server.x
