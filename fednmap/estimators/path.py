"""The path: the model at every lam, from where the first coefficient enters down."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fednmap.core import Regularizer
from fednmap.estimators.base import Federated
from fednmap.estimators.engine import Fit
from fednmap.estimators.penalties import penalty_name, weighted
from fednmap.estimators.prepare import Prepared
from fednmap.estimators.sites import Floats
from fednmap.names import InputError
from fednmap.regularizers import Box

COUNT = 50
"""Values of lam."""
FAR = 1e-3
"""The last lam over the first, with more rows than columns; with fewer 0.01."""
NOTHING = 1e-13
"""A gradient that is this small, relative to the unit of the family, is rounding: no column says anything of y."""
RIDGE = 1e-3
"""A ridge penalty has no lam at which all coefficients vanish: its path begins where an elastic net's with this share
of l1 would, as in glmnet."""


@dataclass(frozen=True, eq=False)
class Path:
    """Models at decreasing lam, on the scale of the given columns."""

    lambdas: Floats
    coefs: Floats
    """(lambdas, K, p)"""
    intercepts: Floats
    """(lambdas, K)"""
    scales: tuple[float | None, ...]
    """sigma at each, where the family has one."""
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


class Walk:
    """Fits of one prepared problem at one lam after another, each begun where the one before ended."""

    def __init__(self, estimator: Federated, prepared: Prepared) -> None:
        self.estimator, self.prepared = estimator, prepared
        self.last: Fit | None = None

    def at(self, lam: float) -> Fit:
        phi = self.estimator._regularizer(self.prepared, lam)
        found = self.prepared.solve(phi, self.last, self.estimator.tol, self.estimator.max_rounds)
        self.last = found
        return found


class Null(NamedTuple):
    """The model whose coefficients are all 0."""

    gradient: Tensor
    fit: Fit | None
    """Where rounds were needed to find it."""


def null_model(estimator: Federated, prepared: Prepared) -> Null:
    """From sums where the family has it in closed form, else by rounds of its own."""
    if prepared.starts_without_columns:
        return Null(prepared.problem.gradients(prepared.start[None])[0], None)
    fit = prepared.solve(Box(0, 0), None, estimator.tol, estimator.max_rounds)
    return Null(prepared.problem.gradient(fit.x), fit)


def lambda_max(estimator: Federated, prepared: Prepared, null: Null) -> float:
    """The least lam at which all coefficients are 0, from the gradient at the model without them: one round.

    0 is the model where prox(-s grad, s) = 0, for small s.
    """
    penalty = estimator._penalty()
    if not weighted(penalty):
        raise InputError(f"penalty {penalty!r} has no weight, so that there is no path; use l1, mcp, ...")
    gradient = prepared.coefficients(null.gradient)
    if np.abs(gradient).max() <= NOTHING * prepared.unit:
        return 0.0
    if penalty_name(penalty) in ("l1", "mcp", "scad"):
        return float(np.abs(gradient).max())
    if penalty_name(penalty) in ("elastic-net", "ridge"):
        ratio = 0.0 if penalty_name(penalty) == "ridge" else estimator.l1_ratio
        return float(np.abs(gradient).max() / max(ratio, RIDGE))
    downhill = -torch.from_numpy(gradient.flatten())
    high, low = float(downhill.abs().max()) or 1.0, 0.0
    while not _is_zero(estimator._regularizer(prepared, high), downhill):
        low, high = high, 2 * high
        if high > 1e12:
            raise InputError(f"penalty {penalty!r:.60} makes no coefficient 0 at any lam; give lambdas yourself")
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _is_zero(estimator._regularizer(prepared, middle), downhill) else (middle, high)
    return high


def _is_zero(phi: Regularizer, downhill: Tensor) -> bool:
    step = 1.0 if phi.rho == 0 else 0.5 / phi.rho
    return not bool(phi.prox(step * downhill, step).any())


def lambdas_down(first: float, given: int | Sequence[float], rows: int, columns: int) -> Floats:
    """So many values from `first` down, equally far apart in their logarithms; or those given, in falling order."""
    if not isinstance(given, int | np.integer):
        values = np.sort(np.asarray(given, float))[::-1]
        if values.ndim != 1 or len(values) < 1 or not bool(np.isfinite(values).all()) or values[-1] < 0:
            raise InputError("lambdas must be a number of values, or a list of finite numbers, at least 0")
        return values
    if given < 2:
        raise InputError(f"lambdas is {given}; a path has at least 2")
    far = FAR if rows > columns else 10 * FAR
    return first * np.geomspace(1, far, int(given)) if first > 0 else np.zeros(1)


def walk(estimator: Federated, prepared: Prepared, lambdas: Floats, null: Null | None = None) -> Path:
    """The models at these lam: all in the same rounds, or each begun where the one before ended.

    The first is for penalties whose minimum does not depend on where one begins, and problems that `together` takes.
    """
    phis = [estimator._regularizer(prepared, lam) for lam in lambdas]
    first = None if null is None or null.fit is not None else null.gradient
    together = prepared.solve_together(phis, estimator.tol, estimator.max_rounds, first)
    if together is None:
        steps = Walk(estimator, prepared)
        steps.last = None if null is None else null.fit
        fits = [steps.at(lam) for lam in lambdas]
        rounds = sum(fit.rounds for fit in fits)
    else:
        fits, rounds = together
    models = [prepared.parameters(fit.x) for fit in fits]
    return Path(
        lambdas,
        np.stack([model.coef for model in models]),
        np.stack([model.intercept for model in models]),
        tuple(model.scale for model in models),
        np.array([fit.loss for fit in fits]),
        tuple(fits),
        tuple(estimator._names()),
        estimator._classes(),
        rounds,
    )


def path(
    estimator: Federated,
    X: Any,
    y: Any,
    sites: Any = None,
    sample_weight: Any = None,
    *,
    lambdas: int | Sequence[float] = COUNT,
) -> Path:
    """The models at every lam, from lambda_max down."""
    estimator = copy(estimator)  # which may be fitted, to other rows
    rows = estimator._read(X, y, sites, sample_weight)
    prepared = estimator._prepare(rows)
    null = null_model(estimator, prepared)
    first = lambda_max(estimator, prepared, null) if isinstance(lambdas, int | np.integer) else 0.0
    return walk(estimator, prepared, lambdas_down(first, lambdas, *rows.X.shape), null)
