"""Trials: one method in one setting from one seed. A finished trial is a small file and is not run again.

The file's first line says what the trial was made from: its whole configuration, the SHA-256 of its data, versions,
the code. A trial made from something else than what is asked for now counts as not there.
"""

from __future__ import annotations

import csv
import io
import json
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

import fednmap
from fednmap.names import InputError
from fednmap.runs.beside import end_with
from fednmap.runs.configuration import Config
from fednmap.runs.files import clear_errors, digest, write_atomically
from fednmap.runs.folder import VERSIONS, RunFolder
from fednmap.runs.keeping import Interrupted
from fednmap.simulation import Record, threads

Setting = dict[str, Any]
"""What tells a trial from the others, such as {"method": "FedNMap", "n": 20, "Q": 10, "trial": 0}."""

Tell = Callable[[str], None]

Array = npt.NDArray[np.float64]


class Trial(NamedTuple):
    """A trial to run: `measure` gives its records, and can be sent to another process."""

    setting: Setting
    measure: Callable[[Path], list[Record]]
    """Takes the folder in which the trial keeps what it needs to go on; see `fednmap.paper.runs`."""
    configuration: Mapping[str, Any]
    """All that its numbers follow from, in values that JSON has; `data` names the data set, if there is one."""
    data: Callable[[], str] | None = None
    """The SHA-256 of the data as they are now, where there are any."""

    @property
    def name(self) -> str:
        return "_".join(v if isinstance(v, str) else f"{k}{v:g}" for k, v in self.setting.items())

    @property
    def file(self) -> str:
        """The setting as a file name; a trial of another setting, such as more rounds, is another file."""
        return f"{self.name}.csv"


@dataclass(frozen=True)
class Curve:
    """What a trial measured, by column; the column `round` says after how many rounds."""

    setting: Setting
    columns: dict[str, Array]

    def __getitem__(self, column: str) -> Array:
        return self.columns[column]

    def final(self, metric: str, rounds: float | None = None, share: float = 0.1) -> float:
        """The mean over the last tenth (`share`) of the first `rounds` rounds (default: all), at least of one value."""
        t, y = self["round"], self[metric]
        last = t[t <= (t[-1] if rounds is None else rounds)][-1]
        return float(y[((t > (1 - share) * last) & (t <= last)) | (t == last)].mean())


class Made(NamedTuple):
    """What a trial's file says that it was made from."""

    configuration: Mapping[str, Any]
    data: str | None
    """The SHA-256 of the data, where there are any."""
    code: str | None
    """Of the files that its numbers follow from, see `code`."""

    def differs(self, configuration: Mapping[str, Any]) -> str:
        """The settings that are not what they were, in words; a run's that one side does not name has its default."""
        was, now = ({**_defaults(), **v} for v in (self.configuration, configuration))
        changed = [name for name in was if name in now and was[name] != now[name]]
        return ", ".join(f"{name} was {was[name]!r} and is {now[name]!r}" for name in changed)


@cache
def _defaults() -> dict[str, Any]:
    return Config.make().model_dump(mode="json", exclude={"checkpoint_every"})


def made(path: Path) -> Made | None:
    """What the first line says; nothing in files from before it was kept."""
    with path.open(encoding="utf-8") as file:
        first = file.readline()
    if not first.startswith("# "):
        return None
    try:
        said = json.loads(first[2:])
        return Made(dict(said["configuration"]), said.get("data"), said.get("code"))
    except (ValueError, TypeError, KeyError):
        raise InputError(f"{path} was changed: its first line does not say what it was made from") from None


ROOMS = ("algorithms", "core.py", "data", "measure.py", "models", "problems", "regularizers", "runs", "simulation")
"""The parts of the package that a trial's numbers follow from, but for what a file of `paper` adds for its figure."""


def code() -> str:
    """The first digits of the SHA-256 of those parts: trials of one state of the code have it in common."""
    package = Path(fednmap.__file__).parent
    files = sorted(
        file for room in ROOMS for file in (package / room, *(package / room).rglob("*.py")) if file.is_file()
    )
    return digest({file.relative_to(package).as_posix(): file.read_text(encoding="utf-8") for file in files})[:12]


CODE = code()  # as it is when a process begins, which is what it runs


def finished(jobs: Sequence[Trial], folder: Path, tell: Tell) -> list[Curve]:
    """The curves of the jobs that have been run, as they are; those made from other settings are left out."""
    there = [job for job in jobs if (folder / job.file).is_file()]
    why = {job.file: _of_no_use(job, folder) for job in there}
    _tell_reasons(list(why.values()), {UNKNOWN: "taken as they are"}, "left out", tell)
    return [read(folder / job.file, job.setting) for job in there if why[job.file] in ("", UNKNOWN)]


UNKNOWN = "their files do not say what they were made from"


def _of_no_use(job: Trial, folder: Path, digests: Mapping[str, str] | None = None) -> str:
    """Why a trial's file is not what is asked for; nothing if it is. digests: of the data sets as they are now."""
    known = made(folder / job.file)
    if known is None:
        return UNKNOWN
    now = (digests or {}).get(str(job.configuration.get("data")), known.data)
    return known.differs(job.configuration) or ("" if now == known.data else "their data were others")


def _digests(jobs: Sequence[Trial], tell: Tell) -> dict[str, str]:
    """Data set -> the SHA-256 of what it is now; each is loaded once."""
    found: dict[str, str] = {}
    unknown: set[str] = set()
    for job in jobs:
        name = str(job.configuration.get("data"))
        if job.data is not None and name not in found and name not in unknown:
            try:
                found[name] = job.data()
            except (InputError, OSError) as error:
                tell(f"{name} cannot be compared with what finished trials were made from: {error}")
                unknown.add(name)
    return found


def _tell_reasons(reasons: Sequence[str], special: Mapping[str, str], what: str, tell: Tell) -> None:
    for words, count in Counter(reasons).items():
        if words:
            tell(f"{count} of {len(reasons)} trials {special.get(words, what)}: {words}")


def select(curves: Iterable[Curve], **setting: Any) -> list[Curve]:
    """The trials of a setting, in the order of their number."""
    chosen = [c for c in curves if all(c.setting[k] == v for k, v in setting.items())]
    return sorted(chosen, key=lambda c: int(c.setting["trial"]))


def run_trials(jobs: Sequence[Trial], folder: Path, workers: int, tell: Tell) -> list[Curve]:
    """Run the jobs whose file is missing, `workers` at once, each in a process of its own; the curves of all.

    Those that were made from other settings or other data are run again. The file of a trial is in `folder`; what it
    keeps while it runs is in the folder `runs` beside it.
    """
    if workers < 1:
        raise InputError(f"jobs is {workers}; at least 1 is needed")
    with clear_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    there = [job for job in jobs if (folder / job.file).is_file()]
    digests = _digests(there, tell)
    why = {job.file: _of_no_use(job, folder, digests) for job in there}
    _tell_reasons(list(why.values()), {UNKNOWN: "run again, --finished takes them as they are"}, "run again", tell)
    missing = [job for job in jobs if why.get(job.file, "missing")]
    tell(f"{len(jobs)} trials, {len(jobs) - len(missing)} already there")
    _run_all(missing, folder, workers, tell)
    return [read(folder / job.file, job.setting) for job in jobs]


def _run_all(jobs: Sequence[Trial], folder: Path, workers: int, tell: Tell) -> None:
    for k, (job, seconds) in enumerate(_running(jobs, folder, workers)):
        tell(f"{k + 1}/{len(jobs)}  {job.name}  {seconds:.0f} s")


def _running(jobs: Sequence[Trial], folder: Path, workers: int) -> Iterator[tuple[Trial, float]]:
    workers = min(workers, len(jobs))
    if workers < 2:
        yield from ((job, _run(job, folder)) for job in jobs)
        return
    spawn = multiprocessing.get_context("spawn")  # a fork of a process that has used torch's threads may hang
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(workers, spawn, _begin, (threads.share(workers), os.getpid()))
    futures = {pool.submit(_run_unless_stopped, job, folder): job for job in jobs}
    left = 0
    try:
        for future in as_completed(futures):
            if (seconds := future.result()) is not None:
                yield futures[future], seconds
            else:
                left += 1
        if left:  # the processes have heard what this one does not, as under nohup
            raise Interrupted
    except (KeyboardInterrupt, Interrupted):  # the processes have heard it too
        raise Interrupted from None
    except BrokenProcessPool:
        raise OSError("a process that ran a trial was ended; the same command goes on from what was saved") from None
    except Exception:
        for process in multiprocessing.active_children():
            if process not in others and process.pid:
                os.kill(process.pid, signal.SIGINT)
        raise
    finally:  # trials that run are waited for: they save their state, or end in a few seconds
        pool.shutdown(cancel_futures=True)


_stopped = threading.Event()


def _begin(each: int, parent: int) -> None:
    """A process for trials: Ctrl-C is for the trial that runs, which saves its state; it ends with its parent."""
    end_with(parent)
    torch.set_num_threads(1)
    threads.limit(each)
    signal.signal(signal.SIGINT, lambda number, frame: _stopped.set())


def _run_unless_stopped(job: Trial, folder: Path) -> float | None:
    """In a process of the pool, which hands out a trial more than there are processes: None if it did not begin it."""
    if _stopped.is_set():
        return None
    try:
        return _run(job, folder)
    except Exception:
        _stopped.set()
        raise


def _run(job: Trial, folder: Path) -> float:
    """Run the trial and write its file; the seconds it took."""
    began, path = time.monotonic(), folder.parent / "runs" / job.name
    records = job.measure(path)
    about, told = RunFolder(path).environment(), dict(job.configuration)
    said = {"configuration": told, "digest": digest(told), **{k: about[k] for k in ("data", *VERSIONS) if k in about}}
    said["code"] = CODE
    with clear_errors(folder):
        write_atomically(folder / job.file, f"# {json.dumps(said)}\n{_text(job.setting, records)}".encode())
    return time.monotonic() - began


def _text(setting: Setting, records: list[Record]) -> str:
    """The records as a table, with the setting in front."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*setting, *records[0]])
    writer.writerows([*setting.values(), *(f"{v:.6g}" for v in record.values())] for record in records)
    return file.getvalue()


def read(path: Path, setting: Setting) -> Curve:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return Curve(setting, {name: np.array([float(r[name]) for r in rows]) for name in rows[0] if name not in setting})


def tidy(curves: Sequence[Curve]) -> str:
    """All trials as one table: a row per measurement, a column per setting or metric."""
    file = io.StringIO()
    names = dict.fromkeys([*(k for c in curves for k in c.setting), *(k for c in curves for k in c.columns)])
    writer = csv.DictWriter(file, list(names), lineterminator="\n")
    writer.writeheader()
    for curve in curves:
        for values in zip(*curve.columns.values(), strict=True):
            measured = (f"{v:.6g}" for v in values)
            writer.writerow({**curve.setting, **dict(zip(curve.columns, measured, strict=True))})
    return file.getvalue()


def kind(setting: Setting) -> tuple[Any, ...]:
    """The setting but for the number of the trial."""
    return tuple(v for k, v in setting.items() if k != "trial")


def by_setting(curves: Iterable[Curve]) -> dict[tuple[Any, ...], list[Curve]]:
    """The trials that differ in nothing but their number."""
    groups: dict[tuple[Any, ...], list[Curve]] = {}
    for curve in curves:
        groups.setdefault(kind(curve.setting), []).append(curve)
    return groups


def summary(curves: Sequence[Curve]) -> str:
    """One row per setting: mean and standard deviation over the trials of every metric's final value."""
    groups = by_setting(curves)
    metrics = [m for m in curves[0].columns if m != "round" and all(m in c.columns for c in curves)]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    names = [k for k in curves[0].setting if k != "trial"]
    writer.writerow([*names, "trials", *(f"{m}_{what}" for m in metrics for what in ("mean", "std"))])
    for key, members in groups.items():
        finals = [[c.final(m) for c in members] for m in metrics]
        cells = (f"{s:.6g}" for v in finals for s in (np.mean(v), np.std(v, ddof=1) if len(v) > 1 else 0.0))
        writer.writerow([*key, len(members), *cells])
    return file.getvalue()
