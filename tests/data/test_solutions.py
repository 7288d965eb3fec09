"""Known answers on real and made data: scikit-learn's optimum, and the support that made the targets."""

import pytest
import torch
from public_data import needs

from fednmap import simulate
from fednmap.algorithms import FedNMap
from fednmap.data import ClientData, load, partition
from fednmap.data.sparse import to_scipy
from fednmap.measure import objective, support
from fednmap.problems import LeastSquares, Logistic
from fednmap.regularizers import L1


@pytest.mark.slow
def test_fednmap_reaches_scikit_learns_optimum_on_a9a():
    needs("libsvm", "a9a")
    from sklearn.linear_model import LogisticRegression

    data, lam = load("svm:libsvm/a9a", test="libsvm/a9a.t"), 1e-3
    x, y = data.x_train.double(), data.y_train
    rows = len(y)
    solver = LogisticRegression(
        l1_ratio=1,
        C=1 / (rows * lam),
        solver="liblinear",
        fit_intercept=False,
        tol=1e-10,
        max_iter=10_000,
        random_state=0,
    )
    best = torch.from_numpy(solver.fit(to_scipy(x), y.numpy()).coef_[0])

    parts = ClientData.split(x, y, partition("sorted", y, 10))  # by label: most clients have one label only
    problem, phi = Logistic(parts, weights=parts.sizes.double() / rows), L1(lam)
    smoothness = problem.smoothness()
    method = FedNMap(phi, eta_a=3 / smoothness, Q=5)
    optimum = float(objective(problem, phi, best))
    for last in simulate(method, problem, rounds=500):
        found = method.model(last.server)
    assert float(objective(problem, phi, found)) == pytest.approx(optimum, rel=1e-8)
    assert support(found, best) == (1, 1)


def test_support_recovery_on_sparse_regression_is_exact():
    data = load("sparse-regression")
    parts = partition("natural", data.y_train, 10, ids=data.clients)
    problem = LeastSquares(ClientData.split(data.x_train.double(), data.y_train.double(), parts))
    x = data.x_train.double()
    smoothness = float(torch.linalg.matrix_norm(x.T @ x / len(x), 2))
    method = FedNMap(L1(0.2), eta_a=0.2 / smoothness, Q=5)
    for last in simulate(method, problem, rounds=600):
        found = method.model(last.server)
    assert support(found, data.truth) == (1, 1)
    # what it is about: without the penalty everything is found, and nearly nothing of it is true
    dense = FedNMap(L1(1e-6), eta_a=0.2 / smoothness, Q=5)
    *_, last = simulate(dense, problem, rounds=100)
    precision, recall = support(dense.model(last.server), data.truth)
    assert recall == 1
    assert precision < 0.1


@pytest.mark.parametrize(
    ("found", "true", "expected"),
    [
        ([1, 0, 2, 0], [1, 0, 1, 0], (1, 1)),
        ([1, 1, 0, 0], [1, 0, 1, 0], (0.5, 0.5)),
        ([1, 1, 1, 1], [1, 0, 0, 0], (0.25, 1)),
        ([0, 0], [1, 0], (1, 0)),
        ([0, 0], [0, 0], (1, 1)),
    ],
)
def test_precision_and_recall_by_hand(found, true, expected):
    assert support(torch.tensor(found), torch.tensor(true)) == expected
