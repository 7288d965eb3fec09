"""What the sites say about their columns, question by question, and what comes of it.

The questions are the same whether the sites are tables in one process or machines that are asked by messages: `talk`
puts them, `answer` is a site's half. Questions and answers are plain numbers and words, as JSON has them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
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


def statistics_from(said: Sequence[Mapping[str, Any]]) -> tuple[Statistic, ...]:
    """Statistics that were written as JSON."""
    return tuple(Statistic(**{**s, "levels": tuple(s["levels"])}) for s in said)


def as_said(statistics: Sequence[Statistic]) -> list[dict[str, Any]]:
    """The way there."""
    return [asdict(s) for s in statistics]


def carry(conversation: Generator[Question, Answers, T], ask: Callable[[Question], Answers]) -> T:
    """Put the questions of a conversation to all sites, one after another; what it ends with."""
    try:
        question = next(conversation)
        while True:
            question = conversation.send(ask(question))
    except StopIteration as end:
        found: T = end.value
        return found


def talk(
    impute: str, *, indicators: bool, max_levels: int, categorical: Sequence[str]
) -> Generator[Question, Answers, tuple[Statistic, ...]]:
    """The statistics of all columns, from sums and counts over the sites and the words that occur."""
    about = yield {"ask": "columns", "max_levels": max_levels, "categorical": list(categorical)}
    names = _same_columns({site: [c["name"] for c in said["columns"]] for site, said in about.items()})
    for name in categorical:
        if name not in names:
            raise InputError(f"{name!r} is to be categorical, and no site has such a column")
    columns = {name: {site: _of(said, name) for site, said in about.items()} for name in names}
    numbers = [name for name, parts in columns.items() if _kind(name, parts) == "number"]
    count = {name: sum(part["count"] for part in columns[name].values()) for name in numbers}
    mean = {name: sum(part["sum"] for part in columns[name].values()) / count[name] for name in numbers}
    squares: dict[str, float] = dict.fromkeys(numbers, 0.0)
    fill, sent = mean, "count, sum, sum of squared deviations"
    if numbers:
        said = yield {"ask": "deviations", "means": mean}
        squares = {name: sum(part[name] for part in said.values()) for name in numbers}
        if impute == "median":
            fill = yield from _medians(count)
            sent += f", least and greatest value, {CUTS * NARROWINGS} counts"
    found = []
    for name, parts in columns.items():
        gaps = sum(part["gaps"] for part in parts.values())
        if name in mean:
            scale = float(scales(np.array(mean[name]), np.sqrt(squares[name] / count[name]))[1])
            flagged = indicators and gaps > 0
            found.append(Statistic(name, "number", sent, gaps, fill[name], mean[name], scale, (), flagged))
            continue
        levels = sorted({level for part in parts.values() for level in part["levels"]})
        _few(name, len(levels), max_levels)
        words = "its levels, count of gaps"
        found.append(Statistic(name, "category", words, gaps, 0.0, 0.0, 1.0, tuple(levels), gaps > 0))
    _no_name_twice(found)
    return tuple(found)


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
        chosen, most = set(question["categorical"]), question["max_levels"]
        return {"columns": [_told(name, t[name], t.name, name in chosen, most) for name in t.columns]}
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


def median(parts: Sequence[Floats]) -> float:
    """The median of all parts' values, by counts of the values below some cuts."""
    sites = {str(k): Table({"v": np.asarray(part, float)}, str(k)) for k, part in enumerate(parts)}
    found = carry(
        _medians({"v": sum(len(part) for part in parts)}), lambda q: {k: answer(q, t) for k, t in sites.items()}
    )
    return found["v"]


def _medians(count: Mapping[str, int]) -> Generator[Question, Answers, dict[str, float]]:
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


def _told(name: str, values: Column, site: str, categorical: bool, max_levels: int) -> dict[str, Any]:
    """What a site says of a column."""
    at = f" at site {site!r}" if site else ""
    words = is_words(values) or categorical
    gaps = np.array([w is None for w in levels_of(values)], bool) if words else missing(values)
    if len(values) and bool(gaps.all()):
        raise SiteError(f"column {name!r} has no value{at}; leave the column or the site out", "empty", name)
    if is_words(values) and not categorical:
        _no_stray_word(name, values, at, max_levels)
    if not categorical and looks_like_id(name, values):
        raise SiteError(
            f"column {name!r} looks like an identifier ({int((~gaps).sum())} different values in as many rows{at}); "
            "drop the column",
            "identifier",
            name,
        )
    if words:
        levels = sorted({as_code(word) if categorical else word for word in levels_of(values) if word is not None})
        _few(name, len(levels), max_levels, at)
        kind = "category" if categorical else "words"
        return {"name": name, "kind": kind, "gaps": int(gaps.sum()), "levels": levels}
    if bool(np.isinf(values).any()):
        row = int(np.isinf(values).argmax())
        raise SiteError(f"column {name!r} has infinity{at}, row {row}", "infinite", name)
    kept = given(values)
    return {
        "name": name,
        "kind": "number",
        "gaps": int(gaps.sum()),
        "count": len(kept),
        "sum": float(kept.sum()),
    }


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


def _kind(name: str, parts: Answers) -> str:
    """number or category; words at one site and numbers at another are refused."""
    words = [site for site, part in parts.items() if part["kind"] != "number"]
    numbers = [site for site, part in parts.items() if part["kind"] == "number"]
    if words and numbers:
        shown = ", ".join(repr(level) for level in parts[words[0]]["levels"][:3])
        raise InputError(
            f"column {name!r} holds words at site {words[0]!r} ({shown}) and numbers at site {numbers[0]!r}; use one "
            "kind, or name it among the categorical columns"
        )
    return "category" if words else "number"


def _of(said: Mapping[str, Any], name: str) -> dict[str, Any]:
    return next(c for c in said["columns"] if c["name"] == name)


def _few(name: str, found: int, most: int, at: str = "") -> None:
    if found > most:
        raise SiteError(
            f"column {name!r} has {found} different words{at}, more than max_levels = {most}; merge some, or drop the "
            "column",
            "levels",
            name,
        )


def _same_columns(names: Mapping[str, list[str]]) -> list[str]:
    """The columns, in the order of the first site; every site must have them all."""
    first = next(iter(names))
    for other in names:
        for a, b in ((first, other), (other, first)):
            lacking = [name for name in names[a] if name not in names[b]]
            if lacking:
                raise InputError(
                    f"column {lacking[0]!r} is missing at site {b!r}, and site {a!r} has it; add it, or drop "
                    "the column everywhere"
                )
    return names[first]


def _no_name_twice(statistics: Sequence[Statistic]) -> None:
    seen: dict[str, str] = {}
    for s in statistics:
        for name in s.names:
            if name in seen:
                raise InputError(
                    f"columns {seen[name]!r} and {s.column!r} would both become {name!r}; rename one of them"
                )
            seen[name] = s.column
