"""The choice of lam, by cross-validation over folds or sites or by an information criterion, and its estimators."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from scipy.sparse import issparse
from scipy.special import gammaln
from sklearn.model_selection import check_cv
from sklearn.utils.validation import _num_samples, check_is_fitted

from fednmap.core import Regularizer
from fednmap.estimators.base import Federated, warn_unconverged
from fednmap.estimators.linear_models import (
    FederatedBinomialRegressor,
    FederatedCoxRegression,
    FederatedElasticNet,
    FederatedGammaRegressor,
    FederatedGLM,
    FederatedLasso,
    FederatedLogisticRegression,
    FederatedNegativeBinomialRegressor,
    FederatedOrdinalRegression,
    FederatedPoissonRegressor,
)
from fednmap.estimators.path import LARGEST, RegularizationPath, grid, is_ridge, null_model, walk
from fednmap.estimators.prepare import Prepared, dense, problem_of
from fednmap.estimators.remote import RemoteProblem
from fednmap.estimators.rows import Floats, Rows, sample_weights
from fednmap.estimators.site_effects import PartialMinimum
from fednmap.names import InputError
from fednmap.tables.table import divide

SELECT = ("min", "1se", "bic", "ebic")
EBIC = 0.5  # gamma of Chen and Chen, Extended Bayesian information criteria, Biometrika 2008
LEAVE_ONE_SITE_OUT = "leave-one-site-out"
FOLDS = 5  # if cv is None, as in scikit-learn
ALLOWED = (
    f"give a number of folds, at least 2, {LEAVE_ONE_SITE_OUT!r}, a scikit-learn splitter (its groups are the sites), "
    "or (train, test) pairs of row numbers"
)

CV = int | str | Iterable[tuple[Any, Any]] | Any | None
"""What `cv` may be; a splitter is anything with scikit-learn's `split`."""
Numbers = npt.NDArray[np.intp]


class Fold(NamedTuple):
    """Row numbers; a row that is listed twice counts twice."""

    name: str
    test: Numbers
    train: Numbers
    number: int = 0


def deal(kinds: Any, of_site: Numbers, folds: int, random_state: int) -> Numbers:
    """The fold of every row, dealt out within every site and kind, so that each fold is a small federation."""
    n, fold = len(of_site), np.empty(len(of_site), np.intp)
    shuffled = np.random.default_rng(random_state).permutation(n)
    fold[shuffled[np.lexsort((kinds[shuffled], of_site[shuffled]))]] = np.arange(n) % folds
    return fold


@dataclass(eq=False, repr=False, kw_only=True)
class CrossValidated(Federated):
    """An estimator that chooses its lam on a path; fitted: lam_, lambdas_, path_, and by folds cv_losses_ (folds,
    lambdas), cv_mean_, cv_se_, lam_min_, lam_1se_, folds_; by a criterion criterion_. n_iter_ and bytes_sent_ are of
    all fits, also of those without a fold."""

    lambdas: int | Sequence[float] = 50
    cv: CV = 5
    select: str = "min"
    random_state: int = 0
    lam: ClassVar[Any] = None  # type: ignore[misc]  # no parameter: it is chosen
    on_fold: ClassVar[Any] = None
    """A function that is called before each fold, with its number, how many there are, and its name; or None."""
    refill: ClassVar[Any] = None
    """X with its gaps filled by what the rows of a mask say, where X had gaps: rows held out must not count."""

    def fit(self, X: Any, y: Any = None, sites: Any = None, sample_weight: Any = None) -> Self:
        """Choose lam, and fit the model there to all rows."""
        if self.select not in SELECT:
            raise InputError(f"select is {self.select!r}; choose from {', '.join(SELECT)}")
        if self.site_effects in ("random", "sparse") and isinstance(self.mu, Sequence | np.ndarray):
            return self._choose_mu(X, y, sites, sample_weight)
        rows = self._read(X, y, sites, sample_weight)
        before = self._choose_variance(rows, LARGEST)  # of the model without columns
        folds = (
            folds_of(self, self.cv, self.random_state, rows, X, y, sites, sample_weight)
            if self.select in ("min", "1se")
            else []
        )
        self.lambdas_ = grid(self, rows, self.lambdas)
        # first: prepared rows take memory
        chosen, rounds, sent = self._by_folds(rows, folds) if folds else (None, 0, 0)
        prepared = self._prepare(rows)
        self.path_ = walk(self, prepared, self.lambdas_, null_model(self, prepared), polish=chosen)
        if chosen is None:
            chosen = self._by_criterion(rows)
            warn_unconverged([fit.converged for fit in self.path_.fits], "models of the path")
        self.lam_ = float(self.lambdas_[chosen])
        self._warn_at_an_end()
        found, after = self.path_.fits[chosen], self._choose_variance(rows, self.lam_)
        if any(after):
            prepared = self._prepare(rows)
            found = self._solve(prepared)
        self._keep(prepared, found)
        self.n_iter_ = max(1, self.path_.total_rounds) + rounds + before[0] + after[0]
        self.bytes_sent_ += sum(fit.bytes for fit in self.path_.fits) - self.path_.fits[chosen].bytes + sent
        self.bytes_sent_ += before[1] + after[1]
        if rows.remote is None:
            self._finish(rows)
        return self

    def _choose_mu(self, X: Any, y: Any, sites: Any, sample_weight: Any) -> Self:
        """Fit with each of several mu, and become the one with the least held-out loss or criterion."""
        tried = []
        for mu in self.mu:  # type: ignore[union-attr]
            one = copy(self)
            one.mu = mu
            tried.append(one.fit(X, y, sites, sample_weight))
        if not tried:
            raise InputError("mu is an empty list; give a number, or several to choose from")
        by_folds = self.select in ("min", "1se")
        best = min(tried, key=lambda one: float((one.cv_mean_ if by_folds else one.criterion_).min()))
        self.__dict__.update(vars(best) | {"mu": self.mu, "mu_": best.mu})
        self.n_iter_, self.bytes_sent_ = (
            sum(getattr(one, name) for one in tried) for name in ("n_iter_", "bytes_sent_")
        )
        return self

    def _mu(self, outputs: int) -> float:
        """That of a list which was chosen."""
        if not (isinstance(self.mu, Sequence | np.ndarray) and "mu_" in vars(self)):
            return super()._mu(outputs)
        one = copy(self)
        one.mu = vars(self)["mu_"]
        return one._mu(outputs)

    def _regularizer(self, prepared: Prepared, lam: float | None = None) -> Regularizer:
        """The penalty at lam, or at the one that was chosen."""
        if lam is None:
            check_is_fitted(self, "lam_")
            lam = self.lam_
        return super()._regularizer(prepared, lam)

    def _warn_at_an_end(self) -> None:
        """Warn where a lam beyond the grid may be better: not where all coefficients are 0, nor below 0."""
        lam, first, last = self.lam_, *self.lambdas_[[0, -1]]
        above = is_ridge(self) if isinstance(self.lambdas, int | np.integer) else bool(self.path_.coefs[0].any())
        if first > last and ((lam == first and above) or lam == last > 0):
            end, there, factor = ("largest", "above", 100.0) if lam == first else ("smallest", "below", 0.01)
            wider = f"{max(first, factor * lam):.3g}, {min(last, factor * lam):.3g}, {len(self.lambdas_) + 20}"
            warnings.warn(
                f"lam_ = {lam:.3g} is the {end} value of the grid, and a better one may lie {there} it; widen the "
                f"grid, such as lambdas=np.geomspace({wider})",
                stacklevel=3,
            )

    def _by_folds(self, rows: Rows, folds: list[Fold]) -> tuple[int, int, int]:
        """Which lam, and the rounds and bytes that the models without each of the folds took."""
        weight, each, converged, rounds, sent = rows.shares(self.weights), [], [], 0, 0
        for k, fold in enumerate(folds):
            if self.on_fold is not None:
                self.on_fold(k + 1, len(folds), fold.name)
            held_out, path, moments = self._held_out(rows, fold)
            each.append(held_out)
            converged.append(path.converged)
            rounds, sent = rounds + path.total_rounds, sent + moments + sum(fit.bytes for fit in path.fits)
        warn_unconverged(converged, "folds have models that")
        self.folds_ = tuple(fold.name for fold in folds)
        self.cv_losses_ = np.stack(each)
        shares = np.array([weight[fold.test].sum() for fold in folds])
        counts = shares
        if self._family().name == "cox":
            counts = np.array([_events(rows.of_fold(fold.test, fold.number, held_out=True)) for fold in folds])
        self.cv_mean_, self.cv_se_ = _mean_and_error(self.cv_losses_, shares, counts)
        best = int(self.cv_mean_.argmin())
        within = int(np.flatnonzero(self.cv_mean_ <= self.cv_mean_[best] + self.cv_se_[best])[0])
        self.lam_min_, self.lam_1se_ = float(self.lambdas_[best]), float(self.lambdas_[within])
        return best if self.select == "min" else within, rounds, sent

    def _held_out(self, rows: Rows, fold: Fold) -> tuple[Floats, RegularizationPath, int]:
        """The mean loss of the rows held out under models of the others, at every lam; these, and the bytes of their
        columns' moments."""
        if self.refill is not None:
            rows = rows._replace(X=self.refill(np.isin(np.arange(len(rows.y)), fold.train)))
        if rows.remote is not None:
            rows = rows._replace(remote=rows.remote.refilled(fold.number))
        try:
            if rows.remote is None:
                self._check(rows.y[fold.train], rows.sites.some(fold.train))
            else:
                rows.remote.of_fold(fold.number, held_out=False).check()
        except InputError as error:
            raise InputError(f"without {fold.name}: {error}") from None
        every_site = len(np.unique(rows.sites.of_row[fold.train])) == len(rows.sites)
        if issparse(rows.X) and every_site and self._family().level:  # not copied: the others count 0
            train = rows._replace(weight=rows.weight * np.bincount(fold.train, minlength=len(rows.y)))
        else:
            train = rows.of_fold(fold.train, fold.number, held_out=False)
        test, prepared = rows.of_fold(fold.test, fold.number, held_out=True), self._prepare(train)
        path = walk(self, prepared, self.lambdas_)
        moments = len(prepared.sites) * prepared.scaling.nbytes
        if isinstance(prepared.problem, RemoteProblem) and prepared.problem.site_effects:
            return prepared.problem.held_out(torch.stack([fit.x for fit in path.fits])), path, moments
        if self._family().level:
            return _losses(prepared, path, test, self.weights), path, moments
        # the partial likelihood of a fold is what it adds to that of the others
        both = rows.some(np.sort(np.concatenate([fold.train, fold.test])))
        whole, part = (float(r.weight.sum()) * _losses(prepared, path, r, self.weights) for r in (both, train))
        return (whole - part) / float(test.weight.sum()), path, moments

    def _by_criterion(self, rows: Rows) -> int:
        """-2 log-likelihood + log(N) (nonzero) + 2 gamma log C(p, nonzero); N is the number of events in a Cox model,
        and weights count rows if they are whole numbers."""
        path, family = self.path_, self._family()
        if not family.likelihood:
            raise InputError(
                f"select is {self.select!r}, which needs a likelihood, and {family.name} has none; use 'min'"
            )
        if not bool((path.coefs == 0).any()):
            raise InputError(f"select is {self.select!r}, which counts zeros, and this penalty makes none; use 'min'")
        n, p = float(rows.weight.sum()) if rows.counted else float(len(rows.y)), path.coefs[0].size
        nonzero, gamma = (path.coefs != 0).sum((1, 2)), EBIC if self.select == "ebic" else 0.0
        minus_two_log = family.minus_two_log(path.losses, n)
        size = n * _events(rows) / float(rows.weight.sum()) if family.name == "cox" else n
        choices = gammaln(p + 1) - gammaln(nonzero + 1) - gammaln(p - nonzero + 1)
        self.criterion_ = minus_two_log + np.log(size) * nonzero + 2 * gamma * choices
        return int(self.criterion_.argmin())


def _events(rows: Rows) -> float:
    """The weighted number of events."""
    return float(rows.weight @ rows.y[:, 1]) if rows.remote is None else rows.remote.events()


def _mean_and_error(losses: Floats, shares: Floats, counts: Floats) -> tuple[Floats, Floats]:
    """The mean of folds (folds, lambdas) and its standard error, as in glmnet.

    shares: what the rows of each fold weigh in the mean; relative.
    counts: what each fold weighs in the standard error; a fold that counts 0 is left out of it.
    """
    sums = (shares / shares.sum())[:, None] * losses
    mean, counts = sums.sum(0), (counts / counts.sum())[:, None]
    rates = np.divide(sums, counts, out=np.broadcast_to(mean, sums.shape).copy(), where=counts > 0)
    spread = (counts * np.square(rates - mean)).sum(0)
    return mean, np.sqrt(spread / max(1, np.count_nonzero(counts) - 1))


def _losses(prepared: Prepared, path: RegularizationPath, rows: Rows, weights: str) -> Floats:
    """The mean loss of rows under every model of a path, on the scale of the given columns."""
    rows = rows.by_site()
    f: Any
    if rows.remote is None:
        f = problem_of(prepared.family, rows, rows.shares(weights), prepared.level)
    else:
        f = rows.remote.problem(prepared.family)
    if isinstance(prepared.problem, PartialMinimum):
        return _losses_by_site(prepared, path, rows.sites.names, f)
    points = []
    for coef, intercept, constants in zip(path.coefs, path.intercepts, path.constants, strict=True):
        points.append(np.concatenate([coef.flatten(), intercept if prepared.intercept else [], constants]))
    if prepared.constants:
        return np.array([float(f.loss(dense(point))) for point in points])
    found: Floats = f.losses(dense(np.stack(points))).numpy()
    return found


def _losses_by_site(prepared: Prepared, path: RegularizationPath, sites: Sequence[str], f: Any) -> Floats:
    """The same, where every site of the fit has its own model; the rows of another one have the shared model."""
    effects = [prepared.effects(fit.x, path.names) for fit in path.fits]
    total, weights = np.zeros(len(path.lambdas)), f._client_weights().numpy()
    for i, name in enumerate(sites):
        points = []
        for coef, intercept, own in zip(path.coefs, path.intercepts, effects, strict=True):
            assert own is not None
            if name in own.sites:
                k = own.sites.index(name)
                coef, intercept = coef + own.deviation[k], own.intercept[[k]]
            points.append(np.concatenate([coef.flatten(), intercept if prepared.level else []]))
        total += weights[i] * f.alone(i).losses(dense(np.stack(points))).numpy()
    return total


def folds_of(
    model: Federated, cv: CV, random_state: int, rows: Rows, X: Any, y: Any, sites: Any, sample_weight: Any
) -> list[Fold]:
    """The rows that are held out together.

    A number of folds is dealt out within every site and class (or events), so that each fold is a small federation
    like the whole. A splitter splits the rows as they were given, with the sites as its groups.
    """
    cv, n, name = FOLDS if cv is None else cv, len(rows.y), model._family().name
    if name == "cox" and model.weights == "sites":
        raise InputError("cross-validation of a Cox model needs weights='samples'; sites weigh unequally in its folds")
    if isinstance(cv, bool) or (isinstance(cv, int | np.integer) and cv < 2):
        raise InputError(f"cv is {cv!r}; {ALLOWED}")
    if isinstance(cv, str) and cv == LEAVE_ONE_SITE_OUT:
        if len(rows.sites) < 2:
            raise InputError(f"cv is {cv!r} with one site; give sites, or a number of folds")
        fold, names = rows.sites.of_row, rows.sites.names
    elif isinstance(cv, int | np.integer):
        if n < 2 * cv:
            raise InputError(f"cv is {cv} folds for {n} rows; give at most {n // 2} folds")
        kinds = rows.y if name in ("logistic", "ordinal") else rows.y[:, 1] if name == "cox" else np.zeros(n)
        fold = deal(kinds, rows.sites.of_row, int(cv), random_state)
        names = tuple(f"fold {k + 1}" for k in range(cv))
    else:
        where = divide(None, _num_samples(X))
        y = model.formula_.response(X) if y is None and model.formula is not None else y
        weight = sample_weights(sample_weight, len(where.of_row), where)
        found, weight = model._family().as_rows(model._targets(y, where), weight)
        return _split(cv, X, found[:, 1] if name == "cox" else y, sites, weight > 0)
    return [Fold(name, np.flatnonzero(fold == k), np.flatnonzero(fold != k), k) for k, name in enumerate(names)]


def _split(cv: Any, X: Any, y: Any, sites: Any, kept: npt.NDArray[np.bool_]) -> list[Fold]:
    """The folds of a splitter or of pairs, without the rows of weight 0, which are not `kept`."""
    found: list[Fold] = []
    place = np.where(kept, np.cumsum(kept) - 1, -1)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The groups parameter is ignored")
            for train, test in check_cv(cv).split(X, y, sites):
                parts = (place[np.asarray(part)] for part in (test, train))
                found.append(Fold(f"fold {len(found) + 1}", *(part[part >= 0] for part in parts)))
    except (ValueError, TypeError, IndexError) as error:
        raise InputError(f"cv is {cv!r:.60}, which does not split these {len(kept)} rows: {error}; {ALLOWED}") from None
    if not found:
        raise InputError(f"cv is {cv!r:.60} and holds no fold; an iterator can be used once: give a list")
    for fold in found:
        if not len(fold.test) or not len(fold.train):
            raise InputError(f"{fold.name} of cv has no row of positive weight to train on, or none to hold out")
    return found


@dataclass(eq=False, repr=False)
class FederatedLassoCV(CrossValidated, FederatedLasso):
    """`FederatedLasso` at the lam with the least held-out loss, or by another rule.

    lambdas:      how many values from lambda_max down, or the values.
    cv:           a number of folds within sites, "leave-one-site-out", a scikit-learn splitter (its groups are the
                  sites), or (train, test) pairs of row numbers; None is 5.
    select:       "min", the least held-out loss; "1se", the largest lam within one standard error of it; or, without
                  folds, the least "bic" or "ebic" (extended, for many columns).
    random_state: how the folds are dealt out.
    mu:           with site_effects="sparse", default 0.007, whatever lam is; with "random", default by marginal
                  likelihood: of the model without columns while lam is chosen, then at lam_. Also a list, of which mu_
                  is chosen in the same way as lam.

    >>> import numpy as np
    >>> X, y = np.arange(12.0)[:, None], [7, 4, 6, 7, 10, 5, 4, 8, 11, 12, 11, 9]
    >>> FederatedLassoCV(lambdas=[1.0, 0.1, 0.01], cv=2).fit(X, y, sites=["a", "b"] * 6).lam_
    0.1
    """


@dataclass(eq=False, repr=False)
class FederatedElasticNetCV(CrossValidated, FederatedElasticNet):
    """`FederatedElasticNet` that chooses its lam; see `FederatedLassoCV`.

    >>> import numpy as np
    >>> X, y = np.arange(12.0)[:, None], [7, 4, 6, 7, 10, 5, 4, 8, 11, 12, 11, 9]
    >>> FederatedElasticNetCV(lambdas=[1.0, 0.1, 0.01], cv=2).fit(X, y, sites=["a", "b"] * 6).lam_
    0.1
    """


@dataclass(eq=False, repr=False)
class FederatedLogisticRegressionCV(CrossValidated, FederatedLogisticRegression):
    """`FederatedLogisticRegression` that chooses its lam; see `FederatedLassoCV`.

    >>> import numpy as np
    >>> X, y = np.arange(12.0)[:, None], [0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 1, 1]
    >>> FederatedLogisticRegressionCV(lambdas=[1.0, 0.1, 0.01], cv=2).fit(X, y, sites=["a", "b"] * 6).lam_
    0.1
    """


@dataclass(eq=False, repr=False)
class FederatedPoissonRegressorCV(CrossValidated, FederatedPoissonRegressor):
    """`FederatedPoissonRegressor` that chooses its lam; see `FederatedLassoCV`.

    >>> import numpy as np
    >>> X, y = np.arange(12.0)[:, None], [1, 1, 2, 0, 1, 4, 1, 1, 6, 7, 2, 2]
    >>> FederatedPoissonRegressorCV(lambdas=[1.0, 0.1, 0.01], cv=2).fit(X, y, sites=["a", "b"] * 6).lam_
    0.1
    """


@dataclass(eq=False, repr=False)
class FederatedNegativeBinomialRegressorCV(CrossValidated, FederatedNegativeBinomialRegressor):
    """`FederatedNegativeBinomialRegressor` that chooses its lam; see `FederatedLassoCV`.

    >>> import numpy as np
    >>> X, y = np.arange(12.0)[:, None], [0, 1, 0, 0, 0, 10, 3, 0, 1, 2, 2, 2]
    >>> FederatedNegativeBinomialRegressorCV(lambdas=[1.0, 0.1, 0.01], cv=2).fit(X, y, sites=["a", "b"] * 6).lam_
    0.1
    """


@dataclass(eq=False, repr=False)
class FederatedGammaRegressorCV(CrossValidated, FederatedGammaRegressor):
    """`FederatedGammaRegressor` that chooses its lam; see `FederatedLassoCV`.

    >>> import numpy as np
    >>> X, y = np.arange(12.0)[:, None], [1, 1, 5, 7, 7, 2, 2, 2, 11, 8, 4, 9]
    >>> FederatedGammaRegressorCV(lambdas=[1.0, 0.1, 0.01], cv=2).fit(X, y, sites=["a", "b"] * 6).lam_
    0.1
    """


@dataclass(eq=False, repr=False)
class FederatedBinomialRegressorCV(CrossValidated, FederatedBinomialRegressor):
    """`FederatedBinomialRegressor` that chooses its lam; see `FederatedLassoCV`.

    >>> import numpy as np
    >>> X, y = np.arange(12.0)[:, None], [[k, 5] for k in (3, 0, 2, 1, 1, 2, 1, 2, 5, 5, 3, 3)]
    >>> FederatedBinomialRegressorCV(lambdas=[1.0, 0.1, 0.01], cv=2).fit(X, y, sites=["a", "b"] * 6).lam_
    0.1
    """


@dataclass(eq=False, repr=False)
class FederatedOrdinalRegressionCV(CrossValidated, FederatedOrdinalRegression):
    """`FederatedOrdinalRegression` that chooses its lam; see `FederatedLassoCV`.

    >>> import numpy as np
    >>> X, y = np.arange(12.0)[:, None], [0, 0, 1, 1, 0, 1, 2, 2, 1, 1, 2, 2]
    >>> FederatedOrdinalRegressionCV(lambdas=[1.0, 0.1, 0.01], cv=2).fit(X, y, sites=["a", "b"] * 6).lam_
    0.1
    """

    fit_intercept: ClassVar[bool] = True  # type: ignore[misc]  # no parameter


@dataclass(eq=False, repr=False)
class FederatedCoxRegressionCV(CrossValidated, FederatedCoxRegression):
    """`FederatedCoxRegression` that chooses its lam; see `FederatedLassoCV`.

    The loss of a fold is what it adds to the partial likelihood of the others. The default penalty is l1.

    >>> import numpy as np
    >>> X, y = np.arange(12.0)[:, None], [[t, t not in (9, 11)] for t in (11, 12, 2, 6, 9, 10, 7, 8, 4, 5, 3, 1)]
    >>> FederatedCoxRegressionCV(lambdas=[1.0, 0.1, 0.01], cv=2).fit(X, y, sites=["a", "b"] * 6).lam_
    0.1
    """

    penalty: str | Regularizer = "l1"
    fit_intercept: ClassVar[bool] = False  # type: ignore[misc]  # no parameter


@dataclass(eq=False, repr=False)
class FederatedGLMCV(CrossValidated, FederatedGLM):
    """`FederatedGLM` that chooses its lam; see `FederatedLassoCV`.

    >>> import numpy as np
    >>> X, y = np.arange(12.0)[:, None], [7, 4, 6, 7, 10, 5, 4, 8, 11, 12, 11, 9]
    >>> FederatedGLMCV("huber", lambdas=[1.0, 0.1, 0.01], cv=2).fit(X, y, sites=["a", "b"] * 6).lam_
    0.1
    """
