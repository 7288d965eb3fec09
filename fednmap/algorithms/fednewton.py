"""FedNewton: a semismooth Newton method on the normal map, for models with few coordinates.

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
from fednmap.algorithms.quasi_newton import is_worse
from fednmap.algorithms.semismooth import newton_point
from fednmap.core import Algorithm, FixedPoint, NoState, Oracle, Regularizer, SecondOrder, Traits
from fednmap.names import InputError

LIMIT = 2000  # coordinates: a client then sends 2 million numbers per round
DAMPED = 1e-3  # mu after the first step that was taken back, in units of H's mean eigenvalue; then 10 times as much,
MOST = 1e5  # up to this


@dataclass(frozen=True)
class FedNewton(Algorithm):
    """FedNewton solves min f(x) + phi(x) in a few rounds, each with every client's gradient and Hessian.

    With x = prox(z) = prox_{gamma phi}(z)::

        client i:  send grad f_i(x) and the lower half of H_i(x)
        server:    g = mean grad f_i(x),  H = mean H_i(x)
                   z kept if psi and the residual say so, mu = mu / 10;  else back to the z before, mu = 10 mu
                   z = the solution z' of  g + (H + mu I)(prox(z') - x) + (z' - prox(z'))/gamma = 0

    The last line is the normal map of f's quadratic model at x, solved on the server by semismooth Newton steps
    (`fednmap.algorithms.semismooth`): x' = prox(z') minimises the model plus phi. mu = 0 at first; with a large mu the
    step is a plain proximal gradient step of length 1/mu, which is good for every smooth f: that is the safeguard. The
    change of psi is estimated from both gradients, <g + g', x' - x>/2 + phi(x') - phi(x).

    eta_a: gamma, where that is not given. The models x do not depend on it.
    gamma: prox parameter, gamma * rho < 1.

    A client sends p + p (p + 1)/2 numbers per round; more than 2,000 coordinates are refused. Gradients must be exact,
    and the problem must know its clients' Hessians: linear models and Cox's do, networks do not. A Hessian tells more
    of a client's data than a gradient does. Converges quadratically near a solution where H is positive on the active
    set.

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

    def model(self, server: Server) -> Tensor:
        return self.phi.prox(server.z, self.gamma)

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
