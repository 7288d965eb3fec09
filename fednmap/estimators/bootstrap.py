"""Uncertainty that includes how sites differ: fits of sites drawn with replacement."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fednmap.estimators.base import Federated, Rows, warn_unconverged
from fednmap.estimators.inference import coefficient_names
from fednmap.estimators.sites import Floats
from fednmap.names import InputError

FEWEST = 3
"""Sites of which samples can be drawn."""


@dataclass(frozen=True, eq=False)
class Bootstrap:
    """Coefficients of fits to sites drawn with replacement, on the scale of the given columns."""

    names: tuple[str, ...]
    estimate: Floats
    """Of the fit to all sites."""
    error: Floats
    low: Floats
    high: Floats
    """Percentiles of the draws."""
    draws: Floats
    """(times, coefficients)"""
    failed: int
    """Draws that could not be fitted, such as those that lack a class; they are left out."""


def bootstrap(estimator: Federated, rows: Rows, times: int, level: float, random_state: int) -> Bootstrap:
    """As many sites as there are, drawn with replacement, and the model fitted to them; so many times.

    A site that is drawn twice counts twice. It says how coefficients would vary with other sites of the same kind,
    where `inference` asks for other rows of the same sites; with few sites it is rough. An estimator that chooses its
    lam is fitted before, and keeps the one that it has chosen.

    Reference: Davison and Hinkley, Bootstrap methods and their application, 1997, section 3.8.
    """
    if len(rows.sites) < FEWEST:
        raise InputError(f"there are {len(rows.sites)} sites; a bootstrap over sites needs at least {FEWEST}")
    estimate = _coefficients(estimator, rows)[0]
    rng, found, failed, converged = np.random.default_rng(random_state), [], 0, []
    for _ in range(times):
        count = np.bincount(rng.integers(0, len(rows.sites), len(rows.sites)), minlength=len(rows.sites))
        weight = rows.weight * count[rows.sites.of_row]
        drawn = rows._replace(weight=weight).some(weight > 0)
        try:
            estimator._family().check(drawn.y, drawn.sites.at)
            estimator._all_classes(drawn.y)
        except InputError:
            failed += 1
            continue
        draw, reached = _coefficients(estimator, drawn)
        found.append(draw)
        converged.append(reached)
    if len(found) < 2:
        raise InputError(f"{failed} of {times} draws of sites cannot be fitted (a class lacks, or there is no event)")
    warn_unconverged(converged, "draws")
    draws = np.stack(found)
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], axis=0)
    names = coefficient_names(estimator, estimator.fit_intercept and estimator._family().level)
    return Bootstrap(names, estimate, draws.std(0, ddof=1), low, high, draws, failed)


def _coefficients(estimator: Federated, rows: Rows) -> tuple[Floats, bool]:
    """And whether the fit converged."""
    prepared = estimator._prepare(rows)
    fit = prepared.solve(estimator._regularizer(prepared), None, estimator.tol, estimator.max_rounds)
    model = prepared.parameters(fit.x)
    return np.concatenate([model.coef.flatten(), model.intercept if prepared.intercept else []]), fit.converged
