"""l1 models of wide tables: only the coefficients of a working set are solved for, in separate rounds, and a round
with the gradient by all columns then checks the optimality conditions of the whole problem.

The strong rule chooses the columns for the next lam, or for several in one round: those whose gradient at the last
model is at least 2 lam - last lam. A column whose gradient exceeds its lam after all joins, and the rounds begin again.

References: Tibshirani and others, Strong rules for discarding predictors in lasso-type problems, 2012; Massias,
Gramfort and Salmon, Celer: a fast solver for the lasso with dual extrapolation, 2018 (growth of working sets).
"""

from __future__ import annotations

import numpy as np

from fednmap.estimators import path_solver
from fednmap.estimators.path_solver import Found, HessianModel, Numbers, Penalties
from fednmap.estimators.prepare import Prepared, dense
from fednmap.estimators.rows import Floats

LEAST = 100  # columns, at least, that a working set may have, if there are as many
GROWTH = 1.5  # columns of a working set over those with coefficients, at most, beyond it
INSIDE = 0.5  # of the tolerance: |F_nat| of the coefficients in the working set
SOME = 0.03  # of |F_nat|, where the working set lacks columns that the rule asks for
RIDGE = 1e-9  # added to a Hessian's diagonal, relative to it
FEW = 10  # rounds with a Hessian partly of an earlier model, beyond which the whole is asked for again
MANY, FEWER = 4, 0.5  # columns that violate the conditions, over `path_solver.SIZE` and over those of the check before
MOST = 20  # values of lam that are solved for together, at most


def solve(
    f: Prepared, phi: Penalties, *, tol: float, max_rounds: int, first: Floats | None = None
) -> tuple[Found, Numbers]:
    """Minimisers of f + phi for penalties in falling order, and the bytes of each.

    first: the gradient at the start, where it is known. For the rest see `path_solver.solve`.
    """
    k, d, p = len(phi.l1), len(f.start), f.columns
    l1 = np.broadcast_to(phi.l1, (k, f.end))
    start, gamma = f.start.numpy(), min(1 / float(f.diagonal.sum()), phi.longest)
    g = f.gradient(f.start).numpy() if first is None else first
    x, earlier, sizes = np.repeat(start[None], k, 0), np.full((k, 2, 1), np.nan), np.full(k, np.inf)
    rounds, sent, total = np.ones(k, np.intp), np.full(k, 16 * d * len(f.sites)), 1
    none = np.empty(0, np.intp)
    model, before, done = HessianModel(np.empty((0, 0)), f.quadratic), none, 0
    last = np.maximum(np.abs(g[: f.end]).max(), l1[0])

    def by_column(values: Floats) -> Floats:
        """The largest of all rows and outputs, (p,)."""
        found: Floats = values[..., : f.end].reshape(-1, p).max(0)
        return found

    at, violated = start, p
    while done < k:
        nonzero = by_column(np.abs(at[: f.end]) + (l1[done] == 0)) > 0
        cap = min(max(LEAST, int(GROWTH * nonzero.sum())), path_solver.SIZE // f.outputs)
        end, excess = done + 1, by_column(np.abs(g[: f.end]) - 2 * l1[done] + last)
        while end < min(k, done + MOST):
            more = by_column(np.abs(g[: f.end]) - 2 * l1[end] + last)
            if np.count_nonzero(nonzero | (more >= 0)) > cap:
                break
            end, excess = end + 1, more
        columns, whole = _largest(nonzero, excess, cap - int(nonzero.sum()))
        rows = np.arange(done, end)
        now, slopes, here = np.repeat(at[None], len(rows), 0), np.repeat(g[None], len(rows), 0), phi.some(rows)
        size = np.sqrt(np.square(here.residuals(now, slopes, gamma)).sum(1))
        while True:
            part, places = f.restricted(columns)
            D = part.hessian(dense(now[0, places])).numpy() + np.diag(RIDGE * part.diagonal)
            _, old, new = np.intersect1d(before, places, return_indices=True)
            D[new[:, None], new] = model.D[old[:, None], old]
            sent[done] += 8 * len(f.sites) * (len(places) ** 2 - len(new) ** 2)
            model, before = HessianModel(D, f.quadratic, sent=True), places
            goal = INSIDE * tol if whole else max(INSIDE * tol, SOME * float(size.max()))
            found = path_solver.solve(
                part.slopes,
                now[:, places],
                here.on(places[: part.end]),
                part.diagonal,
                tol=goal,
                max_rounds=max_rounds,
                constant=f.quadratic,
                first=slopes[:, places],
                gamma=gamma,
                model=model,
            )
            if found.total > FEW:
                before = none
            now[:, places] = found.x
            slopes = f.slopes(now)
            rest = here.residuals(now, slopes, gamma)
            size = np.sqrt(np.square(rest).sum(1))
            rounds[rows] += found.rounds
            sent[rows] += 8 * len(f.sites) * (2 * len(places) * (found.rounds - 1) + len(places) + d)
            total += found.total + 1  # the Hessian, then rounds on the working set (the first is known), then a check
            outside = by_column(np.abs(rest))
            outside[columns] = 0
            complete = not outside.any()
            if (size <= tol).all() or (complete and whole) or rounds[rows].max() >= max_rounds:
                break
            inside = np.zeros(p, bool)
            inside[columns] = True
            columns, whole = _largest(inside, np.where(outside > 0, outside, -1.0), max(LEAST, len(columns)))
            before_that, violated = violated, int(np.count_nonzero(outside))
            hopeless = violated > max(MANY * path_solver.SIZE, FEWER * before_that)
            if hopeless or len(columns) * f.outputs > 2 * path_solver.SIZE:
                x[done:] = now[-1]
                return Found(x, sizes, rounds, total, earlier), sent
        x[rows], sizes[rows] = now, size
        at, g, last, done = now[-1], slopes[-1], l1[end - 1], end
    return Found(x, sizes, rounds, total, earlier), sent


def _largest(inside: path_solver.Flags, excess: Floats, most: int) -> tuple[Numbers, bool]:
    """The columns inside and those of the largest excess of at least 0, and whether these are all."""
    wanted = np.flatnonzero((excess >= 0) & ~inside)
    kept = wanted[np.argsort(-excess[wanted], kind="stable")[: max(most, 1)]]
    return np.union1d(np.flatnonzero(inside), kept), len(kept) == len(wanted)
