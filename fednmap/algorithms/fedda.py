"""FedDA, FedMiD and Fast-FedDA: federated dual averaging and federated mirror descent.

Yuan, Zaheer and Reddi, Federated Composite Optimization, ICML 2021, Algorithms 3 (FedDualAvg) and 2. Bao, Crawshaw, Luo
and Liu, Fast Composite Optimization and Statistical Recovery in Federated Learning, ICML 2022.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fednmap.algorithms.hyperparameters import check, convex, default
from fednmap.algorithms.kernels import LocalSteps
from fednmap.core import Algorithm, FixedPoint, NoState, Oracle, Regularizer, Traits


@dataclass(frozen=True)
class FedDA(Algorithm):
    r"""FedDA solves $\min f(x) + \phi(x)$ for convex $\phi$, up to a bias of order $\eta_a$ on heterogeneous clients.

    The clients' dual states are averaged; the prox weight $s$ is the sum of all steps so far, 0 at first.

    $$
    \text{client } i:\quad & z_i = z, \text{ then for } q = 0, \dots, Q-1: \\
    & z_i = z_i - \eta_a g_i(\prox_{(s + \eta_a q) \phi}(z_i)) \\
    \text{server}:\quad & z = z + \eta_s \mean (z_i - z), \quad s = s + \eta_s \eta_a Q \\
    \text{model}:\quad & x = \prox_{s \phi}(z)
    $$

    The published s is $\eta_s \eta_a Q r$ in round r: the same, where eta_a does not change from round to round.

    >>> from fednmap.regularizers import L1
    >>> FedDA(L1(0.1), eta_a=0.05, Q=10).traits.up
    1
    """

    phi: Regularizer
    eta_a: float = 0.1
    eta_s: float = 1.0
    Q: int = 10

    traits = Traits(
        composite=True,
        up=1,
        down=1,
        prox="Q + 1",
        fixed_point=FixedPoint.BIASED,
        rate="f convex, quadratic: O(sqrt(s2/(nQT)) + (zeta^(2/3) + s^(2/3)/Q^(1/3))/T^(2/3))",
    )

    class Server(NamedTuple):
        z: Tensor
        s: Tensor

    class Up(NamedTuple):
        change: Tensor

    def __post_init__(self) -> None:
        check(self, "eta_a", "eta_s", "Q")
        convex(self)

    def init(self, start: Tensor) -> tuple[Server, NoState]:
        return self.Server(start, torch.zeros((), dtype=torch.float64, device="cpu")), NoState()

    def local(self, down: Server, client: NoState, g: Oracle) -> tuple[Up, NoState]:
        z_i, step = down.z, LocalSteps(self.eta_a, g)
        for q in range(self.Q):
            z_i = step.down(z_i, self.phi.prox(z_i, down.s + self.eta_a * q), q)
        return self.Up(z_i - down.z), client

    def aggregate(self, server: Server, up: Up, share: float) -> Server:
        return self.Server(server.z + self.eta_s * up.change, server.s + self.eta_s * self.eta_a * self.Q)

    def model(self, server: Server) -> Tensor:
        return self.phi.prox(server.z, server.s)


@dataclass(frozen=True)
class FedMiD(Algorithm):
    r"""FedMiD takes local proximal gradient steps, averages, and applies a prox on the server; for convex $\phi$.

    $$
    \text{client } i:\quad & w_i = w, \text{ then } Q \text{ times } w_i = \prox_{\eta_a \phi}(w_i - \eta_a g_i(w_i)) \\
    \text{server}:\quad & w = \prox_{\eta_s \eta_a Q \phi}(w + \eta_s \mean (w_i - w))
    $$

    As published, with the prox on both sides, $\phi$ is counted twice: as eta_a falls the method tends to the optimum
    of $f + 2 \phi$. `server_only=True` leaves the prox to the server; what remains is a bias of order $\eta_a$.

    >>> from fednmap.regularizers import L1
    >>> FedMiD(L1(0.1), server_only=True).server_only
    True
    """

    phi: Regularizer
    eta_a: float = 0.1
    eta_s: float = 1.0
    Q: int = 10
    server_only: bool = False

    traits = Traits(composite=True, up=1, down=1, prox="Q + 1", fixed_point=FixedPoint.OF_F_PLUS_2_PHI, rate="-")

    class Server(NamedTuple):
        w: Tensor

    class Up(NamedTuple):
        change: Tensor

    def __post_init__(self) -> None:
        check(self, "eta_a", "eta_s", "Q")
        convex(self)
        if self.server_only:
            object.__setattr__(self, "traits", replace(self.traits, prox="0 + 1", fixed_point=FixedPoint.BIASED))

    def init(self, start: Tensor) -> tuple[Server, NoState]:
        return self.Server(start), NoState()

    def local(self, down: Server, client: NoState, g: Oracle) -> tuple[Up, NoState]:
        w, step = down.w, LocalSteps(self.eta_a, g)
        for q in range(self.Q):
            w = step.down(w, w, q)
            if not self.server_only:
                w = self.phi.prox(w, self.eta_a)
        return self.Up(w - down.w), client

    def aggregate(self, server: Server, up: Up, share: float) -> Server:
        w = server.w + self.eta_s * up.change
        return self.Server(self.phi.prox(w, self.eta_s * self.eta_a * self.Q))


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
