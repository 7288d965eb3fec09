"""FedAvgM: momentum on the server.

Hsu, Qi and Brown, Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, 2019.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fednmap.algorithms.fedavg import FedAvg
from fednmap.algorithms.server_optimiser import ServerOptimiser
from fednmap.core import Algorithm, FixedPoint, Regularizer, Traits
from fednmap.names import InputError
from fednmap.regularizers.parameters import nonnegative


@dataclass(frozen=True)
class FedAvgM(ServerOptimiser):
    """FedAvgM is a method with momentum on the server; as published, FedAvg::

        clients:  as in the method `of`
        server:   y = where the method would go from x;   m' = beta m + (y - x);   x = x + m' = y + beta m

    of:   the method, FedAvg if none is given: also FedProx, SCAFFOLD, FedNMap (whose z is moved), CompressedFedNMap.
    beta: momentum, in [0, 1); 0 is the method itself.
    phi, eta_a, eta_s, Q: those of the method, unless they are given here.

    For FedAvg, y - x is eta_s times the mean change of the clients' models. Momentum makes steps of eta_s / (1 - beta)
    in the long run. A method that ends exactly does so with momentum too.

    >>> from fednmap.algorithms import SCAFFOLD
    >>> FedAvgM(of=SCAFFOLD(eta_a=0.1, Q=5)).traits.fixed_point.value
    'exact'
    """

    phi: Regularizer = None  # type: ignore[assignment]  # given, or the method's; as the next three
    eta_a: float = None  # type: ignore[assignment]
    eta_s: float = None  # type: ignore[assignment]
    Q: int = None  # type: ignore[assignment]
    beta: float = 0.9
    of: Algorithm = field(default_factory=FedAvg)

    traits = Traits(composite=False, up=1, down=1, prox="0 + 0", fixed_point=FixedPoint.BIASED, rate="-")  # of FedAvg
    kept = ("m",)

    def __post_init__(self) -> None:
        super().__post_init__()
        nonnegative(self, "beta")
        if self.beta >= 1:
            raise InputError(f"FedAvgM: beta is {self.beta:g}; momentum must be below 1")

    def begin(self, x: Tensor) -> tuple[Tensor, ...]:
        return (torch.zeros_like(x),)

    def step(self, x: Tensor, y: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        (m,) = kept
        return y + self.beta * m, self.beta * m + (y - x)
