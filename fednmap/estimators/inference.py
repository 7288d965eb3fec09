"""Standard errors and confidence intervals, from the sum of the sites' Hessians."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import linalg, stats

from fednmap.estimators.base import Federated
from fednmap.estimators.prepare import Prepared, dense
from fednmap.estimators.sites import Floats, are_cases
from fednmap.names import InputError
from fednmap.problems import Cox

SINGULAR = 1e-10
"""A Hessian with a ratio of eigenvalues below this says nothing of some coefficient."""


@dataclass(frozen=True, eq=False)
class Inference:
    """Estimates with their standard errors, on the scale of the given columns; the intercept last, where there is one.

    estimate: the coefficients of an unpenalised fit; of a penalised one those of one Newton step on the loss alone,
              b - H^-1 grad f(b), which undoes the shrinkage (the debiased lasso, for fewer columns than rows).
              With three classes or more there is one coefficient for every column and class, those of a column sum to
              0 over classes, and names are "column [class]"; a contrast of two classes is a difference of two.
    """

    names: tuple[str, ...]
    estimate: Floats
    error: Floats
    low: Floats
    high: Floats
    p_value: Floats
    covariance: Floats
    """Of the estimates, for tests of several and for differences."""


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

    Whole-number weights count equal rows (2 is two of them), so that larger ones make errors smaller. Others are
    relative, their unit means nothing, and so are those of weights="sites": errors are then the sandwich's,
    H^-1 J H^-1 with J the sum of squares of the rows' gradients, which every site sends too. So are those of Huber's
    regression, whose loss is no likelihood.

    References: van de Geer et al., On asymptotically optimal confidence regions and tests for high-dimensional models,
    Annals of Statistics 2014; for columns fewer than rows the inverse of H needs no approximation. Huber, The behavior
    of maximum likelihood estimates under nonstandard conditions, 1967.
    """
    if not 0 < level < 1:
        raise InputError(f"level is {level!r}; it must lie between 0 and 1, such as 0.95")
    fitted, estimator = estimator, copy(estimator)  # which keeps its classes and names
    rows = estimator._read(X, y, sites, sample_weight)
    _same(fitted, estimator)
    prepared = estimator._prepare(rows)
    x, basis = _point(fitted, prepared), _free(prepared)
    hessian = basis.T @ prepared.problem.hessian(x).numpy() @ basis
    values = np.linalg.eigvalsh(hessian)
    if values[0] <= SINGULAR * values[-1]:
        raise InputError(
            f"the Hessian is singular: {len(hessian)} coefficients, {len(rows.y)} rows; columns depend on each other, "
            "or there are too many of them"
        )
    inverse = np.linalg.inv(hessian)
    step = inverse @ (basis.T @ prepared.problem.gradient(x).numpy())
    estimate = basis @ (basis.T @ x.numpy() - step)
    distribution: Any = stats.norm
    counted = are_cases(rows.weight) and (estimator.weights == "samples" or len(rows.sites) == 1)
    if not counted or prepared.constants:
        if isinstance(prepared.problem, Cox):
            raise InputError(
                "a Cox model has standard errors for weights='samples' and weights that count equal rows (whole "
                "numbers) only"
            )
        small = inverse @ (basis.T @ prepared.problem.outer(x).numpy() @ basis) @ inverse
    else:
        n, noise = float(rows.weight.sum()), 1.0
        if prepared.family.name == "gaussian":
            left = max(n - len(hessian), 1)
            noise = 2 * n * prepared.loss(torch.from_numpy(estimate)) / left
            distribution = stats.t(left)
        small = noise * inverse / n
    return _original(estimator, prepared, estimate, basis @ small @ basis.T, distribution, level)


def _same(fitted: Federated, read: Federated) -> None:
    """The rows must be those of the fit, as far as can be seen."""
    if read._names() != fitted._names():
        raise InputError("these rows have other columns than those of the fit; give the rows of the fit")
    if not np.array_equal(getattr(fitted, "classes_", 0), getattr(read, "classes_", 0)):
        raise InputError("these rows have other classes than those of the fit; give the rows of the fit")


def _point(fitted: Federated, prepared: Prepared) -> torch.Tensor:
    """The fitted model as a vector of the problem."""
    coef, intercept = np.atleast_2d(fitted.coef_), np.atleast_1d(np.asarray(fitted.intercept_, float))
    coef, intercept = prepared.scaling.standard(coef, intercept)
    scale = [fitted.scale_] if prepared.constants else []
    return dense(np.concatenate([coef.flatten(), intercept if prepared.intercept else [], scale]))


def _free(prepared: Prepared) -> Floats:
    """An orthonormal basis of what data can tell: columns that vary, and with several outputs a sum of 0 of each."""
    outputs = prepared.outputs
    across = linalg.null_space(np.ones((1, outputs))) if outputs > 1 else np.ones((1, 1))
    varies = np.eye(prepared.columns)[:, prepared.scaling.factor != 0]
    parts = [np.kron(across, varies)]
    if prepared.intercept:
        parts.append(across)
    if prepared.constants:
        parts.append(np.eye(prepared.constants))
    found: Floats = linalg.block_diag(*parts)
    return found


def _original(
    estimator: Federated, prepared: Prepared, estimate: Floats, covariance: Floats, distribution: Any, level: float
) -> Inference:
    """On the scale of the given columns: a linear map of the estimates. Constants are left out."""
    p, outputs = prepared.columns, prepared.outputs
    factor, shift = prepared.scaling.factor, prepared.scaling.shift
    back = np.zeros((outputs * (p + prepared.intercept), len(estimate)))
    back[: outputs * p, : outputs * p] = np.kron(np.eye(outputs), np.diag(factor))
    if prepared.intercept:
        back[outputs * p :, : outputs * p] = np.kron(np.eye(outputs), -factor * shift)
        back[outputs * p :, outputs * p : outputs * (p + 1)] = np.eye(outputs)
    estimate, covariance = back @ estimate, back @ covariance @ back.T
    error = np.sqrt(np.clip(np.diag(covariance), 0, None))
    reach = distribution.ppf((1 + level) / 2)
    ratio = np.divide(np.abs(estimate), error, out=np.zeros_like(error), where=error > 0)
    return Inference(
        coefficient_names(estimator, prepared.intercept),
        estimate,
        error,
        estimate - reach * error,
        estimate + reach * error,
        np.where(error > 0, 2 * distribution.sf(ratio), np.nan),
        covariance,
    )


def coefficient_names(estimator: Federated, intercept: bool) -> tuple[str, ...]:
    """Of the coefficients, class by class, then of the intercepts."""
    columns, classes = estimator._names(), [f" [{name}]" for name in estimator._classes()] or [""]
    names = [f"{column}{name}" for name in classes for column in columns]
    return (*names, *([f"(intercept){name}" for name in classes] if intercept else []))
