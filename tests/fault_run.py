"""A trial of a federation under fire: processes are killed at random moments, messages are delayed.

    python tests/fault_run.py FOLDER [--superlink 5] [--server 5] [--nodes 10] [--up 0] [--delays 10] [--secagg]

The processes are the SuperLink, the server app, a node, and `fednmap flower up` itself. Every time that the trial ends
without having finished, `fednmap flower resume` starts everything anew; what is still there of the former one a minute
later is an orphan. At the end the model must be the optimum to 1e-8, and that of an undisturbed simulation, and the
server's h the mean of the h_i. The longest pause is that between two rounds, whatever was killed; with the seconds that
Python takes to start.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

from fednmap import simulate
from fednmap.flower.state_store import Store
from fednmap.runs import checkpoints
from fednmap.runs.execution import settings as settings_of
from fednmap.runs.experiment import prepare
from fednmap.runs.folder import Job, RunFolder
from fednmap.runs.uplink_config import grid_of

MARK = "FEDNMAP_FAULT_RUN"  # in the environment of every process of the trial: its folder
NAMES = ("client-0", "client-1", "client-2")
TRIAL = {
    "data": "sparse-regression",
    "model": "least-squares",
    "clients": 3,
    "partition": "iid",
    "batch-size": 0,
    "dtype": "float64",
    "penalty": "l1:0.05",
    "local-steps": 1,
    "eta-a": 0.5,
    "gamma": 1.0,
    "memory": 10,
    "rounds": 60,
    "eval-every": 60,
    "deadline": 30,
}


def main(arguments: list[str] | None = None) -> dict[str, float]:
    given = parsed(arguments)
    rng, folder = random.Random(given.seed), given.folder.resolve()
    faults = [kind for kind in ("superlink", "server", "nodes", "up", "delays") for _ in range(getattr(given, kind))]
    rng.shuffle(faults)
    options = [word for key, value in TRIAL.items() for word in (f"--{key}", str(value))]
    begin = ["up", *options, *(["--secagg"] if given.secagg else []), "--out", str(folder)]
    done: dict[str, int] = {}
    resumed, orphans, began = 0, list[str](), time.monotonic()
    moved, reached, longest = began, 0, 0.0
    trial = start(begin)
    while True:
        if trial.poll() is None and faults and status(folder).get("done", 0) >= progress(faults, given):
            time.sleep(rng.uniform(0, 3))
            if strike(faults[0], trial.pid, folder, rng):
                kind = faults.pop(0)
                done[kind] = done.get(kind, 0) + 1
                print(
                    f"{time.monotonic() - began:5.0f} s  {kind}, after round {status(folder).get('done')}", flush=True
                )
        if status(folder).get("done", 0) > reached:
            now, reached = time.monotonic(), status(folder)["done"]
            moved, longest = now, max(longest, now - moved)
        if trial.poll() is not None:
            orphans += marked(str(folder))
            if status(folder).get("finished"):
                break
            resumed += 1
            trial = start(["resume", str(folder)])
        time.sleep(0.3)
    found = judged(folder) | {"resumed": resumed, "longest pause": longest, "seconds": time.monotonic() - began, **done}
    found["orphans"] = len(orphans)
    print("\n".join(orphans))
    print(json.dumps(found, indent=1))
    return found


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    for name, count in (("superlink", 5), ("server", 5), ("nodes", 10), ("up", 0), ("delays", 10), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--secagg", action="store_true")
    return parser.parse_args(arguments)


def start(words: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "fednmap", "flower", *words]
    environment = os.environ | {MARK: words[-1]}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)


def marked(folder: str, seconds: float = 60.0) -> list[str]:
    """What is there after so many seconds of all that was started for this folder, known by its environment."""
    end = time.monotonic() + seconds
    while True:
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"{MARK}={folder}".encode() in (place / "environ").read_bytes().split(b"\0"):
                    found.append((place / "cmdline").read_text().replace("\0", " ")[:120])
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.2)


def progress(faults: list[str], given: argparse.Namespace) -> int:
    """The round after which the next fault is due: they are spread over the run."""
    total = given.superlink + given.server + given.nodes + given.up + given.delays
    return 1 + (total - len(faults)) * (int(str(TRIAL["rounds"])) - 5) // max(1, total)


def strike(kind: str, trial: int, folder: Path, rng: random.Random) -> bool:
    """Kill, or hold up for a while; whether there was something to hit."""
    if kind == "server":
        pid = status(folder).get("pid")
        return bool(pid) and hit(pid, signal.SIGKILL)
    if kind == "up":
        return hit(trial, signal.SIGKILL)
    processes = {pid: line for pid, line in below(trial).items()}
    if kind == "superlink":
        found = [pid for pid, line in processes.items() if "flower-superlink" in line]
        return bool(found) and any([hit(pid, signal.SIGKILL) for pid in found])
    name = rng.choice(NAMES)
    found = [pid for pid, line in processes.items() if "fednmap.flower.node" in line and f"client='{name}'" in line]
    if not found:
        return False
    group = os.getpgid(min(found))
    if kind == "nodes":
        os.killpg(group, signal.SIGKILL)
    else:
        os.killpg(group, signal.SIGSTOP)
        time.sleep(rng.uniform(1, 4))
        os.killpg(group, signal.SIGCONT)
    return True


def hit(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def below(pid: int) -> dict[int, str]:
    """The processes that `pid` has started, and theirs: number -> command."""
    parents: dict[int, int] = {}
    lines: dict[int, str] = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(place.name)] = int((place / "stat").read_text().rsplit(")", 1)[1].split()[1])
            lines[int(place.name)] = (place / "cmdline").read_text().replace("\0", " ")
        except (OSError, ValueError):
            continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return {child: lines[child] for child in found - {pid} if child in lines}


def status(folder: Path) -> dict[str, int]:
    try:
        return dict(json.loads((folder / "status.json").read_text()))
    except (OSError, ValueError):
        return {}


def judged(path: Path) -> dict[str, float]:
    """How far the model is from the optimum and from an undisturbed simulation, and h from the mean of the h_i."""
    folder = RunFolder.open(path)
    experiment = prepare(folder.config())
    config, algorithm = experiment.config, experiment.algorithm("fednmap")
    start, grid = experiment.start(algorithm), grid_of(experiment.config, 3)
    rounds = list(simulate(algorithm, experiment.problem, rounds=400, start=start))
    *_, same = simulate(algorithm, experiment.problem, rounds=config.rounds, start=start, uplink=grid)
    kept, _ = checkpoints.newest(folder.checkpoints(Job("fednmap", 0)), algorithm, start, settings_of(config))
    assert kept is not None
    best, x = algorithm.model(rounds[-1].server), algorithm.model(kept.server)
    run = json.loads((path / "federation.json").read_text())["run"]
    counted, initial = kept.totals["counted"], algorithm.init(start)[1]
    h = torch.stack([Store(path / "clients", run, name).current(counted[name], initial).h for name in NAMES])
    return {
        "from the optimum": float((x - best).norm() / best.norm()),
        "from the simulation": float((x - algorithm.model(same.server)).norm() / best.norm()),
        "h from the mean of h_i": float((h.mean(0) - kept.server.h).abs().max()),
        "rounds": kept.t + 1,
        "counted": min(kept.totals["took_part"].values()),
    }


if __name__ == "__main__":
    main()
