"""Which rows are held out together."""

from __future__ import annotations

import numpy as np

from fednmap.estimators.base import Rows
from fednmap.estimators.sites import Floats
from fednmap.estimators.sites import Rows as Numbers
from fednmap.names import InputError

LEAVE_ONE_SITE_OUT = "leave-one-site-out"


def folds(rows: Rows, cv: int | str, seed: int, kinds: Floats | None) -> tuple[Numbers, tuple[str, ...]]:
    """The fold of every row, and the folds' names.

    cv:    a number of folds, dealt out within every site, so that each fold is a small federation like the whole;
           or "leave-one-site-out": what the model is worth at a site that it has not seen.
    kinds: the class of every row, or whether it is an event; dealt out evenly too.
    """
    if cv == LEAVE_ONE_SITE_OUT:
        if len(rows.sites) < 2:
            raise InputError(f"cv is {cv!r} with one site; give sites, or a number of folds")
        return rows.sites.of_row, rows.sites.names
    if isinstance(cv, bool) or not isinstance(cv, int | np.integer) or cv < 2:
        raise InputError(f"cv is {cv!r}; give a number of folds, at least 2, or {LEAVE_ONE_SITE_OUT!r}")
    if len(rows.y) < 2 * cv:
        raise InputError(f"cv is {cv} folds for {len(rows.y)} rows; give at most {len(rows.y) // 2} folds")
    shuffled = np.random.default_rng(seed).permutation(len(rows.y))
    keys = (rows.sites.of_row[shuffled],) if kinds is None else (kinds[shuffled], rows.sites.of_row[shuffled])
    dealt = shuffled[np.lexsort(keys)]
    found = np.empty(len(rows.y), np.intp)
    found[dealt] = np.arange(len(rows.y)) % cv
    return found, tuple(f"fold {k + 1}" for k in range(cv))
