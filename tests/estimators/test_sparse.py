"""Estimators of sparse rows: a table that was made dense on the way would be noticed by the memory it takes."""

from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_array

from fednmap.estimators import (
    FederatedCoxRegression,
    FederatedCoxRegressionCV,
    FederatedGLMCV,
    FederatedHuberRegressor,
    FederatedLasso,
    FederatedLassoCV,
    FederatedLogisticRegression,
    FederatedLogisticRegressionCV,
    FederatedPoissonRegressor,
    FederatedPoissonRegressorCV,
)

STATUS = Path("/proc/self/status")
ROWS, COLUMNS, EACH = 60_000, 400, 2
DENSE = 8 * ROWS * COLUMNS  # 192 MB
SITES = np.arange(ROWS) * 5 // ROWS

pytestmark = [
    pytest.mark.skipif(not STATUS.exists(), reason="the peak of memory is read from /proc"),
    pytest.mark.filterwarnings("ignore:lam_ = .* of the grid"),
]


def peak():
    return 1024 * int(STATUS.read_text().split("VmHWM:")[1].split()[0])


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    ends = np.arange(ROWS + 1, dtype=np.int32) * EACH
    X = csr_array((rng.random(EACH * ROWS), rng.integers(0, COLUMNS, EACH * ROWS, dtype=np.int32), ends))
    X.sum_duplicates()
    score = X @ rng.normal(size=COLUMNS)
    return X, score + rng.normal(size=ROWS)


LOOSE = {"tol": 1e-3, "max_rounds": 50}
TIMES = np.random.default_rng(1).exponential(size=ROWS)
LABELS = {"standardised": {}, "as they are": {"standardize": False}, "no intercept": {"fit_intercept": False}}
CASES = {
    **{
        f"logistic, {name}": lambda X, y, o=o: FederatedLogisticRegression(lam=0.01, **o, **LOOSE).fit(X, y > 0, SITES)
        for name, o in LABELS.items()
    },
    "lasso": lambda X, y: FederatedLasso(0.01, **LOOSE).fit(X, y, SITES),
    "poisson": lambda X, y: FederatedPoissonRegressor("l1", 0.01, **LOOSE).fit(X, np.rint(y**2), SITES),
    "huber": lambda X, y: FederatedHuberRegressor(penalty="l1", lam=0.01, **LOOSE).fit(X, y, SITES),
    "mcp": lambda X, y: FederatedLogisticRegression("mcp", 0.01, **LOOSE).fit(X, y > 0, SITES),
    "cox": lambda X, y: FederatedCoxRegression("l1", 0.01, **LOOSE).fit(X, np.c_[TIMES, y > 0], SITES),
    "path": lambda X, y: FederatedLogisticRegression(**LOOSE).path(X, y > 0, SITES, lambdas=4),
    "sites mixed": lambda X, y: FederatedLasso(0.01, **LOOSE).fit(X, y, SITES[::-1] % 3),
    "folds": lambda X, y: FederatedLassoCV(lambdas=3, cv=2, **LOOSE).fit(X, y, SITES),
    "sites left out": lambda X, y: FederatedLogisticRegressionCV(lambdas=2, cv="leave-one-site-out", **LOOSE).fit(
        X, y > 0, SITES
    ),
    "predict": lambda X, y: FederatedLasso(0.1, **LOOSE).fit(X[:1000], y[:1000]).predict(X),
    "score": lambda X, y: FederatedLogisticRegression(lam=0.1, **LOOSE).fit(X[:1000], y[:1000] > 0).score(X, y > 0),
}


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("what", CASES)
def test_never_dense(what, table):
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before = peak()
    CASES[what](*table)
    assert peak() - before < DENSE / 3


def test_a_dense_copy_would_be_noticed(table):
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    assert table[0].toarray().sum() > 0
    assert peak() - before > 0.9 * DENSE


FOLDED = {
    "lasso": lambda o: FederatedLassoCV(**o),
    "logistic": lambda o: FederatedLogisticRegressionCV(**o),
    "poisson": lambda o: FederatedPoissonRegressorCV(**o),
    "huber": lambda o: FederatedGLMCV("huber", **o),
    "cox": lambda o: FederatedCoxRegressionCV(**o),
}


@pytest.mark.parametrize("weights", ["samples", "sites"])
@pytest.mark.parametrize("cv", [3, "leave-one-site-out"])
@pytest.mark.parametrize("family", FOLDED)
def test_folds_of_sparse_rows_are_those_of_dense_rows(family, cv, weights):
    """Held-out rows that are not copied count 0; one column is constant in all rows but one."""
    if family == "cox" and weights == "sites":
        pytest.skip("refused")
    rng = np.random.default_rng(0)
    X = rng.normal(size=(90, 6)) * (rng.random((90, 6)) < 0.4)
    X[:, 5] = 3.0
    X[7, 5] = 0.0
    score = X[:, 0] - X[:, 1]
    targets = {
        "logistic": score + rng.logistic(size=90) > 0,
        "poisson": rng.poisson(np.exp(0.5 * score)),
        "cox": np.c_[rng.exponential(np.exp(-score)), rng.random(90) < 0.8],
    }
    y, sites = targets.get(family, score + rng.normal(size=90)), np.arange(90) % 3
    options = {"lambdas": [0.1, 0.01], "cv": cv, "tol": 1e-9, "weights": weights}
    for kept in (None, rng.integers(1, 4, 90)):
        dense, sparse = (FOLDED[family](options).fit(rows, y, sites, kept) for rows in (X, csr_array(X)))
        assert np.allclose(dense.cv_losses_, sparse.cv_losses_, rtol=1e-7, atol=1e-9)
        assert np.allclose(dense.coef_, sparse.coef_, atol=1e-6)
