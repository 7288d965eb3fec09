"""A table: named columns of numbers or words, with gaps."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt

from fednmap.names import InputError, some_of

Column = npt.NDArray[Any]
"""float64 with NaN for a gap, or words (object) with None for one."""

MONTH = "(jan|feb|mar|apr|may|mai|jun|jul|aug|sep|okt|oct|nov|de[cz])[a-z]*"
DATE = re.compile(
    r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4})([ T].*)?|\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?"
    r"|-?\d+ (days?|(milli|micro|nano)?seconds)(,? .*)?"
    rf"|\d{{1,2}}[-. ]+{MONTH}[-., ]+\d{{2,4}}|{MONTH}[-. ]+\d{{1,2}},? +\d{{4}}",
    re.IGNORECASE,
)
MOSTLY = 0.8
"""Share of dates, or of numbers, from which on a column is one of them."""
ID = re.compile(
    r"(.*[_\s.-])?(p?id|uuid|mrn|ssn|identifier|index|unnamed: ?\d*)"
    r"|(patient|subject|person|case|record|study|sample|row)s?[_\s.-]*(id|no|nr|num|number|code|names?)?",
    re.IGNORECASE,
)
MANY = 20
"""Rows from which on a column of words that are all different is taken for an identifier."""


REFUSALS = {
    "no-column": "there is no column {column!r}",
    "empty": "column {column!r} has no value",
    "gaps": "column {column!r} has gaps, and may have none",
    "words": "column {column!r} holds words; numbers are needed",
    "stray-word": "column {column!r} has a word among numbers",
    "infinite": "column {column!r} has infinity",
    "range": "column {column!r} has a number that is not allowed there",
    "levels": "column {column!r} has too many different words; merge some, or exclude the column",
    "unknown-level": "column {column!r} has a level that was not agreed on",
    "identifier": "column {column!r} looks like an identifier; exclude the column",
    "dates": "column {column!r} holds dates or times; turn it into a number, or exclude the column",
    "one-row": "there is one row, and its sums would be that row; leave the site out",
    "one-row-fold": "a fold has one row of the site, or all but one, which its sums would reveal; give fewer folds",
    "own-intercept": "the site's own intercept would be infinite; leave the site out, or merge it with another",
    "rules": "the rules of the site cannot be read",
    "rule-question": "the site's rules do not allow this question",
    "rule-rows": "the site has fewer rows than its rules ask for",
    "rule-column": "the site's rules do not allow column {column!r}; exclude the column",
    "rule-level": "column {column!r} has a level, class or gap in too few rows for the site's rules",
    "rule-parameters": "the model has too many parameters for the site's rules",
    "rule-formula": "the site's rules allow no formula with numbers; use columns, C(), bs(), center() and their like",
    "rule-budget": "the privacy budget of the site does not allow this",
    "rule-points": "the site's rules allow no further model",
    "rule-few-rows": "the answer would rest on too few rows for the site's rules",
    "other": "the site refused",
}
"""What a site may send about an error in its table, by code."""


class SiteError(InputError):
    """An error in a column of a table. Its message may show cells, and stays at the site; code and column are sent."""

    def __init__(self, message: str, code: str = "other", column: str = "") -> None:
        super().__init__(message)
        self.code, self.column = code, column


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of one length, by name.

    >>> Table({"age": np.array([50.0, 61.0])}).rows
    2
    """

    columns: Mapping[str, Column]
    name: str = ""
    """Where it is from, for messages."""

    @property
    def rows(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __getitem__(self, name: str) -> Column:
        if name not in self.columns:
            message = f"{self.where}there is no column {name!r}; there are {some_of(self.columns)}"
            raise SiteError(message, "no-column", name)
        return self.columns[name]

    @property
    def where(self) -> str:
        return f"{self.name}: " if self.name else ""

    def without(self, names: Iterable[str]) -> Table:
        """Return the table without these columns."""
        left_out = set(names)
        return Table({name: column for name, column in self.columns.items() if name not in left_out}, self.name)

    def some(self, rows: Any) -> Table:
        """Return the table with these rows only."""
        return Table({name: column[rows] for name, column in self.columns.items()}, self.name)


@dataclass(frozen=True, eq=False)
class Sites:
    """The sites' names, and the number of the site of every row."""

    names: tuple[str, ...]
    of_row: npt.NDArray[np.intp]

    @property
    def sizes(self) -> npt.NDArray[np.intp]:
        return np.bincount(self.of_row, minlength=len(self.names))

    def __len__(self) -> int:
        return len(self.names)

    def at(self, row: int) -> str:
        """Return where a row is, for a message; empty if there is one site only."""
        return f" at site {self.names[self.of_row[row]]!r}" if len(self) > 1 else ""

    def row(self, row: int) -> str:
        """Return the same with the number of the row."""
        return f" in row {row}{self.at(row)}"

    def some(self, keep: Any) -> Sites:
        """Return the sites of these rows only; a site that keeps none is left out."""
        found, numbers = np.unique(self.of_row[keep], return_inverse=True)
        return Sites(tuple(self.names[k] for k in found), numbers)


def divide(sites: Any, rows: int) -> Sites:
    """Return the sites from one label per row; without labels one site holds everything."""
    if sites is None:
        return Sites(("all",), np.zeros(rows, np.intp))
    labels = np.asarray(sites)
    if labels.shape != (rows,):
        raise InputError(f"sites has shape {labels.shape}; give one site per row, {rows} in all")
    for row, label in enumerate(labels) if labels.dtype.kind in "fOU" else ():
        if is_gap(label):
            raise InputError(f"row {row} has no site; every row needs one")
    try:
        found, numbers = np.unique(labels, return_inverse=True)
    except TypeError:
        raise InputError("sites mixes kinds of labels, such as words and numbers; use one kind") from None
    return Sites(tuple(str(name) for name in found), numbers)


def table(frame: Any, name: str = "", only: Container[str] | None = None) -> Table:
    """Return a pandas or polars frame, or a mapping of names to values, as a Table.

    only: the columns to take; the others are not read.

    Anything else, and two columns of one name, raise InputError.

    >>> table({"age": [50, 61]}).rows
    2
    """
    if isinstance(frame, Table):
        return frame
    if not isinstance(frame, Mapping) and "columns" not in dir(frame):
        raise InputError(f"a {type(frame).__name__} has no named columns; give a pandas or polars frame, or a mapping")
    names = list(frame) if isinstance(frame, Mapping) else list(frame.columns)
    twice = [name for name, times in Counter(map(str, names)).items() if times > 1]
    if twice:
        raise InputError(f"{name or 'the table'} has two columns called {twice[0]!r}; names must differ")
    taken = [each for each in names if only is None or str(each) in only]
    found = {str(each): column(frame[each]) for each in taken}
    sizes = {len(values) for values in found.values()}
    if len(sizes) > 1:
        raise InputError(f"{name or 'the table'} has columns of different lengths: {sorted(sizes)}")
    return Table(found, name)


def column(given: Any) -> Column:
    """Return numbers as float64, words and dates as words."""
    values = given.to_numpy() if "to_numpy" in dir(given) else np.asarray(given)
    if values.dtype.kind in "iufb":
        return values.astype(np.float64)
    gaps = np.array([is_gap(v) for v in values], bool)
    there = values[~gaps]
    if values.dtype.kind == "O" and all(isinstance(v, bool | int | float | Decimal | np.number) for v in there):
        return np.array([np.nan if gap else float(v) for v, gap in zip(values, gaps, strict=True)])
    return np.array([None if gap else str(v).strip() for v, gap in zip(values, gaps, strict=True)], object)


def is_words(values: Column) -> bool:
    return values.dtype.kind == "O"


def refuse_dates(name: str, values: Column, at: str = "") -> None:
    """Raise SiteError if most words of a column are dates, times or durations."""
    words = values[~missing(values)] if is_words(values) else values[:0]
    dates = [word for word in words if isinstance(word, str) and DATE.fullmatch(word)]
    if len(words) and len(dates) >= MOSTLY * len(words):
        raise SiteError(
            f"column {name!r} holds dates or times{at}; turn it into a number, such as days since admission, or "
            "exclude the column",
            "dates",
            name,
        )


def missing(values: Column) -> npt.NDArray[np.bool_]:
    """Return where the gaps are."""
    return np.array([v is None for v in values], bool) if is_words(values) else np.isnan(values)


def looks_like_id(name: str, values: Column) -> bool:
    """Words that are all different; whole numbers that are and are called so, or count the rows."""
    given = values[~missing(values)]
    if len(given) < 2 or len(set(given.tolist())) < len(given):
        return False
    if is_words(values):
        return len(given) >= MANY or ID.fullmatch(name) is not None
    if not bool((given == np.rint(given)).all()):
        return False
    counting = len(given) == len(values) >= MANY and bool((np.diff(given) == 1).all())  # 1, 2, 3, ... row by row
    return counting or ID.fullmatch(name) is not None


def is_gap(value: Any) -> bool:
    if value is None or isinstance(value, str):
        return value is None or not value.strip()
    return type(value).__name__ in ("NAType", "NaTType") or bool(value != value)  # pandas' NA is not even unlike itself


def as_word(value: Any) -> str:
    """Return a level or label as text: whole numbers without a point, all others with every digit.

    >>> as_word(2.0), as_word(0.1)
    ('2', '0.1')
    """
    if not isinstance(value, float):
        return str(value)
    return str(int(value)) if value.is_integer() else repr(float(value))
