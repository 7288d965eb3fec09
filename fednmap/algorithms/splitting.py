"""FedDR, FedADMM and FedPD: every client solves a local problem approximately, near the common model.

Tran-Dinh, Pham, Phan and Nguyen, FedDR: Randomized Douglas-Rachford Splitting Algorithms for Nonconvex Federated
Composite Optimization, NeurIPS 2021, Algorithm 1. Wang, Marella and Anderson, FedADMM: A Federated Primal-Dual
Algorithm Allowing Partial Participation, CDC 2022. Zhang, Hong, Dhople, Yin and Liu, FedPD: A Federated Learning
Framework with Adaptivity to Non-IID Data, IEEE Transactions on Signal Processing 2021; communication in every round.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fednmap.algorithms.hyperparameters import check, default, prox_step, safe_step, weakly_convex
from fednmap.algorithms.kernels import LocalSteps
from fednmap.core import Algorithm, FixedPoint, Oracle, Regularizer, Traits
from fednmap.names import InputError
from fednmap.regularizers import Zero


class Splitting(Algorithm):
    """What FedDR and FedADMM share: the clients send how their xhat_i changed, and the server broadcasts the prox of
    the mean of all xhat_i."""

    traits = Traits(composite=True, up=1, down=1, prox="0 + 1", fixed_point=FixedPoint.EXACT, rate="-")
    server_step: float
    """Of the server's prox."""

    class Server(NamedTuple):
        xtilde: Tensor
        xbar: Tensor

    class Down(NamedTuple):
        xbar: Tensor

    class Up(NamedTuple):
        change: Tensor

    def broadcast(self, server: Server) -> Down:
        return self.Down(server.xbar)

    def aggregate(self, server: Server, up: Up, share: float) -> Server:
        xtilde = server.xtilde + share * up.change
        return self.Server(xtilde, self.phi.prox(xtilde, self.server_step))

    def model(self, server: Server) -> Tensor:
        return server.xbar


@dataclass(frozen=True)
class FedDR(Splitting):
    r"""FedDR solves $\min f(x) + \phi(x)$; its fixed point is exact, however roughly the local problems are solved.

    $$
    \text{client } i:\quad & y_i = y_i + \alpha (\bar x - x_i) \\
    & x_i \approx \arg\min f_i(x) + |x - y_i|^2 / (2 r), \text{ by } Q \text{ steps from the last } x_i: \\
    & x_i = x_i - \eta_a (g_i(x_i) + (x_i - y_i)/r) \\
    & \hat x_i = 2 x_i - y_i, \text{ whose change is sent} \\
    \text{server}:\quad & \bar x = \prox_{r \phi}(\mean \hat x_i)
    $$

    r:     the paper's eta, $r \rho < 1$. Default: eta_a Q, at most 0.5 / rho.
    alpha: relaxation in (0, 2); the paper uses 1.95.

    >>> from fednmap.regularizers import L1
    >>> FedDR(L1(0.1), eta_a=0.05, Q=10).r
    0.5
    """

    phi: Regularizer
    eta_a: float = 0.1
    Q: int = 10
    r: float = None  # type: ignore[assignment]  # given, or set below
    alpha: float = 1.95

    class Client(NamedTuple):
        y: Tensor
        x: Tensor
        xhat: Tensor

    def __post_init__(self) -> None:
        check(self, "eta_a", "Q", "alpha")
        if self.alpha >= 2:
            raise InputError(f"FedDR: alpha is {self.alpha}; the relaxation must be in (0, 2)")
        prox_step(self, "r", self.eta_a * self.Q)
        object.__setattr__(self, "server_step", self.r)

    def init(self, start: Tensor) -> tuple[Splitting.Server, Client]:
        return self.Server(start, start), self.Client(start, start, start)

    def local(self, down: Splitting.Down, client: Client, g: Oracle) -> tuple[Splitting.Up, Client]:
        y = client.y + self.alpha * (down.xbar - client.x)
        x, step = client.x, LocalSteps(self.eta_a, g)
        for q in range(self.Q):
            x = step.down(x, x, q, (x - y) / self.r)
        xhat = 2 * x - y
        return self.Up(xhat - client.xhat), self.Client(y, x, xhat)


@dataclass(frozen=True)
class FedADMM(Splitting):
    r"""FedADMM solves $\min f(x) + \phi(x)$; its fixed point is exact, however roughly the local problems are solved.

    $$
    \text{client } i:\quad & x_i \approx \arg\min f_i(x) + \langle \lambda_i, x - \bar x \rangle
        + \tfrac{\beta}{2} |x - \bar x|^2, \text{ by } Q \text{ steps from the last } x_i: \\
    & x_i = x_i - \eta_a (g_i(x_i) + \lambda_i + \beta (x_i - \bar x)) \\
    & \lambda_i = \lambda_i + \beta (x_i - \bar x), \quad
        \hat x_i = x_i + \lambda_i / \beta, \text{ whose change is sent} \\
    \text{server}:\quad & \bar x = \prox_{\phi / \beta}(\mean \hat x_i)
    $$

    With $\phi = 0$ and everybody present this is FedPD.

    beta: penalty, $\beta > \rho$. Default: 1 / (eta_a Q), at least 2 rho.

    >>> from fednmap.regularizers import L1
    >>> FedADMM(L1(0.1), eta_a=0.05, Q=10).beta
    2.0
    """

    phi: Regularizer
    eta_a: float = 0.1
    Q: int = 10
    beta: float = None  # type: ignore[assignment]  # given, or set below

    class Client(NamedTuple):
        x: Tensor
        lam: Tensor
        xhat: Tensor

    def __post_init__(self) -> None:
        check(self, "eta_a", "Q")
        default(self, "beta", 1 / safe_step(self.phi, self.eta_a * self.Q))
        weakly_convex(self, "1 / beta", 1 / self.beta)
        object.__setattr__(self, "server_step", 1 / self.beta)

    def init(self, start: Tensor) -> tuple[Splitting.Server, Client]:
        return self.Server(start, start), self.Client(start, torch.zeros_like(start), start)

    def local(self, down: Splitting.Down, client: Client, g: Oracle) -> tuple[Splitting.Up, Client]:
        x, lam, step = client.x, client.lam, LocalSteps(self.eta_a, g)
        for q in range(self.Q):
            x = step.down(x, x, q, lam + self.beta * (x - down.xbar))
        lam = lam + self.beta * (x - down.xbar)
        xhat = x + lam / self.beta
        return self.Up(xhat - client.xhat), self.Client(x, lam, xhat)


@dataclass(frozen=True)
class FedPD(Algorithm):
    r"""FedPD solves $\min f(x)$, exactly on heterogeneous clients.

    $$
    \text{client } i:\quad & Q \text{ steps from its last } x_i:\quad
        x_i = x_i - \eta_a (g_i(x_i) + \lambda_i + (x_i - x_0)/r) \\
    & \lambda_i = \lambda_i + (x_i - x_0)/r, \quad x_i + r \lambda_i \text{ is sent} \\
    \text{server}:\quad & x_0 = \mean (x_i + r \lambda_i)
    $$

    r: the paper's eta. Default: eta_a Q.

    >>> FedPD(eta_a=0.05, Q=10).r
    0.5
    """

    phi: Regularizer = field(default_factory=Zero)
    eta_a: float = 0.1
    Q: int = 10
    r: float = None  # type: ignore[assignment]  # given, or set below

    traits = Traits(
        composite=False, up=1, down=1, prox="0 + 0", fixed_point=FixedPoint.EXACT, rate="-", full_participation=True
    )

    class Server(NamedTuple):
        x: Tensor

    class Client(NamedTuple):
        x: Tensor
        lam: Tensor

    Up = Server

    def __post_init__(self) -> None:
        check(self, "eta_a", "Q")
        default(self, "r", self.eta_a * self.Q)

    def init(self, start: Tensor) -> tuple[Server, Client]:
        return self.Server(start), self.Client(start, torch.zeros_like(start))

    def local(self, down: Server, client: Client, g: Oracle) -> tuple[Server, Client]:
        (x, lam), step = client, LocalSteps(self.eta_a, g)
        for q in range(self.Q):
            x = step.down(x, x, q, lam + (x - down.x) / self.r)
        lam = lam + (x - down.x) / self.r
        return self.Up(x + self.r * lam), self.Client(x, lam)

    def aggregate(self, server: Server, up: Server, share: float) -> Server:
        return self.Server(up.x)
