"""Two workers against two independent copies of the bare-gradient loop, on the same machine in the same run.

    python benchmarks/workers.py [--json FILE]

The copies say what the machine has to give: two cores that share their memory are not twice as fast. Measured in
turn, in wall time: the gradients of a round in one process, the same in two processes at once (each all of them, so
that their speed-up is 2 one / two), and FedNMap's round in one process and in two that share the clients.
Network: n = 100, Q = 20; MobileNet: n = 4, Q = 5. Limit: 90 % of the copies' speed-up.
On a machine that others use as well the figures say little: the load at the start is printed.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
import torch.distributed as dist
from jobs import mobilenet, network
from measuring import arguments, table, write
from overhead import gradients, module_gradients
from torch.multiprocessing.spawn import start_processes

from fednmap import algorithms as A
from fednmap import simulate
from fednmap.problems import Network
from fednmap.regularizers import L1
from fednmap.simulation import distributed

LIMIT = 0.9
JOBS: dict[str, tuple[Callable[[], Network], int]] = {
    "network": (lambda: network(100), 20),
    "mobilenet": (lambda: mobilenet(4), 5),
}


def worker(rank: int, meeting: str, name: str, repeats: int, result: Path) -> None:
    """The four measurements; process 1 takes part in two of them and waits during the others."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    problem, Q = JOBS[name][0](), JOBS[name][1]
    bare = gradients(problem, Q, problem.chunk) if name == "network" else module_gradients(problem, Q)
    algorithm = A.FedNMap(L1(1e-4), eta_a=0.01, Q=Q)
    shared = simulate(algorithm, problem, rounds=10**6, threads=1)
    next(shared)
    seconds: dict[str, list[float]] = {"gradients": [], "copies": [], "round": [], "workers": []}

    def timed(kind: str, job: Callable[[], object]) -> None:
        dist.barrier()
        began = time.perf_counter()
        job()
        dist.barrier()
        seconds[kind].append(time.perf_counter() - began)

    alone = rounds_alone(algorithm, problem)
    for _ in range(repeats + 1):
        timed("gradients", bare if rank == 0 else idle)
        timed("copies", bare)
        timed("round", alone if rank == 0 else idle)
        timed("workers", lambda: next(shared))
    if rank == 0:
        torch.save({kind: median(values[1:]) for kind, values in seconds.items()}, result)
    dist.destroy_process_group()


def idle() -> None:
    """What the other process does while one works alone."""


def rounds_alone(algorithm: A.FedNMap, problem: Network) -> Callable[[], object]:
    """Each call runs one round more in this process alone, though it belongs to a group."""
    alone = patch.object(distributed, "size", lambda: 1)
    with alone:  # who computes which clients is settled here
        running = simulate(algorithm, problem, rounds=10**6, threads=1)

    def run() -> object:
        with alone:
            return next(running)

    return run


def main() -> int:
    given = arguments(__doc__, repeats=7)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    load = Path("/proc/loadavg")
    if load.exists():
        print(f"load at the start: {load.read_text().split()[0]}")
    rows, failed = [], []
    for name in JOBS:
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result"
            start_processes(
                worker, (str(Path(folder) / "meeting"), name, given.repeats, result), 2, start_method="spawn"
            )
            s = torch.load(result)
        copies, workers = 2 * s["gradients"] / s["copies"], s["round"] / s["workers"]
        rows.append(
            {
                "job": name,
                "gradients s": s["gradients"],
                "two copies s": s["copies"],
                "speed-up": copies,
                "round s": s["round"],
                "two workers s": s["workers"],
                "speed-up ": workers,
                "of the copies'": workers / copies,
            }
        )
        failed.extend([name] if workers < LIMIT * copies else [])
    table(f"two workers; limit {LIMIT} of the copies' speed-up", rows)
    write(given.json, rows=rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
