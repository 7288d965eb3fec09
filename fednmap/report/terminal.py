"""Consoles and tables for a terminal of any width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

Columns = Sequence[tuple[str, Sequence[str | Text]]]
"""(head, cells)"""


def console(**options: Any) -> Console:
    """Return a console that prints text as it is: `pulse [/min]` is the name of a column, not rich's markup."""
    return Console(markup=False, emoji=False, **options)


@dataclass(frozen=True)
class TextTable:
    """Rows with a title each, and columns; below each other where they do not fit beside each other."""

    corner: str
    titles: Sequence[str]
    columns: Columns
    right: bool = False
    below: str = ""
    """A line under the table."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | Text]:
        wide = options.update(max_width=10_000)
        for pieces in range(1, len(self.columns) + 2):
            tables = [self._table(part) for part in _parts(self.columns, pieces)] or [self._table(())]
            if all(Measurement.get(console, wide, table).maximum <= options.max_width for table in tables):
                break
        yield from tables
        if self.below:
            yield Text(self.below)

    def _table(self, columns: Columns) -> Table:
        table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=0, collapse_padding=True)
        table.add_column(self.corner, no_wrap=True)
        for head, _ in columns:
            table.add_column(Text(head), justify="right" if self.right else "left", no_wrap=True)
        for k, title in enumerate(self.titles):
            table.add_row(Text(title), *(cells[k] for _, cells in columns))
        return table


def _parts(columns: Columns, pieces: int) -> Iterator[Columns]:
    """The columns in order, cut into as many pieces of nearly equal length."""
    size = max(1, -(-len(columns) // pieces))
    return (columns[k : k + size] for k in range(0, len(columns), size))
