"""Zhang's method: corrected local steps with a growing prox weight.

Zhang, Hu and Johansson, Composite Federated Learning with Heterogeneous Data, ICASSP 2024, and its nonconvex extension
of 2026; restated in Appendix A.1 of Huang, Pu and Johansson, Achieving Linear Speedup for Composite Federated
Learning, 2026.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from fednmap.algorithms.control_variates import ControlVariate
from fednmap.algorithms.hyperparameters import check, weakly_convex
from fednmap.algorithms.kernels import LocalSteps
from fednmap.core import Oracle, Regularizer
from fednmap.regularizers.parameters import fraction


@dataclass(frozen=True)
class Zhang(ControlVariate):
    r"""Zhang's method solves $\min f(x) + \phi(x)$, exactly on heterogeneous clients.

    With $c_i = h - h_i$ and $\hat\eta = \eta_a \eta_s Q$:

    $$
    \text{client } i:\quad & z_i = x, \text{ then for } q = 0, \dots, Q-1: \\
    & z_i = z_i - \eta_a (g_i(\prox_{q \eta_a \phi}(z_i)) + c_i) \\
    & y_i = (x - z_i) / (\eta_a Q) \text{ is sent}; \quad h_i = y_i - c_i, \text{ its mean local gradient} \\
    \text{server}:\quad & x = \prox_{\hat\eta \phi}(x - \hat\eta \mean y_i), \qquad h = \mean h_i
    $$

    The weight of the local prox grows with q: after q steps of size eta_a the iterate has moved by q eta_a times
    a gradient, and the prox must undo as much. Weights that do not grow leave a bias. The published c_i equals
    $h - h_i$ when everybody is present; written with h the method stays exact under sampling.

    forget: $c_i = (1 - \text{forget})(h - h_i)$; 0 is the published method. As in FedNMap.

    >>> from fednmap.regularizers import L1
    >>> Zhang(L1(0.1), eta_a=0.05, Q=10).traits.fixed_point.value
    'exact'
    """

    phi: Regularizer
    eta_a: float = 0.1
    eta_s: float = 1.0
    Q: int = 10
    forget: float = 0.0

    traits = replace(
        ControlVariate.traits,
        rate="f strongly convex, bounded subgradients: O~((s2 + B2)/(nT)); psi PL: not established",
    )

    class Server(NamedTuple):
        x: Tensor
        h: Tensor

    def __post_init__(self) -> None:
        check(self, "eta_a", "eta_s", "Q")
        fraction(self, "forget")
        weakly_convex(self, "eta_a Q max(1, eta_s)", self.eta_a * self.Q * max(1.0, self.eta_s))

    def local(self, down: Server, client: ControlVariate.Client, g: Oracle) -> tuple[Any, ControlVariate.Client]:
        x, c, step = down.x, self.direction(down, client), LocalSteps(self.eta_a, g)
        z_i = x
        for q in range(self.Q):
            z_i = step.down(z_i, self.phi.prox(z_i, q * self.eta_a), q, c)
        y = step.mean(x, z_i, self.Q)
        return self.Up(y), self.Client(y - c)

    def aggregate(self, server: Server, up: ControlVariate.Up, share: float) -> Server:
        x, h = server
        step = self.eta_a * self.eta_s * self.Q
        return self.Server(self.phi.prox(x - step * up.y, step), h + share * (up.y - h))
