"""FedDR: randomized Douglas-Rachford splitting.

Tran-Dinh, Pham, Phan and Nguyen, FedDR: Randomized Douglas-Rachford Splitting Algorithms for Nonconvex Federated
Composite Optimization, NeurIPS 2021, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fednmap.algorithms.hyperparameters import check, prox_step
from fednmap.algorithms.kernels import LocalSteps
from fednmap.core import Algorithm, FixedPoint, Oracle, Regularizer, Traits
from fednmap.names import InputError


@dataclass(frozen=True)
class FedDR(Algorithm):
    """FedDR solves min f(x) + phi(x); its fixed point is exact, however roughly the local problems are solved::

        client i:  y_i = y_i + alpha (xbar - x_i)
                   x_i ~ argmin f_i(x) + |x - y_i|^2 / (2 r), by Q times  x_i = x_i - eta_a (g_i(x_i) + (x_i - y_i)/r)
                   xhat_i = 2 x_i - y_i;   send the change of xhat_i
        server:    xtilde = mean of all xhat_i;   xbar = prox_{r phi}(xtilde)

    The local solve starts where the last one ended.

    r:     the paper's eta, r * rho < 1. Default: eta_a Q, at most 0.5 / rho.
    alpha: relaxation in (0, 2); the paper uses 1.95.

    >>> from fednmap.regularizers import L1
    >>> FedDR(L1(0.1), eta_a=0.05, Q=10).r
    0.5
    """

    phi: Regularizer
    eta_a: float = 0.1
    Q: int = 10
    r: float = None  # type: ignore[assignment]  # given, or set below
    alpha: float = 1.95

    traits = Traits(composite=True, up=1, down=1, prox="0 + 1", fixed_point=FixedPoint.EXACT, rate="-")

    class Server(NamedTuple):
        xtilde: Tensor
        xbar: Tensor

    class Client(NamedTuple):
        y: Tensor
        x: Tensor
        xhat: Tensor

    class Down(NamedTuple):
        xbar: Tensor

    class Up(NamedTuple):
        change: Tensor

    def __post_init__(self) -> None:
        check(self, "eta_a", "Q", "alpha")
        if self.alpha >= 2:
            raise InputError(f"FedDR: alpha is {self.alpha}; the relaxation must be in (0, 2)")
        prox_step(self, "r", self.eta_a * self.Q)

    def init(self, start: Tensor) -> tuple[Server, Client]:
        return self.Server(start, start), self.Client(start, start, start)

    def broadcast(self, server: Server) -> Down:
        return self.Down(server.xbar)

    def local(self, down: Down, client: Client, g: Oracle) -> tuple[Up, Client]:
        y = client.y + self.alpha * (down.xbar - client.x)
        x, step = client.x, LocalSteps(self.eta_a, g)
        for q in range(self.Q):
            x = step.down(x, x, q, (x - y) / self.r)
        xhat = 2 * x - y
        return self.Up(xhat - client.xhat), self.Client(y, x, xhat)

    def aggregate(self, server: Server, up: Up, share: float) -> Server:
        xtilde = server.xtilde + share * up.change
        return self.Server(xtilde, self.phi.prox(xtilde, self.r))

    def model(self, server: Server) -> Tensor:
        return server.xbar
