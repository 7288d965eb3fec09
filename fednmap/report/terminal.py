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


LONG_TITLE = 30  # characters of a row's title that are never folded


def console(**options: Any) -> Console:
    """Return a console that prints text as it is: `pulse [/min]` is the name of a column, not rich's markup."""
    return Console(markup=False, emoji=False, **options)


@dataclass(frozen=True)
class TextTable:
    """Rows with a title each, and columns; columns that do not fit are put into a table below."""

    corner: str
    titles: Sequence[str]
    columns: Columns
    right: bool = False
    below: str = ""
    """A line under the table."""
    above: str = ""
    """A line before it."""
    lines: box.Box = box.SIMPLE_HEAD

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | Text]:
        wide = options.update(max_width=10_000)
        for pieces in range(1, len(self.columns) + 2):
            width = max(LONG_TITLE, options.max_width // 2)
            tables = [self._table(part, width) for part in _parts(self.columns, pieces)] or [self._table((), width)]
            if all(Measurement.get(console, wide, table).maximum <= options.max_width for table in tables):
                break
        if self.above:
            yield Text(self.above)
        yield from tables
        if self.below:
            yield Text(self.below)

    def _table(self, columns: Columns, width: int) -> Table:
        """width: beyond it a row's title is folded."""
        tight = self.lines is box.SIMPLE_HEAD
        table = Table(header_style="bold", box=self.lines, padding=0 if tight else (0, 1), collapse_padding=tight)
        table.add_column(self.corner, overflow="fold", max_width=width)
        for head, _ in columns:
            table.add_column(Text(head), justify="right" if self.right else "left", no_wrap=True)
        for k, title in enumerate(self.titles):
            table.add_row(Text(title), *(cells[k] for _, cells in columns))
        return table


def _parts(columns: Columns, pieces: int) -> Iterator[Columns]:
    """The columns in order, cut into as many pieces of nearly equal length."""
    size = max(1, -(-len(columns) // pieces))
    return (columns[k : k + size] for k in range(0, len(columns), size))
