"""Standard errors and confidence intervals, from the sum of the sites' Hessians."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats

from fednmap.estimators.base import Federated
from fednmap.estimators.prepare import dense
from fednmap.estimators.sites import Floats
from fednmap.names import InputError

SINGULAR = 1e-10
"""A Hessian with a ratio of eigenvalues below this says nothing of some coefficient."""


@dataclass(frozen=True, eq=False)
class Inference:
    """Estimates with their standard errors, on the scale of the given columns; the intercept last, where there is one.

    estimate: the coefficients of an unpenalised fit; of a penalised one those of one Newton step on the loss alone,
              b - H^-1 grad f(b), which undoes the shrinkage (the debiased lasso, for fewer columns than rows).
    """

    names: tuple[str, ...]
    estimate: Floats
    error: Floats
    low: Floats
    high: Floats
    p_value: Floats


def inference(
    estimator: Federated,
    X: Any,
    y: Any,
    sites: Any = None,
    sample_weight: Any = None,
    *,
    level: float = 0.95,
) -> Inference:
    """Wald intervals of a fitted estimator: every site sends its Hessian, p^2 numbers, once.

    References: van de Geer et al., On asymptotically optimal confidence regions and tests for high-dimensional models,
    Annals of Statistics 2014; for columns fewer than rows the inverse of H needs no approximation.
    """
    if not 0 < level < 1:
        raise InputError(f"level is {level!r}; it must lie between 0 and 1, such as 0.95")
    fitted = np.atleast_2d(estimator.coef_), np.atleast_1d(np.asarray(estimator.intercept_, float))
    rows = estimator._read(X, y, sites, sample_weight)
    prepared = estimator._prepare(rows)
    if prepared.outputs > 1 or prepared.constants:
        raise InputError(f"there are no standard errors for {type(estimator).__name__} with several outputs or a scale")
    if estimator.weights == "sites" and len(rows.sites.names) > 1:
        raise InputError("there are no standard errors with weights='sites', where rows count unequally; use 'samples'")
    coef, level_term = prepared.scaling.standard(*fitted)
    x = dense(np.concatenate([coef[0], level_term if prepared.intercept else []]))
    free = np.concatenate([prepared.scaling.factor != 0, np.ones(len(x) - prepared.columns, bool)])
    hessian = prepared.problem.hessian(x).numpy()[np.ix_(free, free)]
    values = np.linalg.eigvalsh(hessian)
    if values[0] <= SINGULAR * values[-1]:
        raise InputError(
            f"the Hessian is singular: {free.sum()} coefficients, {len(rows.y)} rows; columns depend on each other, or "
            "there are too many of them"
        )
    inverse = np.linalg.inv(hessian)
    step = np.zeros(len(x))
    step[free] = inverse @ prepared.problem.gradient(x).numpy()[free]
    estimate = x.numpy() - step
    n = float(rows.weight.sum())
    noise, distribution = 1.0, stats.norm
    if prepared.family.name == "gaussian":
        left = max(n - free.sum(), 1)
        noise = 2 * n * prepared.loss(torch.from_numpy(estimate)) / left
        distribution = stats.t(left)
    covariance = np.zeros((len(x), len(x)))
    covariance[np.ix_(free, free)] = noise * inverse / n
    return _original(estimator, prepared, estimate, covariance, distribution, level)


def _original(
    estimator: Federated, prepared: Any, estimate: Floats, covariance: Floats, distribution: Any, level: float
) -> Inference:
    """On the scale of the given columns: a linear map of the estimates."""
    p, factor, shift = prepared.columns, prepared.scaling.factor, prepared.scaling.shift
    back = np.eye(len(estimate))
    back[:p, :p] = np.diag(factor)
    if prepared.intercept:
        back[p, :p] = -factor * shift
    estimate, covariance = back @ estimate, back @ covariance @ back.T
    error = np.sqrt(np.clip(np.diag(covariance), 0, None))
    reach = distribution.ppf((1 + level) / 2)
    ratio = np.divide(np.abs(estimate), error, out=np.zeros_like(error), where=error > 0)
    names = (*estimator._names(), *(["(intercept)"] if prepared.intercept else []))
    return Inference(
        tuple(names),
        estimate,
        error,
        estimate - reach * error,
        estimate + reach * error,
        np.where(error > 0, 2 * distribution.sf(ratio), np.nan),
    )
