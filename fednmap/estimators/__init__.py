"""Estimators as scikit-learn has them, for rows of several sites: the exact joint fit, simulated in one process.

`fednmap.flower.tables` does the same fit between machines, where no row leaves its site.
"""

import warnings
from typing import Any

from fednmap.estimators.inference import Bootstrap, Inference
from fednmap.estimators.linear_models import (
    FederatedBinomialRegressor,
    FederatedCoxRegression,
    FederatedElasticNet,
    FederatedGammaRegressor,
    FederatedGLM,
    FederatedHuberRegressor,
    FederatedLasso,
    FederatedLinearRegression,
    FederatedLogisticRegression,
    FederatedNegativeBinomialRegressor,
    FederatedOrdinalRegression,
    FederatedPoissonRegressor,
)
from fednmap.estimators.model_selection import (
    FederatedBinomialRegressorCV,
    FederatedCoxRegressionCV,
    FederatedElasticNetCV,
    FederatedGammaRegressorCV,
    FederatedGLMCV,
    FederatedLassoCV,
    FederatedLogisticRegressionCV,
    FederatedNegativeBinomialRegressorCV,
    FederatedOrdinalRegressionCV,
    FederatedPoissonRegressorCV,
)
from fednmap.estimators.path import RegularizationPath

__all__ = [
    "Bootstrap",
    "FederatedBinomialRegressor",
    "FederatedBinomialRegressorCV",
    "FederatedCoxRegression",
    "FederatedCoxRegressionCV",
    "FederatedElasticNet",
    "FederatedElasticNetCV",
    "FederatedGLM",
    "FederatedGLMCV",
    "FederatedGammaRegressor",
    "FederatedGammaRegressorCV",
    "FederatedHuberRegressor",
    "FederatedLasso",
    "FederatedLassoCV",
    "FederatedLinearRegression",
    "FederatedLogisticRegression",
    "FederatedLogisticRegressionCV",
    "FederatedNegativeBinomialRegressor",
    "FederatedNegativeBinomialRegressorCV",
    "FederatedOrdinalRegression",
    "FederatedOrdinalRegressionCV",
    "FederatedPoissonRegressor",
    "FederatedPoissonRegressorCV",
    "Inference",
    "RegularizationPath",
]


def __getattr__(name: str) -> Any:
    if name == "Path":
        warnings.warn("estimators.Path is now estimators.RegularizationPath", DeprecationWarning, stacklevel=2)
        return RegularizationPath
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
