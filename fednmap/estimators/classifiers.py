"""Logistic regression."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import ClassifierMixin

from fednmap.core import Regularizer
from fednmap.estimators import inputs
from fednmap.estimators.base import Federated
from fednmap.estimators.families import Family, Logistic
from fednmap.estimators.penalties import Groups
from fednmap.estimators.prepare import Parameters
from fednmap.estimators.sites import Floats, Sites
from fednmap.names import InputError


class FederatedLogisticRegression(ClassifierMixin, Federated):  # type: ignore[misc]
    """Logistic regression, binary and multinomial: mean log-loss + lam penalty.

    With standardize=False it is scikit-learn's LogisticRegression with C = 1 / (N lam): penalty="l1", "ridge" (its l2)
    or "elastic-net". The union of the sites' labels are the classes; a site may lack some. Other parameters: see
    `FederatedGLM`.
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

    def decision_function(self, X: Any) -> Floats:
        """Scores: of the second class, or of every class where there are more than two."""
        return self._scores(X)

    def predict_proba(self, X: Any) -> Floats:
        """The probability of every class, in the order of classes_."""
        mean = self._family().mean(self._scores(X))
        return np.stack([1 - mean, mean], 1) if mean.ndim == 1 else mean

    def predict_log_proba(self, X: Any) -> Floats:
        return np.log(self.predict_proba(X))

    def predict(self, X: Any) -> Any:
        """The likeliest class."""
        scores = self._scores(X)
        return self.classes_[(scores > 0).astype(np.intp) if scores.ndim == 1 else scores.argmax(1)]

    def _family(self) -> Family:
        return Logistic()

    def _penalty(self) -> str | Regularizer:
        return self.penalty

    def _targets(self, y: Any, sites: Sites) -> Floats:
        self.classes_, numbers = inputs.labels(y, len(sites.of_row))
        if len(self.classes_) < 2:
            raise InputError(f"y holds one class only, {self.classes_[0]}, at all sites; two are needed")
        return numbers

    def _outputs(self) -> int:
        return 1 if len(self.classes_) == 2 else len(self.classes_)

    def _classes(self) -> tuple[str, ...]:
        return tuple(map(str, self.classes_)) if self._outputs() > 1 else ()

    def _set(self, model: Parameters) -> None:
        self.coef_, self.intercept_ = model.coef, model.intercept
