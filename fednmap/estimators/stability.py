"""Stability selection: how often a column is selected in halves of the rows, with a bound on false selections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fednmap.estimators.base import Federated, is_whole, warn_unconverged
from fednmap.estimators.path import is_ridge, path
from fednmap.estimators.penalties import weighted
from fednmap.estimators.rows import Floats
from fednmap.names import InputError
from fednmap.report.data_table import DataTable


@dataclass(frozen=True, eq=False)
class Stability:
    """Selection frequencies over halves of the rows; `stability()` returns it."""

    names: tuple[str, ...]
    frequency: Floats
    """The share of halves in which a column is among the first that enter the path."""
    threshold: float
    most: int
    """Columns that are selected in a half, at most."""

    @property
    def selected(self) -> tuple[str, ...]:
        """The columns whose frequency reaches the threshold."""
        return tuple(name for name, share in zip(self.names, self.frequency, strict=True) if share >= self.threshold)

    @property
    def error_bound(self) -> float:
        """The expected number of selected columns without effect, at most: most^2 / ((2 threshold - 1) columns)."""
        return self.most**2 / ((2 * self.threshold - 1) * len(self.names))

    def table(self) -> DataTable:
        """Return the columns by frequency, the highest first."""
        order = np.argsort(-self.frequency, kind="stable")
        rows = [[self.names[j], float(self.frequency[j]), self.names[j] in self.selected] for j in order]
        return DataTable(("name", "frequency", "selected"), rows)


def stability(
    self: Federated,
    X: Any,
    y: Any = None,
    sites: Any = None,
    sample_weight: Any = None,
    *,
    times: int = 100,
    most: int | None = None,
    threshold: float = 0.75,
    lambdas: int = 50,
    random_state: int = 0,
) -> Stability:
    """Return how often each column is among the first `most` that enter the path of half the rows of every site.

    most: default such that the bound on false selections is 1. All lam of a half share rounds, as in `path`.

    Columns with penalty factor 0 are in every model, and are not selected.

    The bound assumes that columns without effect are exchangeable, and that selection is no worse than at random.

    Reference: Meinshausen and Buehlmann, Stability selection, JRSS B 2010, theorem 1.
    """
    if not is_whole(times, 2):
        raise InputError(f"times is {times!r}; give a number of halves, at least 2, such as 100")
    estimator, rows = self._reading(X, y, sites, sample_weight)
    if not 0.5 < threshold <= 1:
        raise InputError(f"threshold is {threshold!r}; it must lie above 0.5 and be at most 1, such as 0.75")
    if not weighted(estimator.penalty) or is_ridge(estimator):
        raise InputError(f"expected a penalty that selects columns, such as l1, got {estimator.penalty!r:.60}")
    names, factors = estimator._names(), estimator._factors(estimator._names())
    judged = np.arange(len(names)) if factors is None else np.flatnonzero(factors)
    if not len(judged):
        raise InputError("expected a column with a penalty factor above 0, got none; nothing is selected")
    names = [names[j] for j in judged]
    if most is None:
        most = max(1, int(np.sqrt((2 * threshold - 1) * len(names))))
    if not 1 <= most <= len(names):
        raise InputError(f"most is {most!r}; expected a number of columns, from 1 to {len(names)}")
    random, count, converged = np.random.default_rng(random_state), np.zeros(len(names)), []
    for _ in range(times):
        order = np.lexsort((random.random(len(rows.y)), rows.sites.of_row))  # site by site, shuffled
        first = np.concatenate([[0], np.cumsum(rows.sites.sizes)])[rows.sites.of_row[order]]
        place = np.arange(len(order)) - first
        half = rows.some(np.sort(order[place < np.maximum(rows.sites.sizes // 2, 1)[rows.sites.of_row[order]]]))
        estimator._check(half.y, half.sites)
        found = path(estimator, half, lambdas=lambdas)
        converged.append(found.converged)
        ever = np.logical_or.accumulate((found.coefs[..., judged] != 0).any(1))
        few = np.flatnonzero(ever.sum(1) <= most)
        count += ever[few[-1]] if len(few) else 0
    warn_unconverged(converged, "halves have models that")
    return Stability(tuple(names), count / times, threshold, most)
