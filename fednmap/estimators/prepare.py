"""From rows and sites to f, the mean loss on scaled columns: what is minimised, and what its vector means."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from fednmap.core import Regularizer
from fednmap.data.clients import ClientData
from fednmap.data.sparse import from_scipy
from fednmap.estimators import path_solver
from fednmap.estimators.family_problems import Linear, first_level, problem
from fednmap.estimators.remote import RemoteProblem
from fednmap.estimators.rows import Floats, Rows
from fednmap.estimators.site_effects import PartialMinimum, SiteEffects
from fednmap.measure import hessian_norms
from fednmap.names import InputError
from fednmap.problems import GLM
from fednmap.problems.curvature import largest_eigenvalue
from fednmap.problems.families import Gaussian, Response
from fednmap.regularizers import Box, Separable, Zero
from fednmap.tables.statistics import scales

DENSE_ROWS, SPARSE_ROWS = 500, 2_000
"""Rows whose deviations are computed together: dense ones stay in cache, and what is computed takes memory too."""


@dataclass(frozen=True, eq=False)
class Scaling:
    """x -> (x - shift) / scale, column by column; a column that does not vary becomes 0 if an intercept stands in.

    Two messages per site: the weighted sums of the columns, then the sums of squared deviations from the common mean.
    """

    shift: Floats
    factor: Floats
    """1 / scale; 0 takes a column out."""
    square: Floats
    """The mean square of each scaled column."""

    @classmethod
    def of(cls, mean: Floats, deviation: Floats, *, standardize: bool, free_level: bool) -> Scaling:
        """The scaling of columns with these means and deviations.

        free_level: the model has an intercept, or does not see the level of a column (Cox): then columns are centred
                    too, which changes no coefficient and makes the problem easier.
        """
        varies, scale = scales(mean, deviation)
        factor = 1 / scale if standardize else np.ones_like(mean)
        if free_level:
            factor = np.where(varies, factor, 0.0)
        shift = mean if free_level else np.zeros_like(mean)
        return cls(shift, factor, np.square(factor * deviation) + np.square(factor * (mean - shift)))

    @property
    def nbytes(self) -> int:
        """Sent by one site and to it."""
        return 4 * self.shift.nbytes

    def apply(self, X: Any) -> Any:
        """The scaled columns; sparse ones are not shifted."""
        if sparse.issparse(X):
            if bool((self.factor == 1).all()):
                return X
            return sparse.csr_array((X.data * self.factor[X.indices], X.indices, X.indptr), shape=X.shape)
        found = X - self.shift
        if not bool((self.factor == 1).all()):
            found *= self.factor
        return found

    def original(self, coef: Floats, intercept: Floats) -> tuple[Floats, Floats]:
        """Coefficients (K, p) and intercepts (K,) for the columns as they were given."""
        coef = coef * self.factor
        return coef, intercept - coef @ self.shift

    def standard(self, coef: Floats, intercept: Floats) -> tuple[Floats, Floats]:
        """The inverse of `original`."""
        inner = np.divide(coef, self.factor, out=np.zeros_like(coef), where=self.factor != 0)
        return inner, intercept + coef @ self.shift


def moments(X: Any, weight: Floats) -> tuple[Floats, Floats]:
    """Mean and standard deviation of every column, weighted; both are sums over rows, so over sites."""
    if not sparse.issparse(X):
        mean, square = weight @ X, np.zeros(X.shape[1])
        for first in range(0, len(X), DENSE_ROWS):
            rows = slice(first, first + DENSE_ROWS)
            square += weight[rows] @ np.square(X[rows] - mean)
        return mean, np.sqrt(square)
    p, mean = X.shape[1], X.T @ weight
    inside, filled, count = np.zeros(p), np.zeros(p), np.zeros(p, int)
    for first in range(0, X.shape[0], SPARSE_ROWS):
        bounds = X.indptr[first : first + SPARSE_ROWS + 1]
        entries = slice(bounds[0], bounds[-1])
        columns, each = X.indices[entries], np.repeat(weight[first : first + SPARSE_ROWS], np.diff(bounds))
        inside += np.bincount(columns, each * np.square(X.data[entries] - mean[columns]), p)
        filled += np.bincount(columns, each, p)
        count += np.bincount(columns[each > 0], minlength=p)
    full = count == np.count_nonzero(weight)
    empty = np.where(full, 0.0, np.clip(1 - filled, 0, None))  # exactly 0 where no entry is missing
    return mean, np.sqrt(inside + empty * np.square(mean))


class Parameters(NamedTuple):
    """A model on the scale of the given columns: coefficients (K, p), intercepts (K,), the family's constants."""

    coef: Floats
    intercept: Floats
    constants: Floats


class Prepared:
    """f, the mean loss of the sites' rows on scaled columns, and its derivatives.

    Its vector x holds the coefficients of scaled columns, one output after another, then the intercepts, then what the
    family estimates once for all rows. It begins at the model without columns.

    Sparse columns stay as they are if they would be shifted: with v = factor w, the score of a row is
    <(a - shift) factor, w> + c = <a, v> + (c - <shift, v>). That is a linear map x -> T x, so grad f is T' times the
    gradient by T x. A linear regression keeps A'A and A'y, from which a gradient costs p^2 products and not p times the
    rows; sites send the same gradients either way.

    site_effects: "none", "intercepts", "random" or "sparse", with the weight mu. x then holds what is shared: the
    coefficients, and with "random" the mean intercept.
    """

    def __init__(
        self,
        family: Response,
        rows: Rows,
        *,
        weights: str,
        standardize: bool,
        fit_intercept: bool,
        site_effects: str = "none",
        mu: float = 0.0,
    ) -> None:
        rows = rows.by_site()
        X, y, each = rows.X, rows.y, rows.shares(weights)
        self.level = fit_intercept and family.level
        intercept = self.level and site_effects in ("none", "random")
        free = self.level or not family.level
        if rows.remote is None:
            known, of_columns = (y, each), moments(X, each)
        else:
            known, of_columns = rows.remote.response(), rows.remote.moments()
        scaling = Scaling.of(*of_columns, standardize=standardize, free_level=free)
        self.family, self.scaling, self.intercept = family, scaling, intercept
        self.outputs, self.constants = family.outputs - family.constants, family.constants
        self.columns = len(scaling.shift)
        self.end = self.outputs * self.columns
        first = first_level(family, *known, rows.offset) if intercept else np.zeros(0)
        self.start = torch.from_numpy(np.concatenate([np.zeros(self.end), first, family.first_constants(*known)]))
        self._least = family.least(*known) if family.constants else 0.0
        self.unit = family.unit(*known)
        """Tolerances are relative to it."""
        self.sites = rows.sites
        self.site_weights: Floats = np.bincount(rows.sites.of_row, each, len(rows.sites)).astype(float)
        self._mapped = intercept and sparse.issparse(X)
        self._shifted = not sparse.issparse(X)
        counted = rows.counted and (weights == "samples" or len(rows.sites) == 1)
        self.size = float(rows.weight.sum()) if counted else float(len(rows.y))
        """Rows, or the sum of weights that count equal rows."""
        self.problem: Linear | PartialMinimum | RemoteProblem
        self._scaled: tuple[Rows, Floats] | None = None
        """Rows and what they count, of a table so wide that f is minimised on some of its columns."""
        if rows.remote is None:
            scaled = rows if self._mapped else rows._replace(X=scaling.apply(X))
            self.problem = problem_of(family, scaled, each, self.level)
            if len(self.start) > path_solver.SIZE and site_effects == "none":
                self._scaled = scaled, each
        else:
            self.problem = rows.remote.problem(family, scaling)
        self._gram: tuple[Tensor, Tensor] | None = None
        self.own_intercepts = len(rows.sites) if self.level and site_effects in ("intercepts", "sparse") else 0
        """Of sites, which x does not hold."""
        self.quadratic = isinstance(family, Gaussian) and site_effects != "sparse"
        """Whether the Hessian is the same everywhere."""
        self._level: Floats | None = None
        """The intercept of a model between machines whose sites have their own: on scaled columns that of the mean
        row; then the mean of the sites', where these send sums alone."""
        if isinstance(self.problem, RemoteProblem) and site_effects == "random":
            raise InputError("site_effects 'random' is for one process; a fit between machines does not have it yet")
        if isinstance(self.problem, RemoteProblem) and site_effects != "none":
            self._level = family.first(*known) if self.level else np.zeros(1)
        elif site_effects != "none":
            first = family.first(y, each) if self.level else np.zeros(0)
            self.problem.start = torch.from_numpy(np.concatenate([np.zeros(self.end), first]))
            assert isinstance(self.problem, Linear)
            random: Any = {"ridge": mu, "rows": self.size} if site_effects == "random" else {}
            only, of_sites = mu if site_effects == "sparse" else None, (rows.sites.names, self.site_weights)
            self.problem = PartialMinimum(self.problem, *of_sites, only, self.unit, **random)
        else:
            self._begin(len(y))
        if rows.remote is not None and (shift := rows.remote.mean_offset) is not None and intercept:
            assert isinstance(self.problem, RemoteProblem)
            self.start[self.end] = self.problem.null_level(float(self.start[self.end]) - shift)
        steep = np.maximum(family.steepness(*known), 1e-12)
        self.level_unit = 1.0
        """By what a random intercept is divided in x, so that its tolerance is as strict as that of a fixed one."""
        if site_effects == "random":
            curve = mu * steep * self.site_weights / (mu + steep * self.site_weights)
            self.level_unit = float(steep[0] / curve.sum())
            self.start[-1] /= self.level_unit
        square = np.where(scaling.square > 0, scaling.square, 1.0)
        self.deviation = np.sqrt(square)
        """Of the scaled columns; 1 for those that do not vary."""
        self.diagonal = np.concatenate(
            [np.outer(steep, square).flatten(), steep * self.level_unit if intercept else []]
        )
        """Of the Hessian at the start, where columns are uncorrelated with y: from sums that the sites have sent."""
        self.reach = self.unit * self.deviation / self.diagonal if site_effects == "sparse" else None
        """The longest first step; f has regions without curvature, in which a step by curvature would be endless."""

    def restricted(self, columns: Any) -> tuple[Prepared, Any]:
        """f where the other columns have no coefficients, and which coordinates of x are left."""
        part, p = copy(self), self.columns
        scaling = self.scaling
        part.scaling = Scaling(scaling.shift[columns], scaling.factor[columns], scaling.square[columns])
        each = (np.arange(self.outputs)[:, None] * p + columns).ravel()
        places = np.concatenate([each, np.arange(self.end, len(self.start))])
        part.columns, part.end, part.deviation = len(columns), len(each), self.deviation[columns]
        part.start, part.diagonal = self.start[torch.from_numpy(places)], self.diagonal[places]
        assert self._scaled is not None
        rows, shares = self._scaled
        part.problem = problem_of(self.family, rows._replace(X=rows.X[:, columns]), shares, self.level)
        part._begin(len(rows.y))
        return part, places

    @property
    def can_restrict(self) -> bool:
        return self._scaled is not None

    def _begin(self, rows: int) -> None:
        """What a linear regression computes once, and where curvature is asked for of families without a bound."""
        assert not isinstance(self.problem, PartialMinimum)
        self._gram = None
        if isinstance(self.family, Gaussian) and self._shifted and rows > len(self.start) <= path_solver.SIZE:
            self._gram = self.problem.hessian(self.start), -self.problem.gradient(torch.zeros_like(self.start))
        self.problem.start = self.start

    def _inner(self, x: Tensor) -> Tensor:
        """T x."""
        if self.level_unit != 1:
            x = torch.cat([x[..., :-1], self.level_unit * x[..., -1:]], -1)
        if not self._mapped:
            return x
        w, c, rest = x.tensor_split((self.end, self.end + self.outputs), -1)
        v = w.unflatten(-1, (self.outputs, -1)) * dense(self.scaling.factor)
        return torch.cat([v.flatten(-2), c - v @ dense(self.scaling.shift), rest], -1)

    def _back(self, g: Tensor) -> Tensor:
        """T' g."""
        if self._mapped:
            v, c, rest = g.tensor_split((self.end, self.end + self.outputs), -1)
            shift, factor = dense(self.scaling.shift), dense(self.scaling.factor)
            w = (v.unflatten(-1, (self.outputs, -1)) - c.unsqueeze(-1) * shift) * factor
            g = torch.cat([w.flatten(-2), c, rest], -1)
        if self.level_unit != 1:
            g = torch.cat([g[..., :-1], self.level_unit * g[..., -1:]], -1)
        return g

    def with_penalty(self, phi: Regularizer) -> Regularizer:
        """phi on the coefficients, the intercepts left alone, constants kept positive."""
        if isinstance(phi, Zero) and not self.constants:
            return phi
        parts: list[tuple[slice, Regularizer]] = [(slice(0, self.end), phi)] if self.end else []
        if self.constants:
            size = len(self.start)
            parts.append((slice(size - self.constants, size), Box(self._least, float("inf"))))
        return Separable(parts) if parts else Zero()

    def coefficients(self, x: Tensor) -> Floats:
        """(K, p), of the scaled columns."""
        found: Floats = x[: self.end].reshape(self.outputs, self.columns).numpy()
        return found

    def loss(self, x: Tensor) -> float:
        return float(self.problem.loss(self._inner(x)))

    def losses(self, points: Tensor) -> Floats:
        """f at several points (k, d)."""
        found: Floats = self.problem.losses(self._inner(points)).numpy()
        return found

    def gradient(self, x: Tensor) -> Tensor:
        if self._gram is not None:
            return self._gram[0] @ x - self._gram[1]
        return self._back(self.problem.gradient(self._inner(x)))

    def gradients(self, points: Tensor) -> Tensor:
        """At several points (k, d)."""
        if self._gram is not None:
            return points @ self._gram[0] - self._gram[1]
        return self._back(self.problem.gradients(self._inner(points)))

    def slopes(self, points: Floats) -> Floats:
        """The same for arrays."""
        found: Floats = self.gradients(dense(points)).numpy()
        return found

    def hessian(self, x: Tensor) -> Tensor:
        if self._gram is not None:
            return self._gram[0]
        return self._back(self._back(self.problem.hessian(self._inner(x))).mT)

    def information(self, x: Tensor) -> Tensor:
        """The expected Hessian, from which standard errors are; of a Cox model the observed one."""
        if self._gram is not None or not isinstance(self.problem, GLM | RemoteProblem):
            return self.hessian(x)
        return self._back(self._back(self.problem.information(self._inner(x))).mT)

    def noise(self, x: Tensor) -> float:
        """The mean of the rows' squared Pearson residuals, of families that are `dispersed`; of others 1."""
        if not self.family.dispersed or isinstance(self.family, Gaussian):
            return 2 * self.loss(x) if self.family.dispersed else 1.0
        assert isinstance(self.problem, GLM | RemoteProblem)
        return self.problem.pearson(self._inner(x))

    def outer(self, x: Tensor, copies: float | None = None) -> Tensor:
        """The sum over rows of squares of their gradients, (d, d); see `GLM.outer`."""
        # a single row of a Cox model has no gradient
        assert isinstance(self.problem, GLM | PartialMinimum | RemoteProblem)
        return self._back(self._back(self.problem.outer(self._inner(x), copies)).mT)

    def smoothness(self, x: Tensor) -> float:
        """A bound of the Hessian's largest eigenvalue, else that at x by power iteration and a little more."""
        if self._gram is not None:
            return largest_eigenvalue(lambda v: self.hessian(x) @ v, x) or 1.0
        if not self._mapped and self.level_unit == 1:
            return self.problem.smoothness() or 1.0
        first = torch.randn(1, x.numel(), generator=torch.Generator("cpu").manual_seed(0), dtype=x.dtype, device="cpu")
        found = float(hessian_norms(lambda u: self.gradient(u[0])[None], x, first, 20))
        return 1.05 * found if 0 < found < math.inf else 1.0

    def site_gradients(self, x: Tensor) -> Floats:
        """What each site adds to the gradient of f, (sites, d)."""
        if isinstance(self.problem, PartialMinimum | RemoteProblem):
            found: Floats = self._back(torch.cat(self.problem.site_gradients(self._inner(x)[None]))).numpy()
            return found
        each = self.problem.oracle(torch.arange(self.problem.n, device="cpu"), 0)(self._inner(x), 0)
        found = self.site_weights[:, None] * self._back(each).numpy()
        return found

    def effects(self, x: Tensor, names: Any) -> SiteEffects | None:
        """The effects of each site at the shared coefficients x; None where sites do not differ, or keep their own."""
        if isinstance(self.problem, RemoteProblem) and self._level is not None:
            told = self.problem.keep_effects(x)
            if told is not None:  # of the columns as they are given
                self._level = told + self.coefficients(x) * self.scaling.factor @ self.scaling.shift
        if not isinstance(self.problem, PartialMinimum):
            return None
        d, a = self.problem.effects(self._inner(x))
        deviation = d * self.scaling.factor
        if self._shifted and self.level:
            a = a - (deviation + self.coefficients(x) * self.scaling.factor) @ self.scaling.shift
        return SiteEffects(self.sites.names, tuple(names), a, deviation)

    def random_intercepts(self, objective: float, x: Tensor, reml: bool) -> tuple[float, float]:
        """-2 log marginal likelihood of random intercepts, but for a constant, and their variance.

        objective: the least of f + phi, at x; reml: of a linear regression, whether coefficients are integrated out.
        """
        f, left, value = self.problem, self.size, 0.0
        assert isinstance(f, PartialMinimum)
        if self.quadratic:
            value = float(np.log1p(self.site_weights / f.ridge).sum())
        if reml:
            scale = np.append(self.deviation, self.level_unit)  # the likelihood has no unit of a column
            sizes = np.linalg.eigvalsh(self.hessian(x).numpy() / np.outer(scale, scale))
            sizes = sizes[sizes > 1e-12 * sizes[-1]]  # less aliased columns
            value, left = value + float(np.log(sizes).sum()), left - len(sizes)
            if left <= 0:
                raise InputError(
                    f"expected more rows than coefficients for the variance of random intercepts, got {self.size:g} "
                    f"rows and {len(sizes)} coefficients; leave columns out, or add a penalty such as ridge"
                )
        value += float(self.family.minus_two_log(np.array(objective), left))
        return value, self.noise(x) / (left if reml else self.size) / f.ridge

    def parameters(self, x: Tensor) -> Parameters:
        """The model on the scale of the given columns."""
        intercept = x[self.end : self.end + self.outputs].numpy() if self.intercept else np.zeros(self.outputs)
        if self.outputs > 1:
            intercept = intercept - intercept.mean()  # what is common to all classes changes no probability
        constants, level = x[len(x) - self.constants :].numpy(), self.level_unit * intercept
        coef = self.coefficients(x)
        found = Parameters(*self.scaling.original(coef, level if self._level is None else self._level), constants)
        if self.intercept or not isinstance(self.problem, PartialMinimum):
            return found
        effects = self.effects(x, ())
        assert effects is not None
        return found._replace(intercept=np.array([self.site_weights @ effects.intercept]))

    def report(self, x: Tensor) -> list[dict[str, Any]]:
        """What each site holds, what it counts, and its own mean loss under the model."""
        losses = self.problem.client_losses(self._inner(x)).tolist()
        parts = zip(self.sites.names, self.sites.sizes.tolist(), self.site_weights.tolist(), losses, strict=True)
        return [dict(zip(("site", "rows", "weight", "loss"), part, strict=True)) for part in parts]


def problem_of(family: Response, rows: Rows, each: Floats, intercept: bool) -> Linear:
    """The sites' losses on rows that lie site by site; `each` is what every row counts."""
    x = from_scipy("X", rows.X) if sparse.issparse(rows.X) else dense(rows.X)
    y = rows.y if rows.offset is None else np.column_stack([rows.y, rows.offset])
    return problem(
        family,
        ClientData(x, dense(y), dense(rows.sites.sizes)),
        intercept=intercept,
        offset=rows.offset is not None,
        weights=dense(np.bincount(rows.sites.of_row, each, len(rows.sites))),
        sample_weights=None if bool((rows.weight == rows.weight[0]).all()) else dense(rows.weight),
    )


def dense(values: Any) -> Tensor:
    """An array as a tensor, copied where it may not be written to."""
    return torch.from_numpy(np.require(values, requirements=["C", "W"]))
