"""How loose is the bound of docs/sampling_theorem.md? Runs FedNMap with the theorem's steps and compares both sides.

    python benchmarks/sampling_theorem.py [--rounds 2000]

Quadratics with an l1 and an MCP penalty, and a small network on digits with exact gradients, for three
shares of clients. The steps are the largest that the theorem admits, and 100 times as large ("x 100"), which it
does not cover.
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
from fednmap.testing import heterogeneous, smoothness
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
            found = exact(x, q)
            noise = torch.stack([self._noise(t, int(i), q) for i in clients.reshape(-1)]).reshape(found.shape)
            return found + noise.to(found.dtype)

        return gradient

    def _noise(self, *address: int) -> Tensor:
        rng = torch.Generator().manual_seed(hash((7, *address)) % 2**31)
        return self.sigma / math.sqrt(self.dim) * torch.randn(self.dim, generator=rng, dtype=torch.float64)


def steps(L: float, rho: float, n: int, s: int, Q: int, *, noisy: bool) -> dict[str, float]:
    """The largest steps that the theorem admits: gamma = 1 / (16 L kappa), or a balanced one if gradients are noisy."""
    gamma = 1 / (16 * L + rho) if not noisy else 1 / (64 * L + rho)
    kappa = 1 / (1 - gamma * rho)
    eta = min(gamma / 8, s**1.5 / (12 * n * L * kappa))
    if noisy:
        eta = min(eta, (gamma * L * kappa) ** 3 / (L * kappa))
    epsilon = eta / gamma + (gamma * L * kappa) ** 2
    eta_a = math.sqrt(epsilon / (144 * s)) / (L * kappa * Q)
    return {"gamma": gamma, "eta": eta, "eta_a": eta_a, "epsilon": epsilon, "kappa": kappa}


def sides(
    problem: Problem, phi: Regularizer, L: float, s: int, Q: int, rounds: int, sigma: float, below: float, factor: float
) -> tuple[float, float]:
    """The mean of |F(z_t)|^2 over the rounds of one run, and the theorem's bound."""
    n, by = problem.n, steps(L, phi.rho, problem.n, s, Q, noisy=sigma > 0)
    gamma, eta = by["gamma"], by["eta"] * factor
    method = FedNMap(phi, gamma=gamma, eta_a=by["eta_a"], eta_s=eta / (by["eta_a"] * Q), Q=Q)
    start = problem.start
    x = phi.prox(start, gamma)
    everybody = torch.arange(n)
    own = problem.oracle(everybody, 0)(x, 0) if sigma == 0 else problem.problem.oracle(everybody, 0)(x, 0)
    first = normal_map(problem, phi, start, gamma).square().sum()
    V = (
        problem.loss(x)
        + phi.value(x)
        + gamma / 2 * first
        + 14 * eta * by["epsilon"] * n / s**2 * own.square().sum(-1).mean()
    )
    found = [float(first)]
    for round in simulate(method, problem, rounds=rounds - 1, participation=s / n, start=start, seed=1):
        z = round.server.z
        found.append(float(normal_map(problem, phi, z, gamma).square().sum()))
    bound = 5 * (float(V) - below) / (3 * eta * rounds) + 65 * by["epsilon"] * sigma**2 / (s * Q)
    return sum(found) / len(found), bound


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2000)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    quadratic = heterogeneous(n=50)
    digits = load("digits")
    parts = partition("sorted", digits.y_train, 20)
    data = ClientData.split(digits.x_train.double(), digits.y_train, parts)
    torch.manual_seed(0)
    network = Network(mlp(64, 10, hidden=(16,)).double(), torch.nn.functional.cross_entropy, data, batch_size=None)
    cases = [
        ("quadratics, l1", quadratic, L1(0.2), smoothness(quadratic), 0.0, (1, 5)),
        ("quadratics, MCP", quadratic, MCP(0.2, 3.0), smoothness(quadratic), 0.0, (1, 5)),
        ("quadratics, l1, noise 1", Noisy(quadratic, 1.0), L1(0.2), smoothness(quadratic), 1.0, (1, 5)),
        ("digits network, l1", network, L1(1e-3), estimate_smoothness(network, network.start).largest, 0.0, (1,)),
    ]
    print("| problem | s / n | Q | mean of F^2 | bound | bound / mean | x 100: bound / mean |")
    print("|---" * 7 + "|")
    for name, problem, phi, L, sigma, local in cases:
        length = rounds if problem is not network else min(rounds, 300)
        for share in (0.1, 0.3, 1.0):
            for Q in local:
                s = max(1, round(share * problem.n))
                here = [sides(problem, phi, L, s, Q, length, sigma, 0.0, factor) for factor in (1, 100)]
                (mean, bound), (mean100, bound100) = here
                numbers = (share, Q, mean, bound, bound / mean, bound100 / mean100)
                print(f"| {name} | " + " | ".join(f"{v:.3g}" for v in numbers) + " |", flush=True)


if __name__ == "__main__":
    main()
