"""Quasi-Newton memory where it has no guarantee, noisy and nonconvex problems: how much worse it ends than without.

    python tests/attacks/test_memory_is_safe.py

prints, for each problem, the largest gap of psi that memory leaves in units of the decrease without it, and the largest
ratio of the smallest |F_nat| of both. Both begin at the same point, see the same minibatches and run as many rounds.
Memory goes back to the point with the smallest residual; where the loss is bounded that may be a plateau. Then psi ends
above its start, which `fednmap.run` and `fednmap train` say.
"""

import math

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from fednmap import measure, run, simulate
from fednmap.algorithms import FedNMap, FedNMapMemory
from fednmap.problems import Network
from fednmap.regularizers import L1, MCP, SCAD

ROUNDS, CLIENTS, FACTOR = 120, 4, 3.0
ONE_STEP, OTHERWISE, MINIBATCHES = 0.05, 0.3, 0.5
"""Memory may leave psi above that without it by so much of its decrease, and |F_nat| larger by FACTOR."""


def squared_sigmoid(outputs, labels):
    """Nonconvex, bounded: (1 - P(label))^2 of a logistic model."""
    return (1 - torch.softmax(outputs, 1).gather(1, labels[:, None])).square().mean()


def cosines(outputs, labels):
    """As crooked as can be: saddles everywhere."""
    return (1 - torch.cos(outputs - nn.functional.one_hot(labels, 10))).mean()


def mlp(hidden):
    return lambda: nn.Sequential(nn.Linear(64, hidden), nn.Tanh(), nn.Linear(hidden, 10))


def linear():
    return nn.Linear(64, 10)


KINDS = {
    "mlp, l1": (mlp(12), nn.functional.cross_entropy, L1(1e-3)),
    "mlp, mcp": (mlp(12), nn.functional.cross_entropy, MCP(2e-3, 4.0)),
    "logistic, mcp": (linear, nn.functional.cross_entropy, MCP(5e-3, 4.0)),
    "logistic, scad": (linear, nn.functional.cross_entropy, SCAD(5e-3, 4.0)),
    "squared sigmoid, l1": (linear, squared_sigmoid, L1(1e-3)),
    "cosines, l1": (mlp(6), cosines, L1(1e-4)),
}


def problem_of(kind, batch, seed):
    """Digits by label on four clients: as heterogeneous as it gets."""
    make, loss, phi = KINDS[kind]
    torch.manual_seed(seed)
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))[:400]
    x, y = torch.tensor(x, dtype=torch.float32)[order] / 16, torch.tensor(y)[order]
    parts = torch.argsort(y, stable=True).chunk(CLIENTS)
    return Network(make(), loss, [(x[part], y[part]) for part in parts], batch_size=batch, seed=seed), phi


def ended(method, problem, phi, gamma, **options):
    """psi before and after, and the smallest |F_nat| on the way; psi is inf where the run diverged."""
    start, smallest = problem.start, math.inf
    before = float(measure.objective(problem, phi, phi.prox(start, method.gamma)))
    for now in simulate(method, problem, rounds=ROUNDS, start=start, **options):
        if now.t % 10 == 9:
            x = method.model(now.server)
            smallest = min(smallest, float(measure.stationarity(problem, phi, x, gamma)) ** 0.5)
    return before, float(measure.objective(problem, phi, method.model(now.server))), smallest


def compared(kind, batch, local_steps, seed, share=1.0):
    """The gap of psi in units of the decrease without memory, the ratio of the residuals, whether psi rose."""
    problem, phi = problem_of(kind, batch, seed)
    gamma = measure.problem_gamma(problem, phi, problem.start)
    steps = {"eta_a": gamma / (2 * local_steps), "Q": local_steps, "gamma": min(gamma, 0.5 / max(phi.rho, 1e-9))}
    options = {"participation": share, "seed": seed}
    before, plain, residual = ended(FedNMap(phi, **steps), problem, phi, gamma, **options)
    _, with_memory, other = ended(FedNMapMemory(phi, **steps, memory=10), problem, phi, gamma, **options)
    return (with_memory - plain) / (before - plain), other / residual, with_memory > before


CASES = {
    "exact": (None, 1, 1.0),
    "exact, 5 local steps": (None, 5, 1.0),
    "batches of 16": (16, 1, 1.0),
    "batches of 16, 5 local steps": (16, 5, 1.0),
    "half of the clients": (None, 5, 0.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_memory_ends_no_worse_than_without_it(kind, case):
    batch, local_steps, share = CASES[case]
    for seed in range(3):
        gap, ratio, rose = compared(kind, batch, local_steps, seed, share)
        limit = MINIBATCHES if batch else OTHERWISE if local_steps > 1 else ONE_STEP
        assert gap <= limit or rose, (seed, gap)
        assert ratio <= FACTOR, (seed, ratio)


@pytest.mark.slow
def test_a_psi_that_rose_is_said():
    problem, phi = problem_of("squared sigmoid, l1", None, 1)
    gamma = measure.problem_gamma(problem, phi, problem.start)
    method = FedNMapMemory(phi, eta_a=gamma / 10, Q=5, gamma=gamma, memory=10)
    with pytest.warns(UserWarning, match="psi"):
        result = run(method, problem, rounds=ROUNDS, start=problem.start, every=ROUNDS, measure_gamma=gamma, seed=1)
    assert "psi" in result.warning


if __name__ == "__main__":
    worst = [-math.inf, 0.0]
    for kind in KINDS:
        for case, (batch, local_steps, share) in CASES.items():
            found = [compared(kind, batch, local_steps, seed, share) for seed in range(3)]
            rose = sum(one[2] for one in found)
            gap = max([one[0] for one in found if not one[2]], default=-math.inf)
            ratio = max(one[1] for one in found)
            worst = [max(worst[0], gap), max(worst[1], ratio)]
            print(f"{kind:20s} {case:30s} gap {gap:8.3f}  |F_nat| ratio {ratio:6.2f}  psi rose {rose}", flush=True)
    print("worst", worst)
