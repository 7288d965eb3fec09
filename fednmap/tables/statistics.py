"""From tables as they are to numbers, by statistics that the sites send and nothing else.

The questions are the same whether the sites are tables in one process or machines that are asked by messages:
`FederatedPreprocessor.conversation` puts them, `answer` is a site's half. Both are plain numbers and words, as JSON has
them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, TransformerMixin

from fednmap.names import InputError, choose, is_number
from fednmap.tables.table import (
    MOSTLY,
    Column,
    SiteError,
    Table,
    as_word,
    divide,
    is_words,
    looks_like_id,
    missing,
    refuse_dates,
    table,
)

Floats = npt.NDArray[np.float64]
Question = dict[str, Any]
Answers = Mapping[str, dict[str, Any]]
"""One per site, by its name."""

T = TypeVar("T")

CONSTANT = 1e-10
"""A column whose deviation is this small, relative to its mean, does not vary."""
MISSING = "missing"
"""The level of a gap; a word of that name is a gap too."""
NUMBER = re.compile(r"[-+]?\d{1,15}(\.\d{0,15})?")
"""A code that a file of codes alone would be read as a number for."""
CUTS, NARROWINGS = 63, 10
"""A median is found by counts of the values below so many cuts, so many times: 64^10 = 2^60 places."""


@dataclass(frozen=True)
class Statistic:
    """What the sites send about a column, and the statistics computed from it.

    >>> sex = FederatedPreprocessor().fit({"basel": {"sex": ["f", "m"]}, "bern": {"sex": ["f", "x"]}}).statistics_[0]
    >>> sex.levels, sex.names
    (('f', 'm', 'x'), ('sex=m', 'sex=x'))
    """

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


def carry(conversation: Generator[Question, Answers, T], ask: Callable[[Question], Answers]) -> T:
    """Put the questions of a conversation to all sites, one after another; what it ends with."""
    try:
        question = next(conversation)
        while True:
            question = conversation.send(ask(question))
    except StopIteration as end:
        found: T = end.value
        return found


def scales(mean: Floats, deviation: Floats) -> tuple[Any, Floats]:
    """Return whether columns vary by more than rounding, and what they are divided by: their deviation, or 1.

    >>> scales(np.array([0.1, 5.0]), np.array([1e-17, 2.0]))
    (array([False,  True]), array([1., 2.]))
    """
    varies = deviation > CONSTANT * np.abs(mean)
    return varies, np.where(varies, deviation, 1.0)


def answer(question: Question, t: Table) -> dict[str, Any]:
    """Return a site's answer: sums, counts, words; columns that must not be described are refused by name."""
    if question["ask"] == "columns":
        return {"columns": _columns(t, question)}
    if question["ask"] == "deviations":
        return {name: float(np.square(given(t[name]) - float(mean)).sum()) for name, mean in question["means"].items()}
    if question["ask"] == "ranges":
        found = {name: values for name in question["columns"] if len(values := given(t[name]))}
        return {name: [float(values.min()), float(values.max())] for name, values in found.items()}
    if question["ask"] == "counts":
        return {
            name: [int(k) for k in np.searchsorted(np.sort(given(t[name])), cuts, "right")]
            for name, cuts in question["cuts"].items()
        }
    raise InputError(f"unknown question {question['ask']!r:.40}")


def given(values: Column) -> Floats:
    """Return the values of a column of numbers without its gaps."""
    found: Floats = values[~missing(values)]
    return found


def levels_of(values: Column) -> list[str | None]:
    """Return the words of a categorical column; a gap, or the word for one, is None."""
    words = [None if gap else as_word(v) for v, gap in zip(values, missing(values), strict=True)]
    return [None if word == MISSING else word for word in words]


def as_code(word: str) -> str:
    """Return a code as it is read where a site has numbers alone: 01 and 1.0 are 1."""
    return as_word(float(word)) if NUMBER.fullmatch(word) else word


def matched(values: Column, levels: Sequence[str]) -> list[str | None]:
    """Return the words of a categorical column as these levels have them, by name or by code; others as they are."""
    known = {as_code(level): level for level in levels} | {level: level for level in levels}
    return [word and known.get(word, known.get(as_code(word), word)) for word in levels_of(values)]


def order_statistics(rank: Mapping[str, float]) -> Generator[Question, Answers, dict[str, float]]:
    """The least value of each column with at least `rank` values up to it, by counts of values below some cuts."""
    ranges = yield {"ask": "ranges", "columns": list(rank)}
    low = {name: min(part[name][0] for part in ranges.values() if name in part) for name in rank}
    high = {name: max(part[name][1] for part in ranges.values() if name in part) for name in rank}
    for _ in range(NARROWINGS):
        cuts = {name: np.linspace(low[name], high[name], CUTS + 2) for name in rank}
        said = yield {"ask": "counts", "cuts": {name: found[1:-1].tolist() for name, found in cuts.items()}}
        for name in rank:
            below = np.sum([part[name] for part in said.values()], axis=0)
            k = int(np.searchsorted(below, rank[name]))  # the first cut with so many values up to it
            low[name], high[name] = float(cuts[name][k]), float(cuts[name][k + 1])
    return high


def _columns(t: Table, question: Question) -> list[dict[str, Any]]:
    """What a site sends about its columns; raise SiteError about the first that is refused, with the others' names."""
    found, refused = [], list[SiteError]()
    for name in t.columns:
        try:
            found.append(_column(name, t, question))
        except SiteError as error:
            refused.append(error)
    if refused:
        first, others = refused[0], [f"{error.column!r} ({error.code})" for error in refused[1:]]
        also = f"; also refused: {', '.join(others)}" if others else ""
        raise SiteError(f"{first}{also}", first.code, first.column)
    return found


def _column(name: str, t: Table, question: Question) -> dict[str, Any]:
    """What a site sends about one column."""
    values, at = t[name], f" at site {t.name!r}" if t.name else ""
    categorical = name in question["categorical"]
    words = levels_of(values) if is_words(values) or categorical else None
    gaps = missing(values) if words is None else np.array([word is None for word in words], bool)
    if len(values) and bool(gaps.all()):
        raise SiteError(f"column {name!r} has no value{at}; exclude the column, or leave the site out", "empty", name)
    refuse_dates(name, values, at)
    if words is not None and not categorical:
        _no_stray_word(name, values, at, question["max_levels"])
    if not categorical and looks_like_id(name, values):
        raise SiteError(
            f"column {name!r} looks like an identifier ({int((~gaps).sum())} different values in as many rows{at}); "
            "exclude the column",
            "identifier",
            name,
        )
    said = {"name": name, "gaps": int(gaps.sum())}
    if words is not None:
        levels = sorted({as_code(word) if categorical else word for word in words if word is not None})
        check_levels(name, len(levels), question["max_levels"], at)
        return said | {"kind": "category", "levels": levels}
    if bool(np.isinf(values).any()):
        raise SiteError(f"column {name!r} has infinity{at}, row {int(np.isinf(values).argmax())}", "infinite", name)
    return said | {"kind": "number", "count": len(given(values)), "sum": float(given(values).sum())}


def _no_stray_word(name: str, values: Column, at: str, max_levels: int) -> None:
    """Refuse a word among so many different numbers that they cannot be levels, by its row."""
    words = {row: word for row, word in enumerate(values) if word is not None and not is_number(word)}
    others = {word for row, word in enumerate(values) if word is not None and row not in words}
    if words and len(others) > max_levels and len(words) < (1 - MOSTLY) * len(values):
        row, word = next(iter(words.items()))
        raise SiteError(
            f"column {name!r} has {word!r:.40} in row {row}{at}, among numbers; correct it, or leave the cell empty",
            "stray-word",
            name,
        )


def check_levels(name: str, found: int, most: int, at: str = "") -> None:
    """Refuse a column with more different words than these."""
    if found > most:
        raise SiteError(
            f"column {name!r} has {found} different words{at}, more than max_levels = {most}; merge some, or exclude "
            "the column",
            "levels",
            name,
        )


@dataclass(eq=False, repr=False)
class FederatedPreprocessor(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Tables of several sites as one matrix each: gaps filled, words as indicators, numbers on one scale.

    Every site sends sums, counts and the words that occur; `statistics_` lists them. A number's gaps become the mean or
    median of all sites, and a column NAME=missing says where they were. Words become one column per level but the
    first, over the union of the sites' levels; a gap is a level too. Dates and identifiers are refused by name.

    impute:      "mean" (a sum) or "median" (by bisection: counts of the values below a number).
    indicators:  whether to add NAME=missing.
    standardize: numbers with mean 0 and deviation 1. The estimators do that by themselves.
    max_levels:  more different words than these are taken for a mistake.
    categorical: columns whose numbers are codes: they are taken for words.

    >>> a, b = {"age": [50.0, None], "sex": ["f", "m"]}, {"age": [70.0, 60.0], "sex": ["f", "x"]}
    >>> fitted = FederatedPreprocessor().fit({"basel": a, "bern": b})
    >>> [str(name) for name in fitted.get_feature_names_out()]
    ['age', 'age=missing', 'sex=m', 'sex=x']
    >>> fitted.transform(a)
    array([[50.,  0.,  0.,  0.],
           [60.,  1.,  1.,  0.]])
    """

    impute: str = "mean"
    _: KW_ONLY
    indicators: bool = True
    standardize: bool = False
    max_levels: int = 50
    categorical: Sequence[str] = ()

    def fit(self, X: Any, y: Any = None, sites: Any = None) -> Self:
        """Fit to a mapping of site names to frames, or to one frame and the site of each of its rows."""
        tables = {t.name: t for t in by_site(X, sites)}
        return self.know(carry(self.conversation(), lambda q: {name: answer(q, t) for name, t in tables.items()}))

    def conversation(self) -> Generator[Question, Answers, tuple[Statistic, ...]]:
        """Yield the questions that `fit` asks the sites; return the statistics. Wrong columns raise InputError."""
        choose("way to impute", self.impute, dict.fromkeys(("mean", "median")))
        categorical = list(self.categorical)
        about = yield {"ask": "columns", "max_levels": self.max_levels, "categorical": categorical}
        columns = _by_name({site: {c["name"]: c for c in said["columns"]} for site, said in about.items()})
        for name in categorical:
            if name not in columns:
                raise InputError(f"{name!r} is to be categorical, and no site has such a column")
        numbers = [name for name, parts in columns.items() if _is_number(name, parts)]
        count = {name: sum(part["count"] for part in columns[name].values()) for name in numbers}
        mean = {name: sum(part["sum"] for part in columns[name].values()) / count[name] for name in numbers}
        fill, sent = mean, "count, sum, sum of squared deviations"
        squares: dict[str, float] = {}
        if numbers:
            said = yield {"ask": "deviations", "means": mean}
            squares = {name: sum(part[name] for part in said.values()) for name in numbers}
            if self.impute == "median":
                fill = yield from order_statistics({name: count[name] / 2 for name in count})
                sent += f", least and greatest value, {CUTS * NARROWINGS} counts"
        found, origin = [], dict[str, str]()
        for name, parts in columns.items():
            gaps = sum(part["gaps"] for part in parts.values())
            if name in mean:
                scale = float(scales(np.array(mean[name]), np.sqrt(squares[name] / count[name]))[1])
                flagged = self.indicators and gaps > 0
                s = Statistic(name, "number", sent, gaps, fill[name], mean[name], scale, (), flagged)
            else:
                levels = sorted({level for part in parts.values() for level in part["levels"]})
                check_levels(name, len(levels), self.max_levels)
                words = "its levels, count of gaps"
                s = Statistic(name, "category", words, gaps, 0.0, 0.0, 1.0, tuple(levels), gaps > 0)
            for made in s.names:
                if origin.setdefault(made, name) != name:
                    raise InputError(
                        f"columns {origin[made]!r} and {name!r} would both become {made!r}; rename one of them"
                    )
            found.append(s)
        return tuple(found)

    def know(self, statistics: Sequence[Statistic]) -> Self:
        """Set the fitted attributes from known statistics; return self."""
        self.statistics_ = tuple(statistics)
        self.feature_names_in_ = np.array([s.column for s in self.statistics_], object)
        self.n_features_in_ = len(self.statistics_)
        return self

    def refilled(self, tables: Sequence[Table]) -> FederatedPreprocessor:
        """Return the same columns, with the gaps in numbers filled by what these rows, some of every site's, say."""
        found = []
        for s in self.statistics_:
            parts = [given(t[s.column]) for t in tables] if s.kind == "number" and s.missing else [np.zeros(0)]
            if len(values := np.concatenate(parts)):
                median = self.impute == "median"
                fill = np.quantile(values, 0.5, method="inverted_cdf") if median else values.mean()
                s = replace(s, fill=float(fill))
            found.append(s)
        return type(self)(**self.get_params()).know(found)

    def transform(self, X: Any) -> Floats:
        """Return a frame as numbers; a level that no site had is refused, other columns are not looked at."""
        rows = table(X, only={s.column for s in self.statistics_})
        lacking = [s.column for s in self.statistics_ if s.column not in rows.columns]
        if lacking:
            message = f"{rows.where}column {lacking[0]!r} is missing; the model was fitted with it"
            raise SiteError(message, "no-column", lacking[0])
        parts = [part for s in self.statistics_ for part in _encoded(s, rows, self.standardize)]
        return np.stack(parts, 1) if parts else np.empty((rows.rows, 0))

    def get_feature_names_out(self, input_features: Any = None) -> npt.NDArray[np.object_]:
        """Return the names of the columns that `transform` makes."""
        return np.array([name for s in self.statistics_ for name in s.names], object)

    def groups(self) -> dict[str, list[str]]:
        """Return the columns that come from one column, for a group penalty."""
        return {s.column: list(s.names) for s in self.statistics_ if s.names}


def by_site(X: Any, sites: Any = None) -> list[Table]:
    """Return one table per site, from a mapping of names to frames or from one frame with the site of every row."""
    if sites is None and isinstance(X, Mapping) and X and not all(np.ndim(v) == 1 for v in X.values()):
        found = [Table(table(frame, str(name)).columns, str(name)) for name, frame in X.items()]
    else:
        whole = table(X)
        where = divide(sites, whole.rows)
        found = [Table(whole.some(where.of_row == k).columns, name) for k, name in enumerate(where.names)]
    if empty := [t.name for t in found if not t.rows]:
        raise InputError(f"site {empty[0]!r} has no rows; leave it out")
    return found


def _by_name(said: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Column -> site -> what that says of it, in the order of the first site; every site must have all columns."""
    first = next(iter(said))
    for other in said:
        for a, b in ((first, other), (other, first)):
            lacking = [name for name in said[a] if name not in said[b]]
            if lacking:
                raise InputError(
                    f"column {lacking[0]!r} is missing at site {b!r}, and site {a!r} has it; add it, or exclude "
                    "the column"
                )
    return {name: {site: columns[name] for site, columns in said.items()} for name in said[first]}


def _is_number(name: str, parts: Mapping[str, Any]) -> bool:
    """Whether a column holds numbers; words at one site and numbers at another are refused."""
    words = [site for site, part in parts.items() if part["kind"] != "number"]
    numbers = [site for site in parts if site not in words]
    if words and numbers:
        levels = parts[words[0]]["levels"]
        shown = ", ".join(map(repr, [level for level in levels if not is_number(level)][:3] or levels[:3]))
        raise InputError(
            f"column {name!r} holds words at site {words[0]!r} ({shown}) and numbers at site {numbers[0]!r}; use one "
            "kind, with empty cells or NA for missing values, or name it among the categorical columns"
        )
    return not words


def known_values(s: Statistic, rows: Table) -> Column:
    """Return a column as the statistic has it: numbers with NaN, or words of its levels with None for a gap.

    Raises SiteError for words where numbers were, and for a level that no site had.
    """
    values, column = rows[s.column], f"{rows.where}column {s.column!r}"
    gaps = missing(values)
    if s.kind == "number":
        if is_words(values) and not bool(gaps.all()):
            row = int((~gaps).argmax())
            message = f"{column} has {values[row]!r} in row {row}; the model knows numbers there"
            raise SiteError(message, "words", s.column)
        return np.full(len(values), np.nan) if is_words(values) else values
    found = matched(values, s.levels)
    for row, word in enumerate(found):
        if word is not None and word not in s.levels:
            levels = ", ".join(s.levels[:12])
            message = f"{column} has the level {word!r} in row {row}, which no site had; known are {levels}"
            raise SiteError(message, "unknown-level", s.column)
    return np.array(found, object)


def _encoded(s: Statistic, rows: Table, standardize: bool) -> list[Floats]:
    """The columns that one column becomes."""
    values = known_values(s, rows)
    gaps = missing(values)
    flags = [gaps.astype(float)] if s.flagged else []
    if s.kind == "number":
        filled = np.where(gaps, s.fill, values)
        return [(filled - s.mean) / s.scale if standardize else filled, *flags]
    if bool(gaps.any()) and not s.flagged:
        row = int(gaps.argmax())
        message = f"{rows.where}column {s.column!r} has no value in row {row}, and no site had gaps there; fill it"
        raise SiteError(message, "gaps", s.column)
    return [*((values == level).astype(float) for level in s.levels[1:]), *flags]
