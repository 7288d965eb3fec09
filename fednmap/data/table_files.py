"""Tables in files: CSV with a header, one table per client, and LIBSVM."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fednmap.data.dataset import Dataset, hold_out
from fednmap.data.sparse import from_scipy
from fednmap.names import InputError, some_of

if TYPE_CHECKING:
    from fednmap.tables import Table

LARGEST = 8 * 2**30  # bytes of a dense table
MOST_LABELS = 10_000
LABELS = ("label", "target", "y")
"""Names of the column to predict, if none is given."""
Values = npt.NDArray[np.generic]


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
    `site_files`, also for `exclude` and `categorical`.
    """
    from fednmap.tables.files import places  # needs more than a help text may load

    found = places(path)
    if path and (any(place.is_dir() for place in found) or (len(found) > 1 and not Path(path).is_file())):
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
    x, values = [torch.from_numpy(part[1]) for part in parts], [part[2] for part in parts]
    y = targets(paths, values, regression)
    owners, others = parts[0][3], parts[-1][3]
    clients, test_clients = None, None
    sites: tuple[str, ...] = ()
    if owners is not None:
        names, ids = np.unique(owners, return_inverse=True)
        clients, sites = torch.from_numpy(ids), tuple(map(str, names))
        if others is not None and np.isin(others, names).all():
            test_clients = torch.from_numpy(np.searchsorted(names, others))
    made = hold_out(x[0], y[0], clients) if test is None else Dataset(x[0], y[0], x[1], y[1], clients, test_clients)
    return replace(made, features=tuple(parts[0][0]), labels=label_names(values[0], y[0]), sites=sites, as_given=True)


def site_files(
    path: str,
    test: str | None = None,
    target: str | None = None,
    regression: bool | None = None,
    exclude: str | None = None,
    categorical: str | None = None,
) -> Dataset:
    """Return a table per client, csv:FOLDER or csv:a.csv,b.parquet; it predicts the column `target`, as `csv` does.

    `fednmap.tables.FederatedPreprocessor` makes numbers of the other columns: words become indicators over the union of
    all clients' levels, gaps the mean, with a column that says where they were; its statistics are of all rows. Every
    fifth row of every client is for the test, unless there is a `test` file.

    exclude, categorical: names separated by +: columns to leave out, and columns whose numbers are codes.
    """
    from fednmap.tables import FederatedPreprocessor, read, read_sites
    from fednmap.tables.files import places
    from fednmap.tables.table import is_words

    sites = read_sites(f"csv:{path}", _listed(exclude))
    target = target or _usual(sites)
    preprocessor = FederatedPreprocessor(categorical=_listed(categorical))
    preprocessor.fit({name: t.without([target]) for name, t in sites.items() if len(t[target])})
    parts = list(sites.values()) + ([] if test is None else [read(places(test)[0], _listed(exclude))])
    x = [torch.from_numpy(preprocessor.transform(t.without([target])).astype(np.float32)) for t in parts]
    values = [_complete(t, target) for t in parts]
    if len({is_words(v) for v in values}) > 1:
        raise InputError(f"the column {target!r} holds words at one site and numbers at another; use one kind")
    values = [v.astype(str) if is_words(v) else v for v in values]
    joint, held = np.concatenate(values[: len(sites)]), values[len(sites) :]
    y = targets([Path(p) for p in (path, test) if p is not None], [joint, *held], regression)
    clients = torch.repeat_interleave(torch.arange(len(sites)), torch.tensor([t.rows for t in sites.values()]))
    whole = torch.cat(x[: len(sites)])
    made = hold_out(whole, y[0], clients) if test is None else Dataset(whole, y[0], x[-1], y[1], clients)
    named: dict[str, Any] = {"features": tuple(map(str, preprocessor.get_feature_names_out())), "sites": tuple(sites)}
    return replace(made, **named, labels=label_names(joint, y[0]), as_given=True, of_sites=True)


def svm(path: str, /, test: str | None = None, regression: bool | None = None, dense: bool = False) -> Dataset:
    """Return a LIBSVM file, svm:PATH, with its test file as `test`; without one every fifth row is for the test.

    Whole numbers are labels (-1, +1 become 0, 1), fractions are targets; `regression` decides otherwise. The table
    stays sparse, for linear models; `dense` writes out its zeros, for networks.
    """
    from sklearn.datasets import load_svmlight_file

    paths = [located(p) for p in (path, test) if p is not None]
    tables, values, from_zero = [], [], any(map(_names_zero, paths))
    for file in paths:
        try:
            table, value = load_svmlight_file(str(file), dtype=np.float64, zero_based=from_zero)
            table.data = table.data.astype(np.float32)
        except OSError as error:
            raise InputError(f"cannot read {file}: {error.strerror}") from None
        except (ValueError, OverflowError, UnicodeDecodeError) as error:
            raise InputError(f"{file} is truncated or not a LIBSVM file ({str(error).splitlines()[0]})") from None
        if not len(value):
            raise InputError(f"{file} is empty; give a LIBSVM file")
        tables.append(table)
        values.append(value)
    width = max(table.shape[1] for table in tables)
    needed = 4 * width * sum(table.shape[0] for table in tables)
    if dense and needed > LARGEST:
        raise InputError(f"{paths[0]} would need {needed / 2**30:.0f} GB as a dense table; leave dense=true out")
    for table in tables:
        table.resize(table.shape[0], width)  # a feature may occur in one of the two files only
    x = [torch.from_numpy(table.toarray()) if dense else from_scipy(path, table) for table in tables]
    y = targets(paths, values, regression)
    data = hold_out(x[0], y[0]) if test is None else Dataset(x[0], y[0], x[1], y[1])
    return replace(data, labels=label_names(values[0], y[0]), as_given=True)


def located(path: str) -> Path:
    """Return the file at `path`, else at that path inside the folder of FEDNMAP_DATA."""
    if not path:
        raise InputError("no file given; write the path after the colon, for example csv:table.csv")
    places = [Path(path).expanduser()]
    if root := os.environ.get("FEDNMAP_DATA"):
        places.append(Path(root) / path)
    for place in places:
        if place.is_file():
            return place
    raise InputError(f"there is no file {' or '.join(map(str, places))}; give the path of an existing file")


def targets(paths: Sequence[Path], values: Sequence[Values], regression: bool | None) -> list[Tensor]:
    """Return labels 0..K-1 in the order of the training values if these are whole or words, else real targets.

    The first of `values` is the training part; labels that occur only in another part are refused.
    """
    numbers = all(np.issubdtype(value.dtype, np.number) for value in values)
    if regression is None:
        regression = numbers and any(bool((value != np.rint(value)).any()) for value in values)
    if regression:
        if not numbers:
            raise InputError(f"{paths[0]} has words for targets; a regression needs numbers")
        return [torch.from_numpy(value.astype(np.float32)) for value in values]
    names = np.unique(values[0])
    if len(names) > MOST_LABELS:
        raise InputError(
            f"{paths[0]}: expected at most {MOST_LABELS:,} different labels, got {len(names):,}; for numbers to "
            "predict use regression=true"
        )
    for path, value in zip(paths, values, strict=True):
        strange = np.setdiff1d(value, names)
        if len(strange):
            raise InputError(
                f"{path} has the label {strange[0]}, which the training file has not; give files that match"
            )
    return [torch.from_numpy(np.searchsorted(names, value)) for value in values]


def label_names(values: Values, y: Tensor) -> tuple[str, ...]:
    """Return what labels 0, 1, ... stand for in a file; () where y holds numbers."""
    if y.is_floating_point():
        return ()
    from fednmap.tables.table import as_word

    return tuple(as_word(name) for name in np.unique(values).tolist())


def _read(path: Path, target: str | None, client: str | None) -> tuple[list[str], Any, Values, Values | None]:
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
        for k, cell in enumerate(columns[name]):
            if not _is_finite(cell):
                raise InputError(
                    f"{path}, row {k + 1}: {cell!r} in column {name!r} is not a number; encode, fill or drop it"
                )
        x[:, i] = np.array(columns[name], float)
    values = [cell.strip() for cell in columns[target]]
    if "" in values:
        raise InputError(f"{path}, row {values.index('') + 1}: no value in column {target!r}; fill or drop it")
    y = np.array(values, float) if all(map(_is_finite, values)) else np.array(values)
    if owner is None:
        return features, x, y, None
    names = [cell.strip() for cell in columns[owner]]
    whole = all(name.isdecimal() and len(name) < 19 for name in names)  # longer ones are no 64-bit numbers
    return features, x, y, np.array([int(name) for name in names] if whole else names)  # in order: 2 before 10


def _is_finite(cell: str) -> bool:
    try:
        return bool(np.isfinite(float(cell)))
    except ValueError:
        return False


def _usual(sites: Mapping[str, Table]) -> str:
    """The column that is called so, or with which every file ends."""
    first = next(iter(sites.values()))
    usual = [name for name in LABELS if name in first.columns]
    ends = {list(t.columns)[-1]: name for name, t in sites.items()}
    if not usual and len(ends) > 1:
        (a, site), (b, other) = list(ends.items())[:2]
        ends_with = f"{site} ends with the column {a!r} and {other} with {b!r}"
        raise InputError(f"{ends_with}; say what to predict by target=NAME")
    return usual[0] if usual else next(iter(ends))


def _complete(t: Table, target: str) -> np.ndarray:
    from fednmap.tables.table import missing

    gaps = missing(t[target])
    if bool(gaps.any()):
        raise InputError(f"{t.where}the column {target!r} has no value in row {int(gaps.argmax())}; leave the row out")
    return t[target]


def _listed(words: str | None) -> list[str]:
    return [name.strip() for name in (words or "").split("+") if name.strip()]


def _names_zero(file: Path) -> bool:
    """Return whether a file names feature 0: it then counts from 0 and not from 1, as do the data set's others."""
    with file.open("rb") as lines:
        return any(b" 0:" in line for line in lines)
