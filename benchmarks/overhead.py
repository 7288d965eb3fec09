"""What a round costs beyond its gradients: round time / time of the bare gradients in their fastest form.

    python benchmarks/overhead.py [--threads 2] [--json FILE]

The bare gradients are those of a round (n clients, Q steps, the same minibatches) at points that do not move: for the
fully connected network in the best of several groupings, shared by as many threads, for MobileNet from the module's own
parameters in channels-last, one client at a time, or as a problem computes them, whichever is faster. Wall time, in
turn, the fastest of the repeats: leave the machine alone meanwhile. The exit code says whether the limits hold.

On a machine that others use, rounds on all cores are never left alone: `--processor` compares the processor time of all
threads, in which nobody waits, and `--steps` the fastest local steps, those between two calls of the gradients, on one
thread.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import deque
from collections.abc import Callable

import torch
from jobs import mobilenet, network
from measuring import arguments, in_turn, table, write
from torch import Tensor

from fednmap import algorithms as A
from fednmap import simulate
from fednmap.core import AccumulatingOracle, Algorithm
from fednmap.problems import Network
from fednmap.regularizers import L1
from fednmap.simulation.client_groups import Groups
from fednmap.simulation.threads import ThreadPool

GROUPINGS = (5, 10, 25)  # which two threads can share; after 50 at once the second core would begin the next run asleep
LIMITS = {"network": 1.25, "mobilenet": 1.05, "steps": 1.25}


def methods(Q: int) -> dict[str, Algorithm]:
    phi = L1(1e-4)
    return {
        "FedNMap": A.FedNMap(phi, eta_a=0.01, Q=Q),
        "Zhang": A.Zhang(phi, eta_a=0.01, Q=Q),
        "FedCanon": A.FedCanon(phi, eta_a=0.01, Q=Q),
        "SCAFFOLD": A.SCAFFOLD(eta_a=0.01, Q=Q),
        "FedAvg": A.FedAvg(eta_a=0.01, Q=Q),
    }


def rounds(algorithm: Algorithm, problem: Network, threads: int, chunk: int | None = None) -> Callable[[], object]:
    """Each call runs one round more."""
    running = simulate(algorithm, problem, rounds=10**6, chunk=chunk, threads=threads)
    return lambda: next(running)


def gradients(problem: Network, Q: int, chunk: int, threads: int = 1) -> Callable[[], object]:
    """Each call computes the gradients of one round more."""
    clock, pool = itertools.count(), ThreadPool(threads)
    groups = [group.ids for group in Groups(problem.n, problem.n, chunk)(torch.arange(problem.n))]
    points = {len(ids): problem.start.expand(len(ids), -1).contiguous() for ids in groups}

    def run() -> None:
        t = next(clock)

        def work(ids: Tensor) -> None:
            g, x = problem.oracle(ids, t), points[len(ids)]
            for q in range(Q):
                g(x, q)

        with pool.map_in_order(work, groups) as results:
            deque(results, maxlen=0)

    return run


class Timed:
    """An oracle that notes when it is called, and can do what the problem's own can."""

    def __init__(self, g: AccumulatingOracle) -> None:
        self._g, self.stack, self.called = g, g.stack, list[float]()

    def __call__(self, x: Tensor, q: int) -> Tensor:
        self.called.append(time.perf_counter())
        return self._g(x, q)

    def add(self, z: Tensor, x: Tensor, q: int, scale: float) -> None:
        self.called.append(time.perf_counter())
        self._g.add(z, x, q, scale)


def fastest_steps(problem: Network, Q: int, seconds: float) -> list[dict[str, object]]:
    """The least time between two calls of the gradients, of each method and of nothing but the gradients."""
    least: dict[str, float] = {}
    ids = Groups(problem.n, problem.n, problem.chunk)(torch.arange(problem.n))[0][1]
    point, ends, t = problem.start.expand(len(ids), -1).contiguous(), time.monotonic() + seconds, 0
    states = {}
    for name, algorithm in methods(Q).items():
        server, client = algorithm.init(problem.start)
        stacked = type(client)(*(v.expand(len(ids), -1).clone() for v in client))
        states[name] = algorithm, algorithm.broadcast(server), stacked

    def note(name: str, called: list[float]) -> None:
        least[name] = min([least.get(name, float("inf")), *(b - a for a, b in itertools.pairwise(called[1:]))])

    while time.monotonic() < ends:
        t += 1
        g, called = problem.oracle(ids, t), []
        for q in range(Q):
            called.append(time.perf_counter())
            g(point, q)
        note("bare gradients", called)
        for name, (algorithm, down, client) in states.items():
            timed = Timed(problem.oracle(ids, t))
            algorithm.local(down, client, timed)
            note(name, timed.called)
    return [
        {"step": name, "us per client": 1e6 * s / len(ids), "over the bare gradients": s / least["bare gradients"]}
        for name, s in least.items()
    ]


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
    bare: dict[str, Callable[[], object]],
    runs: dict[str, Callable[[], object]],
    repeats: int,
    clock: Callable[[], float],
) -> list[dict[str, object]]:
    seconds = in_turn(bare | runs, repeats, clock)
    best = min(bare, key=lambda name: seconds[name])
    return [
        {"run": name, "ms": 1e3 * seconds[name], "over the bare gradients": seconds[name] / seconds[best]}
        for name in [*bare, *runs]
    ]


def main() -> int:
    given = arguments(__doc__, threads=2, repeats=15, Q=10, steps=False, seconds=20.0, processor=False)
    clock = time.process_time if given.processor else time.perf_counter
    figures, failed = {}, []
    # As in a round, where threads share clients and not the work of one: a second thread of torch would stay awake for
    # some ms after the program that uses it, and slow the next.
    torch.set_num_threads(1)
    if given.steps:
        torch.empty(31 << 20, dtype=torch.uint8)  # as `simulate` does
        rows = fastest_steps(network(), given.Q, given.seconds)
        ratio = next(row["over the bare gradients"] for row in rows if row["step"] == "FedNMap")
        table(f"local steps: FedNMap {ratio:.2f}, limit {LIMITS['steps']}", rows)
        write(given.json, steps=rows)
        return 1 if ratio > LIMITS["steps"] else 0

    def judge(name: str, rows: list[dict[str, object]], judged: str) -> None:
        ratio = next(row["over the bare gradients"] for row in rows if row["run"] == judged)
        table(f"{name}: {judged} {ratio:.2f}, limit {LIMITS[name]}", rows)
        figures[name] = rows
        failed.extend([name] if ratio > LIMITS[name] else [])

    problem, chosen = network(), network().chunk
    bare = {f"bare gradients, {k} at once": gradients(problem, given.Q, k, given.threads) for k in GROUPINGS}
    runs = {name: rounds(algorithm, problem, given.threads) for name, algorithm in methods(given.Q).items()}
    judge("network", compare(bare, runs, given.repeats, clock), "FedNMap")
    grouped = {
        f"FedNMap, {k} at once": rounds(methods(given.Q)["FedNMap"], problem, given.threads, k) for k in (1, *GROUPINGS)
    }
    seconds = in_turn(grouped, max(3, given.repeats // 2), clock)
    figures["groupings"] = [{"run": name, "ms": 1e3 * s} for name, s in seconds.items()]
    table(f"the rule's choice: {chosen} at once", figures["groupings"])
    problem = mobilenet(n=5)
    runs = {name: rounds(algorithm, problem, 1) for name, algorithm in methods(given.Q).items()}
    bare = {"bare gradients, the module's": module_gradients(problem, given.Q)}
    bare["bare gradients, 5 folded"] = gradients(problem, given.Q, 5)
    judge("mobilenet", compare(bare, runs, max(3, given.repeats // 3), clock), "FedNMap")
    write(given.json, **figures)
    print("\nall limits hold" if not failed else f"\nover the limit: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
