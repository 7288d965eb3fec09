"""One file per site: CSV or parquet."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fednmap.names import InputError, is_number
from fednmap.tables.table import Column, Table, table

KINDS = (".csv", ".parquet")
GAPS = ["", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "null", "NULL", "None", "?"]
"""Cells that stand for a missing value, as R, pandas, spreadsheets and databases write them."""
SEPARATORS = (",", ";", "\t")
DECIMAL_COMMA = re.compile(r"[-+]?\d+(,\d+)?")


def read_sites(spec: str, drop: Sequence[str] = ()) -> dict[str, Table]:
    """The sites of csv:FOLDER or csv:a.csv,b.parquet: a site is a file, and called like it.

    drop: columns that are left out unread; a name that no file has is refused.
    """
    kind, colon, rest = spec.partition(":")
    if kind != "csv" or not colon or not rest:
        raise InputError(f"data is {spec!r}; give csv:FOLDER or csv:a.csv,b.csv, one file per site")
    paths = _files(rest)
    found: dict[str, Table] = {}
    for path in paths:
        if path.stem in found:
            raise InputError(
                f"two files are called {path.stem!r}; a site has the name of its file, so they must differ"
            )
        found[path.stem] = read(path, drop)
    if drop:
        have = {name for path in paths for name in header(path)}
        for name in drop:
            if name not in have:
                raise InputError(f"{name!r} is to be dropped, and no site has such a column")
    return found


def header(path: Path) -> list[str]:
    """The names of a file's columns, which must differ."""
    if path.suffix.lower() == ".parquet":
        with _readable(path):
            names = list(_polars().scan_parquet(path, glob=False).collect_schema())
    else:
        names = _first_line(path)[0]
    names = [name.strip() for name in names]
    for k, name in enumerate(names):
        if not name:
            raise InputError(f"{path}: column {k + 1} has no name; name it, or write the file without an index")
        if name in names[:k]:
            raise InputError(f"{path} has two columns called {name!r}; names must differ")
    return names


def read(path: Path, drop: Container[str] = (), only: Container[str] | None = None) -> Table:
    """Return one file as a table, called like the file; CSV in UTF-8, separated by commas, semicolons or tabs.

    drop, only: columns to leave out, columns to take; the others are not looked at.
    """
    frame, separator = _frame(path)
    taken = [name for name in frame.columns if name not in drop and (only is None or name in only)]
    values = {name: frame[name].to_numpy() for name in taken}
    if path.suffix.lower() == ".csv":
        values = {name: _trimmed(column) for name, column in values.items()}
    if separator == ";":
        values = {name: _with_points(column) for name, column in values.items()}
    return table(values, path.stem)


def read_as_text(path: Path, name: str) -> list[str]:
    """Return one column of a file, every cell as it is written there: 007 is no number, NA no gap."""
    frame, _ = _frame(path, as_text=True)
    if name not in frame.columns:
        raise InputError(f"{path}: there is no column {name!r}; there are {', '.join(frame.columns)}")
    return ["" if value is None else str(value) for value in frame[name].to_list()]


def _frame(path: Path, as_text: bool = False) -> tuple[Any, str]:
    """The rows of a file as polars reads them, and what separates its cells; as_text: those of a CSV file as words."""
    polars = _polars()
    if path.suffix.lower() not in KINDS:
        raise InputError(f"{path} is neither CSV nor parquet; a site's file ends in .csv or .parquet")
    if not path.is_file():
        raise InputError(f"there is no file {path}; give the path of an existing file")
    names, separator = header(path), ","
    with _readable(path):
        if path.suffix.lower() == ".parquet":
            frame = polars.read_parquet(path, glob=False)
        else:
            separator = _first_line(path)[1]
            kinds = {"infer_schema": False} if as_text else {"infer_schema_length": None, "null_values": GAPS}
            frame = polars.read_csv(path, separator=separator, try_parse_dates=False, glob=False, **kinds)
    if path.suffix.lower() == ".csv" and len(names) > 1 and frame[frame.columns[-1]].null_count():
        there = _rows_there(path, separator, len(names))
        frame = frame.filter(polars.Series(there)) if len(there) == frame.height else frame
    if frame.height == 0:
        raise InputError(f"{path} has no rows; a site needs a header and at least two rows")
    return frame.rename(dict(zip(frame.columns, names, strict=True))), separator


def _first_line(path: Path) -> tuple[list[str], str]:
    """The names in a CSV file's first line, and what separates them."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            first = lines.readline()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not in UTF-8; save it as CSV UTF-8") from None
    if not first.strip():
        raise InputError(f"{path} is empty, or its first line is; it must name the columns")
    found = {mark: next(csv.reader([first], delimiter=mark)) for mark in SEPARATORS}
    names, mark = max(((names, mark) for mark, names in found.items()), key=lambda each: len(each[0]))
    if all(is_number(name) for name in names):
        raise InputError(f"{path} begins with numbers ({names[0].strip()}, ...); its first line must name the columns")
    return names, mark


def _rows_there(path: Path, separator: str, columns: int) -> list[bool]:
    """Which lines of a CSV file are rows: those that are not empty; one with fewer cells than columns is refused."""
    with _readable(path), path.open(newline="", encoding="utf-8-sig") as lines:
        cells = [len(row) for row in csv.reader(lines, delimiter=separator)][1:]
    for k, count in enumerate(cells):
        if 0 < count < columns:
            raise InputError(f"{path}, row {k + 1}: {count} values for {columns} columns; truncated or damaged")
    return [count > 0 for count in cells]


def _trimmed(values: Column) -> Column:
    """Words without the spaces around them: as a gap where they stand for one, as numbers where all are numbers."""
    if values.dtype.kind != "O" or not all(v is None or isinstance(v, str) for v in values):
        return values
    words = [None if v is None or v.strip() in GAPS else v.strip() for v in values]
    if not all(word is None or (is_number(word) and "_" not in word) for word in words):
        return np.array(words, object)
    return np.array([np.nan if word is None else float(word) for word in words])


def _with_points(values: Column) -> Column:
    """Words that are all numbers with a decimal comma as numbers."""
    words = [v for v in values if v is not None] if values.dtype.kind == "O" else []
    if not words or not all(isinstance(word, str) and DECIMAL_COMMA.fullmatch(word.strip()) for word in words):
        return values
    return np.array([np.nan if v is None else float(v.replace(",", ".")) for v in values])


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # polars has many kinds, all about the contents of the file
        why = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{path} cannot be read as a table: {why[:200]}") from None


def places(words: str) -> list[Path]:
    """The paths that are named, separated by commas; those that do not exist also inside the folder of FEDNMAP_DATA."""
    found = [Path(word.strip()).expanduser() for word in words.split(",")]
    if root := os.environ.get("FEDNMAP_DATA"):
        found = [place if place.exists() else Path(root) / place for place in found]
    return found


def _files(rest: str) -> list[Path]:
    whole = Path(rest.strip()).expanduser()
    named = [whole] if whole.is_file() else places(rest)  # a comma may belong to a name
    if len(named) == 1 and named[0].is_dir():
        found = sorted(path for path in named[0].iterdir() if path.suffix.lower() in KINDS and path.is_file())
        if not found:
            raise InputError(f"{named[0]} holds no .csv or .parquet file; put one file per site there")
        return found
    for place in named:
        if place.is_dir():
            raise InputError(f"{place} is a folder among several names; give one folder, or files only")
        if not place.exists():
            raise InputError(f"there is no file or folder {place}; give csv:FOLDER or csv:a.csv,b.csv")
    return named


def _polars() -> Any:
    try:
        import polars
    except ModuleNotFoundError:
        raise InputError("tables need polars: pip install 'fednmap[tables]'") from None
    return polars
