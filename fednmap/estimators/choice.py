"""The choice of lam: cross-validation over folds or sites, or an information criterion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from scipy.sparse import issparse
from scipy.special import gammaln
from sklearn.utils.validation import check_is_fitted

from fednmap.core import Regularizer
from fednmap.data.clients import ClientData
from fednmap.estimators.base import Federated, Rows
from fednmap.estimators.folds import folds
from fednmap.estimators.path import Path, lambda_max, lambdas_down, null_model, walk
from fednmap.estimators.prepare import Prepared, dense, tensor
from fednmap.estimators.sites import Floats, cases, row_weights
from fednmap.names import InputError

SELECT = {
    "min": "the least held-out loss",
    "1se": "the largest lam whose held-out loss is within one standard error of the least",
    "bic": "the least BIC, without folds",
    "ebic": "the least extended BIC, for many columns, without folds",
}
EBIC = 0.5
"""gamma of Chen and Chen, Extended Bayesian information criteria, Biometrika 2008."""


class Spent(NamedTuple):
    """Of messages between server and sites."""

    rounds: int
    bytes: int


class CrossValidated(Federated):
    """An estimator that chooses its lam on a path; fitted: lam_, lambdas_, path_, and by folds cv_losses_ (folds,
    lambdas), cv_mean_, cv_se_, lam_min_, lam_1se_, folds_; by a criterion criterion_. n_iter_ and bytes_sent_ are of
    all fits, also of those without a fold."""

    lambdas: int | Sequence[float]
    cv: int | str
    select: str
    random_state: int
    on_fold: Callable[[int, int, str], None] | None = None
    """Hears the number of a fold, how many there are, and its name, before it is computed."""
    refill: Callable[[Any], Any] | None = None
    """X with its gaps filled by what the rows of a mask say, where X had gaps: those held out must not tell."""

    def fit(self, X: Any, y: Any, sites: Any = None, sample_weight: Any = None) -> Self:
        """Choose lam, and fit the model there to all rows."""
        if self.select not in SELECT:
            raise InputError(f"select is {self.select!r}; choose from {', '.join(SELECT)}")
        rows = self._read(X, y, sites, sample_weight)
        fold = self._folds(rows) if self.select in ("min", "1se") else None
        self.lambdas_ = self._grid(rows)
        # first: prepared rows take memory
        chosen, spent = (None, Spent(0, 0)) if fold is None else self._by_folds(rows, fold)
        prepared = self._prepare(rows)
        self.path_ = walk(self, prepared, self.lambdas_, null_model(self, prepared))
        chosen = self._by_criterion(rows) if chosen is None else chosen
        self.lam_ = float(self.lambdas_[chosen])
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
        if not isinstance(self.lambdas, int | np.integer):
            return lambdas_down(0.0, self.lambdas, *rows.X.shape)
        prepared = self._prepare(rows)
        return lambdas_down(lambda_max(self, prepared, null_model(self, prepared)), self.lambdas, *rows.X.shape)

    def _folds(self, rows: Rows) -> Any:
        """The fold of every row."""
        kinds = {"logistic": rows.y, "cox": rows.y[..., -1]}.get(self._family().name)
        fold, self.folds_ = folds(rows, self.cv, self.random_state, kinds)
        return fold

    def _by_folds(self, rows: Rows, fold: Any) -> tuple[int, Spent]:
        """Which lam, and what the models without each of the folds took."""
        weight = row_weights(rows.sites, rows.weight, self.weights)
        shares = np.bincount(fold, weight, len(self.folds_))
        each, spent = [], Spent(0, 0)
        for k, name in enumerate(self.folds_):
            if self.on_fold is not None:
                self.on_fold(k + 1, len(self.folds_), name)
            held_out, took = self._held_out(rows, fold == k, name)
            each.append(held_out)
            spent = Spent(spent.rounds + took.rounds, spent.bytes + took.bytes)
        self.cv_losses_ = np.stack(each)
        self.cv_mean_ = shares @ self.cv_losses_
        spread = shares @ np.square(self.cv_losses_ - self.cv_mean_)
        self.cv_se_ = np.sqrt(spread / max(1, len(self.folds_) - 1))
        best = int(self.cv_mean_.argmin())
        within = int(np.flatnonzero(self.cv_mean_ <= self.cv_mean_[best] + self.cv_se_[best])[0])
        self.lam_min_, self.lam_1se_ = float(self.lambdas_[best]), float(self.lambdas_[within])
        return best if self.select == "min" else within, spent

    def _held_out(self, rows: Rows, test: Any, name: str) -> tuple[Floats, Spent]:
        """The mean loss of the rows of one fold under models of the others, at every lam, and what these took."""
        if not self._family().level and self.weights == "sites":
            raise InputError(
                "cross-validation of a Cox model needs weights='samples'; sites weigh unequally in its folds"
            )
        if self.refill is not None:
            rows = rows._replace(X=self.refill(~test))
        try:
            self._family().check(rows.y[~test], rows.sites.some(~test))
            self._all_classes(rows.y[~test])
        except InputError as error:
            raise InputError(f"without {name}: {error}") from None
        train = self._without(rows, test)
        prepared = self._prepare(train)
        found = walk(self, prepared, self.lambdas_)
        moments = len(prepared.sites) * prepared.scaling.nbytes
        spent = Spent(found.total_rounds, moments + sum(fit.bytes for fit in found.fits))
        if self._family().level:
            return losses(self, prepared, found, rows.some(test)), spent
        whole, part = (float(r.weight.sum()) * losses(self, prepared, found, r) for r in (rows, train))
        added: Floats = (whole - part) / float(rows.weight[test].sum())
        return added, spent  # the partial likelihood of a fold is what it adds to that of the others

    def _without(self, rows: Rows, test: Any) -> Rows:
        """The rows but for those of a fold; sparse ones are not copied if it can be helped: the fold counts 0."""
        every_site = len(np.unique(rows.sites.of_row[~test])) == len(rows.sites)
        if issparse(rows.X) and every_site and self._family().level:
            return rows._replace(weight=np.where(test, 0.0, rows.weight))
        return rows.some(~test)

    def _by_criterion(self, rows: Rows) -> int:
        """-2 log-likelihood + log(N) (nonzero) + 2 gamma log C(p, nonzero)."""
        if self._family().name == "huber":
            raise InputError(f"select is {self.select!r}, which needs a likelihood, and huber has none; use 'min'")
        if not bool((self.path_.coefs == 0).any()):
            raise InputError(f"select is {self.select!r}, which counts zeros, and this penalty makes none; use 'min'")
        self.criterion_ = criterion(self.path_, rows, self._family().name, EBIC if self.select == "ebic" else 0.0)
        return int(self.criterion_.argmin())


def criterion(path: Path, rows: Rows, family: str, gamma: float) -> Floats:
    """(Extended) BIC at every lam; N is the number of events in a Cox model, and weights count rows if they are whole
    numbers."""
    n, p = cases(rows.weight), path.coefs[0].size
    nonzero = (path.coefs != 0).sum((1, 2))
    minus_two_log = n * np.log(np.clip(2 * path.losses, 1e-300, None)) if family == "gaussian" else 2 * n * path.losses
    size = n * float(rows.weight @ rows.y[:, 1]) / float(rows.weight.sum()) if family == "cox" else n
    choices = gammaln(p + 1) - gammaln(nonzero + 1) - gammaln(p - nonzero + 1)
    found: Floats = minus_two_log + np.log(size) * nonzero + 2 * gamma * choices
    return found


def losses(estimator: Federated, prepared: Prepared, path: Path, rows: Rows) -> Floats:
    """The mean loss of rows under every model of a path, on the scale of the given columns."""
    order = rows.sites.order
    if order is not None:
        rows = rows.some(order)
    each = row_weights(rows.sites, rows.weight, estimator.weights)
    data = ClientData(tensor(rows.X), dense(rows.y), dense(rows.sites.sizes))
    problem = prepared.family.problem(
        data,
        prepared.outputs,
        intercept=prepared.intercept,
        weights=dense(np.bincount(rows.sites.of_row, each, len(rows.sites))),
        sample_weights=dense(rows.weight),
    )
    points = []
    for coef, intercept, scale in zip(path.coefs, path.intercepts, path.scales, strict=True):
        parts = [coef.flatten(), intercept if prepared.intercept else [], [] if scale is None else [scale]]
        points.append(np.concatenate(parts))
    if prepared.constants:
        return np.array([float(problem.loss(dense(point))) for point in points])
    found: Floats = problem.losses(dense(np.stack(points))).numpy()
    return found
