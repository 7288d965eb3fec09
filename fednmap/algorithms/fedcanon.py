"""FedCanon: corrected local gradient steps, one prox on the server.

Zhou et al., FedCanon: Non-Convex Composite Federated Learning with Efficient Proximal Operation on
Heterogeneous Data, 2025, arXiv 2504.11903. Reconstructed from the paper's abstract.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from fednmap.algorithms.control_variates import ControlVariate
from fednmap.algorithms.hyperparameters import check, weakly_convex
from fednmap.algorithms.kernels import LocalSteps
from fednmap.core import FixedPoint, Oracle, Regularizer
from fednmap.regularizers.parameters import fraction, positive


@dataclass(frozen=True)
class FedCanon(ControlVariate):
    r"""FedCanon solves $\min f(x) + \phi(x)$ with a single prox per round, up to a bias of order $\eta_a$.

    Reconstructed from the paper's abstract: $c_i = h - h_i$, alpha's default and the place of h are a reading of it.

    $$
    \text{client } i:\quad & z_i = x, \text{ then } Q \text{ times } z_i = z_i - \eta_a (g_i(z_i) + c_i) \\
    & y_i = (x - z_i) / (\eta_a Q) \text{ is sent}; \quad h_i = y_i - c_i, \text{ its mean local gradient} \\
    \text{server}:\quad & x = \prox_{\alpha \phi}(x - \alpha \mean y_i), \qquad h = \mean h_i
    $$

    The clients never apply the prox, so their iterates drift along $-h$ even at the optimum: the bias.

    alpha:  server step, $\alpha \rho < 1$. Default: eta_a eta_s Q, which follows a schedule of eta_a; any other stays.
    forget: $c_i = (1 - \text{forget})(h - h_i)$; 0 is the published method. As in FedNMap.

    >>> from fednmap.regularizers import L1
    >>> FedCanon(L1(0.1), eta_a=0.05, Q=10).server_step
    0.5
    """

    phi: Regularizer
    eta_a: float = 0.1
    eta_s: float = 1.0
    Q: int = 10
    alpha: float | None = None
    forget: float = 0.0

    traits = replace(
        ControlVariate.traits,
        prox="0 + 1",
        fixed_point=FixedPoint.BIASED,
        rate="psi PL, bounded subgradients: not established",
    )

    class Server(NamedTuple):
        x: Tensor
        h: Tensor

    def __post_init__(self) -> None:
        check(self, "eta_a", "eta_s", "Q")
        fraction(self, "forget")
        if self.alpha is not None:
            positive(self, "alpha")
        weakly_convex(self, "alpha", self.server_step)

    @property
    def server_step(self) -> float:
        """alpha, or as far as the clients go in all, times eta_s."""
        return self.eta_a * self.eta_s * self.Q if self.alpha is None else self.alpha

    def local(self, down: Server, client: ControlVariate.Client, g: Oracle) -> tuple[Any, ControlVariate.Client]:
        x, c, step = down.x, self.direction(down, client), LocalSteps(self.eta_a, g)
        z_i = x
        for q in range(self.Q):
            z_i = step.down(z_i, z_i, q, c)
        y = step.mean(x, z_i, self.Q)
        return self.Up(y), self.Client(y - c)

    def aggregate(self, server: Server, up: ControlVariate.Up, share: float) -> Server:
        x, h = server
        alpha = self.server_step
        return self.Server(self.phi.prox(x - alpha * up.y, alpha), h + share * (up.y - h))
