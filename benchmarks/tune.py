"""How close `tune` comes to a grid over (eta_a, gamma) at the same number of rounds.

    FEDNMAP_DATA=... python benchmarks/tune.py [--rounds 50] [digits a9a mnist hospitals]

For each problem: the squared residual |F_nat|^2 of the tuned pair (mean of the last 3 rounds) over the best of a grid
of 25 pairs around the paper's (0.1, 4), every one of them counted. Then the same with gamma = 16, 32 and 64 as well:
there a network may fall into the saddle of all-zero weights, where the residual is tiny and nothing is learnt. `tune`
stays away from it; `tune(residual_only=True)` does not, and is compared with that larger grid.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections import deque
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch

from fednmap.algorithms import FedNMap
from fednmap.measure import objective, stationarity
from fednmap.runs.configuration import Config
from fednmap.runs.experiment import prepare
from fednmap.simulation import Diverged, simulate
from fednmap.theory.pilots import LAST, tune

STEPS = (0.01, 0.03, 0.1, 0.3, 1.0)
GAMMAS = (0.5, 1.0, 2.0, 4.0, 8.0)
LARGE = (16.0, 32.0, 64.0)


class Point(NamedTuple):
    residual: float
    psi: float
    eta_a: float
    gamma: float


def problems() -> dict[str, Config]:
    folder = Path(os.environ.get("FEDNMAP_DATA", "."))
    return {
        "digits": Config.make(data="digits"),
        "a9a": Config.make(data=f"svm:{folder / 'libsvm' / 'a9a'}", model="logistic", penalty="l1:0.001"),
        "mnist": Config.make(data="mnist"),
        "hospitals": Config.make(data="heart-disease", model="logistic", penalty="l1:0.01"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="tune against a grid")
    parser.add_argument("names", nargs="*", default=list(problems()))
    parser.add_argument("--rounds", type=int, default=50)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.names:
        report(name, problems()[name], arguments.rounds)


def report(name: str, config: Config, rounds: int) -> None:
    experiment, began = prepare(config), time.perf_counter()
    problem, phi, Q = experiment.problem, experiment.phi, config.local_steps
    tuned, free = (tune(problem, phi, Q=Q, rounds=rounds, residual_only=only) for only in (False, True))

    def reached(eta_a: float, gamma: float) -> Point:
        algorithm = FedNMap(phi, eta_a=eta_a, Q=Q, gamma=gamma)
        try:
            last = deque((algorithm.model(r.server) for r in simulate(algorithm, problem, rounds=rounds)), maxlen=LAST)
        except Diverged:
            return Point(math.inf, math.inf, eta_a, gamma)
        residual = fmean(float(stationarity(problem, phi, x, tuned.measure_gamma)) for x in last)
        return Point(residual, float(objective(problem, phi, last[-1])), eta_a, gamma)

    best = min(reached(eta_a, gamma) for eta_a in STEPS for gamma in GAMMAS)
    wide = min(best, *(reached(eta_a, gamma) for eta_a in STEPS for gamma in LARGE))
    ours, only = (
        Point(t.pilot.score, t.pilot.psi, t.eta_a, t.gamma) if t.pilot else reached(t.eta_a, t.gamma)
        for t in (tuned, free)
    )
    print(
        f"{name}, {rounds} rounds: tuned / best of the grid {ours.residual / best.residual:.2f}; "
        f"with gamma up to {LARGE[-1]:g} {ours.residual / wide.residual:.2f}, "
        f"residual only {only.residual / wide.residual:.2f}"
    )
    for label, point in (
        ("tuned", ours),
        ("best of the grid", best),
        ("residual only", only),
        ("with larger gamma", wide),
    ):
        print(
            f"    {label:18s} residual {point.residual:.2e}, psi {point.psi:.4f} at eta_a = {point.eta_a:.3g}, "
            f"gamma = {point.gamma:.3g}"
        )
    smaller = tuned.eta_a / tuned.guaranteed_eta_a
    print(f"    guaranteed eta_a   {tuned.guaranteed_eta_a:.3g}, {smaller:.0f} times smaller than the tuned one")
    print(
        f"    pilots took {tuned.rounds_used} of {tuned.budget} rounds; {time.perf_counter() - began:.0f} s", flush=True
    )


if __name__ == "__main__":
    main()
