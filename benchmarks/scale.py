"""A large model: seconds, bytes, memory and disk of each round of FedAvg and FedNMap.

    python benchmarks/scale.py [--hidden 12579] [--rounds 4] [--clients 100] [--sampled 10] [--memory] [--json FILE]
    python benchmarks/scale.py --rounded

784-hidden-10, Q = 5, batch 32; 12,579 hidden units are 10,000,315 parameters. The clients share the samples of a
hundred. Their states are on disk, with --memory in memory. Seconds are processor time of one thread. Memory is the
largest so far, pages of files included; FedAvg, which has no client states, runs first.

--rounded asks instead what client states in bfloat16 would cost: FedNMap on a small lasso in float64, 3 of 10 clients
sampled, exact gradients; the distance of the server's h from the mean of the h_i, and |F_nat|^2.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path

import torch
from clients import Many
from jobs import random_data
from measuring import arguments, table, write

from fednmap import simulate
from fednmap.algorithms import FedAvg, FedNMap
from fednmap.measure import stationarity
from fednmap.models import mlp
from fednmap.problems import Network
from fednmap.regularizers import L1
from fednmap.simulation import states
from fednmap.testing import heterogeneous, smoothness


def rounded() -> list[dict[str, object]]:
    problem = heterogeneous(n=10)
    gamma = 1 / smoothness(problem)
    method, written, rows = FedNMap(L1(0.1), eta_a=0.1 * gamma, Q=5), states.Clients.replace, []
    for kind in (torch.float64, torch.bfloat16):
        states.Clients.replace = lambda self, ids, old, new, kind=kind: written(  # type: ignore[method-assign]
            self, ids, old, type(new)(*(v.to(kind).to(v.dtype) for v in new))
        )
        for r in simulate(method, problem, rounds=3000, participation=0.3):
            if r.t + 1 in (100, 1000, 3000):
                apart = float((r.server.h - r.clients[torch.arange(10)].h.mean(0)).norm() / r.server.h.norm())
                gap = float(stationarity(problem, method.phi, method.model(r.server), gamma))
                rows.append({"states": str(kind), "rounds": r.t + 1, "|h - mean h_i| / |h|": apart, "|F_nat|^2": gap})
    return rows


def main() -> int:
    given = arguments(__doc__, hidden=12579, rounds=4, clients=100, sampled=10, memory=False, rounded=False)
    if given.rounded:
        table("client states rounded to a precision", rounded())
        return 0
    torch.manual_seed(0)
    data = random_data(100, (784,), 64)
    problem = Network(mlp(784, 10, (given.hidden,)), torch.nn.functional.cross_entropy, data, batch_size=32)
    rows = []
    for method in (FedAvg(eta_a=0.01, Q=5), FedNMap(L1(1e-4), eta_a=0.01, Q=5)):
        options = {"rounds": given.rounds, "participation": given.sampled / given.clients, "threads": given.threads}
        with tempfile.TemporaryDirectory() as folder:
            store, began = None if given.memory else Path(folder), time.process_time()
            for r in simulate(method, Many(100, given.clients, problem), store=store, **options):
                rows.append(
                    {
                        "method": method.name,
                        "round": r.t + 1,
                        "s": time.process_time() - began,
                        "MB up": r.bytes_up / 1e6,
                        "MB down": r.bytes_down / 1e6,
                        "memory GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
                        "states": len(r.clients),
                        "disk GB": sum(f.stat().st_blocks * 512 for f in Path(folder).iterdir()) / 1e9,
                    }
                )
                began = time.process_time()
    table(f"{problem.dim:,} parameters, {given.sampled} of {given.clients:,} clients", rows)
    write(given.json, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
