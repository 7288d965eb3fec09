"""Scaffnew: ProxSkip applied to consensus, communicating at random times.

Mishchenko, Malinovsky, Stich and Richtarik, ProxSkip: Yes! Local Gradient Steps Provably Lead to Communication
Acceleration! Finally!, ICML 2022, Algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fednmap.algorithms.hyperparameters import check
from fednmap.algorithms.kernels import LocalSteps
from fednmap.core import Algorithm, FixedPoint, Oracle, Regularizer, Traits
from fednmap.regularizers import Zero
from fednmap.regularizers.parameters import integer


@dataclass(frozen=True)
class Scaffnew(Algorithm):
    r"""Scaffnew solves $\min f(x)$, exactly on heterogeneous clients.

    $$
    \text{every step}:\quad & \hat x_i = x_i - \eta_a (g_i(x_i) - h_i) \\
    \text{with probability } p:\quad & \bar x = \mean \hat x_i, \quad h_i = h_i + (p/\eta_a) (\bar x - \hat x_i),
        \quad x_i = \bar x \\
    \text{otherwise}:\quad & x_i = \hat x_i
    $$

    All clients share the coin, $p = 1/Q$. One round is the steps up to a communication: their number is geometric with
    mean Q, drawn from (seed, t) and sent by the server. A client moves its h_i with the next broadcast, by
    the eta_a with which its xhat_i was made: that of the round before, where steps follow a schedule.

    >>> Scaffnew(eta_a=0.1, Q=5).traits.full_participation
    True
    """

    phi: Regularizer = field(default_factory=Zero)
    eta_a: float = 0.1
    Q: int = 10
    seed: int = 0

    traits = Traits(
        composite=False, up=1, down=1, prox="0 + 0", fixed_point=FixedPoint.EXACT, rate="-", full_participation=True
    )

    class Server(NamedTuple):
        x: Tensor
        t: Tensor
        eta_a: Tensor

    class Client(NamedTuple):
        xhat: Tensor
        h: Tensor

    class Down(NamedTuple):
        x: Tensor
        steps: Tensor
        eta_a: Tensor

    class Up(NamedTuple):
        xhat: Tensor

    def __post_init__(self) -> None:
        check(self, "eta_a", "Q")
        integer(self, "seed", 0)

    def init(self, start: Tensor) -> tuple[Server, Client]:
        t = torch.zeros((), dtype=torch.int64, device="cpu")
        return self.Server(start, t, self._step()), self.Client(start, torch.zeros_like(start))

    def broadcast(self, server: Server) -> Down:
        steps = np.random.default_rng([self.seed, int(server.t)]).geometric(1 / self.Q)
        return self.Down(server.x, server.t.new_tensor(int(steps)), server.eta_a)

    def local(self, down: Down, client: Client, g: Oracle) -> tuple[Up, Client]:
        h = client.h + (down.x - client.xhat) / (self.Q * down.eta_a)
        x, step = down.x, LocalSteps(self.eta_a, g)
        for q in range(int(down.steps)):
            x = step.down(x, x, q, -h)
        return self.Up(x), self.Client(x, h)

    def aggregate(self, server: Server, up: Up, share: float) -> Server:
        return self.Server(up.xhat, server.t + 1, self._step())

    def _step(self) -> Tensor:
        return torch.tensor(self.eta_a, dtype=torch.float64, device="cpu")
