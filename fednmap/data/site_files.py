"""One file per client: a folder of tables, with words and gaps as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fednmap.data.dataset import Dataset, hold_out
from fednmap.data.targets import LABELS, label_names, targets
from fednmap.names import InputError
from fednmap.tables import FederatedPreprocessor, Table, read, read_sites
from fednmap.tables.files import places
from fednmap.tables.table import is_words, missing


def is_of_sites(path: str) -> bool:
    """Return whether csv:PATH names a folder or several files."""
    found = places(path)
    return bool(path) and (any(place.is_dir() for place in found) or (len(found) > 1 and not Path(path).is_file()))


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
    joint = np.concatenate(values[: len(sites)])
    held = [values[-1]] if test is not None else []
    y = targets([Path(path), *([Path(test)] if test is not None else [])], [joint, *held], regression)
    clients = torch.repeat_interleave(torch.arange(len(sites)), torch.tensor([t.rows for t in sites.values()]))
    features = tuple(map(str, preprocessor.get_feature_names_out()))
    whole = torch.cat(x[: len(sites)])
    made = hold_out(whole, y[0], clients) if test is None else Dataset(whole, y[0], x[-1], y[1], clients)
    labels, names = label_names(joint, y[0]), tuple(sites)
    return replace(made, features=features, labels=labels, sites=names, as_given=True, of_sites=True)


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
    gaps = missing(t[target])
    if bool(gaps.any()):
        raise InputError(f"{t.where}the column {target!r} has no value in row {int(gaps.argmax())}; leave the row out")
    return t[target]


def _listed(words: str | None) -> list[str]:
    return [name.strip() for name in (words or "").split("+") if name.strip()]
