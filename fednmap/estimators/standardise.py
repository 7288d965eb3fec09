"""Features on one scale, from sums over the sites."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse

from fednmap.estimators.sites import Floats
from fednmap.tables.statistics import scales

AT_ONCE = 500
"""Dense rows gone through together, which stay in cache."""
ROWS = 2_000
"""Sparse rows gone through together."""


@dataclass(frozen=True, eq=False)
class Scaling:
    """x -> (x - shift) / scale, column by column; a column that does not vary becomes 0 where an intercept stands in.

    Two messages per site: the weighted sums of the columns, then the sums of squared deviations from the common mean.
    """

    shift: Floats
    factor: Floats
    """1 / scale; 0 takes a column out."""
    square: Floats
    """The mean square of each scaled column."""
    nbytes: int
    """Sent by one site and to it."""

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
        """The way back."""
        inner = np.divide(coef, self.factor, out=np.zeros_like(coef), where=self.factor != 0)
        return inner, intercept + coef @ self.shift


def moments(X: Any, weight: Floats) -> tuple[Floats, Floats]:
    """Mean and standard deviation of every column, weighted; both are sums over rows, so over sites."""
    if not sparse.issparse(X):
        mean, square = weight @ X, np.zeros(X.shape[1])
        for first in range(0, len(X), AT_ONCE):
            rows = slice(first, first + AT_ONCE)
            square += weight[rows] @ np.square(X[rows] - mean)
        return mean, np.sqrt(square)
    p, mean = X.shape[1], X.T @ weight
    inside, filled, count = np.zeros(p), np.zeros(p), np.zeros(p, int)
    for first in range(0, X.shape[0], ROWS):  # a few rows at a time: what is computed from them takes memory too
        bounds = X.indptr[first : first + ROWS + 1]
        entries = slice(bounds[0], bounds[-1])
        columns, each = X.indices[entries], np.repeat(weight[first : first + ROWS], np.diff(bounds))
        inside += np.bincount(columns, each * np.square(X.data[entries] - mean[columns]), p)
        filled += np.bincount(columns, each, p)
        count += np.bincount(columns[each > 0], minlength=p)
    full = count == np.count_nonzero(weight)
    empty = np.where(full, 0.0, np.clip(1 - filled, 0, None))  # exactly 0 where no entry is missing
    return mean, np.sqrt(inside + empty * np.square(mean))


def from_moments(mean: Floats, deviation: Floats, *, standardize: bool, free_level: bool) -> Scaling:
    """The scaling of columns with these means and deviations.

    free_level: the model has an intercept, or does not see the level of a column (Cox): then columns are centred too,
                which changes no coefficient and makes the problem easier; sparse ones by `Centred`, to stay sparse.
    """
    varies, scale = scales(mean, deviation)
    factor = 1 / scale if standardize else np.ones_like(mean)
    if free_level:
        factor = np.where(varies, factor, 0.0)
    shift = mean if free_level else np.zeros_like(mean)
    square = np.square(factor * deviation) + np.square(factor * (mean - shift))
    return Scaling(shift, factor, square, 4 * mean.nbytes)
