"""FedAdagrad, FedAdam and FedYogi: adaptive optimisers on the server.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar and McMahan, Adaptive Federated Optimization, ICLR 2021,
Algorithm 2.
"""

from __future__ import annotations

from abc import abstractmethod
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
class _Adaptive(Algorithm):
    """What the three have in common; a subclass says how v goes on."""

    phi: Regularizer = field(default_factory=Zero)
    eta_a: float = 0.1
    eta: float = 0.01
    Q: int = 10
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    mu: float = 0.0

    class Server(NamedTuple):
        x: Tensor
        m: Tensor
        v: Tensor

    class Client(NamedTuple):
        pass

    class Down(NamedTuple):
        x: Tensor

    class Up(NamedTuple):
        change: Tensor

    def __post_init__(self) -> None:
        check(self, "eta_a", "eta", "Q", "tau")
        nonnegative(self, "beta1", "beta2", "mu")
        for name in ("beta1", "beta2"):
            if getattr(self, name) >= 1:
                raise InputError(f"{type(self).__name__}: {name} is {getattr(self, name):g}; it must be below 1")
        smooth(self, self.phi)

    @abstractmethod
    def _second(self, v: Tensor, square: Tensor) -> Tensor:
        """v after a round whose mean change has this square."""

    def init(self, start: Tensor) -> tuple[Server, Client]:
        return self.Server(start, torch.zeros_like(start), torch.full_like(start, self.tau**2)), self.Client()

    def broadcast(self, server: Server) -> Down:
        return self.Down(server.x)

    def local(self, down: Down, client: Client, g: Oracle) -> tuple[Up, Client]:
        y, step = down.x, Steps(self.eta_a, g)
        for q in range(self.Q):
            y = step.down(y, y, q, self.mu * (y - down.x)) if self.mu else step.down(y, y, q)
        return self.Up(y - down.x), client

    def aggregate(self, server: Server, up: Up, share: float) -> Server:
        m = self.beta1 * server.m + (1 - self.beta1) * up.change
        v = self._second(server.v, up.change.square())
        return self.Server(server.x + self.eta * m / (v.sqrt() + self.tau), m, v)

    def model(self, server: Server) -> Tensor:
        return server.x


@dataclass(frozen=True)
class FedAdagrad(_Adaptive):
    """FedAdagrad solves min f(x) as FedAvg does, with Adagrad on the server::

        client i:  y = x;  Q times:  y = y - eta_a (g_i(y) + mu (y - x));  send y - x
        server:    d = mean (y_i - x);   m = beta1 m + (1 - beta1) d;   v = v + d^2
                   x = x + eta m / (sqrt(v) + tau)

    eta:  server step, about how far a coordinate moves in a round at most.
    tau:  degree of adaptivity: the smaller the more; v begins at tau^2.
    mu:   pull to the server's model during the local steps, as in FedProx.

    >>> FedAdagrad(eta_a=0.1, Q=5).tau
    0.001
    """

    traits = Traits(composite=False, up=1, down=1, prox="0 + 0", fixed_point=FixedPoint.BIASED, rate="-")

    def _second(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square


@dataclass(frozen=True)
class FedAdam(_Adaptive):
    """FedAdam solves min f(x) as FedAvg does, with Adam on the server::

        client i:  y = x;  Q times:  y = y - eta_a (g_i(y) + mu (y - x));  send y - x
        server:    d = mean (y_i - x);   m = beta1 m + (1 - beta1) d;   v = beta2 v + (1 - beta2) d^2
                   x = x + eta m / (sqrt(v) + tau)

    As published without Adam's correction of the first rounds. Parameters as in `FedAdagrad`.

    >>> FedAdam(eta_a=0.1, Q=5).beta2
    0.99
    """

    traits = Traits(composite=False, up=1, down=1, prox="0 + 0", fixed_point=FixedPoint.BIASED, rate="-")

    def _second(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


@dataclass(frozen=True)
class FedYogi(_Adaptive):
    """FedYogi solves min f(x) as FedAvg does, with Yogi on the server::

        client i:  y = x;  Q times:  y = y - eta_a (g_i(y) + mu (y - x));  send y - x
        server:    d = mean (y_i - x);   m = beta1 m + (1 - beta1) d;   v = v - (1 - beta2) d^2 sign(v - d^2)
                   x = x + eta m / (sqrt(v) + tau)

    Parameters as in `FedAdagrad`.

    >>> FedYogi(eta_a=0.1, Q=5).beta1
    0.9
    """

    traits = Traits(composite=False, up=1, down=1, prox="0 + 0", fixed_point=FixedPoint.BIASED, rate="-")

    def _second(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * torch.sign(v - square)
