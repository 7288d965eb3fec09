"""Minimise f(x) + l1 |w|_1 + l2 |w|^2 / 2 for one pair (l1, l2) or for many at once, in few rounds.

A round sends points to the sites and their gradients back, as every round here does; with several penalties it carries
a point of each that has not ended, so that a whole path takes about as many rounds as one fit, and a site goes through
its rows once for all of them. The server keeps a dense model D of the Hessian of f and goes from x to

    x' = argmin_u <g, u> + <u - x, D (u - x)> / 2 + l1 |u|_1 + l2 |u|^2 / 2,

the step of FedNMap with memory (`fednmap.algorithms.memory`). D is updated (BFGS, in blocks) by the secants between a
point and the next, and between the points of neighbouring penalties in one round: 50 of them teach it fifty times as
fast, and the 50 lasso models of a path take fewer rounds than the last of them by itself.

Reference for blocks: Schnabel, Quasi-Newton methods using multiple secant equations, 1983.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import linalg

from fednmap.estimators.sites import Floats

SIZE = 600
"""Most coordinates for which a dense model is kept."""
GROUP = 10
"""Neighbouring penalties that share a model where the Hessian changes with x."""
CURVED = 1e-10
"""Least cosine between s and y of a secant that is believed."""
CLOSE = 0.01
"""The model is minimised until its residual is so much smaller than the point's."""
APART = 1e-4
"""Directions of several secants in which f curves this much less than in another are not told apart from the change of
the Hessian between them,"""
EXACT = 1e-9
"""and where that does not change, from rounding."""
FLATTER = 0.5
"""Least factor by which a whole model is made flatter (self-scaling: Oren and Luenberger, 1974)."""
LOST = 5
"""Steps that fail in a row, after which the model is forgotten."""
INNER = 500
"""Prox steps on the model, at most."""
NEWTON = 20
"""Changes of the set of nonzero coefficients, at most, before prox steps are taken instead."""
BACK = 0.25
"""How far the next trial goes, where steps fail although the model has learnt from them."""
TINY = float(np.finfo(np.float64).tiny)
EPS = float(np.finfo(np.float64).eps)

Gradients = Callable[[Floats], Floats]
"""Gradients of f at points (k, d)."""


@dataclass(frozen=True, eq=False)
class Shrink:
    """l1 |w|_1 + l2 |w|^2 / 2 on the first `end` coordinates, for k penalties (l1 and l2 are (k, 1))."""

    l1: Floats
    l2: Floats
    end: int

    def prox(self, v: Floats, step: Floats | float) -> Floats:
        """Row by row; v may be written over."""
        w, reach = v[:, : self.end], step * self.l1
        w -= np.clip(w, -reach, reach)
        w /= 1 + step * self.l2
        return v

    def value(self, x: Floats) -> Floats:
        w = x[:, : self.end]
        found: Floats = self.l1[:, 0] * np.abs(w).sum(1) + 0.5 * self.l2[:, 0] * np.einsum("kj,kj->k", w, w)
        return found

    def some(self, rows: npt.NDArray[np.intp]) -> Shrink:
        return Shrink(self.l1[rows], self.l2[rows], self.end)

    def residuals(self, x: Floats, g: Floats, gamma: float) -> Floats:
        """F_nat, row by row."""
        return (x - self.prox(x - gamma * g, gamma)) / gamma


class Found(NamedTuple):
    """Minimisers (k, d), the gradients of f there, |F_nat| of each, and the rounds in which each took part."""

    x: Floats
    g: Floats
    sizes: Floats
    rounds: npt.NDArray[np.intp]
    gamma: float


class Dense:
    """A model D of the Hessian of f, positive definite, begun with a diagonal."""

    def __init__(self, D: Floats, constant: bool) -> None:
        self.D, self.constant, self._leading = D, constant, np.ones(len(D))

    def copy(self) -> Dense:
        return Dense(self.D.copy(), self.constant)

    def forget(self, diagonal: Floats) -> None:
        """Begin again, as steep as it ever was."""
        self.D = np.diag(diagonal * self.largest() / diagonal.min())

    def learn(self, s: Floats, y: Floats) -> None:
        """BFGS with several secants (m, d) at once: D s = y from now on, in the directions that they tell apart."""
        size = np.sqrt(np.einsum("kj,kj->k", s, s))
        told = np.einsum("kj,kj->k", s, y) > CURVED * size * np.sqrt(np.einsum("kj,kj->k", y, y))
        s, y = s[told] / size[told, None], y[told] / size[told, None]
        if not len(s):
            return
        if not self.constant:
            flatter = float((np.einsum("kj,kj->k", s, y) / np.einsum("kj,kj->k", s @ self.D, s)).mean())
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
            self.D += y.T @ y - v.T @ before

    def largest(self) -> float:
        """The largest eigenvalue and a little more, by power iteration from where the last one ended."""
        v, size = self._leading, 1.0
        for _ in range(8):
            v = self.D @ (v / np.sqrt(v @ v))
        size = float(np.sqrt(v @ v))
        self._leading = v + 1e-3 * size / np.sqrt(len(v))
        return 1.1 * size

    def next_points(self, x: Floats, g: Floats, phi: Shrink, close: Floats) -> Floats:
        """argmin of the model for each row of x."""
        if len(x) == 1:
            found = self._by_sets(x[0], g[0], float(phi.l1[0, 0]), float(phi.l2[0, 0]), phi.end)
            if found is not None:
                return found[None]
        return self._by_steps(x, g, phi, close)

    def _by_sets(self, x: Floats, g: Floats, l1: float, l2: float, end: int) -> Floats | None:
        """Semismooth Newton: guess which coefficients are not 0 and of what sign, solve, look again; None: no end."""
        D, b = self.D, self.D @ x - g
        diagonal = D.diagonal().copy()
        diagonal[:end] += l2
        v = x * diagonal - (D @ x - b)  # of a step by the diagonal alone, times the diagonal
        v[:end] -= l2 * x[:end]
        if l1 == 0:
            A = D.copy()
            A[np.arange(end), np.arange(end)] += l2
            return _solved(A, b)
        sign = np.where(np.abs(v) > l1, np.sign(v), 0.0)
        sign[end:] = 2.0
        u = x
        for _ in range(NEWTON):
            inside = np.flatnonzero(sign)
            A = D[np.ix_(inside, inside)]
            ridge = np.count_nonzero(inside < end)
            A[np.arange(ridge), np.arange(ridge)] += l2
            solved = _solved(A, b[inside] - l1 * np.where(inside < end, sign[inside], 0.0))
            if solved is None:
                return None
            u = np.zeros_like(x)
            u[inside] = solved
            slope = D @ u - b
            slope[:end] += l2 * u[:end]
            v = diagonal * u - slope
            new = np.where(np.abs(v) > l1, np.sign(v), 0.0)
            new[end:] = 2.0
            if bool((new == sign).all()):
                return u
            sign = new
        return None

    def _by_steps(self, x: Floats, g: Floats, phi: Shrink, close: Floats) -> Floats:
        """Accelerated prox steps, all rows at once, each begun anew where its momentum leads uphill."""
        step = 1 / max(self.largest(), TINY)
        u = point = x
        turn = np.ones(len(x))
        linear = g - x @ self.D
        for k in range(INNER):
            new = phi.prox(point - step * (linear + point @ self.D), step)
            moved = point - new
            if k and bool((np.einsum("kj,kj->k", moved, moved) <= np.square(step * close)).all()):
                return new
            uphill = np.einsum("kj,kj->k", moved, new - u) > 0
            longer = (1 + np.sqrt(1 + 4 * turn * turn)) / 2
            point = new + np.where(uphill, 0.0, (turn - 1) / longer)[:, None] * (new - u)
            turn, u = np.where(uphill, 1.0, longer), new
        return u


def minimised(
    gradients: Gradients,
    start: Floats,
    phi: Shrink,
    diagonal: Floats,
    *,
    tol: float,
    max_rounds: int,
    constant: bool,
    first: Floats | None = None,
) -> Found:
    """Rounds until |F_nat| <= tol for every penalty, or max_rounds.

    diagonal: about that of the Hessian; gamma of F_nat is 1 / its sum.
    constant: the Hessian is the same everywhere, so that all penalties share one model.
    first:    the gradient at the start, where it is known.
    """
    k, gamma = len(phi.l1), 1 / float(diagonal.sum())
    x = np.tile(start, (k, 1))
    g = np.tile(gradients(start[None])[0] if first is None else first, (k, 1))
    rounds = np.ones(k, np.intp)
    sizes = np.linalg.norm(phi.residuals(x, g, gamma), axis=1)
    models, groups = [Dense(np.diag(diagonal), constant)], [np.arange(k)]
    refused, trial = np.zeros(k, np.intp), x.copy()
    for done in range(1, max_rounds):
        left = np.flatnonzero(~(sizes <= tol))
        if not len(left):
            break
        if done == 2 and not constant and k > GROUP:
            groups = np.array_split(np.arange(k), -(-k // GROUP))
            models = [models[0].copy() for _ in groups]
        for model, rows in _working(models, groups, left, refused < 2):
            trial[rows] = model.next_points(x[rows], g[rows], phi.some(rows), CLOSE * sizes[rows])
        shorter = left[refused[left] >= 2]
        trial[shorter] = x[shorter] + BACK * (trial[shorter] - x[shorter])
        new = np.empty_like(g)
        new[left] = gradients(trial[left])
        rounds[left] += 1
        usable = np.zeros(k, bool)
        usable[left] = np.isfinite(new[left]).all(1)
        for model, rows in _working(models, groups, left, usable):
            model.learn(
                np.concatenate([trial[rows] - x[rows], np.diff(trial[rows], axis=0)]),
                np.concatenate([new[rows] - g[rows], np.diff(new[rows], axis=0)]),
            )
        s = trial[left] - x[left]
        mine = phi.some(left)
        with np.errstate(invalid="ignore"):
            slope = 0.5 * np.einsum("kj,kj->k", s, g[left] + new[left])
        after, before = mine.value(trial[left]), mine.value(x[left])
        rounding = 8 * EPS * (np.abs(slope) + np.abs(after) + np.abs(before))
        better = usable[left] & (slope + after - before <= rounding)
        kept = left[better]
        refused[left] = np.where(better, 0, np.where(usable[left], refused[left] + 1, 2))
        for model, rows in _working(models, groups, left, refused >= LOST):
            model.forget(diagonal)
            refused[rows] = 0
        x[kept], g[kept] = trial[kept], new[kept]
        sizes[kept] = np.linalg.norm(phi.some(kept).residuals(x[kept], g[kept], gamma), axis=1)
    return Found(x, g, sizes, rounds, gamma)


def _working(
    models: list[Dense], groups: list[npt.NDArray[np.intp]], left: npt.NDArray[np.intp], which: npt.NDArray[np.bool_]
) -> Iterator[tuple[Dense, npt.NDArray[np.intp]]]:
    """Every model with those of its rows that are meant."""
    meant = np.zeros(len(which), bool)
    meant[left] = which[left]
    for model, rows in zip(models, groups, strict=True):
        mine = rows[meant[rows]]
        if len(mine):
            yield model, mine


def _solved(A: Floats, b: Floats) -> Floats | None:
    """A^-1 b for a positive definite A; None where it is not."""
    if not len(b):
        return b
    _, found, info = linalg.lapack.dposv(A, b, lower=1)
    return found if info == 0 else None
