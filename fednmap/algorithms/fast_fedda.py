"""Fast-FedDA: dual averaging for strongly convex losses.

Bao, Crawshaw, Luo and Liu, Fast Composite Optimization and Statistical Recovery in Federated Learning, ICML 2022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fednmap.algorithms.hyperparameters import check, convex, default
from fednmap.core import Algorithm, FixedPoint, NoState, Oracle, Regularizer, Traits


@dataclass(frozen=True)
class FastFedDA(Algorithm):
    r"""Fast-FedDA solves $\min f(x) + \phi(x)$ for $\mu$-strongly convex $f$ and convex $\phi$, exactly as t grows.

    All gradients and all iterates so far are summed, with equal weights, $A$ of them. A step is

    $$
    w(G, W, A) &= \arg\min_w \langle G, w \rangle + A \phi(w) + \tfrac{\mu}{4} \textstyle\sum_j |w - w_j|^2
        + \tfrac{\gamma}{2} |w - w_0|^2 \\
    &= \prox_{(A/b) \phi}((\gamma w_0 + \tfrac{\mu}{2} W - G) / b),
        \qquad b = \gamma + A \mu/2, \quad W = \textstyle\sum_j w_j
    $$

    A client takes Q times $G = G + g_i(w)$, $W = W + w$, $A = A + 1$, $w = w(G, W, A)$; the server averages G and W.
    Each iterate enters W once. The messages hold $G - \gamma w_0$ in place of G, so that $w_0$ need not be sent.

    mu:    strong convexity of f.
    gamma: weight of the start; 1 / gamma is the first step. Default: 1 / eta_a.

    >>> from fednmap.regularizers import L1
    >>> FastFedDA(L1(0.1), mu=0.5, eta_a=0.1).gamma
    10.0
    """

    phi: Regularizer
    eta_a: float = 0.1
    Q: int = 10
    mu: float = 0.01
    gamma: float = None  # type: ignore[assignment]  # given, or set below

    traits = Traits(
        composite=True,
        up=2,
        down=2,
        prox="Q + 1",
        fixed_point=FixedPoint.EXACT_IN_THE_LIMIT,
        rate="f strongly convex, bounded iterates: O~(s2/T + Q^2 (zeta^2 + B^2)/T^2)",
        steps_may_change=False,
    )

    class Server(NamedTuple):
        G: Tensor
        W: Tensor
        A: Tensor

    class Up(NamedTuple):
        G: Tensor
        W: Tensor

    def __post_init__(self) -> None:
        check(self, "eta_a", "Q", "mu")
        default(self, "gamma", 1 / self.eta_a)
        convex(self)

    def init(self, start: Tensor) -> tuple[Server, NoState]:
        none = torch.zeros((), dtype=start.dtype, device="cpu")  # where it is read in every step
        return self.Server(-self.gamma * start, torch.zeros_like(start), none), NoState()

    def local(self, down: Server, client: NoState, g: Oracle) -> tuple[Up, NoState]:
        G, W, A = down
        w = self._step(G, W, A)
        for q in range(self.Q):
            G, W, A = G + g(w, q), W + w, A + 1
            w = self._step(G, W, A)
        return self.Up(G, W), client

    def aggregate(self, server: Server, up: Up, share: float) -> Server:
        return self.Server(up.G, up.W, server.A + self.Q)

    def model(self, server: Server) -> Tensor:
        return self._step(*server)

    def _step(self, G: Tensor, W: Tensor, A: Tensor) -> Tensor:
        b = self.gamma + A * self.mu / 2
        return self.phi.prox((self.mu / 2 * W - G) / b, A / b)
