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
)
from fednmap.estimators.standardise import moments
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


def test_a_target_that_does_not_vary_has_no_path():
    found = FederatedLasso().path(X, np.full(len(X), 3.1), SITES)
    assert found.lambdas.tolist() == [0.0]
    assert FederatedLasso().fit(X, np.full(len(X), 3.1), SITES).predict(X) == pytest.approx(3.1)
