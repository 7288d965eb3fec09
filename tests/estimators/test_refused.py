"""Estimators: what would be a wrong number without a word is refused, or right."""

import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from fednmap.estimators import (
    FederatedCoxRegression,
    FederatedCoxRegressionCV,
    FederatedGLMCV,
    FederatedLasso,
    FederatedLinearRegression,
    FederatedLogisticRegression,
    FederatedLogisticRegressionCV,
    FederatedPoissonRegressor,
)
from fednmap.estimators.prepare import moments
from fednmap.names import InputError
from fednmap.tables import as_word, read_sites

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 3))
SITES = np.repeat([0, 1, 2], [10, 20, 30])
TIMES = np.stack((RNG.exponential(size=60), RNG.integers(0, 2, 60)), 1)


@pytest.mark.parametrize("n", [100, 300, 1001])
def test_a_sparse_column_that_is_full_and_constant_has_no_deviation(n):
    table = sparse.csr_matrix(np.column_stack((np.full(n, 3.0), np.arange(n) % 3)))
    mean, deviation = moments(table, np.full(n, 1 / n))
    assert deviation[0] < 1e-12
    np.testing.assert_allclose(
        [mean[1], deviation[1]], [(np.arange(n) % 3).mean(), (np.arange(n) % 3).std()], rtol=1e-9
    )


def test_a_row_needs_a_site_also_in_pandas_words():
    for none in (None, float("nan"), pd.NA):
        with pytest.raises(InputError, match="row 1 has no site"):
            FederatedLinearRegression().fit(X, X[:, 0], np.array(["a", none, *["b"] * (len(X) - 2)], dtype=object))


def test_cox_by_sites_is_not_cross_validated():
    with pytest.raises(InputError, match="needs weights='samples'"):
        FederatedCoxRegressionCV(cv=3, weights="sites").fit(X, TIMES, SITES)


def test_no_standard_errors_of_cox_by_sites():
    fitted = FederatedCoxRegression(weights="sites").fit(X, TIMES, SITES)
    with pytest.raises(InputError, match="standard errors for weights='samples'"):
        fitted.inference(X, TIMES, SITES)


def test_huber_has_no_likelihood():
    with pytest.raises(InputError, match="huber has none"):
        FederatedGLMCV(family="huber", select="bic").fit(X, X[:, 0] + RNG.normal(size=60), SITES)


def test_labels_keep_all_their_digits():
    assert [as_word(v) for v in (1000001.0, 1000002.0, 2.0, 0.1234567891, "a")] == [
        "1000001",
        "1000002",
        "2",
        "0.1234567891",
        "a",
    ]


def test_a_column_of_dates_can_be_dropped(tmp_path):
    (tmp_path / "a.csv").write_text("seen,x\n2020-01-02,1\n2020-01-03,2\n")
    assert list(read_sites(f"csv:{tmp_path}", ["seen"])["a"].columns) == ["x"]
    with pytest.raises(InputError, match="'sen' is to be dropped, and no site has such a column"):
        read_sites(f"csv:{tmp_path}", ["seen", "sen"])


FRAME = pd.DataFrame(X, columns=["age", "bp", "wbc"])
HOSPITALS = np.repeat(["basel", "bern", "zug"], [10, 20, 30])
LABELS = np.arange(60) % 2


def put(values, row, value):
    values = np.array(values, float)
    values[row] = value
    return values


def frame(**columns):
    return FRAME.assign(**columns)


BAD = {
    "NaN": (lambda: linear(frame(bp=put(X[:, 1], 25, np.nan))), "'bp' has NaN in row 25 at site 'bern'"),
    "infinity": (lambda: linear(frame(bp=put(X[:, 1], 25, -np.inf))), "'bp' has infinity in row 25 at site 'bern'"),
    "huge": (lambda: linear(frame(bp=put(X[:, 1], 25, 1e200))), "'bp' has 1e+200 in row 25 at site 'bern'; beyond"),
    "huge y": (lambda: linear(FRAME, put(X[:, 0], 25, 1e200)), "y has 1e+200 in row 25 at site 'bern'"),
    "infinite time": (lambda: cox(put(TIMES, (45, 0), np.inf)), "time has infinity in row 45 at site 'zug'"),
    "negative time": (lambda: cox(put(TIMES, (45, 0), -1)), "the time is -1 in row 45 at site 'zug'"),
    "event": (lambda: cox(put(TIMES, (45, 1), 2)), "the event is 2 in row 45 at site 'zug'"),
    "censored": (lambda: cox(TIMES * [1, 0]), "there is no event at any site"),
    "counts": (lambda: FederatedPoissonRegressor().fit(FRAME, put(LABELS, 45, -2), HOSPITALS), "y is -2 in row 45 at"),
    "one class": (lambda: logistic(np.ones(60)), "one class only, 1.0, at all sites"),
    "one row": (lambda: linear(FRAME, sites=np.r_[["solo"], HOSPITALS[1:]]), "site 'solo' has one sample"),
    "missing": (lambda: linear(frame(bp=np.where(HOSPITALS == "zug", np.nan, 1))), "'bp' has no value at site 'zug'"),
    "twice": (lambda: linear(FRAME.set_axis(["a", "a", "b"], axis=1)), "two columns called 'a'"),
    "no columns": (lambda: linear(FRAME[[]]), "X has no columns"),
    "words": (lambda: linear(frame(sex="f")), "column 'sex' holds words, such as 'f'"),
    "words in y": (lambda: linear(FRAME, np.repeat(["1", "x"], 30)), "y holds words, such as 'x' in row 30"),
    "negative weight": (lambda: weighted(put(np.ones(60), 12, -1)), "sample_weight is -1 in row 12 at site 'bern'"),
    "NaN weight": (lambda: weighted(put(np.ones(60), 12, np.nan)), "sample_weight is nan in row 12 at site 'bern'"),
    "weights": (lambda: weighted(np.ones(5)), "sample_weight has shape (5,); give one number per row, 60 in all"),
    "no weight": (lambda: weighted(np.zeros(60)), "at least one non-zero"),
    "one row weighs": (lambda: weighted(put(np.ones(60), slice(0, 9), 0)), "site 'basel' has one sample"),
    "sites": (lambda: linear(FRAME, sites=HOSPITALS[1:]), "sites has shape (59,); give one site per row, 60 in all"),
    "tol": (lambda: FederatedLasso(tol="small").fit(FRAME, X[:, 0]), "tol is 'small'"),
    "rounds": (lambda: FederatedLasso(max_rounds=2.5).fit(FRAME, X[:, 0]), "max_rounds is 2.5; it must be a whole"),
    "class at one site": (
        lambda: FederatedLogisticRegressionCV(cv="leave-one-site-out").fit(
            FRAME, np.where(HOSPITALS == "zug", 2, LABELS), HOSPITALS
        ),
        "without zug: no row of class '2' is left",
    ),
    "events at one site": (
        lambda: FederatedCoxRegressionCV(cv="leave-one-site-out").fit(
            FRAME, np.c_[TIMES[:, 0], HOSPITALS == "zug"], HOSPITALS
        ),
        "without zug: there is no event",
    ),
}


def linear(table, y=X[:, 0], sites=HOSPITALS):
    return FederatedLinearRegression().fit(table, y, sites)


def weighted(weight):
    return FederatedLinearRegression().fit(FRAME, X[:, 0], HOSPITALS, weight)


def cox(y):
    return FederatedCoxRegression().fit(FRAME, y, HOSPITALS)


def logistic(y):
    return FederatedLogisticRegression().fit(FRAME, y, HOSPITALS)


@pytest.mark.parametrize("why", BAD)
def test_what_is_wrong_is_one_line_with_column_and_site(why):
    attempt, words = BAD[why]
    with pytest.raises(InputError) as refused:
        attempt()
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_is_odd_but_right():
    """A constant column, a site whose rows all weigh 0, one without events, sites of one class each."""
    fitted = linear(frame(bp=3.0))
    assert fitted.coef_[1] == 0
    others = HOSPITALS != "basel"
    assert weighted(others * 1.0).coef_ == pytest.approx(
        FederatedLinearRegression().fit(X[others], X[others, 0], HOSPITALS[others]).coef_
    )
    assert list(weighted(others * 1.0).sites_) == ["bern", "zug"]
    quiet = HOSPITALS == "zug"
    assert cox(TIMES * np.c_[np.ones(60), ~quiet]).coef_ == pytest.approx(
        FederatedCoxRegression().fit(FRAME[~quiet], TIMES[~quiet], HOSPITALS[~quiet]).coef_, abs=1e-5
    )
    assert logistic(quiet).converged_


def test_a_target_that_does_not_vary_has_no_path():
    found = FederatedLasso().path(X, np.full(len(X), 3.1), SITES)
    assert found.lambdas.tolist() == [0.0]
    assert FederatedLasso().fit(X, np.full(len(X), 3.1), SITES).predict(X) == pytest.approx(3.1)
