"""One file per site: CSV or parquet."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fednmap.names import InputError
from fednmap.tables.table import Table, table

KINDS = (".csv", ".parquet")
GAPS = ["", "NA", "N/A", "NaN", "nan", "null", "None", "?"]
"""Cells that stand for a missing value."""


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
    """The names of a file's columns."""
    polars = _polars()
    names = (
        polars.read_parquet_schema(path)
        if path.suffix.lower() == ".parquet"
        else polars.read_csv(path, n_rows=0).columns
    )
    return [name.strip() for name in names]


def read(path: Path, drop: Sequence[str] = ()) -> Table:
    """One file as a table, called like the file."""
    polars = _polars()
    if path.suffix.lower() not in KINDS:
        raise InputError(f"{path} is neither CSV nor parquet; a site's file ends in .csv or .parquet")
    if not path.is_file():
        raise InputError(f"there is no file {path}; give the path of an existing file")
    try:
        if path.suffix.lower() == ".parquet":
            frame = polars.read_parquet(path)
        else:
            frame = polars.read_csv(path, null_values=GAPS, infer_schema_length=None, try_parse_dates=False)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # polars has many kinds, all about the contents of the file
        raise InputError(f"{path} cannot be read as a table: {' '.join(str(error).split())[:200]}") from None
    names = [name.strip() for name in frame.columns]
    frame.columns = names
    if not names or frame.height == 0:
        raise InputError(f"{path} has no rows; a site needs a header and at least two rows")
    return table({name: frame[name].to_numpy() for name in names if name not in set(drop)}, path.stem)


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
