"""What the sites say about their columns, question by question, as plain numbers and words, as JSON has them.

The questions are the same whether the sites are tables in one process or machines that are asked by messages:
`FederatedPreprocessor.conversation` puts them, `answer` is a site's half.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fednmap.names import InputError, is_number
from fednmap.tables.table import MOSTLY, Column, SiteError, Table, as_word, is_words, looks_like_id, missing

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
    """Whether columns vary by more than rounding, and what they are divided by: their deviation, or 1.

    >>> scales(np.array([0.1, 5.0]), np.array([1e-17, 2.0]))
    (array([False,  True]), array([1., 2.]))
    """
    varies = deviation > CONSTANT * np.abs(mean)
    return varies, np.where(varies, deviation, 1.0)


def answer(question: Question, t: Table) -> dict[str, Any]:
    """A site's answer: sums, counts, words; columns that must not be told about are refused by name."""
    if question["ask"] == "columns":
        return {"columns": [_told(name, t, question) for name in t.columns]}
    if question["ask"] == "deviations":
        return {name: float(np.square(given(t[name]) - mean).sum()) for name, mean in question["means"].items()}
    if question["ask"] == "ranges":
        return {name: [float(given(t[name]).min()), float(given(t[name]).max())] for name in question["columns"]}
    if question["ask"] == "counts":
        return {
            name: [int(k) for k in np.searchsorted(np.sort(given(t[name])), cuts, "right")]
            for name, cuts in question["cuts"].items()
        }
    raise InputError(f"unknown question {question['ask']!r:.40}")


def given(values: Column) -> Floats:
    """The values of a column of numbers without its gaps."""
    found: Floats = values[~missing(values)]
    return found


def levels_of(values: Column) -> list[str | None]:
    """The words of a categorical column; a gap, or the word for one, is None."""
    words = [None if gap else as_word(v) for v, gap in zip(values, missing(values), strict=True)]
    return [None if word == MISSING else word for word in words]


def as_code(word: str) -> str:
    """A code as it is read where a site has numbers alone: 01 and 1.0 are 1."""
    return as_word(float(word)) if NUMBER.fullmatch(word) else word


def medians(count: Mapping[str, int]) -> Generator[Question, Answers, dict[str, float]]:
    """The medians of columns with so many values, by counts of the values below some cuts."""
    ranges = yield {"ask": "ranges", "columns": list(count)}
    low = {name: min(part[name][0] for part in ranges.values()) for name in count}
    high = {name: max(part[name][1] for part in ranges.values()) for name in count}
    for _ in range(NARROWINGS):
        cuts = {name: np.linspace(low[name], high[name], CUTS + 2) for name in count}
        said = yield {"ask": "counts", "cuts": {name: found[1:-1].tolist() for name, found in cuts.items()}}
        for name in count:
            below = np.sum([part[name] for part in said.values()], axis=0)
            k = int(np.searchsorted(below, count[name] / 2))  # the first cut with half of the values up to it
            low[name], high[name] = float(cuts[name][k]), float(cuts[name][k + 1])
    return high


def _told(name: str, t: Table, question: Question) -> dict[str, Any]:
    """What a site says of a column."""
    values, at = t[name], f" at site {t.name!r}" if t.name else ""
    categorical = name in question["categorical"]
    words = levels_of(values) if is_words(values) or categorical else None
    gaps = missing(values) if words is None else np.array([word is None for word in words], bool)
    if len(values) and bool(gaps.all()):
        raise SiteError(f"column {name!r} has no value{at}; leave the column or the site out", "empty", name)
    if words is not None and not categorical:
        _no_stray_word(name, values, at, question["max_levels"])
    if not categorical and looks_like_id(name, values):
        raise SiteError(
            f"column {name!r} looks like an identifier ({int((~gaps).sum())} different values in as many rows{at}); "
            "drop the column",
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
            f"column {name!r} has {found} different words{at}, more than max_levels = {most}; merge some, or drop the "
            "column",
            "levels",
            name,
        )
