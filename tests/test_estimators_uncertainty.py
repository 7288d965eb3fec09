"""Standard errors: of several classes, of Huber's regression, with weights; over sites."""

import numpy as np
import pytest
from scipy.special import softmax
from sklearn.datasets import load_wine
from sklearn.exceptions import NotFittedError

from fednmap import InputError
from fednmap.estimators import (
    FederatedGLM,
    FederatedHuberRegressor,
    FederatedLasso,
    FederatedLassoCV,
    FederatedLinearRegression,
    FederatedLogisticRegression,
)

TIGHT = {"tol": 1e-10, "max_rounds": 3000}


def rows(n=300, p=3, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, p)) * [1.0, 10.0, 0.1][:p] + 5
    return X, X @ np.array([1.0, -0.1, 3.0])[:p] + rng.standard_t(3, n), np.arange(n) % 5


def with_one(X):
    return np.column_stack([X, np.ones(len(X))])


def test_multinomial_contrasts():
    """Against the information matrix of the model whose first class is the reference, by its definition."""
    X, y = load_wine(return_X_y=True)
    X = X[:, [1, 2]]
    fitted = FederatedLogisticRegression("none", **TIGHT).fit(X, y, np.arange(len(y)) % 3)
    found = fitted.inference(X, y, np.arange(len(y)) % 3)
    A = with_one(X)
    share = softmax(X @ fitted.coef_.T + fitted.intercept_, axis=1)
    information = np.zeros((6, 6))
    for j, k in np.ndindex(2, 2):
        curve = share[:, j + 1] * ((j == k) - share[:, k + 1])
        information[3 * j : 3 * j + 3, 3 * k : 3 * k + 3] = A.T @ (curve[:, None] * A)
    expected = np.sqrt(np.diag(np.linalg.inv(information))).reshape(2, 3)
    order = np.array([[0, 1, 6], [2, 3, 7], [4, 5, 8]])  # two columns and the intercept of each class
    for j in (0, 1):
        contrast = np.zeros((3, 9))
        contrast[range(3), order[j + 1]], contrast[range(3), order[0]] = 1, -1
        assert np.sqrt(np.diag(contrast @ found.covariance @ contrast.T)) == pytest.approx(expected[j], rel=1e-5)
    assert found.names[:2] == ("x0 [0]", "x1 [0]")
    assert found.names[-1] == "(intercept) [2]"
    assert found.estimate.reshape(-1)[:6].reshape(3, 2).sum(0) == pytest.approx(0, abs=1e-8)
    assert (found.p_value < 1).all()


def test_huber_is_the_sandwich_of_its_definition():
    X, y, sites = rows()
    fitted = FederatedHuberRegressor(penalty="none", **TIGHT).fit(X, y, sites)
    found = fitted.inference(X, y, sites)
    A, s, epsilon = with_one(X), fitted.scale_, 1.35
    r = y - A @ np.append(fitted.coef_, fitted.intercept_)
    inside = np.abs(r) <= epsilon * s
    u = np.clip(r / s, -epsilon, epsilon)
    scores = np.column_stack([-2 * u[:, None] * A, 1 - u**2])
    parts = np.column_stack([A, r / s])
    H = 2 / s * parts.T @ (inside[:, None] * parts)
    covariance = np.linalg.inv(H) @ scores.T @ scores @ np.linalg.inv(H)
    assert found.error == pytest.approx(np.sqrt(np.diag(covariance))[:4], rel=1e-4)
    textbook = s * np.sqrt(np.mean(u**2)) / np.mean(inside) * np.sqrt(np.diag(np.linalg.inv(A.T @ A)))
    assert found.error == pytest.approx(textbook, rel=0.15)


@pytest.mark.parametrize("family", ["gaussian", "logistic", "poisson"])
def test_whole_weights_are_copies_and_others_have_no_unit(family):
    X, y, sites = rows()
    y = {"gaussian": y, "logistic": (y > np.median(y)) * 1, "poisson": np.rint(np.abs(y))}[family]
    weight = np.random.default_rng(1).integers(1, 4, len(y))
    make = FederatedGLM(family, "none", **TIGHT)
    twice = np.repeat(np.arange(len(y)), weight)
    copied = make.fit(X[twice], y[twice], sites[twice])
    error = copied.inference(X[twice], y[twice], sites[twice]).error
    weighted = FederatedGLM(family, "none", **TIGHT).fit(X, y, sites, weight)
    assert weighted.coef_ == pytest.approx(copied.coef_, abs=1e-6)
    assert weighted.inference(X, y, sites, weight).error == pytest.approx(error, rel=1e-5)
    odd = weight + 0.25
    one, other = (make.fit(X, y, sites, c * odd).inference(X, y, sites, c * odd) for c in (1.0, 7.7))
    assert other.error == pytest.approx(one.error, rel=1e-6)
    assert other.estimate == pytest.approx(one.estimate, rel=1e-6)


def test_relative_weights_give_whites_errors():
    X, y, sites = rows()
    weight = np.random.default_rng(1).random(len(y)) + 0.1
    fitted = FederatedLinearRegression(**TIGHT).fit(X, y, sites, weight)
    A = with_one(X)
    r = y - A @ np.append(fitted.coef_, fitted.intercept_)
    bread = np.linalg.inv(A.T @ (weight[:, None] * A))
    meat = (weight * r)[:, None] * A
    expected = np.sqrt(np.diag(bread @ meat.T @ meat @ bread))
    assert fitted.inference(X, y, sites, weight).error == pytest.approx(expected, rel=1e-5)
    by_site = FederatedLinearRegression(weights="sites", **TIGHT).fit(X, y, sites < 1)
    assert np.isfinite(by_site.inference(X, y, sites < 1).error).all()


def test_path_and_inference_leave_a_fitted_estimator_alone():
    X, y, sites = rows()
    words = np.where(y > np.median(y), "yes", "no")
    fitted = FederatedLogisticRegression("none").fit(X, words, sites)
    before = dict(vars(fitted))
    other = FederatedLogisticRegression("l1").fit(X, words, sites)
    kept = dict(vars(other))
    other.path(X[:, :2], y > np.median(y), sites, lambdas=3)
    with pytest.raises(InputError, match="other classes"):
        fitted.inference(X, y > np.median(y), sites)
    with pytest.raises(InputError, match="other columns"):
        fitted.inference(X[:, :2], words, sites)
    fitted.inference(X, words, sites)
    other.bootstrap(X, y > np.median(y), sites, times=2)
    assert vars(fitted) == before
    assert vars(other) == kept
    assert set(other.predict(X)) == {"yes", "no"}


@pytest.mark.filterwarnings("ignore:lam_ = .* of the grid")
def test_criteria_know_weights():
    X, y, sites = rows()
    weight = np.random.default_rng(1).integers(1, 4, len(y))
    twice = np.repeat(np.arange(len(y)), weight)
    lambdas = [1.0, 0.1, 0.01]
    make = FederatedLassoCV(select="bic", lambdas=lambdas, **TIGHT)
    copied = make.fit(X[twice], y[twice], sites[twice]).criterion_
    assert make.fit(X, y, sites, weight).criterion_ == pytest.approx(copied)
    one = make.fit(X, y, sites, weight + 0.5).criterion_
    assert make.fit(X, y, sites, 9.3 * (weight + 0.5)).criterion_ == pytest.approx(one)


def test_bootstrap_over_sites():
    X, y, _ = rows(60)
    same = np.tile(X, (4, 1)), np.tile(y, 4), np.repeat(np.arange(4), 60)
    flat = FederatedLasso(0.01, **TIGHT).bootstrap(*same, times=5)
    assert flat.error == pytest.approx(0, abs=1e-7)  # sites that do not differ
    X, y, sites = rows(400)
    found = FederatedLinearRegression().bootstrap(X, y, np.arange(400) % 40, times=100)
    wald = FederatedLinearRegression().fit(X, y).inference(X, y)
    assert found.names == wald.names
    assert found.estimate == pytest.approx(wald.estimate, rel=1e-4)
    assert found.error == pytest.approx(wald.error, rel=0.5)  # rows that were dealt out at random
    assert found.draws.shape == (100, 4)
    again = FederatedLinearRegression().bootstrap(X, y, np.arange(400) % 40, times=100)
    assert np.array_equal(again.draws, found.draws)
    with pytest.raises(InputError, match="needs at least 3"):
        FederatedLasso().bootstrap(X, y, sites < 2)
    with pytest.raises(InputError, match="times is 1"):
        FederatedLasso().bootstrap(X, y, sites, times=1)


def test_a_draw_of_sites_without_a_class_is_left_out():
    """One site alone has class 2: a model of the others would put its intercept as low as it can."""
    X, y, _ = rows(120)
    X = (X - X.mean(0)) / X.std(0)
    sites, labels = np.repeat(np.arange(6), 20), (y > np.median(y)).astype(int)
    labels[:20:3] = 2
    found = FederatedLogisticRegression("ridge", 0.1).bootstrap(X, labels, sites, times=40)
    assert 0 < found.failed < 40  # about (5/6)^6 of them
    assert len(found.draws) == 40 - found.failed
    assert np.abs(found.draws[:, -3:]).max() < 5


def test_a_bootstrap_is_at_the_lam_that_was_chosen():
    X, y, sites = rows(120)
    fitted = FederatedLassoCV(select="1se").fit(X, y, sites)
    found = fitted.bootstrap(X, y, sites, times=3)
    assert found.estimate == pytest.approx([*fitted.coef_, fitted.intercept_], abs=1e-4)
    other = FederatedLasso(fitted.lam_).bootstrap(X, y, sites, times=3)
    assert np.array_equal(found.draws, other.draws)
    with pytest.raises(NotFittedError):
        FederatedLassoCV().bootstrap(X, y, sites, times=3)
