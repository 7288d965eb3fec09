"""Megabytes until |F_nat| has fallen to 1e-2, 1e-4 and 1e-6 of its first value, with compressed uplinks.

FedNMap, CompressedFedNMap and EControlDA with each compressor, exact gradients, Q = 1, each with every step of a small
grid, of which CompressedFedNMap takes all (pace = 1); the one with the fewest bytes up counts, for each level alone.

    python benchmarks/compression.py [--limit 3000] [--only FedNMap "top 1 %"] [--out compression.json]
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import torch

from fednmap import simulate
from fednmap.algorithms import CompressedFedNMap, EControlDA, FedNMap
from fednmap.core import Algorithm, Regularizer
from fednmap.measure import residual
from fednmap.problems import FiniteSum
from fednmap.runs.configuration import Config
from fednmap.runs.experiment import prepare
from fednmap.simulation import Diverged

LEVELS = (1e-2, 1e-4, 1e-6)
STEPS = (0.03, 0.1, 0.3, 1.0)
SETTINGS: dict[str, dict[str, float | str]] = {
    "top 1 %": {"K": 0.01},
    "top 10 %": {"K": 0.1},
    "random 10 %": {"K": 0.1, "compressor": "random"},
    "4 bits": {"compressor": "quantised", "bits": 4},
    "8 bits": {"compressor": "quantised", "bits": 8},
}


def methods(phi: Regularizer, L: float) -> Iterator[tuple[str, Callable[[float], Algorithm]]]:
    """Name, and the method with a step of so many 1/L."""
    yield "FedNMap", lambda step: FedNMap(phi, eta_a=step / L, Q=1, gamma=1 / L)
    for name, options in SETTINGS.items():
        yield (
            f"CompressedFedNMap, {name}",
            lambda step, o=options: CompressedFedNMap(  # type: ignore[misc]
                phi, eta_a=step / L, Q=1, gamma=1 / L, pace=1.0, **o
            ),
        )
    for name in ("top 1 %", "top 10 %", "4 bits"):
        yield (
            f"CompressedFedNMap, {name}, control 0",
            lambda step, o=SETTINGS[name]: CompressedFedNMap(  # type: ignore[misc]
                phi, eta_a=step / L, Q=1, gamma=1 / L, pace=1.0, control=0.0, **o
            ),
        )
    for name, options in SETTINGS.items():
        yield f"EControlDA, {name}", lambda step, o=options: EControlDA(phi, eta_a=step / L, **o)  # type: ignore[misc]


def follow(algorithm: Algorithm, problem: FiniteSum, gamma: float, limit: int) -> dict[float, tuple[float, float, int]]:
    """Level -> megabytes up, megabytes in all, rounds."""

    def size(x: torch.Tensor) -> float:
        return float(residual(x, problem.gradient(x), algorithm.phi, gamma).norm())

    first, up, down, found = size(problem.start), 0, 0, {}
    try:
        for round in simulate(algorithm, problem, rounds=limit):
            up, down = up + round.bytes_up, down + round.bytes_down
            if (round.t + 1) % 5:
                continue
            now = size(algorithm.model(round.server)) / first
            found |= {
                level: (up / 1e6, (up + down) / 1e6, round.t + 1)
                for level in LEVELS
                if now <= level and level not in found
            }
            if not now < 1e3 or now <= LEVELS[-1]:
                break
    except Diverged:
        pass
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--limit", type=int, default=3000, help="rounds per run")
    parser.add_argument("--only", nargs="*", default=[""], help="methods whose names hold one of these words")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    config = Config.make(
        data="sparse-regression", model="least-squares", penalty="l1:0.01", batch_size=0, dtype="float64", clients=10
    )
    experiment = prepare(config)
    problem, phi = experiment.problem, experiment.phi
    L = problem.smoothness()
    print(f"{problem.n} clients, {problem.dim} coordinates; MB up, MB in all, rounds to {LEVELS}")
    results: dict[str, dict[str, tuple[float, float, int] | None]] = {}
    runs: dict[str, list[dict[float, tuple[float, float, int]]]] = {}
    chosen = [(name, make) for name, make in methods(phi, L) if any(word in name for word in asked.only)]
    for (name, make), step in product(chosen, STEPS):
        runs.setdefault(name, []).append(follow(make(step), problem, 1 / L, asked.limit))
        if step != STEPS[-1]:
            continue
        best = {level: min((r[level] for r in runs[name] if level in r), default=None) for level in LEVELS}
        results[name] = {f"{level:g}": value for level, value in best.items()}
        words = [f"{v[0]:8.3f} {v[1]:8.3f} {v[2]:6d}" if v else f"{'-':>8} {'-':>8} {'-':>6}" for v in best.values()]
        print(f"{name:42} {' | '.join(words)}", flush=True)
    if asked.out:
        asked.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
