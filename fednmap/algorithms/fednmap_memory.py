"""FedNMap with memory: quasi-Newton steps on the normal map, from the same uplinks.

The method: Kun Huang, Shi Pu and Karl Henrik Johansson, Achieving Linear Speedup for Composite Federated Learning,
2026. The quasi-Newton steps on the server are this library's own: see `fednmap.algorithms.quasi_newton`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from fednmap.algorithms import quasi_newton
from fednmap.algorithms.fednmap import FedNMap
from fednmap.algorithms.hyperparameters import check, prox_step
from fednmap.core import Algorithm, Oracle, Regularizer, State
from fednmap.names import InputError
from fednmap.regularizers.parameters import fraction, integer


@dataclass(frozen=True)
class FedNMapMemory(Algorithm):
    """FedNMap whose server remembers secants of f and takes quasi-Newton steps on the normal map.

    Clients and uplinks are those of `FedNMap`. With exact gradients it takes a fraction of the rounds. Use
    FedNMap for noisy gradients, whose differences are no curvature, and for bounded losses with several local steps.

    memory: secants that the server remembers, 10 to 40 say.
    The other arguments are those of `FedNMap`.

    >>> from fednmap.regularizers import L1
    >>> FedNMapMemory(L1(0.1), eta_a=0.05, Q=10).gamma
    2.0
    """

    phi: Regularizer
    eta_a: float = 0.1
    eta_s: float = 1.0
    Q: int = 10
    gamma: float = None  # type: ignore[assignment]  # given, or set below
    memory: int = 10
    forget: float = 0.0

    traits = replace(FedNMap.traits, rate="-", broadcast_follows=False, server_variable=None)

    class Server(NamedTuple):
        z: Tensor
        h: Tensor
        past_z: Tensor
        past_g: Tensor
        best: Tensor
        S: Tensor
        Y: Tensor
        counts: Tensor

    Down, Client, Up = FedNMap.Server, FedNMap.Client, FedNMap.Up

    def __post_init__(self) -> None:
        check(self, "eta_a", "eta_s", "Q")
        fraction(self, "forget")
        integer(self, "memory", 1)
        if not self.phi.rho < math.inf:
            name = type(self.phi).__name__
            raise InputError(f"FedNMapMemory needs a weakly convex phi, and {name} has rho = inf; use FedNMap")
        prox_step(self, "gamma", 4 * self.eta_a * self.eta_s * self.Q)

    @cached_property
    def _fednmap(self) -> FedNMap:
        """The method without memory."""
        return FedNMap(self.phi, self.eta_a, self.eta_s, self.Q, self.gamma, self.forget)

    def init(self, start: Tensor) -> tuple[Server, FedNMap.Client]:
        server, client = self._fednmap.init(start)
        return self.Server(server.z, server.h, *quasi_newton.empty(start, self.memory)), client

    def broadcast(self, server: Server) -> FedNMap.Server:
        return FedNMap.Server(server.z, server.h)

    def local(self, down: FedNMap.Server, client: FedNMap.Client, g: Oracle) -> tuple[FedNMap.Up, FedNMap.Client]:
        return self._fednmap.local(down, client, g)

    def state_after_sending(self, down: State, client: State, up: State, sent: State) -> FedNMap.Client:
        return self._fednmap.state_after_sending(down, client, up, sent)

    def aggregate(self, server: Server, up: FedNMap.Up, share: float) -> Server:
        h = self._fednmap.aggregate(self.broadcast(server), up, share).h
        past, step = quasi_newton.Past(*server[2:]), self.Q * self.eta_s * self.eta_a
        z, past = quasi_newton.next_point(self.phi, self.gamma, step, server.z, up.y, h, past, share, local=self.Q > 1)
        return self.Server(z, h, *past)

    def known_gradient(self, before: Server, after: Server) -> tuple[Tensor, Tensor] | None:
        return self._fednmap.known_gradient(self.broadcast(before), self.broadcast(after))
