"""Tables with more columns than a dense model is kept for: working sets, checked on the whole problem."""

import shutil
import subprocess

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.linear_model import Lasso

from fednmap.estimators import (
    FederatedCoxRegression,
    FederatedElasticNet,
    FederatedGLM,
    FederatedLasso,
    FederatedLassoCV,
    FederatedLogisticRegression,
    path_solver,
    working_set,
)
from fednmap.estimators.prepare import Prepared
from fednmap.regularizers import L1

N, P = 60, 150
rng = np.random.default_rng(0)
X = rng.normal(size=(N, P)) + 0.7 * rng.normal(size=(N, 1))
SCORE = X[:, :5] @ [2.0, -1.0, 1.0, 0.5, 0.5]
SITES = rng.integers(0, 3, N)
TARGETS = {
    "gaussian": SCORE + rng.normal(size=N),
    "logistic": (SCORE + rng.logistic(size=N) > 0) * 1,
    "poisson": rng.poisson(np.exp(np.clip(SCORE / 4, -3, 3))) * 1.0,
    "multinomial": np.digitize(SCORE + rng.logistic(size=N), [-1.5, 1.5]),
    "cox": np.column_stack([rng.exponential(np.exp(-SCORE / 4)), rng.random(N) < 0.7]),
}


@pytest.fixture
def narrow(monkeypatch):
    """Dense models of 100 coordinates at most, so that 150 columns are a wide table."""
    monkeypatch.setattr(path_solver, "SIZE", 100)
    monkeypatch.setattr(working_set, "LEAST", 8)


def estimator(kind, **options):
    if kind == "cox":
        return FederatedCoxRegression("l1", **options)
    if kind in ("multinomial", "logistic"):
        return FederatedLogisticRegression("l1", **options)
    return FederatedGLM(kind, "l1", **options)


def lam_max(model, kind):
    f = model._prepare(model._read(X, TARGETS[kind], SITES, None))
    return float(f.gradient(f.start)[: f.end].abs().max())


def certificate(model, kind, path, k):
    """How far the optimality conditions of the whole problem are from holding, relative to lam, at models of a path."""
    f = model._prepare(model._read(X, TARGETS[kind], SITES, None))
    fit, lam = path.fits[k], path.lambdas[k]
    g = f.gradient(fit.x).numpy()
    w, slope = fit.x.numpy()[: f.end], g[: f.end]
    wrong = np.where(w != 0, np.abs(slope + lam * np.sign(w)), np.maximum(np.abs(slope) - lam, 0))
    return max(float(wrong.max()), float(np.abs(g[f.end :]).max(initial=0.0))) / lam


@pytest.mark.parametrize("kind", ["gaussian", "logistic"])
def test_mcp_on_working_sets_is_stationary_for_the_whole_problem(kind, narrow):
    model = FederatedGLM(kind, "mcp", tol=1e-7)
    path = model.path(X, TARGETS[kind], SITES, lambdas=lam_max(model, kind) * np.geomspace(1, 0.3, 8))
    assert path.converged
    f = model._prepare(model._read(X, TARGETS[kind], SITES, None))
    for lam, fit in zip(path.lambdas, path.fits, strict=True):
        phi = f.with_penalty(model._regularizer(f, lam))
        x = fit.x - 0.1 * f.gradient(fit.x)
        assert float((fit.x - phi.prox(x, 0.1)).norm()) <= 0.1 * 2e-7 * f.unit
        assert fit.known is None  # not by FedNMap


def test_mcp_of_columns_in_a_small_unit_ends_on_its_working_set(narrow):
    """The sum of curvatures is then so small that one over it is no step of MCP's prox."""
    model = FederatedGLM("gaussian", "mcp", standardize=False, fit_intercept=False)
    f = model._prepare(model._read(0.01 * X, TARGETS["gaussian"], SITES, None))
    lam = 0.9 * f.gradient(f.start).abs().max().numpy()
    phi = path_solver.Penalties(np.full((1, 1), lam), np.zeros((1, 1)), f.end, np.full((1, 1), 1 / 3), np.zeros((1, 1)))
    found, _ = working_set.solve(f, phi, tol=1e-6 * f.unit, max_rounds=100)
    assert found.sizes[0] <= 1e-6 * f.unit


@pytest.mark.parametrize("kind", list(TARGETS))
def test_every_model_of_a_path_meets_the_conditions_of_the_whole_problem(kind, narrow):
    model = estimator(kind, tol=1e-9)
    first = lam_max(model, kind)
    path = model.path(X, TARGETS[kind], SITES, lambdas=first * np.geomspace(1, 0.1, 12))
    assert path.converged
    assert path.nonzero[-1] > 10
    for k in range(12):
        assert certificate(model, kind, path, k) < 1e-6
        again = path_solver.Penalties(np.array([[path.lambdas[k]]]), np.zeros((1, 1)), path.coefs[k].size)
        value = path.losses[k] + again.value(path.fits[k].x.numpy()[None])[0]
        assert path.fits[k].objective == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("kind", ["gaussian", "logistic", "cox"])
def test_paths_and_fits_are_those_of_the_dense_model(kind, monkeypatch):
    dense = estimator(kind, tol=1e-9)
    lambdas = lam_max(dense, kind) * np.geomspace(1, 0.1, 5)
    one = dense.path(X, TARGETS[kind], SITES, lambdas=lambdas)
    monkeypatch.setattr(path_solver, "SIZE", 140)
    monkeypatch.setattr(working_set, "LEAST", 8)
    two = dense.path(X, TARGETS[kind], SITES, lambdas=lambdas)
    assert two.coefs == pytest.approx(one.coefs, abs=1e-6)
    assert two.intercepts == pytest.approx(one.intercepts, abs=1e-6)
    alone = estimator(kind, tol=1e-9, lam=lambdas[4]).fit(X, TARGETS[kind], SITES)  # with no model before it
    assert alone.converged_
    assert np.atleast_2d(alone.coef_) == pytest.approx(one.coefs[4], abs=1e-6)


def test_scikit_learn_agrees(narrow):
    for lam in (0.3, 0.05):
        ours = FederatedLasso(lam, tol=1e-10).fit(X, TARGETS["gaussian"], SITES)
        Z = (X - X.mean(0)) / X.std(0)
        theirs = Lasso(alpha=lam, tol=1e-14, max_iter=10**6).fit(Z, TARGETS["gaussian"])
        assert ours.coef_ * X.std(0) == pytest.approx(theirs.coef_, abs=1e-6)
        thin = FederatedLasso(lam, tol=1e-10).fit(sparse.csr_array(X), TARGETS["gaussian"], SITES)
        assert thin.coef_ == pytest.approx(ours.coef_, abs=1e-6)


def test_weights_of_their_own_free_columns_and_a_ridge(narrow, monkeypatch):
    weight = np.linspace(0.02, 0.2, P)
    weight[[3, 70]] = 0
    y = TARGETS["gaussian"]
    options = {"tol": 1e-9}
    few = FederatedGLM("gaussian", L1(torch.from_numpy(weight)), **options).fit(X, y, SITES)
    net = FederatedElasticNet(0.1, l1_ratio=0.6, **options).fit(X, y, SITES)
    monkeypatch.setattr(path_solver, "SIZE", 1000)
    assert few.converged_
    assert np.ravel(few.coef_)[[3, 70]].all()
    whole = FederatedGLM("gaussian", L1(torch.from_numpy(weight)), **options).fit(X, y, SITES)
    assert np.ravel(few.coef_) == pytest.approx(np.ravel(whole.coef_), abs=1e-6)
    assert net.coef_ == pytest.approx(
        FederatedElasticNet(0.1, l1_ratio=0.6, **options).fit(X, y, SITES).coef_, abs=1e-6
    )


def test_a_column_that_the_rule_leaves_out_joins_later(narrow, monkeypatch):
    """The conditions of the whole problem find it, however bad the rule."""
    largest, asked = working_set._largest, []

    def worst(inside, excess, most):
        asked.append(inside.sum())
        return largest(inside, np.where(inside, excess, -1) if len(asked) % 2 else excess, most)

    monkeypatch.setattr(working_set, "_largest", worst)
    model = estimator("gaussian", tol=1e-9)
    path = model.path(X, TARGETS["gaussian"], SITES, lambdas=10)
    assert path.converged
    assert max(certificate(model, "gaussian", path, k) for k in range(10)) < 1e-6


def test_more_coefficients_than_a_working_set_may_have_are_found_too(monkeypatch):
    monkeypatch.setattr(path_solver, "SIZE", 5)
    monkeypatch.setattr(working_set, "LEAST", 2)
    model = estimator("logistic", tol=1e-8, max_rounds=5000)
    path = model.path(X, TARGETS["logistic"], SITES, lambdas=[0.2, 0.02])
    assert path.converged
    assert path.nonzero[-1] > 10
    assert certificate(model, "logistic", path, 1) < 1e-5


def test_working_sets_are_given_up_at_once_where_most_columns_violate(monkeypatch):
    """The fit is that of working sets which grow until they are too large, and asks for one Hessian alone."""
    monkeypatch.setattr(path_solver, "SIZE", 20)
    monkeypatch.setattr(working_set, "LEAST", 5)
    hessians, fits = [], []
    restricted = Prepared.restricted
    monkeypatch.setattr(Prepared, "restricted", lambda f, columns: hessians.append(1) or restricted(f, columns))
    for many in (1, 1000):
        monkeypatch.setattr(working_set, "MANY", many)
        hessians.append(0)
        fits.append(FederatedLogisticRegression("l1", 0.005, tol=1e-9).fit(X, TARGETS["logistic"], SITES))
    assert "".join(map(str, hessians)).count("1") > 2
    assert hessians[:3] == [0, 1, 0]
    assert all(fit.converged_ for fit in fits)
    assert fits[0].coef_ == pytest.approx(fits[1].coef_, abs=1e-6)


@pytest.mark.filterwarnings("ignore:lam_ = .* of the grid")
def test_rounds_and_bytes_and_cross_validation(narrow):
    path = FederatedLasso().path(X, TARGETS["gaussian"], SITES, lambdas=30)
    whole = path.total_rounds * 16 * P * 3
    assert path.total_rounds < 150
    assert sum(fit.bytes for fit in path.fits) < whole
    chosen = FederatedLassoCV(lambdas=8, cv=3).fit(X, TARGETS["gaussian"], SITES)
    assert chosen.converged_
    assert np.isfinite(chosen.cv_losses_).all()


R = """
suppressMessages(library(glmnet))
X <- as.matrix(read.csv("X.csv", header = FALSE)); y <- scan("y.csv", quiet = TRUE)
l <- scan("l.csv", quiet = TRUE); kind <- commandArgs(TRUE)[1]
m <- glmnet(X, y, family = kind, lambda = l, standardize = FALSE, thresh = 1e-20, maxit = 1e8)
write.table(format(as.matrix(m$beta), digits = 17), "beta.txt", quote = FALSE, row.names = FALSE, col.names = FALSE)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gaussian", "logistic"])
def test_glmnet_agrees(kind, tmp_path):
    rscript = shutil.which("Rscript")
    if (
        rscript is None
        or subprocess.run([rscript, "-e", "library(glmnet)"], capture_output=True, check=False).returncode
    ):
        pytest.skip("needs Rscript with glmnet")
    rng = np.random.default_rng(1)
    X = rng.normal(size=(200, 1500))
    X = (X - X.mean(0)) / X.std(0)
    score = X[:, :10].sum(1)
    y = score + rng.normal(size=200) if kind == "gaussian" else (score + rng.logistic(size=200) > 0) * 1
    path = estimator(kind, tol=1e-10, standardize=False).path(X, y, np.arange(200) % 4, lambdas=20)
    for name, values in (("X", X), ("y", y), ("l", path.lambdas)):
        np.savetxt(tmp_path / f"{name}.csv", values, delimiter=",", fmt="%.17g")
    (tmp_path / "run.R").write_text(R)
    family = "gaussian" if kind == "gaussian" else "binomial"
    subprocess.run([rscript, "run.R", family], cwd=tmp_path, check=True, capture_output=True)
    assert path.coefs[:, 0] == pytest.approx(np.loadtxt(tmp_path / "beta.txt").T, abs=1e-6)
