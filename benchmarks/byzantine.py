"""One of ten clients sends wrong vectors on purpose: how far from the honest clients' optimum does a run end?

Lasso: relative distance to the optimum of the nine honest clients (without attack: of all ten), 400 rounds, exact
gradients. MNIST: test accuracy of softmax regression, ten clients of two labels each, 60 rounds. Needs MNIST in
FEDNMAP_DATA.

    python benchmarks/byzantine.py lasso | mnist | monitor
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable

import torch

from fednmap import data, simulate
from fednmap.algorithms import FedAvg, FedMiD, FedNMap
from fednmap.core import Algorithm, Problem, State
from fednmap.data import ClientData
from fednmap.measure import accuracy
from fednmap.privacy import Attack, GeometricMedian, Median, Monitor, NormClip, Trimmed
from fednmap.problems import LeastSquares, Logistic
from fednmap.regularizers import L1
from fednmap.simulation import Diverged
from fednmap.simulation.uplink import Aggregator, Part, UplinkParts
from fednmap.testing import heterogeneous, optimum, smoothness

ATTACKS: dict[str, Attack | None] = {
    "none": None,
    "sign flipped": Attack("sign-flip", 1, 1.0),
    "flipped, x 10": Attack("sign-flip", 1, 10.0),
    "x 10": Attack("scale", 1, 10.0),
    "random, x 10": Attack("random", 1, 10.0),
    "constant": Attack("constant", 1, 10.0),
}


Cell = Callable[[Algorithm, Part, Attack | None], str]


def centres(clip: float) -> dict[str, Part]:
    return {
        "mean": Aggregator(),
        "median, forget 0": Median(0.0),
        "median": Median(),
        "median, forget 0.5": Median(0.5),
        "trimmed:0.1, forget 0": Trimmed(0.1, 0.0),
        "trimmed:0.1": Trimmed(0.1),
        "geometric median, forget 0": GeometricMedian(0.0),
        "geometric median": GeometricMedian(),
        f"clip:{clip:g}": NormClip(clip),
        f"clip:{clip:g}, forget 0.2": NormClip(clip, 0.2),
    }


def way(centre: Part, attack: Attack | None) -> UplinkParts:
    return centre if attack is None else [centre, attack]


def last(algorithm: Algorithm, problem: Problem, rounds: int, uplink: UplinkParts) -> State | None:
    """The server's state at the end; None if it is not finite."""
    try:
        return deque(simulate(algorithm, problem, rounds=rounds, uplink=uplink, threads=1), maxlen=1)[0].server
    except Diverged:
        return None


def table(method: Algorithm, uplinks: dict[str, Part], cell: Callable[[Algorithm, Part, Attack | None], str]) -> None:
    print(f"\n{type(method).__name__}\n\n| centre | " + " | ".join(ATTACKS) + " |")
    print("|---" * (len(ATTACKS) + 1) + "|")
    for name, centre in uplinks.items():
        cells = [cell(method, centre, attack) for attack in ATTACKS.values()]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def lasso() -> None:
    everybody, phi = heterogeneous(n=10), L1(0.2)
    honest = LeastSquares([everybody.data[i] for i in range(1, 10)])
    L, best, best_honest = smoothness(everybody), optimum(everybody, phi), optimum(honest, phi)
    step = 0.5 / (5 * L)

    def cell(algorithm: Algorithm, centre: Part, attack: Attack | None) -> str:
        server, due = last(algorithm, everybody, 400, way(centre, attack)), best if attack is None else best_honest
        if server is None:
            return "diverged"
        error = float((algorithm.model(server) - due).norm() / due.norm())
        return f"{error:.1e}" if error < 1e-3 else f"{error:.2f}" if error < 10 else "> 10"

    print(f"the two optima are {float((best - best_honest).norm() / best_honest.norm()):.2f} apart")
    table(FedNMap(phi, eta_a=step, Q=5, gamma=1 / L), centres(0.3), cell)
    table(FedMiD(phi, eta_a=step, Q=5), {k: v for k, v in centres(0.3).items() if "forget" not in k}, cell)


def mnist() -> None:
    found = data.load("mnist")
    parts = data.partition("shards:2", found.y_train, 10, seed=0, ids=None)
    rows = ClientData.split(found.x_train.flatten(1), found.y_train, parts)
    problem = Logistic(rows, classes=10, intercept=True, batch_size=32)
    x_test = found.x_test.flatten(1)

    def cell(algorithm: Algorithm, centre: Part, attack: Attack | None) -> str:
        server = last(algorithm, problem, 60, way(centre, attack))
        if server is None:
            return "diverged"
        return f"{100 * accuracy(problem.predict(algorithm.model(server), x_test), found.y_test):.1f}"

    kept = {k: v for k, v in centres(1.0).items() if k not in ("trimmed:0.1, forget 0", "geometric median, forget 0")}
    table(FedNMap(L1(1e-5), eta_a=0.1, Q=5), kept, cell)
    few = {k: v for k, v in centres(0.5).items() if "forget" not in k}
    table(FedAvg(eta_a=0.1, Q=5), few, cell)


def monitor() -> None:
    everybody, phi = heterogeneous(n=10), L1(0.2)
    L = smoothness(everybody)
    algorithm = FedNMap(phi, eta_a=0.5 / (5 * L), Q=5, gamma=1 / L)
    print("| attack | centre | named | z of norm | z of distance | next client | named by norms alone |")
    print("|---" * 7 + "|")
    for name, attack in ATTACKS.items():
        for label in ("trimmed:0.1", "clip:0.3"):
            centre = centres(0.3)[label]
            seen, told = Monitor(way(centre, attack)), Monitor(way(centre, attack), norms_only=True)
            for watch in (seen, told):
                last(algorithm, everybody, 60, watch)
            scores = {score.client: score for score in seen.scores()}
            others = max(score.worst for i, score in scores.items() if i)
            print(
                f"| {name} | {label} | {seen.named() or '-'} | {scores[0].norm:.1f} | {scores[0].distance:.1f} | "
                f"{others:.1f} | {told.named() or '-'} |",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("lasso", "mnist", "monitor"))
    torch.set_num_threads(1)
    {"lasso": lasso, "mnist": mnist, "monitor": monitor}[parser.parse_args().what]()
