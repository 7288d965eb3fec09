"""The choice of lam: cross-validation over folds or sites, or an information criterion."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from scipy.sparse import issparse
from scipy.special import gammaln
from sklearn.model_selection import check_cv
from sklearn.utils.validation import _num_samples, check_is_fitted

from fednmap.core import Regularizer
from fednmap.data.clients import ClientData
from fednmap.estimators import inputs
from fednmap.estimators.base import Federated, Rows, warn_unconverged
from fednmap.estimators.families import problem
from fednmap.estimators.path import RegularizationPath, is_ridge, lambda_max, lambdas_down, null_model, reach, walk
from fednmap.estimators.prepare import Prepared, dense, tensor
from fednmap.estimators.sites import Floats, cases, divide, row_weights
from fednmap.estimators.sites import Rows as Numbers
from fednmap.names import InputError

SELECT = {
    "min": "the least held-out loss",
    "1se": "the largest lam whose held-out loss is within one standard error of the least",
    "bic": "the least BIC, without folds",
    "ebic": "the least extended BIC, for many columns, without folds",
}
EBIC = 0.5
"""gamma of Chen and Chen, Extended Bayesian information criteria, Biometrika 2008."""
LEAVE_ONE_SITE_OUT = "leave-one-site-out"
FOLDS = 5
"""Where cv is None, as in scikit-learn."""
ALLOWED = (
    f"give a number of folds, at least 2, {LEAVE_ONE_SITE_OUT!r}, a scikit-learn splitter (its groups are the sites), "
    "or (train, test) pairs of row numbers"
)

CV = int | str | Iterable[tuple[Any, Any]] | Any | None
"""What `folds` takes; a splitter is anything with scikit-learn's `split`."""


class Spent(NamedTuple):
    """Of messages between server and sites."""

    rounds: int
    bytes: int


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
    """X with its gaps filled by what the rows of a mask say, where X had gaps: those held out must not tell."""

    def fit(self, X: Any, y: Any, sites: Any = None, sample_weight: Any = None) -> Self:
        """Choose lam, and fit the model there to all rows."""
        if self.select not in SELECT:
            raise InputError(f"select is {self.select!r}; choose from {', '.join(SELECT)}")
        rows = self._read(X, y, sites, sample_weight)
        found = self._folds(rows, X, y, sites, sample_weight) if self.select in ("min", "1se") else None
        self.lambdas_ = self._grid(rows)
        # first: prepared rows take memory
        chosen, spent = (None, Spent(0, 0)) if found is None else self._by_folds(rows, found)
        prepared = self._prepare(rows)
        self.path_ = walk(self, prepared, self.lambdas_, null_model(self, prepared), polish=chosen)
        if chosen is None:
            chosen = self._by_criterion(rows)
            warn_unconverged([fit.converged for fit in self.path_.fits], "models of the path")
        self.lam_ = float(self.lambdas_[chosen])
        self._warn_at_an_end()
        self._keep(prepared, self.path_.fits[chosen])
        self.n_iter_ = max(1, self.path_.total_rounds) + spent.rounds
        self.bytes_sent_ += sum(fit.bytes for fit in self.path_.fits) - self.path_.fits[chosen].bytes + spent.bytes
        self._finish(rows)
        return self

    def _regularizer(self, prepared: Prepared, lam: float | None = None) -> Regularizer:
        """The penalty at lam, or at the one that was chosen."""
        if lam is None:
            check_is_fitted(self, "lam_")
            lam = self.lam_
        return super()._regularizer(prepared, lam)

    def _grid(self, rows: Rows) -> Floats:
        """The values of lam, from lambda_max down where they are not given."""
        far = reach(self, *rows.X.shape)
        if not isinstance(self.lambdas, int | np.integer):
            return lambdas_down(0.0, self.lambdas, far)
        prepared = self._prepare(rows)
        return lambdas_down(lambda_max(self, prepared, null_model(self, prepared)), self.lambdas, far)

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

    def _folds(self, rows: Rows, X: Any, y: Any, sites: Any, sample_weight: Any) -> list[Fold]:
        """The rows that are held out together."""
        kinds = {"logistic": rows.y, "cox": rows.y[..., -1]}.get(self._family().name)
        where = divide(sites, _num_samples(X))
        kept = inputs.sample_weights(sample_weight, len(where.of_row), where) > 0
        strata = self._targets(y, where)[:, 1] if self._family().name == "cox" else y
        found = folds(rows, self.cv, self.random_state, kinds, Given(X, strata, sites, kept))
        self.folds_ = tuple(fold.name for fold in found)
        return found

    def _by_folds(self, rows: Rows, found: list[Fold]) -> tuple[int, Spent]:
        """Which lam, and what the models without each of the folds took."""
        weight = row_weights(rows.sites, rows.weight, self.weights)
        each, spent, converged = [], Spent(0, 0), []
        for k, fold in enumerate(found):
            if self.on_fold is not None:
                self.on_fold(k + 1, len(found), fold.name)
            held_out, took, reached = self._held_out(rows, fold)
            each.append(held_out)
            spent = Spent(spent.rounds + took.rounds, spent.bytes + took.bytes)
            converged.append(reached)
        warn_unconverged(converged, "folds have models that")
        self.cv_losses_ = np.stack(each)
        self.cv_mean_, self.cv_se_ = _mean_and_error(
            self.cv_losses_,
            np.array([weight[fold.test].sum() for fold in found]),
            np.array([weight[fold.test] @ self._counts(rows.y[fold.test]) for fold in found]),
        )
        best = int(self.cv_mean_.argmin())
        within = int(np.flatnonzero(self.cv_mean_ <= self.cv_mean_[best] + self.cv_se_[best])[0])
        self.lam_min_, self.lam_1se_ = float(self.lambdas_[best]), float(self.lambdas_[within])
        return best if self.select == "min" else within, spent

    def _counts(self, y: Floats) -> Floats:
        """What a row counts in a standard error: 1, or in a Cox model whether it is an event."""
        return y[:, 1] if self._family().name == "cox" else np.ones(len(y))

    def _held_out(self, rows: Rows, fold: Fold) -> tuple[Floats, Spent, bool]:
        """The mean loss of the rows held out under models of the others, at every lam; what these took; whether all of
        them converged."""
        if not self._family().level and self.weights == "sites":
            raise InputError(
                "cross-validation of a Cox model needs weights='samples'; sites weigh unequally in its folds"
            )
        chosen = fold.train_rows(len(rows.y))
        if self.refill is not None:
            rows = rows._replace(X=self.refill(np.isin(np.arange(len(rows.y)), chosen)))
        try:
            self._family().check(rows.y[chosen], rows.sites.some(chosen).at)
            self._all_classes(rows.y[chosen])
        except InputError as error:
            raise InputError(f"without {fold.name}: {error}") from None
        train, test = self._fitted_to(rows, chosen), rows.some(fold.test)
        prepared = self._prepare(train)
        found = walk(self, prepared, self.lambdas_)
        moments = len(prepared.sites) * prepared.scaling.nbytes
        spent = Spent(found.total_rounds, moments + sum(fit.bytes for fit in found.fits))
        if self._family().level:
            return losses(self, prepared, found, test), spent, found.converged
        both = rows if fold.train is None else rows.some(np.sort(np.concatenate([chosen, fold.test])))
        whole, part = (float(r.weight.sum()) * losses(self, prepared, found, r) for r in (both, train))
        added: Floats = (whole - part) / float(test.weight.sum())
        return added, spent, found.converged  # the partial likelihood of a fold is what it adds to that of the others

    def _fitted_to(self, rows: Rows, chosen: Any) -> Rows:
        """The chosen rows; sparse ones are not copied if it can be helped: the others count 0."""
        every_site = len(np.unique(rows.sites.of_row[chosen])) == len(rows.sites)
        if issparse(rows.X) and every_site and self._family().level:
            return rows._replace(weight=rows.weight * np.bincount(chosen, minlength=len(rows.y)))
        return rows.some(chosen)

    def _by_criterion(self, rows: Rows) -> int:
        """-2 log-likelihood + log(N) (nonzero) + 2 gamma log C(p, nonzero)."""
        if self._family().name == "huber":
            raise InputError(f"select is {self.select!r}, which needs a likelihood, and huber has none; use 'min'")
        if not bool((self.path_.coefs == 0).any()):
            raise InputError(f"select is {self.select!r}, which counts zeros, and this penalty makes none; use 'min'")
        self.criterion_ = criterion(self.path_, rows, self._family().name, EBIC if self.select == "ebic" else 0.0)
        return int(self.criterion_.argmin())


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


def criterion(path: RegularizationPath, rows: Rows, family: str, gamma: float) -> Floats:
    """(Extended) BIC at every lam; N is the number of events in a Cox model, and weights count rows if they are whole
    numbers."""
    n, p = cases(rows.weight), path.coefs[0].size
    nonzero = (path.coefs != 0).sum((1, 2))
    minus_two_log = n * np.log(np.clip(2 * path.losses, 1e-300, None)) if family == "gaussian" else 2 * n * path.losses
    size = n * float(rows.weight @ rows.y[:, 1]) / float(rows.weight.sum()) if family == "cox" else n
    choices = gammaln(p + 1) - gammaln(nonzero + 1) - gammaln(p - nonzero + 1)
    found: Floats = minus_two_log + np.log(size) * nonzero + 2 * gamma * choices
    return found


def losses(estimator: Federated, prepared: Prepared, path: RegularizationPath, rows: Rows) -> Floats:
    """The mean loss of rows under every model of a path, on the scale of the given columns."""
    order = rows.sites.order
    if order is not None:
        rows = rows.some(order)
    each = row_weights(rows.sites, rows.weight, estimator.weights)
    data = ClientData(tensor(rows.X), dense(rows.y), dense(rows.sites.sizes))
    f = problem(
        prepared.family,
        data,
        intercept=prepared.intercept,
        weights=dense(np.bincount(rows.sites.of_row, each, len(rows.sites))),
        sample_weights=dense(rows.weight),
    )
    points = []
    for coef, intercept, scale in zip(path.coefs, path.intercepts, path.scales, strict=True):
        parts = [coef.flatten(), intercept if prepared.intercept else [], [] if scale is None else [scale]]
        points.append(np.concatenate(parts))
    if prepared.constants:
        return np.array([float(f.loss(dense(point))) for point in points])
    found: Floats = f.losses(dense(np.stack(points))).numpy()
    return found


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
