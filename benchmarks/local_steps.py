"""When local steps and memory pay: rounds and gradients to 1e-6 for Q = 1, 5, 20, and minibatches of several sizes.

Needs the folder of data sets in FEDNMAP_DATA for the hospitals.

    python benchmarks/local_steps.py [--limit 2000]
"""

from __future__ import annotations

import math
import warnings
from itertools import product
from statistics import fmean

import torch
from measuring import arguments
from rounds import LEVELS, MEMORY, Case, case, follow, reached, trajectory

from fednmap import simulate
from fednmap.algorithms import FedNMap, FedNMapMemory
from fednmap.problems import LeastSquares, Logistic
from fednmap.simulation import Diverged


def method(one: Case, Q: int, memory: int, scale: float = 1.0) -> FedNMap | FedNMapMemory:
    eta_a = scale / (one.L * Q)
    if memory:
        return FedNMapMemory(one.phi, eta_a=eta_a, Q=Q, gamma=scale / one.L, memory=memory)
    return FedNMap(one.phi, eta_a=eta_a, Q=Q, gamma=4 * scale / one.L)


def local_steps(one: Case, limit: int) -> None:
    print(f"{one.name}: rounds, and gradients per client, to {LEVELS[-1]:g}", flush=True)
    for memory, Q in product((0, MEMORY), (1, 5, 20)):
        rounds = reached(follow(one, trajectory(one, method(one, Q, memory), limit))[0], LEVELS[-1])
        words = f"{rounds:>6} {rounds * Q:>8}" if rounds else f"{f'>{limit}':>6} {f'>{limit * Q}':>8}"
        print(f"  memory {memory:>2}, Q = {Q:>2}  {words}", flush=True)


def noise(one: Case, optimum: float, rounds: int) -> None:
    print(
        f"{one.name}: psi minus its optimum, mean over the last 20 of {rounds} rounds, Q = 1, eta_hat = 0.2/L",
        flush=True,
    )
    kind = Logistic if isinstance(one.problem, Logistic) else LeastSquares
    for batch, memory in product((4, 16, 64), (0, MEMORY)):
        noisy = kind(one.problem.data, batch_size=batch, seed=1)
        algorithm, last = method(one, 1, memory, 0.2), []
        try:
            for round in simulate(algorithm, noisy, rounds=rounds):
                if round.t >= rounds - 20:
                    x = algorithm.model(round.server)
                    last.append(float(one.problem.loss(x) + one.phi.value(x)))
        except Diverged:
            last = [math.inf]
        print(f"  batch {batch:>3}, memory {memory:>2}  {fmean(last) - optimum:.2e}", flush=True)


def best(one: Case) -> float:
    algorithm = method(one, 1, MEMORY)
    *_, last = simulate(algorithm, one.problem, rounds=300)
    x = algorithm.model(last.server)
    return float(one.problem.loss(x) + one.phi.value(x))


def main() -> None:
    asked = arguments(__doc__, limit=2000)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    hospitals = case("heart disease, natural, l1 1e-3", "heart-disease", "l1:0.001")
    lasso = case("sparse regression, lasso 1e-2", "sparse-regression", "l1:0.01")
    digits = case("digits multinomial, sorted, l1 1e-2", "digits", "l1:0.01")
    for one in (hospitals, lasso, digits):
        local_steps(one, asked.limit)
    for one in (hospitals, lasso):
        noise(one, best(one), 300)


if __name__ == "__main__":
    main()
