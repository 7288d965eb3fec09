"""Estimators that choose their lam; what `CrossValidated` says holds for all of them."""

from __future__ import annotations

from collections.abc import Sequence

from fednmap.core import Regularizer
from fednmap.estimators.classifiers import FederatedLogisticRegression
from fednmap.estimators.families import Family
from fednmap.estimators.folds import CV
from fednmap.estimators.glm import FederatedGLM
from fednmap.estimators.model_selection import CrossValidated
from fednmap.estimators.penalties import Groups
from fednmap.estimators.regressors import FederatedElasticNet, FederatedLasso, FederatedPoissonRegressor
from fednmap.estimators.survival import FederatedCoxRegression


class FederatedLassoCV(CrossValidated, FederatedLasso):
    """`FederatedLasso` at the lam with the least held-out loss, or by another rule.

    lambdas:      how many values from lambda_max down, or the values.
    cv:           a number of folds within sites, "leave-one-site-out", a scikit-learn splitter (its groups are the
                  sites), or (train, test) pairs of row numbers; None is 5.
    select:       "min", "1se" (one standard error), "bic" or "ebic".
    random_state: how the folds are dealt out.
    """

    def __init__(
        self,
        *,
        lambdas: int | Sequence[float] = 50,
        cv: CV = 5,
        select: str = "min",
        random_state: int = 0,
        standardize: bool = True,
        fit_intercept: bool = True,
        tol: float = 1e-6,
        max_rounds: int = 1000,
        weights: str = "samples",
    ) -> None:
        self.lambdas = lambdas
        self.cv = cv
        self.select = select
        self.random_state = random_state
        self.standardize = standardize
        self.fit_intercept = fit_intercept
        self.tol = tol
        self.max_rounds = max_rounds
        self.weights = weights


class FederatedElasticNetCV(CrossValidated, FederatedElasticNet):
    """`FederatedElasticNet` at a lam of its own choice; see `FederatedLassoCV`."""

    def __init__(
        self,
        *,
        lambdas: int | Sequence[float] = 50,
        cv: CV = 5,
        select: str = "min",
        random_state: int = 0,
        l1_ratio: float = 0.5,
        standardize: bool = True,
        fit_intercept: bool = True,
        tol: float = 1e-6,
        max_rounds: int = 1000,
        weights: str = "samples",
    ) -> None:
        self.lambdas = lambdas
        self.cv = cv
        self.select = select
        self.random_state = random_state
        self.l1_ratio = l1_ratio
        self.standardize = standardize
        self.fit_intercept = fit_intercept
        self.tol = tol
        self.max_rounds = max_rounds
        self.weights = weights


class FederatedLogisticRegressionCV(CrossValidated, FederatedLogisticRegression):
    """`FederatedLogisticRegression` at a lam of its own choice; see `FederatedLassoCV`."""

    def __init__(
        self,
        penalty: str | Regularizer = "l1",
        *,
        lambdas: int | Sequence[float] = 50,
        cv: CV = 5,
        select: str = "min",
        random_state: int = 0,
        l1_ratio: float = 0.5,
        groups: Groups = None,
        standardize: bool = True,
        fit_intercept: bool = True,
        tol: float = 1e-6,
        max_rounds: int = 1000,
        weights: str = "samples",
    ) -> None:
        self.penalty = penalty
        self.lambdas = lambdas
        self.cv = cv
        self.select = select
        self.random_state = random_state
        self.l1_ratio = l1_ratio
        self.groups = groups
        self.standardize = standardize
        self.fit_intercept = fit_intercept
        self.tol = tol
        self.max_rounds = max_rounds
        self.weights = weights


class FederatedPoissonRegressorCV(CrossValidated, FederatedPoissonRegressor):
    """`FederatedPoissonRegressor` at a lam of its own choice; see `FederatedLassoCV`."""

    def __init__(
        self,
        penalty: str | Regularizer = "l1",
        *,
        lambdas: int | Sequence[float] = 50,
        cv: CV = 5,
        select: str = "min",
        random_state: int = 0,
        l1_ratio: float = 0.5,
        groups: Groups = None,
        standardize: bool = True,
        fit_intercept: bool = True,
        tol: float = 1e-6,
        max_rounds: int = 1000,
        weights: str = "samples",
    ) -> None:
        self.penalty = penalty
        self.lambdas = lambdas
        self.cv = cv
        self.select = select
        self.random_state = random_state
        self.l1_ratio = l1_ratio
        self.groups = groups
        self.standardize = standardize
        self.fit_intercept = fit_intercept
        self.tol = tol
        self.max_rounds = max_rounds
        self.weights = weights


class FederatedCoxRegressionCV(CrossValidated, FederatedCoxRegression):
    """`FederatedCoxRegression` at a lam of its own choice; see `FederatedLassoCV`.

    The loss of a fold is what it adds to the partial likelihood of the others.
    """

    def __init__(
        self,
        penalty: str | Regularizer = "l1",
        *,
        lambdas: int | Sequence[float] = 50,
        cv: CV = 5,
        select: str = "min",
        random_state: int = 0,
        ties: str = "efron",
        l1_ratio: float = 0.5,
        groups: Groups = None,
        standardize: bool = True,
        tol: float = 1e-6,
        max_rounds: int = 1000,
        weights: str = "samples",
    ) -> None:
        self.penalty = penalty
        self.lambdas = lambdas
        self.cv = cv
        self.select = select
        self.random_state = random_state
        self.ties = ties
        self.l1_ratio = l1_ratio
        self.groups = groups
        self.standardize = standardize
        self.tol = tol
        self.max_rounds = max_rounds
        self.weights = weights


class FederatedGLMCV(CrossValidated, FederatedGLM):
    """`FederatedGLM` at a lam of its own choice; see `FederatedLassoCV`."""

    def __init__(
        self,
        family: str | Family = "gaussian",
        penalty: str | Regularizer = "l1",
        *,
        lambdas: int | Sequence[float] = 50,
        cv: CV = 5,
        select: str = "min",
        random_state: int = 0,
        l1_ratio: float = 0.5,
        groups: Groups = None,
        standardize: bool = True,
        fit_intercept: bool = True,
        tol: float = 1e-6,
        max_rounds: int = 1000,
        weights: str = "samples",
    ) -> None:
        self.family = family
        self.penalty = penalty
        self.lambdas = lambdas
        self.cv = cv
        self.select = select
        self.random_state = random_state
        self.l1_ratio = l1_ratio
        self.groups = groups
        self.standardize = standardize
        self.fit_intercept = fit_intercept
        self.tol = tol
        self.max_rounds = max_rounds
        self.weights = weights
