"""What FedNMap, Zhang's method and FedCanon share: corrections h - h_i that cost one vector up, under sampling too."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fednmap.core import Algorithm, FixedPoint, Traits


class ControlVariate(Algorithm):
    """A client keeps h_i, its last mean local gradient; the server keeps h, the mean of all of them.

    The uplink is y_i = (start - end) / (eta_a Q) of the local steps: h_i and what is fixed during the round. The
    server's state has a field h, which starts at 0. h_i is built from what was sent, so both sides agree on it.
    """

    Q: int
    forget: float
    traits = Traits(
        composite=True,
        up=1,
        down=2,
        broadcast_follows=True,
        control_variate="h",
        prox="Q + 1",
        fixed_point=FixedPoint.EXACT,
        rate="-",
    )
    Server: ClassVar[type[Any]]

    class Client(NamedTuple):
        h: Tensor

    class Up(NamedTuple):
        y: Tensor

    def init(self, start: Tensor) -> tuple[Any, Client]:
        zero = torch.zeros_like(start)
        return self.Server(start, zero), self.Client(zero)

    def direction(self, down: Any, client: Client) -> Tensor:
        """Return what is added to every gradient of the round: c_i = (1 - forget)(h - h_i)."""
        correction: Tensor = (1 - self.forget) * (down.h - client.h)
        return correction

    def state_after_sending(self, down: Any, client: Client, up: Up, sent: Up) -> Client:
        return self.Client(sent.y - self.direction(down, client))

    def known_gradient(self, before: Any, after: Any) -> tuple[Tensor, Tensor] | None:
        """Return x and h if Q = 1: the mean local gradient is then grad f(x)."""
        return (self.model(before), after.h) if self.Q == 1 and not self.forget else None
