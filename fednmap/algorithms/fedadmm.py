"""FedADMM: the alternating direction method of multipliers, with partial participation.

Wang, Marella and Anderson, FedADMM: A Federated Primal-Dual Algorithm Allowing Partial Participation, CDC 2022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fednmap.algorithms.hyperparameters import check, default, safe_step, weakly_convex
from fednmap.algorithms.kernels import LocalSteps
from fednmap.core import Algorithm, FixedPoint, Oracle, Regularizer, Traits


@dataclass(frozen=True)
class FedADMM(Algorithm):
    """FedADMM solves min f(x) + phi(x); its fixed point is exact, however roughly the local problems are solved::

        client i:  x_i ~ argmin f_i(x) + <lambda_i, x - xbar> + (beta/2) |x - xbar|^2,
                         by Q times  x_i = x_i - eta_a (g_i(x_i) + lambda_i + beta (x_i - xbar)), from the last x_i
                   lambda_i = lambda_i + beta (x_i - xbar);   xhat_i = x_i + lambda_i / beta, its change is sent
        server:    xtilde = mean of all xhat_i;   xbar = prox_{phi / beta}(xtilde)

    With phi = 0 and everybody present this is FedPD.

    beta: penalty, beta > rho. Default: 1 / (eta_a Q), at least 2 rho.

    >>> from fednmap.regularizers import L1
    >>> FedADMM(L1(0.1), eta_a=0.05, Q=10).beta
    2.0
    """

    phi: Regularizer
    eta_a: float = 0.1
    Q: int = 10
    beta: float = None  # type: ignore[assignment]  # given, or set below

    traits = Traits(composite=True, up=1, down=1, prox="0 + 1", fixed_point=FixedPoint.EXACT, rate="-")

    class Server(NamedTuple):
        xtilde: Tensor
        xbar: Tensor

    class Client(NamedTuple):
        x: Tensor
        lam: Tensor
        xhat: Tensor

    class Down(NamedTuple):
        xbar: Tensor

    class Up(NamedTuple):
        change: Tensor

    def __post_init__(self) -> None:
        check(self, "eta_a", "Q")
        default(self, "beta", 1 / safe_step(self.phi, self.eta_a * self.Q))
        weakly_convex(self, "1 / beta", 1 / self.beta)

    def init(self, start: Tensor) -> tuple[Server, Client]:
        return self.Server(start, start), self.Client(start, torch.zeros_like(start), start)

    def broadcast(self, server: Server) -> Down:
        return self.Down(server.xbar)

    def local(self, down: Down, client: Client, g: Oracle) -> tuple[Up, Client]:
        x, lam, step = client.x, client.lam, LocalSteps(self.eta_a, g)
        for q in range(self.Q):
            x = step.down(x, x, q, lam + self.beta * (x - down.xbar))
        lam = lam + self.beta * (x - down.xbar)
        xhat = x + lam / self.beta
        return self.Up(xhat - client.xhat), self.Client(x, lam, xhat)

    def aggregate(self, server: Server, up: Up, share: float) -> Server:
        xtilde = server.xtilde + share * up.change
        return self.Server(xtilde, self.phi.prox(xtilde, 1 / self.beta))

    def model(self, server: Server) -> Tensor:
        return server.xbar
