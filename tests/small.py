"""A run that takes a moment, and ways to do it."""

import resource
from pathlib import Path

import torch

from fednmap import Callback
from fednmap.runs.configuration import Config
from fednmap.runs.execution import Reporter, execute
from fednmap.runs.folder import Job, RunFolder

SMALL = {
    "data": "digits",
    "model": "logistic",
    "clients": 10,
    "rounds": 24,
    "local_steps": 2,
    "batch_size": 4,
    "eval_every": 3,
    "checkpoint_every": 4,
    "participation": 0.5,
    "drop": 0.3,
    "dtype": "float64",
}


class Heard(Reporter):
    """Remembers what it was told."""

    def __init__(self):
        self.lines, self.done, self.records = [], [], []

    def begin(self, what):
        self.done.append(what.done)

    def on_record(self, record):
        self.records.append(record)

    def message(self, line):
        self.lines.append(line)


def small(**settings) -> Config:
    return Config.make(**SMALL | settings)


def begin(path: Path, *callbacks, **settings) -> RunFolder:
    """A new run, to its end."""
    config = small(**settings)
    folder = RunFolder.create(path, config, "train")
    execute(config, folder, Heard(), callbacks)
    return folder


def resume(folder: RunFolder, *callbacks) -> Heard:
    heard = Heard()
    execute(folder.config(), folder, heard, callbacks)
    return heard


def outcome(folder: RunFolder) -> tuple:
    """All that must not depend on when a run was stopped: every bit but the seconds."""
    lines = (folder.path / "metrics.csv").read_text().splitlines()
    metrics = [line for line in lines if "_seconds," not in line]
    results = [{k: v for k, v in r.items() if not k.endswith("seconds")} for r in folder.results()]
    models = {p.name: p.read_bytes() for p in sorted(folder.path.glob("models/*"))}
    return metrics, results, models


def damage(path: Path) -> None:
    """One bit of the file is not what it was."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


FEDNMAP = Job("fednmap", 0)


def megabytes(config, folder, *at):
    """Resident memory of this process after some rounds of a run."""
    torch.set_num_threads(1)
    found = []

    class Memory(Callback):
        def on_round(self, round, totals):
            if round.t + 1 in at:
                with open("/proc/self/statm") as file:
                    found.append(int(file.read().split()[1]) * resource.getpagesize() / 1e6)

    execute(config, folder, Reporter(), (Memory(),))
    return found
