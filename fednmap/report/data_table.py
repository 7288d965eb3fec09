"""A table of numbers and words: as CSV, in a terminal, on a page."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from rich.table import Column, Table

from fednmap.names import InputError
from fednmap.report.terminal import TextTable, console


class DataTable(NamedTuple):
    """Rows under a heading. A cell is None where there is nothing to say."""

    head: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def __str__(self) -> str:
        screen = console()
        with screen.capture() as capture:
            screen.print(self.text())
        return capture.get()

    @classmethod
    def of_columns(cls, columns: Mapping[str, Any]) -> DataTable:
        """Return a table of columns by name, arrays or lists of one length."""
        cells = (v.tolist() if hasattr(v, "tolist") else v for v in columns.values())
        return cls([*columns], [list(row) for row in zip(*cells, strict=True)])

    def without(self, names: Sequence[str]) -> DataTable:
        """Return the table without these columns."""
        kept = [k for k, name in enumerate(self.head) if name not in names]
        return DataTable([self.head[k] for k in kept], [[row[k] for k in kept] for row in self.rows])

    def csv(self) -> str:
        """Return the table as CSV, with all digits."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.head)
        writer.writerows(self.rows)
        return text.getvalue()

    def markdown(self) -> str:
        """Return the table as Markdown, with four digits.

        >>> print(DataTable(["name", "p"], [["a|b", 0.25]]).markdown())
        | name | p |
        |---|---|
        | a\\|b | 0.25 |
        """
        lines = [[cell_text(cell).replace("|", "\\|") for cell in row] for row in (self.head, *self.rows)]
        head, *body = [f"| {' | '.join(line)} |" for line in lines]
        return "\n".join([head, "|" + "---|" * len(self.head), *body])

    def latex(self) -> str:
        """Return the table as a LaTeX tabular with lines of booktabs, with four digits."""
        rows = [[_latex(cell_text(cell)) for cell in row] for row in self.rows]
        lines = [" & ".join(line) + r" \\" for line in ([_latex(name) for name in self.head], *rows)]
        begin = rf"\begin{{tabular}}{{l{'r' * (len(self.head) - 1)}}}"
        return "\n".join([begin, r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule", r"\end{tabular}"])

    def frame(self) -> Any:
        """Return the table as a polars frame."""
        try:
            import polars
        except ModuleNotFoundError:
            raise InputError("a frame needs polars: pip install 'fednmap[tables]'") from None
        return polars.DataFrame({name: [row[k] for row in self.rows] for k, name in enumerate(self.head)})

    def html(self) -> str:
        """Return the table as HTML, with four digits."""
        names = "".join(f"<th>{escape(name)}</th>" for name in self.head)
        cells = ("".join(f"<td>{escape(cell_text(cell))}</td>" for cell in row) for row in self.rows)
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        return f"<div class=wide><table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table></div>"

    def text(self, title: str = "", **options: Any) -> TextTable:
        """Return the table for a terminal, with four digits; columns that do not fit are put below the others.

        The first columns of words, such as class and name, become the title of a row. options: of `TextTable`.

        >>> DataTable(["class", "name", "p"], [["a", "age", 0.25]]).text().titles
        ['a: age']
        """
        words = [all(isinstance(row[k], str) for row in self.rows) for k in range(len(self.head))]
        n = max(1, words.index(False) if False in words else 1)
        titles = [": ".join(map(cell_text, row[:n])) for row in self.rows]
        columns = [(self.head[k], [cell_text(row[k]) for row in self.rows]) for k in range(n, len(self.head))]
        return TextTable(": ".join(self.head[:n]), titles, columns, above=title, **options)

    def rich(self, **options: Any) -> Table:
        """Return the table for a terminal, with four digits; `options` are rich's."""
        table = Table(*(Column(name, overflow="fold") for name in self.head), **options)
        for row in self.rows:
            table.add_row(*map(cell_text, row))
        return table


def _latex(text: str) -> str:
    """Return text with LaTeX's own characters escaped."""
    special = {"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}"}
    return "".join(special.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in text)


def cell_text(cell: Any) -> str:
    """Return a cell as words: numbers with four digits, nothing for None.

    >>> [cell_text(cell) for cell in (0.123456, "age", 12, None)]
    ['0.1235', 'age', '12', '']
    """
    if cell is None:
        return ""
    return f"{cell + 0.0:.4g}" if isinstance(cell, float) else str(cell)  # without the sign of -0.0
