"""Data made by a program follows the distribution it is said to follow."""

import pytest
import torch

from fednmap.data import load


def client_means(data):
    return torch.stack([data.x_train[data.clients == i].mean() for i in data.clients.unique()])


def test_synthetic_spreads_features_as_beta_says():
    # the mean feature of client k is near N(B_k, 1/60) with B_k of deviation beta
    for beta, low, high in ((0.0, 0.05, 0.3), (2.0, 1.4, 2.6)):
        deviation = float(client_means(load(f"synthetic:1,{beta}", clients=60)).std())
        assert low < deviation < high


def test_synthetic_is_a_function_of_its_seed():
    a, b, c = (load("synthetic:1,1", seed=seed) for seed in (0, 0, 1))
    assert torch.equal(a.x_train, b.x_train)
    assert not torch.equal(a.x_train[:50], c.x_train[:50])
    assert a.clients.unique().tolist() == list(range(30))
    assert int((a.clients.bincount() + a.test_clients.bincount()).min()) >= 50


def test_synthetic_labels_are_each_clients_own_linear_rule():
    from sklearn.linear_model import LogisticRegression

    data = load("synthetic:1,1", clients=4)
    i = max(range(4), key=lambda k: len(data.y_train[data.clients == k].unique()))
    mine = data.clients == i
    x, y = data.x_train[mine].numpy(), data.y_train[mine].numpy()
    assert LogisticRegression(C=1e4, max_iter=5000).fit(x, y).score(x, y) > 0.99


def test_sparse_regression_has_the_stated_means_covariance_and_noise():
    data = load("sparse-regression", clients=2, samples=50_000, features=6, support=2, noise=0.5)
    assert data.truth.tolist() == [1, 1, 0, 0, 0, 0]
    residual = data.y_train - data.x_train @ data.truth
    assert float(residual.std()) == pytest.approx(0.5, rel=0.02)
    expected = 0.5 ** (torch.arange(6)[:, None] - torch.arange(6)).abs()
    means = []
    for i in (0, 1):
        rows = data.x_train[data.clients == i]
        means.append(rows.mean(0))
        assert torch.allclose(torch.cov(rows.T), expected, atol=0.05)
    assert float((means[0] - means[1]).norm()) > 0.5
