"""FedPD: a primal-dual method for smooth federated learning.

Zhang, Hong, Dhople, Yin and Liu, FedPD: A Federated Learning Framework with Adaptivity to Non-IID Data, IEEE
Transactions on Signal Processing 2021; communication in every round.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fednmap.algorithms.hyperparameters import check, default
from fednmap.algorithms.kernels import LocalSteps
from fednmap.core import Algorithm, FixedPoint, Oracle, Regularizer, Traits
from fednmap.regularizers import Zero


@dataclass(frozen=True)
class FedPD(Algorithm):
    """FedPD solves min f(x), exactly on heterogeneous clients::

        client i:  Q times:  x_i = x_i - eta_a (g_i(x_i) + lambda_i + (x_i - x_0)/r), from its last x_i
                   lambda_i = lambda_i + (x_i - x_0)/r;   send x_i + r lambda_i
        server:    x_0 = mean (x_i + r lambda_i)

    r: the paper's eta. Default: eta_a Q.

    >>> FedPD(eta_a=0.05, Q=10).r
    0.5
    """

    phi: Regularizer = field(default_factory=Zero)
    eta_a: float = 0.1
    Q: int = 10
    r: float = None  # type: ignore[assignment]  # given, or set below

    traits = Traits(
        composite=False, up=1, down=1, prox="0 + 0", fixed_point=FixedPoint.EXACT, rate="-", full_participation=True
    )

    class Server(NamedTuple):
        x: Tensor

    class Client(NamedTuple):
        x: Tensor
        lam: Tensor

    class Up(NamedTuple):
        x: Tensor

    def __post_init__(self) -> None:
        check(self, "eta_a", "Q")
        default(self, "r", self.eta_a * self.Q)

    def init(self, start: Tensor) -> tuple[Server, Client]:
        return self.Server(start), self.Client(start, torch.zeros_like(start))

    def local(self, down: Server, client: Client, g: Oracle) -> tuple[Up, Client]:
        x, lam = client
        step = LocalSteps(self.eta_a, g)
        for q in range(self.Q):
            x = step.down(x, x, q, lam + (x - down.x) / self.r)
        lam = lam + (x - down.x) / self.r
        return self.Up(x + self.r * lam), self.Client(x, lam)

    def aggregate(self, server: Server, up: Up, share: float) -> Server:
        return self.Server(up.x)

    def model(self, server: Server) -> Tensor:
        return server.x
