"""H_t and L_t rebuilt from the outside, and Lemma 4 on measured runs."""

import math

import pytest
import torch

from fednmap.algorithms import FedNMap
from fednmap.core import Regularizer
from fednmap.problems import LeastSquares, Logistic
from fednmap.regularizers import L1
from fednmap.theory import estimate_smoothness, estimate_variance, nonconvex
from reproduction.lyapunov import descent, lyapunov


class MinusSquare(Regularizer):
    """phi(x) = |x|_1 - rho/2 |x|^2 on the box |x| <= 1/rho: weakly convex with constant rho, bounded below."""

    def __init__(self, rho):
        self.rho = rho

    def value(self, x):
        inside = x.abs().sum(-1) - self.rho / 2 * x.square().sum(-1)
        return torch.where(x.abs().amax(-1) <= 1 / self.rho + 1e-9, inside, torch.inf)

    def prox(self, v, step):
        shrunk = torch.nn.functional.softshrink(v, step) / (1 - step * self.rho)
        return shrunk.clamp(-1 / self.rho, 1 / self.rho)


def problem(batch_size=None, seed=0, n=5, p=4):
    generator = torch.Generator().manual_seed(3)
    data = []
    for i in range(n):
        a = torch.randn(20, p, generator=generator).double() + i
        data.append((a, (a[:, 0] + torch.randn(20, generator=generator) > i).long()))
    return Logistic(data, batch_size=batch_size, seed=seed)


def by_hand(algorithm, problem, start, rounds):
    """Algorithm 1 as the paper writes it, with c_i and y_i, keeping every z_{i,t}^l."""
    a, n = algorithm, problem.n
    prox = lambda v: a.phi.prox(v, a.gamma)  # noqa: E731
    z, c, drifts = start, torch.zeros(n, len(start)).to(start), []
    for t in range(rounds):
        x, y, drift = prox(z), [], 0.0
        for i in range(n):
            g, z_i = problem.oracle(torch.tensor(i), t), z
            for q in range(a.Q):
                drift += float((z_i - z).square().sum())
                z_i = z_i - a.eta_a * (g(prox(z_i), q) + (z - x) / a.gamma + c[i])
            y.append((z - z_i) / (a.eta_a * a.Q))
        drifts.append(drift / (n * a.Q))
        y = torch.stack(y)
        z, c = z - a.Q * a.eta_s * a.eta_a * y.mean(0), (1 - a.forget) * (c - y + y.mean(0))
    return torch.tensor(drifts, dtype=torch.float64)


@pytest.mark.parametrize("forget", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("chunk", [None, 2])
def test_local_iterates_are_those_of_algorithm_1(chunk, forget):
    """With forget, c_i is that share smaller."""
    noisy, start = problem(batch_size=3), torch.full((4,), 0.3).double()
    algorithm = FedNMap(L1(0.05), eta_a=0.02, eta_s=0.7, Q=4, gamma=0.3, forget=forget)
    run = lyapunov(algorithm, noisy, rounds=6, smoothness=2.0, start=start, chunk=chunk)
    torch.testing.assert_close(run.drift, by_hand(algorithm, noisy, start, 6), rtol=1e-9, atol=0)


def test_H_and_L_at_the_start_by_hand():
    one = torch.ones(1, 1).double()
    two = LeastSquares([(one, one[0]), (one, -one[0])])
    algorithm = FedNMap(L1(0.5), eta_a=0.1, eta_s=2.0, Q=2, gamma=1.0)
    run = lyapunov(algorithm, two, rounds=2, smoothness=1.0, start=torch.tensor([1.5]).double())
    # x = 1, f = (0 + 2) / 2, phi = 1/2, F_nor = 1 + 1/2, C_0 = 3/14.
    assert float(run.H[0]) == pytest.approx(1.5 + 3 / 14 / 2 * 2.25)
    # z_i^1 - z = -0.1 (grad f_i + 1/2), grad f_i = 0 and 2; the sum is over l = 0, 1, divided by nQ = 4.
    assert float(run.drift[0]) == pytest.approx((0.05**2 + 0.25**2) / 4)
    assert float(run.L[0] - run.H[0]) == pytest.approx(25 * 0.4 * float(run.drift[0]))


@pytest.mark.parametrize("phi", [L1(0.05), MinusSquare(0.5)])
@pytest.mark.parametrize("m", [1, 5])
def test_lemma_4_holds_at_every_round_without_noise(phi, m):
    exact, start = problem(), torch.full((4,), 2.0).double()
    L = 1.05 * estimate_smoothness(exact, torch.zeros(4).double(), iterations=100).largest  # largest at 0
    gamma = 1 / (5 * (L + phi.rho))
    limit = (1 - gamma * phi.rho) / (70 * math.hypot(L, 1 / gamma))
    Q = 4
    eta_a = limit / (Q * math.sqrt(m))
    algorithm = FedNMap(phi, eta_a=eta_a, eta_s=limit / m / (eta_a * Q), Q=Q, gamma=gamma)
    found = descent([lyapunov(algorithm, exact, rounds=60, smoothness=L, start=start)], m=m)
    assert found.violations == ()
    assert found.holds
    assert bool((found.change < 0).all())


def test_lemma_4_holds_on_average_with_noise():
    start = torch.full((4,), 0.3).double()
    L = 1.05 * estimate_smoothness(problem(), torch.zeros(4).double(), iterations=100).largest
    sigma2 = 1.2 * estimate_variance(problem(batch_size=2), [start, torch.zeros(4).double()], draws=400).largest
    steps = nonconvex(L, 0.0, sigma2, 1.0, n=5, Q=4, T=10**6)
    algorithm = FedNMap(L1(0.05), eta_a=steps.eta_a, eta_s=steps.eta_s, Q=4, gamma=steps.gamma)
    runs = [
        lyapunov(algorithm, problem(batch_size=2, seed=seed), rounds=30, smoothness=L, start=start) for seed in range(8)
    ]
    found = descent(runs, m=1, sigma2=sigma2)
    assert found.violations == ()
    assert found.holds
    assert bool((found.error > 0).all())


def test_outside_the_range_the_lemma_says_so_and_the_descent_can_fail():
    exact, start = problem(), torch.full((4,), 2.0).double()
    L = estimate_smoothness(exact, torch.zeros(4).double(), iterations=100).largest
    wild = FedNMap(L1(0.05), eta_a=4 / L, eta_s=1.0, Q=4, gamma=1 / L)
    found = descent([lyapunov(wild, exact, rounds=60, smoothness=L, start=start)])
    assert [v.split()[0] for v in found.violations] == ["gamma", "eta_hat", "eta_a"]
    assert not found.holds


def test_what_the_lemma_is_not_about_is_refused():
    algorithm = FedNMap(L1(0.05), eta_a=0.02, Q=4)
    weighted = LeastSquares([(torch.eye(2), torch.ones(2))] * 2, weights=[0.25, 0.75])
    with pytest.raises(ValueError, match="equal weight"):
        lyapunov(algorithm, weighted, rounds=3, smoothness=1.0)
    run = lyapunov(algorithm, problem(), rounds=3, smoothness=1.0, start=torch.zeros(4).double())
    with pytest.raises(ValueError, match="between 1 and 2"):
        descent([run], m=3)
    other = FedNMap(L1(0.05), eta_a=1e-5, Q=4, gamma=0.02, forget=0.5)
    run = lyapunov(other, problem(), rounds=3, smoothness=1.0, start=torch.zeros(4).double())
    assert descent([run]).violations == ("forget = 0.5 exceeds 0",)
