"""A large model: seconds, bytes, memory and disk of each round of FedNMap, with the clients' states on disk.

    python benchmarks/scale.py [--hidden 12579] [--rounds 4] [--json FILE]

784-hidden-10 with n = 100 clients, 10 of them sampled, Q = 5, batch 32; 12,579 hidden units are 10,000,315 parameters.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path

import torch
from jobs import random_data
from measuring import arguments, table, write

from fednmap import simulate
from fednmap.algorithms import FedNMap
from fednmap.models import mlp
from fednmap.problems import Network
from fednmap.regularizers import L1


def main() -> int:
    given = arguments(__doc__, hidden=12579, rounds=4)
    torch.manual_seed(0)
    data = random_data(100, (784,), 64)
    problem = Network(mlp(784, 10, (given.hidden,)), torch.nn.functional.cross_entropy, data, batch_size=32)
    rows, began = [], time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder)
        method = FedNMap(L1(1e-4), eta_a=0.01, Q=5)
        for r in simulate(method, problem, rounds=given.rounds, participation=0.1, store=store):
            rows.append(
                {
                    "round": r.t + 1,
                    "s": time.perf_counter() - began,
                    "MB up": r.bytes_up / 1e6,
                    "MB down": r.bytes_down / 1e6,
                    "memory GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
                    "states": len(r.clients),
                    "disk GB": sum(f.stat().st_blocks * 512 for f in store.iterdir()) / 1e9,
                }
            )
            began = time.perf_counter()
    table(f"{problem.dim:,} parameters", rows)
    write(given.json, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
