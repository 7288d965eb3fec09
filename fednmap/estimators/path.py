"""The path: the model at every lam, from where the first coefficient enters down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fednmap.core import Regularizer
from fednmap.estimators.base import Federated
from fednmap.estimators.engine import Fit, solve
from fednmap.estimators.penalties import penalty_name, weighted
from fednmap.estimators.prepare import Prepared
from fednmap.estimators.rows import Floats, Rows
from fednmap.names import InputError
from fednmap.regularizers import L1

FAR = 1e-3  # the last lam over the first, with more rows than columns; with fewer 0.01
NOTHING = 1e-13  # gradient over the unit of the family that is rounding: no column says anything of y
RIDGE = 1e-3  # a ridge path begins where the curvature of f is this share of lam: no lam makes coefficients vanish
FARTHER = 1e-4  # how much farther down a ridge path ends than others
LARGEST = 1e12  # of the values of lam that are tried


@dataclass(frozen=True, eq=False)
class RegularizationPath:
    """Models at decreasing lam, in units of the columns; `path()` returns it."""

    lambdas: Floats
    coefs: Floats
    """(lambdas, K, p)"""
    intercepts: Floats
    """(lambdas, K)"""
    constants: Floats
    """(lambdas, constants of the family): sigma, a dispersion, or distances of thresholds."""
    losses: Floats
    """f at each."""
    fits: tuple[Fit, ...]
    names: tuple[str, ...]
    classes: tuple[str, ...]
    """One word per output; one output has none."""
    total_rounds: int
    """Of the whole path; several lam may share a round."""

    @property
    def rounds(self) -> Floats:
        """In which each lam took part."""
        return np.array([fit.rounds for fit in self.fits])

    @property
    def converged(self) -> bool:
        return all(fit.converged for fit in self.fits)

    @property
    def nonzero(self) -> Floats:
        """Columns with a coefficient, at each lam."""
        count: Floats = (self.coefs != 0).any(1).sum(1)
        return count

    @property
    def enters(self) -> Floats:
        """The largest lam at which each column has a coefficient; NaN where it never has one."""
        inside = (self.coefs != 0).any(1)
        return np.where(inside.any(0), self.lambdas[inside.argmax(0)], np.nan)


class Null(NamedTuple):
    """The model whose penalised coefficients are all 0."""

    gradient: Tensor
    """By the coefficients of all outputs; 0 for those that are not penalised."""
    fit: Fit | None
    """Where rounds were needed to find it."""
    start: Tensor | None
    """The whole gradient, where the model is the start."""


def null_model(estimator: Federated, prepared: Prepared) -> Null:
    """From sums where the family has it in closed form and every column is penalised, else by further rounds."""
    end = prepared.end
    free = torch.zeros(end, dtype=torch.bool, device="cpu")
    if isinstance(estimator.penalty, Regularizer) or estimator.penalty_factor is not None:
        phi = estimator._regularizer(prepared, 1.0)  # whose prox may leave some alone, however small they are
        small = torch.full((end,), 1e-100, dtype=torch.float64, device="cpu")
        free = (phi.prox(small, _step(phi)) == small) | (phi.prox(-small, _step(phi)) == -small)
        free = free & ~free.all()
    if not prepared.constants and not bool(free.any()):
        start = prepared.gradients(prepared.start[None])[0]
        return Null(start[:end], None, start)
    only_free = estimator._bounded(prepared, L1(torch.where(free, 0.0, LARGEST)))
    fit = solve(prepared, [only_free], estimator.tol, estimator.max_rounds)[0][0]
    return Null(prepared.gradient(fit.x)[:end].masked_fill(free, 0.0), fit, None)


def lambda_max(estimator: Federated, prepared: Prepared, null: Null) -> float:
    """The least lam at which all penalised coefficients are 0, from the gradient at the model without them: one round.

    0 is the model where prox(-s grad, s) = 0, for small s.
    """
    penalty = estimator.penalty
    if not weighted(penalty):
        raise InputError(f"penalty {penalty!r} has no weight, so that there is no path; use l1, mcp, ...")
    largest = float(null.gradient.abs().max())
    if largest <= NOTHING * prepared.unit:
        return 0.0
    if is_ridge(estimator):
        return float(prepared.diagonal[: len(null.gradient)].max()) / RIDGE
    alike = estimator.penalty_factor is None and estimator.bounds is None
    if alike and penalty_name(penalty) in ("l1", "mcp", "scad"):
        return largest
    if alike and penalty_name(penalty) == "elastic-net":
        return largest / estimator.l1_ratio

    def is_zero(lam: float) -> bool:
        phi = estimator._regularizer(prepared, lam)
        return not bool(phi.prox(-_step(phi) * null.gradient, _step(phi)).any())

    high, low = largest, 0.0
    while not is_zero(high):
        low, high = high, 2 * high
        if high > LARGEST:
            raise InputError(f"penalty {penalty!r:.60} makes no coefficient 0 at any lam; give lambdas yourself")
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if is_zero(middle) else (middle, high)
    return high


def is_ridge(estimator: Federated) -> bool:
    """Whether the penalty makes no coefficient 0, or next to none."""
    name = penalty_name(estimator.penalty)
    return name == "ridge" or (name == "elastic-net" and estimator.l1_ratio < RIDGE)


def _step(phi: Regularizer) -> float:
    return 1.0 if phi.rho == 0 else 0.5 / phi.rho


def grid(
    estimator: Federated,
    rows: Rows,
    given: int | Sequence[float],
    prepared: Prepared | None = None,
    null: Null | None = None,
) -> Floats:
    """So many values of lam from lambda_max down, equally far apart in their logarithms; or those given, in falling
    order."""
    if not isinstance(given, int | np.integer):
        values = np.sort(np.asarray(given, float))[::-1]
        if values.ndim != 1 or len(values) < 1 or not bool(np.isfinite(values).all()) or values[-1] < 0:
            raise InputError("lambdas must be a number of values, or a list of finite numbers, at least 0")
        return values
    if given < 2:
        raise InputError(f"lambdas is {given}; a path has at least 2")
    prepared = prepared or estimator._prepare(rows)
    first = lambda_max(estimator, prepared, null or null_model(estimator, prepared))
    n, p = len(rows.y), prepared.columns
    far = (FAR if n > p else 10 * FAR) * (FARTHER if is_ridge(estimator) else 1.0)
    return first * np.geomspace(1, far, int(given)) if first > 0 else np.zeros(1)


def walk(
    estimator: Federated, prepared: Prepared, lambdas: Floats, null: Null | None = None, polish: int | None = None
) -> RegularizationPath:
    """The models at these lam; `null` is the model that all of them may begin with, for `polish` see `engine.solve`."""
    phis = [estimator._regularizer(prepared, lam) for lam in lambdas]
    after, first = (None, None) if null is None else (null.fit, null.start)
    fits, rounds = solve(prepared, phis, estimator.tol, estimator.max_rounds, after=after, first=first, polish=polish)
    models = [prepared.parameters(fit.x) for fit in fits]
    return RegularizationPath(
        lambdas,
        np.stack([model.coef for model in models]),
        np.stack([model.intercept for model in models]),
        np.stack([model.constants for model in models]),
        np.array([fit.loss for fit in fits]),
        tuple(fits),
        tuple(estimator._names()),
        estimator._classes(),
        rounds,
    )


def path(
    self: Federated,
    X: Any,
    y: Any = None,
    sites: Any = None,
    sample_weight: Any = None,
    *,
    lambdas: int | Sequence[float] = 50,
) -> RegularizationPath:
    """Return the models at so many lam from lambda_max down, or at those given: all in the same rounds where the
    penalty is l1, ridge, elastic-net, mcp or scad, else each begun where the one before ended."""
    estimator, rows = self._reading(X, y, sites, sample_weight)
    prepared = estimator._prepare(rows)
    null = null_model(estimator, prepared)
    return walk(estimator, prepared, grid(estimator, rows, lambdas, prepared, null), null)
