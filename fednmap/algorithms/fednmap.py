"""FedNMap: normal-map updates with a local correction.

Kun Huang, Shi Pu and Karl Henrik Johansson, Achieving Linear Speedup for Composite Federated Learning, 2026.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fednmap.algorithms.control_variates import ControlVariate
from fednmap.algorithms.hyperparameters import check, prox_step
from fednmap.algorithms.kernels import LocalSteps, plain_steps
from fednmap.core import Oracle, Regularizer
from fednmap.regularizers.parameters import fraction


@dataclass(frozen=True, repr=False)
class FedNMap(ControlVariate):
    r"""FedNMap solves $\min f(x) + \phi(x)$ for smooth $f_i$ and weakly convex $\phi$, whatever the heterogeneity.

    Algorithm 1, with $x = \prox(z) = \prox_{\gamma \phi}(z)$ and $c_i = h - h_i$:

    $$
    \text{client } i:\quad & z_i = z, \text{ then } Q \text{ times (line 14)} \\
    & z_i = z_i - \eta_a (g_i(\prox(z_i)) + (z - x)/\gamma + c_i) \\
    & y_i = (z - z_i) / (\eta_a Q), \text{ sent to the server (lines 16, 17)} \\
    & h_i = y_i - (z - x)/\gamma - c_i, \text{ its mean local gradient} \\
    \text{server}:\quad & z = z - Q \eta_s \eta_a \mean y_i \quad \text{(line 19)}, \qquad h = \mean h_i
    $$

    The paper updates $c_i$ by $c_i - y_i + \mean y_j$ (line 8). With every client present that is $h - h_i$, because
    $(z - x)/\gamma$ is common to all; written with h the method stays exact when only some clients take part, and the
    one uplink $y_i$ still suffices, because it already holds the change of $h_i$.

    gamma:  prox parameter, $\gamma \rho < 1$. Default: $4 \eta_a \eta_s Q$, at most $0.5 / \rho$.
    forget: $c_i = (1 - \text{forget})(h - h_i)$; 0 is the paper's method, 1 has no correction. Noise that the server
            adds to $\mean y_i$, for privacy, adds up in $h - \mean h_i$ unless it is forgotten: see `docs/privacy.md`.

    local_momentum, local_decay: options of the local steps, as in FedAvg, of what the box has in brackets. Q is then
            the number of plain steps that they amount to, $y_i$ and $h_i$ are means with the weights that the gradients
            have in $z_i$, and the fixed point stays exact.

    With one client, reshuffled minibatches and one epoch of them as Q this is norm-PRR (Qiu, Li and Milzarek, A
    New Random Reshuffling Method for Nonsmooth Nonconvex Finite-sum Optimization, JMLR 2025); see `docs/family.md`.

    Converges at rate $O(\sqrt{\sigma^2 / (n Q T)} + 1/T)$ for nonconvex f (Theorem 1), and linearly to a neighbourhood
    under the Polyak-Lojasiewicz condition (Theorem 2).

    >>> from fednmap.regularizers import L1
    >>> FedNMap(L1(0.1), eta_a=0.05, Q=10).gamma
    2.0
    """

    phi: Regularizer
    eta_a: float = 0.1
    eta_s: float = 1.0
    Q: int = 10
    gamma: float = None  # type: ignore[assignment]  # given, or set below
    forget: float = 0.0
    local_momentum: float = field(default=0.0, kw_only=True)
    local_decay: float = field(default=1.0, kw_only=True)

    traits = replace(
        ControlVariate.traits,
        normal_map=True,
        server_variable="z",
        rate="f nonconvex: O(sqrt(s2/(nQT)) + 1/T); psi PL: O~(s2/(nQT) + s2/T^2)",
    )

    class Server(NamedTuple):
        z: Tensor
        h: Tensor

    def __post_init__(self) -> None:
        check(self, "eta_a", "eta_s", "Q", "local_momentum", "local_decay")
        fraction(self, "forget")
        prox_step(self, "gamma", 4 * self.eta_a * self.eta_s * self._steps)

    def local(self, down: Server, client: ControlVariate.Client, g: Oracle) -> tuple[Any, ControlVariate.Client]:
        z, d = down.z, self.direction(down, client)
        step = LocalSteps(self.eta_a, g, self.local_momentum, self.local_decay)
        z_i = z
        for q in range(self.Q):
            z_i = step.down(z_i, self._prox(z_i), q, d)
        y = step.mean(z, z_i, self._steps)
        return self.Up(y), self.Client(y - d)

    def aggregate(self, server: Server, up: ControlVariate.Up, share: float) -> Server:
        z, h = server
        return self.Server(z - self._steps * self.eta_s * self.eta_a * up.y, h + share * (up.y - self._pull(z) - h))

    def direction(self, down: Server, client: ControlVariate.Client) -> Tensor:
        """Return (z - x)/gamma + c_i."""
        keep = 1 - self.forget
        return torch.sub(self._pull(down.z) + keep * down.h, client.h, alpha=keep)  # one pass over all clients

    @property
    def _steps(self) -> float:
        """Q, where all local steps count the same."""
        return plain_steps(self.Q, self.local_momentum, self.local_decay)

    def _prox(self, z: Tensor) -> Tensor:
        return self.phi.prox(z, self.gamma)

    def _pull(self, z: Tensor) -> Tensor:
        return (z - self._prox(z)) / self.gamma
