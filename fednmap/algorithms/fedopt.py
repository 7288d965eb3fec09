"""FedAdagrad, FedAdam and FedYogi: adaptive optimisers on the server.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar and McMahan, Adaptive Federated Optimization, ICLR 2021,
Algorithm 2.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fednmap.algorithms.fedavg import FedAvg
from fednmap.algorithms.server_optimiser import ServerOptimiser
from fednmap.core import Algorithm, FixedPoint, Regularizer, Traits
from fednmap.names import InputError
from fednmap.regularizers.parameters import nonnegative, positive


@dataclass(frozen=True)
class _Adaptive(ServerOptimiser):
    """What the three have in common; a subclass says how v goes on."""

    phi: Regularizer = None  # type: ignore[assignment]  # given, or the method's; as the next three
    eta_a: float = None  # type: ignore[assignment]
    eta_s: float = None  # type: ignore[assignment]
    Q: int = None  # type: ignore[assignment]
    eta: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    of: Algorithm = field(default_factory=FedAvg)

    kept = ("m", "v")

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "eta", "tau")
        nonnegative(self, "beta1", "beta2")
        for name in ("beta1", "beta2"):
            if getattr(self, name) >= 1:
                raise InputError(f"{type(self).__name__}: {name} is {getattr(self, name):g}; it must be below 1")

    @abstractmethod
    def _second(self, v: Tensor, square: Tensor) -> Tensor:
        """v after a round in which d has this square."""

    def begin(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.zeros_like(x), torch.full_like(x, self.tau**2)

    def step(self, x: Tensor, y: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        (m, v), d = kept, y - x
        m = self.beta1 * m + (1 - self.beta1) * d
        v = self._second(v, d.square())
        return x + self.eta * m / (v.sqrt() + self.tau), m, v


@dataclass(frozen=True)
class FedAdagrad(_Adaptive):
    """FedAdagrad is a method with Adagrad on the server; as published, FedAvg::

        clients:  as in the method `of`
        server:   d = y - x, where the method would go from x to y
                  m = beta1 m + (1 - beta1) d;   v = v + d^2;   x = x + eta m / (sqrt(v) + tau)

    of:  the method, FedAvg if none is given: also FedProx, SCAFFOLD, FedNMap (whose z is moved), CompressedFedNMap.
    eta: server step, about how far a coordinate moves in a round at most.
    tau: degree of adaptivity: the smaller the more; v begins at tau^2.
    phi, eta_a, eta_s, Q: those of the method, unless they are given here.

    For FedAvg with eta_s = 1, d is the mean change of the clients' models, as published.

    >>> FedAdagrad(eta_a=0.1, Q=5).tau
    0.001
    """

    traits = Traits(composite=False, up=1, down=1, prox="0 + 0", fixed_point=FixedPoint.BIASED, rate="-")  # of FedAvg

    def _second(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square


@dataclass(frozen=True)
class FedAdam(_Adaptive):
    """FedAdam is a method with Adam on the server; as published, FedAvg::

        clients:  as in the method `of`
        server:   d = y - x, where the method would go from x to y
                  m = beta1 m + (1 - beta1) d;   v = beta2 v + (1 - beta2) d^2;   x = x + eta m / (sqrt(v) + tau)

    As published without Adam's correction of the first rounds. Parameters as in `FedAdagrad`.

    >>> from fednmap.algorithms import FedNMap
    >>> from fednmap.regularizers import L1
    >>> FedAdam(of=FedNMap(L1(0.1), eta_a=0.1, Q=5)).traits.composite
    True
    """

    traits = Traits(composite=False, up=1, down=1, prox="0 + 0", fixed_point=FixedPoint.BIASED, rate="-")  # of FedAvg

    def _second(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


@dataclass(frozen=True)
class FedYogi(_Adaptive):
    """FedYogi is a method with Yogi on the server; as published, FedAvg::

        clients:  as in the method `of`
        server:   d = y - x, where the method would go from x to y
                  m = beta1 m + (1 - beta1) d;   v = v - (1 - beta2) d^2 sign(v - d^2)
                  x = x + eta m / (sqrt(v) + tau)

    Parameters as in `FedAdagrad`.

    >>> FedYogi(eta_a=0.1, Q=5).beta1
    0.9
    """

    traits = Traits(composite=False, up=1, down=1, prox="0 + 0", fixed_point=FixedPoint.BIASED, rate="-")  # of FedAvg

    def _second(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * torch.sign(v - square)
