"""The closing table of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import mean, stdev
from typing import Any, NamedTuple

from rich import box
from rich.table import Table


class Column(NamedTuple):
    title: str
    key: str
    scale: float
    digits: str
    better: int
    """-1 where less is better, 1 where more is, 0 where it is only told."""


COLUMNS = (
    Column("psi", "objective", 1, ".4f", -1),
    Column("|F_nat|^2", "stationarity", 1, ".2e", -1),
    Column("zeros %", "zeros", 100, ".1f", 1),
    Column("Hoyer", "hoyer", 1, ".3f", 1),
    Column("acc. %", "test_accuracy", 100, ".1f", 1),
    Column("MB up", "bytes_up", 1e-6, ".2f", -1),
    Column("MB down", "bytes_down", 1e-6, ".2f", -1),
    Column("s", "seconds", 1, ".1f", 0),
)


class Cell(NamedTuple):
    text: str
    value: float | None
    """The mean over the trials."""
    best: bool = False


class Row(NamedTuple):
    title: str
    cells: list[Cell]


def rows(results: Mapping[str, Sequence[dict[str, Any]]]) -> list[Row]:
    """One row a method: label -> the closing numbers of its trials; mean, spread, and the best of each column.

    A method that diverged is never the best, and where all are alike nobody is.
    """
    columns = [_column([_cell(column, trials) for trials in results.values()], results, column) for column in COLUMNS]
    titles = [f"{label} (diverged)" if _failed(trials) else label for label, trials in results.items()]
    return [Row(title, list(cells)) for title, cells in zip(titles, zip(*columns, strict=True), strict=True)]


def closing_table(results: list[dict[str, Any]]) -> Table:
    """One row a method, mean and spread over the trials, the best of each column in bold."""
    methods = list(dict.fromkeys(r["method"] for r in results))
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=0, collapse_padding=True)
    table.add_column("method", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column.title, justify="right", no_wrap=True)
    for row in rows({method: [r for r in results if r["method"] == method] for method in methods}):
        texts = (cell.text.replace(" ±", "\n±") for cell in row.cells)  # else wider than a terminal
        table.add_row(row.title, *(f"[bold]{t}[/bold]" if c.best else t for t, c in zip(texts, row.cells, strict=True)))
    return table


def _cell(column: Column, trials: Sequence[dict[str, Any]]) -> Cell:
    values = [column.scale * r[column.key] for r in trials if r.get(column.key) is not None]
    if not values:
        return Cell("-", None)
    text = f"{mean(values):{column.digits}}"
    if len(set(values)) > 1 and column.better and all(map(isfinite, values)):
        text = f"{text} ± {stdev(values):{column.digits}}"
    return Cell(text, mean(values))


def _column(cells: list[Cell], results: Mapping[str, Sequence[dict[str, Any]]], column: Column) -> list[Cell]:
    """The cells of a column, the best marked."""
    sound = [not _failed(trials) for trials in results.values()]
    known = [c.value for c, ok in zip(cells, sound, strict=True) if ok and c.value is not None and isfinite(c.value)]
    if not column.better or len(set(known)) < 2:
        return cells
    best = max(known) if column.better > 0 else min(known)
    return [c._replace(best=ok and c.value == best) for c, ok in zip(cells, sound, strict=True)]


def _failed(trials: Sequence[dict[str, Any]]) -> bool:
    return any("error" in r for r in trials)
