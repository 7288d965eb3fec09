"""Generalised linear models, one estimator per family, Cox regression, and any family with any penalty."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import ClassifierTags, RegressorTags
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import _num_samples, check_is_fitted

from fednmap.core import Regularizer
from fednmap.estimators import rows as inputs
from fednmap.estimators.base import Federated
from fednmap.estimators.family_problems import CoxResponse, expected, family, first_level, outputs_at
from fednmap.estimators.heterogeneity import heterogeneity
from fednmap.estimators.inference import bootstrap, debiased, fitted_point, inference
from fednmap.estimators.path import path
from fednmap.estimators.penalties import Groups
from fednmap.estimators.prepare import Parameters, problem_of
from fednmap.estimators.rows import LARGEST, Floats, Rows
from fednmap.estimators.stability import stability
from fednmap.estimators.survival import concordance, proportional_hazards
from fednmap.names import InputError
from fednmap.problems import Cox
from fednmap.problems.cox import coarse
from fednmap.problems.families import (
    LITTLE,
    Bernoulli,
    Binomial,
    Family,
    Gamma,
    Gaussian,
    NegativeBinomial,
    Ordinal,
    Poisson,
    Response,
    ScaledHuber,
)
from fednmap.report.data_table import DataTable
from fednmap.tables.table import Sites, divide

DEVIANCES = ("binomial", "poisson", "negative-binomial", "gamma")
"""Families whose score is D^2."""


def _classifies(estimator: Federated) -> bool:
    return estimator._family().name == "logistic"


class FederatedModel(Federated):
    """Predictions and summaries of a fitted model."""

    path = path
    inference = inference
    debiased = debiased
    heterogeneity = heterogeneity
    bootstrap = bootstrap
    stability = stability


@dataclass(eq=False, repr=False)
class AnyPenalty(FederatedModel):
    """An estimator with a choice of penalties; for the parameters see `FederatedGLM`."""

    penalty: str | Regularizer = "l1"
    lam: float | None = None
    _: KW_ONLY
    l1_ratio: float = 0.5
    groups: Groups = None


class _RowModel(FederatedModel):
    """A model of rows by themselves; y are classes if the family is logistic."""

    @available_if(_classifies)  # type: ignore[untyped-decorator]
    def decision_function(self, X: Any, sites: Any = None) -> Floats:
        """Return the scores: of the second class, or of every class where there are more than two."""
        return self._scores(X, sites)

    @available_if(_classifies)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any, sites: Any = None) -> Floats:
        """Return the probability of every class, in the order of classes_."""
        mean = expected(self._family(), self._scores(X, sites))
        return np.stack([1 - mean, mean], 1) if mean.ndim == 1 else mean

    @available_if(_classifies)  # type: ignore[untyped-decorator]
    def predict_log_proba(self, X: Any, sites: Any = None) -> Floats:
        """Return the logarithm of the probability of every class."""
        found: Floats = np.log(self.predict_proba(X, sites))
        return found

    def predict(self, X: Any, sites: Any = None) -> Any:
        """Return the mean of y at each row, or the likeliest class; `sites` have their own models where they differ."""
        scores = self._scores(X, sites)
        if not _classifies(self):
            return expected(self._family(), scores)
        return self.classes_[(scores > 0).astype(np.intp) if scores.ndim == 1 else scores.argmax(1)]

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return the accuracy, $R^2$, or $D^2$, the share of deviance explained."""
        name = self._family().name
        if name in DEVIANCES:
            return self._explained(X, y, sample_weight)
        rule = accuracy_score if name == "logistic" else r2_score
        return float(rule(y, self.predict(X), sample_weight=sample_weight))

    def _explained(self, X: Any, y: Any, sample_weight: Any) -> float:
        """$D^2$: the share of the deviance of the model without columns that the model explains."""
        scores, kind = self._scores(X), self._family()
        assert isinstance(kind, Family)
        _, where, offset, _ = self._parts(X)
        y, weight = kind.as_rows(self._targets(y, where), inputs.sample_weights(sample_weight, len(scores), where))
        share, target = weight / weight.sum(), torch.from_numpy(y)
        null = first_level(kind, y, share, offset) + (0.0 if offset is None else offset)
        constants = vars(self).get("constants_", ())
        outputs = [outputs_at(kind, np.broadcast_to(part, len(y)), constants) for part in (scores, null)]
        least = float(share @ kind.saturated(target, outputs[0]).numpy())
        own, other = (float(share @ kind.loss(part, target).numpy()) - least for part in outputs)
        return 1 - own / other if other > 0 else float(own <= 0)

    def _targets(self, y: Any, sites: Sites) -> Floats:
        if not _classifies(self):
            return super()._targets(y, sites)
        self.classes_, numbers = inputs.labels(y, len(sites.of_row))
        if len(self.classes_) < 2:
            raise InputError(f"y holds one class only, {self.classes_[0]}, at all sites; two are needed")
        return numbers

    def _classes(self) -> tuple[str, ...]:
        return tuple(map(str, self.classes_)) if _classifies(self) and len(self.classes_) > 2 else ()

    def _set(self, model: Parameters) -> None:
        super()._set(model)
        if _classifies(self):
            self.coef_, self.intercept_ = model.coef, model.intercept

    def _finish(self, rows: Rows) -> None:
        if self._family().name != "negative-binomial":
            return
        dispersion = vars(self)["dispersion_"]
        if dispersion * float(rows.shares(self.weights) @ rows.y) < 1.001 * LITTLE:
            warnings.warn(
                f"the dispersion is {dispersion:.1g}: these counts do not vary more than Poisson's; use family poisson",
                ConvergenceWarning,
                stacklevel=3,
            )

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        if _classifies(self):
            tags.estimator_type, tags.classifier_tags = "classifier", ClassifierTags()
        else:
            tags.estimator_type, tags.regressor_tags = "regressor", RegressorTags()
            tags.target_tags.positive_only = self._family().name in DEVIANCES
        return tags


@dataclass(eq=False, repr=False)
class FederatedGLM(_RowModel):
    r"""A generalised linear model of rows at several sites, fitted exactly: mean loss + lam penalty(b).

    $$\min_{b, c} \sum_i w_i f_i(b, c) + \lambda\,\varphi(b),$$

    where $f_i$ is the mean loss of the rows of site i, of scores $x^\top b + c$, and $w_i$ what the site counts.

    family:        "gaussian", "logistic", "binomial", "poisson", "negative-binomial", "gamma" or "huber";
                   FederatedCoxRegression is for times, FederatedOrdinalRegression for ordered labels.
    penalty:       a name ("none", "l1", "ridge", "elastic-net", "mcp", "scad", "group-lasso", "sparse-group-lasso",
                   "nonnegative", "box:lo,hi") or any Regularizer on the coefficients (K p of them, class by class).
    lam:           weight of the penalty; default 0.01 for a name, 1 for a Regularizer, which has its own weights.
    l1_ratio:      the share of l1 in "elastic-net" and "sparse-group-lasso".
    groups:        {name: columns} or lists of columns, by name or number; a column in none is a group by itself.
    standardize:   columns of mean 0 and deviation 1, by sums over the sites; the penalty is then on the coefficients of
                   the standardised columns, as in glmnet. coef_ and intercept_ are for the columns as they were given.
    fit_intercept: an intercept, never penalised.
    tol:           $|F_{nat}|$ at which the fit ends, relative to the deviation of y in a linear regression, or
                   to the mean of y in a Poisson regression.
    max_rounds:    rounds at most; a ConvergenceWarning says that they did not suffice.
    weights:       "samples" counts every row once, "sites" every site as much as any other.
    site_effects:  "none"; "intercepts", an unpenalised one per site; "random", intercepts that are normal around
                   intercept_; "sparse", unpenalised ones and coefficients $b + d_i$ of site i, with
                   $\mu \sum_i |d_i|_1$ added to the penalty. coef_ are then the shared b, intercept_ is the mean over
                   sites; predict(X, sites) uses the sites' own, for a new site the shared ones.
    mu:            weight of the deviations $d_i$ of standardised columns; default 0.7 lam. With random intercepts
                   $a_i$ the weight of $\sum_i (a_i - c)^2 / 2$, where $c$ is intercept_; default by marginal likelihood
                   (REML in an unpenalised linear regression): mu_.
    offset:        a column of X, by name or number, that is added to every score and has no coefficient.
    exposure:      the same with the logarithm of the column: times at risk, in models with a log link.
    formula:       such as "visits ~ age * sex + bs(bmi, 4)": X is then a frame with these columns, and y the left side
                   unless it is given; see `fednmap.tables.FederatedFormula`.
    penalty_factor: {column: factor} or one for each: lam counts so much for that coefficient, 0 leaves it unpenalised.
                   A column by name or number, or a term of the formula. For l1, ridge, elastic-net, mcp and scad.
    bounds:        {column: (low, high)} or one pair for all: bounds of coefficients of the columns as they were given,
                   None for an open end, with 0 between them.

    Fitted: coef_, intercept_, n_iter_ (rounds), n_features_in_, feature_names_in_, bytes_sent_, objective_, residual_,
    converged_, sites_, site_report_, and with site effects site_effects_. Of a negative binomial model also dispersion_
    and its inverse theta_.

    >>> import numpy as np
    >>> X, hospital = np.array([[0.0], [1.0], [2.0], [3.0]]), ["a", "a", "b", "b"]
    >>> FederatedGLM("gaussian", "none").fit(X, [1.0, 3.0, 5.0, 7.0], sites=hospital).coef_.round(3)
    array([2.])
    """

    family: str | Response = "gaussian"
    penalty: str | Regularizer = "l1"
    lam: float | None = None
    _: KW_ONLY
    l1_ratio: float = 0.5
    groups: Groups = None

    def _family(self) -> Response:
        found = family(self.family)
        if not found.level:
            raise InputError(f"family {found.name!r} has its own times and strata; use FederatedCoxRegression")
        if isinstance(found, Ordinal):
            raise InputError("family 'ordinal' has labels and thresholds; use FederatedOrdinalRegression")
        return found


@dataclass(eq=False, repr=False)
class FederatedLogisticRegression(_RowModel, AnyPenalty):
    """Logistic regression, binary or multinomial: mean log-loss + lam penalty.

    With standardize=False it is scikit-learn's LogisticRegression with `C = 1 / (N lam)`: penalty="l1", "ridge" (its
    l2) or "elastic-net". The union of the sites' labels are the classes; a site may lack some. Other parameters: see
    `FederatedGLM`.

    >>> import numpy as np
    >>> X, y = np.arange(8.0)[:, None], ["no", "no", "yes", "no", "yes", "no", "yes", "yes"]
    >>> FederatedLogisticRegression("ridge", 0.1).fit(X, y, sites=["a", "b"] * 4).predict([[0.0], [7.0]])
    array(['no', 'yes'], dtype='<U3')
    """

    _kind = Bernoulli


@dataclass(eq=False, repr=False)
class FederatedLasso(_RowModel):
    r"""Linear regression with an l1 penalty, as scikit-learn's Lasso(alpha=lam).

    $$\min_{b, c} \frac{1}{2N} \lVert y - X b - c \rVert^2 + \lambda \lVert b \rVert_1.$$

    With standardize=True the penalty is on the coefficients of the standardised columns, as in glmnet; coef_ and
    intercept_ are for the columns as they were given. The intercept is never penalised.

    lam:           weight of the penalty.
    standardize:   columns of mean 0 and deviation 1 by sums over the sites.
    fit_intercept: whether there is an intercept c.
    tol:           $|F_{nat}|$ at which the fit ends, relative to the deviation of y.
    max_rounds:    rounds at most; a ConvergenceWarning says that they did not suffice.
    weights:       "samples" counts every row once, "sites" every site as much as any other.

    >>> import numpy as np
    >>> X, hospital = np.array([[0.0], [1.0], [2.0], [3.0]]), ["a", "a", "b", "b"]
    >>> FederatedLasso(lam=0.1, standardize=False).fit(X, [1.0, 3.0, 5.0, 7.0], sites=hospital).coef_.round(3)
    array([1.92])
    """

    lam: float = 0.01
    penalty: ClassVar[str] = "l1"  # type: ignore[misc]  # no parameter
    _kind = Gaussian


@dataclass(eq=False, repr=False)
class FederatedElasticNet(_RowModel):
    r"""Linear regression with an elastic net, as scikit-learn's ElasticNet(alpha=lam).

    The penalty is $\lambda (r \lVert b \rVert_1 + (1 - r) \lVert b \rVert^2 / 2)$; $r$ is l1_ratio. The other
    parameters are those of `FederatedLasso`.

    >>> import numpy as np
    >>> X, hospital = np.array([[0.0], [1.0], [2.0], [3.0]]), ["a", "a", "b", "b"]
    >>> FederatedElasticNet(lam=0.1, standardize=False).fit(X, [1.0, 3.0, 5.0, 7.0], sites=hospital).coef_.round(3)
    array([1.885])
    """

    lam: float = 0.01
    _: KW_ONLY
    l1_ratio: float = 0.5
    penalty: ClassVar[str] = "elastic-net"  # type: ignore[misc]  # no parameter
    _kind = Gaussian


@dataclass(eq=False, repr=False)
class FederatedLinearRegression(_RowModel, AnyPenalty):
    """Least squares, unpenalised unless a penalty is named; see `FederatedGLM` for penalty, lam and groups.

    >>> import numpy as np
    >>> X, hospital = np.array([[0.0], [1.0], [2.0], [3.0]]), ["a", "a", "b", "b"]
    >>> FederatedLinearRegression().fit(X, [1.0, 3.0, 5.0, 7.0], sites=hospital).coef_.round(3)
    array([2.])
    """

    penalty: str | Regularizer = "none"
    _kind = Gaussian


@dataclass(eq=False, repr=False)
class FederatedPoissonRegressor(_RowModel, AnyPenalty):
    r"""Poisson regression of counts with a log link: mean half deviance + lam penalty.

    Half the deviance of a row with score $s$ is $e^s - y s + y \log y - y$.

    With penalty="ridge" and standardize=False it is scikit-learn's PoissonRegressor(alpha=lam). See `FederatedGLM` for
    the parameters; score is the share of deviance explained.

    >>> import numpy as np
    >>> X, y, hospital = np.arange(8.0)[:, None], [0, 1, 0, 2, 3, 2, 4, 5], ["a", "b"] * 4
    >>> FederatedPoissonRegressor("none").fit(X, y, sites=hospital).coef_.round(3)
    array([0.362])
    """

    _kind = Poisson


@dataclass(eq=False, repr=False)
class FederatedNegativeBinomialRegressor(_RowModel, AnyPenalty):
    """Negative binomial regression of counts that vary more than Poisson's: mean $m = e^s$, variance $m + d m^2$.

    $s$ is the score. The dispersion $d$ is estimated with the coefficients, by maximum likelihood, as in MASS::glm.nb,
    whose theta is $1 / d$. A ConvergenceWarning says that counts do not vary more than Poisson's. See `FederatedGLM`
    for the parameters. Fitted: also dispersion_ and theta_.

    >>> import numpy as np
    >>> X, y, hospital = np.arange(8.0)[:, None], [0, 3, 1, 0, 9, 2, 1, 8], ["a", "b"] * 4
    >>> round(FederatedNegativeBinomialRegressor("none").fit(X, y, sites=hospital).theta_, 3)
    1.343
    """

    _kind = NegativeBinomial


@dataclass(eq=False, repr=False)
class FederatedGammaRegressor(_RowModel, AnyPenalty):
    r"""Gamma regression of positive numbers, such as costs, with a log link: mean half deviance + lam penalty.

    Half the deviance of a row with score $s$ is $y e^{-s} + s - \log y - 1$. With penalty="ridge" and standardize=False
    it is scikit-learn's GammaRegressor(alpha=lam). See `FederatedGLM` for the parameters.

    >>> import numpy as np
    >>> X, hospital = np.arange(8.0)[:, None], ["a", "b"] * 4
    >>> FederatedGammaRegressor("none").fit(X, np.exp(X[:, 0] / 2), sites=hospital).coef_.round(3)
    array([0.5])
    """

    _kind = Gamma


@dataclass(eq=False, repr=False)
class FederatedBinomialRegressor(_RowModel, AnyPenalty):
    """Logistic regression of counts: y has two columns, successes and trials.

    The fit is that of one row per trial: mean log-loss of trials + lam penalty. One column is a share of successes,
    whose trials are sample_weight. `predict` is the probability of a success. See `FederatedGLM` for the parameters.

    >>> import numpy as np
    >>> dose, y = np.array([[0.0], [1.0], [2.0], [3.0]]), [[1, 10], [3, 10], [6, 10], [8, 10]]
    >>> FederatedBinomialRegressor("none").fit(dose, y, sites=["a", "a", "b", "b"]).coef_.round(3)
    array([1.19])
    """

    _kind = Binomial


@dataclass(eq=False, repr=False)
class FederatedOrdinalRegression(ClassifierMixin, AnyPenalty):  # type: ignore[misc]
    r"""Proportional odds of ordered labels, as MASS::polr.

    The log-odds of $y > k$ are $\langle b, x \rangle - \theta_k$.

    order: the labels from the lowest to the highest; default: that of an ordered pandas column, else by name or size.

    Mean -log likelihood + lam penalty(b); the thresholds $\theta_k$ are not penalised. Every label must occur, at some
    site. See `FederatedGLM` for the other parameters. Fitted: also thresholds_ and classes_.

    >>> import numpy as np
    >>> X, y = np.arange(8.0)[:, None], ["low", "low", "high", "low", "mid", "high", "mid", "high"]
    >>> model = FederatedOrdinalRegression("none", order=("low", "mid", "high")).fit(X, y, sites=["a", "b"] * 4)
    >>> model.coef_.round(3), model.predict([[0.0], [7.0]])
    (array([0.68]), array(['low', 'high'], dtype='<U4'))
    """

    _: KW_ONLY
    order: Sequence[Any] | None = None
    fit_intercept: ClassVar[bool] = True  # type: ignore[misc]  # no parameter

    def predict_proba(self, X: Any) -> Floats:
        """Return the probability of every label, in the order of classes_."""
        scores, constants = self._scores(X), vars(self).get("constants_", ())
        return expected(self._family(), scores, constants)

    def predict(self, X: Any) -> Any:
        """Return the likeliest label."""
        likeliest = self.predict_proba(X).argmax(1)
        return self.classes_[likeliest]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.poor_score = True  # where labels have no order
        return tags

    def _family(self) -> Response:
        return Ordinal(len(vars(self).get("classes_", (0, 1))))

    def _targets(self, y: Any, sites: Sites) -> Floats:
        self.classes_, numbers = inputs.ordered_labels(y, len(sites.of_row), self.order)
        return numbers


@dataclass(eq=False, repr=False)
class FederatedHuberRegressor(_RowModel):
    r"""Linear regression that is robust against outliers: Huber's loss, with the scale $\sigma$ fitted too (`scale_`).

    The loss of a row with residual $r$ is $\sigma + \sigma H(r / \sigma)$, where $H(u) = u^2$ up to $\epsilon$ and
    $2 \epsilon |u| - \epsilon^2$ beyond; as scikit-learn's HuberRegressor, whose alpha is N lam / 2 with
    penalty="ridge". $\sigma$ stays above a thousandth of the deviation of y:
    where there are more columns than rows it would go to 0. See `FederatedGLM` for the other parameters.

    >>> import numpy as np
    >>> X, y, hospital = np.arange(8.0)[:, None], [1, 3, 5, 7, 9, 100, 13, 15], ["a", "b"] * 4
    >>> FederatedHuberRegressor(lam=1e-6).fit(X, y, sites=hospital).coef_.round(2)
    array([2.])
    """

    epsilon: float = 1.35
    penalty: str | Regularizer = "ridge"
    lam: float | None = None
    _: KW_ONLY
    l1_ratio: float = 0.5
    groups: Groups = None

    def _family(self) -> Response:
        return ScaledHuber(self.epsilon)


@dataclass(eq=False, repr=False)
class FederatedCoxRegression(AnyPenalty):
    r"""Proportional hazards, with one baseline hazard per site.

    The hazard at site i is $h(t \mid x) = h_i(t)\, e^{\langle b, x \rangle}$. The partial likelihood is then a sum over
    sites, so that the fit is that of the stratified model on the pooled rows:
    - log partial likelihood / N + lam penalty. y has two columns, time and event (1, or 0 where the time is censored);
    one column is a time that always ended in an event. A structured array is taken too, as scikit-survival has them: a
    boolean field is the event, the other one the time. Rows of one site are compared with each other only. What a row
    counts (sample_weight), it counts in its own term and in the sums over those at risk.

    Covariates that change with time have a row for each interval: y has three columns, start, stop and event, as R's
    Surv(start, stop, event), and the row is at risk after start, up to stop. They are also for late entry.

    ties:   "efron" or "breslow".
    strata: a column of X, of words or numbers, that has no coefficient: only rows of one stratum are compared, and
            each stratum has its own baseline hazard. Other parameters: see `FederatedGLM`.

    >>> import numpy as np
    >>> X, y = np.array([[1.0], [0.0], [1.0], [0.0], [1.0]]), [[1, 1], [2, 1], [3, 1], [4, 0], [5, 1]]
    >>> FederatedCoxRegression().fit(X, y, sites=["a"] * 5).coef_.round(2)
    array([0.34])
    """

    penalty: str | Regularizer = "none"
    _: KW_ONLY
    ties: str = "efron"
    strata: str | int | None = None
    fit_intercept: ClassVar[bool] = False  # type: ignore[misc]  # no parameter

    def predict(self, X: Any, sites: Any = None) -> Floats:
        r"""Return the logarithm of the hazard ratio to the mean row of the fit, $\langle b, x - \bar x \rangle$."""
        return self._scores(X, sites) - self.centre_

    def predict_hazard(self, X: Any, sites: Any = None) -> Floats:
        """Return the hazard ratio to the mean row of the fit."""
        return np.exp(self.predict(X, sites))

    def predict_survival(self, X: Any, times: Any, site: str | None = None) -> Floats:
        r"""Return $P(T > t \mid x)$ by rows and times, with the baseline hazard of `site` (Breslow's estimate).

        A missing or unknown site raises InputError.
        """
        scores = self.predict(X, None if site is None else np.full(_num_samples(X), str(site)))
        if site is None and len(self.sites_) > 1:
            raise InputError(f"each site has a baseline hazard; say which: site={self.sites_[0]!r}, ...")
        name = str(self.sites_[0]) if site is None else str(site)
        if name not in self.sites_:
            raise InputError(f"unknown site {name!r}; the model knows {', '.join(self.sites_)}")
        stratum, moments = self._parts(X)[3], coarse(np.asarray(times, float))
        cumulative = np.empty((len(scores), len(moments)))
        for label in [None] if stratum is None else np.unique(stratum):
            key = name if label is None else (name, str(label))
            if key not in self.baseline_:
                raise InputError(f"site {name!r} has no row of stratum {label!r}; leave such rows out")
            known, hazard = self.baseline_[key]
            places = np.searchsorted(coarse(known), moments, "right")
            cumulative[slice(None) if label is None else stratum == label] = np.concatenate([[0.0], hazard])[places]
        survival: Floats = np.exp(-np.exp(scores)[:, None] * cumulative)
        return survival

    def proportional_hazards(
        self, X: Any, y: Any, sites: Any = None, sample_weight: Any = None, *, transform: str = "km"
    ) -> DataTable:
        """Return the test of whether coefficients change with time, by column and for all, as R's cox.zph.

        transform: of time, "km", "identity" or "log". Sites send a vector and three matrices, sums over events.
        Penalised, bounded or unconverged fits raise InputError.
        """
        check_is_fitted(self)
        if self.penalty != "none" or self.bounds is not None or self.site_effects != "none":
            raise InputError("expected a fit without penalty, bounds and site effects; the test is of its estimates")
        if not self.converged_:
            raise InputError("expected a fit that converged to finite estimates, got one that did not; see its warning")
        estimator, rows = self._reading(X, y, sites, sample_weight)
        prepared = estimator._prepare(rows)
        assert isinstance(prepared.problem, Cox)
        point = fitted_point(self, prepared)
        return proportional_hazards(prepared.problem, point, estimator._names(), rows.y, transform)

    def score(self, X: Any, y: Any, sites: Any = None) -> float:
        """Return Harrell's concordance in sites and strata, 0.5 by chance; without such pairs raise InputError."""
        scores = self._scores(X, sites)
        where = divide(sites, len(scores))
        right, pairs, *_ = concordance(scores, self._targets(y, where), None, where.of_row, self._parts(X)[3])
        if not pairs > 0:
            raise InputError("expected rows of one site that can be compared, got none: there is no concordance")
        return float(right / pairs)

    def _family(self) -> Response:
        return CoxResponse(self.ties)

    def _targets(self, y: Any, sites: Sites) -> Floats:
        found = inputs.targets(inputs.times_and_events(y), len(sites.of_row), 2)
        found = found.reshape(len(found), -1)
        if found.shape[1] == 1:
            found = np.column_stack([found, np.ones(len(found))])
        if found.shape[1] not in (2, 3):
            raise InputError(
                f"y has {found.shape[1]} columns; give two, time and event (1, or 0 where censored), or three, start, "
                "stop and event"
            )
        inputs.finite_targets(found, sites, *["start", "time", "event"][-found.shape[1] :])
        return np.roll(found, -1, 1) if found.shape[1] == 3 else found

    def _with_strata(self, y: Floats, stratum: Any) -> Floats:
        if stratum is None:
            return y
        self.strata_, codes = np.unique(stratum, return_inverse=True)
        start = y[:, 2] if y.shape[1] > 2 else np.full(len(y), -LARGEST)
        return np.column_stack([y[:, :2], start, codes])

    def _set(self, model: Parameters) -> None:
        self.coef_, self.intercept_ = model.coef[0], 0.0

    def _finish(self, rows: Rows) -> None:
        """baseline_: for every site, or (site, stratum), its event times and the cumulative hazard of the mean row; a
        site keeps its own."""
        scores = rows.X @ self.coef_
        if self.site_effects != "none":
            scores += self.site_effects_.added(rows.X, np.array(rows.sites.names)[rows.sites.of_row], 0.0)
        self.centre_ = float(rows.shares(self.weights) @ scores)
        alone = rows._replace(X=(scores - self.centre_)[:, None]).by_site()  # one column, with the coefficient 1
        f = problem_of(CoxResponse("breslow"), alone, alone.shares(self.weights), False)
        assert isinstance(f, Cox)
        self.baseline_: dict[Any, tuple[Floats, Floats]] = {}
        for k, name in enumerate(rows.sites.names):
            for place, code in enumerate(f.strata(k)):
                times, hazard = f.baseline(f.start + 1, k, place)
                key = name if self.strata is None else (name, str(self.strata_[int(code)]))
                self.baseline_[key] = times.numpy(), hazard.numpy()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        tags.target_tags.two_d_labels = True
        return tags
