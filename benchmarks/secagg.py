"""What secure aggregation costs: bytes and seconds per round of a federation of real processes on this machine.

    python benchmarks/secagg.py [--clients 3,5,10] [--rounds 5]

Every row is `fednmap flower up` on digits with logistic regression (640 parameters), with and without `--secagg`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

TRIAL = ["--data", "digits", "--model", "logistic", "--json", "--quiet"]
COMMAND = [sys.executable, "-m", "fednmap", "flower", "up", *TRIAL]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", default="3,5,10")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    print("clients  secagg  s per round  kB up per client  kB down per client", flush=True)
    for n in map(int, given.clients.split(",")):
        for secagg in (False, True):
            found = measured(n, given.rounds, secagg)
            each = n * given.rounds * 1000
            seconds = found["train_seconds"] / given.rounds
            sizes = f"{found['wire_up'] / each:>16.1f}  {found['wire_down'] / each:>18.1f}"
            print(f"{n:>7}  {'yes' if secagg else 'no':>6}  {seconds:>11.2f}  {sizes}", flush=True)


def measured(clients: int, rounds: int, secagg: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as place:
        options = ["--clients", str(clients), "--rounds", str(rounds), "--eval-every", str(rounds)]
        options += ["--out", str(Path(place) / "run"), *(["--secagg"] if secagg else [])]
        done = subprocess.run([*COMMAND, *options], capture_output=True, text=True, check=True)
        return dict(json.loads(done.stdout))


if __name__ == "__main__":
    main()
