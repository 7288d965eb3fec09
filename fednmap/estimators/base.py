"""What all estimators do: read, scale, minimise, scale back."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from scipy import optimize
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted

from fednmap.core import Regularizer
from fednmap.estimators import rows as inputs
from fednmap.estimators.engine import Fit, infinite, solve
from fednmap.estimators.family_problems import with_outputs
from fednmap.estimators.penalties import (
    Bounded,
    Bounds,
    PenaltyFactor,
    bounds_of,
    by_factor,
    factors_of,
    group_numbers,
    regularizer,
    settled_lam,
)
from fednmap.estimators.prepare import Parameters, Prepared, dense
from fednmap.estimators.rows import Floats, Rows
from fednmap.estimators.site_effects import KINDS, SHARE
from fednmap.names import InputError
from fednmap.problems.families import Response
from fednmap.tables import FederatedFormula
from fednmap.tables.table import Sites, as_word, column, missing

VARIANCE = -14.0, 10.0  # the logarithm of the variance of random intercepts over that of the noise, where it is sought


class _Attributes(BaseEstimator):  # type: ignore[misc]
    """What an estimator has that is no parameter, or not of all: fields of a dataclass are parameters."""

    penalty: str | Regularizer
    lam: float | None = None
    l1_ratio: float = 0.5
    groups: Any = None
    _kind: ClassVar[type[Response]]
    refill: ClassVar[Any] = None
    """X with its gaps filled by what the rows of a mask say, where X had gaps: rows held out must not count."""
    strata: str | int | None = None
    coef_: Any
    intercept_: Any
    constants_: Any
    n_iter_: int
    bytes_sent_: int
    classes_: Any


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
    site_effects: str = "none"
    mu: float | None = None
    offset: str | int | None = None
    exposure: str | int | None = None
    formula: str | None = None
    penalty_factor: PenaltyFactor = None
    bounds: Bounds = None

    def _family(self) -> Response:
        """The family, from the estimator's parameters."""
        return self._kind()

    def fit(self, X: Any, y: Any = None, sites: Any = None, sample_weight: Any = None) -> Self:
        """Fit the model to rows X, y; `sites` says whose row each is, as scikit-learn's `groups` do."""
        rows = self._read(X, y, sites, sample_weight)
        rounds, sent = self._choose_variance(rows)
        prepared = self._prepare(rows)
        self._keep(prepared, self._solve(prepared))
        self.n_iter_ += rounds
        self.bytes_sent_ += sent
        if rows.remote is None:
            self._finish(rows)
        return self

    def _choose_variance(self, rows: Rows, lam: float | None = None) -> tuple[int, int]:
        """Set mu_, where random intercepts have no mu, to that of the largest marginal likelihood.

        Returns the rounds and bytes that it took.
        """
        fits: list[Fit] = []
        if self.site_effects != "random" or self.mu is not None:
            return 0, 0

        def minus_two_log(ratio: float) -> float:
            self.mu_ = math.exp(-ratio) / len(rows.y)
            prepared = self._prepare(rows)
            phi = self._regularizer(prepared, lam)
            fits.append(solve(prepared, [phi], 0.01 * self.tol, self.max_rounds)[0][0])
            return prepared.random_intercepts(fits[-1].objective, fits[-1].x, self._by_reml())[0]

        self._mu(len(self._classes()) or 1)
        if len(rows.sites) < 2:
            raise InputError(
                "expected at least two sites to estimate the variance of random intercepts, got one; use "
                "site_effects='none', or give mu"
            )
        best = optimize.minimize_scalar(minus_two_log, bounds=VARIANCE, method="bounded", options={"xatol": 1e-6})
        self.mu_ = math.exp(-best.x) / len(rows.y)
        return sum(fit.rounds for fit in fits), sum(fit.bytes for fit in fits)

    def _by_reml(self) -> bool:
        return self.penalty == "none" and self._family().name == "gaussian"

    def _reading(self, X: Any, y: Any, sites: Any, sample_weight: Any) -> tuple[Self, Rows]:
        """A copy that has read these rows; the estimator itself may be fitted, to others."""
        estimator = copy(self)
        return estimator, estimator._read(X, y, sites, sample_weight)

    def _read(self, X: Any, y: Any, sites: Any, sample_weight: Any) -> Rows:
        """What was given, checked; the classes and names of columns are kept. Rows have been read before."""
        if isinstance(X, Rows):
            return X
        if self.weights not in ("samples", "sites"):
            raise InputError(
                f"weights is {self.weights!r}; 'samples' counts every row once, 'sites' every site as much as any other"
            )
        if not isinstance(self.tol, int | float | np.number) or not 0 < self.tol < np.inf:
            raise InputError(f"tol is {self.tol!r}; it must be a finite number above 0")
        if not is_whole(self.max_rounds, 1):
            raise InputError(f"max_rounds is {self.max_rounds!r}; it must be a whole number, at least 1")
        if self.formula is not None:
            self.formula_ = FederatedFormula(self.formula).fit(X, sites=sites)
            y = self.formula_.response(X) if y is None else y
        X, where, offset, stratum = self._parts(X, sites, reset=True)
        y = self._with_strata(self._targets(y, where), stratum)
        y, weight = self._family().as_rows(y, inputs.sample_weights(sample_weight, X.shape[0], where))
        rows = Rows(X, y, where, weight, offset)
        if not bool((weight > 0).all()):
            rows = rows.some(weight > 0)
        inputs.no_site_of_one(rows.sites)
        self._family().check(rows.y, rows.sites.row)
        return rows

    def _parts(self, X: Any, sites: Any = None, *, reset: bool = False) -> tuple[Any, Sites, Floats | None, Any]:
        """The checked columns that have coefficients, the sites, the offset and the stratum of each row."""
        if self.offset is not None and self.exposure is not None:
            raise InputError("expected an offset or an exposure, got both; the offset of an exposure is its logarithm")
        which, offset, stratum = self.exposure if self.offset is None else self.offset, None, None
        if which is not None:
            X, offset = inputs.without(X, which, "offset or exposure")
        if self.strata is not None:
            X, found = inputs.without(X, self.strata, "strata")
            if bool((gaps := missing(column(found))).any()):
                raise InputError(f"the strata {self.strata!r} have no value in row {int(gaps.argmax())}; leave it out")
            stratum = np.array([as_word(v) for v in column(found).tolist()])
        X, where = inputs.table(self, X, sites, reset=reset, least=int(offset is None))
        if offset is not None:
            offset = inputs.offsets(offset, where, exposure=self.offset is None)
        return X, where, offset, stratum

    def _with_strata(self, y: Floats, stratum: Any) -> Floats:
        """y with the stratum of each row."""
        return y

    def _targets(self, y: Any, sites: Sites) -> Floats:
        columns = self._family().y_columns
        found = inputs.targets(y, len(sites.of_row), columns)
        inputs.finite_targets(found, sites, *["y"] * columns)
        return found

    def _classes(self) -> tuple[str, ...]:
        """One word per score of a row; one score has none."""
        return ()

    def _check(self, y: Floats, sites: Sites) -> None:
        """Refuse some of the rows, such as all but a fold, that cannot be fitted: a model of them knows no class that
        they lack."""
        self._family().check(y, sites.row)
        for k, name in enumerate(self._classes()):
            if not bool((y == k).any()):
                raise InputError(
                    f"no row of class {name!r} is left to learn it from; leave the class out, or choose folds that "
                    "share it"
                )

    def _prepare(self, rows: Rows) -> Prepared:
        return Prepared(
            with_outputs(self._family(), len(self._classes()) or 1),
            rows,
            weights=self.weights,
            standardize=self.standardize,
            fit_intercept=self.fit_intercept,
            site_effects=self.site_effects,
            mu=self._known_mu(),
        )

    def _known_mu(self) -> float:
        mu = self._mu(len(self._classes()) or 1)
        if math.isnan(mu):
            raise InputError(
                "expected mu, or a fitted estimator, with site_effects='random', got neither; fit it first"
            )
        return mu

    def _mu(self, outputs: int) -> float:
        """The weight of the sites' deviations, NaN where a fit chooses it; refuses site effects that a model with so
        many scores has not."""
        if self.site_effects not in KINDS:
            raise InputError(f"expected site_effects to be one of {', '.join(KINDS)}, got {self.site_effects!r}")
        if self.site_effects == "none":
            return 0.0
        family = with_outputs(self._family(), outputs)
        if family.outputs > 1 or family.constants or family.name in ("gamma", "binomial"):
            named = family.outputs > 1 and family.name == "logistic"
            what = f"{family.outputs} classes" if named else family.name
            raise InputError(f"expected a linear, logistic, Poisson or Cox model with site_effects, got {what}")
        if self.offset is not None or self.exposure is not None:
            raise InputError("expected no offset and no exposure with site_effects, got one; use site_effects='none'")
        if self.site_effects == "sparse" and self.bounds is not None:
            raise InputError("expected no bounds with site_effects='sparse', got some; use site_effects='intercepts'")
        if self.site_effects in ("intercepts", "random") and not (family.level and self.fit_intercept):
            raise InputError(
                f"expected a model with an intercept for site_effects={self.site_effects!r}, got one without; in a Cox "
                "model every site has its own baseline hazard already"
            )
        if self.site_effects == "intercepts":
            return 0.0
        if self.mu is None and self.site_effects == "random":
            return float(vars(self).get("mu_", math.nan))
        mu = SHARE * settled_lam(self.penalty, self.lam) if self.mu is None else self.mu
        if isinstance(mu, bool) or not isinstance(mu, int | float | np.number) or not 0 < mu < np.inf:
            raise InputError(f"mu is {mu!r}; expected a finite number above 0, the weight of the sites' deviations")
        return float(mu)

    def _regularizer(self, prepared: Prepared, lam: float | None = None) -> Regularizer:
        """The penalty at lam, or at the estimator's own."""
        weight = settled_lam(self.penalty, self.lam if lam is None else lam)
        names, outputs = self._names(), prepared.outputs
        groups, factors = group_numbers(self.groups, names), self._factors(names)

        def make(factor: float = 1.0) -> Regularizer:
            return regularizer(self.penalty, factor * weight, self.l1_ratio, groups, outputs)

        return self._bounded(prepared, make() if factors is None else by_factor(make, np.tile(factors, outputs)))

    def _bounded(self, prepared: Prepared, phi: Regularizer) -> Regularizer:
        """phi on the coefficients of scaled columns, within the bounds of those of the given ones."""
        limits = bounds_of(self.bounds, self._names(), self._terms())
        if limits is None:
            return phi
        factor = prepared.scaling.factor
        none = np.broadcast_to([[-np.inf], [np.inf]], limits.shape).copy()
        ends = np.divide(limits, factor, out=none, where=factor > 0)
        return Bounded(phi, *(dense(np.tile(end, prepared.outputs)) for end in ends))

    def _factors(self, names: Sequence[str]) -> Floats | None:
        """The penalty factor of every column; None where all are 1."""
        return factors_of(self.penalty_factor, self.penalty, names, self._terms())

    def _terms(self) -> Mapping[str, Sequence[str]]:
        """The columns of each term of the formula."""
        return {} if self.formula is None else self.formula_.groups()

    def _solve(self, prepared: Prepared) -> Fit:
        return solve(prepared, [self._regularizer(prepared)], self.tol, self.max_rounds)[0][0]

    def _keep(self, prepared: Prepared, found: Fit) -> None:
        """The attributes of a fitted estimator."""
        if not found.converged:
            warnings.warn(
                f"|F_nat| is {found.residual / prepared.unit:.1e} after {found.rounds} rounds, above tol = "
                f"{self.tol:g}; raise max_rounds, or standardize",
                ConvergenceWarning,
                stacklevel=3,
            )
        columns, found = infinite(prepared, found, self._regularizer(prepared), self.tol, self.max_rounds)
        if columns:
            warnings.warn(infinite_words(self._names(), columns), ConvergenceWarning, stacklevel=3)
        self.n_iter_ = max(1, found.rounds)
        self.bytes_sent_ = found.bytes + len(prepared.sites) * prepared.scaling.nbytes
        self.objective_ = found.objective
        self.residual_ = found.residual / prepared.unit
        self.converged_ = found.converged and not columns
        self.sites_ = np.array(prepared.sites.names)
        self.site_report_ = prepared.report(found.x)
        self.__dict__.pop("site_effects_", None)  # of a fit before
        if (effects := prepared.effects(found.x, self._names())) is not None:
            self.site_effects_ = effects
        if self.site_effects == "random":
            variance = prepared.random_intercepts(found.objective, found.x, self._by_reml())[1]
            self.site_effects_ = replace(self.site_effects_, variance=variance)
        self._set(prepared.parameters(found.x))

    def _set(self, model: Parameters) -> None:
        """coef_ and intercept_ in the shapes that scikit-learn's estimators have."""
        self.coef_, self.intercept_ = model.coef[0], float(model.intercept[0])
        if len(model.constants):
            self.constants_ = model.constants
        for name, value in self._family().fitted(self.intercept_, model.constants).items():
            setattr(self, name, value)

    def _finish(self, rows: Rows) -> None:
        """What an estimator adds when it is fitted."""

    def _scores(self, X: Any, sites: Any = None) -> Floats:
        check_is_fitted(self)
        X, where, offset, _ = self._parts(X, sites)
        found = self._linear(X, None if sites is None else np.array(where.names)[where.of_row])
        found = found if offset is None else found + offset[:, None]
        return found[:, 0] if found.shape[1] == 1 else found

    def _linear(self, X: Any, labels: Any) -> Floats:
        """The linear predictors of rows (N, K), with the effects of their sites; labels: the sites' names."""
        found: Floats = X @ np.atleast_2d(self.coef_).T + self.intercept_
        if labels is not None and self.site_effects != "none":
            found[:, 0] += self.site_effects_.added(X, labels, self.intercept_)
        return found

    def _names(self) -> list[str]:
        """The names of the columns that have coefficients, or their numbers as words."""
        named = getattr(self, "feature_names_in_", None)
        return [f"x{j}" for j in range(self.n_features_in_)] if named is None else [str(name) for name in named]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.target_tags.required = True
        return tags


def is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= least)


def check_level(level: float) -> None:
    if not 0 < level < 1:
        raise InputError(f"level is {level!r}; it must lie between 0 and 1, such as 0.95")


def warn_unconverged(converged: Sequence[bool], what: str) -> None:
    """Warn that some of several fits are used although they did not converge."""
    if not all(converged):
        warnings.warn(
            f"{len(converged) - sum(converged)} of {len(converged)} {what} did not converge and are used as they are; "
            "raise max_rounds, or standardize",
            ConvergenceWarning,
            stacklevel=4,
        )


def infinite_words(names: Sequence[str], columns: Sequence[int]) -> str:
    """What is said of columns whose estimates are infinite."""
    some, more = ", ".join(repr(names[j]) for j in columns[:3]), len(columns) - 3
    return (
        f"expected finite estimates, got infinite ones for {some}{f' and {more} more' if more > 0 else ''}: the "
        "likelihood has no maximum (separated classes, or a level without events); merge or drop levels, or add a "
        "penalty such as ridge"
    )
