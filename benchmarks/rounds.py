"""Rounds and megabytes until |F_nat| has fallen to 1e-3, 1e-4 and 1e-6 of its first value, with exact gradients.

Every method runs with each setting of a small grid, and the best one counts, for each level by itself; FedNMap with
memory runs with one, that of `--eta-a auto`. Distributed FISTA with restart is what a solver would do with one gradient
per round. Needs the folder of data sets in FEDNMAP_DATA for the hospitals and a9a.

    python benchmarks/rounds.py [--limit 500] [--only heart] [--out rounds.json] [--figure rounds.png]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fednmap import simulate
from fednmap.algorithms import FedADMM, FedDA, FedDR, FedNMap, FedNMapMemory, Zhang
from fednmap.core import Algorithm, Regularizer
from fednmap.measure import residual
from fednmap.problems import FiniteSum
from fednmap.regularizers import MCP, GroupLasso
from fednmap.runs.configuration import Config
from fednmap.runs.experiment import prepare
from fednmap.simulation import Diverged

LEVELS = (1e-3, 1e-4, 1e-6)
MEMORY = 20


@dataclass(frozen=True)
class Case:
    """A problem, with L of f and the largest of the clients'."""

    name: str
    problem: FiniteSum
    phi: Regularizer
    L: float
    convex: bool = True


def case(name: str, data: str, reg: str, phi: Callable[[FiniteSum, float], Regularizer] | None = None) -> Case:
    model = "least-squares" if "regression" in data else "logistic"
    experiment = prepare(Config.make(data=data, model=model, penalty=reg, batch_size=0, dtype="float64", clients=10))
    problem, L = experiment.problem, experiment.problem.smoothness()
    chosen = experiment.phi if phi is None else phi(problem, L)
    return Case(name, problem, chosen, L, convex=chosen.rho == 0)


def cases() -> dict[str, Callable[[], Case]]:
    a9a = f"svm:{Path(os.environ.get('FEDNMAP_DATA', '.')) / 'libsvm' / 'a9a'}"

    def rows(problem: FiniteSum, L: float) -> Regularizer:
        """All weights of one pixel, over the ten digits, are one group."""
        return GroupLasso(0.003, torch.arange(problem.dim) % (problem.dim // 10))

    return {
        "heart": lambda: case("heart disease, natural, l1 1e-3", "heart-disease", "l1:0.001"),
        "a9a": lambda: case("a9a, sorted, l1 1e-3", a9a, "l1:0.001"),
        "digits": lambda: case("digits multinomial, sorted, l1 1e-3", "digits", "l1:0.001"),
        "lasso": lambda: case("sparse regression, lasso 1e-2", "sparse-regression", "l1:0.01"),
        "group": lambda: case("digits multinomial, group lasso 3e-3", "digits", "l1:0.001", rows),
        "mcp": lambda: case("sparse regression, MCP 1e-2", "sparse-regression", "l1:0.01", lambda _, L: MCP(0.01, 8.0)),
    }


def fista(case: Case, limit: int) -> Iterator[tuple[Tensor, int, int]]:
    """With restart where momentum leads uphill (O'Donoghue and Candes, 2015): one vector up and one down."""
    p, x = case.problem, case.problem.start
    bytes = p.n * x.numel() * x.element_size()
    y, turn = x, 1.0
    for _ in range(limit):
        new = case.phi.prox(y - p.gradient(y) / case.L, 1 / case.L)
        if float((y - new) @ (new - x)) > 0:
            turn, y = 1.0, new
        else:
            longer = (1 + math.sqrt(1 + 4 * turn * turn)) / 2
            turn, y = longer, new + (turn - 1) / longer * (new - x)
        x = new
        yield x, bytes, bytes


def trajectory(case: Case, algorithm: Algorithm, limit: int) -> Iterator[tuple[Tensor, int, int]]:
    try:
        for round in simulate(algorithm, case.problem, rounds=limit, start=case.problem.start):
            yield algorithm.model(round.server), round.bytes_up, round.bytes_down
    except Diverged:
        return


def grid(case: Case) -> dict[str, list[tuple[str, Callable[[], Algorithm]]]]:
    """Method -> its settings."""
    phi, L, s = case.phi, case.L, 0.5 / case.phi.rho if case.phi.rho else math.inf
    steps = [(Q, scale) for Q in (1, 10) for scale in (0.5, 1.0, 1.9)]
    local = [(scale, ratio) for scale in (0.3, 1.0) for ratio in (0.3, 1.0, 4.0)]

    def each(make: Callable[[int, float], Algorithm]) -> list[tuple[str, Callable[[], Algorithm]]]:
        return [(f"Q = {Q}, eta_hat = {scale:g}/L", lambda Q=Q, scale=scale: make(Q, scale)) for Q, scale in steps]  # type: ignore[misc]

    found = {
        "FedNMap, memory": [
            (
                f"memory = {MEMORY}, Q = 1, eta_hat = 1/L",
                lambda: FedNMapMemory(phi, eta_a=1 / L, Q=1, gamma=min(1 / L, s), memory=MEMORY),
            )
        ],
        "FedNMap": each(lambda Q, c: FedNMap(phi, eta_a=c / (L * Q), Q=Q, gamma=min(4 * c / L, s))),
        "Zhang": each(lambda Q, c: Zhang(phi, eta_a=c / (L * Q), Q=Q)),
        "FedDR": [
            (
                f"Q = 10, r = {ratio:g}/L",
                lambda scale=scale, ratio=ratio: FedDR(  # type: ignore[misc]
                    phi, eta_a=scale / (L * (1 + 1 / ratio)), Q=10, r=ratio / L, alpha=1.0
                ),
            )
            for scale, ratio in local
        ],
        "FedADMM": [
            (
                f"Q = 10, beta = {ratio:g} L",
                lambda scale=scale, ratio=ratio: FedADMM(  # type: ignore[misc]
                    phi, eta_a=scale / (L * (1 + ratio)), Q=10, beta=ratio * L
                ),
            )
            for scale, ratio in local
        ],
    }
    if case.convex:
        found["FedDA"] = each(lambda Q, c: FedDA(phi, eta_a=c / (L * Q), Q=Q))
    return found


def follow(case: Case, run: Iterator[tuple[Tensor, int, int]]) -> tuple[list[float], list[float]]:
    """|F_nat| relative to the first after every round, and megabytes so far, until the smallest level is reached."""

    def size(x: Tensor) -> float:
        return float(residual(x, case.problem.gradient(x), case.phi, gamma).norm())

    gamma = min(1 / case.L, 0.5 / case.phi.rho if case.phi.rho else math.inf)
    first, sizes, sent = size(case.problem.start), [1.0], [0.0]
    for x, up, down in run:
        sizes.append(size(x) / first)
        sent.append(sent[-1] + (up + down) / 1e6)
        if not sizes[-1] < 1e6 or sizes[-1] <= LEVELS[-1]:
            break
    return sizes, sent


def reached(sizes: list[float], level: float) -> int | None:
    return next((t for t, size in enumerate(sizes) if size <= level), None)


def measured(case: Case, limit: int) -> dict[str, object]:
    """Method -> rounds and megabytes to each level, the setting that was best for the last, and its curve."""
    found: dict[str, object] = {}
    runs = {name: settings for name, settings in grid(case).items()}
    for name in ("FedNMap, memory", "FISTA with restart", *(n for n in runs if n != "FedNMap, memory")):
        curves = []
        if name == "FISTA with restart":
            curves.append(("step 1/L", *follow(case, fista(case, limit))))
        else:
            for words, make in runs[name]:
                try:
                    curves.append((words, *follow(case, trajectory(case, make(), limit))))
                except ValueError as error:  # such as a weakly convex phi that a step does not suit
                    print(f"  {name}, {words}: {error}", flush=True)
        rounds, sent = {}, {}
        for level in LEVELS:
            hits = [(t, mb[t]) for _, sizes, mb in curves if (t := reached(sizes, level)) is not None]
            rounds[f"{level:g}"], sent[f"{level:g}"] = min(hits) if hits else (None, None)
        best = min(
            curves, key=lambda c: (reached(c[1], LEVELS[-1]) or math.inf, min(c[1])), default=("-", [1.0], [0.0])
        )
        found[name] = {"rounds": rounds, "megabytes": sent, "setting": best[0], "curve": best[1]}
        words = " ".join(f"{f'>{limit}' if v is None else v:>6}" for v in rounds.values())
        print(f"  {name:20} {words}   {best[0]}", flush=True)
    return found


def figure(results: dict[str, dict[str, dict[str, list[float]]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    columns = min(3, len(results))
    rows = math.ceil(len(results) / columns)
    drawn, axes = plt.subplots(rows, columns, figsize=(4.2 * columns, 3.2 * rows), squeeze=False, layout="constrained")
    for axis, (name, found) in zip(axes.flat, results.items(), strict=False):
        for k, (method, about) in enumerate(found.items()):
            style = {
                "color": f"C{k}",
                "lw": 2.2 if method == "FedNMap, memory" else 1.2,
                "ls": ("-", "--", "-.", ":")[k % 4],
            }
            axis.semilogy(about["curve"], label=method, **style)
        axis.set(title=name, xlabel="communication rounds", ylim=(LEVELS[-1] / 3, 3))
        axis.title.set_fontsize(10)
    for axis in axes[:, 0]:
        axis.set_ylabel("|F_nat| / first")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    drawn.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--limit", type=int, default=500, help="rounds per run")
    parser.add_argument("--only", nargs="*", choices=cases(), help="these problems alone")
    parser.add_argument("--out", type=Path, help="JSON with all numbers; problems that it holds already are kept")
    parser.add_argument("--figure", type=Path)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results = json.loads(asked.out.read_text()) if asked.out and asked.out.exists() else {}
    for name, make in cases().items():
        if asked.only and name not in asked.only:
            continue
        one = make()
        if one.name in results:
            continue
        print(f"{one.name}: rounds to {', '.join(f'{level:g}' for level in LEVELS)}, best setting", flush=True)
        results[one.name] = measured(one, asked.limit)
        if asked.out:
            asked.out.write_text(json.dumps(results))
    if asked.figure:
        figure(results, asked.figure)


if __name__ == "__main__":
    main()
