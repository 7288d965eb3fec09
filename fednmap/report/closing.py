"""The closing table of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, isnan
from statistics import mean, stdev
from typing import Any, NamedTuple

from rich.text import Text

from fednmap.measure import Quantity, quantities
from fednmap.report.lines import ended_lines, gamma_line, jobs_line, measuring_line, took_part_lines, warning_lines
from fednmap.report.terminal import Grid

Trials = Sequence[dict[str, Any]]
"""The closing numbers of one method's trials."""

NAMES = ("method", "trial", "error", "ended", "ended_by", "warning", "jobs")
"""What a closing record says besides numbers that were measured."""


class Cell(NamedTuple):
    text: str
    value: float | None
    """The mean over the trials, as it is shown."""
    best: bool = False


class Row(NamedTuple):
    title: str
    cells: list[Cell]


def columns(results: Mapping[str, Trials]) -> list[Quantity]:
    """What the table shows: each quantity of the catalogue, and each metric of one's own, that some trial has."""
    return quantities(
        key
        for trials in results.values()
        for result in trials
        for key, value in result.items()
        if key not in NAMES and (value is None or (isinstance(value, int | float) and not isinstance(value, bool)))
    )


def rows(results: Mapping[str, Trials]) -> list[Row]:
    """One row per method: label -> the closing numbers of its trials; mean, spread, and the best of each column.

    A method that diverged, or whose psi rose, is never the best, and where all are alike nobody is.
    """
    cells = [
        _marked([_cell(column, trials) for trials in results.values()], results, column.better)
        for column in columns(results)
    ]
    titles = [f"{label} ({flaw})" if (flaw := _flaw(trials)) else label for label, trials in results.items()]
    return [Row(title, [column[k] for column in cells]) for k, title in enumerate(titles)]


def closing_table(results: Sequence[dict[str, Any]], gamma: float | None = None) -> Grid:
    """One row per method, mean and spread over the trials, the best of each column in bold; below it, what ended early.

    gamma: that of |F_nat|^2, said below the table, where the results do not hold it themselves as `measure_gamma`.
    """
    methods = dict.fromkeys(r["method"] for r in results)
    by_method = {method: [r for r in results if r["method"] == method] for method in methods}
    table = rows(by_method)
    columns_ = [(q.head, [_styled(row.cells[k]) for row in table]) for k, q in enumerate(columns(by_method))]
    said = gamma_line(results, gamma), measuring_line(results), jobs_line(results), *ended_lines(results)
    said = *said, *took_part_lines(results), *warning_lines(results)
    below = [line for line in said if line]
    return Grid("method", [row.title for row in table], columns_, right=True, below="\n".join(below))


def _styled(cell: Cell) -> Text:
    text = cell.text.replace(" ±", "\n±")  # else wider than a terminal
    return Text(text, "bold" if cell.best else "")


def _cell(column: Quantity, trials: Trials) -> Cell:
    values = [float(v) for r in trials if (v := r.get(column.key)) is not None and not isnan(v)]
    if not values:
        return Cell("-", None)
    text = column.text(mean(values))
    if len(set(values)) > 1 and column.better and all(map(isfinite, values)):
        text = f"{text} ± {column.text(stdev(values))}"
    return Cell(text, column.scale * mean(values))


def _marked(cells: list[Cell], results: Mapping[str, Trials], better: int) -> list[Cell]:
    """The cells of a column, the best marked."""
    sound = [not _flaw(trials) for trials in results.values()]
    known = [c.value for c, ok in zip(cells, sound, strict=True) if ok and c.value is not None and isfinite(c.value)]
    if not better or len(set(known)) < 2:
        return cells
    best = max(known) if better > 0 else min(known)
    return [c._replace(best=ok and c.value == best) for c, ok in zip(cells, sound, strict=True)]


def _flaw(trials: Trials) -> str:
    """What is wrong with a method in one of its trials, in a word or two."""
    rose = any("warning" in r for r in trials)
    return "diverged" if any("error" in r for r in trials) else "psi rose" if rose else ""
