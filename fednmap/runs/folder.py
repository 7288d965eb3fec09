"""Run folders: what a run leaves on disk, safe against kills, full disks and curious hands.

run.toml                          the whole configuration
environment.json                  versions, the command, when it began, the data's digest, the configuration once more
metrics.csv                       long form (method, trial, round, metric, value), appended while running
checkpoints/METHOD-TRIAL/         the last two states, safetensors with a JSON beside each
models/METHOD-TRIAL.safetensors   the trained parameters
results.json                      the closing numbers of every finished method and trial
"""

from __future__ import annotations

import csv
import json
import platform
import re
import sys
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fednmap.names import InputError
from fednmap.runs.configuration import Config
from fednmap.runs.files import (
    LOCK,
    alone,
    clear_errors,
    from_json,
    in_use,
    replacing,
    to_disk,
    to_json,
    write_atomically,
)
from fednmap.simulation import Record

COLUMNS = ("method", "trial", "round", "metric", "value")
VERSIONS = ("fednmap", "torch", "numpy")
EXTENDABLE = frozenset({"rounds", "trials", "algorithms", "checkpoint_every"})
"""Settings that may be changed in run.toml before `--resume`: no state depends on them."""

SECRET = re.compile(r"token|password|passphrase|secret", re.IGNORECASE)
ASSIGNMENT = re.compile(rf"""([\w.-]*(?:{SECRET.pattern})[\w.-]*\s*=\s*)("[^"]*"|'[^']*'|\S+)""", re.IGNORECASE)

Curves = dict[str, "array[float]"]
"""Column name -> its values along a run; all of the same length, `round` among them."""


class Job(NamedTuple):
    """One method in one trial."""

    method: str
    trial: int

    def __str__(self) -> str:
        return f"{self.method}-{self.trial}"


class Model(NamedTuple):
    """What a method has trained."""

    parameters: dict[str, Tensor]
    """In the network's order."""
    inputs: tuple[int, ...]
    """The shape of one sample, (channels, height, width) for pictures; () where it is not known."""


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(
        cls, path: Path | None, config: Config, command: str, more: Mapping[str, bytes] | None = None
    ) -> RunFolder:
        """A new folder with its configuration and the files `more`; never one that already holds something."""
        if path is None:
            path = _fresh(Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{command}")
        elif path.exists() and not path.is_dir():
            raise InputError(f"{path} is a file; choose another folder")
        with clear_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            with alone(path):
                if any(_is_content(p) for p in path.iterdir()):
                    raise InputError(f"{path} is not empty; choose another folder, or continue it with --resume {path}")
                for name, data in (more or {}).items():
                    write_atomically(path / name, data)
                write_atomically(path / "run.toml", config.toml().encode())
                write_atomically(path / "environment.json", to_json(provenance(config.model_dump(mode="json"))))
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """A folder that a run has made."""
        if not (path / "run.toml").is_file():
            raise InputError(f"{path} is not a run folder: it has no run.toml")
        return cls(path)

    def config(self) -> Config:
        return Config.read(self.path / "run.toml")

    def environment(self) -> dict[str, Any]:
        """What is known of the run's beginning; nothing if it was killed before that was written."""
        path = self.path / "environment.json"
        return dict(from_json(path, dict)) if path.exists() else {}

    def recognise(self, data: str) -> None:
        """Refuse to go on with other data than the run began with; `data` is their digest."""
        began = self.environment()
        if "data" not in began:
            with clear_errors(self.path):
                write_atomically(self.path / "environment.json", to_json(began | {"data": data}))
        elif began["data"] != data:
            raise InputError(
                f"the data of {self.path} have changed since the run began; put them back, or start a new run with "
                f"--config {self.path / 'run.toml'}"
            )

    def check(self, config: Config) -> list[str]:
        """Refuse a run.toml that no longer describes this run; what else the user should know."""
        began = self.environment()
        before, now = began.get("settings"), config.model_dump(mode="json")
        if isinstance(before, dict):
            changed = [k for k in before.keys() & now.keys() - EXTENDABLE if before[k] != now[k]]
            if changed:
                words = ", ".join(f"{k} is {now[k]!r} and was {before[k]!r}" for k in sorted(changed))
                raise InputError(
                    f"{self.path / 'run.toml'} was edited after the run began: {words}; "
                    "put it back, or use it for a new run with --config"
                )
        return [
            f"this run began with {name} {began[name]} and goes on with {version(name)}: last digits may differ"
            for name in VERSIONS
            if began.get(name, version(name)) != version(name)
        ]

    def repair(self) -> None:
        """Away with what a kill has left half written."""
        with clear_errors(self.path):
            for part in self.path.rglob(".*.part"):
                part.unlink(missing_ok=True)
            if not (self.path / "environment.json").exists():
                write_atomically(
                    self.path / "environment.json", to_json(provenance(self.config().model_dump(mode="json")))
                )
            metrics = self.path / "metrics.csv"
            if not metrics.exists():
                write_atomically(metrics, (",".join(COLUMNS) + "\n").encode())
            with metrics.open("r+b") as file:
                file.truncate(_whole_lines(file))

    def append(self, job: Job, record: Record) -> None:
        """One measurement more in metrics.csv."""
        rows = [(*job, int(record["round"]), name, repr(float(v))) for name, v in record.items() if name != "round"]
        with clear_errors(self.path), (self.path / "metrics.csv").open("a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)

    def flush(self) -> None:
        """Measurements are on disk before the checkpoint that relies on them."""
        with clear_errors(self.path):
            to_disk(self.path / "metrics.csv")

    def curves(self) -> dict[Job, Curves]:
        """All that was measured so far, in one pass; rows that are half written or damaged are left out."""
        found: dict[Job, Curves] = {}
        pending: dict[Job, Record] = {}
        for job, done, metric, value in self._rows():
            record = pending.get(job)
            if record is not None and record["round"] != done:
                _extend(found, job, record)
                record = None
            if record is None:
                record = pending[job] = {"round": done}
            record[metric] = value
        for job, record in pending.items():
            _extend(found, job, record)
        return found

    def records(self, method: str, trial: int) -> list[Record]:
        """What was measured of one method, a record for each measurement."""
        curves = self.curves().get(Job(method, trial), {})
        return [dict(zip(curves, values, strict=True)) for values in zip(*curves.values(), strict=True)]

    def measured(self) -> set[Job]:
        """The methods and trials that metrics.csv knows."""
        return {row[0] for row in self._rows()}

    def forget_after(self, job: Job, done: int) -> None:
        """Drop measurements of rounds that will be run again."""
        with (
            clear_errors(self.path),
            replacing(self.path / "metrics.csv") as part,
            part.open("w", newline="", encoding="utf-8") as file,
        ):
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            for row in self._rows():
                if row[0] != job or row[1] <= done:
                    writer.writerow((*row[0], row[1], row[2], repr(row[3])))

    def _rows(self) -> Iterator[tuple[Job, int, str, float]]:
        try:
            file = (self.path / "metrics.csv").open(newline="", encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return
        with file:
            for line in file:
                parts = line[:-1].split(",")
                if line.endswith("\n") and len(parts) == len(COLUMNS):
                    try:
                        yield Job(parts[0], int(parts[1])), int(parts[2]), parts[3], float(parts[4])
                    except ValueError:  # the heading, or a damaged row
                        continue

    def results(self) -> list[dict[str, Any]]:
        """The closing numbers of what is finished."""
        path = self.path / "results.json"
        if not path.exists():
            return []
        results = from_json(path, list)
        if not all(isinstance(r, dict) and {"method", "trial", "rounds"} <= r.keys() for r in results):
            raise InputError(f"{path} was changed: each entry needs method, trial and rounds")
        return list(results)

    def finish(self, job: Job, result: dict[str, Any], model: Model | None) -> None:
        """Keep the model, if there is one, then the closing numbers."""
        with clear_errors(self.path):
            if model is not None:
                path = self.model_path(job)
                path.parent.mkdir(exist_ok=True)
                tensors = {k: v.detach().cpu().contiguous() for k, v in model.parameters.items()}
                about = json.dumps({"order": list(tensors), "inputs": model.inputs})
                write_atomically(path, save(tensors, metadata={"fednmap": about}))  # several keys would change places
            results = [r for r in self.results() if (r["method"], r["trial"]) != job]
            results.append({"method": job.method, "trial": job.trial, **result})
            write_atomically(self.path / "results.json", to_json(results))

    def model(self, job: Job) -> Model | None:
        """What was trained; None before the end."""
        path = self.model_path(job)
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {}).get("fednmap", "{}"))
                parameters = {name: file.get_tensor(name) for name in about.get("order") or list(file.keys())}
                return Model(parameters, tuple(about.get("inputs", ())))
        except (SafetensorError, ValueError, TypeError, AttributeError, OSError) as error:
            raise InputError(f"{path} was changed or cut short: {error}") from None

    def model_path(self, job: Job) -> Path:
        return self.path / "models" / f"{job}.safetensors"

    def checkpoints(self, job: Job) -> Path:
        return self.path / "checkpoints" / str(job)

    def running(self) -> bool:
        """Whether the run is going on now."""
        return in_use(self.path)


def provenance(settings: dict[str, Any]) -> dict[str, Any]:
    """Where results come from: command, time, versions, settings."""
    return {
        "command": redacted(["fednmap", *sys.argv[1:]]),
        "began": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: version(name) for name in VERSIONS},
        "settings": settings,
    }


def redacted(words: Sequence[str]) -> list[str]:
    """The words of a command without its secrets: what stands behind a name with token, password or secret in it.

    >>> redacted(["run", "--token", "abc", "--rounds", "3", "-c", "db-password='x y' rounds=3"])
    ['run', '--token', '***', '--rounds', '3', '-c', 'db-password=*** rounds=3']
    """
    shown, secret = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        named = word.startswith("-") and bool(SECRET.search(name))
        if secret:
            shown.append("***")
        else:
            shown.append(f"{name}=***" if named and equals else ASSIGNMENT.sub(r"\1***", word))
        secret = named and not equals and not secret
    return shown


def _extend(found: dict[Job, Curves], job: Job, record: Record) -> None:
    """One more point of each curve; a record that lacks a column is still being written."""
    curves = found.setdefault(job, {name: array("d") for name in record})
    if record.keys() >= curves.keys():
        for name, values in curves.items():
            values.append(record[name])


def _whole_lines(file: Any) -> int:
    """How many bytes of the file end with a line's end."""
    size = end = file.seek(0, 2)
    while end > 0:
        start = max(0, end - 4096)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return int(start + found + 1)
        end = start
    return 0 if size else size


def _is_content(path: Path) -> bool:
    return path.name != LOCK and not (path.name.startswith(".") and path.name.endswith(".part"))


def _fresh(path: Path) -> Path:
    """`path`, or with a number behind it: a folder that did not exist before this call."""
    k = 1
    with clear_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            fresh = path if k == 1 else path.with_name(f"{path.name}-{k}")
            try:
                fresh.mkdir()
                return fresh
            except FileExistsError:
                k += 1
