"""Rounds and megabytes until |F_nat| has fallen to 1e-10 of its first value: FedNewton on the problems of `rounds.py`.

python benchmarks/newton.py [--only heart a9a]
"""

from __future__ import annotations

import argparse
import math
import time
import warnings

import torch
from rounds import Case, cases

from fednmap import simulate
from fednmap.algorithms import FedNewton, FedNMapMemory
from fednmap.core import Algorithm
from fednmap.measure import residual

LEVEL = 1e-10


def reached(case: Case, algorithm: Algorithm, gamma: float, limit: int) -> tuple[int | None, float]:
    """Rounds, None if not within the limit, and megabytes of all messages."""
    problem = case.problem

    def size(x: torch.Tensor) -> float:
        return float(residual(x, problem.gradient(x), case.phi, gamma).norm())

    first, sent = size(problem.start), 0.0
    for round in simulate(algorithm, problem, rounds=limit, start=problem.start):
        sent += (round.bytes_up + round.bytes_down) / 1e6
        if size(algorithm.model(round.server)) <= LEVEL * first:
            return round.t + 1, sent
    return None, sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="*", choices=cases(), help="these problems alone")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name, make in cases().items():
        if asked.only and name not in asked.only:
            continue
        case = make()
        gamma = min(1 / case.L, 0.5 / case.phi.rho if case.phi.rho else math.inf)
        remembering = FedNMapMemory(case.phi, eta_a=1 / case.L, Q=1, gamma=gamma, memory=20)
        words = []
        for algorithm, limit in ((FedNewton(case.phi, gamma=gamma), 50), (remembering, 500)):
            began = time.process_time()
            rounds, sent = reached(case, algorithm, gamma, limit)
            words.append(f"{rounds or f'>{limit}':>5} rounds {sent:8.3g} MB {time.process_time() - began:6.1f} s")
        print(
            f"{case.name:40} p = {case.problem.dim:4d} | FedNewton {words[0]} | FedNMap, memory {words[1]}", flush=True
        )


if __name__ == "__main__":
    main()
