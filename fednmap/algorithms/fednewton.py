r"""FedNewton: a semismooth Newton method on the normal map, for models with few coordinates.

With $x = \prox_{\gamma \phi}(z)$ and a generalised Jacobian P of the prox at z, the normal map
$F(z) = \nabla f(x) + (z - x)/\gamma$ has the generalised Jacobian $H P + (I - P)/\gamma$.

After Ouyang and Milzarek, A trust region-type normal map-based semismooth Newton method for nonsmooth nonconvex
composite optimization, 2021; for phi = 0 the iteratively reweighted least squares of DataSHIELD and its relatives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fednmap.algorithms.hyperparameters import check, prox_step
from fednmap.algorithms.quasi_newton import is_worse, minimised
from fednmap.core import Algorithm, FixedPoint, NoState, Oracle, Regularizer, SecondOrder, Traits
from fednmap.names import InputError

LIMIT = 2000  # coordinates: a client then sends 2 million numbers per round
DAMPED = 1e-3  # mu after the first step that was taken back, in units of H's mean eigenvalue; then 10 times as much,
MOST = 1e5  # up to this
INNER = 60  # steps on a model, at most
CLOSE = 1e-7  # the model's normal map is solved until it is so much smaller than it was
FINE = 1e-4  # differences of prox are so much shorter than what it moves
SHORTEST = 1 / 16  # of a semismooth step; if that does not help prox steps do


@dataclass(frozen=True)
class FedNewton(Algorithm):
    r"""FedNewton solves $\min f(x) + \phi(x)$ in a few rounds, each with every client's gradient and Hessian.

    With $x = \prox(z) = \prox_{\gamma \phi}(z)$:

    $$
    \text{client } i:\quad & \text{sends } \nabla f_i(x) \text{ and the lower half of } H_i(x) \\
    \text{server}:\quad & g = \mean \nabla f_i(x), \qquad H = \mean H_i(x) \\
    & z \text{ is kept if } \psi \text{ and the residual say so}, \ \mu = \mu / 10;
        \text{ else back to the } z \text{ before}, \ \mu = 10 \mu \\
    & z = \text{the solution } z' \text{ of } g + (H + \mu I)(\prox(z') - x) + (z' - \prox(z'))/\gamma = 0
    $$

    The last line is the normal map of f's quadratic model at x, solved on the server by semismooth Newton steps:
    $x' = \prox(z')$ minimises the model plus $\phi$. $\mu = 0$ at first; with a large $\mu$ the step is a proximal
    gradient step of length $1/\mu$, which is good for every smooth f: that is the safeguard. The change of $\psi$ is
    estimated from both gradients, $\langle g + g', x' - x \rangle / 2 + \phi(x') - \phi(x)$.

    eta_a: gamma, where that is not given. The models x do not depend on it.
    gamma: prox parameter, $\gamma \rho < 1$.

    A client sends $p + p (p + 1)/2$ numbers per round; more than 2,000 coordinates are refused. Gradients must be
    exact, and the problem must have its clients' Hessians: linear models and Cox's do, networks do not. A Hessian
    reveals more of a client's data than a gradient does. Converges quadratically near a solution where H is positive
    definite on the active set.

    >>> from fednmap import run
    >>> from fednmap.regularizers import L1
    >>> from fednmap.testing import heterogeneous
    >>> run(FedNewton(L1(0.2)), heterogeneous(), rounds=2).final["stationarity"] < 1e-20
    True
    """

    phi: Regularizer
    eta_a: float = 0.1
    gamma: float = None  # type: ignore[assignment]  # given, or set below

    traits = Traits(
        composite=True,
        up=1,
        hessians=1,
        down=1,
        prox="1 + many",
        fixed_point=FixedPoint.EXACT,
        rate="f convex, exact gradients: quadratic near a solution",
        full_participation=True,
        steps_may_change=False,
        normal_map=True,
    )

    class Server(NamedTuple):
        z: Tensor
        """The point that is tried,"""
        kept: Tensor
        """and the last one that was kept, with what is known there."""
        g: Tensor
        H: Tensor
        mu: Tensor
        rounds: Tensor

    class Down(NamedTuple):
        z: Tensor

    class Up(NamedTuple):
        g: Tensor
        H: Tensor

    def __post_init__(self) -> None:
        check(self, "eta_a")
        if self.phi.rho == math.inf:
            raise InputError(
                f"FedNewton needs a prox with a derivative almost everywhere, and that of {type(self.phi).__name__} "
                "jumps; use a weakly convex regularizer, or FedNMap"
            )
        prox_step(self, "gamma", self.eta_a)

    def init(self, start: Tensor) -> tuple[Server, NoState]:
        p = start.numel()
        if p > LIMIT:
            numbers = f"{p * (p + 1) // 2:,} numbers"
            raise InputError(
                f"FedNewton sends Hessians, at most {LIMIT} x {LIMIT}; {p} coordinates would be {numbers} "
                "per client and round: use FedNMap with memory"
            )
        zero = start.new_zeros(())
        return self.Server(
            start, start, torch.zeros_like(start), start.new_zeros(p * (p + 1) // 2), zero, zero
        ), NoState()

    def broadcast(self, server: Server) -> Down:
        return self.Down(server.z)

    def local(self, down: Down, client: NoState, g: Oracle) -> tuple[Up, NoState]:
        if not isinstance(g, SecondOrder):
            raise InputError("FedNewton needs the clients' Hessians; see fednmap.core.oracle_of")
        x = self.phi.prox(down.z, self.gamma)
        row, column = torch.tril_indices(len(x), len(x), device=x.device)
        return self.Up(g(x, 0), g.hessian(x)[..., row, column]), client

    def aggregate(self, server: Server, up: Up, share: float) -> Server:
        z, g, H, mu = server.z, up.g, up.H, server.mu
        x, before = self.model(server), self.phi.prox(server.kept, self.gamma)
        floor = torch.finfo(x.dtype).eps * float(g.norm() + x.norm() / self.gamma)
        if server.rounds and is_worse(self.phi, self.gamma, before, server.g, x, g, floor):
            z, g, H = server.kept, server.g, server.H
            mu = (10 * mu).clamp(DAMPED * self._mean(H), MOST * self._mean(H))
        else:
            mu = torch.where(mu > DAMPED * self._mean(H), mu / 10, 0.0)
        new = newton_point(self.phi, self.gamma, z, g, self._full(H), float(mu))
        return self.Server(new, z, g, H, mu, server.rounds + 1)

    def known_gradient(self, before: Server, after: Server) -> tuple[Tensor, Tensor] | None:
        return (self.model(before), after.g) if torch.equal(before.z, after.kept) else None

    def _mean(self, H: Tensor) -> float:
        """The mean eigenvalue of H, as a positive number."""
        return float(self._full(H).diagonal().abs().mean())

    def _full(self, H: Tensor) -> Tensor:
        """The symmetric matrix with this lower half."""
        p = int((2 * len(H)) ** 0.5)
        row, column = torch.tril_indices(p, p, device=H.device)
        full = H.new_zeros(p, p)
        full[row, column] = full[column, row] = H
        return full


def prox_jacobian(phi: Regularizer, z: Tensor, gamma: float) -> Tensor:
    """P (p, p): central differences of prox at z, which every prox has, whatever it is computed by.

    Where prox has a kink within the difference, the mean of both sides' derivatives: a generalised Jacobian too.

    >>> from fednmap.regularizers import L1
    >>> prox_jacobian(L1(1.0), torch.tensor([3.0, 0.5]), 1.0)
    tensor([[1., 0.],
            [0., 0.]])
    """
    eps, scale = torch.finfo(z.dtype).eps, max(float(z.abs().max()), torch.finfo(z.dtype).tiny)
    moved = FINE * float((z - phi.prox(z, gamma)).abs().max())  # kinks are about as far apart as prox moves z
    e = min(max(moved, eps ** (2 / 3) * scale), eps ** (1 / 3) * scale) if moved else eps ** (1 / 3) * scale
    e = 2.0 ** math.floor(math.log2(e))  # z + e and z - e are then as far apart as they say
    steps = torch.eye(len(z), dtype=z.dtype, device=z.device) * e
    return ((phi.prox(z + steps, gamma) - phi.prox(z - steps, gamma)) / (2 * e)).mT


def newton_point(phi: Regularizer, gamma: float, z: Tensor, g: Tensor, H: Tensor, mu: float) -> Tensor:
    """Return z' with prox(z') = argmin_u <g, u> + <u - x, (H + mu I)(u - x)> / 2 + phi(u), x = prox(z).

    The normal map of that model is solved by semismooth Newton steps; where they do not help, by accelerated prox
    steps. Negative eigenvalues of H count as positive. Both use the prox at the step 1/(largest eigenvalue + mu), which
    is well scaled; a subgradient found there makes a z for any gamma.
    """
    values, vectors = torch.linalg.eigh(H)
    values = values.abs() + mu
    largest = max(float(values[-1]), float(values[0]), torch.finfo(z.dtype).tiny)
    floor = 10 * torch.finfo(z.dtype).eps * largest
    B: Tensor = (vectors * values.clamp_min(floor)) @ vectors.mT
    x = phi.prox(z, gamma)
    s = 1 / max(largest, 2 * phi.rho)

    def normal_map(w: Tensor) -> Tensor:
        u = phi.prox(w, s)
        return g + B @ (u - x) + (w - u) / s

    w = x + s / gamma * (z - x)
    F = normal_map(w)
    rounding = torch.finfo(z.dtype).eps * float(g.norm() + largest * x.norm())
    close = max(CLOSE * float(F.norm()), rounding)
    unit = torch.eye(len(z), dtype=z.dtype, device=z.device)
    for _ in range(INNER):
        if not float(F.norm()) > close:
            break
        P = prox_jacobian(phi, w, s)
        step, long = torch.linalg.solve_ex(B @ P + (unit - P) / s, -F).result, 1.0
        while long >= SHORTEST and not float(normal_map(w + long * step).norm()) < (1 - 0.1 * long) * float(F.norm()):
            long /= 2
        if long >= SHORTEST:
            w = w + long * step
        else:
            u = phi.prox(w, s)
            w = minimised(phi, s, u, g + B @ (u - x), B.mv, largest, close)
        F = normal_map(w)
    u = phi.prox(w, s)
    return u + gamma / s * (w - u)
