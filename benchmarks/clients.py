"""What a round costs with many clients: seconds per round and peak memory for n = 10^2, 10^4, 10^6, 100 sampled.

    python benchmarks/clients.py [--rounds 100] [--json FILE]

FedNMap on the paper's network (p = 50,890), Q = 10, batch 32, the clients' states in memory-mapped files. The clients
share the samples of a hundred: data is the user's affair, the state of the clients is ours. Every n runs in a process
of its own, which then tells its peak memory; rounds are timed in processor time, and the median is taken over the
rounds after the first ten. Limits: the slowest n at most 1.3 times the fastest; 4 GB for n = 10^6.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from jobs import network
from measuring import arguments, table, write
from torch import Tensor

from fednmap import algorithms as A
from fednmap import simulate
from fednmap.core import Oracle, ProblemInfo
from fednmap.problems import Network
from fednmap.regularizers import L1

SAMPLED, SLOWER, GIGABYTES = 100, 1.3, 4.0


class Many:
    """n clients that share the data of `few`; everything but the number of clients is as there."""

    def __init__(self, few: int, n: int, problem: Network | None = None) -> None:
        self.problem, self.n = problem or network(few, samples=100), n
        self.dim, self.start, self.chunk = self.problem.dim, self.problem.start, self.problem.chunk
        self.loss, self.gradient = self.problem.loss, self.problem.gradient

    def info(self) -> ProblemInfo:
        return ProblemInfo(start=self.start, chunk=self.chunk)

    def oracle(self, clients: Tensor, t: int) -> Oracle:
        return self.problem.oracle(clients % self.problem.n, t)


def measure(n: int, rounds: int) -> dict[str, float]:
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        running = simulate(
            A.FedNMap(L1(1e-4), eta_a=0.01, Q=10),
            Many(100, n),
            rounds=rounds,
            participation=min(1.0, SAMPLED / n),
            store=Path(folder),
        )
        ready = time.perf_counter() - began
        while True:
            mark = time.process_time()
            last = next(running, None)
            if last is None:
                break
            seconds.append(time.process_time() - mark)
            assert len(last.participants) == SAMPLED
            states = len(last.clients)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    median = 1e3 * statistics.median(seconds[10:])
    return {"clients": n, "ms per round": median, "GB": peak, "s": ready, "states": states}


def main() -> int:
    given = arguments(__doc__, rounds=100, one=0)
    if given.one:
        print(json.dumps(measure(given.one, given.rounds)))
        return 0
    rows = []
    for n in (10**2, 10**4, 10**6):
        command = [sys.executable, __file__, "--one", str(n), "--rounds", str(given.rounds)]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    table(f"FedNMap, {SAMPLED} clients per round, {given.rounds} rounds, states on disk", rows)
    times = [row["ms per round"] for row in rows]
    ratio, memory = max(times) / min(times), rows[-1]["GB"]
    print(f"\nslowest / fastest {ratio:.2f} (limit {SLOWER}); n = 10^6 takes {memory:.2f} GB (limit {GIGABYTES:g})")
    write(given.json, rows=rows, ratio=ratio)
    return 0 if ratio <= SLOWER and memory <= GIGABYTES else 1


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(main())
