"""One FedAvg job in our simulator, in a plain PyTorch loop and in other simulators: seconds per round.

    python benchmarks/peers.py [--venvs FOLDER] [--passes 3] [--json FILE]

784-64-10, 50 clients of 600 samples, Q = 10, batch 32, no evaluation. A peer runs in an environment of its own,
FOLDER/NAME, and is left out if there is none:

    for v in fedjax pfl fedlab flwr; do python -m venv FOLDER/$v; FOLDER/$v/bin/pip install torch==2.13.0; done
    FOLDER/fedjax/bin/pip install fedjax==0.0.17
    FOLDER/pfl/bin/pip install "pfl[pytorch]==0.6.0"
    FOLDER/fedlab/bin/pip install torch==2.13.0 torchvision==0.28.0 fedlab==1.3.0
    FOLDER/flwr/bin/pip install "flwr[simulation]==1.41.0"

Programs run one after another, `passes` times over, each in the way in which it is fastest on two cores: ours and pfl
in two processes, FedJAX with what XLA takes, Flower with two actors; a loop and FedLab gain nothing from a second
thread. Medians over the rounds of all passes, in wall time: leave the machine alone meanwhile.
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
FACTORS = {"FedJAX": 2.5, "pfl, two processes": 3.5, "loop": 3.5, "Flower, two actors": 15.0}
OURS, FEDNMAP = "ours, two workers", "ours, FedNMap, two workers"
ROUNDS = "ROUNDS"  # stands for the number of rounds in the commands
ALONE = ["unshare", "-n", "sh", "-c", 'ip link set lo up; exec "$@"', "sh"]  # with no network but the loopback


def programs(venvs: Path) -> dict[str, list[str]]:
    """Name -> command, of those that are installed."""
    two = ["--standalone", "--nproc-per-node", "2"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *two]

    def ours(method: str, threads: int) -> list[str]:
        return [str(HERE / "ours.py"), ROUNDS, method, str(threads)]

    found = {
        OURS: [*torchrun, *ours("FedAvg", 1)],
        "ours, one process": [sys.executable, *ours("FedAvg", 1)],
        "ours, two threads": [sys.executable, *ours("FedAvg", 2)],
        FEDNMAP: [*torchrun, *ours("FedNMap", 1)],
        "ours, FedNMap, two threads": [sys.executable, *ours("FedNMap", 2)],
        "loop": [sys.executable, str(HERE / "loop.py"), ROUNDS],
        "FedJAX": [str(venvs / "fedjax/bin/python"), str(HERE / "in_fedjax.py"), ROUNDS],
        "pfl, two processes": [str(venvs / "pfl/bin/torchrun"), *two, str(HERE / "in_pfl.py"), ROUNDS],
        "FedLab": [str(venvs / "fedlab/bin/python"), str(HERE / "in_fedlab.py"), ROUNDS],
        "Flower, two actors": [*ALONE, str(venvs / "flwr/bin/python"), str(HERE / "in_flower.py"), ROUNDS],
    }
    return {name: command for name, command in found.items() if all(Path(c).exists() for c in command if c[0] == "/")}


def main() -> int:
    given = arguments(__doc__, venvs="peers-venvs", passes=3, rounds=10)
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "JAX_PLATFORMS": "cpu"}
    load = Path("/proc/loadavg")
    print(f"load at the start: {load.read_text().split()[0]}" if load.exists() else "")
    found = programs(Path(given.venvs))
    seconds: dict[str, list[list[float]]] = {name: [] for name in found}
    for _ in range(given.passes):
        for name, command in found.items():
            ready = [str(given.rounds) if word == ROUNDS else word for word in command]
            done = subprocess.run(ready, env=environment, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{name} failed:\n{done.stderr[-2000:]}")
            seconds[name] += json.loads(done.stdout.splitlines()[-1])
    wall = {name: statistics.median(pair[0] for pair in pairs) for name, pairs in seconds.items()}
    rows = [
        {
            "program": name,
            "s per round": seconds_,
            "fastest": min(pair[0] for pair in seconds[name]),
            "over ours": seconds_ / wall[OURS],
            "asked": FACTORS.get(name),
            "over our FedNMap": seconds_ / wall[FEDNMAP],
        }
        for name, seconds_ in wall.items()
    ]
    table("one round of FedAvg, 50 clients", rows)
    write(given.json, rows=rows)
    slow = [row["program"] for row in rows if row["asked"] and row["over ours"] < row["asked"]]
    ahead = [name for name in wall if not name.startswith("ours") and wall[name] < wall[FEDNMAP]]
    print(f"\nnot by the factor asked: {slow or 'none'}; faster than our FedNMap: {ahead or 'none'}")
    return 1 if slow or ahead else 0


if __name__ == "__main__":
    sys.exit(main())
