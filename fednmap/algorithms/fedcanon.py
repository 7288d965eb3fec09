"""FedCanon: corrected local gradient steps, one prox on the server.

Zhou et al., FedCanon: Non-Convex Composite Federated Learning with Efficient Proximal Operation on
Heterogeneous Data, 2025. Reconstructed from the paper's abstract.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from fednmap.algorithms.hyperparameters import check, weakly_convex
from fednmap.algorithms.kernels import Steps
from fednmap.core import Algorithm, FixedPoint, Oracle, Regularizer, Traits
from fednmap.regularizers.parameters import fraction, positive


@dataclass(frozen=True)
class FedCanon(Algorithm):
    """FedCanon solves min f(x) + phi(x) with a single prox per round, up to a bias of order eta_a.

    This box is reconstructed from the abstract of the paper, not from its text. With c_i = h - h_i::

        client i:  z_i = x;  Q times:  z_i = z_i - eta_a (g_i(z_i) + c_i)
                   y_i = (x - z_i) / (eta_a Q), sent;   h_i = y_i - c_i, its mean local gradient
        server:    x = prox_{alpha phi}(x - alpha mean y_i);   h = mean of all h_i

    The clients never apply the prox, so their iterates drift along -h even at the optimum: the bias.

    alpha:  server step, alpha * rho < 1. Default: eta_a eta_s Q, which follows a schedule of eta_a; any other stays.
    forget: c_i = (1 - forget)(h - h_i); 0 is the published method. As in FedNMap.

    >>> from fednmap.regularizers import L1
    >>> FedCanon(L1(0.1), eta_a=0.05, Q=10).alpha
    0.5
    """

    phi: Regularizer
    eta_a: float = 0.1
    eta_s: float = 1.0
    Q: int = 10
    alpha: float = None  # type: ignore[assignment]  # given, or set below
    forget: float = 0.0

    traits = Traits(
        composite=True,
        up=1,
        down=2,
        following=1,
        prox="0 + 1",
        fixed_point=FixedPoint.BIASED,
        rate="psi PL, bounded subgradients: not established",
    )

    class Server(NamedTuple):
        x: Tensor
        h: Tensor

    class Client(NamedTuple):
        h: Tensor

    class Up(NamedTuple):
        y: Tensor

    def __post_init__(self) -> None:
        check(self, "eta_a", "eta_s", "Q")
        fraction(self, "forget")
        if self.alpha is None:
            object.__setattr__(self, "alpha", self._step(self.eta_a))
        positive(self, "alpha")
        weakly_convex(self, "alpha", self.alpha)

    def forgetful(self, forget: float) -> Self:
        return replace(self, forget=forget)

    def stepping(self, eta_a: float) -> Self:
        alpha = self._step(eta_a) if self.alpha == self._step(self.eta_a) else self.alpha
        return replace(self, eta_a=eta_a, alpha=alpha)

    def init(self, start: Tensor) -> tuple[Server, Client]:
        zero = torch.zeros_like(start)
        return self.Server(start, zero), self.Client(zero)

    def local(self, down: Server, client: Client, g: Oracle) -> tuple[Up, Client]:
        x, c, step = down.x, self._correction(down, client), Steps(self.eta_a, g)
        z_i = x
        for q in range(self.Q):
            z_i = step.down(z_i, z_i, q, c)
        y = step.mean(x, z_i, self.Q)
        return self.Up(y), self.Client(y - c)

    def state_after_sending(self, down: Server, client: Client, up: Up, sent: Up) -> Client:
        return self.Client(sent.y - self._correction(down, client))

    def aggregate(self, server: Server, up: Up, share: float) -> Server:
        x, h = server
        return self.Server(self.phi.prox(x - self.alpha * up.y, self.alpha), h + share * (up.y - h))

    def model(self, server: Server) -> Tensor:
        return server.x

    def follow(self, down: Server, up: Up, share: float) -> Server:
        return self.aggregate(down, up, share)

    def known_gradient(self, before: Server, after: Server) -> tuple[Tensor, Tensor] | None:
        return (before.x, after.h) if self.Q == 1 and not self.forget else None

    def _step(self, eta_a: float) -> float:
        """How far the clients go in all, times eta_s."""
        return eta_a * self.eta_s * self.Q

    def _correction(self, down: Server, client: Client) -> Tensor:
        """c_i: fixed during the round."""
        keep = 1 - self.forget
        return torch.sub(keep * down.h, client.h, alpha=keep)
