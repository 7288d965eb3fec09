"""From tables as they are to numbers, by statistics that the sites send and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, TransformerMixin

from fednmap.names import InputError, choose
from fednmap.tables.table import Column, Table, is_words, looks_like_id, missing, table

Floats = npt.NDArray[np.float64]

BISECTIONS = 60
"""Counts that a site sends for one median."""
MISSING = "missing"


@dataclass(frozen=True)
class Statistic:
    """What the sites send about a column, and what comes of it."""

    column: str
    kind: str
    """number or category"""
    sent: str
    missing: int
    fill: float
    """What a gap in a number becomes."""
    mean: float
    scale: float
    levels: tuple[str, ...] = ()
    flagged: bool = False
    """Whether a column says where the gaps were."""

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that it becomes; the first level is what the others are compared with."""
        flag = (f"{self.column}={MISSING}",) if self.flagged else ()
        if self.kind == "number":
            return (self.column, *flag)
        return (*(f"{self.column}={level}" for level in self.levels[1:]), *flag)


class FederatedPreprocessor(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Tables of several sites as one matrix each: gaps filled, words as indicators, numbers on one scale.

    Every site sends sums, counts and the words that occur; `statistics_` lists them. A number's gaps become the mean or
    median of all sites, and a column NAME=missing says where they were. Words become one column per level but the
    first, over the union of the sites' levels; a gap is a level of its own. Dates and identifiers are refused by name.

    impute:      "mean" (a sum) or "median" (by bisection: counts of the values below a number).
    indicators:  whether to add NAME=missing.
    standardize: numbers with mean 0 and deviation 1. The estimators do that by themselves.
    max_levels:  more different words than these are taken for a mistake.

    >>> a, b = {"age": [50.0, None], "sex": ["f", "m"]}, {"age": [70.0, 60.0], "sex": ["f", "x"]}
    >>> fitted = FederatedPreprocessor().fit({"basel": a, "bern": b})
    >>> [str(name) for name in fitted.get_feature_names_out()]
    ['age', 'age=missing', 'sex=m', 'sex=x']
    >>> fitted.transform(a)
    array([[50.,  0.,  0.,  0.],
           [60.,  1.,  1.,  0.]])
    """

    def __init__(
        self, impute: str = "mean", *, indicators: bool = True, standardize: bool = False, max_levels: int = 50
    ) -> None:
        self.impute = impute
        self.indicators = indicators
        self.standardize = standardize
        self.max_levels = max_levels

    def fit(self, X: Any, y: Any = None, sites: Any = None) -> Self:
        """From a mapping of site names to frames, or one frame and the site of each of its rows."""
        choose("way to impute", self.impute, dict.fromkeys(("mean", "median")))
        tables = by_site(X, sites)
        names = _same_columns(tables)
        self.statistics_ = tuple(self._statistic(name, [(t.name, t[name]) for t in tables]) for name in names)
        self.feature_names_in_ = np.array(names, object)
        self.n_features_in_ = len(names)
        return self

    def transform(self, X: Any) -> Floats:
        """A frame as numbers; a level that no site had is refused."""
        given = table(X)
        lacking = [s.column for s in self.statistics_ if s.column not in given.columns]
        if lacking:
            raise InputError(f"{given.where}column {lacking[0]!r} is missing; the model was fitted with it")
        parts = [part for s in self.statistics_ for part in _encoded(s, given, self.standardize)]
        return np.stack(parts, 1) if parts else np.empty((given.rows, 0))

    def get_feature_names_out(self, input_features: Any = None) -> npt.NDArray[np.object_]:
        return np.array([name for s in self.statistics_ for name in s.names], object)

    def groups(self) -> dict[str, list[str]]:
        """The columns that come from one column, for a group penalty."""
        return {s.column: list(s.names) for s in self.statistics_ if s.names}

    def _statistic(self, name: str, parts: Sequence[tuple[str, Column]]) -> Statistic:
        for site, values in parts:
            if len(values) and bool(missing(values).all()):
                raise InputError(f"column {name!r} has no value at site {site!r}; leave the column or the site out")
            if looks_like_id(name, values):
                raise InputError(
                    f"column {name!r} looks like an identifier ({len(values)} different values in as many rows at "
                    f"site {site!r}); drop the column"
                )
        words = [site for site, values in parts if is_words(values)]
        gaps = sum(int(missing(values).sum()) for _, values in parts)
        flagged = self.indicators and gaps > 0
        if words:
            numbers = [site for site, values in parts if not is_words(values)]
            if numbers:
                raise InputError(
                    f"column {name!r} holds words at site {words[0]!r} and numbers at site {numbers[0]!r}; use one kind"
                )
            levels = sorted({str(v) for _, values in parts for v in values[~missing(values)]})
            if len(levels) > self.max_levels:
                raise InputError(
                    f"column {name!r} has {len(levels)} different words, more than max_levels = {self.max_levels}; "
                    "merge some, or drop the column"
                )
            return Statistic(
                name, "category", "its levels, count of gaps", gaps, 0.0, 0.0, 1.0, tuple(levels), gaps > 0
            )
        for site, values in parts:
            if bool(np.isinf(values).any()):
                raise InputError(f"column {name!r} has infinity at site {site!r}, row {int(np.isinf(values).argmax())}")
        given = [values[~missing(values)] for _, values in parts]
        count = sum(len(values) for values in given)
        mean = sum(float(values.sum()) for values in given) / count
        spread = np.sqrt(sum(float(np.square(values - mean).sum()) for values in given) / count)
        fill, sent = mean, "count, sum, sum of squared deviations"
        if self.impute == "median" and gaps:
            fill, sent = median(given), f"{sent}, {BISECTIONS} counts"
        return Statistic(name, "number", sent, gaps, fill, mean, float(spread) or 1.0, (), flagged)


def by_site(X: Any, sites: Any = None) -> list[Table]:
    """One table per site, from a mapping of names to frames or from one frame with the site of every row."""
    if sites is None and isinstance(X, Mapping) and X and not all(np.ndim(v) == 1 for v in X.values()):
        return [Table(table(frame, str(name)).columns, str(name)) for name, frame in X.items()]
    whole = table(X)
    if sites is None:
        return [Table(whole.columns, "all")]
    labels = np.asarray(sites)
    if labels.shape != (whole.rows,):
        raise InputError(f"sites has shape {labels.shape}; give one site per row, {whole.rows} in all")
    return [Table(whole.some(labels == site).columns, str(site)) for site in np.unique(labels)]


def median(parts: Sequence[Floats]) -> float:
    """The median of all parts' values, by bisection on the number of values below."""
    low, high = min(float(v.min()) for v in parts), max(float(v.max()) for v in parts)
    half = sum(len(v) for v in parts) / 2
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if sum(int((v <= middle).sum()) for v in parts) >= half:
            high = middle
        else:
            low = middle
    return high


def _same_columns(tables: Sequence[Table]) -> list[str]:
    """The columns, in the order of the first site; every site must have them all."""
    first = tables[0]
    for other in tables[1:]:
        for a, b in ((first, other), (other, first)):
            lacking = [name for name in a.columns if name not in b.columns]
            if lacking:
                raise InputError(
                    f"column {lacking[0]!r} is missing at site {b.name!r}, and site {a.name!r} has it; add it, or drop "
                    "the column everywhere"
                )
    return list(first.columns)


def _encoded(s: Statistic, given: Table, standardize: bool) -> list[Floats]:
    """The columns that one column becomes."""
    values = given[s.column]
    gaps = missing(values)
    if s.kind == "number":
        if is_words(values):
            if not bool(gaps.all()):
                row = int((~gaps).argmax())
                raise InputError(
                    f"{given.where}column {s.column!r} has {values[row]!r} in row {row}; the model knows numbers there"
                )
            values = np.full(len(values), np.nan)
        filled = np.where(gaps, s.fill, values)
        filled = (filled - s.mean) / s.scale if standardize else filled
        return [filled, gaps.astype(float)] if s.flagged else [filled]
    words = np.array([None if gap else as_word(v) for v, gap in zip(values, gaps, strict=True)], object)
    known = set(s.levels)
    for row, word in enumerate(words):
        if word is not None and word not in known:
            raise InputError(
                f"{given.where}column {s.column!r} has the level {word!r} in row {row}, which no site had; known are "
                f"{', '.join(s.levels[:12])}"
            )
    if bool(gaps.any()) and not s.flagged:
        raise InputError(
            f"{given.where}column {s.column!r} has no value in row {int(gaps.argmax())}, and no site had gaps there; "
            "fill it"
        )
    columns = [(words == level).astype(float) for level in s.levels[1:]]
    return [*columns, gaps.astype(float)] if s.flagged else columns


def as_word(value: Any) -> str:
    """A level or label as text: whole numbers without a point, all others with every digit."""
    if not isinstance(value, float):
        return str(value)
    return str(int(value)) if value.is_integer() else repr(float(value))
