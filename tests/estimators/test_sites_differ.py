"""Sites that differ: intercepts and sparse deviations, tests of heterogeneity, and tables to print."""

import json
import shutil
import subprocess

import numpy as np
import polars as pl
import pytest
import torch
from hospital_files import write_hospitals
from scipy import sparse, stats
from scipy.optimize import minimize, minimize_scalar
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import log_loss

import fednmap
from fednmap import InputError
from fednmap.estimators import (
    FederatedCoxRegression,
    FederatedGLM,
    FederatedGLMCV,
    FederatedHuberRegressor,
    FederatedLinearRegression,
    FederatedLogisticRegression,
)
from fednmap.estimators.inference import approximate_inverse
from fednmap.estimators.model_selection import folds_of
from fednmap.estimators.site_effects import PartialMinimum
from fednmap.problems.families import Bernoulli
from fednmap.regularizers import L1

TIGHT = {"tol": 1e-10, "max_rounds": 3000}
SITES = 3


def rows(n=240, p=4, seed=0):
    """Columns on different scales; coefficient 0 differs at site 1, and the intercepts differ."""
    rng = np.random.default_rng(seed)
    X, where = rng.normal(size=(n, p)) * [1.0, 5.0, 0.2, 1.0][:p] + 3, rng.integers(0, SITES, n)
    coef = np.tile([1.0, -0.2, 0.0, 0.5][:p], (SITES, 1))
    coef[1, 0] = 2.5
    eta = ((X - 3) * coef[where]).sum(1) + np.array([0.0, 1.0, -1.0])[where]
    y = {
        "gaussian": eta + rng.normal(size=n),
        "logistic": (rng.random(n) < 1 / (1 + np.exp(-eta))) * 1.0,
        "poisson": rng.poisson(np.exp(np.clip(eta / 3, -3, 3))) * 1.0,
    }
    time, censored = rng.exponential(np.exp(-eta / 3)), rng.exponential(2.0, n)
    return X, y | {"cox": np.column_stack([np.minimum(time, censored), time <= censored])}, where


def names(where):
    return np.array(["basel", "bern [BE]", "chur"])[where]


def pooled(family, X, y, where, lam, mu):
    """The composite problem of all rows at once, by L-BFGS-B on positive and negative parts."""
    n, p = X.shape
    Z, deviation = (X - X.mean(0)) / X.std(0), X.std(0)
    k = p * (1 + SITES)

    def parts(v):
        return v[:p] - v[k : k + p], (v[p:k] - v[k + p : 2 * k]).reshape(SITES, p), v[2 * k :]

    def value(v):
        b, d, a = parts(v)
        eta = (Z * (b + d)[where]).sum(1) + a[where]
        loss, mean = {
            "gaussian": lambda: (0.5 * (eta - y) ** 2, eta),
            "logistic": lambda: (np.logaddexp(0, eta) - y * eta, 1 / (1 + np.exp(-eta))),
            "poisson": lambda: (np.exp(eta) - y * eta, np.exp(eta)),
        }[family]()
        r = (mean - y) / n
        each = np.stack([Z[where == i].T @ r[where == i] for i in range(SITES)])
        slope = [each.sum(0) + lam, (each + mu).ravel(), lam - each.sum(0), (mu - each).ravel(), np.bincount(where, r)]
        size = lam * (v[:p].sum() + v[k : k + p].sum()) + mu * (v[p:k].sum() + v[k + p : 2 * k].sum())
        return loss.mean() + size, np.concatenate(slope)

    bounds = [(0, None)] * 2 * k + [(None, None)] * SITES
    exact = {"maxiter": 10**5, "maxfun": 10**5, "ftol": 1e-16, "gtol": 1e-12, "maxcor": 50}
    b, d, a = parts(minimize(value, np.zeros(2 * k + SITES), jac=True, bounds=bounds, options=exact).x)
    return b / deviation, d / deviation, a - (b + d) @ (X.mean(0) / deviation)


@pytest.mark.parametrize("family", ["gaussian", "logistic", "poisson"])
def test_sparse_deviations_are_the_pooled_composite_problem(family):
    X, y, where = rows()
    fitted = FederatedGLM(family, "l1", 0.02, site_effects="sparse", mu=0.013, tol=1e-9).fit(X, y[family], names(where))
    b, d, a = pooled(family, X, y[family], where, 0.02, 0.013)
    own = fitted.site_effects_
    assert fitted.converged_
    assert np.ravel(fitted.coef_) == pytest.approx(b, abs=1e-6)
    assert own.deviation == pytest.approx(d, abs=1e-6)
    assert own.intercept == pytest.approx(a, abs=1e-5)
    assert own.deviation[1, 0] > 0
    head = own.table(fitted.coef_).head
    assert head == ["name", "shared", "basel", "bern [BE]", "chur"]
    scores = (X * (b + d)[where]).sum(1) + a[where]
    if family == "gaussian":
        assert fitted.predict(X, names(where)) == pytest.approx(scores, abs=1e-4)
        new = np.full(len(X), "zug")  # a site that the fit has not seen
        assert np.array_equal(fitted.predict(X, new), fitted.predict(X))


@pytest.mark.parametrize("change", [0.0, 1e-16, -1e-16, 1e-12, -1e-10, 1e-8, -1e-6, 1e-4, 1e-3])
def test_no_rounding_of_a_start_changes_the_fit(change, monkeypatch):
    """F is linear far away: a step by its curvature there goes to 1e14, where a site can tell nothing any more."""
    first, asked = Bernoulli.first, []
    monkeypatch.setattr(Bernoulli, "first", lambda self, y, weight: first(self, y, weight) + change)
    gradients = PartialMinimum.gradients
    monkeypatch.setattr(PartialMinimum, "gradients", lambda f, x: asked.append(float(x.abs().max())) or gradients(f, x))
    X, y, where = rows()
    for lam, half in ((0.05, slice(None, None, 2)), (0.05, slice(1, None, 2)), (0.01, slice(120))):
        make = FederatedGLM("logistic", "l1", lam, site_effects="sparse", mu=0.02, tol=1e-9)
        fitted = make.fit(X[half], y["logistic"][half], where[half])
        b, d, _ = pooled("logistic", X[half], y["logistic"][half], where[half], lam, 0.02)
        assert fitted.converged_
        assert np.ravel(fitted.coef_) == pytest.approx(b, abs=1e-6)
        assert fitted.site_effects_.deviation == pytest.approx(d, abs=1e-6)
    assert max(asked) < 10


@pytest.mark.parametrize("family", ["gaussian", "logistic", "poisson", "cox"])
def test_a_site_finds_its_minimum_from_anywhere(family):
    X, y, where = rows()
    make = FederatedCoxRegression if family == "cox" else FederatedGLM
    model = make(*[family] * (family != "cox"), penalty="l1", site_effects="sparse", mu=0.01)
    f = model._prepare(model._read(X, y[family], where, None)).problem
    for size in (0.3, 30.0, 1e4, 1e14):
        b = size * np.random.default_rng(0).normal(size=4)
        fresh = [f._minimiser(i, b, 1 + i) for i in range(SITES)]
        for far in (1.0, 1e3, 1e14):
            for i in range(SITES):
                f._last[i, 0] = np.full(4, -far), np.full(4 + f.own, far)
                assert b + f._minimiser(i, b, 0)[:4] == pytest.approx(b + fresh[i][:4], abs=1e-5, nan_ok=True)
        each = torch.stack(f.site_gradients(torch.from_numpy(b)[None]))[:, 0].numpy()
        if size == 1e14:  # numbers are too coarse there
            assert np.isnan(each).all()
        elif size == 1e4:  # the site's are as far from b as can be
            assert each == pytest.approx(np.tile(0.01 * np.sign(b), (SITES, 1)), abs=1e-9)
        else:
            assert np.abs(each).max() <= 0.01 * (1 + 1e-6)


def test_a_site_that_does_not_find_its_minimum_is_no_convergence(monkeypatch):
    X, y, where = rows()
    make = FederatedGLM("logistic", "l1", 0.02, site_effects="sparse", mu=0.013, max_rounds=30)
    monkeypatch.setattr("fednmap.estimators.site_effects.STEPS", 1)
    with pytest.warns(ConvergenceWarning, match="after 30 rounds, above tol"):
        fitted = make.fit(X, y["logistic"], where)
    assert not fitted.converged_


@pytest.mark.parametrize("mu", [0.03, 7e-4, 7e-6])
def test_sites_whose_classes_are_separable(mu):
    """Finite, as the deviations are penalised: the objective falls by no change of a single number."""
    X, y, where = rows(150)
    y, lam = np.where(where == 1, X[:, 0] > 3, y["logistic"]) * 1.0, mu / 0.7
    y[np.flatnonzero(where == 2)] = 0
    y[np.flatnonzero(where == 2)[0]] = 1  # one row of a class
    fitted = FederatedGLM("logistic", "l1", lam, site_effects="sparse", mu=mu, tol=1e-9).fit(X, y, where)
    assert fitted.converged_
    Z, own = (X - X.mean(0)) / X.std(0), fitted.site_effects_
    b, d = np.ravel(fitted.coef_) * X.std(0), own.deviation * X.std(0)
    a = own.intercept + (np.ravel(fitted.coef_) + own.deviation) @ X.mean(0)
    r = (1 / (1 + np.exp(-((Z * (b + d)[where]).sum(1) + a[where]))) - y) / len(y)
    each = np.stack([r[where == i] @ Z[where == i] for i in range(SITES)])
    assert np.abs(np.bincount(where, r)).max() <= 1e-10
    for weight, value, slope in ((lam, b, each.sum(0)), (mu, d, each)):
        assert (np.abs(slope) <= weight * (1 + 1e-6) + 1e-9).all()
        assert slope[value != 0] == pytest.approx(-weight * np.sign(value[value != 0]), abs=1e-8)


@pytest.mark.parametrize("family", ["gaussian", "logistic", "poisson"])
def test_small_weights_take_few_rounds(family):
    X, y, where = rows(500, seed=3)
    for lam in (1e-3, 1e-5):
        fitted = FederatedGLM(family, "l1", lam, site_effects="sparse").fit(X, y[family], where)
        assert fitted.converged_
        assert fitted.n_iter_ < 150
        b, d, _ = pooled(family, X, y[family], where, lam, 0.7 * lam)
        assert np.ravel(fitted.coef_) + fitted.site_effects_.deviation == pytest.approx(b + d, abs=2e-3)


def test_a_path_shares_rounds_and_its_models_are_the_fits():
    X, y, where = rows()
    make = FederatedGLM("logistic", "l1", site_effects="sparse", mu=0.007, tol=1e-9)
    path = make.path(X, y["logistic"], where, lambdas=20)
    assert path.converged
    assert path.total_rounds < 0.5 * path.rounds.sum()
    for k in (5, 19):
        one = clone(make).set_params(lam=path.lambdas[k]).fit(X, y["logistic"], where)
        assert path.coefs[k] == pytest.approx(np.atleast_2d(one.coef_), abs=1e-6)


def test_a_fold_that_leaves_a_site_one_class_is_refused_by_name():
    X, y, where = rows(90)
    y = y["logistic"]
    y[where == 1] = np.cumsum(where == 1)[where == 1] == 1
    make = FederatedGLMCV("logistic", cv=3, lambdas=[0.02, 0.01], site_effects="sparse", mu=0.013)
    with pytest.raises(InputError, match=r"site 'bern .BE.': all rows of positive weight are of one class"):
        make.fit(X, y, names(where))


def expanded(X, where):
    return np.hstack([X, *(X * (where == i)[:, None] for i in range(SITES))])


def test_a_cox_model_is_that_of_interaction_columns():
    """The same solver without partial minimisation, on columns of X times indicators of sites."""
    X, y, where = rows()
    options = {"standardize": False, **TIGHT}
    fitted = FederatedCoxRegression("l1", 0.03, site_effects="sparse", mu=0.02, **options).fit(X, y["cox"], where)
    weight = torch.tensor([0.03] * 4 + [0.02] * 4 * SITES)
    other = FederatedCoxRegression(L1(weight.double()), **options).fit(expanded(X, where), y["cox"], where)
    assert fitted.coef_ == pytest.approx(other.coef_[:4], abs=1e-6)
    assert fitted.site_effects_.deviation.ravel() == pytest.approx(other.coef_[4:], abs=1e-6)
    ours = fitted.predict_survival(X[:3], [0.5, 1.0], site="1")
    assert ours == pytest.approx(other.predict_survival(expanded(X, np.ones(len(X)))[:3], [0.5, 1.0], "1"), abs=1e-5)
    assert fitted.score(X, y["cox"], where) >= FederatedCoxRegression().fit(X, y["cox"], where).score(
        X, y["cox"], where
    )


def test_a_site_without_events_has_the_shared_coefficients_and_a_second_fit_forgets_the_first():
    X, y, where = rows(90)
    y["cox"][where == 2, 1] = 0
    fitted = FederatedCoxRegression("l1", 0.03, site_effects="sparse").fit(X, y["cox"], where)
    assert fitted.converged_
    assert not fitted.site_effects_.deviation[2].any()
    alone = fitted.fit(X, y["cox"])  # one site, all rows
    assert alone.site_effects_.sites == ("all",)
    assert not hasattr(fitted.set_params(site_effects="none").fit(X, y["cox"], where), "site_effects_")


@pytest.mark.parametrize("family", ["gaussian", "logistic", "poisson"])
def test_intercepts_are_indicator_columns(family):
    X, y, where = rows()
    indicators = np.hstack([X, np.eye(SITES)[where][:, 1:]])
    one = FederatedGLM(family, "none", site_effects="intercepts", **TIGHT).fit(X, y[family], where)
    other = FederatedGLM(family, "none", **TIGHT).fit(indicators, y[family], where)
    coef, first = np.ravel(other.coef_), float(np.ravel(other.intercept_)[0])
    assert np.ravel(one.coef_) == pytest.approx(coef[:4], abs=1e-7)
    assert one.site_effects_.intercept == pytest.approx([first, first + coef[4], first + coef[5]], abs=1e-6)
    for cov_type in ("nonrobust", "HC0", "cluster"):
        ours = one.inference(X, y[family], where, cov_type=cov_type)
        theirs = other.inference(indicators, y[family], where, cov_type=cov_type)
        assert ours.error == pytest.approx(theirs.error[:4], rel=1e-6)
        assert ours.p_value == pytest.approx(theirs.p_value[:4], rel=1e-5)
        assert ours.log_likelihood == pytest.approx(theirs.log_likelihood)
        assert ours.parameters == theirs.parameters == 4 + SITES
    thin = FederatedGLM(family, "none", site_effects="intercepts", **TIGHT).fit(sparse.csr_array(X), y[family], where)
    assert np.ravel(thin.coef_) == pytest.approx(np.ravel(one.coef_), abs=1e-6)
    assert thin.site_effects_.intercept == pytest.approx(one.site_effects_.intercept, abs=1e-5)


def test_a_column_that_is_constant_within_sites_is_aliased_with_intercepts():
    X, y, where = rows()
    X = np.column_stack([X, 7.0 + where])
    fitted = FederatedGLM("logistic", "none", site_effects="intercepts", **TIGHT).fit(X, y["logistic"], where)
    with pytest.warns(UserWarning, match="'x4' determined by"):
        found = fitted.inference(X, y["logistic"], where)
    assert np.isnan(found.estimate[4])
    assert np.isfinite(found.error[:4]).all()


@pytest.mark.parametrize("family", ["gaussian", "logistic", "poisson"])
@pytest.mark.parametrize("effects", ["intercepts", "random", "sparse"])
def test_uplinks_are_gradients_and_bounded(family, effects):
    X, y, where = rows()
    model = FederatedGLM(family, "l1", site_effects=effects, mu=0.01)
    f = model._prepare(model._read(X, y[family], where, None))
    rng = np.random.default_rng(0)
    x, v = (torch.from_numpy(rng.normal(size=len(f.start))) for _ in range(2))
    x = 0.3 * x
    e = 1e-5
    slope = (f.loss(x + e * v) - f.loss(x - e * v)) / (2 * e)
    assert float(f.gradient(x) @ v) == pytest.approx(slope, rel=1e-5)
    each = f.site_gradients(x)
    assert each.sum(0) == pytest.approx(f.gradient(x).numpy(), abs=1e-12)
    if effects == "sparse":
        assert np.abs(f.site_gradients(10 * x)).max() <= 0.01 * (1 + 1e-6)


@pytest.mark.parametrize("effects", ["intercepts", "random"])
def test_a_site_finds_its_intercepts_at_points_of_which_one_has_its_own_already(effects):
    X, y, where = rows()
    model = FederatedGLM("logistic", "l1", site_effects=effects, mu=0.01)
    f = model._prepare(model._read(X, y["logistic"], where, None)).problem
    points = torch.from_numpy(np.random.default_rng(0).normal(size=(6, f.dim)))
    each = torch.cat([f._intercepts(1, x[None]) for x in points])
    for first in range(6):
        order = [first, *(k for k in range(6) if k != first)]
        f._intercepts(1, points[[first]])
        assert f._intercepts(1, points[order]).numpy() == pytest.approx(each[order].numpy(), abs=1e-9)


def test_an_infinite_weight_is_the_joint_model_and_a_large_one_the_intercepts():
    X, y, where = rows()
    plain = FederatedGLM("logistic", "l1", 0.01, site_effects="intercepts", **TIGHT).fit(X, y["logistic"], where)
    heavy = FederatedGLM("logistic", "l1", 0.01, site_effects="sparse", mu=10.0, **TIGHT).fit(X, y["logistic"], where)
    assert heavy.coef_ == pytest.approx(plain.coef_, abs=1e-7)
    assert not heavy.site_effects_.deviation.any()
    assert heavy.site_effects_.intercept == pytest.approx(plain.site_effects_.intercept, abs=1e-6)


REFUSED = [
    (lambda X, y, s: FederatedGLM(site_effects="some").fit(X, y["gaussian"], s), "one of none, intercepts, random"),
    (lambda X, y, s: FederatedGLM(site_effects="random").path(X, y["gaussian"], s), "expected mu, or a fitted"),
    (lambda X, y, s: FederatedGLM(site_effects="random").fit(X, y["gaussian"], 0 * s), "expected at least two sites"),
    (
        lambda X, y, s: FederatedGLM("gaussian", "none", site_effects="random").fit(
            X[:4], y["gaussian"][:4], [0, 0, 1, 1]
        ),
        "expected more rows than coefficients .* got 4 rows and 4",
    ),
    (lambda X, y, s: FederatedCoxRegression(site_effects="random").fit(X, y["cox"], s), "baseline hazard already"),
    (lambda X, y, s: FederatedGLM(site_effects="sparse", mu=0).fit(X, y["gaussian"], s), "mu is 0; expected a finite"),
    (lambda X, y, s: FederatedHuberRegressor(site_effects="sparse").fit(X, y["gaussian"], s), "got huber"),
    (lambda X, y, s: FederatedLogisticRegression(site_effects="sparse").fit(X, s, s), "got 3 classes"),
    (lambda X, y, s: FederatedCoxRegression(site_effects="intercepts").fit(X, y["cox"], s), "baseline hazard already"),
    (
        lambda X, y, s: FederatedLogisticRegression(site_effects="intercepts").fit(X, y["logistic"] * (s != 1), s),
        "site '1': all rows .* one class; .* leave it out, or merge it",
    ),
    (lambda X, y, s: FederatedLinearRegression().heterogeneity(X, y["gaussian"], None), "at least two sites"),
    (lambda X, y, s: FederatedLogisticRegression().heterogeneity(X, s, s), "two classes"),
    (
        lambda X, y, s: FederatedGLM(site_effects="sparse").fit(X, y["gaussian"], s).inference(X, y["gaussian"], s),
        "got 'sparse'; .* heterogeneity",
    ),
    (
        lambda X, y, s: FederatedGLM().fit(X, y["gaussian"], s).inference(X, y["gaussian"], s, cov_type="HC3"),
        "unknown cov_type 'HC3'",
    ),
]


def many_sites(n=300, sites=10, seed=1):
    """Rows of sites whose intercepts vary with a deviation of 0.8, and the last site has one class."""
    rng = np.random.default_rng(seed)
    X, where = rng.normal(size=(n, 3)) * [1.0, 4.0, 0.3] + 2, np.sort(rng.integers(0, sites, n))
    eta = (X - 2) @ [1.0, -0.1, 0.0] + 0.8 * rng.normal(size=sites)[where]
    label = (rng.random(n) < 1 / (1 + np.exp(-eta))) * 1.0
    label[where == sites - 1] = 1.0
    y = {"gaussian": eta + rng.normal(size=n), "logistic": label, "poisson": rng.poisson(np.exp(eta / 2)) * 1.0}
    return X, y, where


@pytest.mark.parametrize("reml", [True, False])
def test_random_intercepts_have_the_marginal_likelihood_of_correlated_rows(reml):
    X, y, where = many_sites()
    y, n = y["gaussian"], len(where)
    model = FederatedLinearRegression(*(["none"] if reml else ["ridge", 1e-12]), site_effects="random", tol=1e-9)
    model.fit(X, y, where)
    A, same = np.column_stack([np.ones(n), X]), where[:, None] == where

    def minus_two_log(ratio):
        V = np.eye(n) + np.exp(ratio) * same
        W = np.linalg.solve(V, A)
        b = np.linalg.solve(A.T @ W, W.T @ y)
        left, r = n - reml * A.shape[1], y - A @ b
        rest = np.linalg.slogdet(A.T @ W)[1] if reml else 0.0
        noise = float(r @ np.linalg.solve(V, r)) / left
        return left * np.log(noise) + np.linalg.slogdet(V)[1] + rest, b, noise, W

    best = minimize_scalar(lambda t: minus_two_log(t)[0], bounds=(-8, 4), method="bounded", options={"xatol": 1e-8})
    _, b, noise, W = minus_two_log(best.x)
    assert model.site_effects_.variance == pytest.approx(noise * np.exp(best.x), rel=1e-5)
    assert [model.intercept_, *model.coef_] == pytest.approx(b, abs=1e-6)
    own = np.array([noise * np.exp(best.x) * np.linalg.solve(noise * (np.eye(n) + np.exp(best.x) * same), y - A @ b)])
    guess = [float(own[0, where == k].sum()) for k in range(10)]  # the best linear unbiased predictions
    assert model.site_effects_.intercept - model.intercept_ == pytest.approx(guess, abs=1e-5)
    if reml:
        errors = model.inference(X, y, where).error
        exact = np.sqrt(noise * np.diag(np.linalg.inv(A.T @ W)))
        assert errors == pytest.approx([*exact[1:], exact[0]], rel=1e-5)


@pytest.mark.parametrize("family", ["logistic", "poisson"])
def test_random_intercepts_minimise_laplaces_approximation(family):
    X, y, where = many_sites()
    y = y[family]
    model = FederatedGLM(family, "none", site_effects="random", tol=1e-8).fit(X, y, where)

    def minus_two_log(v):
        b, c, variance = v[:3], v[3], np.exp(v[4])
        a = np.full(10, c)
        for _ in range(60):  # the mode of every site's intercept
            eta = X @ b + a[where]
            mean = 1 / (1 + np.exp(-eta)) if family == "logistic" else np.exp(eta)
            curve = np.bincount(where, mean * (1 - mean) if family == "logistic" else mean)
            a = a - np.clip((np.bincount(where, mean - y) + (a - c) / variance) / (curve + 1 / variance), -1, 1)
        loss = np.logaddexp(0, eta) - y * eta if family == "logistic" else np.exp(eta) - y * eta
        return 2 * loss.sum() + (np.square(a - c) / variance + np.log1p(variance * curve)).sum()

    found = np.array([*model.coef_.ravel(), *np.ravel(model.intercept_), np.log(model.site_effects_.variance)])
    best = minimize(minus_two_log, found + 0.05, method="BFGS", options={"gtol": 1e-5})
    assert minus_two_log(found) <= best.fun + 1e-9
    assert found == pytest.approx(best.x, abs=2e-4)


def test_a_weight_of_random_intercepts_leads_from_own_ones_to_a_common_one():
    X, y, where = rows()
    for family, mu, effects in (("gaussian", 1e-7, "intercepts"), ("gaussian", 1e5, "none"), ("logistic", 1e5, "none")):
        random = FederatedGLM(family, "l1", 0.01, site_effects="random", mu=mu, tol=1e-9).fit(X, y[family], where)
        other = FederatedGLM(family, "l1", 0.01, site_effects=effects, tol=1e-9).fit(X, y[family], where)
        assert random.coef_ == pytest.approx(other.coef_, abs=1e-5)
        assert random.predict(X, where) == pytest.approx(other.predict(X, where), abs=1e-5)


def test_the_variance_of_random_intercepts_has_no_unit_of_a_column():
    X, y, where = many_sites()
    model = FederatedLinearRegression("none", site_effects="random", tol=1e-9)
    large = FederatedLinearRegression("none", site_effects="random", standardize=False, tol=1e-9)
    expected = model.fit(X, y["gaussian"], where).site_effects_.variance
    for unit in ([1.0, 1.0, 1e8], [1.0, 1e-3, 1e6]):
        found = large.fit(X * unit, y["gaussian"], where)
        assert found.site_effects_.variance == pytest.approx(expected, rel=1e-5)


def test_several_weights_of_random_intercepts_leave_standard_errors_and_paths():
    X, y, where = many_sites()
    y = y["gaussian"]
    chosen = FederatedGLMCV(cv=2, lambdas=[0.3, 0.1, 0], site_effects="random", mu=[1e-3, 1e-2], tol=1e-9).fit(
        X, y, where
    )
    alone = FederatedGLM(lam=chosen.lam_, site_effects="random", mu=chosen.mu_, tol=1e-9).fit(X, y, where)
    assert chosen.inference(X, y, where).error == pytest.approx(alone.inference(X, y, where).error, rel=1e-6)
    assert chosen.path(X, y, where).coefs == pytest.approx(alone.path(X, y, where).coefs, abs=1e-6)
    assert chosen.mu == [1e-3, 1e-2]


def test_random_intercepts_of_sparse_rows_new_sites_and_chosen_lam():
    X, y, where = many_sites()
    y = y["logistic"]
    model = FederatedLogisticRegression("l1", 0.01, site_effects="random", tol=1e-9).fit(X, y, where)
    thin = clone(model).fit(sparse.csr_array(X), y, where)
    assert thin.coef_ == pytest.approx(model.coef_, abs=1e-6)
    assert thin.site_effects_.variance == pytest.approx(model.site_effects_.variance, rel=1e-4)
    known, new = model.predict_proba(X, where)[:, 1], model.predict_proba(X, np.full(len(X), 77))[:, 1]
    assert new == pytest.approx(model.predict_proba(X)[:, 1], abs=1e-15)
    assert np.square(known - y).mean() < np.square(new - y).mean()
    chosen = FederatedGLMCV("logistic", cv=2, lambdas=4, site_effects="random").fit(X, y, where)
    alone = FederatedGLM("logistic", "l1", chosen.lam_, site_effects="random").fit(X, y, where)
    assert chosen.mu_ == pytest.approx(alone.mu_, rel=1e-5)
    assert chosen.coef_ == pytest.approx(alone.coef_, abs=1e-5)


@pytest.mark.parametrize(("attempt", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused_in_one_line(attempt, message):
    with pytest.raises(InputError, match=message) as refused:
        attempt(*rows())
    assert "\n" not in str(refused.value)


@pytest.mark.filterwarnings("ignore:lam_ = .* of the grid")
@pytest.mark.parametrize("cv", [pytest.param(2, marks=pytest.mark.slow), "leave-one-site-out"])
def test_rows_held_out_have_the_model_of_their_site(cv):
    X, y, where = rows()
    y, lambdas, options = y["logistic"], [0.05, 0.01], {"site_effects": "sparse", "mu": 0.02, "tol": 1e-8}
    chosen = FederatedGLMCV("logistic", cv=cv, lambdas=lambdas, **options)
    chosen.fit(X, y, where)
    folds = folds_of(chosen, chosen.cv, 0, chosen._read(X, y, where, None), X, y, where, None)
    for k, lam in enumerate(lambdas):
        for j, fold in enumerate(folds):
            model = FederatedGLM("logistic", "l1", lam, **options).fit(X[fold.train], y[fold.train], where[fold.train])
            share = model.predict_proba(X[fold.test], where[fold.test])
            assert chosen.cv_losses_[j, k] == pytest.approx(
                log_loss(y[fold.test], share[:, 1], labels=[0, 1]), abs=1e-5
            )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:lam_ = .* of the grid")
def test_mu_is_chosen_from_a_list():
    X, y, where = rows()
    make = FederatedGLMCV("logistic", cv=2, lambdas=[0.05, 0.01], site_effects="sparse", mu=[0.5, 0.02])
    alone = [clone(make).set_params(mu=mu).fit(X, y["logistic"], where) for mu in (0.5, 0.02)]
    best = min(alone, key=lambda one: one.cv_mean_.min())
    make.fit(X, y["logistic"], where)
    assert make.mu_ == best.mu
    assert make.mu == [0.5, 0.02]
    assert np.array_equal(make.coef_, best.coef_)
    assert make.n_iter_ == sum(one.n_iter_ for one in alone)


@pytest.mark.parametrize("family", ["gaussian", "logistic", "poisson", "cox"])
def test_meta_analysis_by_its_formulas(family):
    X, y, where = rows(600)
    make = FederatedCoxRegression(**TIGHT) if family == "cox" else FederatedGLM(family, "none", **TIGHT)
    found = make.heterogeneity(X, y[family], names(where))
    each = []
    for i in range(SITES):
        mine = where == i
        each.append(make.fit(X[mine], y[family][mine]).inference(X[mine], y[family][mine]))
    value, error = np.stack([one.estimate[:4] for one in each]), np.stack([one.error[:4] for one in each])
    assert found.estimate == pytest.approx(value, rel=1e-5, abs=1e-7)
    assert found.error == pytest.approx(error, rel=1e-5)
    w = 1 / error**2
    fixed = (w * value).sum(0) / w.sum(0)
    Q = (w * (value - fixed) ** 2).sum(0)
    tau2 = np.maximum(0, (Q - 2) / (w.sum(0) - (w**2).sum(0) / w.sum(0)))
    w = 1 / (error**2 + tau2)
    assert found.fixed == pytest.approx(fixed, rel=1e-5, abs=1e-7)
    assert pytest.approx(Q, rel=1e-4) == found.Q
    assert pytest.approx(np.maximum(0, 1 - 2 / Q), abs=1e-4) == found.I2
    assert found.random == pytest.approx((w * value).sum(0) / w.sum(0), rel=1e-4, abs=1e-6)
    assert found.random_error == pytest.approx(w.sum(0) ** -0.5, rel=1e-4)
    assert found.p_value == pytest.approx(stats.chi2.sf(Q, 2), rel=1e-3, abs=1e-12)
    joint = make.fit(X, y[family], where).inference(X, y[family], where)
    whole = sum(one.log_likelihood for one in each)
    if family == "gaussian":
        squares = sum(one.rows * np.exp(-2 * one.log_likelihood / one.rows) for one in each) / 600
        whole = -600 / 2 * np.log(squares)
    assert found.ratio == pytest.approx(2 * (whole - joint.log_likelihood), rel=1e-6)
    assert found.ratio_df == 2 * (4 if family == "cox" else 5)
    assert found.p_value[0] == found.p_value.min()
    assert found.ratio_p < 1e-3


def test_a_site_that_cannot_be_estimated_is_left_out(tmp_path):
    X, y, where = rows(600)
    X = np.column_stack([X, np.where(where == 2, 0.0, np.random.default_rng(0).normal(size=600))])
    part = (where != 2) | (np.cumsum(where == 2) <= 100)
    one_class = y["logistic"] * (where != 1)
    found = FederatedGLM("logistic", "none").heterogeneity(X[part], one_class[part], where[part])
    assert np.isnan(found.estimate[1]).all()
    assert np.isnan(found.estimate[2, 4])
    assert list(found.df[:4]) == [1] * 4
    assert np.isnan([found.df[4], found.Q[4], found.I2[4], found.p_value[4], found.ratio]).all()
    assert found.random[4] == pytest.approx(found.estimate[0, 4])
    assert found.verdict().startswith("no likelihood ratio test")
    found.plot(tmp_path / "forest.png")
    with pytest.raises(InputError, match=r"expected columns among x0, .* got \['x9'\]"):
        found.plot(tmp_path / "other.png", ["x9"])


def test_tables_to_print():
    X, y, where = rows()
    X = pl.DataFrame(dict(zip(["age", "a|b", "50_%", "sex=m"], X.T, strict=True)))
    found = FederatedGLM("logistic", "none").fit(X, y["logistic"], where).inference(X, y["logistic"], where)
    frame = found.to_frame()
    assert frame.columns[:5] == ["name", "coefficient", "standard error", "z", "p"]
    assert frame["odds ratio low"].to_numpy() == pytest.approx(np.exp(found.low))
    assert pl.read_csv(found.to_csv().encode()).equals(frame)
    assert found.to_markdown().splitlines()[3].startswith("| a\\|b | ")
    assert r"50\_\% &" in found.to_latex()
    assert found.to_latex().count(r"\\") == 6
    text = found.summary()
    assert "Log-likelihood" in text
    assert "odds ratio" in text
    assert {len(line) for line in text.splitlines() if line[0] in "=-"} == {max(map(len, text.splitlines()))}
    assert f"{found.rows:g}" in text


def test_errors_clustered_by_site():
    X, y, where = rows(400)
    fitted = FederatedLinearRegression(**TIGHT).fit(X, y["gaussian"], where)
    A = np.column_stack([X, np.ones(len(X))])
    r = y["gaussian"] - A @ np.append(fitted.coef_, fitted.intercept_)
    bread, meat = np.linalg.inv(A.T @ A), np.stack([A[where == i].T @ r[where == i] for i in range(SITES)])
    expected = np.sqrt(np.diag(bread @ meat.T @ meat @ bread))
    assert fitted.inference(X, y["gaussian"], where, cov_type="cluster").error == pytest.approx(expected, rel=1e-6)


def test_debiased_is_least_squares_without_a_nodewise_penalty():
    """One Newton step from the lasso; a quadratic needs no more. Errors differ by the degrees of freedom."""
    X, y, where = rows()
    X = np.column_stack([X, np.ones(len(X))])  # a constant column has no estimate
    lasso = FederatedGLM("gaussian", "l1", 0.3).fit(X, y["gaussian"], where)
    found, plain = lasso.debiased(X, y["gaussian"], where, nodewise=1e-9), FederatedLinearRegression(**TIGHT)
    expected = plain.fit(X[:, :4], y["gaussian"], where).inference(X[:, :4], y["gaussian"], where)
    assert found.estimate[:4] == pytest.approx(expected.estimate[:4], rel=1e-5)
    assert np.isnan([found.estimate[4], found.error[4], found.p_value[4]]).all()
    squares = [np.sum((y["gaussian"] - model.predict(rows)) ** 2) for model, rows in ((lasso, X), (plain, X[:, :4]))]
    noise = squares[0] / (240 - 1 - np.count_nonzero(lasso.coef_)) / (squares[1] / 235)
    assert found.error[:4] == pytest.approx(expected.error[:4] * np.sqrt(noise), rel=1e-5)
    assert found.cov_type == "debiased"
    again = lasso.debiased(X, y["gaussian"], where)
    assert (again.low[:4] < again.estimate[:4]).all()
    with pytest.raises(InputError, match="expected a fit with penalty l1 or elastic-net, got 'none'"):
        plain.debiased(X[:, :4], y["gaussian"], where)


def test_nodewise_regressions_meet_their_optimality_conditions():
    rng = np.random.default_rng(0)
    A = rng.normal(size=(50, 8)) @ rng.normal(size=(8, 8))
    A /= np.sqrt((A**2).sum(0))
    H, weight = A.T @ A, 0.1
    T = approximate_inverse(H, weight)
    for j in range(8):
        v = T[j] / T[j, j]
        slope = np.delete(H @ v, j)
        c = np.delete(v, j)
        assert slope[c != 0] == pytest.approx(-weight * np.sign(c[c != 0]), abs=1e-5)
        assert (np.abs(slope) <= weight + 1e-5).all()
        assert T[j, j] == pytest.approx(1 / (H @ v)[j], rel=1e-6)


@pytest.mark.parametrize("options", [{"weights": "sites"}, {"fit_intercept": False}, {"standardize": False}])
def test_sparse_deviations_with_other_settings(options):
    """The objective falls by no change of a single number: a fixed point of the definition, whatever the settings."""
    X, y, where = rows(90)
    weight = np.random.default_rng(1).integers(1, 4, 90)
    make = FederatedGLM("logistic", "l1", 0.02, site_effects="sparse", mu=0.013, tol=1e-9, **options)
    fitted = make.fit(X, y["logistic"], where, weight)
    f = make._prepare(make._read(X, y["logistic"], where, weight))
    own, scale = fitted.site_effects_, np.where(f.scaling.factor > 0, f.scaling.factor, 1.0)
    share = weight / weight.sum()
    if options == {"weights": "sites"}:
        share = weight / np.bincount(where, weight)[where] / SITES

    def objective(v):
        b, d, a = v[:4], v[4:16].reshape(SITES, 4), v[16:]
        eta = (X * (b + d)[where]).sum(1) + a[where]
        size = 0.02 * np.abs(b / scale).sum() + 0.013 * np.abs(d / scale).sum()
        return share @ (np.logaddexp(0, eta) - y["logistic"] * eta) + size

    best = np.concatenate([np.ravel(fitted.coef_), own.deviation.ravel(), own.intercept])
    assert fitted.objective_ == pytest.approx(objective(best), rel=1e-9)
    for k in range(16 + SITES * ("fit_intercept" not in options)):
        for change in (1e-3, -1e-3):
            moved = best.copy()
            moved[k] += change
            assert objective(moved) > objective(best)


def test_from_files(command, tmp_path):
    hospitals = write_hospitals(tmp_path / "hospitals")
    words = ("--target", "outcome", "--exclude", "time,event", "--site-effects", "sparse", "--mu", 0.005)
    code, out, err = command("fit", "--data", f"csv:{hospitals}", *words, "--heterogeneity", "--out", "run")
    assert code == 0, err
    assert "The sites' own coefficients" in out
    assert "one model per site against the joint one: likelihood ratio" in out
    run = tmp_path / "run"
    assert {"sites.csv", "heterogeneity.csv", "forest.png"} <= {p.name for p in run.iterdir()}
    assert "Estimates by site" in (run / "report.html").read_text()
    model = fednmap.load(run)
    assert model.effects.sites == ("basel", "bern", "chur", "zug")
    frame = pl.read_csv(hospitals / "zug.csv")
    shared, own = model.predict(frame), model.predict(frame, site="zug")
    assert shared["P(sick)"] != own["P(sick)"]
    code, out, _ = command("predict", "run", hospitals / "zug.csv", "--site", "zug")
    assert code == 0
    assert [float(line.split(",")[2]) for line in out.splitlines()[1:]] == pytest.approx(own["P(sick)"])
    code, _, err = command("predict", "run", hospitals / "zug.csv", "--site", "bonn")
    assert code == 2
    assert "expected a site with its own coefficients (basel, bern, chur, zug), got 'bonn'" in err
    words = ("--target", "outcome", "--exclude", "time,event", "--site-effects", "intercepts", "--penalty", "none")
    code, out, _ = command("fit", "--data", f"csv:{hospitals}", *words, "--out", "other")
    assert code == 0
    assert "Low and high are the ends of 95 % intervals." in out
    assert "Log-likelihood" in (tmp_path / "other" / "summary.txt").read_text()
    words = (*words[:4], "--site-effects", "random", "--lam", 0.01)
    code, out, _ = command("fit", "--data", f"csv:{hospitals}", *words, "--out", "random")
    assert code == 0
    variance = json.loads((tmp_path / "random" / "model.json").read_text())["site_variance"]
    assert f"variance of the sites' intercepts: {variance:.4g}, mu" in out
    assert fednmap.load(tmp_path / "random").effects.sites == ("basel", "bern", "chur", "zug")
    code, _, err = command("fit", "--data", f"csv:{hospitals}", *words[:4], "--site-effects", "some", "--out", "third")
    assert code == 2
    assert "expected site_effects to be one of none, intercepts, random, sparse, got 'some'" in err
    assert not (tmp_path / "third").exists()


R = """
suppressMessages({library(survival); library(metafor); library(glmnet)})
d <- read.csv("rows.csv"); d$site <- factor(d$site); out <- list()
for (family in c("gaussian", "logistic", "poisson")) {
  kind <- if (family == "logistic") "binomial" else family; d$y <- d[[family]]
  m <- glm(y ~ site + x0 + x1 + x2 + x3, family = kind, data = d)
  out[[family]] <- list(coef = unname(coef(m)[4:7]), se = unname(sqrt(diag(vcov(m)))[4:7]), ll = as.numeric(logLik(m)))
  alone <- function(s) glm(y ~ x0 + x1 + x2 + x3, family = kind, data = d[d$site == s, ])
  each <- lapply(levels(d$site), function(s) summary(alone(s))$coefficients)
  b <- sapply(each, function(m) m[2, 1]); se <- sapply(each, function(m) m[2, 2])
  fe <- rma(b, sei = se, method = "FE"); dl <- rma(b, sei = se, method = "DL")
  out[[family]]$meta <- c(fe$b, fe$se, fe$QE, fe$QEp, dl$b, dl$se, dl$tau2, dl$I2 / 100)
}
m <- coxph(Surv(time, event) ~ x0 + x1 + x2 + x3 + strata(site), data = d)
robust <- coxph(Surv(time, event) ~ x0 + x1 + x2 + x3 + strata(site) + cluster(site), data = d)
se <- function(m) unname(sqrt(diag(vcov(m))))
out$cox <- list(coef = unname(coef(m)), se = se(m), robust = se(robust), ll = m$loglik[2])
X <- as.matrix(d[c("x0", "x1", "x2", "x3")]); n <- nrow(X)
Z <- scale(X, TRUE, apply(X, 2, function(v) sqrt(mean((v - mean(v))^2))))
k <- model.matrix(~ site - 1, d)
wide <- do.call(cbind, c(list(Z), lapply(1:ncol(k), function(i) Z * k[, i]), list(k[, -1])))
lam <- 0.02; mu <- 0.013; factor <- c(rep(lam, 4), rep(mu, 4 * ncol(k)), rep(0, ncol(k) - 1))
m <- glmnet(wide, d$logistic, family = "binomial", standardize = FALSE, penalty.factor = factor,
            lambda = sum(factor) / length(factor), thresh = 1e-16, maxit = 1e7)
out$sparse <- as.numeric(as.matrix(m$beta)[1:(4 + 4 * ncol(k)), 1]) / rep(attr(Z, "scaled:scale"), 1 + ncol(k))
cat(jsonlite::toJSON(out, digits = NA, auto_unbox = TRUE))
"""


@pytest.mark.slow
def test_r_agrees(tmp_path):
    """glm, coxph (also clustered), metafor's fixed and DerSimonian-Laird effects, glmnet on interaction columns."""
    packages = "for (p in c('survival','metafor','glmnet','jsonlite')) library(p, character.only = TRUE)"
    rscript = shutil.which("Rscript")
    if rscript is None or subprocess.run([rscript, "-e", packages], capture_output=True, check=False).returncode:
        pytest.skip("needs Rscript with survival, metafor, glmnet and jsonlite")
    X, y, where = rows(600)
    table = {f"x{j}": X[:, j] for j in range(4)} | {name: y[name] for name in ("gaussian", "logistic", "poisson")}
    table |= {"time": y["cox"][:, 0], "event": y["cox"][:, 1], "site": where}
    pl.DataFrame(table).write_csv(tmp_path / "rows.csv", float_precision=17)
    said = subprocess.run([rscript, "-e", R], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    expected = json.loads(said.stdout)
    for family in ("gaussian", "logistic", "poisson"):
        make, theirs = FederatedGLM(family, "none", site_effects="intercepts", **TIGHT), expected[family]
        ours = make.fit(X, y[family], where).inference(X, y[family], where)
        assert ours.estimate == pytest.approx(theirs["coef"], rel=1e-6, abs=1e-6)
        assert ours.error == pytest.approx(theirs["se"], rel=1e-6 if family == "gaussian" else 1e-5)
        assert ours.log_likelihood == pytest.approx(theirs["ll"], rel=1e-8)
        h = make.heterogeneity(X, y[family], where)
        found = [h.fixed, h.fixed_error, h.Q, h.p_value, h.random, h.random_error, h.tau2, h.I2]
        assert [float(v[0]) for v in found] == pytest.approx(theirs["meta"], rel=1e-3, abs=1e-8)
    make = FederatedCoxRegression(**TIGHT).fit(X, y["cox"], where)
    ours, robust = (make.inference(X, y["cox"], where, cov_type=kind) for kind in ("nonrobust", "cluster"))
    assert ours.estimate == pytest.approx(expected["cox"]["coef"], abs=1e-6)
    assert ours.error == pytest.approx(expected["cox"]["se"], rel=1e-6)
    assert robust.error == pytest.approx(expected["cox"]["robust"], rel=1e-6)
    assert ours.log_likelihood == pytest.approx(expected["cox"]["ll"], rel=1e-8)
    make = FederatedGLM("logistic", "l1", 0.02, site_effects="sparse", mu=0.013, **TIGHT)
    make.fit(X, y["logistic"], where)
    found = np.concatenate([make.coef_.ravel(), make.site_effects_.deviation.ravel()])
    assert found == pytest.approx(expected["sparse"], abs=1e-5)


LME4 = """
suppressMessages(library(lme4))
d <- read.csv("rows.csv"); out <- list(); best <- list(rhoend = 1e-10)
m <- lmer(gaussian ~ x0 + x1 + x2 + (1 | site), d, control = lmerControl(optimizer = "bobyqa", optCtrl = best))
told <- function(m) c(fixef(m)[-1], fixef(m)[1], VarCorr(m)$site[1])
out$gaussian <- c(told(m), sqrt(diag(as.matrix(vcov(m))))[c(2:4, 1)])
control <- glmerControl(optimizer = "bobyqa", optCtrl = best, tolPwrss = 1e-12)
for (family in c("logistic", "poisson")) {
  d$y <- d[[family]]; kind <- if (family == "logistic") "binomial" else family
  m <- glmer(y ~ x0 + x1 + x2 + (1 | site), d, family = kind, control = control)
  out[[family]] <- c(told(m), sqrt(diag(as.matrix(vcov(m, use.hessian = FALSE))))[c(2:4, 1)])
}
for (family in names(out)) cat(family, format(out[[family]], digits = 15), "\\n")
"""


@pytest.mark.slow
def test_lme4_agrees(tmp_path):
    """lmer (REML) to 1e-6; glmer (Laplace) to 1e-4, where its own optimiser ends."""
    rscript = shutil.which("Rscript")
    if rscript is None or subprocess.run([rscript, "-e", "library(lme4)"], capture_output=True, check=False).returncode:
        pytest.skip("needs Rscript with lme4")
    X, y, where = many_sites()
    table = {f"x{j}": X[:, j] for j in range(3)} | y | {"site": where}
    pl.DataFrame(table).write_csv(tmp_path / "rows.csv", float_precision=17)
    said = subprocess.run([rscript, "-e", LME4], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    expected = {line.split()[0]: [float(word) for word in line.split()[1:]] for line in said.stdout.splitlines()}
    for family, theirs in expected.items():
        model = FederatedGLM(family, "none", site_effects="random", tol=1e-8).fit(X, y[family], where)
        errors = model.inference(X, y[family], where).error
        ours = [*model.coef_.ravel(), *np.ravel(model.intercept_), model.site_effects_.variance, *errors]
        assert ours == pytest.approx(theirs, rel=1e-6 if family == "gaussian" else 1e-4, abs=1e-6)
