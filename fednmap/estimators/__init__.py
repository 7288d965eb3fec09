"""Estimators as scikit-learn has them, for rows of several sites: the exact joint fit, simulated in one process.

`fednmap.flower.table_app` does the same fit between machines, where no row leaves its site.
"""

from fednmap.estimators.evaluation import Evaluation, evaluate
from fednmap.estimators.heterogeneity import Heterogeneity
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
from fednmap.estimators.site_effects import SiteEffects
from fednmap.estimators.stability import Stability
from fednmap.estimators.survival import SurvivalCurves, kaplan_meier
from fednmap.names import renamed

__all__ = [
    "Bootstrap",
    "Evaluation",
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
    "Heterogeneity",
    "Inference",
    "RegularizationPath",
    "SiteEffects",
    "Stability",
    "SurvivalCurves",
    "evaluate",
    "kaplan_meier",
]


__getattr__ = renamed(__name__, {"Path": "RegularizationPath"})
