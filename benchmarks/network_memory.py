"""Seconds until a network reaches 95 % test accuracy with exact gradients: quasi-Newton memory against plain rounds.

The runs of the figure network-memory, on one thread; a method's seconds are those of its rounds, without measuring.
Prints ratios of processor time with 95 % intervals.

    python benchmarks/network_memory.py [--seeds 10]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from fednmap.runs.experiment import prepare
from fednmap.simulation import simulate

sys.path.insert(0, str(Path(__file__).parents[1]))
from reproduction import network_memory as figure
from reproduction.verdict import compare


def seconds(penalty: str, method: figure.Method, seed: int) -> float:
    """Processor time until the test accuracy is 95 %; infinite if that takes more than the figure's rounds."""
    config = figure.config_of(penalty, method, seed)
    experiment = prepare(config)
    algorithm, accuracy = experiment.algorithm(config.algorithms[0]), experiment.metrics()["test_accuracy"]
    rounds = simulate(algorithm, experiment.problem, rounds=config.rounds, start=experiment.start(algorithm))
    spent, began = 0.0, time.process_time()
    for now in rounds:
        spent += time.process_time() - began
        if figure.measured_after(now.t + 1) and accuracy(algorithm.model(now.server)) >= figure.ACCURACIES[-1]:
            return spent
        began = time.process_time()
    return float("inf")


def main() -> None:
    """Print a row per penalty."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=10)
    seeds = range(parser.parse_args().seeds)
    torch.set_num_threads(1)
    seconds("L1", figure.QUASI_NEWTON, 0)  # imports and caches
    print("| penalty | memory's seconds, of FedNMap's | of Zhang's |\n|---|---|---|")
    for penalty, others in figure.BEST.items():
        spent = {m: {k: seconds(penalty, m, k) for k in seeds} for m in (figure.QUASI_NEWTON, *others)}
        ratios = [str(compare(spent[figure.QUASI_NEWTON], spent[m])) for m in others]
        print(f"| {penalty} | {ratios[0]} | {ratios[1]} |", flush=True)


if __name__ == "__main__":
    main()
