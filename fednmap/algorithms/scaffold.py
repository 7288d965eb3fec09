"""SCAFFOLD: local SGD corrected by control variates.

Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, SCAFFOLD: Stochastic Controlled Averaging for Federated
Learning, ICML 2020; Algorithm 1 with option II for the control variates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fednmap.algorithms.hyperparameters import check
from fednmap.algorithms.kernels import LocalSteps, plain_steps
from fednmap.core import Algorithm, FixedPoint, Oracle, Regularizer, Traits
from fednmap.regularizers import Zero
from fednmap.regularizers.parameters import fraction


@dataclass(frozen=True, repr=False)
class SCAFFOLD(Algorithm):
    r"""SCAFFOLD solves $\min f(x)$, exactly on heterogeneous clients.

    $$
    \text{client } i:\quad & y_i = x, \text{ then } Q \text{ times } y_i = y_i - \eta_a (g_i(y_i) - c_i + c) \\
    & c_i' = c_i - c + (x - y_i) / (\eta_a Q); \quad y_i - x \text{ and } c_i' - c_i \text{ are sent} \\
    \text{server}:\quad & x = x + \eta_s \mean (y_i - x), \qquad c = \mean c_i
    $$

    The iterates are those of FedNMap with $\phi = 0$, which sends one vector up instead of the two published.

    forget: 0 is the published method. Noise that the server adds to $\mean (c_i' - c_i)$, for privacy, adds up in
            c - mean c_i; with forget the clients send $c_i' - (1 - \text{forget}) c_i$, the server forgets as much of
            c, and the noise does not stay. The local steps are as published.

    local_momentum, local_decay: options of the local steps, as in FedAvg, of the corrected gradient. c_i' is then the
            mean of the round's gradients with the weights that they have in y; the fixed point stays exact.

    >>> SCAFFOLD(eta_a=0.1, Q=5).traits.up
    2
    """

    phi: Regularizer = field(default_factory=Zero)
    eta_a: float = 0.1
    eta_s: float = 1.0
    Q: int = 10
    forget: float = 0.0
    local_momentum: float = field(default=0.0, kw_only=True)
    local_decay: float = field(default=1.0, kw_only=True)

    traits = Traits(
        composite=False,
        up=2,
        down=2,
        prox="0 + 0",
        fixed_point=FixedPoint.EXACT,
        rate="f nonconvex: O(sqrt(s2/(nQT)) + 1/T)",
        control_variate="c",
        server_variable="x",
    )

    class Server(NamedTuple):
        x: Tensor
        c: Tensor

    class Client(NamedTuple):
        c: Tensor

    class Up(NamedTuple):
        change: Tensor
        control: Tensor

    def __post_init__(self) -> None:
        check(self, "eta_a", "eta_s", "Q", "local_momentum", "local_decay")
        fraction(self, "forget")

    def init(self, start: Tensor) -> tuple[Server, Client]:
        zero = torch.zeros_like(start)
        return self.Server(start, zero), self.Client(zero)

    def local(self, down: Server, client: Client, g: Oracle) -> tuple[Up, Client]:
        x, d, step = down.x, down.c - client.c, LocalSteps(self.eta_a, g, self.local_momentum, self.local_decay)
        y = x
        for q in range(self.Q):
            y = step.down(y, y, q, d)
        change = y - x
        c = step.mean(x, y, plain_steps(self.Q, self.local_momentum, self.local_decay)) - d
        return self.Up(change, torch.sub(c, client.c, alpha=1 - self.forget)), self.Client(c)

    def state_after_sending(self, down: Server, client: Client, up: Up, sent: Up) -> Client:
        return self.Client((1 - self.forget) * client.c + sent.control)

    def aggregate(self, server: Server, up: Up, share: float) -> Server:
        return self.Server(server.x + self.eta_s * up.change, (1 - share * self.forget) * server.c + share * up.control)

    def known_gradient(self, before: Server, after: Server) -> tuple[Tensor, Tensor] | None:
        return (before.x, after.c) if self.Q == 1 and not self.forget else None
