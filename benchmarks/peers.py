"""One FedAvg job in our simulator, in a plain PyTorch loop and in other simulators: seconds a round.

    python benchmarks/peers.py [--venvs FOLDER] [--passes 3] [--json FILE]

784-64-10, 50 clients of 600 samples, Q = 10, batch 32, no evaluation. A peer runs in an environment of its own,
FOLDER/NAME, and is left out if there is none:

    python -m venv FOLDER/fedjax && FOLDER/fedjax/bin/pip install fedjax
    python -m venv FOLDER/pfl && FOLDER/pfl/bin/pip install torch==2.13.0 && FOLDER/pfl/bin/pip install "pfl[pytorch]"

Programs run one after another, `passes` times over; medians over the rounds of all passes, in wall time, which is what
the factors speak of, and in processor time of the first process with all its threads, which says more on a machine
that others use as well.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from measuring import arguments, table, write

HERE = Path(__file__).parent / "simulators"
FACTORS = {"FedJAX": 1.7, "pfl, two processes": 2.5, "loop": 3.5}


def programs(venvs: Path) -> dict[str, list[str]]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = {
        "ours": [sys.executable, str(HERE / "ours.py"), "ROUNDS", "FedAvg"],
        "ours, two workers": [*torchrun, str(HERE / "ours.py"), "ROUNDS", "FedAvg"],
        "ours, FedNMap": [sys.executable, str(HERE / "ours.py"), "ROUNDS", "FedNMap"],
        "ours, FedNMap, two workers": [*torchrun, str(HERE / "ours.py"), "ROUNDS", "FedNMap"],
        "loop": [sys.executable, str(HERE / "loop.py"), "ROUNDS"],
        "pfl, two processes": [
            str(venvs / "pfl/bin/torchrun"),
            "--standalone",
            "--nproc-per-node",
            "2",
            str(HERE / "in_pfl.py"),
            "ROUNDS",
        ],
        "FedJAX": [str(venvs / "fedjax/bin/python"), str(HERE / "in_fedjax.py"), "ROUNDS"],
    }
    return {name: command for name, command in found.items() if Path(command[0]).exists()}


def main() -> int:
    given = arguments(__doc__, venvs="peers-venvs", passes=3, rounds=10)
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "JAX_PLATFORMS": "cpu"}
    load = Path("/proc/loadavg")
    print(f"load at the start: {load.read_text().split()[0]}" if load.exists() else "")
    found = programs(Path(given.venvs))
    seconds: dict[str, list[list[float]]] = {name: [] for name in found}
    for _ in range(given.passes):
        for name, command in found.items():
            ready = [str(given.rounds) if word == "ROUNDS" else word for word in command]
            done = subprocess.run(ready, env=environment, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{name} failed:\n{done.stderr[-2000:]}")
            seconds[name] += json.loads(done.stdout.splitlines()[-1])
    rows, ours = [], [statistics.median(values) for values in zip(*seconds["ours"], strict=True)]
    for name, pairs in seconds.items():
        wall, processor = (statistics.median(values) for values in zip(*pairs, strict=True))
        rows.append(
            {
                "program": name,
                "wall s": wall,
                "over ours": wall / ours[0],
                "fastest s": min(pair[0] for pair in pairs),
                "processor s": processor,
                "over ours ": processor / ours[1],
                "asked": FACTORS.get(name),
            }
        )
    table("one round of FedAvg, 50 clients", rows)
    write(given.json, rows=rows)
    return 1 if any(row["asked"] and row["over ours"] < row["asked"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
