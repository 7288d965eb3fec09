"""The inequalities of docs/sampling_theorem.md, at random points and along runs with the theorem's steps."""

import pytest
import torch

from benchmarks.sampling_theorem import Noisy, sides
from fednmap.algorithms import FedNMap
from fednmap.measure import natural_residual, normal_map
from fednmap.regularizers import L1, MCP
from fednmap.testing import heterogeneous, smoothness

PENALTIES = [L1(0.2), MCP(0.2, 3.0)]


@pytest.mark.parametrize("phi", PENALTIES, ids=repr)
def test_descent_and_residual(phi):
    """Inequalities (1) and (8), for steps of every size."""
    problem, rng = heterogeneous(), torch.Generator().manual_seed(0)
    L = smoothness(problem)
    gamma = 1 / (16 * L + phi.rho)
    kappa = 1 / (1 - gamma * phi.rho)
    theta = gamma * L * kappa

    def H(z):
        x = phi.prox(z, gamma)
        return problem.loss(x) + phi.value(x) + gamma / 2 * normal_map(problem, phi, z, gamma).square().sum()

    for _ in range(300):
        z, v = torch.randn(2, problem.dim, generator=rng, dtype=torch.float64)
        z, v, eta = (
            3 * z,
            10 ** float(2 * torch.rand(1, generator=rng) - 1) * v,
            gamma * float(torch.rand(1, generator=rng)),
        )
        F = normal_map(problem, phi, z, gamma)
        right = H(z) - eta * F @ v + eta * (eta / (2 * gamma) + L * kappa * eta) * v @ v
        right = right + theta * eta * F.norm() * v.norm()
        assert H(z - eta * v) <= right + 1e-12 * right.abs()
        x = phi.prox(z, gamma)
        assert (1 - gamma * phi.rho) * natural_residual(problem, phi, x, gamma).norm() <= F.norm() * (1 + 1e-12)


def test_local_drift():
    """Inequalities (2) and (3) with exact gradients, from client states that have nothing to do with the model."""
    problem, phi, Q, rng = heterogeneous(), L1(0.2), 5, torch.Generator().manual_seed(1)
    L = smoothness(problem)
    gamma, everybody = 1 / (16 * L), torch.arange(problem.n)
    z = torch.randn(problem.dim, generator=rng, dtype=torch.float64)
    own = torch.randn(problem.n, problem.dim, generator=rng, dtype=torch.float64)
    x, h, oracle = phi.prox(z, gamma), own.mean(0), problem.oracle(everybody, 0)
    F, exact = normal_map(problem, phi, z, gamma), oracle(x, 0)
    d = (z - x) / gamma + h - own
    A = (exact - own).square().sum(-1).mean()
    assert (exact + d).square().sum(-1).mean() <= F.square().sum() + A
    for delta in (1 / 12, 1 / 100):
        method = FedNMap(phi, gamma=gamma, eta_a=delta / (L * Q), eta_s=1.0, Q=Q)
        _, client = method.local(method.Server(z, h), method.Client(own), oracle)
        drift = (client.h - exact).square().sum(-1).mean()
        assert 0 < drift <= 0.6 * delta**2 * (F.square().sum() + A)


def test_constants_of_the_proof():
    """(4) to (7) follow from (3) and the conditions for every s, p and epsilon."""
    theta, ratio = 1 / 16, 1 / 8  # the largest gamma L kappa and eta / gamma
    for s, p, share in ((s, p, share) for s in (1, 2, 10, 1e4) for p in (1e-4, 0.1, 1) for share in (1e-6, 0.1, 1)):
        epsilon = share * (ratio + theta**2)
        delta2, lam2 = epsilon / (144 * s), p**2 * s / 144
        drift = {"F": 0.6 * delta2, "A": 0.6 * delta2, "N": 9.6 * delta2}
        v = {k: 9 * drift[k] + 10 * drift[k] / s for k in drift}
        v = {"F": v["F"] + 1.125, "A": v["A"] + 1.25 / s, "N": v["N"] + 1.25 / s}
        assert v["F"] <= 1.21
        assert s * v["A"] <= 1.34
        assert s * v["N"] <= 2.52
        size = 0.57 * ratio + 4 * theta**2
        H = {"F": -7 / 8 + 1 / 16 + 2 * drift["F"] + size * v["F"]}
        H |= {k: 2 * drift[k] + 4 * epsilon * v[k] for k in "AN"}
        assert H["F"] <= -0.69
        assert H["A"] <= 5.4 * epsilon / s
        assert H["N"] <= 10.3 * epsilon / s
        A = {k: (1 + p / 2) * p * 5 * drift[k] + (1 + 2 / p) * lam2 * v[k] for k in drift}
        A["A"] += (1 + p / 2) * (1 - p)
        A["N"] += (1 + p / 2) * p * 1.25
        assert A["A"] <= 1 - 0.46 * p
        c = 14 * epsilon / (s * p)
        assert H["F"] + c * A["F"] <= -0.6
        assert H["A"] + c * (A["A"] - 1) <= -0.07 * p * c
        assert H["N"] + c * A["N"] <= 39 * epsilon / s


@pytest.mark.parametrize("phi", PENALTIES, ids=repr)
@pytest.mark.parametrize(("s", "Q", "sigma"), [(1, 1, 0.0), (3, 5, 0.0), (10, 1, 0.0), (3, 2, 3.0)])
def test_the_bound_holds(phi, s, Q, sigma):
    problem = heterogeneous(n=10)
    noisy = Noisy(problem, sigma) if sigma else problem
    mean, right = sides(noisy, phi, smoothness(problem), s, Q, rounds=200, sigma=sigma, below=0.0, factor=1)
    assert mean <= right
