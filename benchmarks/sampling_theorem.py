"""How loose are the bounds of docs/sampling_theorem.md? Runs FedNMap with the theorems' steps and compares both sides.

    python benchmarks/sampling_theorem.py [--rounds 1000] [--noise 1] [--only noise]

Quadratics with an l1 and an MCP penalty, with exact gradients (Theorem 1) and with noise (Theorem 2), and a small
network on digits with exact gradients, for three shares of clients. The steps are the largest that the theorem
admits; with noise, those that make its bound smallest. The last column takes 100 times the server step, which no
theorem here covers.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fednmap import simulate
from fednmap.algorithms import FedNMap
from fednmap.core import Problem, Regularizer
from fednmap.data import ClientData, load, partition
from fednmap.measure import normal_map
from fednmap.models import mlp
from fednmap.problems import Network
from fednmap.regularizers import L1, MCP
from fednmap.testing import heterogeneous, optimum, smoothness
from fednmap.theory import estimate_smoothness


@dataclass
class Noisy:
    """A problem whose gradients carry Gaussian noise of variance sigma^2, addressed by round, client and step."""

    problem: Problem
    sigma: float

    def __post_init__(self) -> None:
        self.n, self.dim = self.problem.n, self.problem.dim
        self.loss, self.gradient = self.problem.loss, self.problem.gradient
        self.start = torch.zeros(self.dim, dtype=torch.float64)

    def oracle(self, clients: Tensor, t: int):
        exact = self.problem.oracle(clients, t)

        def gradient(x: Tensor, q: int) -> Tensor:
            rng = torch.Generator().manual_seed(1_000_003 * t + q)
            noise = torch.randn(self.n, self.dim, generator=rng, dtype=torch.float64)[clients]
            return exact(x, q) + self.sigma / math.sqrt(self.dim) * noise

        return gradient


@dataclass(frozen=True)
class Steps:
    """The steps of a theorem, its weight of A_0 in V_0, and its bound (V_0 - psi*) * start / T + noise."""

    gamma: float
    eta: float
    eta_a: float
    weight: float
    start: float
    noise: float
    window: int = 1


def one_round(L: float, rho: float, n: int, s: int, Q: int) -> Steps:
    """Theorem 1 for exact gradients: the largest steps with gamma L kappa = 1/16."""
    gamma = 1 / (16 * L + rho)
    kappa = 1 / (1 - gamma * rho)
    eta = min(gamma / 8, s**1.5 / (12 * n * L * kappa))
    epsilon = eta / gamma + (gamma * L * kappa) ** 2
    eta_a = math.sqrt(epsilon / (144 * s)) / (L * kappa * Q)
    return Steps(gamma, eta, eta_a, 14 * eta * epsilon * n / s**2, 5 / (3 * eta), 0.0)


def windows(L: float, rho: float, n: int, s: int, Q: int, sigma: float, rounds: int, gap: float) -> Steps:
    """Theorem 2 for noisy gradients: the server step that makes its bound smallest if V_0 - psi* is `gap`."""
    gamma = 1 / (16 * L + 2 * rho)
    kappa = 1 / (1 - gamma * rho)
    eta = min(gamma / 16, s**1.5 / (12 * n * L * kappa), math.sqrt(3 * gap * gamma * s * Q / (320 * sigma**2 * rounds)))
    m = min(rounds, int(gamma / (16 * eta) + 1e-9))
    eta_a = 1 / (12 * math.sqrt(m * s) * L * kappa * Q)
    return Steps(gamma, eta, eta_a, 2 * eta * n / (m * s**2), 3 / eta, 20 * sigma**2 / (m * s * Q), m)


def sides(
    problem: Problem, phi: Regularizer, L: float, s: int, Q: int, rounds: int, below: float, factor: float = 1
) -> tuple[float, float]:
    """The mean of |F(z_t)|^2 over one run with `factor` times the server step, and the theorem's bound."""
    n, start, sigma = problem.n, problem.start, getattr(problem, "sigma", 0.0)
    by = one_round(L, phi.rho, n, s, Q)
    exact = problem.problem if sigma else problem
    if sigma:
        by = windows(L, phi.rho, n, s, Q, sigma, rounds, float(exact.loss(start) + phi.value(start)) - below)
    x = phi.prox(start, by.gamma)
    own = exact.oracle(torch.arange(n), 0)(x, 0)
    first = normal_map(problem, phi, start, by.gamma).square().sum()
    V = exact.loss(x) + phi.value(x) + by.gamma / 2 * first + by.weight * own.square().sum(-1).mean()
    method = FedNMap(phi, gamma=by.gamma, eta_a=by.eta_a, eta_s=factor * by.eta / (by.eta_a * Q), Q=Q)
    T, found = rounds // by.window * by.window, [float(first)]
    for round in simulate(method, problem, rounds=T - 1, participation=s / n, start=start, seed=1):
        found.append(float(normal_map(problem, phi, round.server.z, by.gamma).square().sum()))
    return sum(found) / T, by.start * (float(V) - below) / T + by.noise


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--noise", type=float, default=1.0, help="sigma of the noisy gradients")
    parser.add_argument("--only", default="", help="only the problems with this in their name")
    given = parser.parse_args()
    rounds, sigma = given.rounds, given.noise
    torch.set_num_threads(1)
    quadratic = heterogeneous(n=50)
    L = smoothness(quadratic)
    digits = load("digits")
    parts = partition("sorted", digits.y_train, 20)
    data = ClientData.split(digits.x_train.double(), digits.y_train, parts)
    torch.manual_seed(0)
    network = Network(mlp(64, 10, hidden=(16,)).double(), torch.nn.functional.cross_entropy, data, batch_size=None)

    def least(phi: Regularizer) -> float:
        x = optimum(quadratic, phi)  # psi is convex: f is more strongly convex than either penalty is concave
        return float(quadratic.loss(x) + phi.value(x))

    l1, mcp = L1(0.2), MCP(0.2, 3.0)
    cases = [
        ("quadratics, l1", quadratic, l1, L, least(l1), (1, 5), rounds),
        ("quadratics, MCP", quadratic, mcp, L, least(mcp), (5,), rounds),
        (f"quadratics, l1, noise {sigma:g}", Noisy(quadratic, sigma), l1, L, least(l1), (1, 5), rounds),
        (f"quadratics, MCP, noise {sigma:g}", Noisy(quadratic, sigma), mcp, L, least(mcp), (5,), rounds),
        ("digits network, l1", network, L1(1e-3), estimate_smoothness(network, network.start).largest, 0.0, (5,), 300),
    ]
    print("| problem | s / n | Q | T | mean of F^2 | bound | bound / mean | mean, 100 x step |")
    print("|---" * 8 + "|")
    for name, problem, phi, smooth, below, local, length in (case for case in cases if given.only in case[0]):
        for share in (0.1, 0.3, 1.0):
            for Q in local:
                s, T = max(1, round(share * problem.n)), min(rounds, length)
                mean, bound = sides(problem, phi, smooth, s, Q, T, below)
                larger, _ = sides(problem, phi, smooth, s, Q, T, below, factor=100)
                numbers = (share, Q, T, mean, bound, bound / mean, larger)
                print(
                    f"| {name} | " + " | ".join(f"{v:.3g}" if isinstance(v, float) else str(v) for v in numbers) + " |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
