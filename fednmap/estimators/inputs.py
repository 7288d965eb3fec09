"""What may be given to `fit` and `predict`, refused by column and site where it may not."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse
from sklearn.base import BaseEstimator
from sklearn.utils import get_tags
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, column_or_1d, validate_data

from fednmap.estimators.sites import Floats, Sites
from fednmap.names import InputError, is_number

LARGEST = 1e100
"""Of numbers whose squares and sums of squares are finite without a doubt."""


def table(estimator: BaseEstimator, X: Any, *, reset: bool) -> Any:
    """X as float64, dense or CSR, with the estimator's names of columns set or compared."""
    thin = "csr" if get_tags(estimator).input_tags.sparse else False
    _columns_of_numbers(X)
    X = validate_data(
        estimator, X, reset=reset, accept_sparse=thin, dtype=np.float64, ensure_all_finite=False, ensure_min_samples=1
    )
    if sparse.issparse(X):
        X = sparse.csr_array(X)
        X.sum_duplicates()
    return X


def _columns_of_numbers(X: Any) -> None:
    """Refuse a frame with no columns, with two of one name, or with words, by column."""
    names = list(map(str, X.columns)) if "columns" in dir(X) else None
    if names is None:
        return
    if not names:
        raise InputError("X has no columns; give at least one")
    twice = [name for k, name in enumerate(names) if name in names[:k]]
    if twice:
        raise InputError(f"X has two columns called {twice[0]!r}; names must differ")
    for name, given in zip(names, X.columns, strict=True):
        values = X[given].to_numpy()
        word = next((v for v in values if isinstance(v, str)), None) if values.dtype.kind in "OU" else None
        if word is not None and not is_number(word):
            raise InputError(
                f"column {name!r} holds words, such as {word!r:.40}; make numbers of them "
                "(tables.FederatedPreprocessor), or drop the column"
            )


def names_of(estimator: BaseEstimator, columns: int) -> list[str]:
    """The columns' names, or their numbers as words."""
    named = getattr(estimator, "feature_names_in_", None)
    return [f"x{j}" for j in range(columns)] if named is None else [str(name) for name in named]


def finite(X: Any, names: list[str], sites: Sites) -> None:
    """Refuse NaN, infinity and numbers whose squares are, by column and site."""
    values = X.data if sparse.issparse(X) else X
    if max(values.max(initial=0.0), -values.min(initial=0.0)) <= LARGEST:  # no for NaN
        return
    if sparse.issparse(X):
        at = int(np.flatnonzero(~(np.abs(X.data) <= LARGEST))[0])
        row, column = int(np.searchsorted(X.indptr, at, "right")) - 1, int(X.indices[at])
        value = X.data[at]
    else:
        row, column = (int(k) for k in np.argwhere(~(np.abs(X) <= LARGEST))[0])
        value = X[row, column]
    if np.isfinite(value):
        raise InputError(
            f"column {names[column]!r} has {value:.3g} in row {row}{sites.at(row)}; beyond {LARGEST:g} squares "
            "overflow: use another unit"
        )
    what = "NaN" if np.isnan(value) else "infinity"
    if not sparse.issparse(X):
        mine = sites.of_row == sites.of_row[row]
        if bool(np.isnan(X[mine, column]).all()) and len(sites) > 1:
            raise InputError(
                f"column {names[column]!r} has no value{sites.at(row)}: is it missing there? (NaN in all rows); "
                "leave the column or the site out"
            )
    raise InputError(
        f"column {names[column]!r} has {what} in row {row}{sites.at(row)}; fill it (tables.FederatedPreprocessor) or "
        "leave the row out"
    )


def targets(y: Any, rows: int, columns: int = 1) -> Floats:
    """y as numbers, (N,), or (N, columns) for several."""
    _check_given(y)
    if columns == 1:
        if sparse.issparse(y):
            raise InputError("y is sparse; give a dense array of one number per row")
        found = column_or_1d(y, warn=True, dtype=None)
        if found.dtype.kind in "OU":
            found = _numbers_of(found)
        found = check_array(found, ensure_2d=False, dtype=np.float64, ensure_all_finite=False, input_name="y")
    else:
        found = check_array(y, ensure_2d=False, dtype=np.float64, ensure_all_finite=False, input_name="y")
    if len(found) != rows:
        raise InputError(f"X has {rows} rows and y has {len(found)}; found input variables with inconsistent numbers")
    numbers: Floats = found
    return numbers


def _check_given(y: Any) -> None:
    if y is None:
        raise InputError("this estimator requires y to be passed, but the target y is None")
    if _fields(y):
        raise InputError(
            f"expected one target per row, got a structured array with the fields {', '.join(_fields(y))}; give one "
            "of them, or use FederatedCoxRegression for times and events"
        )


def _fields(y: Any) -> Any:
    return getattr(getattr(y, "dtype", None), "fields", None) or {}


def times_and_events(y: Any) -> Any:
    """The two fields of a structured array, time first; anything else as it is."""
    fields = _fields(y)
    if not fields:
        return y
    event = [name for name, (kind, *_) in fields.items() if kind.kind == "b"]
    time = [name for name, (kind, *_) in fields.items() if kind.kind in "fiu"]
    if len(fields) != 2 or len(event) != 1 or len(time) != 1:
        got = ", ".join(f"{name} ({kind})" for name, (kind, *_) in fields.items())
        raise InputError(
            f"expected y with two fields, the event (bool) and the time (a number), got {got}; give two columns, time "
            "and event, or make y with sksurv.util.Surv"
        )
    return np.column_stack([y[time[0]], y[event[0]]])


def _numbers_of(y: Any) -> Floats:
    for row, value in enumerate(y):
        if isinstance(value, str) and not is_number(value):
            raise InputError(f"y holds words, such as {str(value)!r:.40} in row {row}; this model needs numbers")
    found: Floats = y.astype(np.float64)
    return found


def finite_targets(y: Floats, sites: Sites, names: tuple[str, ...] = ("y",)) -> None:
    wrong = np.argwhere(~(np.abs(y) <= LARGEST))
    if len(wrong):
        row = int(wrong[0][0])
        name, value = names[int(wrong[0][1])] if y.ndim == 2 else names[0], y[tuple(wrong[0])]
        what = "NaN" if np.isnan(value) else "infinity" if np.isinf(value) else f"{value:.3g}"
        raise InputError(f"{name} has {what} in row {row}{sites.at(row)}; leave the row out")


def labels(y: Any, rows: int) -> tuple[Any, Floats]:
    """The classes, and every row's class as a number from 0."""
    _check_given(y)
    found = column_or_1d(y, warn=True)
    check_classification_targets(found)
    if len(found) != rows:
        raise InputError(f"X has {rows} rows and y has {len(found)}; found input variables with inconsistent numbers")
    classes, numbers = np.unique(found, return_inverse=True)
    return classes, numbers.astype(np.float64)


def sample_weights(weight: Any, rows: int, sites: Sites) -> Floats:
    """What each row counts: numbers of at least 0, some above."""
    if weight is None:
        return np.ones(rows)
    found: Floats = np.asarray(weight, np.float64)
    if found.ndim == 0:
        found = np.full(rows, float(found))
    if found.shape != (rows,):
        raise InputError(f"sample_weight has shape {found.shape}; give one number per row, {rows} in all")
    wrong = np.flatnonzero(~((found >= 0) & (found <= LARGEST)))
    if len(wrong):
        row = int(wrong[0])
        raise InputError(
            f"sample_weight is {found[row]:g} in row {row}{sites.at(row)}; give a finite number, at least 0"
        )
    if not found.sum() > 0:
        raise InputError("Sample weights must contain at least one non-zero number; all are 0")
    return found
