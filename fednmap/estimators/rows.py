"""The rows that are given to `fit` and `predict`, checked: an error names the column, the row and the site."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import sparse
from sklearn.utils import get_tags
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, column_or_1d, validate_data

from fednmap.names import InputError, is_number, some_of
from fednmap.tables.table import Sites, column, divide

if TYPE_CHECKING:
    from fednmap.estimators.remote import RemoteRows

Floats = npt.NDArray[np.float64]
LARGEST = 1e100
"""Of numbers whose squares and sums of squares are finite without a doubt."""


class Rows(NamedTuple):
    """Checked rows, without those of weight 0."""

    X: Any
    y: Floats
    sites: Sites
    weight: Floats
    offset: Floats | None = None
    """What is added to the score of each row."""
    remote: RemoteRows | None = None
    """The sites that hold the rows, if they are asked by messages: X then has no columns, and y is NaN."""

    def some(self, keep: Any) -> Rows:
        offset = None if self.offset is None else self.offset[keep]
        return Rows(self.X[keep], self.y[keep], self.sites.some(keep), self.weight[keep], offset, self.remote)

    def of_fold(self, keep: Any, number: int, *, held_out: bool) -> Rows:
        """The rows of one side of a fold; sites that are asked by messages know which rows these are."""
        found = self.some(keep)
        return found if self.remote is None else found._replace(remote=self.remote.of_fold(number, held_out))

    def by_site(self) -> Rows:
        """The rows site by site."""
        if bool((np.diff(self.sites.of_row) >= 0).all()):
            return self
        return self.some(np.argsort(self.sites.of_row, kind="stable"))

    def shares(self, weights: str) -> Floats:
        """What each row counts in f, summing to 1: its own weight, or its share of a site, all of which count alike."""
        if weights == "samples":
            return self.weight / float(self.weight.sum())
        totals: Floats = np.bincount(self.sites.of_row, self.weight, len(self.sites)).astype(float)
        return self.weight / totals[self.sites.of_row] / len(self.sites)

    @property
    def counted(self) -> bool:
        """Whether weights count equal rows: whole numbers; others are relative, and their unit means nothing."""
        return bool((self.weight == np.rint(self.weight)).all())


def no_site_of_one(sites: Sites) -> None:
    """Refuse a site with one row: its sums are that row."""
    alone = np.flatnonzero(sites.sizes == 1)
    if len(alone):
        who = f"site {sites.names[alone[0]]!r}" if len(sites) > 1 else "the data"
        raise InputError(
            f"{who} has one sample, and its sums would be that sample; merge it with another site, or leave it out"
        )


def table(estimator: Any, X: Any, sites: Any = None, *, reset: bool, least: int = 1) -> tuple[Any, Sites]:
    """X as finite float64, dense or CSR, with the estimator's names of columns set or compared; and the rows' sites.

    least: columns at least.
    """
    X = X if estimator.formula is None else estimator.formula_.frame(X)
    thin = "csr" if get_tags(estimator).input_tags.sparse else False
    if "columns" in dir(X):
        _columns_of_numbers(X)
    options = {"accept_sparse": thin, "dtype": np.float64, "ensure_all_finite": False, "ensure_min_features": least}
    X = validate_data(estimator, X, reset=reset, **options)
    if sparse.issparse(X):
        X = sparse.csr_array(X)
        X.sum_duplicates()
    where = divide(sites, X.shape[0])
    values = X.data if sparse.issparse(X) else X
    if not max(values.max(initial=0.0), -values.min(initial=0.0)) <= LARGEST:  # also for NaN
        raise _not_finite(X, values, estimator._names(), where)
    return X, where


def without(X: Any, which: str | int, what: str) -> tuple[Any, Any]:
    """X without a column, by name or number, and that column; what: what it is for, in messages."""
    named = isinstance(X, Mapping) or "columns" in dir(X)
    X = X if named else sparse.csr_array(X) if sparse.issparse(X) else np.asarray(X)
    if not named and X.ndim != 2:
        return X, None  # refused as it is
    names: Any = list(X) if isinstance(X, Mapping) else list(X.columns) if named else range(X.shape[-1])
    if named and isinstance(which, str) and which not in names:
        raise InputError(f"X has no column {which!r}, the {what}; it has {some_of(list(map(str, names)))}")
    if not (named and isinstance(which, str)):
        if isinstance(which, str | bool) or not -len(names) <= which < len(names):
            raise InputError(f"the {what} is column {which!r}; X has {len(names)} columns, give one by name or number")
        which = names[which]
    others = [name for name in names if name != which]
    if not named:
        return X[:, others], X[:, [which]].toarray()[:, 0] if sparse.issparse(X) else X[:, which]
    found = column(X[which])
    if not others:
        return np.empty((len(found), 0)), found
    return {name: X[name] for name in others} if isinstance(X, Mapping) else X[others], found


def offsets(found: Any, sites: Sites, *, exposure: bool) -> Floats:
    """What is added to the score of each row: numbers as they are, or the logarithm of an exposure."""
    name = "exposure" if exposure else "offset"
    found = targets(found, len(sites.of_row))
    finite_targets(found, sites, f"the {name}")
    wrong = np.flatnonzero(found <= 0)
    if exposure and len(wrong):
        row = int(wrong[0])
        raise InputError(f"the exposure is {found[row]:g} in row {row}{sites.at(row)}; give numbers above 0")
    return np.asarray(np.log(found)) if exposure else np.asarray(found)


def _columns_of_numbers(X: Any) -> None:
    """Refuse a frame with no columns, with two of one name, or with words, by column."""
    names = list(map(str, X.columns))
    if not names:
        raise InputError("X has no columns; give at least one")
    for k, (name, given) in enumerate(zip(names, X.columns, strict=True)):
        if name in names[:k]:
            raise InputError(f"X has two columns called {name!r}; names must differ")
        values = X[given].to_numpy() if names.count(name) == 1 else np.zeros(0)
        word = next((v for v in values if isinstance(v, str)), None) if values.dtype.kind in "OU" else None
        if word is not None and not is_number(word):
            raise InputError(
                f"column {name!r} holds words, such as {word!r:.40}; make numbers of them "
                "(tables.FederatedPreprocessor), or drop the column"
            )


def _not_finite(X: Any, values: Any, names: list[str], sites: Sites) -> InputError:
    """The error for the first NaN, infinity, or number whose square overflows."""
    first = np.argwhere(~(np.abs(values) <= LARGEST))[0]
    if sparse.issparse(X):
        first = np.array([np.searchsorted(X.indptr, first[0], "right") - 1, X.indices[first[0]]])
    row, j = map(int, first)
    words = f"column {names[j]!r} has {_word(X[row, j])} in row {row}{sites.at(row)}"
    if np.isfinite(X[row, j]):
        return InputError(f"{words}; beyond {LARGEST:g} squares overflow: use another unit")
    if len(sites) > 1 and not sparse.issparse(X) and bool(np.isnan(X[sites.of_row == sites.of_row[row], j]).all()):
        return InputError(
            f"column {names[j]!r} has no value{sites.at(row)}: is it missing there? (NaN in all rows); leave the "
            "column or the site out"
        )
    return InputError(f"{words}; fill it (tables.FederatedPreprocessor) or leave the row out")


def _word(value: float) -> str:
    return "NaN" if np.isnan(value) else "infinity" if np.isinf(value) else f"{value:.3g}"


def targets(y: Any, rows: int, columns: int = 1) -> Floats:
    """y as numbers, (N,), or for several columns (N, columns)."""
    _check_given(y)
    if columns == 1:
        if sparse.issparse(y):
            raise InputError("y is sparse; give a dense array of one number per row")
        y = column_or_1d(y, warn=True, dtype=None)
        for row, value in enumerate(y) if y.dtype.kind in "OU" else ():
            if isinstance(value, str) and not is_number(value):
                raise InputError(f"y holds words, such as {str(value)!r:.40} in row {row}; this model needs numbers")
        y = y.astype(np.float64) if y.dtype.kind in "OU" else y
    found: Floats = check_array(y, ensure_2d=False, dtype=np.float64, ensure_all_finite=False, input_name="y")
    _one_per_row(found, rows)
    return found


def _fields(y: Any) -> Any:
    return getattr(getattr(y, "dtype", None), "fields", None) or {}


def _check_given(y: Any) -> None:
    if y is None:
        raise InputError("this estimator requires y to be passed, but the target y is None")
    if fields := _fields(y):
        raise InputError(
            f"expected one target per row, got a structured array with the fields {', '.join(fields)}; give one of "
            "them, or use FederatedCoxRegression for times and events"
        )


def _one_per_row(y: Any, rows: int) -> None:
    if len(y) != rows:
        raise InputError(f"X has {rows} rows and y has {len(y)}; found input variables with inconsistent numbers")


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


def finite_targets(y: Floats, sites: Sites, *names: str) -> None:
    """Refuse a target that is not finite; `names` are those of y's columns."""
    wrong = np.argwhere(~(np.abs(y) <= LARGEST))
    if len(wrong):
        row, name = int(wrong[0][0]), names[int(wrong[0][-1]) if y.ndim == 2 else 0]
        raise InputError(f"{name} has {_word(y[tuple(wrong[0])])} in row {row}{sites.at(row)}; leave the row out")


def labels(y: Any, rows: int) -> tuple[Any, Floats]:
    """The classes, and every row's class as a number from 0."""
    _check_given(y)
    found = column_or_1d(y, warn=True)
    check_classification_targets(found)
    _one_per_row(found, rows)
    classes, numbers = np.unique(found, return_inverse=True)
    return classes, numbers.astype(np.float64)


def ordered_labels(y: Any, rows: int, order: Any) -> tuple[Any, Floats]:
    """The labels from the lowest to the highest, and every row's place among them.

    order: the labels; None: that of an ordered pandas column, else by name or size.
    """
    kind: Any = getattr(y, "dtype", None)
    if order is None and getattr(kind, "ordered", False):
        order = [label for label in kind.categories if label in set(y)]
    classes, numbers = labels(y, rows)
    if len(classes) < 2:
        raise InputError(f"y holds one class only, {classes[0]}, at all sites; two are needed")
    if order is None:
        return classes, numbers
    place = {label: k for k, label in enumerate(order)}
    unknown = [label for label in classes.tolist() if label not in place]
    if unknown or len(place) != len(order):
        raise InputError(f"expected order to name every label once, got {list(order)}; y has {unknown or classes}")
    lacking = [label for label in order if label not in classes.tolist()]
    if lacking:
        raise InputError(f"expected rows of every label of order, got none of {lacking[0]!r}; leave it out")
    moved = np.array([place[label] for label in classes.tolist()])
    return classes[np.argsort(moved)], moved[numbers.astype(np.intp)].astype(np.float64)


def sample_weights(weight: Any, rows: int, sites: Sites) -> Floats:
    """What each row counts: numbers of at least 0, some above."""
    found: Floats = np.asarray(1.0 if weight is None else weight, np.float64)
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
