"""Estimators as scikit-learn has them, for rows of several sites: the exact joint fit, simulated in one process.

`fednmap.flower.tables` does the same fit between machines, where no row leaves its site.
"""

from fednmap.estimators.heterogeneity import Heterogeneity
from fednmap.estimators.inference import Bootstrap, Inference
from fednmap.estimators.linear_models import (
    FederatedCoxRegression,
    FederatedElasticNet,
    FederatedGLM,
    FederatedHuberRegressor,
    FederatedLasso,
    FederatedLinearRegression,
    FederatedLogisticRegression,
    FederatedPoissonRegressor,
)
from fednmap.estimators.model_selection import (
    FederatedCoxRegressionCV,
    FederatedElasticNetCV,
    FederatedGLMCV,
    FederatedLassoCV,
    FederatedLogisticRegressionCV,
    FederatedPoissonRegressorCV,
)
from fednmap.estimators.path import RegularizationPath
from fednmap.estimators.site_effects import SiteEffects
from fednmap.names import renamed

__all__ = [
    "Bootstrap",
    "FederatedCoxRegression",
    "FederatedCoxRegressionCV",
    "FederatedElasticNet",
    "FederatedElasticNetCV",
    "FederatedGLM",
    "FederatedGLMCV",
    "FederatedHuberRegressor",
    "FederatedLasso",
    "FederatedLassoCV",
    "FederatedLinearRegression",
    "FederatedLogisticRegression",
    "FederatedLogisticRegressionCV",
    "FederatedPoissonRegressor",
    "FederatedPoissonRegressorCV",
    "Heterogeneity",
    "Inference",
    "RegularizationPath",
    "SiteEffects",
]


__getattr__ = renamed(__name__, {"Path": "RegularizationPath"})
