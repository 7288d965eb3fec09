"""A quasi-Newton step on the normal map, from the rounds that the server remembers.

After a round the server knows x = prox(z) and g, the mean of the clients' gradients there. Differences of both are
secants of f: y ~ H s. With a model B of the curvature made of them, the next z solves the normal map of the model,

    g + B (prox(z') - x) + (z' - prox(z')) / gamma = 0,

which is to say that x' = prox(z') minimises <g, x'> + <x' - x, B (x' - x)> / 2 + phi(x'). No client takes part in that.
Without secants B = I / eta_hat, and with eta_hat = gamma the step is the plain one of FedNMap.

Jason D. Lee, Yuekai Sun and Michael A. Saunders, Proximal Newton-type methods for minimizing composite functions, 2014;
Richard H. Byrd, Jorge Nocedal and Robert B. Schnabel, Representations of quasi-Newton matrices, 1994, Theorem 2.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fednmap.core import Regularizer
from fednmap.measure import residual

GROWTH = 10.0  # of the natural residual since the last point that was kept: beyond it a step is taken back
RETRIES = 3  # steps taken back in a row, after which the plain step is kept in any case
ALARM = 100.0  # of the natural residual since the best point: beyond it that point is returned to, for plain rounds
BENT = 3  # secants of negative curvature, which are an alarm too: of noise, every other one is
STALE = 30  # rounds without a new best point, which are an alarm too
PLAIN = 10  # rounds after the first alarm, twice as many after each further one
INNER = 300  # prox steps on the model, at most
CLOSE = 0.1  # the model is minimised until its residual is so much smaller than the point's, times its root
CURVED = 1e-8  # least cosine between s and y: below it the secant does not fit a convex model
CAUTION = 3  # power of the share of clients counted, by which the model is made steeper


class Past(NamedTuple):
    """What a server remembers. Tensors, so that it is part of the server's state; m secants, the newest last."""

    z: Tensor
    """The last point that was kept,"""
    g: Tensor
    """and the clients' mean gradient there."""
    best: Tensor
    """The z with the smallest residual."""
    S: Tensor
    Y: Tensor
    counts: Tensor
    """See `Counts`."""


class Counts(NamedTuple):
    """The numbers in `Past.counts`."""

    secants: int = 0
    refused: int = 0
    """Steps taken back since the last point that was kept."""
    scale: float = 1.0
    """Of eta_hat in a step: halved when even the plain one, taken after others failed, was bad."""
    pace: float = 1.0
    """Of eta_hat in a stage of plain rounds: halved when the residual explodes in one."""
    smallest: float = 0.0
    """Residual of the best point."""
    stale: int = 0
    """Rounds since the best point."""
    bent: int = 0
    """Secants of negative curvature since the last alarm."""
    alarms: int = 0
    plain: int = 1
    """Plain rounds still to go; the first round is one, as there is nothing to compare it with."""


def empty(z: Tensor, memory: int) -> Past:
    """Before the first round."""
    zero, none = torch.zeros_like(z), z.new_zeros(memory, z.numel())
    return Past(z, zero, z, none, none, _tensor(Counts(), z))


def _tensor(counts: Counts, like: Tensor) -> Tensor:
    return torch.tensor(counts, dtype=torch.float64, device=like.device)


def next_point(
    phi: Regularizer,
    gamma: float,
    eta_hat: float,
    z: Tensor,
    y: Tensor,
    g: Tensor,
    past: Past,
    share: float,
    local: bool,
) -> tuple[Tensor, Past]:
    """Return z of the next round, and what is remembered then.

    y: the mean uplink of this round, the plain direction.
    g: the mean of all clients' gradients, new ones at prox(z) from the share of clients that was counted.
    local: the gradients are means over several local steps.

    A point with a residual GROWTH times that of the one before, or with a larger psi as far as both gradients show, is
    left again: its secant joins the memory, and the step is taken again; if that fails too the older secants are
    dropped; then the plain step is taken and kept, and eta_hat is halved if that one was bad as well.

    Gradients that are noisy or old, of lost replies or after local steps, can mislead all this. So if the residual
    rises to ALARM times the smallest one, if BENT secants have negative curvature, or if none is smaller in STALE
    rounds (4 STALE with one local step and all clients), plain rounds follow from the best point: PLAIN of them, then
    twice as many, and so on.
    """
    x, known = phi.prox(z, gamma), Counts(*past.counts.tolist())
    size = float(residual(x, g, phi, gamma).norm())
    rounding = torch.finfo(x.dtype).eps * max(1.0, float(x.norm())) / gamma
    exploded = size > ALARM / share * max(known.smallest, rounding)
    if known.plain:
        # once the clients' gradients are new again, an explosion says that eta_hat was too large
        if known.alarms and exploded and known.plain <= _stage(known.alarms) - PLAIN // 2:
            # smallest may come from few clients, before the others were ever counted: size is the new measure
            return _return(known._replace(pace=known.pace / 2, smallest=size), past)
        known = known._replace(plain=known.plain - 1)
        if known.plain == 0:
            known, past = known._replace(smallest=size), past._replace(best=z)
        return z - known.pace * eta_hat * y, past._replace(z=z, g=g, counts=_tensor(known, z))
    patience = STALE if local or share < 1 - 1e-9 else 4 * STALE  # where phi is small the residual may rise for long
    if exploded or known.stale >= patience or known.bent == BENT:
        return _return(known._replace(alarms=known.alarms + 1), past)
    known = known._replace(stale=known.stale + 1)
    if size < known.smallest:
        known, past = known._replace(smallest=size, stale=0), past._replace(best=z)
    known, past = _judged(phi, gamma, known, past, z, x, g)
    x = phi.prox(past.z, gamma)
    if known.refused == RETRIES:
        z = past.z - known.scale * eta_hat * (past.g + (past.z - x) / gamma)
    else:
        close = float(residual(x, past.g, phi, gamma).norm())
        steep, new = share**CAUTION, len(past.S) - int(known.secants)
        model = QuadraticModel(past.S[new:], past.Y[new:] / steep, 1 / (known.scale * eta_hat * steep))
        z = minimised(phi, gamma, x, past.g, model, model.largest, CLOSE * close * min(1.0, math.sqrt(close)))
    return z, past._replace(counts=_tensor(known, z))


def _stage(alarms: float) -> int:
    """Plain rounds after so many alarms."""
    return PLAIN << (int(alarms) - 1)


def _return(known: Counts, past: Past) -> tuple[Tensor, Past]:
    """To the best point, without secants, for a stage of plain rounds."""
    pace, smallest, alarms = known.pace, known.smallest, known.alarms
    known = Counts(pace=pace, smallest=smallest, alarms=alarms, plain=_stage(alarms))
    return past.best, past._replace(counts=_tensor(known, past.z))


def is_worse(
    phi: Regularizer, gamma: float, before: Tensor, g_before: Tensor, x: Tensor, g: Tensor, floor: float = 0.0
) -> bool:
    """Whether psi is larger at x than before, as far as both gradients show, or the residual GROWTH times as large.

    A residual below `floor` counts as `floor`.
    """
    s = x - before
    terms = torch.stack((g_before @ s / 2, g @ s / 2, phi.value(x), -phi.value(before)))
    rise, rounding = float(terms.sum()), 8 * torch.finfo(x.dtype).eps * float(terms.abs().sum())
    old, new = (float(residual(*at, phi, gamma).norm()) for at in ((before, g_before), (x, g)))
    return not (rise <= rounding and new <= GROWTH * max(old, floor))


def _judged(
    phi: Regularizer, gamma: float, known: Counts, past: Past, z: Tensor, x: Tensor, g: Tensor
) -> tuple[Counts, Past]:
    """The point z kept or left, its secant remembered."""
    before = phi.prox(past.z, gamma)
    s, y = x - before, g - past.g
    worse = is_worse(phi, gamma, before, past.g, x, g)
    if worse and known.refused == RETRIES:
        known = known._replace(scale=known.scale / 2)
    elif worse and known.refused:
        known = known._replace(secants=0)
    if float(s @ y) > CURVED * float(s.norm() * y.norm()):
        known = known._replace(secants=min(known.secants + 1, len(past.S)))
        past = past._replace(S=torch.cat((past.S[1:], s[None])), Y=torch.cat((past.Y[1:], y[None])))
    elif float(s @ y) < 0:
        known = known._replace(bent=known.bent + 1)
    if not worse or known.refused == RETRIES:
        return known._replace(refused=0), past._replace(z=z, g=g)
    return known._replace(refused=known.refused + 1), past


class QuadraticModel:
    """B of the L-BFGS method, in its compact form B = sigma I - W M W', with 2 m columns in W.

    sigma: the curvature in directions nobody has gone yet: |y|^2 / <s, y> of the newest secant, `else_` without any.
    """

    def __init__(self, S: Tensor, Y: Tensor, else_: float) -> None:
        self.sigma, self.W, self.M = else_, S.mT, S.new_zeros(0, 0)
        self.largest = else_
        if not len(S):
            return
        self.sigma = sigma = float(Y[-1] @ Y[-1] / (S[-1] @ Y[-1]))
        size = S.norm(dim=1, keepdim=True)  # secants of all lengths weigh alike in the small system
        S, Y = S / size, Y / size
        SY = S @ Y.mT
        low = SY.tril(-1)
        inner = torch.cat((torch.cat((sigma * S @ S.mT, low), 1), torch.cat((low.mT, -SY.diagonal().diag()), 1)))
        unit = inner.diagonal().abs().sqrt()
        self.W = torch.cat((sigma * S, Y)).div_(unit[:, None]).mT
        self.M = torch.linalg.pinv(inner / (unit[:, None] * unit), hermitian=True)
        R = torch.linalg.qr(self.W, mode="r").R
        low_rank = R @ self.M @ R.mT
        self.largest = max(sigma, sigma - float(torch.linalg.eigvalsh((low_rank + low_rank.mT) / 2)[0]))

    def __call__(self, v: Tensor) -> Tensor:
        return self.sigma * v - self.W @ (self.M @ (self.W.mT @ v))


def minimised(
    phi: Regularizer, gamma: float, x: Tensor, g: Tensor, B: Callable[[Tensor], Tensor], largest: float, close: float
) -> Tensor:
    """z with prox(z, gamma) = argmin_u <g, u> + <u - x, B (u - x)> / 2 + phi(u), by accelerated prox steps from x.

    largest: the largest eigenvalue of B.
    u = prox(v, step) says that (v - u) / step is a subgradient of phi at u, so z = u + gamma (v - u) / step.
    """
    step = 1 / max(largest, 2 * phi.rho if phi.rho < math.inf else 0.0, torch.finfo(x.dtype).tiny)
    floor = 4 * torch.finfo(x.dtype).eps * float(x.norm()) / step
    u = point = v = x
    turn = 1.0
    for k in range(INNER):
        v = point - step * (g + B(point - x))
        new = phi.prox(v, step)
        moved = point - new
        if k and float(moved.norm()) / step <= max(close, floor):
            u = new
            break
        if float(moved @ (new - u)) > 0:  # momentum leads uphill: restart
            turn, point = 1.0, new
        else:
            longer = (1 + math.sqrt(1 + 4 * turn * turn)) / 2
            turn, point = longer, new + (turn - 1) / longer * (new - u)
        u = new
    return u + gamma / step * (v - u)
