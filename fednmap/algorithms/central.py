"""Prox-SGD and NormalMap-SGD: the central references, run as one client that holds all data.

Beck, First-Order Methods in Optimization, 2017, chapter 10. Milzarek and Qiu, Convergence of a Normal Map-Based
Prox-SGD Method under the KL Inequality, 2023.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from fednmap.algorithms.hyperparameters import check, prox_step, weakly_convex
from fednmap.algorithms.kernels import LocalSteps
from fednmap.core import Algorithm, FixedPoint, NoState, Oracle, Regularizer, Traits


@dataclass(frozen=True)
class ProxSGD(Algorithm):
    r"""Prox-SGD solves $\min f(x) + \phi(x)$ where all data is in one place; a round is Q steps.

    $$x = \prox_{\eta_a \phi}(x - \eta_a g(x))$$

    Run it on `fednmap.problems.Pooled(problem)`.

    >>> from fednmap.regularizers import L1
    >>> ProxSGD(L1(0.1), eta_a=0.05).traits.central
    True
    """

    phi: Regularizer
    eta_a: float = 0.1
    Q: int = 1

    traits = Traits(composite=True, up=1, down=1, prox="Q + 0", fixed_point=FixedPoint.EXACT, rate="-", central=True)

    class Server(NamedTuple):
        x: Tensor

    Up = Server

    def __post_init__(self) -> None:
        check(self, "eta_a", "Q")
        weakly_convex(self, "eta_a", self.eta_a)

    def init(self, start: Tensor) -> tuple[Server, NoState]:
        return self.Server(start), NoState()

    def local(self, down: Server, client: NoState, g: Oracle) -> tuple[Server, NoState]:
        x, step = down.x, LocalSteps(self.eta_a, g)
        for q in range(self.Q):
            x = self.phi.prox(step.down(x, x, q), self.eta_a)
        return self.Up(x), client

    def aggregate(self, server: Server, up: Server, share: float) -> Server:
        return self.Server(up.x)


@dataclass(frozen=True)
class NormalMapSGD(Algorithm):
    r"""NormalMap-SGD solves $\min f(x) + \phi(x)$ where all data is in one place; a round is Q steps.

    $$x = \prox_{\gamma \phi}(z), \qquad z = z - \eta_a (g(x) + (z - x)/\gamma)$$

    With $\eta_a = \gamma$ this is Prox-SGD. Run it on `fednmap.problems.Pooled(problem)`.

    gamma: prox parameter, $\gamma \rho < 1$. Default: 4 eta_a, at most 0.5 / rho.

    >>> from fednmap.regularizers import L1
    >>> NormalMapSGD(L1(0.1), eta_a=0.25).gamma
    1.0
    """

    phi: Regularizer
    eta_a: float = 0.1
    Q: int = 1
    gamma: float = None  # type: ignore[assignment]  # given, or set below

    traits = replace(ProxSGD.traits, normal_map=True)

    class Server(NamedTuple):
        z: Tensor

    Up = Server

    def __post_init__(self) -> None:
        check(self, "eta_a", "Q")
        prox_step(self, "gamma", 4 * self.eta_a)

    def init(self, start: Tensor) -> tuple[Server, NoState]:
        return self.Server(start), NoState()

    def local(self, down: Server, client: NoState, g: Oracle) -> tuple[Server, NoState]:
        z, step = down.z, LocalSteps(self.eta_a, g)
        for q in range(self.Q):
            x = self.phi.prox(z, self.gamma)
            z = step.down(z, x, q, (z - x) / self.gamma)
        return self.Up(z), client

    def aggregate(self, server: Server, up: Server, share: float) -> Server:
        return self.Server(up.z)
