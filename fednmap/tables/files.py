"""One file per site: CSV or parquet."""

from __future__ import annotations

import csv
import os
import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from fednmap.names import InputError, is_number, some_of
from fednmap.tables.table import Column, Table, table

MOST_COLUMNS = 50_000
KINDS = (".csv", ".parquet")
GAPS = {"", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "null", "NULL", "None", "?"}
"""Cells that stand for a missing value, as R, pandas, spreadsheets and databases write them."""
TRUTHS = {"true": 1.0, "false": 0.0}
SEPARATORS = (",", ";", "\t")
DECIMAL_COMMA = re.compile(r"[-+]?\d+(,\d+)?")


def read_sites(spec: str, drop: Sequence[str] = (), needed: Sequence[str] = ()) -> dict[str, Table]:
    """Return the sites of csv:FOLDER or csv:a.csv,b.parquet: a site is a file, and called like it.

    drop:   columns that are left out unread; a name that no file has is refused.
    needed: columns that every file must have; checked before any cell is read.

    Other files and columns raise InputError.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     _ = Path(folder, "basel.csv").write_text("age,sex\\n50,f\\n")
    ...     list(read_sites(f"csv:{folder}"))
    ['basel']
    """
    kind, colon, rest = spec.partition(":")
    if kind != "csv" or not colon or not rest:
        raise InputError(f"data is {spec!r}; give csv:FOLDER or csv:a.csv,b.csv, one file per site")
    found: dict[str, Table] = {}
    have: set[str] = set()
    for path in _files(rest):
        if path.stem in found:
            raise InputError(
                f"two files are called {path.stem!r}; a site has the name of its file, so they must differ"
            )
        columns, separator = _columns(path)
        have |= set(columns)
        for name in needed:
            if name not in columns:
                raise InputError(f"{path.stem}: there is no column {name!r}; there are {some_of(columns)}")
        found[path.stem] = _table(path, {name: columns[name] for name in columns if name not in drop}, separator)
    for name in drop:
        if name not in have:
            raise InputError(f"{name!r} is to be dropped, and no site has such a column")
    return found


def read(path: Path, drop: Container[str] = (), only: Container[str] | None = None) -> Table:
    """Return one file as a table, called like the file; CSV in UTF-8, separated by commas, semicolons or tabs.

    drop, only: columns to leave out, columns to take; the others are not looked at.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     _ = Path(folder, "basel.csv").write_text("age,sex\\n50,f\\n")
    ...     read(Path(folder, "basel.csv"), drop=["sex"]).columns
    {'age': array([50.])}
    """
    columns, separator = _columns(path)
    taken = {name: columns[name] for name in columns if name not in drop and (only is None or name in only)}
    return _table(path, taken, separator)


def read_as_text(path: Path, name: str) -> list[str]:
    """Return one column of a file as text: 007 is no number, NA no gap. A name it lacks raises InputError.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     _ = Path(folder, "basel.csv").write_text("id\\n007\\nNA\\n")
    ...     read_as_text(Path(folder, "basel.csv"), "id")
    ['007', 'NA']
    """
    columns, _ = _columns(path)
    if name not in columns:
        raise InputError(f"{path}: there is no column {name!r}; there are {some_of(columns)}")
    return ["" if value is None else str(value) for value in columns[name]]


def cells(path: Path) -> tuple[dict[str, list[str]], str]:
    """Return the cells of a CSV file as they are written, by the name of their column, and what separates them."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            first = lines.readline()
            lines.seek(0)
            unquoted = re.sub('"[^"]*("|$)', "", first)
            separator = max(SEPARATORS, key=unquoted.count)
            names, *rows = list(csv.reader(lines, delimiter=separator, strict=True)) or [[]]
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} is not a CSV file in UTF-8 ({error}); save it as CSV UTF-8") from None
    names = [name.strip() for name in names]
    if not any(names):
        raise InputError(f"{path} is empty, or its first line is; it must name the columns")
    if all(is_number(name) for name in names):
        raise InputError(f"{path} begins with numbers ({names[0]}, ...); its first line must name the columns")
    _check_distinct(path, names)
    rows = [row or [""] for row in rows] if len(names) == 1 else [row for row in rows if row]
    if not rows:
        raise InputError(f"{path} has no rows; it needs a header and at least one row")
    for k, row in enumerate(rows):
        if len(row) != len(names):
            raise InputError(f"{path}, row {k + 1}: {len(row)} values for {len(names)} columns; truncated or damaged")
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)), separator


def _columns(path: Path) -> tuple[dict[str, Any], str]:
    """The columns of a file by name, those of CSV as text; and what separates the cells, "" in parquet."""
    if path.suffix.lower() not in KINDS:
        raise InputError(f"{path} is neither CSV nor parquet; a site's file ends in .csv or .parquet")
    if not path.is_file():
        raise InputError(f"there is no file {path}; give the path of an existing file")
    columns, separator = cells(path) if path.suffix.lower() == ".csv" else (_parquet(path), "")
    for k, name in enumerate(columns):
        if not name:
            raise InputError(f"{path}: column {k + 1} has no name; name it, or write the file without an index")
    return columns, separator


def _table(path: Path, columns: Mapping[str, Any], separator: str) -> Table:
    if separator:
        columns = {name: _parsed(values, separator == ";") for name, values in columns.items()}
    for name, values in {} if separator else columns.items():
        if values.dtype.is_nested() or str(values.dtype) in ("Binary", "Object"):
            raise InputError(
                f"{path}: expected numbers or words in column {name!r}, got {values.dtype!s:.60}; write it as several "
                "columns, or drop it"
            )
    return table(columns, path.stem)


def _parsed(values: list[str], decimal_comma: bool) -> Column:
    """Numbers if all cells are, else words; NaN or None for a gap, and without the spaces around a cell."""
    with suppress(ValueError):
        return _floats(values)
    words = [None if (word := cell.strip()) in GAPS else word for cell in values]
    given = [word for word in words if word is not None]
    if given and all(word.lower() in TRUTHS for word in given):
        return np.array([np.nan if word is None else TRUTHS[word.lower()] for word in words])
    if decimal_comma and all(DECIMAL_COMMA.fullmatch(word) for word in given):
        words = [None if word is None else word.replace(",", ".") for word in words]
    with suppress(ValueError):
        return _floats(["nan" if word is None else word for word in words])
    return np.array(words, object)


def _floats(words: list[str]) -> Column:
    if "_" in "".join(words):
        raise ValueError("float() takes 1_000 for a number")
    return np.array(words, float)


def _parquet(path: Path) -> dict[str, Any]:
    try:
        import polars

        frame = polars.read_parquet(path, glob=False)
    except ModuleNotFoundError:
        raise InputError("parquet files need polars: pip install 'fednmap[tables]'") from None
    except Exception as error:  # polars has many kinds, all about the contents of the file
        why = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{path} cannot be read as a table: {why[:200]}") from None
    _check_distinct(path, [name.strip() for name in frame.columns])
    if frame.height == 0:
        raise InputError(f"{path} has no rows; it needs at least one")
    return {name.strip(): frame[name] for name in frame.columns}


def _check_distinct(path: Path, names: Sequence[str]) -> None:
    if len(names) > MOST_COLUMNS:
        raise InputError(f"{path}: expected at most {MOST_COLUMNS:,} columns, got {len(names):,}; leave some out")
    for name, times in Counter(names).items():
        if times > 1:
            raise InputError(f"{path} has two columns called {name!r:.60}; names must differ")


def places(words: str) -> list[Path]:
    """Return the paths that are named, separated by commas, as given or else inside the folder of FEDNMAP_DATA."""
    found = [Path(word.strip()).expanduser() for word in words.split(",")]
    root = Path(os.environ.get("FEDNMAP_DATA", ""))
    return [root / place if not place.exists() and (root / place).exists() else place for place in found]


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
