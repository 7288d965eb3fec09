"""Penalty factors and bounds of single coefficients, against glmnet, brute force and their own meaning."""

import json
import shutil
import subprocess

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import minimize
from sklearn.datasets import load_breast_cancer, load_diabetes

from fednmap import InputError
from fednmap.estimators import (
    FederatedCoxRegression,
    FederatedElasticNet,
    FederatedGLM,
    FederatedLasso,
    FederatedLassoCV,
    FederatedLinearRegression,
    FederatedLogisticRegression,
)
from fednmap.estimators.penalties import Bounded
from fednmap.regularizers import L1, MCP
from fednmap.testing import check_regularizer


@pytest.fixture
def diabetes():
    X, y = load_diabetes(return_X_y=True, as_frame=True)
    return X, y.to_numpy(), np.arange(len(y)) % 4


@pytest.mark.parametrize("phi", [L1(0.3), MCP(0.5, 3.0)], ids=repr)
def test_the_prox_of_bounds_is_the_least_value(phi):
    lo, hi = torch.tensor([-0.5, 0.0, -torch.inf, -1.0]), torch.tensor([0.5, torch.inf, 0.2, 0.0])
    check_regularizer(Bounded(phi, lo, hi), dim=4)


def test_a_factor_of_0_leaves_a_column_alone(diabetes):
    X, y, sites = diabetes
    path = FederatedLasso(penalty_factor={"bmi": 0, "s5": 0.0}, tol=1e-9).path(X, y, sites, lambdas=8)
    free = [list(X.columns).index(name) for name in ("bmi", "s5")]
    assert path.coefs[:, 0, free].all()
    assert np.flatnonzero(np.abs(path.coefs[0, 0]) > 1e-5).tolist() == free  # to the tolerance
    assert path.nonzero[1] > 2
    alone = FederatedLinearRegression(tol=1e-10).fit(X[["bmi", "s5"]], y, sites)
    assert path.coefs[0, 0, free] == pytest.approx(alone.coef_, rel=1e-5)


def test_a_factor_is_a_weight_of_the_penalty(diabetes):
    X, y, sites = diabetes
    given = [1.0, 0.5, 2.0, 0, 1, 1, 3, 1, 1, 0.1]
    for penalty in ("l1", "elastic-net", "mcp"):
        twice = FederatedGLM("gaussian", penalty, 1.0, penalty_factor=given, tol=1e-10).fit(X, y, sites)
        named = dict(zip(X.columns, np.array(given) / 2, strict=True))
        if penalty != "mcp":
            half = FederatedGLM("gaussian", penalty, 2.0, penalty_factor=named, tol=1e-10).fit(X, y, sites)
            assert half.coef_ == pytest.approx(twice.coef_, rel=1e-6, abs=1e-6)
        ones = FederatedGLM("gaussian", penalty, 1.0, penalty_factor=np.ones(10), tol=1e-10).fit(X, y, sites)
        assert ones.coef_ == pytest.approx(FederatedGLM("gaussian", penalty, 1.0, tol=1e-10).fit(X, y, sites).coef_)


def test_bounds_are_those_of_the_given_columns(diabetes):
    """Against a solver of bounded problems."""
    X, y, sites = diabetes
    low, high = np.array([0, -100, -np.inf, 0] + [-np.inf] * 6), np.array([np.inf, 0, 300, 200] + [np.inf] * 6)
    bounds = dict(enumerate(zip(low, high, strict=True)))
    found = FederatedLinearRegression(bounds=bounds, tol=1e-10).fit(X, y, sites)
    A = np.column_stack([X, np.ones(len(X))])
    other = minimize(
        lambda b: (np.square(A @ b - y).mean() / 2, A.T @ (A @ b - y) / len(y)),
        np.zeros(11),
        jac=True,
        method="L-BFGS-B",
        bounds=[*zip(low, high, strict=True), (None, None)],
        options={"ftol": 1e-15, "gtol": 1e-9, "maxiter": 100_000, "maxfun": 100_000},
    )
    assert found.objective_ <= other.fun * (1 + 1e-9)
    assert np.square(A @ np.append(found.coef_, found.intercept_) - y).mean() / 2 == pytest.approx(found.objective_)
    assert (found.coef_ >= low - 1e-9).all()
    assert (found.coef_ <= high + 1e-9).all()
    with pytest.raises(InputError, match="expected no bounds for standard errors"):
        found.inference(X, y, sites)


def test_one_pair_bounds_all(diabetes):
    X, y, sites = diabetes
    pair = FederatedLasso(1.0, bounds=(0, None), tol=1e-9).fit(X, y, sites)
    named = FederatedLasso(1.0, bounds=dict.fromkeys(X.columns, (0, np.inf)), tol=1e-9).fit(X, y, sites)
    assert (pair.coef_ >= 0).all()
    assert (pair.coef_ == named.coef_).all()
    first = FederatedLasso(bounds=(0, None), tol=1e-9).path(X, y, sites, lambdas=3).lambdas[0]
    assert not FederatedLasso(first * 1.0001, bounds=(0, None), tol=1e-9).fit(X, y, sites).coef_.any()
    assert FederatedLasso(first * 0.98, bounds=(0, None), tol=1e-9).fit(X, y, sites).coef_.any()


def test_names_may_have_any_signs():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(60, 3)), columns=["age, years", "dose [mg]", "a=b"])
    y = frame.to_numpy() @ [1.0, -1.0, 0.5] + rng.normal(size=60)
    given = {"age, years": 0, "dose [mg]": 5.0, "a=b": 2}
    found = FederatedLasso(0.5, penalty_factor=given, bounds={"a=b": (None, 0)}).fit(frame, y, np.arange(60) % 3)
    assert found.coef_[0] > 0
    assert (found.coef_[1:] == 0).all()


def test_a_factor_of_a_term_is_that_of_its_columns():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"age": rng.normal(60, 9, 90), "stage": rng.choice(["I", "II", "III"], 90)})
    frame["y"] = rng.normal(size=90)
    given = {"bs(age, 4)": 0}
    model = FederatedLasso(10.0, formula="y ~ bs(age, 4) + C(stage)", penalty_factor=given)
    model.fit(frame, sites=np.arange(90) % 3)
    assert model.coef_[:4].all()
    assert not model.coef_[4:].any()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"penalty_factor": {"bmj": 0}}, "penalty_factor names column 'bmj'"),
        ({"penalty_factor": {"bmi": -1}}, "penalty_factor of 'bmi' to be a finite number"),
        ({"penalty_factor": {"bmi": np.nan}}, "penalty_factor of 'bmi' to be a finite number"),
        ({"penalty_factor": [1, 2]}, "or 10 numbers"),
        ({"penalty_factor": {10: 1}}, "names column 10, and X has 10"),
        ({"penalty_factor": "age"}, "expected penalty_factor by column"),
        ({"bounds": {"bmi": (1, 2)}}, "to have 0 between low and high"),
        ({"bounds": {"bmi": 3}}, "to be \\(low, high\\)"),
        ({"bounds": (0, 1, 2)}, "to be \\(low, high\\)"),
        ({"bounds": {"bmi": (0, None)}, "site_effects": "sparse"}, "expected no bounds with site_effects"),
    ],
)
def test_what_is_no_factor_and_no_bound_is_refused(given, words, diabetes):
    X, y, sites = diabetes
    with pytest.raises(InputError, match=words):
        FederatedLasso(1.0, **given).fit(X, y, sites)
    with pytest.raises(InputError, match=r"expected penalty l1, .* with penalty_factor, got 'none'"):
        FederatedLinearRegression(penalty_factor={"bmi": 0}).fit(X, y, sites)


def test_a_choice_of_lam_has_factors_and_bounds(diabetes):
    X, y, sites = diabetes
    chosen = FederatedLassoCV(lambdas=10, cv=3, penalty_factor={"age": 0}, bounds={"bmi": (0, 100)}, tol=1e-8)
    chosen.fit(X, y, sites)
    same = FederatedLasso(chosen.lam_, penalty_factor={"age": 0}, bounds={"bmi": (0, 100)}, tol=1e-8)
    assert chosen.coef_ == pytest.approx(same.fit(X, y, sites).coef_, rel=1e-4, abs=1e-4)
    assert chosen.coef_[0] != 0
    assert chosen.coef_[2] == pytest.approx(100)


GLMNET = """
suppressMessages(library(glmnet)); library(survival)
d <- read.csv(commandArgs(TRUE)[1]); told <- strsplit(commandArgs(TRUE)[-1], ",")
n <- function(k) as.numeric(told[[k]])
family <- told[[1]]; x <- as.matrix(d[, grep("^x", names(d))])
y <- if (family == "cox") Surv(d$y, d$event) else d$y
f <- n(2)
fit <- glmnet(x, y, family = family, alpha = n(3), lambda = n(4) * sum(f) / ncol(x), penalty.factor = f,
              lower.limits = n(5), upper.limits = n(6), thresh = 1e-20, maxit = 1e7)
b <- as.vector(coef(fit)); cat(sprintf("[%s]", paste(format(b, digits = 15), collapse = ",")))
"""
MODELS = [("gaussian", 1.0), ("binomial", 1.0), ("binomial", 0.5), ("poisson", 0.3), ("cox", 1.0), ("cox", 0.5)]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "alpha"), MODELS)
@pytest.mark.parametrize("bounded", [False, True])
def test_factors_and_limits_are_those_of_glmnet(family, alpha, bounded, tmp_path):
    if shutil.which("Rscript") is None:
        pytest.skip("R is not installed")
    rng = np.random.default_rng(1)
    X = load_breast_cancer().data[:300, :8]
    X = X / X.std(0) * [1, 2, 0.5, 1, 3, 1, 1, 1]
    score = (X - X.mean(0)) @ rng.normal(size=8) / 4
    if family == "cox":
        y = np.column_stack([rng.exponential(np.exp(-score)).round(3) + 0.001, rng.random(300) < 0.7])
    else:
        noise = {"gaussian": rng.normal, "binomial": lambda s: rng.random(300) < 1 / (1 + np.exp(-s))}
        y = noise.get(family, lambda s: rng.poisson(np.exp(s)))(score).astype(float)
    factor = np.array([0, 1, 2, 0.5, 1, 1, 0.1, 3])
    low = np.where(np.arange(8) % 2, 0, -0.15) if bounded else np.full(8, -np.inf)
    high = np.where(np.arange(8) % 3, 0.1, 0.3) if bounded else np.full(8, np.inf)
    frame = pd.DataFrame(X, columns=[f"x{j}" for j in range(8)])
    frame = frame.assign(y=y if y.ndim == 1 else y[:, 0], event=0 if y.ndim == 1 else y[:, 1])
    frame.to_csv(tmp_path / "rows.csv", index=False, float_format="%.17g")
    words = [",".join(format(v, ".17g") for v in part) for part in (factor, [alpha], [0.05], low, high)]
    command = ["Rscript", "-e", GLMNET, str(tmp_path / "rows.csv"), family, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if "there is no package called" in done.stderr:
        pytest.skip("glmnet is not installed")
    assert done.returncode == 0, done.stderr
    given = {"penalty": "elastic-net", "lam": 0.05, "l1_ratio": alpha, "penalty_factor": factor, "tol": 1e-11}
    if bounded:
        given["bounds"] = dict(enumerate(zip(low, high, strict=True)))
    if family == "cox":
        own = FederatedCoxRegression(ties="breslow", **given).fit(X, y).coef_  # one site: no strata
    else:
        kind = {"binomial": "logistic"}.get(family, family)
        model = FederatedGLM(kind, **given).fit(X, y, np.arange(300) % 4)
        own = np.append(model.intercept_, model.coef_)
    assert own == pytest.approx(json.loads(done.stdout), abs=1e-6)


def test_logistic_regression_of_three_classes_has_factors_by_column():
    X, y = load_breast_cancer(return_X_y=True)
    X, three = X[:, :4], y + (X[:, 0] > 18)
    model = FederatedLogisticRegression("l1", 0.2, penalty_factor={0: 0}, bounds={1: (0, None)}).fit(X, three)
    assert model.coef_[:, 0].any()
    assert (model.coef_[:, 1] >= 0).all()
    assert FederatedElasticNet(5.0, penalty_factor={"x0": 0}).fit(X, y).coef_[0]
