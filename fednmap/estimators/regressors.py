"""Estimators of numbers: linear, Poisson and Huber regression."""

from __future__ import annotations

from typing import Any

from sklearn.base import RegressorMixin
from sklearn.metrics import d2_tweedie_score

from fednmap.core import Regularizer
from fednmap.estimators.base import Federated
from fednmap.estimators.families import Family, Gaussian, Huber, Poisson
from fednmap.estimators.penalties import Groups
from fednmap.estimators.prepare import Parameters
from fednmap.estimators.sites import Floats


class _Regressor(RegressorMixin, Federated):  # type: ignore[misc]
    def predict(self, X: Any) -> Floats:
        """The mean of y at each row."""
        return self._family().mean(self._scores(X))


class FederatedLasso(_Regressor):
    """Linear regression with an l1 penalty, |y - X b - c|^2 / (2 N) + lam |b|_1, as scikit-learn's Lasso(alpha=lam).

    With standardize=True the penalty is on the coefficients of the standardised columns, as in glmnet; coef_ and
    intercept_ are for the columns as they were given. The intercept is never penalised.

    lam:           weight of the penalty.
    standardize:   columns of mean 0 and deviation 1 by sums over the sites.
    fit_intercept: whether there is an intercept c.
    tol:           |F_nat| at which the fit ends, relative to the deviation of y.
    max_rounds:    rounds at most; a ConvergenceWarning says that they did not suffice.
    weights:       "samples" counts every row once, "sites" every site as much as any other.

    >>> import numpy as np
    >>> X, hospital = np.array([[0.0], [1.0], [2.0], [3.0]]), ["a", "a", "b", "b"]
    >>> FederatedLasso(lam=0.1, standardize=False).fit(X, [1.0, 3.0, 5.0, 7.0], sites=hospital).coef_.round(3)
    array([1.92])
    """

    def __init__(
        self,
        lam: float = 0.01,
        *,
        standardize: bool = True,
        fit_intercept: bool = True,
        tol: float = 1e-6,
        max_rounds: int = 1000,
        weights: str = "samples",
    ) -> None:
        self.lam = lam
        self.standardize = standardize
        self.fit_intercept = fit_intercept
        self.tol = tol
        self.max_rounds = max_rounds
        self.weights = weights

    def _family(self) -> Family:
        return Gaussian()

    def _penalty(self) -> str | Regularizer:
        return "l1"


class FederatedElasticNet(_Regressor):
    """Linear regression with lam (l1_ratio |b|_1 + (1 - l1_ratio) |b|^2 / 2), as scikit-learn's ElasticNet(alpha=lam).

    The other parameters are those of `FederatedLasso`.
    """

    def __init__(
        self,
        lam: float = 0.01,
        *,
        l1_ratio: float = 0.5,
        standardize: bool = True,
        fit_intercept: bool = True,
        tol: float = 1e-6,
        max_rounds: int = 1000,
        weights: str = "samples",
    ) -> None:
        self.lam = lam
        self.l1_ratio = l1_ratio
        self.standardize = standardize
        self.fit_intercept = fit_intercept
        self.tol = tol
        self.max_rounds = max_rounds
        self.weights = weights

    def _family(self) -> Family:
        return Gaussian()

    def _penalty(self) -> str | Regularizer:
        return "elastic-net"


class FederatedLinearRegression(_Regressor):
    """Least squares, unpenalised unless a penalty is named; see `FederatedGLM` for penalty, lam and groups."""

    def __init__(
        self,
        penalty: str | Regularizer = "none",
        lam: float | None = None,
        *,
        l1_ratio: float = 0.5,
        groups: Groups = None,
        standardize: bool = True,
        fit_intercept: bool = True,
        tol: float = 1e-6,
        max_rounds: int = 1000,
        weights: str = "samples",
    ) -> None:
        self.penalty = penalty
        self.lam = lam
        self.l1_ratio = l1_ratio
        self.groups = groups
        self.standardize = standardize
        self.fit_intercept = fit_intercept
        self.tol = tol
        self.max_rounds = max_rounds
        self.weights = weights

    def _family(self) -> Family:
        return Gaussian()

    def _penalty(self) -> str | Regularizer:
        return self.penalty


class FederatedPoissonRegressor(_Regressor):
    """Poisson regression of counts with a log link: mean half deviance + lam penalty.

    Half the deviance of a row with score s is exp(s) - y s + y log y - y.

    With penalty="ridge" and standardize=False it is scikit-learn's PoissonRegressor(alpha=lam). See `FederatedGLM` for
    the parameters; score is the share of deviance explained.
    """

    def __init__(
        self,
        penalty: str | Regularizer = "l1",
        lam: float | None = None,
        *,
        l1_ratio: float = 0.5,
        groups: Groups = None,
        standardize: bool = True,
        fit_intercept: bool = True,
        tol: float = 1e-6,
        max_rounds: int = 1000,
        weights: str = "samples",
    ) -> None:
        self.penalty = penalty
        self.lam = lam
        self.l1_ratio = l1_ratio
        self.groups = groups
        self.standardize = standardize
        self.fit_intercept = fit_intercept
        self.tol = tol
        self.max_rounds = max_rounds
        self.weights = weights

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """D^2, the share of the Poisson deviance that the model explains."""
        return float(d2_tweedie_score(y, self.predict(X), sample_weight=sample_weight, power=1))

    def _family(self) -> Family:
        return Poisson()

    def _penalty(self) -> str | Regularizer:
        return self.penalty

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags


class FederatedHuberRegressor(_Regressor):
    """Linear regression that outliers do not move: Huber's loss, with the scale sigma fitted too (`scale_`).

    mean(sigma + H(r / sigma) sigma), H(u) = u^2 up to epsilon, 2 epsilon |u| - epsilon^2 beyond; as scikit-learn's
    HuberRegressor, whose alpha is N lam / 2 with penalty="ridge". sigma stays above a thousandth of the deviation of y:
    where there are more columns than rows it would go to 0. See `FederatedGLM` for the other parameters.
    """

    def __init__(
        self,
        epsilon: float = 1.35,
        penalty: str | Regularizer = "ridge",
        lam: float | None = None,
        *,
        l1_ratio: float = 0.5,
        groups: Groups = None,
        standardize: bool = True,
        fit_intercept: bool = True,
        tol: float = 1e-6,
        max_rounds: int = 1000,
        weights: str = "samples",
    ) -> None:
        self.epsilon = epsilon
        self.penalty = penalty
        self.lam = lam
        self.l1_ratio = l1_ratio
        self.groups = groups
        self.standardize = standardize
        self.fit_intercept = fit_intercept
        self.tol = tol
        self.max_rounds = max_rounds
        self.weights = weights

    def _family(self) -> Family:
        return Huber(self.epsilon)

    def _penalty(self) -> str | Regularizer:
        return self.penalty

    def _set(self, model: Parameters) -> None:
        super()._set(model)
        self.scale_ = model.scale
