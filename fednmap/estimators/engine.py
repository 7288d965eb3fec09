"""Minimise f + phi to a certified tolerance, in few rounds."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fednmap.algorithms import FedNMapMemory
from fednmap.algorithms.quasi_newton import Counts
from fednmap.core import Problem, Regularizer, info_of, nbytes
from fednmap.measure import hessian_norms, residual

MEMORY = 40
"""Rounds that the server remembers."""
GROWTH = 1e3
"""The steps are halved where |F_nat| has grown by this factor over the best so far."""
EARLIER = 30.0, 1e3
"""Bounds of |F_nat| / tol at the earlier point that a fit remembers."""


class Fit(NamedTuple):
    """A minimiser, and what it took."""

    x: Tensor
    rounds: int
    bytes: int
    objective: float
    residual: float
    """|F_nat(x)| with gamma = 1 / L, or one over the trace of the Hessian at the model without columns."""
    converged: bool
    loss: float
    """f(x)"""
    known: Known | None
    """Where FedNMap's memory has found x."""
    earlier: tuple[Tensor, Tensor] | None = None
    """The last point whose |F_nat| was within `EARLIER`, and the gradient of f there; x minus it is the direction in
    which the coefficients moved last."""


class Known(NamedTuple):
    """What a server has learnt of f, whatever phi is."""

    L: float
    halved: float
    """The share of 1 / L that is a step."""
    server: Any
    gradient: Tensor


@torch.no_grad()
def minimise(
    problem: Problem, phi: Regularizer, start: Tensor, *, tol: float, max_rounds: int, after: Fit | None = None
) -> Fit:
    """FedNMap with exact gradients, one local step and memory, until |F_nat| <= tol.

    With every site present the mean of the uplinks is grad f(x) + (z - x) / gamma, so that a round is one gradient of f
    and the server's half of the method: what `simulate` computes, without states of clients that nobody asks for. The
    gradient also gives |F_nat| at x. Bytes are those that the sites would send and receive.

    after: a fit of the same f with another phi: this one begins at its x and with its memory.
    """
    known = None if after is None else after.known
    L, halved = (smoothness(problem, start), 1.0) if known is None else (known.L, known.halved)
    best, rounds, each, earlier = (math.inf, start, start), 0, 0, None
    while rounds < max_rounds:
        gamma = min(1 / L, 0.5 / phi.rho if phi.rho > 0 else math.inf)
        method = FedNMapMemory(phi, eta_a=halved / L, eta_s=1.0, Q=1, gamma=gamma, memory=min(MEMORY, start.numel()))
        server: Any = method.init(best[1])[0] if after is None or known is None else _carried(method, after, known)
        after = None
        each = nbytes(method.broadcast(server)) + nbytes(method.Up(server.z))
        while rounds < max_rounds:
            x = method.model(server)
            g = problem.gradient(x)
            rounds += 1
            size = float(residual(x, g, phi, gamma).norm())
            best = min(best, (size, x, g), key=lambda found: found[0])
            if EARLIER[0] * tol <= size <= EARLIER[1] * tol:
                earlier = x, g
            if size <= tol or not size <= GROWTH * best[0]:
                break
            server = method.aggregate(server, method.Up(g + (server.z - x) / gamma), 1.0)
        if best[0] <= tol:
            break
        halved /= 2
    size, x, g = best
    loss = float(problem.loss(x))
    known = Known(L, halved, server, g)
    sent, value = rounds * problem.n * each, loss + float(phi.value(x))
    return Fit(x, rounds, sent, value, size, size <= tol, loss, known, earlier)


def _carried(method: FedNMapMemory, after: Fit, known: Known) -> Any:
    """The server at a prox-gradient step from where another phi ended, with the secants of f that it had then."""
    old, g = known.server, known.gradient
    z = after.x - method.gamma * g
    counts = Counts(*old.counts.tolist())
    fresh = Counts(secants=counts.secants, scale=counts.scale, smallest=math.inf, plain=0)
    return method.Server(z, g, z, g, z, old.S, old.Y, torch.tensor(fresh, dtype=torch.float64, device="cpu"))


def smoothness(problem: Problem, x: Tensor, iterations: int = 20) -> float:
    """What the problem says, else the norm of the Hessian of f at x by power iteration, and a little more."""
    own = info_of(problem).smoothness
    if own is not None:
        return own() or 1.0
    first = torch.randn(1, x.numel(), generator=torch.Generator("cpu").manual_seed(0), dtype=x.dtype, device="cpu")
    found = float(hessian_norms(lambda u: problem.gradient(u[0])[None], x, first, iterations))
    return 1.05 * found if 0 < found < math.inf else 1.0
