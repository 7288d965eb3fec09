"""Paths, the choice of lam on them, and standard errors."""

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from fednmap import InputError
from fednmap.estimators import (
    FederatedCoxRegression,
    FederatedCoxRegressionCV,
    FederatedElasticNet,
    FederatedGLM,
    FederatedLasso,
    FederatedLassoCV,
    FederatedLinearRegression,
    FederatedLogisticRegression,
    FederatedLogisticRegressionCV,
    FederatedPoissonRegressor,
)
from fednmap.estimators.fit_folder import plot_cv, plot_path

GROUPS = [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9]]


@pytest.fixture
def diabetes():
    X, y = load_diabetes(return_X_y=True, as_frame=True)
    return X, y.to_numpy(), np.arange(len(y)) % 4


FIRST = [
    FederatedLasso(tol=1e-9),
    FederatedElasticNet(l1_ratio=0.3, tol=1e-9),
    FederatedGLM("gaussian", "mcp", tol=1e-9),
    FederatedGLM("gaussian", "scad", tol=1e-9),
    FederatedGLM("gaussian", "group-lasso", groups=GROUPS, tol=1e-9),
    FederatedGLM("gaussian", "sparse-group-lasso", groups=GROUPS, tol=1e-9),
    FederatedPoissonRegressor("l1", tol=1e-9),
]


@pytest.mark.parametrize("estimator", FIRST, ids=str)
def test_a_path_begins_where_the_first_column_enters(estimator, diabetes):
    X, y, sites = diabetes
    first = estimator.path(X, y, sites, lambdas=3).lambdas[0]
    assert not estimator.set_params(lam=first * (1 + 1e-6)).fit(X, y, sites).coef_.any()
    assert estimator.set_params(lam=first * 0.98).fit(X, y, sites).coef_.any()


def test_a_path_is_its_fits(diabetes):
    X, y, sites = diabetes
    path = FederatedLasso(tol=1e-9).path(X, y, sites, lambdas=6)
    assert path.converged
    assert path.nonzero[0] == 0
    for lam, coefs, intercepts in zip(path.lambdas, path.coefs, path.intercepts, strict=True):
        alone = FederatedLasso(lam, tol=1e-9).fit(X, y, sites)
        assert coefs[0] == pytest.approx(alone.coef_, abs=1e-4, rel=1e-6)
        assert intercepts[0] == pytest.approx(alone.intercept_)
    entered = path.enters[~np.isnan(path.enters)]
    assert len(entered) == path.coefs[:, 0].any(0).sum()


def test_leaving_a_site_out_is_what_it_says(diabetes):
    X, y, sites = diabetes
    chosen = FederatedLassoCV(lambdas=5, cv="leave-one-site-out", tol=1e-9).fit(X, y, sites)
    out = sites == 2
    for lam, loss in zip(chosen.lambdas_, chosen.cv_losses_[2], strict=True):
        others = FederatedLasso(lam, tol=1e-9).fit(X[~out], y[~out], sites[~out])
        assert loss == pytest.approx(np.square(others.predict(X[out]) - y[out]).mean() / 2, rel=1e-6)
    assert chosen.lam_ == chosen.lam_min_ == chosen.lambdas_[chosen.cv_mean_.argmin()]
    assert chosen.folds_ == ("0", "1", "2", "3")
    assert chosen.coef_ == pytest.approx(FederatedLasso(chosen.lam_, tol=1e-9).fit(X, y, sites).coef_, abs=1e-4)


@pytest.mark.slow
def test_one_standard_error_is_sparser(diabetes):
    X, y, sites = diabetes
    least = FederatedLassoCV(lambdas=20).fit(X, y, sites)
    sparser = FederatedLassoCV(lambdas=20, select="1se").fit(X, y, sites)
    assert sparser.lam_ == least.lam_1se_ > least.lam_
    assert (sparser.coef_ != 0).sum() < (least.coef_ != 0).sum()
    bound = least.cv_mean_.min() + least.cv_se_[least.cv_mean_.argmin()]
    assert least.cv_mean_[least.lambdas_ > least.lam_1se_].min() > bound


def test_bic_finds_the_columns_that_count():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 30))
    y = X[:, :3] @ [1.0, -1.0, 0.5] + rng.normal(size=300)
    for select in ("bic", "ebic"):
        chosen = FederatedLassoCV(select=select, lambdas=30).fit(X, y, np.arange(300) % 3)
        assert set(np.flatnonzero(chosen.coef_)) >= {0, 1, 2}
        assert (chosen.coef_ != 0).sum() <= 6
    assert len(chosen.criterion_) == 30


@pytest.mark.filterwarnings("ignore:lam_ = .* of the grid")
def test_folds_hold_every_site_and_class():
    X, y = load_breast_cancer(return_X_y=True)
    sites = np.arange(len(y)) % 3
    chosen = FederatedLogisticRegressionCV(lambdas=[0.2, 0.1, 0.05, 0.02], cv=3).fit(X, y, sites)
    assert chosen.score(X, y) > 0.95
    assert chosen.cv_losses_.shape == (3, 4)


def test_cox_on_folds():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 6))
    time, censored = rng.exponential(np.exp(-X[:, 0])), rng.exponential(2, 200)
    y, sites = np.c_[np.minimum(time, censored), time <= censored], np.arange(200) % 4
    chosen = FederatedCoxRegressionCV(lambdas=8, cv="leave-one-site-out").fit(X, y, sites)
    assert chosen.coef_[0] > 0.5
    assert chosen.score(X, y, sites) > 0.65
    curves = chosen.predict_survival(X[:5], [0.0, 0.5, 1.0], site="2")
    assert (curves[:, 0] == 1).all()
    assert (np.diff(curves, axis=1) < 0).all()
    with pytest.raises(InputError, match="each site has a baseline hazard; say which"):
        chosen.predict_survival(X[:5], [1.0])


def test_pictures(diabetes, tmp_path):
    X, y, sites = diabetes
    chosen = FederatedLassoCV(lambdas=6, cv="leave-one-site-out").fit(X, y, sites)
    plot_path(chosen.path_, tmp_path / "path.png", chosen.lam_)
    plot_cv(chosen, tmp_path / "cv.png")
    X, y = load_wine(return_X_y=True)
    plot_path(FederatedLogisticRegression().path(X, y, lambdas=[0.1, 0.05]), tmp_path / "classes.png")
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in tmp_path.iterdir())


def test_errors_of_least_squares(diabetes):
    """The textbook: s^2 (A'A)^-1, A with a column of ones."""
    X, y, sites = diabetes
    found = FederatedLinearRegression(tol=1e-10).fit(X, y, sites).inference(X, y, sites)
    A = np.column_stack([X, np.ones(len(y))])
    estimate, left = np.linalg.lstsq(A, y)[0], len(y) - A.shape[1]
    error = np.sqrt(np.square(y - A @ estimate).sum() / left * np.diag(np.linalg.inv(A.T @ A)))
    assert found.names[-1] == "(intercept)"
    assert found.estimate == pytest.approx(estimate, rel=1e-5)
    assert found.error == pytest.approx(error, rel=1e-6)
    assert ((found.low < estimate) & (estimate < found.high)).all()


def test_errors_of_logistic_regression():
    X, y = load_breast_cancer(return_X_y=True)
    X = X[:, :4]
    sites = np.arange(len(y)) % 5
    found = FederatedLogisticRegression("none", tol=1e-10).fit(X, y, sites).inference(X, y, sites)
    scaled = StandardScaler().fit(X)
    share = LogisticRegression(C=np.inf, tol=1e-12, max_iter=10_000).fit(scaled.transform(X), y)
    p = share.predict_proba(scaled.transform(X))[:, 1]
    A = np.column_stack([X, np.ones(len(y))])
    error = np.sqrt(np.diag(np.linalg.inv(A.T @ ((p * (1 - p))[:, None] * A))))
    assert found.error == pytest.approx(error, rel=1e-4)


def test_a_debiased_lasso_is_least_squares(diabetes):
    """For a quadratic one Newton step from anywhere ends at the minimiser."""
    X, y, sites = diabetes
    debiased = FederatedLasso(5.0).fit(X, y, sites).inference(X, y, sites)
    assert debiased.estimate == pytest.approx(
        FederatedLinearRegression(tol=1e-10).fit(X, y, sites).inference(X, y, sites).estimate, rel=1e-4
    )


def test_errors_are_refused_where_there_are_none(diabetes):
    X, y, sites = diabetes
    with pytest.raises(InputError, match="expected more rows than coefficients, got 11 rows and 11 coefficients"):
        FederatedLasso(1.0).fit(X[:11], y[:11]).inference(X[:11], y[:11])
    half = np.full(len(y), 0.5)
    with pytest.raises(InputError, match="whole numbers"):
        FederatedCoxRegression().fit(X, y, sites, half).inference(X, y, sites, half)
    with pytest.raises(InputError, match="level is 95"):
        FederatedCoxRegression().fit(X, y, sites).inference(X, y, sites, level=95)


def test_sites_do_not_matter_but_weights_do(diabetes):
    X, y, _ = diabetes
    uneven = np.where(np.arange(len(y)) < 30, "small", "large")
    alone, both = FederatedLasso(0.5, tol=1e-9).fit(X, y), FederatedLasso(0.5, tol=1e-9).fit(X, y, uneven)
    assert both.coef_ == pytest.approx(alone.coef_, abs=1e-4)
    by_site = FederatedLasso(0.5, weights="sites").fit(X, y, uneven)
    weight = np.where(uneven == "small", 1 / 30, 1 / (len(y) - 30))
    by_row = FederatedLasso(0.5, tol=1e-9).fit(X, y, sample_weight=weight)
    assert by_site.coef_ == pytest.approx(by_row.coef_, abs=1e-2)
    assert abs(by_site.coef_ - both.coef_).max() > 10


def test_a_column_that_does_not_vary_gets_no_coefficient(diabetes):
    X, y, hospitals = diabetes
    X = X.assign(constant=3.0)
    fitted = FederatedLinearRegression(tol=1e-8).fit(X, y, hospitals)
    assert fitted.coef_[-1] == 0
    assert fitted.coef_[:-1] == pytest.approx(FederatedLinearRegression(tol=1e-8).fit(X.iloc[:, :-1], y).coef_, abs=0.1)
