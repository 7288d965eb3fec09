"""CSV files: a header, one sample per line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fednmap.data.dataset import Dataset, hold_out
from fednmap.data.targets import LABELS, label_names, located, targets
from fednmap.names import InputError, some_of


def csv(
    path: str,
    /,
    test: str | None = None,
    target: str | None = None,
    client: str | None = None,
    regression: bool | None = None,
    exclude: str | None = None,
    categorical: str | None = None,
) -> Dataset:
    """Return a table, csv:PATH, with a header; it predicts the column `target` (else label, target, y, or the last).

    A column `client` (if named or called so) says whose row it is. Every other column must be numbers.
    Without a `test` file every fifth row of every client is for the test. Whole numbers and words are
    labels, fractions are targets; `regression` decides otherwise.

    A folder, or several files, csv:a.csv,b.csv: one file per client, with words and gaps as they are; see
    `fednmap.data.site_files`, also for `exclude` and `categorical`.
    """
    from fednmap.data.site_files import is_of_sites, site_files  # which need more than a help text may load

    if is_of_sites(path):
        if client is not None:
            raise InputError(f"{path} has one file per client; leave client={client} out")
        return site_files(path, test, target, regression, exclude, categorical)
    if exclude is not None or categorical is not None:
        raise InputError("exclude and categorical are for one file per client, csv:FOLDER; one file is taken as it is")
    paths = [located(p) for p in (path, test) if p is not None]
    parts = [_read(p, target, client) for p in paths]
    for file, part in zip(paths, parts, strict=True):
        if part[0] != parts[0][0]:
            columns, trained = some_of(part[0]), some_of(parts[0][0])
            raise InputError(f"{file} has the columns {columns}, the training file {trained}; they must agree")
    x = [torch.from_numpy(part[1]) for part in parts]
    y = targets(paths, [part[2] for part in parts], regression)
    named: dict[str, Any] = {"as_given": True, "features": tuple(parts[0][0]), "labels": label_names(parts[0][2], y[0])}
    owners = parts[0][3]
    if owners is None:
        return replace(hold_out(x[0], y[0]) if test is None else Dataset(x[0], y[0], x[1], y[1]), **named)
    names, ids = np.unique(owners, return_inverse=True)
    clients = torch.from_numpy(ids)
    named["sites"] = tuple(map(str, names))
    if test is None:
        return replace(hold_out(x[0], y[0], clients), **named)
    others = parts[1][3]
    if others is None or not np.isin(others, names).all():
        return Dataset(x[0], y[0], x[1], y[1], clients, **named)
    return Dataset(x[0], y[0], x[1], y[1], clients, torch.from_numpy(np.searchsorted(names, others)), **named)


_Part = tuple[list[str], npt.NDArray[np.float32], npt.NDArray[np.generic], npt.NDArray[np.generic] | None]


def _read(path: Path, target: str | None, client: str | None) -> _Part:
    """Names of the features, features, values of the target column, values of the client column."""
    from fednmap.tables.files import cells  # which loads scikit-learn

    columns, _ = cells(path)
    if len(columns) < 2:
        raise InputError(f"{path} needs at least two columns, features and a label; it has {len(columns)}")
    owner = client or ("client" if "client" in columns else None)
    usual = [name for name in LABELS if name in columns]
    target = target or (usual[0] if usual else [name for name in columns if name != owner][-1])
    for name in (owner, target):
        if name is not None and name not in columns:
            raise InputError(f"{path} has no column {name!r}; it has {some_of(columns)}")
    features = [name for name in columns if name not in (owner, target)]
    x = np.empty((len(columns[target]), len(features)), np.float32)
    for i, name in enumerate(features):
        x[:, i] = _numbers(path, name, columns[name])
    values = [cell.strip() for cell in columns[target]]
    if "" in values:
        raise InputError(f"{path}, row {values.index('') + 1}: no value in column {target!r}; fill or drop it")
    y = np.array(values, float) if all(map(_is_finite, values)) else np.array(values)
    return features, x, y, None if owner is None else _ids([cell.strip() for cell in columns[owner]])


def _ids(names: list[str]) -> npt.NDArray[np.generic]:
    """Client ids in their natural order: 2 before 10 where all are whole numbers."""
    whole = all(name.isdecimal() and len(name) < 19 for name in names)  # longer ones are no 64-bit numbers
    return np.array([int(name) for name in names] if whole else names)


def _numbers(path: Path, name: str, cells: list[str]) -> npt.NDArray[np.float64]:
    for k, cell in enumerate(cells):
        if not _is_finite(cell):
            raise InputError(
                f"{path}, row {k + 1}: {cell!r} in column {name!r} is not a number; encode, fill or drop it"
            )
    return np.array(cells, float)


def _is_finite(cell: str) -> bool:
    try:
        return bool(np.isfinite(float(cell)))
    except ValueError:
        return False
