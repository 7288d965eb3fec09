"""Lemmas 1 to 3 of the paper, and what its theorems use of the normal map, along a plain loop with exact gradients."""

import math

import pytest
import torch

from fednmap.measure import natural_residual, normal_map, objective
from fednmap.regularizers import L1, MCP
from fednmap.testing import heterogeneous
from fednmap.theory import c0

PROBLEM = heterogeneous(n=6)
LAM = 0.3
PHIS = {"l1": L1(LAM), "mcp": MCP(LAM, 8.0)}


def smoothness():
    """The largest L of a client."""
    return max(float(torch.linalg.matrix_norm(a.T @ a, 2)) / len(a) for a, _ in PROBLEM.data)


def slope(phi, x):
    """Lower and upper end of the subdifferential of phi in each coordinate."""
    theta = phi.theta if isinstance(phi, MCP) else math.inf  # MCP: lam - |x| / theta up to theta lam, then flat
    inner = x.sign() * (LAM - x.abs() / theta).clamp_min(0)
    return torch.where(x == 0, -LAM, inner), torch.where(x == 0, LAM, inner)


@pytest.mark.parametrize("name", PHIS)
def test_the_distance_to_stationarity_lies_between_the_natural_residual_and_the_normal_map(name):
    phi, generator = PHIS[name], torch.Generator().manual_seed(1)
    for gamma in (0.01, 0.2, 1.0):
        if gamma * phi.rho >= 1:
            continue
        for _ in range(50):
            z = 2 * torch.randn(PROBLEM.dim, generator=generator, dtype=torch.float64)
            x = phi.prox(z, gamma)
            low, high = slope(phi, x)
            g = PROBLEM.gradient(x)
            distance = float(((-g).clamp(low, high) + g).norm())
            natural = float(natural_residual(PROBLEM, phi, x, gamma).norm())
            normal = float(normal_map(PROBLEM, phi, z, gamma).norm())
            assert (1 - gamma * phi.rho) * natural <= distance * (1 + 1e-9)
            assert distance <= normal * (1 + 1e-9)


@pytest.mark.parametrize("name", PHIS)
def test_the_normal_map_is_lipschitz_with_the_constant_of_the_proof(name):
    phi, generator, L = PHIS[name], torch.Generator().manual_seed(2), smoothness()
    for gamma in (0.02, 0.3):
        largest = 0.0
        for size in (0.1 * gamma, gamma, 1.0) * 40:
            z = size * torch.randn(PROBLEM.dim, generator=generator, dtype=torch.float64)
            w = z + 0.1 * size * torch.randn(PROBLEM.dim, generator=generator, dtype=torch.float64)
            gap = normal_map(PROBLEM, phi, z, gamma) - normal_map(PROBLEM, phi, w, gamma)
            largest = max(largest, float(gap.norm() / (z - w).norm()))
        assert largest <= (L + 2 / gamma) / (1 - gamma * phi.rho)
        assert largest >= 0.5 / gamma  # the bound is not void: (z - prox(z)) / gamma alone is as steep


def iterates(phi, gamma, eta_a, Q, T):
    """Algorithm 1 as it is printed, with all of its local iterates: z (T + 1, p) and z_i (T, Q, n, p)."""
    everybody = torch.arange(PROBLEM.n)
    z = torch.ones(PROBLEM.dim, dtype=torch.float64)
    c, points, local = torch.zeros(PROBLEM.n, PROBLEM.dim, dtype=torch.float64), [z], []
    for t in range(T):
        g, z_i, steps = PROBLEM.oracle(everybody, t), z.expand(PROBLEM.n, -1), []
        pull = (z - phi.prox(z, gamma)) / gamma
        for q in range(Q):
            steps.append(z_i)
            z_i = z_i - eta_a * (g(phi.prox(z_i, gamma), q) + pull + c)
        y = (z - z_i) / (eta_a * Q)
        c = y.mean(0) - y + c
        z = z - eta_a * Q * y.mean(0)
        points.append(z)
        local.append(torch.stack(steps))
    return points, local


@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("name", PHIS)
def test_lemmas_1_to_3_hold_along_a_run(name, m):
    phi, L, Q, T, n = PHIS[name], smoothness(), 3, 24, PROBLEM.n
    gamma = 1 / (5 * (L + phi.rho))
    kept, root = 1 - gamma * phi.rho, math.hypot(L, 1 / gamma)
    steep = (L + 2 / gamma) / kept
    eta_hat = min(kept / (20 * m * root), kept * gamma / (10 * m), 1 / (10 * m * L), 1 / (20 * m * steep))
    eta_a = eta_hat / Q  # eta_s = 1; within kept / (20 Q root) and kept / (6 Q L)
    points, local = iterates(phi, gamma, eta_a, Q, T)
    C0 = c0(gamma, phi.rho, L)
    assert C0 > 0
    norm2 = [float(normal_map(PROBLEM, phi, z, gamma).square().sum()) for z in points]
    psi = [float(objective(PROBLEM, phi, phi.prox(z, gamma))) for z in points]
    H = [value + gamma * C0 / 2 * size for value, size in zip(psi, norm2, strict=True)]

    def spread(t, s):
        """sum over local steps and clients of |z_i,t - z_s|^2."""
        return float((local[t] - points[s]).square().sum())

    scale = (L / kept) ** 2
    for a in range(0, T - m):
        b = a + m
        around = sum(spread(t, a) for t in range(a, b))
        fall = eta_hat * m / 2 * (C0 - 32 * (eta_hat * m / gamma) ** 2 / kept**2) * norm2[a]
        assert H[b] <= H[a] - fall + 5 * eta_hat * scale / (n * Q) * around + 1e-12  # Lemma 1
        after, own = sum(spread(t, a) for t in range(a + 1, b + 1)), spread(a, a)
        bound = 11 * (3 * (eta_hat * m) ** 2 + (eta_a * Q) ** 2) * n * m * Q * norm2[a]
        bound += (110 * (eta_hat * m) ** 2 + 33 * (eta_a * Q) ** 2 * m) * scale * own
        assert after <= bound * (1 + 1e-9)  # Lemma 2
        bound = (eta_a * Q) ** 2 * (14 * scale * own + 7 * Q * n * norm2[a] + 11 * scale * after)
        assert spread(b, b) <= bound * (1 + 1e-9)  # Lemma 3


def test_lemma_2_at_the_start():
    phi, L, Q = PHIS["l1"], smoothness(), 3
    gamma = 1 / (5 * L)
    eta_a = 1 / (20 * Q * math.hypot(L, 1 / gamma))
    points, local = iterates(phi, gamma, eta_a, Q, 1)
    z = points[0]
    x = phi.prox(z, gamma)
    own = PROBLEM.oracle(torch.arange(PROBLEM.n), 0)(x, 0)
    pull = (z - x) / gamma
    bound = 2 * eta_a**2 * Q**3 * (PROBLEM.n * float(pull.square().sum()) + float(own.square().sum()))
    assert float((local[0] - z).square().sum()) <= bound
