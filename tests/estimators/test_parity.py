"""The joint fit is the fit of the pooled rows: scikit-learn's, skglm's, and Cox's likelihood written out."""

import numpy as np
import pytest
from scipy import optimize, sparse
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine
from sklearn.linear_model import (
    ElasticNet,
    HuberRegressor,
    Lasso,
    LinearRegression,
    LogisticRegression,
    PoissonRegressor,
)
from sklearn.linear_model._huber import _huber_loss_and_gradient
from sklearn.preprocessing import StandardScaler

from fednmap import simulate
from fednmap.algorithms import FedNMapMemory
from fednmap.estimators import (
    FederatedCoxRegression,
    FederatedElasticNet,
    FederatedGLM,
    FederatedHuberRegressor,
    FederatedLasso,
    FederatedLinearRegression,
    FederatedLogisticRegression,
    FederatedPoissonRegressor,
)
from fednmap.estimators.engine import minimise
from fednmap.regularizers import L1

TIGHT = {"tol": 1e-10, "max_rounds": 3000}
SITES = pytest.mark.parametrize("n", [1, 4, 20])


def by_target(y, n):
    """Sites sorted by target: as unlike each other as can be."""
    return np.argsort(np.argsort(y, kind="stable")) * n // len(y)


def scaled(load):
    X, y = load(return_X_y=True)
    return StandardScaler().fit_transform(X), y


def same(fitted, reference, tolerance=1e-6):
    assert fitted.converged_
    scale = max(1.0, np.abs(reference.coef_).max())
    assert np.abs(fitted.coef_ - reference.coef_).max() <= tolerance * scale
    assert np.abs(fitted.intercept_ - reference.intercept_).max() <= tolerance * max(
        scale, np.abs(fitted.intercept_).max()
    )


@SITES
def test_linear(n):
    X, y = scaled(load_diabetes)
    same(FederatedLinearRegression(**TIGHT).fit(X, y, by_target(y, n)), LinearRegression().fit(X, y))


@SITES
def test_lasso(n):
    X, y = scaled(load_diabetes)
    reference = Lasso(alpha=1.0, tol=1e-14, max_iter=100_000).fit(X, y)
    same(FederatedLasso(1.0, standardize=False, **TIGHT).fit(X, y, by_target(y, n)), reference)


@SITES
def test_elastic_net(n):
    X, y = scaled(load_diabetes)
    reference = ElasticNet(alpha=0.5, l1_ratio=0.7, tol=1e-14, max_iter=100_000).fit(X, y)
    same(FederatedElasticNet(0.5, l1_ratio=0.7, standardize=False, **TIGHT).fit(X, y, by_target(y, n)), reference)


@SITES
@pytest.mark.parametrize(("penalty", "ratio"), [("ridge", 0.0), ("elastic-net", 0.5), ("l1", 1.0)])
def test_logistic(n, penalty, ratio):
    X, y = scaled(load_breast_cancer)
    lam = 0.02
    reference = LogisticRegression(C=1 / (len(y) * lam), l1_ratio=ratio, solver="saga", tol=1e-11, max_iter=50_000)
    fitted = FederatedLogisticRegression(penalty, lam, l1_ratio=ratio, standardize=False, **TIGHT)
    same(fitted.fit(X, y, by_target(y, n)), reference.fit(X, y))


@SITES
def test_multinomial(n):
    X, y = scaled(load_wine)
    lam = 0.05
    reference = LogisticRegression(C=1 / (len(y) * lam), l1_ratio=0.0, tol=1e-12, max_iter=50_000).fit(X, y)
    fitted = FederatedLogisticRegression("ridge", lam, standardize=False, **TIGHT).fit(X, y, by_target(y, n))
    same(fitted, reference, 2e-6)
    assert fitted.predict_proba(X) == pytest.approx(reference.predict_proba(X), abs=1e-6)


@SITES
def test_poisson(n):
    X, y = scaled(load_diabetes)
    counts = np.rint(y / 20)
    reference = PoissonRegressor(alpha=0.1, tol=1e-12, max_iter=10_000).fit(X, counts)
    fitted = FederatedPoissonRegressor("ridge", 0.1, standardize=False, **TIGHT).fit(X, counts, by_target(counts, n))
    same(fitted, reference)


@SITES
def test_huber(n):
    X, y = scaled(load_diabetes)
    y = y / 50 + 20 * (np.arange(len(y)) % 17 == 0)
    reference = HuberRegressor(alpha=1.0, tol=1e-11, max_iter=100_000).fit(X, y)
    further = optimize.minimize(  # scikit-learn's L-BFGS stops on the objective, four digits away from the minimiser
        _huber_loss_and_gradient,
        np.r_[reference.coef_, reference.intercept_, reference.scale_],
        args=(X, y, 1.35, 1.0, np.ones(len(y))),
        jac=True,
        method="BFGS",
        options={"gtol": 1e-9},
    ).x
    reference.coef_, reference.intercept_, reference.scale_ = further[:-2], further[-2], further[-1]
    fitted = FederatedHuberRegressor(lam=2 / len(y), standardize=False, **TIGHT).fit(X, y, by_target(y, n))
    same(fitted, reference)
    assert fitted.scale_ == pytest.approx(reference.scale_, rel=1e-6)


def partial_likelihood(X, time, event, sites, ties):
    """- log of the stratified partial likelihood as a function of b, event by event, as in the textbooks."""

    def negative_log(b):
        total, eta = 0.0, X @ b
        for site in np.unique(sites):
            mine = sites == site
            for t in np.unique(time[mine & (event == 1)]):
                died = mine & (time == t) & (event == 1)
                risk, tied, d = np.exp(eta[mine & (time >= t)]).sum(), np.exp(eta[died]).sum(), died.sum()
                total -= eta[died].sum()
                total += sum(np.log(risk - (j / d if ties == "efron" else 0) * tied) for j in range(d))
        return total / len(time)

    return negative_log


def survivors(rows=160, seed=3):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, 3)) * [1, 5, 0.1]
    hazard = np.exp(X @ [0.8, -0.1, 4.0])
    time, censored = np.ceil(10 * rng.exponential(1 / hazard)), np.ceil(rng.exponential(20, rows))
    return X, np.minimum(time, censored), (time <= censored).astype(float)


@SITES
@pytest.mark.parametrize("ties", ["breslow", "efron"])
def test_cox(n, ties):
    X, time, event = survivors()
    sites = np.arange(len(time)) * n // len(time)
    fitted = FederatedCoxRegression(ties=ties, **TIGHT).fit(X, np.c_[time, event], sites)
    cost = partial_likelihood(X, time, event, sites, ties)
    reference = optimize.minimize(cost, np.zeros(3), jac="3-point", method="BFGS", options={"gtol": 1e-9}).x
    assert fitted.objective_ == pytest.approx(cost(fitted.coef_), abs=1e-12)
    assert fitted.objective_ <= cost(reference) + 1e-13
    assert fitted.coef_ == pytest.approx(reference, abs=2e-6)


@pytest.mark.slow  # skglm compiles itself first
@SITES
def test_lasso_of_skglm(n):
    skglm = pytest.importorskip("skglm")
    X, y = scaled(load_diabetes)
    reference = skglm.Lasso(alpha=1.0, tol=1e-12, max_iter=1000).fit(X, y)
    same(FederatedLasso(1.0, standardize=False, **TIGHT).fit(X, y, by_target(y, n)), reference)


@pytest.mark.slow
@SITES
def test_logistic_l1_of_skglm(n):
    skglm = pytest.importorskip("skglm")
    X, y = scaled(load_breast_cancer)
    solver = skglm.solvers.ProxNewton(tol=1e-12, max_iter=1000)
    reference = skglm.GeneralizedLinearEstimator(skglm.datafits.Logistic(), skglm.penalties.L1(0.02), solver)
    reference.fit(np.asfortranarray(X), 2.0 * y - 1)
    reference.coef_, reference.intercept_ = np.atleast_2d(reference.coef_), np.atleast_1d(reference.intercept_)
    fitted = FederatedLogisticRegression("l1", 0.02, standardize=False, **TIGHT).fit(X, y, by_target(y, n))
    same(fitted, reference)


@pytest.mark.slow
@SITES
@pytest.mark.parametrize("penalty", ["mcp", "scad"])
def test_folded_concave_of_skglm(n, penalty):
    skglm = pytest.importorskip("skglm")
    X, y = scaled(load_diabetes)
    y = (y - y.mean()) / y.std()
    phi = skglm.penalties.MCPenalty(0.1, 3.0) if penalty == "mcp" else skglm.penalties.SCAD(0.1, 3.7)
    solver = skglm.solvers.AndersonCD(tol=1e-12, fit_intercept=False)
    reference = skglm.GeneralizedLinearEstimator(skglm.datafits.Quadratic(), phi, solver).fit(X, y)
    fitted = FederatedGLM("gaussian", penalty, 0.1, **TIGHT).fit(X, y, by_target(y, n))
    assert fitted.converged_
    assert (fitted.coef_ != 0).tolist() == (reference.coef_ != 0).tolist()
    assert fitted.coef_ == pytest.approx(reference.coef_, abs=1e-6)


def test_glmnet_convention():
    """With standardize=True the penalty is on the coefficients of the standardised columns."""
    X, y = load_diabetes(return_X_y=True)
    X = X * np.arange(1, 11) + 5
    fitted = FederatedLasso(2.0, **TIGHT).fit(X, y, by_target(y, 4))
    reference = Lasso(alpha=2.0, tol=1e-14, max_iter=100_000).fit(StandardScaler().fit_transform(X), y)
    assert fitted.coef_ * X.std(0) == pytest.approx(reference.coef_, abs=1e-5)
    assert fitted.predict(X) == pytest.approx(reference.predict(StandardScaler().fit_transform(X)), abs=1e-5)


@pytest.mark.parametrize("standardize", [True, False])
def test_sparse_rows_give_what_dense_ones_give(standardize):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 12)) * (rng.random((300, 12)) < 0.2)
    y = (X @ rng.normal(size=12) + rng.normal(size=300) > 0.3).astype(int)
    make = FederatedLogisticRegression(lam=0.01, standardize=standardize, **TIGHT)
    dense, thin = (make.fit(given, y, by_target(y, 4)).coef_ for given in (X, sparse.csr_array(X)))
    assert thin == pytest.approx(dense, abs=1e-7)


def test_a_fit_is_the_simulation_of_its_rounds():
    """The engine leaves the clients' states out; the trajectory is that of `simulate`."""
    X, y = scaled(load_diabetes)
    rows = FederatedLasso(1.0)._read(X, y, by_target(y, 4), None)
    prepared = FederatedLasso(1.0)._prepare(rows)
    phi = prepared.with_penalty(L1(1.0))
    found = minimise(prepared, phi, prepared.start, tol=1e-9, max_rounds=12)
    L = prepared.smoothness(prepared.start)
    method = FedNMapMemory(phi, eta_a=1 / L, Q=1, gamma=1 / L, memory=len(prepared.start))
    *_, last = simulate(method, prepared.problem, rounds=11, start=prepared.start)
    spent = sum(r.bytes_up + r.bytes_down for r in simulate(method, prepared.problem, rounds=12, start=prepared.start))
    assert found.rounds == 12
    assert method.model(last.server).tolist() == pytest.approx(found.x.tolist(), rel=1e-6)
    assert found.bytes == spent
