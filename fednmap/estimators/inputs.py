"""What may be given to `fit` and `predict`, refused by column and site where it may not."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse
from sklearn.base import BaseEstimator
from sklearn.utils import get_tags
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_array, column_or_1d, validate_data

from fednmap.estimators.sites import Floats, Sites
from fednmap.names import InputError


def table(estimator: BaseEstimator, X: Any, *, reset: bool) -> Any:
    """X as float64, dense or CSR, with the estimator's names of columns set or compared."""
    thin = "csr" if get_tags(estimator).input_tags.sparse else False
    X = validate_data(
        estimator, X, reset=reset, accept_sparse=thin, dtype=np.float64, ensure_all_finite=False, ensure_min_samples=1
    )
    if sparse.issparse(X):
        X = sparse.csr_array(X)
        X.sum_duplicates()
    return X


def names_of(estimator: BaseEstimator, columns: int) -> list[str]:
    """The columns' names, or their numbers as words."""
    named = getattr(estimator, "feature_names_in_", None)
    return [f"x{j}" for j in range(columns)] if named is None else [str(name) for name in named]


def finite(X: Any, names: list[str], sites: Sites) -> None:
    """Refuse NaN and infinity, by column and site."""
    values = X.data if sparse.issparse(X) else X
    if bool(np.isfinite(values.sum())) or bool(np.isfinite(values).all()):
        return
    if sparse.issparse(X):
        at = int(np.flatnonzero(~np.isfinite(X.data))[0])
        row, column = int(np.searchsorted(X.indptr, at, "right")) - 1, int(X.indices[at])
        value = X.data[at]
    else:
        row, column = (int(k) for k in np.argwhere(~np.isfinite(X))[0])
        value = X[row, column]
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
    if y is None:
        raise InputError("this estimator requires y to be passed, but the target y is None")
    if columns == 1:
        if sparse.issparse(y):
            raise InputError("y is sparse; give a dense array of one number per row")
        found = column_or_1d(y, warn=True, dtype=None)
        if found.dtype.kind == "O":
            found = found.astype(np.float64)
        found = check_array(found, ensure_2d=False, dtype=np.float64, ensure_all_finite=False, input_name="y")
    else:
        found = check_array(y, ensure_2d=False, dtype=np.float64, ensure_all_finite=False, input_name="y")
    if len(found) != rows:
        raise InputError(f"X has {rows} rows and y has {len(found)}; found input variables with inconsistent numbers")
    numbers: Floats = found
    return numbers


def finite_targets(y: Floats, sites: Sites, names: tuple[str, ...] = ("y",)) -> None:
    wrong = np.argwhere(~np.isfinite(y))
    if len(wrong):
        row = int(wrong[0][0])
        name = names[int(wrong[0][1])] if y.ndim == 2 else names[0]
        what = "NaN" if np.isnan(y[tuple(wrong[0])]) else "infinity"
        raise InputError(f"{name} has {what} in row {row}{sites.at(row)}; leave the row out")


def labels(y: Any, rows: int) -> tuple[Any, Floats]:
    """The classes, and every row's class as a number from 0."""
    if y is None:
        raise InputError("this estimator requires y to be passed, but the target y is None")
    found = column_or_1d(y, warn=True)
    check_classification_targets(found)
    if len(found) != rows:
        raise InputError(f"X has {rows} rows and y has {len(found)}; found input variables with inconsistent numbers")
    classes, numbers = np.unique(found, return_inverse=True)
    return classes, numbers.astype(np.float64)


def sample_weights(weight: Any, X: Any) -> Floats:
    found: Floats = _check_sample_weight(weight, X, dtype=np.float64, ensure_non_negative=True)
    if not found.sum() > 0:
        raise InputError("Sample weights must contain at least one non-zero number; all are 0")
    return found
