"""What threads bring: rounds and measurements on 1, 2, ... threads, and whether their bits are the same.

    python benchmarks/threads.py [--threads 2] [--json FILE]

FedNMap on the paper's network, n = 50, Q = 10, batch 32, and the loss and gradient of a measurement over all 30,000
samples. Wall time, in turn, the fastest of the repeats. The exit code says whether all bits are equal.
"""

from __future__ import annotations

import sys
import time

import torch
from jobs import network
from measuring import arguments, in_turn, table, write
from overhead import methods, rounds

from fednmap import simulate
from fednmap.simulation.sums import divided
from fednmap.simulation.threads import ThreadPool


def main() -> int:
    given = arguments(__doc__, threads=2, repeats=15, Q=10)
    problem, algorithm = network(), methods(given.Q)["FedNMap"]
    counts = sorted({1, 2, given.threads})
    jobs = {f"round, {k} threads": rounds(algorithm, problem, k) for k in counts}
    whole = {k: divided(problem, ThreadPool(k)) for k in counts}
    jobs |= {
        f"measurement, {k} threads": lambda p=p: (p.loss(problem.start), p.gradient(problem.start))
        for k, p in whole.items()
    }
    seconds = in_turn(jobs, given.repeats, time.perf_counter)
    rows = [
        {"run": name, "ms": 1e3 * s, "speed-up": seconds[name.split(",")[0] + ", 1 threads"] / s}
        for name, s in seconds.items()
    ]
    table("threads", rows)
    same = True
    first: list[torch.Tensor] = []
    for k in (1, 2, 3, *counts):
        *_, last = simulate(algorithm, problem, rounds=3, participation=0.7, drop=0.2, threads=k)
        gradient = divided(problem, ThreadPool(k)).gradient(last.server[0])
        bits = [*last.server, *last.clients.tensors().values(), gradient]
        first = first or bits
        same &= all(torch.equal(a, b) for a, b in zip(first, bits, strict=True))
    print(f"\nbits equal on {', '.join(map(str, sorted({1, 2, 3, *counts})))} threads: {same}")
    write(given.json, rows=rows, same=same)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
