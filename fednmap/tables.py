"""The closing table of a run."""

from __future__ import annotations

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


def closing_table(results: list[dict[str, Any]]) -> Table:
    """One row a method, mean and spread over the trials, the best of each column in bold."""
    methods = list(dict.fromkeys(r["method"] for r in results))
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=0, collapse_padding=True)
    table.add_column("method", no_wrap=True)
    cells: list[list[str]] = [[] for _ in methods]
    for column in COLUMNS:
        table.add_column(column.title, justify="right", no_wrap=True)
        values = [_values(results, method, column) for method in methods]
        known = [mean(v) for v in values if v]
        best = (max if column.better > 0 else min)(known) if known and column.better and len(methods) > 1 else None
        for row, v in zip(cells, values, strict=True):
            text = _cell(v, column)
            row.append(f"[bold]{text}[/bold]" if v and mean(v) == best else text)
    for method, row in zip(methods, cells, strict=True):
        failed = any("error" in r for r in results if r["method"] == method)
        table.add_row(f"{method} (diverged)" if failed else method, *row)
    return table


def _values(results: list[dict[str, Any]], method: str, column: Column) -> list[float]:
    return [r[column.key] * column.scale for r in results if r["method"] == method and r[column.key] is not None]


def _cell(values: list[float], column: Column) -> str:
    if not values:
        return "-"
    text = f"{mean(values):{column.digits}}"
    return f"{text} ± {stdev(values):{column.digits}}" if len(values) > 1 and column.better else text
