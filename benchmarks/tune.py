"""How close `tune` comes to a grid over (eta_a, gamma) at the same number of rounds.

    FEDNMAP_DATA=... python benchmarks/tune.py [--rounds 50] [digits a9a mnist hospitals]

For each problem: the squared residual |F_nat|^2 of the tuned pair (mean of the last 3 rounds), the best of a grid of
24 pairs, and their ratio. A grid point that ended at the saddle of all-zero weights has a tiny residual and has learnt
nothing, so the ratio is given twice: against the grid points whose psi came at least half as far below psi(0) and
psi(start) as the lowest psi on the grid, for `tune` as it is; and against all of them, for `tune(residual_only=True)`.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from statistics import fmean

import torch

from fednmap.algorithms import FedNMap
from fednmap.config import Config
from fednmap.experiment import prepare
from fednmap.measure import objective, stationarity
from fednmap.simulation import Diverged, simulate
from fednmap.tune import LAST, tune

SCALES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # eta_hat, in units of 1 over the smoothness of f
RATIOS = (1.0, 3.0, 10.0, 30.0)  # gamma / eta_hat


def problems() -> dict[str, Config]:
    folder = Path(os.environ.get("FEDNMAP_DATA", "."))
    return {
        "digits": Config.make(data="digits"),
        "a9a": Config.make(data=f"svm:{folder / 'libsvm' / 'a9a'}", model="logistic", reg="l1:0.001"),
        "mnist": Config.make(data="mnist"),
        "hospitals": Config.make(data="heart-disease", model="logistic", reg="l1:0.01"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="tune against a grid")
    parser.add_argument("names", nargs="*", default=list(problems()))
    parser.add_argument("--rounds", type=int, default=50)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{'':10s} {'tuned':>9s} {'grid':>9s} {'ratio':>6s}  {'residual only':>13s} {'grid':>9s} {'ratio':>6s}  rounds"
    )
    for name in arguments.names:
        report(name, problems()[name], arguments.rounds)


def report(name: str, config: Config, rounds: int) -> None:
    experiment, began = prepare(config), time.perf_counter()
    problem, phi, Q = experiment.problem, experiment.phi, config.local_steps
    found = tune(problem, phi, Q=Q, rounds=rounds)
    free = tune(problem, phi, Q=Q, rounds=rounds, residual_only=True)
    unit = found.measure_gamma
    grid = []
    for scale in SCALES:
        for ratio in RATIOS:
            algorithm = FedNMap(phi, eta_a=scale * unit / Q, Q=Q, gamma=ratio * scale * unit)
            try:
                last = [algorithm.model(r.server) for r in simulate(algorithm, problem, rounds=rounds)][-LAST:]
            except Diverged:
                continue
            residual = fmean(float(stationarity(problem, phi, x, unit)) for x in last)
            grid.append((residual, float(objective(problem, phi, last[-1])), algorithm))
    z = problem.start
    reference = min(float(objective(problem, phi, phi.prox(v, 0.0))) for v in (z, torch.zeros_like(z)))
    limit = (min(psi for _, psi, _ in grid) + reference) / 2
    learnt = min((g for g in grid if g[1] <= limit), default=min(grid, key=lambda g: g[1]), key=lambda g: g[0])
    lowest = min(grid, key=lambda g: g[0])
    ours, only = (t.pilot.score if t.pilot else float("nan") for t in (found, free))
    used = f"{found.rounds_used} of {found.budget}, grid {len(SCALES) * len(RATIOS) * rounds}"
    print(
        f"{name:10s} {ours:9.2e} {learnt[0]:9.2e} {ours / learnt[0]:6.2f}  {only:13.2e} {lowest[0]:9.2e} "
        f"{only / lowest[0]:6.2f}  {used}",
        flush=True,
    )
    for label, eta_a, gamma, psi in (
        ("tuned", found.eta_a, found.gamma, found.pilot.psi if found.pilot else float("nan")),
        ("best of the grid that learnt", learnt[2].eta_a, learnt[2].gamma, learnt[1]),
        ("residual only", free.eta_a, free.gamma, free.pilot.psi if free.pilot else float("nan")),
        ("best of the grid", lowest[2].eta_a, lowest[2].gamma, lowest[1]),
    ):
        print(f"    {label:29s} eta_a = {eta_a:<9.3g} gamma = {gamma:<9.3g} psi = {psi:.4f}")
    smaller = found.eta_a / found.guaranteed_eta_a
    print(f"    guaranteed pair: eta_a = {found.guaranteed_eta_a:.3g}, {smaller:.0f} times smaller than the tuned one")
    print(f"    {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
