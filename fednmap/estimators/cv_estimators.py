"""Estimators that choose their lam; what `CrossValidated` says holds for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fednmap.core import Regularizer
from fednmap.estimators.linear_models import (
    FederatedElasticNet,
    FederatedGLM,
    FederatedLasso,
    FederatedLogisticRegression,
    FederatedPoissonRegressor,
)
from fednmap.estimators.model_selection import CrossValidated
from fednmap.estimators.survival import FederatedCoxRegression


@dataclass(eq=False, repr=False)
class FederatedLassoCV(CrossValidated, FederatedLasso):
    """`FederatedLasso` at the lam with the least held-out loss, or by another rule.

    lambdas:      how many values from lambda_max down, or the values.
    cv:           a number of folds within sites, "leave-one-site-out", a scikit-learn splitter (its groups are the
                  sites), or (train, test) pairs of row numbers; None is 5.
    select:       "min", "1se" (one standard error), "bic" or "ebic".
    random_state: how the folds are dealt out.
    """


@dataclass(eq=False, repr=False)
class FederatedElasticNetCV(CrossValidated, FederatedElasticNet):
    """`FederatedElasticNet` that chooses its lam; see `FederatedLassoCV`."""


@dataclass(eq=False, repr=False)
class FederatedLogisticRegressionCV(CrossValidated, FederatedLogisticRegression):
    """`FederatedLogisticRegression` that chooses its lam; see `FederatedLassoCV`."""


@dataclass(eq=False, repr=False)
class FederatedPoissonRegressorCV(CrossValidated, FederatedPoissonRegressor):
    """`FederatedPoissonRegressor` that chooses its lam; see `FederatedLassoCV`."""


@dataclass(eq=False, repr=False)
class FederatedCoxRegressionCV(CrossValidated, FederatedCoxRegression):
    """`FederatedCoxRegression` that chooses its lam; see `FederatedLassoCV`.

    The loss of a fold is what it adds to the partial likelihood of the others. The default penalty is l1.
    """

    penalty: str | Regularizer = "l1"
    fit_intercept: ClassVar[bool] = False  # type: ignore[misc]  # no parameter


@dataclass(eq=False, repr=False)
class FederatedGLMCV(CrossValidated, FederatedGLM):
    """`FederatedGLM` that chooses its lam; see `FederatedLassoCV`."""
