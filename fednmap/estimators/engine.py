"""Minimise f + phi to a certified tolerance, in few rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fednmap.algorithms import FedNMapMemory
from fednmap.algorithms.quasi_newton import Counts
from fednmap.core import Regularizer, nbytes
from fednmap.estimators import path_solver, working_set
from fednmap.estimators.penalties import shrinkage
from fednmap.estimators.prepare import Prepared, dense
from fednmap.measure import residual
from fednmap.regularizers import Box, Separable

MEMORY, FEWEST = 40, 5  # rounds that the server remembers, and those that it does however many columns there are
REMEMBERED = 2**19  # numbers that it remembers for them, where more than the fewest
GROWTH = 1e3  # of |F_nat| over the best so far, beyond which the steps are halved
PATIENCE = 200  # rounds with a dense model, at most
FLAT = 1e-2  # curvature of f along the last steps over that without columns, below which estimates may be infinite
HELD = 1e-3  # growth of phi along these steps over the decrease of f, above which phi holds the estimates
SHIFT = 10.0  # how much further a suspect coefficient is fixed, of a column of deviation 1, plus twice its value
NEGLIGIBLE = 0.1  # likelihood ratio statistic below which the model there is as good: the estimate is infinite
MOVING = 0.05  # least change of a coefficient with an infinite estimate over the largest, of standardised columns


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
    """What FedNMap's memory has learnt of f, whatever phi is; None if the dense model has found x."""
    earlier: tuple[Tensor, Tensor] | None = None
    """The last point whose |F_nat| was within `path_solver.EARLIER`, and the gradient of f there; x minus it is the
    direction in which the coefficients moved last."""


class Known(NamedTuple):
    """L of f, the share of 1 / L that is a step, the server's state, and the gradient of f at the end."""

    L: float
    halved: float
    server: Any
    gradient: Tensor


def solve(
    f: Prepared,
    phis: Sequence[Regularizer],
    tol: float,
    max_rounds: int,
    *,
    after: Fit | None = None,
    first: Tensor | None = None,
    polish: int | None = None,
) -> tuple[list[Fit], int]:
    """The minimisers of f + phi for several phi on the coefficients, and the rounds of all of them.

    All in the same rounds, by `path_solver`, if that takes them (l1, ridge, elastic-net, and MCP and SCAD, whose
    stationary points may depend on where one begins: at the model without columns); else one after another, each begun
    where the one before ended.

    after:  a fit with another phi where the first begins, if they are found one after another.
    first:  the gradient at the start, where it is known.
    polish: the number of a phi whose minimiser is found more exactly, if they are found in the same rounds.
    """
    kinds = [kind for phi in phis if (kind := shrinkage(phi, f.end)) is not None]
    wide = len(f.start) > path_solver.SIZE
    if f.constants or len(kinds) < len(phis) or (wide and not (f.can_restrict and all(np.any(l1) for l1, *_ in kinds))):
        fits: list[Fit] = []
        for phi in phis:
            after = minimise(f, f.with_penalty(phi), f.start, tol=tol, max_rounds=max_rounds, after=after)
            fits.append(after)
        return fits, sum(fit.rounds for fit in fits)
    l1, l2, *bent = (np.stack(np.broadcast_arrays(*map(np.atleast_1d, part))) for part in zip(*kinds, strict=True))
    rho, knee = (np.maximum(bent[0], path_solver.TINY), bent[1]) if bent[0].any() else (None, None)
    shrink = path_solver.Penalties(l1, l2, f.end, rho, knee)
    common: Any = {"max_rounds": max_rounds, "first": None if first is None else first.numpy()}
    if wide:
        found, sent = working_set.solve(f, shrink, tol=tol * f.unit, **common)
    else:
        found = path_solver.solve(
            f.slopes,
            f.start.numpy(),
            shrink,
            f.diagonal,
            tol=tol * f.unit,
            constant=f.quadratic,
            polish=polish,
            reach=f.reach,
            **common | ({"max_rounds": min(max_rounds, PATIENCE)} if f.reach is None else {}),
        )
        sent = 2 * f.start.nbytes * len(f.sites) * found.rounds  # a point to every site, a gradient back
        sent[1:] -= 2 * f.start.nbytes * len(f.sites)  # the first is common to all
    after, losses = None, f.losses(torch.from_numpy(found.x))
    objectives = losses + shrink.value(found.x)
    fits, total = [], found.total
    for k, phi in enumerate(phis):
        x, rounds, size = torch.from_numpy(found.x[k]), int(found.rounds[k]), float(found.sizes[k])
        point, gradient = torch.from_numpy(found.earlier[k])
        earlier = None if bool(point.isnan().any()) else (point, gradient)
        fit = Fit(
            x, rounds, int(sent[k]), float(objectives[k]), size, size <= tol * f.unit, float(losses[k]), None, earlier
        )
        if not fit.converged and rounds < max_rounds:  # by FedNMap with a short memory, which the next one begins with
            after = more = minimise(f, f.with_penalty(phi), x, tol=tol, max_rounds=max_rounds - rounds, after=after)
            fit = more._replace(rounds=rounds + more.rounds, bytes=fit.bytes + more.bytes)
            total += more.rounds
        fits.append(fit)
    return fits, total


@torch.no_grad()
def minimise(
    f: Prepared, phi: Regularizer, start: Tensor, *, tol: float, max_rounds: int, after: Fit | None = None
) -> Fit:
    """FedNMap with exact gradients, one local step and memory, until |F_nat| <= tol, relative to the unit of f.

    With every site present the mean of the uplinks is grad f(x) + (z - x) / gamma, so that a round is one gradient of f
    and the server's half of the method: what `simulate` computes, without states of clients that nobody asks for. The
    gradient also gives |F_nat| at x. Bytes are those that the sites would send and receive.

    after: a fit of the same f with another phi: this one begins at its x and with its memory.
    """
    known, tol = None if after is None else after.known, tol * f.unit
    d = start.numel()
    memory = min(MEMORY, d, max(FEWEST, REMEMBERED // (2 * d)))
    L, halved = (f.smoothness(start), 1.0) if known is None else (known.L, known.halved)
    best, rounds, each, earlier = (math.inf, start, start), 0, 0, None
    while rounds < max_rounds:
        gamma = min(1 / L, 0.5 / phi.rho if phi.rho > 0 else math.inf)
        method = FedNMapMemory(phi, eta_a=halved / L, eta_s=1.0, Q=1, gamma=gamma, memory=memory)
        server: Any = method.init(best[1])[0]
        if after is not None and known is not None:
            server, after = _carried(method, after.x, known), None
        each = nbytes(method.broadcast(server)) + nbytes(method.Up(server.z))
        while rounds < max_rounds:
            x = method.model(server)
            g = f.gradient(x)
            rounds += 1
            size = float(residual(x, g, phi, gamma).norm())
            best = min(best, (size, x, g), key=lambda found: found[0])
            if path_solver.EARLIER[0] * tol <= size <= path_solver.EARLIER[1] * tol:
                earlier = x, g
            if size <= tol or not size <= GROWTH * best[0]:
                break
            server = method.aggregate(server, method.Up(g + (server.z - x) / gamma), 1.0)
        if best[0] <= tol:
            break
        halved /= 2
    size, x, g = best
    loss = f.loss(x)
    sent, value = rounds * f.problem.n * each, loss + float(phi.value(x))
    return Fit(x, rounds, sent, value, size, size <= tol, loss, Known(L, halved, server, g), earlier)


def _carried(method: FedNMapMemory, x: Tensor, known: Known) -> Any:
    """The server at a prox-gradient step from where another phi ended, with the secants of f that it had then."""
    old, g = known.server, known.gradient
    z = x - method.gamma * g
    counts = Counts(*old.counts.tolist())
    fresh = Counts(secants=counts.secants, scale=counts.scale, smallest=math.inf, plain=0)
    return method.Server(z, g, z, g, z, old.S, old.Y, torch.tensor(fresh, dtype=torch.float64, device="cpu"))


def infinite(f: Prepared, fit: Fit, phi: Regularizer, tol: float, max_rounds: int) -> tuple[list[int], Fit]:
    """The columns whose estimates are infinite because f + phi has no minimiser, the largest first; and the fit, with
    the rounds of this test added.

    They are suspected where f has become flat along the last steps and phi does not grow along them. Then the
    coefficient that moved most is fixed `SHIFT` further on, and the others are fitted again. If the likelihood ratio
    against x is negligible, no value of that coefficient is too large. Sites send gradients only.
    """
    if fit.earlier is None or f.constants or not fit.converged:
        return [], fit
    before, g = fit.earlier
    s = fit.x - before
    fall, whole = -float(g @ s), f.with_penalty(phi)
    if not 0 < fall <= FLAT * float(np.square(s.numpy()) @ f.diagonal):
        return [], fit
    k = int((s[: f.end].abs() * dense(np.tile(f.deviation, f.outputs))).argmax())
    steps = float((fit.x[k].abs() + SHIFT / f.deviation[k % f.columns]) / s[k].abs())
    start = fit.x + steps * s
    if not float(whole.value(start) - whole.value(fit.x)) <= HELD * fall * steps:
        return [], fit
    fixed = Separable([(slice(k, k + 1), Box(float(start[k]), float(start[k])))])
    other = minimise(f, fixed, start, tol=0.01 * tol, max_rounds=min(max_rounds, PATIENCE))
    spent = fit._replace(rounds=fit.rounds + other.rounds, bytes=fit.bytes + other.bytes)
    ratio = 2 * len(f.sites.of_row) * (other.loss - fit.loss)
    return (moving(f, s) if ratio <= NEGLIGIBLE else []), spent


def moving(f: Prepared, s: Tensor) -> list[int]:
    """The columns that a step s along which the likelihood is monotone changes; the largest change first."""
    size = np.abs(f.coefficients(s)).max(0) * f.deviation
    order = np.argsort(-size, kind="stable")
    return [int(j) for j in order if size[j] > MOVING * size[order[0]]]
