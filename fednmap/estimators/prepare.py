"""From rows and sites to a problem: what is minimised, and what its vector means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from fednmap.core import Regularizer
from fednmap.data.clients import ClientData
from fednmap.data.sparse import from_scipy
from fednmap.estimators import path_solver
from fednmap.estimators.engine import Fit, minimise
from fednmap.estimators.families import Linear, problem
from fednmap.estimators.penalties import shrinkage
from fednmap.estimators.sites import Floats, Sites, row_weights
from fednmap.estimators.standardise import Scaling, from_moments, moments
from fednmap.estimators.wrapped_problems import Centred, Gram
from fednmap.problems.families import Gaussian, Response
from fednmap.regularizers import Box, Separable, Zero

PATIENCE = 200
"""Rounds with a dense model, at most."""
LEAST = 1e-3
"""The least scale that a family may estimate, relative to the one it begins with."""
FLAT = 1e-2
"""Infinite estimates are suspected where the curvature of f along the last steps is below this, relative to that at the
model without columns,"""
HELD = 1e-3
"""and phi grows less per step as far as a coefficient is then fixed, relative to the decrease of f."""
SHIFT = 10.0
"""How much further that is, of a column of deviation 1, besides twice its value,"""
NEGLIGIBLE = 0.1
"""and the likelihood ratio statistic below which that is as good a fit."""
MOVING = 0.05
"""Least change of a coefficient with an infinite estimate, relative to the largest, of standardised columns."""


@dataclass(frozen=True, eq=False)
class Parameters:
    """A model on the scale of the given columns."""

    coef: Floats
    """(K, p)"""
    intercept: Floats
    """(K,)"""
    scale: float | None = None
    """sigma, where the family has one."""


@dataclass(frozen=True, eq=False)
class Layout:
    """What the vector of a problem means: coefficients of scaled columns, one output after another, then the
    intercepts, then what the family estimates once for all rows."""

    scaling: Scaling
    outputs: int
    columns: int
    intercept: bool
    constants: int
    start: Tensor

    @classmethod
    def of(cls, family: Response, scaling: Scaling, y: Floats, weight: Floats, outputs: int, intercept: bool) -> Layout:
        """The layout for columns of this scaling; the start is the model without columns, of y with these weights."""
        columns, constants = len(scaling.shift), family.first_constants(y, weight)
        first = family.first(y, weight) if intercept else np.zeros(0)
        start = torch.from_numpy(np.concatenate([np.zeros(outputs * columns), first, constants]))
        return cls(scaling, outputs, columns, intercept, len(constants), start)

    def with_penalty(self, phi: Regularizer) -> Regularizer:
        """phi on the coefficients, the intercepts left alone, constants kept positive."""
        if isinstance(phi, Zero) and not self.constants:
            return phi
        parts: list[tuple[slice, Regularizer]] = [(slice(0, self.outputs * self.columns), phi)]
        if self.constants:
            size = len(self.start)
            least = LEAST * float(self.start[-self.constants :].min())
            parts.append((slice(size - self.constants, size), Box(least, float("inf"))))
        return Separable(parts)

    def coefficients(self, x: Tensor) -> Floats:
        """(K, p), of the scaled columns."""
        found: Floats = x[: self.outputs * self.columns].reshape(self.outputs, -1).numpy()
        return found

    def parameters(self, x: Tensor) -> Parameters:
        """The model on the scale of the given columns."""
        end = self.outputs * self.columns
        intercept = x[end : end + self.outputs].numpy() if self.intercept else np.zeros(self.outputs)
        if self.outputs > 1:
            intercept = intercept - intercept.mean()  # what is common to all classes changes no probability
        scale = float(x[-1]) if self.constants else None
        return Parameters(*self.scaling.original(self.coefficients(x), intercept), scale)


@dataclass(frozen=True, eq=False)
class Prepared(Layout):
    """A problem of scaled columns, and what its vector means."""

    family: Response
    problem: Linear | Centred | Gram
    sites: Sites
    site_weights: Floats
    unit: float
    """Tolerances are relative to it."""
    diagonal: Floats
    """Of the Hessian at the start, where columns are uncorrelated with y: from sums that the sites have sent."""

    def solve(self, phi: Regularizer, after: Fit | None, tol: float, max_rounds: int) -> Fit:
        """The minimiser of f + phi, phi on the coefficients; begun where `after` ended, a fit with another phi."""
        found = self.solve_path([phi], tol, max_rounds) if after is None else None
        if found is not None:
            return found[0][0]
        whole = self.with_penalty(phi)
        return minimise(self.problem, whole, self.start, tol=tol * self.unit, max_rounds=max_rounds, after=after)

    def solve_path(
        self,
        phis: Sequence[Regularizer],
        tol: float,
        max_rounds: int,
        first: Tensor | None = None,
        polish: int | None = None,
    ) -> tuple[list[Fit], int] | None:
        """The minimisers for several phi in the same rounds, and how many these were; None where `path_solver` does not
        take them.

        first:  the gradient at the start, where it is known.
        polish: the number of a phi whose minimiser is found more exactly.
        """
        end = self.outputs * self.columns
        kinds = [kind for phi in phis if (kind := shrinkage(phi, end)) is not None]
        if self.constants or len(self.start) > path_solver.SIZE or len(kinds) < len(phis):
            return None
        l1, l2 = (np.stack(np.broadcast_arrays(*map(np.atleast_1d, part))) for part in zip(*kinds, strict=True))
        shrink = path_solver.Penalties(l1, l2, end)
        found = path_solver.solve(
            lambda points: self.problem.gradients(torch.from_numpy(points)).numpy(),
            self.start.numpy(),
            shrink,
            self.diagonal,
            tol=tol * self.unit,
            max_rounds=min(max_rounds, PATIENCE),
            constant=isinstance(self.family, Gaussian),
            first=None if first is None else first.numpy(),
            polish=polish,
        )
        losses = self.problem.losses(torch.from_numpy(found.x)).numpy()
        objectives = losses + shrink.value(found.x)
        each = 2 * self.start.nbytes * len(self.sites)  # a point to every site, a gradient back
        fits, total = [], found.total
        for k, phi in enumerate(phis):
            x, rounds = torch.from_numpy(found.x[k]), int(found.rounds[k])
            sent, size = each * (rounds if k == 0 else rounds - 1), float(found.sizes[k])  # the first is common to all
            point, gradient = torch.from_numpy(found.earlier[k])
            earlier = None if bool(point.isnan().any()) else (point, gradient)
            done = size <= tol * self.unit
            fit = Fit(x, rounds, sent, float(objectives[k]), size, done, float(losses[k]), None, earlier)
            if not done and rounds < max_rounds:  # from there by FedNMap with a short memory
                whole, left = self.with_penalty(phi), max_rounds - rounds
                more = minimise(self.problem, whole, x, tol=tol * self.unit, max_rounds=left)
                fit = more._replace(rounds=rounds + more.rounds, bytes=sent + more.bytes)
                total += more.rounds
            fits.append(fit)
        return fits, total

    def infinite(self, fit: Fit, phi: Regularizer, tol: float, max_rounds: int) -> tuple[list[int], Fit]:
        """The columns whose estimates are infinite because f + phi has no minimiser, the largest first; and the fit,
        with the rounds of this test added.

        They are suspected where f has become flat along the last steps and phi does not grow along them. Then the
        coefficient that moved most is fixed `SHIFT` further on, and the others are fitted again. If the likelihood
        ratio against x is negligible, no value of that coefficient is too large. Sites send gradients only.
        """
        if fit.earlier is None or self.constants or not fit.converged:
            return [], fit
        before, g = fit.earlier
        s = fit.x - before
        fall, whole = -float(g @ s), self.with_penalty(phi)
        if not 0 < fall <= FLAT * float(np.square(s.numpy()) @ self.diagonal):
            return [], fit
        k = int((s[: self.outputs * self.columns].abs() * dense(np.tile(self._deviation, self.outputs))).argmax())
        steps = float((fit.x[k].abs() + SHIFT / self._deviation[k % self.columns]) / s[k].abs())
        start = fit.x + steps * s
        if not float(whole.value(start) - whole.value(fit.x)) <= HELD * fall * steps:
            return [], fit
        fixed = Separable([(slice(k, k + 1), Box(float(start[k]), float(start[k])))])
        rounds = min(max_rounds, PATIENCE)
        other = minimise(self.problem, fixed, start, tol=0.01 * tol * self.unit, max_rounds=rounds)
        spent = fit._replace(rounds=fit.rounds + other.rounds, bytes=fit.bytes + other.bytes)
        ratio = 2 * len(self.sites.of_row) * (other.loss - fit.loss)
        return (self.moving(s) if ratio <= NEGLIGIBLE else []), spent

    def moving(self, s: Tensor) -> list[int]:
        """The columns that a step s along which the likelihood is monotone changes; the largest change first."""
        size = np.abs(self.coefficients(s)).max(0) * self._deviation
        order = np.argsort(-size, kind="stable")
        return [int(j) for j in order if size[j] > MOVING * size[order[0]]]

    @property
    def _deviation(self) -> Floats:
        """Of the scaled columns; 1 for those that do not vary."""
        return np.sqrt(np.where(self.scaling.square > 0, self.scaling.square, 1.0))

    def loss(self, x: Tensor) -> float:
        return float(self.problem.loss(x))

    def report(self, x: Tensor) -> list[dict[str, Any]]:
        """What each site holds, what it counts, and its own mean loss under the model."""
        sizes, losses = self.sites.sizes, self.problem.client_losses(x).tolist()
        return [
            {"site": name, "rows": int(sizes[k]), "weight": float(self.site_weights[k]), "loss": losses[k]}
            for k, name in enumerate(self.sites.names)
        ]


def prepare(
    family: Response,
    X: Any,
    y: Floats,
    sites: Sites,
    sample_weight: Floats,
    *,
    weights: str,
    standardize: bool,
    fit_intercept: bool,
    outputs: int,
) -> Prepared:
    """The sites' rows as clients of one problem."""
    order = sites.order
    if order is not None:
        X, y, sample_weight, sites = X[order], y[order], sample_weight[order], sites.some(order)
    each = row_weights(sites, sample_weight, weights)
    intercept = fit_intercept and family.level
    scale = from_moments(*moments(X, each), standardize=standardize, free_level=intercept or not family.level)
    site_weights = np.bincount(sites.of_row, each, len(sites)).astype(float)
    untouched = intercept and sparse.issparse(X)
    data = ClientData(tensor(X if untouched else scale.apply(X)), dense(y), dense(sites.sizes))
    f: Any = problem(
        family,
        data,
        intercept=intercept,
        weights=dense(site_weights),
        sample_weights=None if bool((sample_weight == sample_weight[0]).all()) else dense(sample_weight),
    )
    if untouched:
        f = Centred(f, dense(scale.shift), dense(scale.factor), outputs)
    elif isinstance(family, Gaussian) and not sparse.issparse(X) and len(y) > f.dim <= path_solver.SIZE:
        f = Gram(f)
    steep = np.maximum(family.steepness(y, each), 1e-12)
    square = np.where(scale.square > 0, scale.square, 1.0)
    diagonal = np.concatenate([np.outer(steep, square).flatten(), steep if intercept else []])
    layout = Layout.of(family, scale, y, each, outputs, intercept)
    f.start = layout.start  # where the curvature of families without a bound is asked for
    return Prepared(
        **vars(layout),
        family=family,
        problem=f,
        sites=sites,
        site_weights=site_weights,
        unit=family.unit(y, each),
        diagonal=diagonal,
    )


def tensor(X: Any) -> Tensor:
    """Rows as a tensor, CSR where they are sparse."""
    return from_scipy("X", X) if sparse.issparse(X) else dense(X)


def dense(values: Any) -> Tensor:
    """An array as a tensor, copied where it may not be written to."""
    return torch.from_numpy(np.require(values, requirements=["C", "W"]))
