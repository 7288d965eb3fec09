"""The inequalities of docs/sampling_theorem.md, at random points, by exact expectation and along runs.

The expectations over the drawn clients and the noise are finite sums here: every set of clients times every sign of
the noise is followed. The clients' losses are indefinite quadratics.
"""

import math
from dataclasses import dataclass
from itertools import combinations, product

import pytest
import torch
from torch import Tensor

from benchmarks.sampling_theorem import Noisy, sides
from fednmap.algorithms import FedNMap
from fednmap.core import Regularizer
from fednmap.measure import normal_map
from fednmap.regularizers import L1, MCP
from fednmap.testing import heterogeneous, smoothness

PENALTIES = [L1(0.2), MCP(0.2, 3.0)]


@dataclass
class Quadratics:
    """f_i(x) = x'M_i x / 2 - b_i'x with random symmetric M_i of spectral norm L, and FedNMap's round on them."""

    phi: Regularizer
    gamma: float
    n: int = 4
    dim: int = 3
    L: float = 1.0

    def __post_init__(self) -> None:
        self.rng = torch.Generator().manual_seed(0)
        M = self.normal(self.n, self.dim, self.dim)
        M = M + M.mT
        self.M = self.L * M / torch.linalg.matrix_norm(M, 2)[:, None, None]
        self.b = self.normal(self.n, self.dim)
        self.kappa = 1 / (1 - self.gamma * self.phi.rho)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.rng, dtype=torch.float64)

    def each(self, x: Tensor) -> Tensor:
        """The gradients of all clients, x: (..., n, dim) or (..., 1, dim)."""
        return (self.M @ x[..., None])[..., 0] - self.b

    def F(self, z: Tensor) -> Tensor:
        x = self.phi.prox(z, self.gamma)
        return self.each(x[..., None, :]).mean(-2) + (z - x) / self.gamma

    def H(self, z: Tensor) -> Tensor:
        x = self.phi.prox(z, self.gamma)
        f = (x * (self.each(x[..., None, :]).mean(-2) - self.b.mean(0))).sum(-1) / 2
        return f + self.phi.value(x) + self.gamma / 2 * square(self.F(z))

    def A(self, z: Tensor, own: Tensor) -> Tensor:
        return square(self.each(self.phi.prox(z, self.gamma)[..., None, :]) - own).mean(-1)

    def round(self, z, own, s: int, Q: int, eta: float, eta_a: float, sigma: float) -> tuple[Tensor, Tensor, Tensor]:
        """z, the client states and v after one round, for every set of s clients and every sign of the noise.

        z: (P, dim), own: (P, n, dim) -> (P * outcomes, ...), all outcomes equally likely.
        """
        P = len(z)
        signs = torch.tensor(list(product((-1.0, 1.0), repeat=self.n * Q)) if sigma else [[0.0] * self.n * Q])
        signs = signs.double().reshape(-1, self.n, Q)
        drawn = torch.zeros(0, self.n, dtype=torch.bool)
        for chosen in combinations(range(self.n), s):
            drawn = torch.cat([drawn, torch.tensor([[i in chosen for i in range(self.n)]])])
        z, own = z[:, None, None, :], own[:, None]
        d = (z - self.phi.prox(z, self.gamma)) / self.gamma + own.mean(-2, keepdim=True) - own
        local, G = z.expand(P, len(signs), self.n, self.dim), 0.0
        for q in range(Q):
            noise = torch.zeros(len(signs), self.n, self.dim, dtype=torch.float64)
            noise[..., q % self.dim] = sigma * signs[..., q]
            g = self.each(self.phi.prox(local, self.gamma)) + noise
            local, G = local - eta_a * (g + d), G + g / Q
        y, G, own = (G + d)[:, :, None], G[:, :, None], own[:, :, None]
        v = (drawn[..., None] * y).sum(-2) / s
        own = torch.where(drawn[..., None], G, own)
        z = z - eta * v
        return z.reshape(-1, self.dim), own.reshape(-1, self.n, self.dim), v.reshape(-1, self.dim)


def square(x: Tensor) -> Tensor:
    return x.square().sum(-1)


@pytest.mark.parametrize("phi", [*PENALTIES, MCP(0.2, 0.07), MCP(0.2, 0.005)], ids=repr)
def test_descent_residual_and_lipschitz(phi):
    """Inequalities (1), (8) and (9), for steps of every size and gamma rho from 0 to 0.93."""
    gamma = 1 / (16 + phi.rho)
    problem = Quadratics(phi, gamma, dim=6)
    kappa, theta = problem.kappa, gamma * problem.kappa
    z, v = 3 * problem.normal(2000, 6), problem.normal(2000, 6)
    z[:500] = gamma * z[:500]  # near the kinks of the prox
    eta = gamma * torch.rand(2000, generator=problem.rng, dtype=torch.float64)
    v = v * 10 ** (4 * torch.rand(2000, 1, generator=problem.rng, dtype=torch.float64) - 2)
    F, new = problem.F(z), z - eta[:, None] * v
    right = problem.H(z) - eta * (F * v).sum(-1) + eta**2 * (1 / (2 * gamma) + kappa) * square(v)
    right = right + theta * eta * F.norm(dim=-1) * v.norm(dim=-1)
    assert (problem.H(new) <= right + 1e-10 * right.abs()).all()
    x = phi.prox(z, gamma)
    natural = (x - phi.prox(x - gamma * problem.each(x[:, None]).mean(-2), gamma)) / gamma
    assert (natural.norm(dim=-1) / kappa <= F.norm(dim=-1) * (1 + 1e-12)).all()
    if gamma * phi.rho <= 0.5:
        change = (problem.F(new) - F).norm(dim=-1)
        assert (change <= (1 + theta) / gamma * (new - z).norm(dim=-1) * (1 + 1e-9)).all()


def test_the_round_is_the_librarys():
    """The round that the expectations below follow is FedNMap's, for every set of two clients."""
    phi, gamma, eta, eta_a, Q = MCP(0.2, 3.0), 0.1, 0.3, 0.05, 3
    problem = Quadratics(phi, gamma)
    z, own = problem.normal(1, 3), problem.normal(1, 4, 3)
    after, states, _ = problem.round(z, own, 2, Q, eta, eta_a, 0.0)
    method = FedNMap(phi, gamma=gamma, eta_a=eta_a, eta_s=eta / (eta_a * Q), Q=Q)
    server = method.Server(z[0], own[0].mean(0))
    up, client = method.local(server, method.Client(own[0]), lambda x, q: problem.each(x))
    for k, chosen in enumerate(combinations(range(4), 2)):
        new = method.aggregate(server, method.Up(up.y[list(chosen)].mean(0)), 2 / 4)
        held = torch.stack([client.h[i] if i in chosen else own[0, i] for i in range(4)])
        torch.testing.assert_close(new.z, after[k])
        torch.testing.assert_close(held, states[k])
        torch.testing.assert_close(new.h, states[k].mean(0))


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


def state(problem: Quadratics, scale: float) -> tuple[Tensor, Tensor]:
    """A random z and client states; at a small scale z is near a kink of the prox and the states near the gradients."""
    z = scale * problem.normal(1, problem.dim)
    own = problem.each(problem.phi.prox(z, problem.gamma)[:, None]) + scale * problem.normal(1, problem.n, problem.dim)
    return z, own


@pytest.mark.parametrize("phi", PENALTIES, ids=repr)
@pytest.mark.parametrize("s", [1, 2, 4])
@pytest.mark.parametrize("sigma", [0.0, 3.0])
def test_one_round_in_expectation(phi, s, sigma):
    """Inequalities (2) to (7) with the largest steps of (C), Q = 2; sampling and noise are averaged exactly."""
    gamma, Q = 1 / (16 + phi.rho), 2
    problem = Quadratics(phi, gamma)
    n, kappa, theta, p, N = problem.n, problem.kappa, 1 / 16, s / problem.n, sigma**2 / Q
    eta = min(gamma / 8, p * s**0.5 / (12 * kappa))
    epsilon = eta / gamma + theta**2
    delta = (epsilon / (144 * s)) ** 0.5
    for scale in (0.01, 0.1, 1.0, 10.0):
        z, own = state(problem, scale)
        after, states, v = problem.round(z, own, s, Q, eta, delta / (kappa * Q), sigma)
        everybody = problem.round(z, own, n, Q, eta, delta / (kappa * Q), sigma)[1]
        F, A, H = square(problem.F(z)), problem.A(z, own), problem.H(z)
        x = phi.prox(z, gamma)[:, None]
        d = (z - x[:, 0]) / gamma + own.mean(1) - own
        assert square(problem.each(x) + d).mean() <= F + A
        error = everybody - problem.each(x)  # b_i + nu_i
        beta = 0.6 * delta**2 * (F + A) + 9.6 * delta**2 * N
        assert square(error.mean(0)).mean() <= beta
        assert square(error).mean() <= 1.25 * N + 5 * beta
        mean = v.mean(0)
        assert square(mean - problem.F(z)[0]) <= beta
        assert square(v - mean).mean() <= (1.25 * N + 1.25 * A + 10 * beta) / s
        assert square(v).mean() <= 1.21 * F + (1.34 * A + 2.52 * N) / s
        step = problem.H(after).mean() - H
        assert step <= -0.69 * eta * F + eta * epsilon / s * (5.4 * A + 10.3 * N)
        A_after, c = problem.A(after, states).mean(), 14 * eta * epsilon * n / s**2
        assert A_after <= (1 - 0.46 * p) * A + p * (0.0042 + 0.0253 * s) * F + 2.01 * p * N
        assert step + c * (A_after - A) <= -0.6 * eta * F - 0.07 * p * c * A + 39 * eta * epsilon * N / s


@pytest.mark.parametrize("phi", PENALTIES, ids=repr)
@pytest.mark.parametrize(("s", "m"), [(1, 1), (1, 2), (2, 2), (3, 3)])
def test_window_in_expectation(phi, s, m):
    """Inequalities (10) to (15) over m rounds of three clients, Q = 1, averaged exactly."""
    gamma, sigma = 1 / (16 + 2 * phi.rho), 3.0
    problem = Quadratics(phi, gamma, n=3, dim=2)
    kappa, p, N = problem.kappa, s / 3, sigma**2
    eta = min(gamma / (16 * m), p * s**0.5 / (12 * kappa))
    eta_a, c = (144 * m * s) ** -0.5 / kappa, 2 * eta / (m * p * s)
    for scale in (0.01, 0.1, 1.0, 10.0):
        z, own = state(problem, scale)
        F, A, H = [square(problem.F(z)).mean()], [problem.A(z, own).mean()], [problem.H(z).mean()]
        first, bias, noise, largest = problem.F(z), torch.zeros(1), torch.zeros(1, 2), torch.zeros(1)
        for _ in range(m):
            normal, paths = problem.F(z), len(z)
            z, own, v = problem.round(z, own, s, 1, eta, eta_a, sigma)
            v = v.reshape(paths, -1, 2)
            mean = v.mean(1, keepdim=True)  # given the history: F_j + b_j
            noise = (noise[:, None] + v - mean).reshape(-1, 2)
            bias = (bias + (mean[:, 0] - normal).norm(dim=-1)).repeat_interleave(v.shape[1])
            largest = torch.maximum(largest.repeat_interleave(v.shape[1]), noise.norm(dim=-1))
            F, A = [*F, square(problem.F(z)).mean()], [*A, problem.A(z, own).mean()]
        H.append(problem.H(z).mean())
        right = 1.14 * eta / gamma * (m * first.norm() + bias + largest)
        assert ((problem.F(z) - first).norm(dim=-1) <= right).all()
        for j in range(m):
            assert A[j + 1] <= (1 - 0.44 * p) * A[j] + 0.0566 * p * s * F[j] + 2.43 * p * N
        Phi, mean_A = sum(F[:m]) / m, sum(A[:m]) / m
        beta = (0.6 * (Phi + mean_A) + 9.6 * N) / (144 * m * s)
        variance = (1.25 * N + 1.25 * mean_A + 10 * beta) / s
        assert H[1] <= H[0] + m * eta * (-0.67 * F[0] + 0.34 * variance / m + 7.6 * beta)
        assert H[1] <= H[0] + m * eta * (-0.46 * Phi + (0.73 * mean_A + 1.55 * N) / (m * s))
        change = H[1] - H[0] + c * (A[m] - A[0])
        assert change <= -0.34 * m * eta * Phi + 6.5 * eta * N / s
        assert change <= -0.4 * m * eta * F[0] - 0.16 * (1 - (1 - 0.44 * p) ** m) * c * A[0] + 6.5 * eta * N / s


def test_one_round_needs_the_noise_term():
    """At a kink of the prox E H rises by eta theta^2 sigma^2 / 17 for every eta: (5) cannot drop theta^2 N."""
    gamma = 1 / 16
    for ratio, sigma in ((1.0, 1.0), (1e-3, 1.0), (1e-6, 7.0)):
        eta, weight = ratio * gamma, gamma * sigma / 4  # f = x^2 / 2, phi = weight |x|, z at the threshold
        phi, z = L1(weight), torch.tensor([gamma * weight], dtype=torch.float64)

        def H(z, phi=phi):
            x = phi.prox(z, gamma)
            return square(x) / 2 + phi.value(x) + gamma / 2 * square(x + (z - x) / gamma)

        rise = (H(z - eta * (weight + sigma)) + H(z - eta * (weight - sigma))) / 2 - H(z)
        assert rise >= eta * (gamma * sigma) ** 2 / 17


def test_constants_of_one_round():
    """(3) to (7) with their rounded constants follow from each other and (C1) for every s, p and epsilon."""
    growth, theta, ratio = math.exp(1 / 12), 1 / 16, 1 / 8  # the largest gamma L kappa and eta / gamma
    assert growth <= 1.09
    assert 2 * (1.09 / 2) ** 2 <= 0.6
    assert 2 * 1.09**2 * 4 <= 9.6
    size = ratio / 2 + theta * ratio + 4 * theta**2
    assert size <= 0.087
    assert 0.5 + theta <= 0.57
    for s, p, share in product((1, 2, 10, 1e4), (1e-4, 0.1, 1), (1e-6, 0.1, 1)):
        epsilon, lam2 = share * (ratio + theta**2), p**2 * s / 144
        drift = {"F": 0.6 / (144 * s), "A": 0.6 / (144 * s), "N": 9.6 / (144 * s)}  # delta^2 = 1 / (144 s)
        v = {k: 9 * drift[k] + 10 * drift[k] / s for k in drift}
        assert v["F"] + 1.125 <= 1.21
        assert s * v["A"] + 1.25 <= 1.34
        assert s * v["N"] + 1.25 <= 2.52
        v, drift = {"F": 1.21, "A": 1.34 / s, "N": 2.52 / s}, {k: epsilon * drift[k] for k in drift}
        assert -7 / 8 + 1 / 16 + 2 * drift["F"] + 0.087 * v["F"] <= -0.69
        assert 2 * drift["A"] + 4 * epsilon * v["A"] <= 5.4 * epsilon / s
        assert 2 * drift["N"] + 4 * epsilon * v["N"] <= 10.3 * epsilon / s
        A = {k: 1.5 * 5 * drift[k] + 3 * lam2 / p**2 * v[k] for k in drift}  # divided by p
        assert A["A"] - 1 / 2 <= -0.46
        assert A["F"] <= 0.0042 + 0.0253 * s
        assert A["N"] + 1.5 * 1.25 <= 2.01
        assert -0.69 + 14 * epsilon / s * (0.0042 + 0.0253 * s) <= -0.6
    assert 5.4 - 14 * 0.46 <= -0.07 * 14
    assert 10.3 + 14 * 2.01 <= 39
    assert 1 / 0.6 <= 5 / 3 * (1 + 1e-15)
    assert 39 / 0.6 <= 65 * (1 + 1e-15)


def test_constants_of_the_windows():
    """(10) to (15) follow from steps 1 to 3 and the conditions for every s, p and m."""
    theta = tau = 1 / 16
    assert (1 + theta) * math.exp((1 + theta) * tau) <= 1.14
    factor, r = tau / 2 + theta * tau + 4 * theta**2, 1.14 * tau
    drift = {"F": 3 * r**2, "b": 3 * (1 + r) ** 2, "e": 3 * 4 * r**2}
    H = {k: (2 + 4 * factor) * drift[k] for k in drift}
    assert H["F"] - 7 / 8 + 1 / 16 + 2 * factor <= -0.67
    assert H["b"] <= 7.6
    assert H["e"] + 4 * factor <= 0.34
    assert 9 / 8 * (1 + r) ** 2 <= 1.3
    assert 18 * r**2 <= 0.1
    assert 18 * 4 * r**2 <= 0.37
    assert 0.34 + 0.67 * 0.37 / 1.3 <= 0.54
    assert 7.6 + 0.67 * 0.1 / 1.3 <= 7.7
    for s, p, m in product((1, 2, 10, 1e4), (1e-4, 0.1, 1), (1, 2, 30, 1e5)):
        delta2, lam2, c = 1 / (144 * m * s), p**2 * s / 144, 2 / (m * p * s)
        beta = {"F": 0.6 * delta2, "A": 0.6 * delta2, "N": 9.6 * delta2}
        variance = {k: 10 * beta[k] / s + (k != "F") * 1.25 / s for k in beta}
        v = {k: 9 * beta[k] + variance[k] + (k == "F") * 1.125 for k in beta}
        A = {k: (1 + p / 2) * p * 5 * beta[k] + (1 + 2 / p) * lam2 * v[k] for k in beta}
        assert A["A"] + (1 + p / 2) * (1 - p) <= 1 - 0.44 * p
        assert A["F"] <= 0.0566 * p * s
        assert A["N"] + (1 + p / 2) * p * 1.25 <= 2.43 * p
        H = {k: 0.54 * variance[k] / m + 7.7 * beta[k] for k in beta}
        assert H["F"] <= 0.055
        assert H["A"] <= 0.73 / (m * s)
        assert H["N"] <= 1.55 / (m * s)
        new = c * 0.0566 * p * s
        assert -0.67 / 1.3 + 0.055 + new <= -0.34
        assert -(0.67 - 0.4) / 1.3 + 0.055 + new <= 0
        assert 0.73 / (m * s) <= 0.84 * c * 0.44 * p
        assert 1.55 / (m * s) + c * 2.43 * p <= 6.5 / (m * s)
    assert 1 / 0.34 <= 3
    assert 6.5 / 0.34 <= 20


@pytest.mark.parametrize("phi", PENALTIES, ids=repr)
@pytest.mark.parametrize(("s", "Q", "sigma"), [(1, 1, 0.0), (3, 5, 0.0), (10, 1, 0.0), (3, 2, 3.0)])
def test_the_bound_holds(phi, s, Q, sigma):
    """(T1) and, with noise, (T2) along a run."""
    problem = heterogeneous(n=10)
    noisy = Noisy(problem, sigma) if sigma else problem
    mean, right = sides(noisy, phi, smoothness(problem), s, Q, rounds=200, below=0.0)
    assert mean <= right


def test_linear_convergence():
    """(PL1): V_t - psi* shrinks by 1 - alpha in expectation, over every set of clients, on strongly convex losses."""
    phi, s, Q = L1(0.2), 2, 2
    gamma = 1 / 16
    problem = Quadratics(phi, gamma)
    problem.M = 0.5 * (problem.M + torch.eye(3, dtype=torch.float64))  # eigenvalues in [0, 1]
    mu, p = float(torch.linalg.eigvalsh(problem.M.mean(0))[0]), 0.5
    x = torch.zeros(1, 3, dtype=torch.float64)
    for _ in range(3000):
        x = phi.prox(x - problem.each(x[:, None]).mean(1), 1.0)
    best = problem.H(x - gamma * problem.each(x[:, None]).mean(1))  # F = 0 there, so H = psi*
    eta = min(gamma / 8, p * s**0.5 / 12)
    epsilon = eta / gamma + 1 / 256
    c, eta_a = 14 * eta * epsilon / (s * p), (epsilon / (144 * s)) ** 0.5 / Q
    alpha = min(1.2 * mu * eta / (1 + gamma * mu), 0.07 * p)
    for scale in (0.1, 1.0, 10.0):
        z, own = state(problem, scale)
        for _ in range(3):
            before = problem.H(z) + c * problem.A(z, own) - best
            after, states, _ = problem.round(z, own, s, Q, eta, eta_a, 0.0)
            V = problem.H(after) + c * problem.A(after, states) - best
            assert 0 < V.mean() <= (1 - alpha) * before
            z, own = after[:1], states[:1]
