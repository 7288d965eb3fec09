"""FedNMap with memory: quasi-Newton steps on the normal map, from the same uplinks.

The method: Kun Huang, Shi Pu and Karl Henrik Johansson, Achieving Linear Speedup for Composite Federated Learning,
2026. The quasi-Newton steps on the server are this library's own: see `fednmap.algorithms.quasi_newton`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fednmap.algorithms import quasi_newton
from fednmap.algorithms.fednmap import FedNMap
from fednmap.core import Algorithm, FixedPoint, Oracle, Regularizer, Traits
from fednmap.names import InputError
from fednmap.regularizers.parameters import integer


@dataclass(frozen=True)
class FedNMapMemory(Algorithm):
    """FedNMap whose server remembers secants of f and takes quasi-Newton steps on the normal map.

    Clients and uplinks are those of `FedNMap`. With exact gradients some tens of rounds do the work of thousands. Use
    FedNMap for noisy gradients: differences of noise are no curvature.

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

    traits = Traits(
        composite=True,
        up=1,
        down=2,
        prox="Q + 1",
        fixed_point=FixedPoint.EXACT,
        rate="-",
        control_variate="h",
        normal_map=True,
    )

    class Server(NamedTuple):
        z: Tensor
        h: Tensor
        past_z: Tensor
        past_g: Tensor
        best: Tensor
        S: Tensor
        Y: Tensor
        counts: Tensor

    class Down(NamedTuple):
        z: Tensor
        h: Tensor

    class Client(NamedTuple):
        h: Tensor

    class Up(NamedTuple):
        y: Tensor

    def __post_init__(self) -> None:
        plain = FedNMap(self.phi, self.eta_a, self.eta_s, self.Q, self.gamma, self.forget)
        integer(self, "memory", 1)
        if not self.phi.rho < math.inf:
            name = type(self.phi).__name__
            raise InputError(f"FedNMapMemory needs a weakly convex phi, and {name} has rho = inf; use FedNMap")
        object.__setattr__(self, "gamma", plain.gamma)
        object.__setattr__(self, "_plain", plain)

    def init(self, start: Tensor) -> tuple[Server, Client]:
        server, client = self._fednmap.init(start)
        return self.Server(*server, *quasi_newton.empty(start, self.memory)), self.Client(*client)

    def broadcast(self, server: Server) -> Down:
        return self.Down(server.z, server.h)

    def local(self, down: Down, client: Client, g: Oracle) -> tuple[Up, Client]:
        up, new = self._fednmap.local(FedNMap.Server(*down), FedNMap.Client(*client), g)
        return self.Up(*up), self.Client(*new)

    def state_after_sending(self, down: Down, client: Client, up: Up, sent: Up) -> Client:
        plain = FedNMap.Server(*down), FedNMap.Client(*client), FedNMap.Up(*up), FedNMap.Up(*sent)
        return self.Client(*self._fednmap.state_after_sending(*plain))

    def aggregate(self, server: Server, up: Up, share: float) -> Server:
        plain = self._fednmap.aggregate(FedNMap.Server(server.z, server.h), FedNMap.Up(*up), share)
        h, eta_hat = plain.h, self.Q * self.eta_s * self.eta_a
        past = quasi_newton.Past(*server[2:])
        z, past = quasi_newton.next_point(
            self.phi, self.gamma, eta_hat, server.z, up.y, h, past, share, local=self.Q > 1
        )
        return self.Server(z, h, *past)

    def model(self, server: Server) -> Tensor:
        return self._fednmap.model(FedNMap.Server(server.z, server.h))

    def known_gradient(self, before: Server, after: Server) -> tuple[Tensor, Tensor] | None:
        return self._fednmap.known_gradient(FedNMap.Server(*before[:2]), FedNMap.Server(*after[:2]))

    @property
    def _fednmap(self) -> FedNMap:
        """The method without memory, with the same settings."""
        return self._plain  # type: ignore[attr-defined, no-any-return]
