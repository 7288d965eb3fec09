"""Which rows are held out, and which a model is fitted to meanwhile."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from sklearn.model_selection import check_cv

from fednmap.estimators.base import Rows
from fednmap.estimators.sites import Floats
from fednmap.estimators.sites import Rows as Numbers
from fednmap.names import InputError

LEAVE_ONE_SITE_OUT = "leave-one-site-out"
FOLDS = 5
"""Where cv is None, as in scikit-learn."""
ALLOWED = (
    f"give a number of folds, at least 2, {LEAVE_ONE_SITE_OUT!r}, a scikit-learn splitter (its groups are the sites), "
    "or (train, test) pairs of row numbers"
)

CV = int | str | Iterable[tuple[Any, Any]] | Any | None
"""What `folds` takes; a splitter is anything with scikit-learn's `split`."""


class Fold(NamedTuple):
    """Row numbers; a row that is listed twice counts twice."""

    name: str
    test: Numbers
    train: Numbers | None = None
    """None: all rows that are not in test."""

    def train_rows(self, rows: int) -> Numbers:
        return np.delete(np.arange(rows), self.test) if self.train is None else self.train


class Given(NamedTuple):
    """The rows as they were given to `fit`, which are those that a splitter splits."""

    X: Any
    y: Any
    sites: Any
    kept: Any
    """Whether a row has positive weight."""


def folds(rows: Rows, cv: Any, seed: int, kinds: Floats | None, given: Given) -> list[Fold]:
    """The folds of a cross-validation.

    cv:    a number of folds, dealt out within every site, so that each fold is a small federation like the whole;
           or "leave-one-site-out": what the model is worth at a site that it has not seen;
           or a scikit-learn splitter, with the sites as its groups; or (train, test) pairs of row numbers or masks.
    kinds: the class of every row, or whether it is an event; dealt out evenly too.
    """
    cv = FOLDS if cv is None else cv
    if cv is True or cv is False or (isinstance(cv, int | np.integer) and cv < 2):
        raise InputError(f"cv is {cv!r}; {ALLOWED}")
    if isinstance(cv, str) and cv == LEAVE_ONE_SITE_OUT:
        if len(rows.sites) < 2:
            raise InputError(f"cv is {cv!r} with one site; give sites, or a number of folds")
        return _numbered(rows.sites.of_row, rows.sites.names)
    if not isinstance(cv, int | np.integer):
        return _split(cv, given)
    if len(rows.y) < 2 * cv:
        raise InputError(f"cv is {cv} folds for {len(rows.y)} rows; give at most {len(rows.y) // 2} folds")
    shuffled = np.random.default_rng(seed).permutation(len(rows.y))
    keys = (rows.sites.of_row[shuffled],) if kinds is None else (kinds[shuffled], rows.sites.of_row[shuffled])
    dealt = shuffled[np.lexsort(keys)]
    found = np.empty(len(rows.y), np.intp)
    found[dealt] = np.arange(len(rows.y)) % cv
    return _numbered(found, [f"fold {k + 1}" for k in range(cv)])


def _numbered(fold: Numbers, names: Sequence[str]) -> list[Fold]:
    """Folds from the number of the one that holds each row out."""
    return [Fold(name, np.flatnonzero(fold == k)) for k, name in enumerate(names)]


def _split(cv: Any, given: Given) -> list[Fold]:
    """The folds of a splitter or of pairs, without the rows of weight 0."""
    size = len(given.kept)
    found: list[Fold] = []
    place = np.where(given.kept, np.cumsum(given.kept) - 1, -1)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The groups parameter is ignored")
            for train, test in check_cv(cv).split(given.X, given.y, given.sites):
                parts = (place[np.asarray(part)] for part in (test, train))
                found.append(Fold(f"fold {len(found) + 1}", *(part[part >= 0] for part in parts)))
    except (ValueError, TypeError, IndexError) as error:
        raise InputError(f"cv is {cv!r:.60}, which does not split these {size} rows: {error}; {ALLOWED}") from None
    if not found:
        raise InputError(f"cv is {cv!r:.60} and holds no fold; an iterator can be used once: give a list")
    for fold in found:
        if not len(fold.test) or not len(fold.train_rows(size)):
            raise InputError(f"{fold.name} of cv has no row of positive weight to train on, or none to hold out")
    return found
