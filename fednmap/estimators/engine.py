"""Minimise f + phi to a certified tolerance, in few rounds."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fednmap.algorithms import FedNMap
from fednmap.core import Problem, Regularizer, declared
from fednmap.measure import hessian_norms, residual
from fednmap.simulation import Diverged, simulate

GROWTH = 1e3
"""The steps are halved where |F_nat| has grown by this factor over the best so far."""


class Fit(NamedTuple):
    """A minimiser, and what it took."""

    x: Tensor
    rounds: int
    bytes: int
    objective: float
    residual: float
    """|F_nat(x)| with gamma = 1 / L."""
    converged: bool


@torch.no_grad()
def minimise(problem: Problem, phi: Regularizer, start: Tensor, *, tol: float, max_rounds: int) -> Fit:
    """FedNMap with exact gradients and one local step, until |F_nat| <= tol.

    With every site present the server's h is the gradient of f at the model that was sent out, so that |F_nat| costs
    nothing.
    """
    L = smoothness(problem, start)
    best, spent, rounds = (math.inf, start), 0, 0
    while rounds < max_rounds:
        gamma = min(1 / L, 0.5 / phi.rho if phi.rho > 0 else math.inf)
        method = FedNMap(phi, eta_a=1 / L, eta_s=1.0, Q=1, gamma=gamma)
        x = best[1]
        z = x if best[0] == math.inf else x - gamma * problem.gradient(x)
        x = method.phi.prox(z, gamma)
        try:
            for round in simulate(method, problem, rounds=max_rounds - rounds, start=z):
                rounds, spent = rounds + 1, spent + round.bytes_up + round.bytes_down
                size = float(residual(x, round.server.h, phi, gamma).norm())
                best = min(best, (size, x), key=lambda pair: pair[0])
                if size <= tol or rounds == max_rounds:
                    break
                if size > GROWTH * best[0]:
                    raise Diverged(round.t)
                x = method.model(round.server)
            break
        except Diverged:
            L *= 2
    size, x = best
    objective = float(problem.loss(x) + phi.value(x))
    return Fit(x, rounds, spent, objective, size, size <= tol)


def smoothness(problem: Problem, x: Tensor, iterations: int = 20) -> float:
    """What the problem says, else the norm of the Hessian of f at x by power iteration, and a little more."""
    own = declared(problem).smoothness
    if own is not None:
        return own() or 1.0
    first = torch.randn(1, x.numel(), generator=torch.Generator("cpu").manual_seed(0), dtype=x.dtype, device="cpu")
    found = float(hessian_norms(lambda u: problem.gradient(u[0])[None], x, first, iterations))
    return 1.05 * found if 0 < found < math.inf else 1.0
