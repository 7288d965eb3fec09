"""Run folders: what a run leaves on disk, safe against kills, full disks and curious hands.

run.toml                      the whole configuration
environment.json              versions, the command, when it began
metrics.csv                   long form (method, trial, round, metric, value), appended while running
checkpoints/METHOD-TRIAL/     the last two states, safetensors with a JSON beside each
models/METHOD-TRIAL.safetensors   the trained parameters
results.json                  the closing numbers of every finished method and trial
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fednmap.config import Config
from fednmap.core import Algorithm, Problem
from fednmap.simulation import Record, Round
from fednmap.simulation.store import Clients

COLUMNS = ("method", "trial", "round", "metric", "value")


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path | None, config: Config, command: str) -> RunFolder:
        """A new folder with its configuration; never one that already holds something."""
        if path is None:
            path = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{command}"
            path = next(p for p in _variants(path) if not p.exists())
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ValueError(
                f"{path} exists and is not empty; choose another folder, or continue it with --resume {path}"
            )
        with _clear_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            write_atomically(path / "run.toml", config.toml().encode())
            environment = {
                "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
                "began": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "python": platform.python_version(),
                "platform": platform.platform(),
                **{name: version(name) for name in ("fednmap", "torch", "numpy")},
            }
            write_atomically(path / "environment.json", _json(environment))
            write_atomically(path / "metrics.csv", (",".join(COLUMNS) + "\n").encode())
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """A folder that a run has made."""
        if not (path / "run.toml").is_file():
            raise ValueError(f"{path} is not a run folder: it has no run.toml")
        return cls(path)

    def config(self) -> Config:
        return Config.read(self.path / "run.toml")

    def append(self, method: str, trial: int, record: Record) -> None:
        """One measurement more in metrics.csv."""
        rows = [
            (method, trial, int(record["round"]), name, repr(float(v))) for name, v in record.items() if name != "round"
        ]
        with _clear_errors(self.path), (self.path / "metrics.csv").open("a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)

    def records(self, method: str, trial: int) -> list[Record]:
        """What was measured so far, in order; a last row cut short by a kill is left out."""
        records: dict[int, Record] = {}
        for row in self._rows():
            if row[0] == method and row[1] == str(trial):
                records.setdefault(int(row[2]), {"round": int(row[2])})[row[3]] = float(row[4])
        return [records[t] for t in sorted(records)]

    def forget_after(self, method: str, trial: int, done: int) -> None:
        """Drop measurements of rounds that will be run again."""
        kept = [row for row in self._rows() if not (row[0] == method and row[1] == str(trial) and int(row[2]) > done)]
        text = "\n".join([",".join(COLUMNS), *(",".join(row) for row in kept)]) + "\n"
        with _clear_errors(self.path):
            write_atomically(self.path / "metrics.csv", text.encode())

    def _rows(self) -> Iterator[list[str]]:
        with (self.path / "metrics.csv").open(newline="", encoding="utf-8") as file:
            for row in csv.reader(line for line in file if line.endswith("\n")):
                if len(row) == len(COLUMNS) and row[0] != "method":
                    yield row

    def results(self) -> list[dict[str, Any]]:
        """The closing numbers of what is finished."""
        path = self.path / "results.json"
        return list(json.loads(path.read_text())) if path.exists() else []

    def finish(self, method: str, trial: int, result: dict[str, Any], parameters: dict[str, Tensor]) -> None:
        """Keep the model, then the closing numbers."""
        with _clear_errors(self.path):
            model = self.path / "models" / f"{method}-{trial}.safetensors"
            model.parent.mkdir(exist_ok=True)
            write_atomically(model, save({k: v.detach().cpu().contiguous() for k, v in parameters.items()}))
            results = [r for r in self.results() if (r["method"], r["trial"]) != (method, trial)]
            results.append({"method": method, "trial": trial, **result})
            write_atomically(self.path / "results.json", _json(results))

    def save(self, method: str, trial: int, round: Round, record: Record) -> None:
        """A checkpoint after `round`, atomically; the last two are kept."""
        folder = self.path / "checkpoints" / f"{method}-{trial}"
        tensors = {f"server.{name}": v for name, v in round.server._asdict().items()}
        tensors |= {f"clients.{name}": v for name, v in round.clients.tensors().items()}
        data = save({name: v.detach().cpu().contiguous() for name, v in tensors.items()})
        about = {"round": round.t, "record": record, "sha256": hashlib.sha256(data).hexdigest()}
        about["check"] = _digest(about)
        with _clear_errors(self.path):
            folder.mkdir(parents=True, exist_ok=True)
            name = f"round-{round.t:08d}"
            write_atomically(folder / f"{name}.safetensors", data)
            write_atomically(folder / f"{name}.json", _json(about))
            for old in sorted(folder.glob("round-*.json"))[:-2]:
                old.unlink()
                old.with_suffix(".safetensors").unlink(missing_ok=True)

    def restore(
        self, method: str, trial: int, algorithm: Algorithm, problem: Problem, start: Tensor
    ) -> tuple[Round | None, Record | None, list[str]]:
        """The newest intact checkpoint, and a line about each that had to be passed over."""
        refused: list[str] = []
        for about in sorted((self.path / "checkpoints" / f"{method}-{trial}").glob("round-*.json"), reverse=True):
            try:
                return *_read(about, algorithm, problem, start), refused
            except (ValueError, KeyError, TypeError, OSError, SafetensorError, RuntimeError) as error:
                refused.append(f"checkpoint {about.stem} is damaged ({error}); using the one before")
        return None, None, refused


def _read(about: Path, algorithm: Algorithm, problem: Problem, start: Tensor) -> tuple[Round, Record]:
    facts = json.loads(about.read_text(encoding="utf-8"))
    if not isinstance(facts, dict) or facts.pop("check", None) != _digest(facts):
        raise ValueError("its JSON was changed or cut short")
    data = about.with_suffix(".safetensors").read_bytes()
    if hashlib.sha256(data).hexdigest() != facts["sha256"]:
        raise ValueError("its tensors were changed or cut short")
    tensors = {name: v.to(start.device) for name, v in load(data).items()}
    server, client = algorithm.init(start)
    clients = Clients(problem.n, client)
    clients.restore({name.removeprefix("clients."): v for name, v in tensors.items() if name.startswith("clients.")})
    server = type(server)(**{name: tensors[f"server.{name}"] for name in server._fields})
    nobody = torch.arange(0)
    return Round(facts["round"], server, clients, nobody, nobody, 0, 0), facts["record"]


def write_atomically(path: Path, data: bytes) -> None:
    """All of `data` under that name, or what was there before."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


class FolderError(OSError):
    """The run folder cannot be written."""


@contextmanager
def _clear_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FolderError(f"cannot write to {path}: {error.strerror}; what was saved before is intact") from error


def _variants(path: Path) -> Iterator[Path]:
    yield path
    k = 2
    while True:
        yield path.with_name(f"{path.name}-{k}")
        k += 1


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
