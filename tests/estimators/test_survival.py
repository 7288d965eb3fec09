"""Survival curves, the log-rank test and the test of proportional hazards, against R's survival."""

import json
import shutil
import subprocess

import numpy as np
import pandas as pd
import pytest

from fednmap import InputError
from fednmap.estimators import FederatedCoxRegression, kaplan_meier

RNG = np.random.default_rng(1)
TIME, EVENT = RNG.integers(1, 20, 90).astype(float), (RNG.random(90) < 0.6).astype(float)
GROUP, SITE = RNG.choice(["a", "b", "c"], 90), np.arange(90) % 3
Y = np.column_stack([TIME, EVENT])


def test_a_curve_is_its_definition_and_does_not_depend_on_sites():
    found, pooled = kaplan_meier(Y, GROUP, SITE), kaplan_meier(Y, GROUP)
    assert (found.survival == pooled.survival).all()
    assert found.chi2 == pytest.approx(pooled.chi2)
    for k, name in enumerate(found.groups):
        own, left = Y[name == GROUP], 1.0
        for j, t in enumerate(found.times):
            at_risk = (own[:, 0] >= t).sum()
            died = ((own[:, 0] == t) & (own[:, 1] == 1)).sum()
            assert (found.at_risk[k, j], found.events[k, j]) == (at_risk, died)
            left *= 1 - (died / at_risk if at_risk else 0)
            assert found.survival[k, j] == pytest.approx(left)
    assert found.at([0, 100])[:, 0] == pytest.approx(1)
    assert len(found.table().rows) == (found.events > 0).sum()


def test_times_that_differ_by_rounding_are_one_time():
    """As in R's survival: 0.1 + 0.2 is not 0.3, and a start of 3 * 0.1 is not before a stop of 0.3."""
    x, tenths = RNG.normal(size=(90, 2)), 0.1 * np.arange(20)
    start = np.where(np.arange(90) % 2, tenths[(TIME - 1).astype(int)], 0.0)
    given = np.column_stack([start, (TIME + 2) / 10 - 0.2, EVENT])
    exact = np.column_stack([start.round(9), (TIME / 10).round(9), EVENT])
    assert (given != exact).any(0)[:2].all()
    one, other = (FederatedCoxRegression(tol=1e-9).fit(x, y, SITE) for y in (given, exact))
    assert one.coef_ == pytest.approx(other.coef_, rel=1e-9)
    assert one.score(x, given, SITE) == other.score(x, exact, SITE)
    when = np.arange(1, 20) / 10
    assert one.predict_survival(x, when, "1") == pytest.approx(other.predict_survival(x, when, "1"), rel=1e-7)
    for times in (None, when[::4]):
        curves = [kaplan_meier(y, GROUP, SITE, times=times) for y in (given, exact)]
        assert curves[0].survival == pytest.approx(curves[1].survival, rel=1e-12)
        assert curves[0].at(when) == pytest.approx(curves[1].at(when), rel=1e-12)
    tests = [m.proportional_hazards(x, y, SITE).rows for m, y in ((one, given), (other, exact))]
    assert [row[1] for row in tests[0]] == pytest.approx([row[1] for row in tests[1]], rel=1e-6)


def test_a_grid_is_the_curve_of_rounded_times():
    grid = np.array([4.0, 8.0, 12.0, 16.0, 20.0])
    found = kaplan_meier(Y, GROUP, SITE, times=grid)
    rounded = kaplan_meier(np.column_stack([np.ceil(TIME / 4) * 4, EVENT]), GROUP)
    assert found.survival == pytest.approx(rounded.survival)
    assert found.chi2 == pytest.approx(rounded.chi2)
    cut = kaplan_meier(Y, GROUP, SITE, times=grid[:2])
    assert cut.survival == pytest.approx(found.survival[:, :2])


def test_a_stratified_test_of_equal_sites_and_of_intervals():
    start = np.column_stack([np.zeros(90), TIME, EVENT])
    assert kaplan_meier(start, GROUP).survival == pytest.approx(kaplan_meier(Y, GROUP).survival)
    one = kaplan_meier(Y, GROUP, np.zeros(90), stratify=True)
    assert one.chi2 == pytest.approx(kaplan_meier(Y, GROUP).chi2)
    assert np.isnan(kaplan_meier(Y).p_value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"y": TIME}, "expected y with the columns time and event"),
        ({"y": np.column_stack([TIME, TIME])}, "expected y with the columns time and event"),
        ({"y": Y, "group": GROUP[:5]}, "y has 90 rows and group has 5"),
        ({"y": Y, "times": [3, 2]}, "expected times as ascending numbers"),
        ({"y": Y, "level": 95}, "level is 95"),
        ({"y": [[0, 2, 1], [5, 1, 1]]}, "expected start < time, got 5 and 1 in row 1"),
    ],
)
def test_what_is_no_curve_is_refused(given, words):
    with pytest.raises(InputError, match=words):
        kaplan_meier(**given)


def test_a_group_that_is_at_risk_with_no_other_at_an_event_says_nothing():
    y, group = [[1, 0], [2, 1], [3, 1], [4, 1], [5, 1], [2.5, 1]], np.array(["c", "a", "b", "b", "a", "b"])
    found, without = kaplan_meier(y, group), kaplan_meier(y[1:], group[1:])
    assert (found.df, found.chi2) == (1, pytest.approx(0.259648, abs=1e-6))  # survdiff in R's survival
    assert found.p_value == pytest.approx(without.p_value)
    for y, given in (([[1, 0], [2, 0], [3, 0], [4, 0]], {}), ([[1, 1], [2, 1], [3, 1], [4, 1]], {"stratify": True})):
        nothing = kaplan_meier(y, ["a", "a", "b", "b"], ["s", "s", "t", "t"], **given)
        assert nothing.df == 0
        assert np.isnan(nothing.p_value)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_proportional_hazards_needs_finite_estimates():
    X, y = np.arange(8.0)[:, None] < 4, np.column_stack([np.arange(1.0, 9.0), np.ones(8)])
    model = FederatedCoxRegression().fit(X, y)
    with pytest.raises(InputError, match="expected a fit that converged to finite estimates"):
        model.proportional_hazards(X, y)


SURVIVAL = """
library(survival); given <- commandArgs(TRUE); d <- read.csv(given[1])
n <- function(v) paste(format(v, digits = 16), collapse = ",")
fit <- survfit(Surv(time, event) ~ group, d); one <- survdiff(Surv(time, event) ~ group, d)
two <- survdiff(Surv(time, event) ~ group + strata(site), d)
cox <- coxph(Surv(start, time, event) ~ x1 + x2 + x3 + strata(site), d, eps = 1e-12, ties = given[2])
flat <- coxph(Surv(time, event) ~ x1 + x2 + x3 + strata(site), d, eps = 1e-12, ties = given[2])
z <- function(fit, transform) n(cox.zph(fit, transform = transform)$table[, "chisq"])
cat(sprintf('{"surv": [%s], "error": [%s], "low": [%s], "high": [%s], "chi2": [%s, %s], ',
            n(fit$surv), n(fit$std.err * fit$surv), n(fit$lower), n(fit$upper), n(one$chisq), n(two$chisq)))
cat(sprintf('"late": [%s], "km": [%s], "log": [%s]}', z(cox, "identity"), z(flat, "km"), z(flat, "log")))
"""


@pytest.mark.slow
@pytest.mark.parametrize("ties", ["efron", "breslow"])
def test_curves_and_tests_are_those_of_survival(ties, tmp_path):
    if shutil.which("Rscript") is None:
        pytest.skip("R is not installed")
    X = RNG.normal(size=(90, 3))
    start = np.where(TIME > 2, 1.0, 0.0)
    frame = pd.DataFrame(X, columns=["x1", "x2", "x3"]).assign(
        time=TIME, event=EVENT, group=GROUP, site=SITE, start=start
    )
    frame.to_csv(tmp_path / "rows.csv", index=False)
    command = ["Rscript", "-e", SURVIVAL, str(tmp_path / "rows.csv"), ties]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.replace("NaN", "null").replace("NA", "null"))
    found = kaplan_meier(Y, GROUP, SITE)
    there = np.array([[bool((TIME[name == GROUP] == t).any()) for t in found.times] for name in found.groups])
    assert found.survival[there] == pytest.approx(told["surv"], abs=1e-9)
    for name in ("error", "low", "high"):
        known = [k for k, v in enumerate(told[name]) if v is not None]
        assert getattr(found, name)[there][known] == pytest.approx([told[name][k] for k in known], abs=1e-9)
    assert found.chi2 == pytest.approx(told["chi2"][0], rel=1e-8)
    assert kaplan_meier(Y, GROUP, SITE, stratify=True).chi2 == pytest.approx(told["chi2"][1], rel=1e-8)
    model = FederatedCoxRegression(ties=ties, tol=1e-11).fit(X, Y, SITE)
    for transform in ("km", "log"):
        own = [row[1] for row in model.proportional_hazards(X, Y, SITE, transform=transform).rows]
        assert own == pytest.approx(told[transform], rel=1e-6)
    late = np.column_stack([start, TIME, EVENT])
    model = FederatedCoxRegression(ties=ties, tol=1e-11).fit(X, late, SITE)
    own = [row[1] for row in model.proportional_hazards(X, late, SITE, transform="identity").rows]
    assert own == pytest.approx(told["late"], rel=1e-6)
