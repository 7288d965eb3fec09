"""What a round costs beyond its gradients: round time / time of the bare gradients in their fastest form.

    python benchmarks/overhead.py [--threads 2] [--json FILE]

The bare gradients are those of a round (n clients, Q steps, the same minibatches) at points that do not move: for the
fully connected network in the best of several groupings, for MobileNet from the module's own parameters in
channels-last, one client at a time. Wall time, two threads, in turn, the fastest of the repeats: leave the machine
alone meanwhile. The exit code says whether the limits hold.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable

import torch
from jobs import mobilenet, network
from measuring import arguments, in_turn, table, write

from fednmap import algorithms as A
from fednmap import simulate
from fednmap.core import Algorithm
from fednmap.problems import Network
from fednmap.regularizers import L1

GROUPINGS = (5, 10, 25, 50)
LIMITS = {"network": 1.9, "network, compiled": 1.6, "mobilenet": 1.15}


def methods(Q: int) -> dict[str, Algorithm]:
    phi = L1(1e-4)
    return {
        "FedNMap": A.FedNMap(phi, eta_a=0.01, Q=Q),
        "Zhang": A.Zhang(phi, eta_a=0.01, Q=Q),
        "FedCanon": A.FedCanon(phi, eta_a=0.01, Q=Q),
        "SCAFFOLD": A.SCAFFOLD(eta_a=0.01, Q=Q),
        "FedAvg": A.FedAvg(eta_a=0.01, Q=Q),
    }


def rounds(
    algorithm: Algorithm, problem: Network, chunk: int | None = None, compile: bool = False
) -> Callable[[], object]:
    """Each call runs one round more."""
    running = simulate(algorithm, problem, rounds=10**6, chunk=chunk, compile=compile)
    return lambda: next(running)


def gradients(problem: Network, Q: int, chunk: int) -> Callable[[], object]:
    """Each call computes the gradients of one round more."""
    everybody, clock = torch.arange(problem.n).split(chunk), itertools.count()
    points = [problem.start.expand(len(ids), -1).contiguous() for ids in everybody]

    def run() -> None:
        t = next(clock)
        for ids, x in zip(everybody, points, strict=True):
            g = problem.oracle(ids, t)
            for q in range(Q):
                g(x, q)

    return run


def module_gradients(problem: Network, Q: int) -> Callable[[], object]:
    """As anybody would compute them who has nothing but the module: one client at a time, channels-last."""
    module = problem.architecture.to(memory_format=torch.channels_last)
    parameters, clock = list(module.parameters()), itertools.count()
    rng = torch.Generator().manual_seed(0)

    def run() -> None:
        next(clock)
        for x, y in problem.data:
            for _ in range(Q):
                rows = torch.randint(len(x), (problem.batch_size or 1,), generator=rng)
                inputs = x[rows].to(memory_format=torch.channels_last)
                torch.autograd.grad(torch.nn.functional.cross_entropy(module(inputs), y[rows]), parameters)

    return run


def compare(
    bare: dict[str, Callable[[], object]], runs: dict[str, Callable[[], object]], repeats: int
) -> list[dict[str, object]]:
    seconds = in_turn(bare | runs, repeats, time.perf_counter)
    best = min(bare, key=lambda name: seconds[name])
    return [
        {"run": name, "ms": 1e3 * seconds[name], "over the bare gradients": seconds[name] / seconds[best]}
        for name in [*bare, *runs]
    ]


def main() -> int:
    given = arguments(__doc__, threads=2, repeats=15, Q=10)
    figures, failed = {}, []

    def judge(name: str, rows: list[dict[str, object]], judged: str) -> None:
        ratio = next(row["over the bare gradients"] for row in rows if row["run"] == judged)
        table(f"{name}: {judged} {ratio:.2f}, limit {LIMITS[name]}", rows)
        figures[name] = rows
        failed.extend([name] if ratio > LIMITS[name] else [])

    problem, chosen = network(), network().chunk
    bare = {f"bare gradients, {k} at once": gradients(problem, given.Q, k) for k in GROUPINGS}
    runs = {name: rounds(algorithm, problem) for name, algorithm in methods(given.Q).items()}
    judge("network", compare(bare, runs, given.repeats), "FedNMap")
    grouped = {f"FedNMap, {k} at once": rounds(methods(given.Q)["FedNMap"], problem, k) for k in (1, *GROUPINGS)}
    seconds = in_turn(grouped, max(3, given.repeats // 2), time.perf_counter)
    figures["groupings"] = [{"run": name, "ms": 1e3 * s} for name, s in seconds.items()]
    table(f"the rule's choice: {chosen} at once", figures["groupings"])
    began, compiled = time.perf_counter(), rounds(methods(given.Q)["FedNMap"], problem, compile=True)
    compiled(), compiled()
    print(f"\n--compile took {time.perf_counter() - began:.1f} s")
    judge("network, compiled", compare(bare, {"FedNMap": compiled}, given.repeats), "FedNMap")
    problem = mobilenet()
    runs = {name: rounds(algorithm, problem) for name, algorithm in methods(given.Q).items()}
    bare = {"bare gradients": module_gradients(problem, given.Q)}
    judge("mobilenet", compare(bare, runs, max(3, given.repeats // 3)), "FedNMap")
    write(given.json, **figures)
    print("\nall limits hold" if not failed else f"\nover the limit: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
