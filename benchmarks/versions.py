"""Is one version of the library slower than another? Rounds of both, in turn: new time / old time.

    python benchmarks/versions.py --old FOLDER --new FOLDER [--repeats 30] [--only WORDS] [--json FILE]

The folders are checkouts of the repository. Each version has a process of its own, and only one of them computes at a
time; after a few rounds it is the other's turn. --only: jobs whose name contains these words. The fastest repeat of
each is compared: processor time, and wall time where two threads share a round. The jobs are those of `overhead.py`,
`small.py`, `clients.py` and `threads.py`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

JOBS = {  # name: (rounds of a repeat, threads)
    "network, Q = 10, 50 clients": (1, 1),
    "network, two threads": (1, 2),
    "mobilenet, Q = 2": (1, 1),
    "4 hospitals, minibatches": (200, 1),
    "4 hospitals, exact gradients": (200, 1),
    "10,000 clients, 100 sampled": (1, 1),
}


def prepare(name: str) -> Callable[[], float]:
    """Each call runs the rounds of a repeat and returns their seconds."""
    import clients
    import jobs
    import small

    from fednmap import simulate
    from fednmap.algorithms import FedNMap
    from fednmap.regularizers import L1

    rounds, threads = JOBS[name]
    clock = time.process_time if threads == 1 else time.perf_counter
    if "hospitals" in name:
        run = small.library(small.BATCH if "minibatches" in name else None)
    else:
        more: dict[str, object] = {}
        if "sampled" in name:
            problem: object = clients.Many(100, 10_000)
            more = {"participation": 0.01, "store": Path(tempfile.mkdtemp())}
        else:
            problem = jobs.mobilenet() if "mobilenet" in name else jobs.network()
        method = FedNMap(L1(1e-4), eta_a=0.01, Q=2 if "mobilenet" in name else 10)
        running = simulate(method, problem, rounds=10**6, threads=threads, **more)

        def run() -> object:
            for _ in range(rounds):
                last = next(running)
            return last

    def timed() -> float:
        began = clock()
        run()
        return clock() - began

    return timed


def serve(folder: str) -> None:
    """Answer on standard output: a line of seconds for every line with a job's name."""
    sys.path[:0] = [folder, f"{folder}/benchmarks"]
    import torch

    ready: dict[str, Callable[[], float]] = {}
    for line in sys.stdin:
        name = line.strip()
        torch.set_num_threads(1)
        if name not in ready:
            ready.clear()  # one problem at a time
            ready[name] = prepare(name)
            ready[name]()
        print(ready[name](), flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
        return
    from measuring import arguments, table, write

    given = arguments(__doc__, old="", new="", repeats=30, only="")
    versions = {}
    for name in ("old", "new"):
        command = [sys.executable, __file__, "--serve", getattr(given, name)]
        versions[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    rows = []
    for job in (job for job in JOBS if given.only in job):
        seconds: dict[str, list[float]] = {name: [] for name in versions}
        for _ in range(given.repeats):
            for name, process in versions.items():
                assert process.stdin is not None
                assert process.stdout is not None
                print(job, file=process.stdin, flush=True)
                seconds[name].append(float(process.stdout.readline()))
        old, new = min(seconds["old"]), min(seconds["new"])
        rows.append({"job": job, "old, ms": 1e3 * old, "new, ms": 1e3 * new, "new / old": new / old})
    for process in versions.values():
        process.communicate()
    table("Fastest of the repeats", rows)
    write(given.json, rows=rows)


if __name__ == "__main__":
    main()
