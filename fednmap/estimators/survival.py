"""Cox regression, each site a stratum."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np

from fednmap.core import Regularizer
from fednmap.estimators import rows as inputs
from fednmap.estimators.base import AnyPenalty
from fednmap.estimators.families import Cox
from fednmap.estimators.prepare import Parameters
from fednmap.estimators.rows import Floats, Rows
from fednmap.names import InputError
from fednmap.problems.families import Response
from fednmap.tables.table import Sites, divide


@dataclass(eq=False, repr=False)
class FederatedCoxRegression(AnyPenalty):
    """Proportional hazards h(t | x) = h_site(t) exp(<b, x>), every site with a baseline hazard of its own.

    The partial likelihood is then a sum over sites, so that the fit is that of the stratified model on the pooled rows:
    - log partial likelihood / N + lam penalty. y has two columns, time and event (1, or 0 where the time is censored);
    one column is a time that always ended in an event. A structured array is taken too, as scikit-survival has them: a
    boolean field is the event, the other one the time. Rows of one site are compared with each other only. What a row
    counts (sample_weight), it counts in its own term and in the sums over those at risk.

    ties: "efron" or "breslow". Other parameters: see `FederatedGLM`.
    """

    penalty: str | Regularizer = "none"
    _: KW_ONLY
    ties: str = "efron"
    fit_intercept: ClassVar[bool] = False  # type: ignore[misc]  # no parameter

    def predict(self, X: Any) -> Floats:
        """The logarithm of the hazard ratio to the mean row of the fit, <b, x - mean>."""
        return self._scores(X) - self.centre_

    def predict_hazard(self, X: Any) -> Floats:
        """The hazard ratio to the mean row of the fit, exp(<b, x - mean>)."""
        return np.exp(self.predict(X))

    def predict_survival(self, X: Any, times: Any, site: str | None = None) -> Floats:
        """P(T > t | x) for every row and time, with the baseline hazard of `site` (Breslow's estimate): (N, times)."""
        scores = self.predict(X)
        if site is None and len(self.sites_) > 1:
            raise InputError(f"each site has a baseline hazard; say which: site={self.sites_[0]!r}, ...")
        name = str(self.sites_[0]) if site is None else str(site)
        if name not in self.baseline_:
            raise InputError(f"unknown site {name!r}; the model knows {', '.join(self.baseline_)}")
        moments, hazard = self.baseline_[name]
        places = np.searchsorted(moments, np.asarray(times, float), "right")
        cumulative = np.concatenate([[0.0], hazard])[places]
        survival: Floats = np.exp(-np.exp(scores)[:, None] * cumulative)
        return survival

    def score(self, X: Any, y: Any, sites: Any = None) -> float:
        """Harrell's concordance, of pairs within a site: 1 where hazards order the events perfectly, 0.5 by chance."""
        scores = self._scores(X)
        where = divide(sites, len(scores))
        y = self._targets(y, where)
        sums = np.sum([concordant(scores[r], y[r]) for r in (where.of_row == k for k in range(len(where)))], 0)
        if not sums[1] > 0:
            raise InputError("no two rows of one site can be compared, so that there is no concordance")
        return float(sums[0] / sums[1])

    def _family(self) -> Response:
        return Cox(self.ties)

    def _targets(self, y: Any, sites: Sites) -> Floats:
        found = inputs.targets(inputs.times_and_events(y), len(sites.of_row), 2)
        found = found.reshape(len(found), -1)
        if found.shape[1] == 1:
            found = np.column_stack([found, np.ones(len(found))])
        if found.shape[1] != 2:
            raise InputError(f"y has {found.shape[1]} columns; give two, time and event (1, or 0 where censored)")
        inputs.finite_targets(found, sites, "time", "event")
        return found

    def _set(self, model: Parameters) -> None:
        self.coef_, self.intercept_ = model.coef[0], 0.0

    def _finish(self, rows: Rows) -> None:
        """baseline_: for every site its event times and the cumulative hazard of the mean row; a site keeps its own."""
        scores = rows.X @ self.coef_
        self.centre_ = float(rows.shares(self.weights) @ scores)
        scores = scores - self.centre_
        self.baseline_ = {
            name: cumulative_hazard(scores[mine], rows.y[mine], rows.weight[mine])
            for name, mine in ((name, rows.sites.of_row == k) for k, name in enumerate(rows.sites.names))
        }

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        tags.target_tags.two_d_labels = True
        return tags


def cumulative_hazard(scores: Floats, y: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """Breslow's estimate: the event times, and the sum of events / sum over those at risk of exp(score) up to each.

    By logarithms, so that no score is too large.
    """
    times, event = y[:, 0], y[:, 1] == 1
    moments, which = np.unique(times[event], return_inverse=True)
    deaths = np.bincount(which, weight[event], len(moments))
    order = np.argsort(times)
    risk = np.logaddexp.accumulate((scores + np.log(weight))[order][::-1])[::-1]
    at_risk = risk[np.searchsorted(times[order], moments, "left")]
    with np.errstate(over="ignore"):  # an infinite hazard, where scores are far apart
        return moments, np.cumsum(np.exp(np.log(deaths) - at_risk))


def concordant(scores: Floats, y: Floats) -> tuple[float, float]:
    """The number of ordered pairs that the scores order too (ties count half), and of all that can be compared."""
    right = total = 0.0
    time, event = y[:, 0], y[:, 1] == 1
    for i in np.flatnonzero(event):
        later = (time > time[i]) | ((time == time[i]) & ~event)
        difference = scores[i] - scores[later]
        right += float(((difference > 0) + 0.5 * (difference == 0)).sum())
        total += int(later.sum())
    return right, total
