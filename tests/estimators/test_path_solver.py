"""Many penalties in the same rounds: what is sent, what is found, what happens where it goes wrong."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine

from fednmap.data.clients import ClientData
from fednmap.estimators import (
    FederatedCoxRegression,
    FederatedElasticNet,
    FederatedGLM,
    FederatedLasso,
    FederatedLassoCV,
    FederatedLogisticRegression,
    FederatedPoissonRegressor,
    engine,
)
from fednmap.estimators.engine import minimise
from fednmap.estimators.path_solver import HessianModel, Penalties, solve
from fednmap.estimators.penalties import shrinkage
from fednmap.problems import GLM
from fednmap.regularizers import L1, MCP, SCAD, Scaled, Separable

TIGHT = {"tol": 1e-9, "max_rounds": 3000}


def table(n=150, p=5, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, p)) * (rng.random((n, p)) < 0.5)
    return X, X @ rng.normal(size=p) + rng.normal(size=n), rng


@pytest.mark.parametrize("thin", [False, True])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("family", ["gaussian", "logistic", "multinomial", "poisson", "huber"])
def test_gradients_at_once_are_those_one_by_one(family, intercept, thin, monkeypatch):
    monkeypatch.setattr("fednmap.problems.glm.PIECE_BYTES", 1)  # several pieces
    X, y, rng = table()
    y = {"logistic": (y > 0) * 1.0, "multinomial": np.digitize(y, [-1, 1]) * 1.0, "poisson": np.rint(y**2)}.get(
        family, y
    )
    x = sparse.csr_array(X) if thin else X
    ends = [0, 40, 90, 150]
    data = [(x[a:b], torch.tensor(y[a:b])) for a, b in itertools.pairwise(ends)]
    weights = torch.tensor(rng.random(150))
    problem = GLM(ClientData.of(data), family, intercept=intercept, weights="samples", sample_weights=weights)
    points = torch.tensor(0.3 * rng.normal(size=(4, problem.dim)))
    assert torch.allclose(problem.gradients(points), torch.stack([problem.gradient(x) for x in points]))
    assert torch.allclose(problem.gradients(points[:1])[0], problem.gradient(points[0]))
    assert torch.allclose(problem.losses(points), torch.stack([problem.loss(x) for x in points]))
    alone = torch.stack([problem.alone(i).loss(points[0]) for i in range(3)])
    assert torch.allclose(problem.client_losses(points[0]), alone)
    squares = problem.outer(points[0])
    each = [
        GLM([(x[j : j + 1], torch.tensor(y[j : j + 1]))], problem.family, intercept=intercept).gradient(points[0])
        for j in range(150)
    ]
    shares = weights / weights.sum()
    assert torch.allclose(squares, sum(s**2 * torch.outer(g, g) for s, g in zip(shares, each, strict=True)))


@pytest.mark.parametrize("family", ["gaussian", "logistic", "multinomial", "poisson", "huber"])
def test_sparse_columns_that_are_scaled_without_a_copy_give_the_same_f(family):
    X, y, rng = table()
    y = {"logistic": y > 0, "multinomial": np.digitize(y, [-1, 1]), "poisson": np.rint(y**2)}.get(family, y)
    estimator, weights = FederatedGLM({"multinomial": "logistic"}.get(family, family)), rng.integers(1, 3, 150)
    thin, full = (
        estimator._prepare(estimator._read(x, y, np.arange(150) % 3, weights)) for x in (sparse.csr_array(X), X)
    )
    assert thin.problem.data.x.layout == torch.sparse_csr
    points = torch.tensor(0.3 * rng.normal(size=(4, len(full.start))))
    points[:, -1] = points[:, -1].abs() + 1  # a scale is positive
    for each in ("gradient", "hessian", "outer", "loss"):
        assert np.allclose(getattr(thin, each)(points[0]), getattr(full, each)(points[0])), each
    if family != "huber":
        assert np.allclose(thin.gradients(points), full.gradients(points))
        assert np.allclose(thin.losses(points), full.losses(points))


def test_gram_matrices_give_the_same_gradients():
    X, y, _ = table()
    rows = FederatedLasso()._read(X, y, np.arange(150) % 3, np.random.default_rng(1).random(150))
    gram = FederatedLasso()._prepare(rows)
    assert gram._gram is not None
    points = torch.randn(3, len(gram.start), dtype=torch.float64)
    assert torch.allclose(gram.gradients(points), gram.problem.gradients(points))
    assert torch.allclose(gram.gradient(points[0]), gram.problem.gradient(points[0]))
    assert gram.smoothness(gram.start) == pytest.approx(gram.problem.smoothness(), rel=1e-2)


WALKS = [
    (FederatedLasso(**TIGHT), load_diabetes),
    (FederatedElasticNet(l1_ratio=0.3, **TIGHT), load_diabetes),
    (FederatedGLM("gaussian", "ridge", **TIGHT), load_diabetes),
    (FederatedLogisticRegression(**TIGHT), load_breast_cancer),
    (FederatedLogisticRegression("elastic-net", fit_intercept=False, **TIGHT), load_breast_cancer),
    (FederatedLogisticRegression(**TIGHT), load_wine),
    (FederatedPoissonRegressor(**TIGHT), load_diabetes),
    (FederatedCoxRegression("l1", **TIGHT), load_diabetes),
]


@pytest.mark.parametrize(("estimator", "load"), WALKS)
def test_a_path_in_common_rounds_is_the_path(estimator, load):
    """Every model has the objective that FedNMap finds by itself."""
    X, y = load(return_X_y=True)
    sites = np.arange(len(y)) % 3
    path = estimator.path(X, y, sites, lambdas=12)
    assert path.converged
    assert path.rounds.max() <= path.total_rounds < path.rounds.sum()
    prepared = estimator._prepare(estimator._read(X, y, sites, None))
    for k in (0, 5, 11):
        phi = prepared.with_penalty(estimator._regularizer(prepared, path.lambdas[k]))
        alone = minimise(prepared, phi, prepared.start, tol=1e-8, max_rounds=3000)
        assert path.fits[k].objective == pytest.approx(alone.objective, rel=1e-9)
        assert path.fits[k].loss == pytest.approx(path.losses[k])


def test_a_path_takes_few_rounds():
    X, y = load_diabetes(return_X_y=True)
    assert FederatedLasso().path(X, y, np.arange(len(y)) % 4).total_rounds <= 8
    X, y = load_breast_cancer(return_X_y=True)
    assert FederatedLogisticRegression().path(X, y, np.arange(len(y)) % 4).total_rounds <= 60


def test_penalties_that_come_in_later_save_gradients(monkeypatch):
    X, y = load_breast_cancer(return_X_y=True)
    few = FederatedLogisticRegression(**TIGHT).path(X, y, np.arange(len(y)) % 4)
    monkeypatch.setattr("fednmap.estimators.path_solver.NEAR", 1.0 + 1e-9)  # nobody has a neighbour
    all_at_once = FederatedLogisticRegression(**TIGHT).path(X, y, np.arange(len(y)) % 4)
    assert few.converged
    assert all_at_once.converged
    assert few.rounds.sum() < 0.9 * all_at_once.rounds.sum()
    assert few.losses == pytest.approx(all_at_once.losses, abs=1e-7)
    assert few.coefs == pytest.approx(all_at_once.coefs, abs=1e-3)


@pytest.mark.parametrize("most", [2, 5])
def test_a_path_that_is_cut_short_says_so(most):
    X, y = load_breast_cancer(return_X_y=True)
    path = FederatedLogisticRegression(max_rounds=most).path(X, y, np.arange(len(y)) % 4)
    assert not path.converged
    assert path.rounds.max() <= most
    assert np.isfinite(path.coefs).all()


def test_what_is_sent_is_counted():
    X, y = load_diabetes(return_X_y=True)
    fitted = FederatedLasso(1.0).fit(X, y, np.arange(len(y)) % 4)
    moments = 4 * 10 * 8 * 4
    assert fitted.bytes_sent_ == moments + fitted.n_iter_ * 4 * 2 * 11 * 8
    path = FederatedLasso().path(X, y, np.arange(len(y)) % 4, lambdas=5)
    assert sum(fit.bytes for fit in path.fits) == (1 + (path.rounds - 1).sum()) * 4 * 2 * 11 * 8


@pytest.mark.filterwarnings("ignore:lam_ = .* of the grid")
def test_what_is_sent_to_choose_lam_is_counted():
    X, y = load_diabetes(return_X_y=True)
    sites = np.arange(len(y)) % 4
    chosen = FederatedLassoCV(cv="leave-one-site-out", lambdas=[1.0, 0.1]).fit(X, y, sites)
    whole = chosen.path_
    plain = FederatedLasso().path(X, y, sites, lambdas=[1.0, 0.1])
    assert plain.total_rounds <= whole.total_rounds <= plain.total_rounds + 10  # for an exact model at the chosen lam
    parts = [
        FederatedLasso().path(X[sites != k], y[sites != k], sites[sites != k], lambdas=[1.0, 0.1]) for k in range(4)
    ]
    assert chosen.n_iter_ == sum(path.total_rounds for path in (whole, *parts))
    moments = 4 * 10 * 8 * (4 + 4 * 3)
    assert chosen.bytes_sent_ == moments + sum(fit.bytes for path in (whole, *parts) for fit in path.fits)


def test_what_does_not_end_is_finished_by_fednmap(monkeypatch):
    X, y = load_breast_cancer(return_X_y=True)
    expected = FederatedLogisticRegression(tol=1e-8).fit(X, y)
    monkeypatch.setattr(engine, "PATIENCE", 3)
    found = FederatedLogisticRegression(tol=1e-8).fit(X, y)
    assert found.converged_
    assert found.n_iter_ > 3
    assert found.objective_ == pytest.approx(expected.objective_, rel=1e-10)


def test_gradients_that_overflow_are_left():
    """exp of a long step: the step is taken back, and nothing is learnt from infinity."""
    X, y, rng = table(300)
    counts = rng.poisson(np.exp(np.clip(3 * y, None, 6))).astype(float)
    fitted = FederatedPoissonRegressor("none", standardize=False, tol=1e-8, max_rounds=3000).fit(50 * X, counts)
    assert fitted.converged_
    other = FederatedPoissonRegressor("none", tol=1e-8, max_rounds=3000).fit(X, counts)
    assert 50 * fitted.coef_ == pytest.approx(other.coef_, rel=1e-4)


def test_a_model_learns_secants():
    rng = np.random.default_rng(0)
    root = rng.normal(size=(6, 6))
    H = root @ root.T + np.eye(6)
    model = HessianModel(np.eye(6), constant=True)
    s = rng.normal(size=(3, 6))
    model.learn(np.concatenate([s, s[:1] + s[1:2]]), np.concatenate([s, s[:1] + s[1:2]]) @ H)  # one too many
    assert s @ model.D == pytest.approx(s @ H)
    assert np.linalg.eigvalsh(model.D)[0] > 0
    assert model.largest() >= np.linalg.eigvalsh(model.D)[-1] * 0.9
    phi = Penalties(np.full((1, 1), 0.3), np.full((1, 1), 0.2), 5)
    x, g = rng.normal(size=(1, 6)), rng.normal(size=(1, 6))
    by_sets = model.next_points(x, g, phi, np.array([1e-12]))
    by_steps = model._by_steps(x, g, phi, np.array([1e-6]))
    assert by_sets == pytest.approx(by_steps, abs=1e-6)  # whose products have single precision
    none = HessianModel(np.diag([1.0, 1.0, 1.0, 1.0, 1.0, -0.1]), constant=True)
    assert np.isfinite(none._by_steps(x, g, phi, np.array([1e-6]))).all()  # it has no minimum


def test_a_quadratic_is_minimised():
    rng = np.random.default_rng(0)
    root = rng.normal(size=(20, 20))
    H, b = root @ root.T / 20, rng.normal(size=20)
    lambdas = np.geomspace(1, 1e-3, 30)[:, None]
    found = solve(
        lambda points: points @ H - b,
        np.zeros(20),
        Penalties(lambdas, 0 * lambdas, 20),
        np.diag(H).copy(),
        tol=1e-9,
        max_rounds=100,
        constant=True,
    )
    assert (found.sizes <= 1e-9).all()
    assert found.total == found.rounds.max() <= 14
    for x, lam in zip(found.x, lambdas[:, 0], strict=True):
        slope = H @ x - b
        assert slope[x != 0] == pytest.approx(-lam * np.sign(x[x != 0]), abs=1e-8)
        assert (np.abs(slope[x == 0]) <= lam + 1e-8).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("unit", [2.0**-150, 2.0**130])
def test_a_path_is_the_same_in_any_unit(unit):
    X, y = load_diabetes(return_X_y=True)
    sites = np.arange(len(y)) % 5
    ours, theirs = (FederatedLasso().path(X, k * y, sites, lambdas=20) for k in (1.0, unit))
    assert ours.total_rounds == theirs.total_rounds
    np.testing.assert_allclose(theirs.coefs / unit, ours.coefs, rtol=1e-6, atol=1e-6)


def test_weights_of_single_coefficients_are_solved_in_common_rounds():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 8)).cumsum(1) / 3
    y = rng.poisson(np.exp(1 + 0.3 * X[:, 0] - 0.2 * X[:, 1])).astype(float)
    one = torch.ones(8, dtype=torch.float64)
    alike = [FederatedPoissonRegressor(penalty).path(X, y, lambdas=5).coefs for penalty in (L1(1.0), L1(one))]
    np.testing.assert_allclose(*alike, rtol=1e-10)
    free = L1(one * torch.tensor([0, 0, 1, 1, 1, 1, 2, 2]))
    path = FederatedPoissonRegressor(free, standardize=False, tol=1e-9).path(X, y, lambdas=5)
    assert path.converged
    assert path.total_rounds < path.rounds.sum()
    for lam, coef, intercept in zip(path.lambdas, path.coefs[:, 0], path.intercepts[:, 0], strict=True):
        slope = X.T @ (np.exp(X @ coef + intercept) - y) / len(y)
        pull = lam * free.weight.numpy()
        inside = coef != 0
        assert inside[:2].all()
        np.testing.assert_allclose(slope[inside], -(pull * np.sign(coef))[inside], atol=1e-7)
        assert (np.abs(slope) <= pull + 1e-7).all()


CONCAVE = [MCP(0.3, 3.0), SCAD(0.2, 3.7), Scaled(MCP(0.5, 2.0), 0.4), Separable([(slice(0, 3), MCP(0.3, 3.0))])]


def penalties_of(phi, end):
    l1, l2, rho, knee = (np.atleast_2d(part) for part in shrinkage(phi, end))
    return Penalties(l1, l2, end, np.maximum(rho, 1e-300), knee)


@pytest.mark.parametrize("phi", CONCAVE, ids=repr)
def test_concave_penalties_are_the_regularizers(phi):
    ours, v = penalties_of(phi, 3), np.random.default_rng(0).normal(size=(500, 3))
    assert ours.prox(v.copy(), 0.7) == pytest.approx(phi.prox(torch.from_numpy(v), 0.7).numpy(), abs=1e-14)
    assert ours.value(v) == pytest.approx(phi.value(torch.from_numpy(v)).numpy(), abs=1e-14)


@pytest.mark.parametrize("phi", CONCAVE[:3], ids=repr)
def test_concave_penalties_against_brute_force(phi):
    """H is steeper than phi is concave, so that the minimum is the only stationary point."""
    H, rng, ours = np.array([[1.0, 0.4], [0.4, 1.0]]), np.random.default_rng(1), penalties_of(phi, 2)
    mesh = np.linspace(-4, 4, 1601)
    grid = np.stack(np.meshgrid(mesh, mesh), -1).reshape(-1, 2)
    curve = 0.5 * np.einsum("ij,ij->i", grid @ H, grid) + phi.value(torch.from_numpy(grid)).numpy()
    for b in rng.normal(scale=0.8, size=(20, 2)):
        found = solve(lambda x, b=b: x @ H - b, np.zeros(2), ours, np.ones(2), tol=1e-9, max_rounds=60, constant=True)
        x = found.x[0]
        assert found.sizes[0] <= 1e-9
        value = 0.5 * x @ H @ x - b @ x + float(phi.value(torch.from_numpy(x)))
        assert value <= (curve - grid @ b).min() + 1e-12
        assert x == pytest.approx(grid[(curve - grid @ b).argmin()], abs=0.01)


@pytest.mark.parametrize("penalty", ["mcp", "scad"])
@pytest.mark.parametrize("family", ["gaussian", "poisson", "cox"])
def test_concave_paths_in_common_rounds_are_stationary(family, penalty):
    """To the tolerance, by the slopes of MCP and SCAD; with objectives like those of FedNMap from lam to lam."""
    X, y = load_diabetes(return_X_y=True)
    target = np.column_stack([y, np.arange(len(y)) % 3 > 0]) if family == "cox" else y
    model = (FederatedCoxRegression if family == "cox" else partial(FederatedGLM, family))(penalty, tol=1e-7)
    sites = np.arange(len(y)) % 4
    path = model.path(X, target, sites, lambdas=30)
    assert path.converged
    assert path.total_rounds < 60
    f, after, objectives = model._prepare(model._read(X, target, sites, None)), None, []
    for lam, fit in zip(path.lambdas, path.fits, strict=True):
        w, g = fit.x.numpy()[: f.end], f.gradient(fit.x).numpy()[: f.end]
        size = np.abs(w)
        fall = size / 3 if penalty == "mcp" else np.maximum(size - lam, 0) / 2.7
        slope = np.sign(w) * np.maximum(lam - fall, 0)
        wrong = np.where(w != 0, np.abs(g + slope), np.maximum(np.abs(g) - lam, 0))
        assert wrong.max() <= 3e-7 * f.unit
        phi = f.with_penalty(model._regularizer(f, lam))
        after = minimise(f, phi, f.start, tol=1e-6, max_rounds=300, after=after)
        objectives.append(after.objective)
    assert np.mean([fit.objective for fit in path.fits]) == pytest.approx(np.mean(objectives), rel=1e-3)
