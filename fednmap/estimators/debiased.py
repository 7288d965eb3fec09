"""Intervals after a lasso, also with more columns than rows: the debiased (desparsified) estimate.

With b the lasso's estimate, g and H gradient and Hessian of the mean loss there, and T an approximate inverse of H,

    b - T g    is about normal with mean b_true and covariance T H T' / n (times the dispersion, if any).

Row j of T comes from a lasso of column j on the others (nodewise regression), which needs H alone: sites send their
gradient and Hessian once, sums over rows as for standard errors, and the server does the rest.

References: Zhang and Zhang, JRSS B 2014. Van de Geer, Buehlmann, Ritov and Dezeure, On asymptotically optimal
confidence regions and tests for high-dimensional models, Annals of Statistics 2014.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy import stats
from sklearn.utils.validation import check_is_fitted

from fednmap.estimators.base import Federated, check_level
from fednmap.estimators.inference import Inference, coefficient_names, fitted_point
from fednmap.estimators.penalties import penalty_name
from fednmap.estimators.rows import Floats
from fednmap.names import InputError

SWEEPS = 2000  # over all columns, at most
CLOSE = 1e-7  # change of a sweep at which the nodewise regressions end


def debiased(
    self: Federated,
    X: Any,
    y: Any = None,
    sites: Any = None,
    sample_weight: Any = None,
    *,
    level: float = 0.95,
    nodewise: float | None = None,
) -> Inference:
    """Return debiased estimates and intervals after an l1-penalised fit, also with more columns than rows.

    X, y: the rows of the fit. nodewise: the weight of the nodewise regressions; default sqrt(log(columns) / rows).
    """
    check_is_fitted(self)
    check_level(level)
    fitted, (estimator, rows) = self, self._reading(X, y, sites, sample_weight)
    if penalty_name(fitted.penalty) not in ("l1", "elastic-net"):
        raise InputError(f"expected a fit with penalty l1 or elastic-net, got {fitted.penalty!r:.40}; use inference()")
    if fitted.bounds is not None:
        raise InputError("expected a fit without bounds, got some; the correction would leave them")
    prepared = estimator._prepare(rows)
    if prepared.outputs > 1 or prepared.constants or estimator.site_effects != "none":
        raise InputError("expected a model with one score per row, no scale and no site effects")
    if not rows.counted or (estimator.weights == "sites" and len(rows.sites) > 1):
        raise InputError("expected weights that count equal rows (whole numbers, weights='samples') for intervals")
    p, n = prepared.columns, float(rows.weight.sum())
    x = torch.from_numpy(fitted_point(fitted, prepared))
    coef = x[:p].numpy()
    g, H = prepared.gradient(x).numpy(), prepared.hessian(x).numpy()
    if prepared.intercept:  # what the intercept leaves
        g, H = g[:p] - H[:p, p] * g[p] / H[p, p], H[:p, :p] - np.outer(H[:p, p], H[:p, p]) / H[p, p]
    varies = H.diagonal() > 1e-12 * max(float(H.diagonal().max()), 1e-300)
    scale = np.sqrt(np.where(varies, H.diagonal(), 1.0))
    unit = (H / np.outer(scale, scale))[np.ix_(varies, varies)]
    weight = np.sqrt(np.log(max(p, 2)) / n) if nodewise is None else nodewise
    T = np.zeros((p, p))
    T[np.ix_(varies, varies)] = approximate_inverse(unit, weight)
    T /= np.outer(scale, scale)
    left = n - np.count_nonzero(coef) - prepared.intercept if prepared.family.dispersed else n
    if left < 1:
        raise InputError("expected fewer nonzero coefficients than rows, got a fit without noise left; raise lam")
    factor = prepared.scaling.factor
    estimate, covariance = (
        factor * (coef - T @ g),
        np.outer(factor, factor) * (prepared.noise(x) * T @ H @ T.T / left),
    )
    estimate[~varies] = np.nan
    error = np.where(varies, np.sqrt(np.clip(covariance.diagonal(), 0, None)), np.nan)
    reach = stats.norm.ppf((1 + level) / 2) * error
    p_value = 2 * stats.norm.sf(np.abs(estimate) / error)
    about = (prepared.family.name, level, "debiased", n, len(rows.sites), p + prepared.intercept)
    names = coefficient_names(estimator, False)
    return Inference(names, estimate, error, estimate - reach, estimate + reach, p_value, covariance, *about)


def approximate_inverse(H: Floats, weight: float) -> Floats:
    """Return T with T H about the identity: row j is (1, -c_j) / t_j, where c_j is the lasso of column j on the others.

    H has ones on its diagonal. c_j minimises <v, H v> / 2 + weight |c_j|_1, v = (1, -c_j), by coordinate descent, all j
    together; t_j = <H_j, v> is the residual variance plus weight |c_j|_1.

    >>> import numpy as np
    >>> approximate_inverse(np.eye(2), 0.1)
    array([[1., 0.],
           [0., 1.]])
    """
    V, slope = np.eye(len(H)), H.copy()  # column j of V is v of column j
    for _ in range(SWEEPS):
        largest = 0.0
        for k in range(len(H)):
            v = V[k] - slope[k]
            change = np.sign(v) * np.maximum(np.abs(v) - weight, 0.0) - V[k]
            change[k] = 0.0
            some = np.flatnonzero(change)
            if len(some):
                V[k] += change
                slope[:, some] += np.outer(H[k], change[some])
                largest = max(largest, float(np.abs(change).max()))
        if largest <= CLOSE:
            break
    found: Floats = (V / slope.diagonal()).T + 0.0
    return found
