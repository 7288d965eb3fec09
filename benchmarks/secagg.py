"""What secure aggregation costs and how exact it is.

python benchmarks/secagg.py rounding        how far from the optimum of a lasso the method ends on the grid
python benchmarks/secagg.py cryptography    processor time of the stages, without messages
python benchmarks/secagg.py processes [n]   seconds and bytes per round of real processes on this machine, n clients,
                                            with and without secure aggregation in turn, and their ratio
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from fednmap import simulate
from fednmap.algorithms import FedNMap
from fednmap.flower import masking
from fednmap.regularizers import L1
from fednmap.simulation.quantised import Quantised
from fednmap.testing.algorithm import heterogeneous, optimum, smoothness

CLIENTS = (3, 5, 10)
TRIAL = ["--data", "digits", "--model", "logistic", "--json", "--quiet"]
KINDS = (median, mean, min)
UP = [sys.executable, "-m", "fednmap", "flower", "up", *TRIAL]
ROUNDS, TURNS = 17, 1  # of rounds 1 to 16 with secure aggregation one prepares keys, as one of every 16 does


def rounding() -> None:
    problem, phi = heterogeneous(), L1(0.2)
    best = optimum(problem, phi)
    algorithm = FedNMap(phi, eta_a=0.1 / smoothness(problem), Q=5)
    print("bits  bound    step  replies lost  |x - x*| / |x*|")
    for grid in (Quantised(6), Quantised(6, 100.0, 32)):
        for drop in (0.0, 0.3):
            *_, last = simulate(algorithm, problem, rounds=1500, drop=drop, uplink=grid)
            distance = float((algorithm.model(last.server) - best).norm() / best.norm())
            print(f"{grid.bits:>4}  {grid.bound:>5.2g}  {grid.step:>6.1e}  {drop:>12.0%}  {distance:.1e}")


def cryptography() -> None:
    print("parameters  clients  ms per client  ms of the server")
    for size in (640, 100_000):
        for n in CLIENTS:
            client, server = stages(n, size)
            print(f"{size:>10}  {n:>7}  {1e3 * client:>13.0f}  {1e3 * server:>16.0f}")


def stages(n: int, size: int) -> tuple[float, float]:
    """Processor seconds of a client, on average, and of the server, for one sum."""
    grid, threshold, spent = Quantised(n), n // 2 + 1, [0.0, 0.0]
    vectors = torch.randn(n, size)

    def timed(who: int, call: Callable[..., Any], *given: Any) -> Any:
        began = time.process_time()
        found = call(*given)
        spent[who] += time.process_time() - began
        return found

    secrets: dict[int, Any] = {}
    keys: dict[int, Any] = {}
    boxes: dict[int, Any] = {}
    held: dict[int, Any] = {}
    masked: dict[int, Any] = {}
    shares: dict[int, list[bytes]] = {}
    for i in range(n):
        secrets[i], keys[i] = timed(0, masking.begin, "", i)
    for i in range(n):
        secrets[i], boxes[i] = timed(0, masking.deal, secrets[i], keys, threshold)
    for i in range(n):
        letters = {j: boxes[j][i] for j in range(n) if j != i}
        levels = timed(0, lambda v: masking.checked(grid.levels(v)), vectors[i])
        secrets[i], held[i], masked[i] = timed(0, masking.mask, secrets[i], 0, letters, threshold, levels)
    for i in range(threshold):
        told = timed(0, masking.reveal, held[i], i, masked, [], threshold)
        for whose, share in told.items():
            shares.setdefault(whose, []).append(share)
    public = {i: own.mask for i, own in keys.items()}
    masking.proved(timed(1, masking.uncover, sum(masked.values()), masked, public, shares, threshold))
    return spent[0] / n, spent[1]


def processes() -> None:
    """Plain and masked runs in turn, so that other work on the machine is in both; the first round of each left out.

    Of a secure sum the first exchange is what a plain round has. The ratio of all its exchanges to this one has the
    same other work in both.
    """
    print("clients  secagg  s per round: median   mean  least  kB up per client  kB down per client", flush=True)
    for n in [int(word) for word in sys.argv[2:]] or CLIENTS:
        runs = [(secagg, *measured(n, secagg)) for _ in range(TURNS) for secagg in (False, True)]
        seconds = {kind: [s for secagg, each, _, _ in runs for s in each if secagg == kind] for kind in (False, True)}
        for secagg, _, sizes, _ in runs[-2:]:
            words = "".join(f"  {size:>18.1f}" for size in sizes)
            print(
                f"{n:>7}  {'yes' if secagg else 'no':>6}  {_numbers(f(seconds[secagg]) for f in KINDS)}{words}",
                flush=True,
            )
        ratios = (f(seconds[True]) / f(seconds[False]) for f in KINDS)
        print(f"{n:>7}   ratio  {_numbers(ratios)}", flush=True)
        sums = [found for *_, each in runs for found in each]
        every, vectors = (sum(found[k] for found in sums) for k in (0, 1))
        within = (median(a / b for a, b in sums), every / vectors, min(a / b for a, b in sums))
        print(f"{n:>7}  within  {_numbers(within)}", flush=True)


def _numbers(values: Iterable[float]) -> str:
    of_median, of_mean, least = values
    return f"{of_median:>19.2f}  {of_mean:>5.2f}  {least:>5.2f}"


def measured(clients: int, secagg: bool) -> tuple[list[float], list[float], list[tuple[float, float]]]:
    """Seconds of each round but the first; kB up and down per client and round; of each secure sum the seconds of all
    exchanges, and of the one in which the vectors come.
    """
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        options = ["--clients", str(clients), "--rounds", str(ROUNDS), "--eval-every", str(ROUNDS)]
        options += ["--out", str(run), *(["--secagg"] if secagg else [])]
        done = subprocess.run([*UP, *options], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{clients} clients, secagg {secagg}: {done.stderr[-2000:]}")
        found, log = json.loads(done.stdout), (run / "server.log").read_text()
    rounds = re.findall(r"clients counted.*, ([0-9.]+) s$", log, re.MULTILINE)
    sizes = [found[key] / (clients * ROUNDS * 1000) for key in ("wire_up", "wire_down")]
    sums = []
    for line in re.findall(r"secure sum of \S+: (.* s)$", log, re.MULTILINE):
        stages = {stage: float(word) for stage, word in re.findall(r"(\w+) ([0-9.]+) s", line)}
        sums.append((sum(stages.values()), stages["masked"]))
    return [float(word) for word in rounds[1:]], sizes, sums


if __name__ == "__main__":
    parts = {"rounding": rounding, "cryptography": cryptography, "processes": processes}
    part = sys.argv[1] if len(sys.argv) > 1 else "processes"
    if part not in parts:
        sys.exit(f"{part} is no part; there are {', '.join(parts)}")
    parts[part]()
