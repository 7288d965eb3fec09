"""Calibration, ROC and concordance of predictions, from sums over sites."""

import shutil
import subprocess

import numpy as np
import pytest
from sklearn.metrics import brier_score_loss, roc_auc_score, roc_curve

from fednmap import InputError
from fednmap.estimators import (
    FederatedBinomialRegressor,
    FederatedCoxRegression,
    FederatedGLM,
    FederatedLassoCV,
    FederatedLogisticRegression,
    FederatedOrdinalRegression,
    evaluate,
)
from fednmap.estimators.survival import concordance_sums

N = 240
rng = np.random.default_rng(0)
X = rng.normal(size=(N, 4)).round(1)
SCORE = X @ [1.0, -1.0, 0.5, 0.0]
SITE = np.array(["basel", "bern", "chur"])[np.arange(N) % 3]
TARGETS = {
    "gaussian": SCORE + rng.normal(size=N),
    "logistic": np.where(SCORE + rng.logistic(size=N) > 0, "sick", "healthy"),
    "poisson": rng.poisson(np.exp(SCORE / 2)) * 1.0,
    "gamma": np.exp(SCORE / 2) * rng.gamma(2, 0.5, N),
    "negative-binomial": rng.poisson(np.exp(SCORE / 2) * rng.gamma(2, 0.5, N)) * 1.0,
}
TIMES = np.column_stack([rng.exponential(np.exp(-SCORE)).round(1) + 0.1, rng.random(N) < 0.7])
HALF = np.arange(N) < N // 2


def fitted(family):
    return FederatedGLM(family, "ridge", 0.3).fit(X[HALF], TARGETS[family][HALF], SITE[HALF])


def test_the_area_is_that_of_all_pairs_and_its_error_is_delongs():
    model = fitted("logistic")
    found = evaluate(model, X[~HALF], TARGETS["logistic"][~HALF], SITE[~HALF])
    sick, p = TARGETS["logistic"][~HALF] == "sick", model.predict_proba(X[~HALF])[:, 1]
    pairs = (p[sick][:, None] > p[~sick]) + 0.5 * (p[sick][:, None] == p[~sick])
    assert found.auc.value == pytest.approx(pairs.mean(), abs=1e-12)
    assert found.auc.value == pytest.approx(roc_auc_score(sick, p), abs=1e-12)
    error = np.sqrt(sum(pairs.mean(k).var(ddof=1) / pairs.shape[1 - k] for k in (0, 1)))
    assert found.auc.high - found.auc.value == pytest.approx(1.959964 * error, rel=1e-6)
    assert found.squared_error == pytest.approx(brier_score_loss(sick, p))
    false, true, _ = roc_curve(sick, p, drop_intermediate=False)
    ours = np.array(found.roc.rows)[::-1, 1:]
    assert ours == pytest.approx(np.column_stack([true, 1 - false]), abs=1e-12)


@pytest.mark.parametrize("family", list(TARGETS))
def test_slope_and_intercept_are_those_of_a_model_of_the_score(family):
    model = fitted(family)
    found = evaluate(model, X[~HALF], TARGETS[family][~HALF], SITE[~HALF])
    scores, y, where = model._scores(X[~HALF]), TARGETS[family][~HALF], SITE[~HALF]
    assert found.slope.value > 1.1  # the ridge made predictions too close to each other
    if family == "negative-binomial":  # whose dispersion a model of its own would estimate again
        return
    alone = FederatedGLM(family, "none", tol=1e-10).fit(scores[:, None], y, where)
    errors = alone.inference(scores[:, None], y, where)
    assert found.slope == pytest.approx((errors.estimate[0], errors.low[0], errors.high[0]), rel=2e-2)
    assert found.slope.value == pytest.approx(errors.estimate[0], rel=1e-7)
    table = np.column_stack([np.zeros(len(y)), scores])
    level = FederatedGLM(family, "none", offset=1, tol=1e-10).fit(table, y, where)
    assert found.intercept.value == pytest.approx(float(np.ravel(level.intercept_)[0]), abs=1e-7)
    if family in ("logistic", "poisson"):
        assert found.slope == pytest.approx((errors.estimate[0], errors.low[0], errors.high[0]), rel=1e-6)


@pytest.mark.parametrize("factor", [1.0, 60.0])
def test_ties_are_those_of_the_scores_whatever_rounding_makes_of_predictions(factor):
    """exp rounds by the place of a row in an array, and half of these scores times 60 have the prediction 0 or 1."""
    X = np.random.default_rng(0).integers(0, 4, (1003, 3)).astype(float)
    y = (X @ [0.5, -0.4, 0.2] + np.random.default_rng(1).logistic(size=1003) > 0).astype(int)
    where = np.random.default_rng(2).integers(0, 3, 1003).astype(str)
    model = FederatedLogisticRegression("none", tol=1e-9).fit(X, y, where)
    model.coef_ = factor * model.coef_
    found, scores = evaluate(model, X, y, where), model.decision_function(X)
    assert found.auc.value == pytest.approx(roc_auc_score(y, scores.round(9)), abs=1e-12)
    alone = FederatedLogisticRegression("none", tol=1e-12).fit(scores[:, None], y, where)
    assert found.slope.value == pytest.approx(float(alone.coef_[0, 0]), rel=1e-6)
    assert found.squared_error == pytest.approx(brier_score_loss(y, model.predict_proba(X)[:, 1]), rel=1e-12)


def test_a_common_grid_is_close_and_says_less():
    model = fitted("logistic")
    given = X, TARGETS["logistic"], SITE
    exact, coarse = evaluate(model, *given), evaluate(model, *given, grid=200)
    assert len(coarse.roc.rows) == 200
    assert coarse.auc == pytest.approx(exact.auc, abs=2e-3)
    assert coarse.slope == pytest.approx(exact.slope, abs=2e-2)
    assert coarse.squared_error == pytest.approx(exact.squared_error, abs=1e-3)
    alone = evaluate(model, *given[:2], grid=200)  # one site with all rows: the same sums
    assert alone.auc == coarse.auc
    assert sum(row[4] for row in coarse.calibration_curve.rows) == N


def test_weights_are_rows():
    weight = 1.0 + np.arange(N) % 3
    one = evaluate(fitted("logistic"), X, TARGETS["logistic"], SITE, weight)
    twice = np.repeat(np.arange(N), weight.astype(int))
    other = evaluate(fitted("logistic"), X[twice], TARGETS["logistic"][twice], SITE[twice])
    assert one.auc == pytest.approx(other.auc)
    assert one.slope == pytest.approx(other.slope)
    trials, share = 1 + np.arange(N) % 4, 1 / (1 + np.exp(-SCORE))
    y = np.column_stack([rng.binomial(trials, share), trials])
    found = evaluate(FederatedBinomialRegressor("none").fit(X, y, SITE), X, y, SITE)
    assert found.rows == trials.sum()
    assert found.slope.value == pytest.approx(1, abs=1e-5)
    assert found.intercept.value == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("cv", [3, "leave-one-site-out"])
@pytest.mark.parametrize("effects", ["none", "intercepts"])
def test_every_row_is_predicted_by_the_model_without_its_fold(cv, effects):
    y, options = TARGETS["logistic"], {"tol": 1e-9, "site_effects": effects}
    model = FederatedLogisticRegression("l1", 0.02, **options).fit(X, y, SITE)
    found = evaluate(model, X, y, SITE, cv=cv)
    if cv == "leave-one-site-out":
        scores = np.empty(N)
        for name in np.unique(SITE):
            out = name == SITE
            other = FederatedLogisticRegression("l1", 0.02, **options).fit(X[~out], y[~out], SITE[~out])
            scores[out] = other.decision_function(X[out], SITE[out])
        assert found.auc.value == pytest.approx(roc_auc_score(y == "sick", scores), abs=1e-9)
    assert found.rows == N
    assert found.auc.value < evaluate(model, X, y, SITE).auc.value


@pytest.mark.filterwarnings("ignore:lam_ = .* of the grid")
def test_the_lam_that_was_chosen_is_used():
    model = FederatedLassoCV(lambdas=5, cv=3).fit(X, TARGETS["gaussian"], SITE)
    found = evaluate(model, X, TARGETS["gaussian"], SITE, cv=3)
    k = int(np.flatnonzero(model.lambdas_ == model.lam_)[0])
    assert found.squared_error == pytest.approx(2 * model.cv_mean_[k], rel=1e-4)


def test_trials_have_the_measures_of_a_row_for_each():
    trials = 1 + np.arange(N) % 4
    y = np.column_stack([rng.binomial(trials, 1 / (1 + np.exp(-SCORE))), trials])
    model = FederatedBinomialRegressor("ridge", 0.1).fit(X, y, SITE)
    found, p = evaluate(model, X, y, SITE), model.predict(X).repeat(trials)
    each = np.concatenate([np.arange(n) < successes for successes, n in y])
    assert found.squared_error == pytest.approx(brier_score_loss(each, p))
    assert found.auc.value == pytest.approx(roc_auc_score(each, p))


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6, 1e9])
def test_the_unit_of_the_target_does_not_matter(unit):
    y = TARGETS["gaussian"] * unit
    model = FederatedGLM("gaussian", "ridge", 0.3).fit(X[HALF], y[HALF], SITE[HALF])
    found = evaluate(model, X[~HALF], y[~HALF] + 30 * unit, SITE[~HALF])  # far from what was fitted
    one = evaluate(fitted("gaussian"), X[~HALF], TARGETS["gaussian"][~HALF] + 30, SITE[~HALF])
    assert found.slope == pytest.approx(one.slope, rel=1e-5)
    assert np.array(found.intercept) / unit == pytest.approx(one.intercept, rel=1e-5)


def test_what_is_infinite_or_cannot_be_measured_is_nan():
    """One class only, classes that the score separates, counts of 0 alone, a site without events."""
    model, score = fitted("logistic"), fitted("logistic").decision_function(X)
    one = TARGETS["logistic"] == "sick"
    found = evaluate(model, X[one], TARGETS["logistic"][one], SITE[one])
    assert found.auc is None
    assert np.isnan([*found.slope, *found.intercept]).all()
    found = evaluate(model, X, np.where(score > 0, "sick", "healthy"), SITE)
    assert found.auc == (1, 1, 1)
    assert np.isnan(found.slope.value)
    assert np.isnan(evaluate(fitted("poisson"), X, np.zeros(N), SITE).slope.value)
    times = np.column_stack([TIMES[:, 0], TIMES[:, 1] * (SITE != "chur")])
    cox = FederatedCoxRegression("ridge", 0.3).fit(X, times, SITE)
    some = SITE != "chur"
    assert evaluate(cox, X, times, SITE).concordance == evaluate(cox, X[some], times[some], SITE[some]).concordance
    assert np.isnan(evaluate(cox, X[~some], times[~some], SITE[~some]).concordance.value)


def test_concordance_is_that_of_all_pairs_and_its_error_the_jackknifes():
    model = FederatedCoxRegression("ridge", 0.3).fit(X, TIMES, SITE)
    found = evaluate(model, X, TIMES, SITE)
    assert found.concordance.value == pytest.approx(model.score(X, TIMES, SITE))
    scores, weight = model.predict(X, SITE), np.ones(N)

    def share(weight):
        sums = sum(concordance_sums(scores[s == SITE], TIMES[s == SITE], weight[s == SITE]) for s in np.unique(SITE))
        return sums[0] / sums[1]

    influence = [(share(weight + 1e-5 * (np.arange(N) == i)) - share(weight)) / 1e-5 for i in range(N)]
    error = np.sqrt(np.square(influence).sum())
    assert found.concordance.high - found.concordance.value == pytest.approx(1.959964 * error, rel=1e-3)
    alone = FederatedCoxRegression().fit(scores[:, None], TIMES, SITE)
    assert found.slope.value == pytest.approx(alone.coef_[0], rel=1e-5)
    assert evaluate(model, X, TIMES, SITE, cv=3).concordance.value < found.concordance.value
    again = evaluate(model, X, np.column_stack([np.zeros(N), TIMES]), SITE)  # all at risk from 0
    assert again.concordance == pytest.approx(found.concordance)
    assert again.slope == pytest.approx(found.slope, rel=1e-5)


def test_tables_and_pictures(tmp_path):
    found = evaluate(fitted("logistic"), X, TARGETS["logistic"], SITE)
    assert [row[0] for row in found.table().rows] == [
        "AUC",
        "calibration slope",
        "calibration intercept",
        "Brier score",
    ]
    found.plot(tmp_path / "roc.png")
    evaluate(fitted("gamma"), X, TARGETS["gamma"], SITE).plot(tmp_path / "gamma.png")
    assert {p.name for p in tmp_path.iterdir()} == {"roc.png", "gamma.png"}
    constant = evaluate(FederatedLogisticRegression("l1", 9.0).fit(X, TARGETS["logistic"]), X, TARGETS["logistic"])
    assert constant.auc.value == 0.5
    assert np.isnan(constant.slope.value)


def test_what_has_no_such_measures_is_refused():
    stage = np.digitize(SCORE, [-1, 1])
    for model in (FederatedOrdinalRegression("none"), FederatedLogisticRegression()):
        with pytest.raises(InputError, match="one score for each row"):
            evaluate(model.fit(X, stage, SITE), X, stage, SITE)
    with pytest.raises(InputError, match="expected a label"):
        evaluate(fitted("logistic"), X, stage, SITE)
    with pytest.raises(InputError, match="ascending"):
        evaluate(fitted("gamma"), X, TARGETS["gamma"], SITE, grid=10)
    with pytest.raises(InputError, match="no calibration curve"):
        evaluate(FederatedCoxRegression().fit(X, TIMES, SITE), X, TIMES, SITE).plot("never.png")


def test_a_group_of_one_class_can_be_drawn(tmp_path):
    x = np.concatenate([np.linspace(-9, -3, 569), np.linspace(-1, 1, 120), np.linspace(3, 9, 569)])[:, None]
    y = (x[:, 0] + np.sin(9 * x[:, 0]) > 0).astype(int)
    found = evaluate(FederatedLogisticRegression("l1", 0.01).fit(x, y), x, y)
    rows = np.array(found.calibration_curve.rows)
    assert {0.0, 1.0} <= set(rows[:, 1])
    assert (rows[:, 2] <= rows[:, 1]).all()
    assert (rows[:, 1] <= rows[:, 3]).all()
    found.plot(tmp_path / "roc.png")


R = """
suppressMessages(library(survival))
d <- read.csv("d.csv")
y <- with(d, if (any(start > 0)) Surv(start, time, event) else Surv(time, event))
c <- concordance(y ~ score + strata(site), d, weights = weight, reverse = TRUE)
f <- coxph(y ~ score + strata(site), d, weights = weight, robust = FALSE)
cat(format(c(c$concordance, sqrt(c$var), coef(f), sqrt(f$var)), digits = 15))
"""


@pytest.mark.slow
@pytest.mark.parametrize("case", ["plain", "weights", "ties", "start"])
def test_concordance_and_slope_are_those_of_r(tmp_path, case):
    rscript = shutil.which("Rscript")
    if rscript is None:
        pytest.skip("needs Rscript with survival")
    weight = 1.0 + np.arange(N) % 4 if case == "weights" else np.ones(N)
    times = TIMES.copy()
    if case == "ties":
        times[:, 0] = np.ceil(3 * times[:, 0])
    start = np.where(case == "start", 0.5 * TIMES[:, 0] * (np.arange(N) % 2), 0.0)
    y = np.column_stack([start, times]) if case == "start" else times
    model = FederatedCoxRegression("ridge", 0.3).fit(X, y, SITE)
    rows = np.column_stack([start, times, model.predict(X), np.unique(SITE, return_inverse=True)[1], weight])
    head = "start,time,event,score,site,weight"
    np.savetxt(tmp_path / "d.csv", rows, delimiter=",", fmt="%.17g", header=head, comments="")
    (tmp_path / "run.R").write_text(R)
    done = subprocess.run([rscript, "run.R"], cwd=tmp_path, check=True, capture_output=True, text=True)
    found = evaluate(model, X, y, SITE, weight)
    ours = [[f.value, (f.high - f.value) / 1.959963984540054] for f in (found.concordance, found.slope)]
    assert np.ravel(ours) == pytest.approx([float(word) for word in done.stdout.split()], rel=1e-7)
