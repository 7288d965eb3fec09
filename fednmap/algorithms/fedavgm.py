"""FedAvgM: FedAvg with momentum on the server.

Hsu, Qi and Brown, Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, 2019.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fednmap.algorithms.hyperparameters import check, smooth
from fednmap.algorithms.kernels import Steps
from fednmap.core import Algorithm, FixedPoint, Oracle, Regularizer, Traits
from fednmap.names import InputError
from fednmap.regularizers import Zero
from fednmap.regularizers.parameters import nonnegative


@dataclass(frozen=True)
class FedAvgM(Algorithm):
    """FedAvgM solves min f(x) as FedAvg does, with momentum on the server::

        client i:  y = x;  Q times:  y = y - eta_a (g_i(y) + mu (y - x));  send y - x
        server:    m = beta m + mean (y_i - x);   x = x + eta_s m

    beta: momentum, in [0, 1). With beta = 0 this is FedAvg, with mu > 0 FedProx.
    mu:   pull to the server's model during the local steps, as in FedProx.

    Momentum makes a step of eta_s / (1 - beta) of the plain one in the long run.

    >>> FedAvgM(eta_a=0.1, Q=5).beta
    0.9
    """

    phi: Regularizer = field(default_factory=Zero)
    eta_a: float = 0.1
    eta_s: float = 1.0
    Q: int = 10
    beta: float = 0.9
    mu: float = 0.0

    traits = Traits(composite=False, up=1, down=1, prox="0 + 0", fixed_point=FixedPoint.BIASED, rate="-")

    class Server(NamedTuple):
        x: Tensor
        m: Tensor

    class Client(NamedTuple):
        pass

    class Down(NamedTuple):
        x: Tensor

    class Up(NamedTuple):
        change: Tensor

    def __post_init__(self) -> None:
        check(self, "eta_a", "eta_s", "Q")
        nonnegative(self, "beta", "mu")
        if self.beta >= 1:
            raise InputError(f"FedAvgM: beta is {self.beta:g}; momentum must be below 1")
        smooth(self, self.phi)

    def init(self, start: Tensor) -> tuple[Server, Client]:
        return self.Server(start, torch.zeros_like(start)), self.Client()

    def broadcast(self, server: Server) -> Down:
        return self.Down(server.x)

    def local(self, down: Down, client: Client, g: Oracle) -> tuple[Up, Client]:
        y, step = down.x, Steps(self.eta_a, g)
        for q in range(self.Q):
            y = step.down(y, y, q, self.mu * (y - down.x)) if self.mu else step.down(y, y, q)
        return self.Up(y - down.x), client

    def aggregate(self, server: Server, up: Up, share: float) -> Server:
        m = self.beta * server.m + up.change
        return self.Server(server.x + self.eta_s * m, m)

    def model(self, server: Server) -> Tensor:
        return server.x
