"""What all estimators do: read, scale, minimise, scale back."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted

from fednmap.core import Regularizer
from fednmap.estimators import inputs
from fednmap.estimators.engine import Fit
from fednmap.estimators.families import with_outputs
from fednmap.estimators.penalties import Groups, group_numbers, regularizer, settled_lam
from fednmap.estimators.prepare import Parameters, Prepared, prepare
from fednmap.estimators.sites import Floats, Sites, divide, no_site_of_one
from fednmap.names import InputError
from fednmap.problems.families import Response

if TYPE_CHECKING:
    from fednmap.estimators.bootstrap import Bootstrap
    from fednmap.estimators.inference import Inference
    from fednmap.estimators.path import RegularizationPath


def warn_unconverged(converged: Sequence[bool], what: str) -> None:
    """Warn that some of several fits are used although they did not converge."""
    if not all(converged):
        warnings.warn(
            f"{len(converged) - sum(converged)} of {len(converged)} {what} did not converge and are used as they are; "
            "raise max_rounds, or standardize",
            ConvergenceWarning,
            stacklevel=4,
        )


class Rows(NamedTuple):
    """Checked rows, with those of weight 0 left out."""

    X: Any
    y: Floats
    sites: Sites
    weight: Floats

    def some(self, keep: Any) -> Rows:
        return Rows(self.X[keep], self.y[keep], self.sites.some(keep), self.weight[keep])


class _Attributes(BaseEstimator, ABC):  # type: ignore[misc]
    """What an estimator has that is no parameter, or not of all: fields of a dataclass are parameters."""

    penalty: str | Regularizer
    lam: float | None = None
    l1_ratio: float = 0.5
    groups: Any = None
    coef_: Any
    intercept_: Any


@dataclass(eq=False, repr=False, kw_only=True)
class Federated(_Attributes):
    """A linear model of rows that lie at several sites, fitted exactly: mean loss + lam penalty.

    A subclass says which family and which penalty. scikit-learn reads the parameters of an estimator from its
    constructor: they are the fields of these dataclasses.
    """

    standardize: bool = True
    fit_intercept: bool = True
    tol: float = 1e-6
    max_rounds: int = 1000
    weights: str = "samples"

    @abstractmethod
    def _family(self) -> Response:
        """The family, from the estimator's parameters."""

    def _penalty(self) -> str | Regularizer:
        """The penalty, from the estimator's parameters."""
        return self.penalty

    def fit(self, X: Any, y: Any, sites: Any = None, sample_weight: Any = None) -> Self:
        """Fit the model to rows X, y; `sites` says whose row each is, as scikit-learn's `groups` do."""
        rows = self._read(X, y, sites, sample_weight)
        prepared = self._prepare(rows)
        found = prepared.solve(self._regularizer(prepared), None, self.tol, self.max_rounds)
        self._keep(prepared, found)
        self._finish(rows)
        return self

    def path(
        self, X: Any, y: Any, sites: Any = None, sample_weight: Any = None, *, lambdas: int | Sequence[float] = 50
    ) -> RegularizationPath:
        """The models at so many lam from lambda_max down, or at those given, all in the same rounds where the penalty
        is l1, ridge or elastic-net, else each begun where the one before ended."""
        from fednmap.estimators.path import path

        estimator = copy(self)  # which may be fitted, to other rows
        return path(estimator, estimator._read(X, y, sites, sample_weight), lambdas)

    def inference(
        self, X: Any, y: Any, sites: Any = None, sample_weight: Any = None, *, level: float = 0.95
    ) -> Inference:
        """Standard errors and confidence intervals of the fitted model, from the sites' Hessians on the same rows."""
        from fednmap.estimators.inference import inference

        check_is_fitted(self)
        _check_level(level)
        estimator = copy(self)
        return inference(self, estimator, estimator._read(X, y, sites, sample_weight), level)

    def bootstrap(
        self,
        X: Any,
        y: Any,
        sites: Any,
        sample_weight: Any = None,
        *,
        times: int = 200,
        level: float = 0.95,
        random_state: int = 0,
    ) -> Bootstrap:
        """Standard errors and percentile intervals from fits to sites drawn with replacement: how sites differ."""
        from fednmap.estimators.bootstrap import bootstrap

        _check_level(level)
        if isinstance(times, bool) or not isinstance(times, int | np.integer) or times < 2:
            raise InputError(f"times is {times!r}; give a number of draws, at least 2, such as 200")
        estimator = copy(self)
        return bootstrap(estimator, estimator._read(X, y, sites, sample_weight), times, level, random_state)

    def _finish(self, rows: Rows) -> None:
        """What an estimator adds when it is fitted."""

    def _read(self, X: Any, y: Any, sites: Any, sample_weight: Any) -> Rows:
        """What was given, checked; the classes and names of columns are kept."""
        self._check_numbers()
        X = inputs.table(self, X, reset=True)
        where = divide(sites, X.shape[0])
        inputs.finite(X, self._names(), where)
        y = self._targets(y, where)
        weight = inputs.sample_weights(sample_weight, X.shape[0], where)
        rows = Rows(X, y, where, weight)
        if not bool((weight > 0).all()):
            rows = rows.some(weight > 0)
        no_site_of_one(rows.sites)
        self._family().check(rows.y, rows.sites.at)
        return rows

    def _targets(self, y: Any, sites: Sites) -> Floats:
        found = inputs.targets(y, len(sites.of_row))
        inputs.finite_targets(found, sites)
        return found

    def _outputs(self) -> int:
        """Scores of one row."""
        return 1

    def _classes(self) -> tuple[str, ...]:
        """One word per output; one output has none."""
        return ()

    def _all_classes(self, y: Floats) -> None:
        """Refuse some of the rows, such as all but a fold, that lack a class: no model of them knows of it."""
        classes = self._classes()
        lacking = set(range(len(classes))) - set(np.unique(y).astype(int).tolist()) if classes else ()
        if lacking:
            raise InputError(
                f"no row of class {classes[min(lacking)]!r} is left to learn it from; leave the class out, or choose "
                "folds that share it"
            )

    def _prepare(self, rows: Rows) -> Prepared:
        return prepare(
            with_outputs(self._family(), self._outputs()),
            *rows,
            weights=self.weights,
            standardize=self.standardize,
            fit_intercept=self.fit_intercept,
            outputs=self._outputs(),
        )

    def _regularizer(self, prepared: Prepared, lam: float | None = None) -> Regularizer:
        """The penalty at lam, or at the estimator's own."""
        penalty = self._penalty()
        weight = settled_lam(penalty, self.lam if lam is None else lam)
        groups = group_numbers(self.groups, self._names())
        return regularizer(penalty, weight, self.l1_ratio, groups, prepared.outputs)

    def _keep(self, prepared: Prepared, found: Fit) -> None:
        """The attributes of a fitted estimator."""
        if not found.converged:
            warnings.warn(
                f"|F_nat| is {found.residual / prepared.unit:.1e} after {found.rounds} rounds, above tol = "
                f"{self.tol:g}; raise max_rounds, or standardize",
                ConvergenceWarning,
                stacklevel=3,
            )
        infinite, found = prepared.infinite(found, self._regularizer(prepared), self.tol, self.max_rounds)
        if infinite:
            warnings.warn(infinite_words(self._names(), infinite), ConvergenceWarning, stacklevel=3)
        self.n_iter_ = max(1, found.rounds)
        self.bytes_sent_ = found.bytes + len(prepared.sites) * prepared.scaling.nbytes
        self.objective_ = found.objective
        self.residual_ = found.residual / prepared.unit
        self.converged_ = found.converged and not infinite
        self.sites_ = np.array(prepared.sites.names)
        self.site_report_ = prepared.report(found.x)
        self._set(prepared.parameters(found.x))

    def _set(self, model: Parameters) -> None:
        """coef_ and intercept_ in the shapes that scikit-learn's estimators have."""
        self.coef_, self.intercept_ = model.coef[0], float(model.intercept[0])
        if model.scale is not None:
            self.scale_ = model.scale

    def _scores(self, X: Any) -> Floats:
        check_is_fitted(self)
        X = inputs.table(self, X, reset=False)
        inputs.finite(X, self._names(), divide(None, X.shape[0]))
        found: Floats = X @ np.atleast_2d(self.coef_).T + self.intercept_
        return found[:, 0] if found.shape[1] == 1 else found

    def _names(self) -> list[str]:
        return inputs.names_of(self, self.n_features_in_)

    def _check_numbers(self) -> None:
        if self.weights not in ("samples", "sites"):
            raise InputError(
                f"weights is {self.weights!r}; 'samples' counts every row once, 'sites' every site as much as any other"
            )
        if not isinstance(self.tol, int | float | np.number) or not 0 < self.tol < np.inf:
            raise InputError(f"tol is {self.tol!r}; it must be a finite number above 0")
        if (
            isinstance(self.max_rounds, bool)
            or not isinstance(self.max_rounds, int | np.integer)
            or self.max_rounds < 1
        ):
            raise InputError(f"max_rounds is {self.max_rounds!r}; it must be a whole number, at least 1")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.target_tags.required = True
        return tags


@dataclass(eq=False, repr=False)
class AnyPenalty(Federated):
    """An estimator with a choice of penalties; for the parameters see `FederatedGLM`."""

    penalty: str | Regularizer = "l1"
    lam: float | None = None
    _: KW_ONLY
    l1_ratio: float = 0.5
    groups: Groups = None


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise InputError(f"level is {level!r}; it must lie between 0 and 1, such as 0.95")


def infinite_words(names: Sequence[str], columns: Sequence[int]) -> str:
    """What is said of columns whose estimates are infinite."""
    some, more = ", ".join(repr(names[j]) for j in columns[:3]), len(columns) - 3
    return (
        f"expected finite estimates, got infinite ones for {some}{f' and {more} more' if more > 0 else ''}: the "
        "likelihood has no maximum (separated classes, or a level without events); merge or drop levels, or add a "
        "penalty such as ridge"
    )
