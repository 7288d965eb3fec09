"""Minimise f(x) + l1 |w|_1 + l2 |w|^2 / 2 for one pair (l1, l2) or a batch of them, in few rounds; l1 may be a weight
for every coefficient.

A round sends points to the sites and their gradients back, as every round here does; with several penalties it carries
a point of each that has not ended, so that a whole path takes about as many rounds as one fit, and a site goes through
its rows once for all of them. The server keeps a dense model D of the Hessian of f and goes from x to

    x' = argmin_u <g, u> + <u - x, D (u - x)> / 2 + l1 |u|_1 + l2 |u|^2 / 2,

the step of FedNMapMemory (`fednmap.algorithms.quasi_newton`). D is updated (BFGS, in blocks) by the secants between a
point and the next, and between the points of neighbouring penalties in one round: 50 of them teach it fifty times as
fast, and the 50 lasso models of a path take fewer rounds than the last of them by itself. Where the Hessian changes
with x, most penalties of a path come in later: when their neighbours are half way there, and from where those are.

MCP and SCAD are l1 less a convex function, and x' is then a stationary point of the model, found from x: the objective
falls from round to round, to a stationary point of f + phi.

Reference for blocks: Schnabel, Quasi-Newton methods using multiple secant equations, 1983.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import linalg

from fednmap.estimators.rows import Floats

SIZE = 1000  # most coordinates for which a dense model is kept
NEAR = 4.0  # penalties within this factor share a model if the Hessian changes with x; the first of them begins alone
CURVED = 1e-10  # least cosine between s and y of a secant that is used
CLOSE = 0.1  # the model is solved until its residual is so much smaller than the point's
APART = 1e-4  # least curvature of f over the largest along several secants; below, the Hessian's change hides it
EXACT = 1e-9  # the same if the Hessian is constant: below, rounding hides it
FLATTER = 0.5  # least factor by which a whole model is made flatter (self-scaling: Oren and Luenberger, 1974)
LOST = 5  # steps that fail in a row, after which the model begins again
INNER = 500  # prox steps on the model, at most
MOVING = 5.0  # where in the sequence of momenta prox steps begin
LEAVES = 1e12  # growth of a prox step's square that says the model has no minimum: rounding made it curve down
SMALL = 1e-15  # points as small, or as large as its inverse, are rescaled: single precision ends there
NEWTON = 20  # changes of the set of nonzero coefficients, at most, before prox steps are taken instead
BACK = 0.25  # part of the step that the next trial goes if steps fail although the model has learnt from them
WIDER = 2.0  # growth of the bound on steps over the step that was kept; a refused one halves it
POLISH = 1e-7  # the tolerance of a model that is polished, relative to the others'
MORE = 30  # rounds for polishing, at most: rounding may forbid it
EARLIER = 30.0, 1e3  # bounds of |F_nat| / tol at the earlier point that a fit remembers
TINY = float(np.finfo(np.float64).tiny)
EPS = float(np.finfo(np.float64).eps)

Numbers = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]
Gradients = Callable[[Floats], Floats]
"""Gradients of f at points (k, d)."""


@dataclass(frozen=True, eq=False)
class Penalties:
    """l1 |w|_1 + l2 |w|^2 / 2 on the first `end` coordinates w, for k penalties: l1 and l2 are (k, 1) or (k, end).

    With rho > 0 (k, 1), MCP and SCAD: from |w_j| = knee on, the slope l1 falls with the curvature -rho until it is 0.
    """

    l1: Floats
    l2: Floats
    end: int
    rho: Floats | None = None
    knee: Floats | None = None

    def prox(self, v: Floats, step: float) -> Floats:
        """Row by row, for step rho < 1; v may be written over."""
        w, reach = v[:, : self.end], step * self.l1
        short = np.maximum(w, -reach)
        w -= np.minimum(short, reach, out=short)
        if self.l2.any():
            w /= 1 + step * self.l2
        if self.rho is not None:
            more = np.clip(np.abs(w) - self.knee, 0, self.l1 * (1 / self.rho - step))
            more *= step * self.rho / (1 - step * self.rho)
            w += np.copysign(more, w)
        return v

    def value(self, x: Floats) -> Floats:
        w = np.abs(x[:, : self.end])
        found: Floats = (self.l1 * w).sum(1) + 0.5 * (self.l2 * np.square(w)).sum(1)
        if self.rho is not None:
            past = np.maximum(w - self.knee, 0)
            bent = np.minimum(past, self.l1 / self.rho)
            found -= (0.5 * self.rho * np.square(bent) + self.l1 * (past - bent)).sum(1)
        return found

    def some(self, rows: Numbers) -> Penalties:
        return self if len(rows) == len(self.l1) else self._each(lambda part: part[rows], self.end)

    def on(self, places: Numbers) -> Penalties:
        """On some of the w."""
        return self._each(lambda part: part if part.shape[1] == 1 else part[:, places], len(places))

    def _each(self, change: Callable[[Floats], Floats], end: int) -> Penalties:
        rho, knee = (None if part is None else change(part) for part in (self.rho, self.knee))
        return Penalties(change(self.l1), change(self.l2), end, rho, knee)

    @property
    def longest(self) -> float:
        """The largest step of `prox` that is well conditioned."""
        return np.inf if self.rho is None else 0.5 / float(self.rho.max())

    def neighbours(self) -> list[Numbers]:
        """The numbers of penalties that are near each other, in their order."""
        weight = np.maximum((self.l1 + self.l2).max(1), TINY)
        steps = np.floor(np.log(weight[0] / weight) / np.log(NEAR))
        return np.split(np.arange(len(weight)), np.flatnonzero(np.diff(steps)) + 1)

    def residuals(self, x: Floats, g: Floats, gamma: float) -> Floats:
        """F_nat, row by row."""
        return (x - self.prox(x - gamma * g, gamma)) / gamma


class Found(NamedTuple):
    """Minimisers (k, d), |F_nat| of each, the rounds in which each took part, and all."""

    x: Floats
    sizes: Floats
    rounds: Numbers
    total: int
    earlier: Floats
    """Of each the last point whose |F_nat| was within `EARLIER`, and the gradient of f there, (k, 2, d); NaN if
    there was none."""


class HessianModel:
    """A model D of the Hessian of f, positive definite, begun with a diagonal."""

    def __init__(self, D: Floats, constant: bool, sent: bool = False) -> None:
        self.D, self.constant, self.sent, self._leading = D, constant, sent, np.ones(len(D))

    def forget(self, diagonal: Floats) -> None:
        """Begin again, as steep as it ever was."""
        self.D = np.diag(diagonal * self.largest() / diagonal.min())

    def learn(self, s: Floats, y: Floats) -> None:
        """BFGS with several secants (m, d): D s = y from now on, in the directions that they span."""
        size = _norms(s)
        told = _dots(s, y) > CURVED * size * _norms(y)
        s, y = s[told] / size[told, None], y[told] / size[told, None]
        if not len(s):
            self.D *= FLATTER  # f is linear along them
            return
        if not self.constant:
            flatter = float((_dots(s, y) / _dots(s @ self.D, s)).mean())
            self.D *= min(1.0, max(FLATTER, flatter))  # f has become flatter, so perhaps in other directions too
        if len(s) > 1:
            both = s @ y.T
            values, vectors = linalg.eigh((both + both.T) / 2)
            kept = values > (EXACT if self.constant else APART) * values[-1]
            turn = vectors[:, kept].T / np.sqrt(values[kept])[:, None]
            s, y = turn @ s, turn @ y
        else:
            y = y / np.sqrt(s[0] @ y[0])
        v = s @ self.D
        before = _solved(s @ v.T, v)
        if before is not None:
            self._add(1.0, y, y)
            self._add(-1.0, v, before)

    def _add(self, factor: float, a: Floats, b: Floats) -> None:
        """D + factor a' b, in place: a temporary would be as large as D."""
        linalg.blas.dgemm(factor, a.T, b.T, beta=1.0, c=self.D.T, trans_b=1, overwrite_c=1)

    def largest(self) -> float:
        """The largest eigenvalue and a little more, by power iteration from where the last one ended."""
        v = self._leading
        for _ in range(8):
            v = self.D @ (v / np.sqrt(v @ v))
        size = float(np.sqrt(v @ v))
        self._leading = v + 1e-3 * size / np.sqrt(len(v))
        return 1.1 * size

    def next_points(self, x: Floats, g: Floats, phi: Penalties, close: Floats) -> Floats:
        """argmin of the model for each row of x; with rho > 0 a stationary point."""
        if phi.rho is None and (len(x) == 1 or self.sent):
            found = []
            for k in range(len(x)):
                u = self.by_sets(x[k], g[k], phi.l1[k], phi.l2[k], phi.end)
                if u is None:
                    break
                found.append(u)
            else:
                return np.stack(found)
        return self._by_steps(x, g, phi, close)

    def by_sets(self, x: Floats, g: Floats, l1: Floats | float, l2: Floats | float, end: int) -> Floats | None:
        """Semismooth Newton: guess which coefficients are not 0 and of what sign, solve, look again; None: no end."""
        D, b, l2 = self.D, self.D @ x - g, np.broadcast_to(l2, end)
        diagonal, pull = D.diagonal().copy(), np.zeros_like(x)
        diagonal[:end] += l2
        pull[:end] = l1
        if not pull.any():
            return _solved(_ridged(D.copy(), l2), b)
        v = x * diagonal - g  # of a step by the diagonal alone, times the diagonal
        v[:end] -= l2 * x[:end]
        sign = _signs(v, pull)
        for _ in range(NEWTON):
            inside = sign.nonzero()[0]
            A = D[inside[:, None], inside]
            solved = _solved(_ridged(A, l2[inside[inside < end]]), (b - pull * sign)[inside])
            if solved is None:
                return None
            u = np.zeros_like(x)
            u[inside] = solved
            slope = D @ u - b
            slope[:end] += l2 * u[:end]
            new = _signs(diagonal * u - slope, pull)
            if bool((new == sign).all()):
                return u
            sign = new
        return None

    def _by_steps(self, x: Floats, g: Floats, phi: Penalties, close: Floats) -> Floats:
        """Accelerated prox steps, batched over rows; a row restarts where its momentum leads uphill."""
        step = min(1 / max(self.largest(), TINY), phi.longest)
        size = max(float(np.abs(x).max()), step * float(np.abs(g).max()))
        if 0 < size < SMALL or 1 / SMALL < size < np.inf:
            unit = 2.0 ** int(np.log2(size))
            small = replace(phi, l1=phi.l1 / unit, knee=None if phi.knee is None else phi.knee / unit)
            return unit * self._by_steps(x / unit, g / unit, small, close / unit)
        ahead, g, little = (step * self.D).astype(np.float32), step * g, np.square(step * close)
        u, point, way = x, x.copy(), np.empty(x.shape, np.float32)
        turn, far = np.full(len(x), MOVING), 0.0
        for k in range(INNER):
            np.subtract(point, x, out=way, casting="same_kind")  # short, and so is the error of its product
            new = point - way @ ahead
            new -= g
            phi.prox(new, step)
            point -= new
            rest = _dots(point, point)
            if k == 0:
                far = LEAVES * float(rest.max())
            elif bool((rest <= little).all()) or rest.max() > far:
                return new
            moved = new - u
            turn[_dots(point, moved) > 0] = 1.0
            longer = 0.5 + np.sqrt(0.25 + turn * turn)
            u, point = new, new + ((turn - 1) / longer)[:, None] * moved
            turn = longer
        return u


def solve(
    gradients: Gradients,
    start: Floats,
    phi: Penalties,
    diagonal: Floats,
    *,
    tol: float,
    max_rounds: int,
    constant: bool,
    first: Floats | None = None,
    polish: int | None = None,
    reach: Floats | None = None,
    gamma: float | None = None,
    model: HessianModel | None = None,
) -> Found:
    """Rounds until |F_nat| <= tol for every penalty, or max_rounds.

    start:    a point, or one for every penalty.
    diagonal: about that of the Hessian; gamma of F_nat is 1 / its sum by default.
    constant: the Hessian is the same everywhere, so that all penalties share one model.
    first:    the gradient at the start, where it is known.
    polish:   the number of a penalty whose minimiser is found more exactly, so that it does not depend on rounding.
    reach:    for each coordinate the longest first step, where f has regions without curvature; None: no bound.
    model:    what is known of the Hessian; it learns.
    """
    k, gamma = len(phi.l1), min(gamma or 1 / float(diagonal.sum()), phi.longest)
    x = np.array(np.broadcast_to(start, (k, start.shape[-1])))
    g = np.array(np.broadcast_to(gradients(np.atleast_2d(start)) if first is None else first, x.shape))
    rounds = np.ones(k, np.intp)
    sizes, values = _norms(phi.residuals(x, g, gamma)), phi.value(x)
    models, groups = [model or HessianModel(np.diag(diagonal), constant)], [np.arange(k)]
    refused, trial, new = np.zeros(k, np.intp), x.copy(), np.empty_like(g)
    radius = np.ones(k)
    earlier = np.full((k, 2, len(diagonal)), np.nan)
    inside, half, total = np.full(k, constant or start.ndim == 2), np.sqrt(tol * max(tol, sizes.max())), 1
    goal, more = np.full(k, tol), MORE
    if polish is not None:
        goal[polish] *= POLISH
    inside[[-1, *(rows[0] for rows in phi.neighbours())]] = True
    for done in range(1, max_rounds):
        if not inside.all():
            late, near = _joining(inside, (sizes <= half) | (done >= max_rounds // 2))
            x[late], g[late], inside[late] = x[near], g[near], True
            values[late] = phi.some(late).value(x[late])
            sizes[late] = _norms(phi.some(late).residuals(x[late], g[late], gamma))
        left = np.flatnonzero(inside & ~(sizes <= goal))
        more -= bool((sizes <= tol).all())
        if not len(left) or more < 0:
            break
        total += 1
        if done == 2 and not constant and k > 1:
            groups = phi.neighbours()
            models += [HessianModel(models[0].D.copy(), constant) for _ in groups[1:]]
        shorter = refused[left] >= 2
        for model, rows in _working(models, groups, left[~shorter]):
            trial[rows] = model.next_points(x[rows], g[rows], phi.some(rows), CLOSE * sizes[rows])
        if shorter.any():
            rows = left[shorter]
            trial[rows] = x[rows] + BACK * (trial[rows] - x[rows])
        if reach is not None:
            step = trial[left] - x[left]
            length = np.abs(step / reach).max(1)
            length, part = np.minimum(length, radius[left]), np.minimum(1, radius[left] / np.maximum(length, TINY))
            trial[left] = x[left] + part[:, None] * step
        new[left] = gradients(trial[left])
        rounds[left] += 1
        finite = np.isfinite(new[left]).all(1)
        usable = left[finite]
        for model, rows in _working(models, groups, usable):
            s, y = trial[rows] - x[rows], new[rows] - g[rows]
            if len(rows) > 1 and (constant or phi.rho is None):  # minima of MCP and SCAD may be far apart
                s, y = (np.concatenate([v, np.diff(at[rows], axis=0)]) for v, at in ((s, trial), (y, new)))
            model.learn(s, y)
        refused[left[~finite]] = np.where(np.isfinite(trial[left[~finite]]).all(1), 2, LOST)
        after = phi.some(usable).value(trial[usable])
        slope = 0.5 * _dots(trial[usable] - x[usable], g[usable] + new[usable])
        rounding = 8 * EPS * (np.abs(slope) + np.abs(after) + np.abs(values[usable]))
        better = slope + after - values[usable] <= rounding
        refused[usable] = np.where(better, 0, refused[usable] + 1)
        for model, rows in _working(models, groups, left[refused[left] >= LOST]):
            model.forget(diagonal)
            refused[rows] = 0
        kept = usable[better]
        if reach is not None:
            wider = np.maximum(radius[left], WIDER * length)
            radius[left] = np.where(np.isin(left, kept), wider, length / WIDER)
        x[kept], g[kept], values[kept] = trial[kept], new[kept], after[better]
        sizes[kept] = _norms(phi.some(kept).residuals(x[kept], g[kept], gamma))
        near = kept[(sizes[kept] >= EARLIER[0] * tol) & (sizes[kept] <= EARLIER[1] * tol)]
        earlier[near, 0], earlier[near, 1] = x[near], g[near]
    return Found(x, sizes, rounds, total, earlier)


def _joining(inside: Flags, close: Flags) -> tuple[Numbers, Numbers]:
    """Those that are not inside yet and whose neighbours inside, on both sides, are close; and the nearer neighbour."""
    marks, late = np.flatnonzero(inside), np.flatnonzero(~inside)
    after = np.searchsorted(marks, late)
    low, high = marks[after - 1], marks[after]
    joining = close[low] & close[high]
    return late[joining], np.where(late - low <= high - late, low, high)[joining]


def _working(
    models: list[HessianModel], groups: list[Numbers], meant: Numbers
) -> Iterator[tuple[HessianModel, Numbers]]:
    """Every model with those of its rows that are meant."""
    for model, rows in zip(models, groups, strict=True):
        mine = meant[(meant >= rows[0]) & (meant <= rows[-1])]
        if len(mine):
            yield model, mine


def _signs(v: Floats, pull: Floats) -> Floats:
    """Of the coefficients after a prox step; those that are not penalised are marked too."""
    return np.where(pull > 0, np.sign(v) * (np.abs(v) > pull), 2.0)


def _ridged(A: Floats, l2: Floats) -> Floats:
    """A + l2 on the first places of the diagonal, in place."""
    if l2.any():
        A[np.arange(len(l2)), np.arange(len(l2))] += l2
    return A


def _dots(a: Floats, b: Floats) -> Floats:
    found: Floats = np.einsum("ij,ij->i", a, b)
    return found


def _norms(a: Floats) -> Floats:
    found: Floats = np.sqrt(_dots(a, a))
    return found


def _solved(A: Floats, b: Floats) -> Floats | None:
    """A^-1 b for a positive definite A, which is written over; None where it is not."""
    if not len(b):
        return b
    _, found, info = linalg.lapack.dposv(A.T, b, lower=1, overwrite_a=1)
    return found if info == 0 else None
