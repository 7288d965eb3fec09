"""Measured constants against the ones that can be computed: eigenvalues, variances over all minibatches."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from fednmap.measure import objective
from fednmap.models import mlp
from fednmap.problems import LeastSquares, Logistic, Network
from fednmap.regularizers import L1, Zero
from fednmap.theory import (
    estimate_gap,
    estimate_heterogeneity,
    estimate_smoothness,
    estimate_variance,
    mean_gradient2,
)
from fednmap.theory.constants import exact


def clients(n=4, rows=12, p=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return [((1 + i) * draw(rows + i, p), draw(rows + i)) for i in range(n)]


def hessians(data):
    return [a.T @ a / len(a) for a, _ in data]


@pytest.mark.parametrize("batch_size", [None, 2])
def test_smoothness_of_a_quadratic_is_its_largest_eigenvalue(batch_size):
    data = clients()
    found = estimate_smoothness(LeastSquares(data, batch_size=batch_size), torch.zeros(6).double(), iterations=200)
    each = torch.stack([torch.linalg.eigvalsh(h)[-1] for h in hessians(data)])
    torch.testing.assert_close(found.clients, each, rtol=1e-6, atol=0)
    overall = torch.linalg.eigvalsh(torch.stack(hessians(data)).mean(0))[-1]
    assert found.overall == pytest.approx(float(overall), rel=1e-6)
    assert found.largest == pytest.approx(float(each.max()), rel=1e-6)


def test_smoothness_of_a_network_is_that_of_its_autograd_hessian():
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    data = [(torch.randn(10, 4, generator=generator).double(), torch.arange(10) % 3) for _ in range(2)]
    module = mlp(4, 3, hidden=(5,)).double()
    problem = Network(module, cross_entropy, data, batch_size=2)
    found = estimate_smoothness(problem, problem.start, iterations=300)
    for i, (a, b) in enumerate(data):
        loss = lambda x, a=a, b=b: cross_entropy(problem.outputs(x, a), b)  # noqa: E731
        hessian = torch.autograd.functional.hessian(loss, problem.start)
        largest = torch.linalg.eigvalsh(hessian).abs().max()
        assert float(found.clients[i]) == pytest.approx(float(largest), rel=1e-4)


def test_several_points_give_the_worst_of_them():
    a = torch.ones(4, 1).double()
    problem = Logistic([(a, torch.tensor([0, 1, 0, 1]))])
    points = [torch.tensor([v]).double() for v in (3.0, 0.0, 5.0)]
    assert estimate_smoothness(problem, points).largest == pytest.approx(0.25, rel=1e-6)  # sigmoid' is 1/4 at 0


def test_variance_is_that_over_the_samples():
    data = clients()
    x = torch.ones(6).double()
    found = estimate_variance(LeastSquares(data, batch_size=3), x, draws=4000)
    for i, (a, b) in enumerate(data):
        each = a * (a @ x - b)[:, None]
        true = (each - each.mean(0)).square().sum(-1).mean() / 3
        assert float(found.clients[i]) == pytest.approx(float(true), rel=0.1)
    assert found.largest >= found.mean > 0
    assert estimate_variance(LeastSquares(data), x).largest == pytest.approx(0, abs=1e-20)


class Foreign:
    """A problem that offers the protocol alone: minibatches of one sample."""

    def __init__(self, data, seed=0):
        self._inner = LeastSquares(data, batch_size=1, seed=seed)
        self.n, self.dim = self._inner.n, self._inner.dim
        self.oracle, self.loss, self.gradient = self._inner.oracle, self._inner.loss, self._inner.gradient


@pytest.mark.parametrize("make", [lambda d: LeastSquares(d, batch_size=1), Foreign])
def test_heterogeneity_and_mean_gradient_are_without_the_minibatch_noise(make):
    data = clients()
    x = torch.ones(6).double()
    g = torch.stack([a.T @ (a @ x - b) / len(a) for a, b in data])
    spread, size = (g - g.mean(0)).square().sum(-1).mean(), g.square().sum(-1).mean()
    assert estimate_heterogeneity(make(data), x, draws=3000) == pytest.approx(float(spread), rel=0.1)
    assert mean_gradient2(make(data), x, draws=3000) == pytest.approx(float(size), rel=0.1)


def test_clients_weigh_as_they_do_in_f():
    data, x, weights = clients(), torch.ones(6).double(), torch.tensor([0.1, 0.2, 0.6, 0.1]).double()
    g = torch.stack([a.T @ (a @ x - b) / len(a) for a, b in data])
    problem = LeastSquares(data, weights=weights)
    spread = weights @ (g - weights @ g).square().sum(-1)
    assert estimate_heterogeneity(problem, x, draws=2) == pytest.approx(float(spread))
    assert mean_gradient2(problem, x, draws=2) == pytest.approx(float(weights @ g.square().sum(-1)))


def test_few_draws_are_without_bias():
    # Gradients at 0 are +-3 with variance 4: the plain estimate from 2 draws would be 9 + 4/2.
    a, b = torch.ones(2, 1).double(), torch.tensor([-2.0, 2.0]).double()
    data, x = [(a, b - 3), (a, b + 3)], torch.zeros(1).double()
    for estimate in (estimate_heterogeneity, mean_gradient2):
        found = [estimate(Foreign(data, seed), x, draws=2) for seed in range(600)]
        assert sum(found) / 600 == pytest.approx(9, abs=0.9)


def test_gap_brackets_the_true_one():
    data = clients()
    problem, phi, x = LeastSquares(data), L1(0.5), torch.ones(6).double()
    L = estimate_smoothness(problem, x, iterations=100).overall
    gap = estimate_gap(problem, phi, x, L=1.01 * L, steps=3000)
    few = estimate_gap(problem, phi, x, L=1.01 * L, steps=10)
    assert gap.start == pytest.approx(float(objective(problem, phi, x)))
    assert 0 < few.found <= gap.found <= gap.at_most
    smooth = estimate_gap(problem, Zero(), x, L=1.01 * L, steps=3000)
    a, b = torch.stack(hessians(data)).mean(0), torch.stack([a.T @ b / len(a) for a, b in data]).mean(0)
    best = problem.loss(torch.linalg.solve(a, b))
    assert smooth.best == pytest.approx(float(best), rel=1e-9)


def test_a_variance_needs_two_draws():
    with pytest.raises(ValueError, match="at least 2"):
        estimate_variance(LeastSquares(clients()), torch.zeros(6).double(), draws=1)


def test_batch_norm_keeps_its_minibatches():
    data = [(torch.randn(8, 3).double(), torch.arange(8) % 2) for _ in range(2)]
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)).double()
    problem = Network(module, cross_entropy, data, batch_size=4)
    assert exact(problem).batch_size == 4
    assert exact(Network(module[:1], cross_entropy, data, batch_size=4)).batch_size is None
    assert 0 < estimate_smoothness(problem, problem.start, iterations=3).largest < float("inf")
