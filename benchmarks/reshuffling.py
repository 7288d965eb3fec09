"""Minibatches with and without replacement: |F_nat|^2 of FedNMap with 20 clients where it levels off.

For each local step size, the mean of |F_nat|^2 over the last tenth of the epochs and over the seeds, with exactly one
epoch per round (Q = 8) and with an eighth of one (Q = 1). Labels are sorted: every client has its own.

    python benchmarks/reshuffling.py [--epochs 200] [--seeds 2] [--out reshuffling.json] [--figure reshuffling.png]
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path

import torch

from fednmap import simulate
from fednmap.algorithms import FedNMap
from fednmap.data import ClientData, load, partition
from fednmap.measure import stationarity
from fednmap.problems import Logistic
from fednmap.regularizers import ElasticNet

CLIENTS, ROWS, BATCH = 20, 64, 8
RULES = ("replacement", "reshuffle")
STEPS = (1.0, 0.5, 0.25, 0.125)


def problem(rule: str, Q: int, seed: int) -> Logistic:
    """Digits sorted by label, 64 rows of each of 20 clients."""
    digits = load("digits")
    parts = partition("sorted", digits.y_train, CLIENTS, seed=0)
    data = ClientData.split(digits.x_train.double(), digits.y_train, [part[:ROWS] for part in parts])
    return Logistic(data, classes=10, batch_size=BATCH, seed=seed, minibatches=rule, local_steps=Q)


def curve(rule: str, eta_a: float, Q: int, epochs: int, seed: int) -> list[float]:
    """|F_nat|^2 after every epoch."""
    phi, here = ElasticNet(0.001, 0.05), problem(rule, Q, seed)
    algorithm, rounds = FedNMap(phi, eta_a=eta_a, Q=Q, gamma=1.0), ROWS // BATCH // Q
    found = []
    for round in simulate(algorithm, here, rounds=epochs * rounds):
        if (round.t + 1) % rounds == 0:
            found.append(float(stationarity(here, phi, algorithm.model(round.server), 1.0)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--figure", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    curves: dict[str, list[float]] = {}
    for Q, eta_a in product((8, 1), STEPS):
        level = {}
        for rule in RULES:
            runs = torch.tensor([curve(rule, eta_a, Q, asked.epochs, seed) for seed in range(asked.seeds)])
            curves[f"{rule} {Q} {eta_a:g}"] = runs.mean(0).tolist()
            level[rule] = float(runs[:, -max(1, asked.epochs // 10) :].mean())
        gain = level["replacement"] / level["reshuffle"]
        numbers = " ".join(f"{level[rule]:10.2e}" for rule in RULES)
        print(f"Q = {Q:2d}, eta_a = {eta_a:<7g} {numbers}   {gain:6.2f} times less", flush=True)
    if asked.out:
        asked.out.write_text(json.dumps(curves))
    if asked.figure:
        figure(curves, asked.figure)


def figure(curves: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    drawn, axes = plt.subplots(1, 2, figsize=(9.6, 3.6), sharey=True, layout="constrained")
    for axis, Q in zip(axes, (8, 1), strict=True):
        for k, eta_a in enumerate(STEPS):
            for rule, style in zip(RULES, ("--", "-"), strict=True):
                label = f"eta_a = {eta_a:g}" if rule == "reshuffle" else None
                axis.semilogy(curves[f"{rule} {Q} {eta_a:g}"], style, color=f"C{k}", lw=1.3, label=label)
        axis.set(title=f"{'one epoch' if Q == 8 else 'an eighth of an epoch'} per round, Q = {Q}", xlabel="epochs")
    axes[0].plot([], [], "k--", lw=1.3, label="with replacement")
    axes[0].plot([], [], "k-", lw=1.3, label="reshuffled")
    axes[0].set_ylabel("$|F_{nat}(x)|^2$")
    drawn.legend(loc="outside right center", frameon=False, fontsize=8)
    drawn.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
