"""One method's run on disk: measurements and checkpoints as it goes, model and closing numbers at its end.

What was stopped or killed goes on from its last checkpoint, to the same bits.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fednmap.core import Algorithm, Problem
from fednmap.measure import quantity
from fednmap.names import InputError
from fednmap.runs import checkpoints
from fednmap.runs.files import clear_errors
from fednmap.runs.folder import Job, Model, RunFolder
from fednmap.simulation import Callback, Diverged, Record, Result, Round, distributed
from fednmap.simulation.callbacks import heard, stays_ended
from fednmap.simulation.trajectory import run_and_measure

DONE = "all rounds done"
"""How a run ends that nothing ends earlier."""


class Interrupted(Exception):
    """The user asked to stop; the state is saved."""


class StopFlag(Protocol):
    """Whether the user wants to stop: an event, of threads or of processes."""

    def is_set(self) -> bool: ...


class RunInfo(NamedTuple):
    """What a reporter is told when a method begins."""

    job: Job
    done: int
    """Rounds of an earlier call."""
    rounds: int
    trials: int
    facts: dict[str, Any]
    """Its settings."""


class Reporter(Callback):
    """Also hears which method begins and ends, and what must be told; the default says nothing."""

    label = ""
    """Stands before a method's name, where one command makes several runs."""

    def begin(self, what: RunInfo) -> None:
        """A method begins."""

    def end(self, result: dict[str, Any] | None) -> None:
        """The method has ended, with these closing numbers; with None if it was stopped."""

    def tell(self, line: str) -> None:
        """Something the user should know."""

    def clone(self) -> Reporter:
        """One more like this, for a method that runs at the same time."""
        return self


@dataclass(frozen=True)
class Task:
    """One method on one problem, and how it is run."""

    job: Job
    algorithm: Algorithm
    problem: Problem
    start: Tensor
    rounds: int
    checkpoint_every: int
    settings: dict[str, Any]
    """What the states depend on; a checkpoint is read with the same settings only."""
    options: dict[str, Any]
    """Of `run_and_measure`."""
    saved: Callable[[Tensor], Model]
    """The model x as it is kept."""
    trials: int
    facts: dict[str, Any]
    """All that is known of the run, for those who report it."""
    beside: int = 1
    """How many runs share the machine: its seconds are not comparable with those of one alone."""

    def found(self, folder: RunFolder) -> tuple[Round | None, Record | None, list[str]]:
        """The state to go on from, its totals, and a line about each checkpoint that had to be passed over."""
        where = folder.checkpoints(self.job)
        return checkpoints.newest(where, self.algorithm, self.problem, self.start, self.settings)

    def go(
        self, after: Round | None, before: Record | None, callbacks: Sequence[Callback], earlier: Sequence[Record] = ()
    ) -> tuple[Result, str | None]:
        """The rounds that are still to run, and what went wrong in them."""
        given = self.options | {"callbacks": callbacks, "after": after, "before": before, "earlier": earlier}
        try:
            given |= {"rounds": self.rounds, "start": self.start, "history": False}
            return run_and_measure(self.algorithm, self.problem, **given), None
        except Diverged as diverged:
            return diverged.result, str(diverged)


def run_and_record(
    task: Task,
    folder: RunFolder,
    callbacks: Sequence[Callback],
    asked: StopFlag,
    *,
    measured: bool,
    announce: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Run the task, or what is left of it; its closing numbers, which are in the folder then.

    asked:    set when the user wants to stop.
    measured: whether the folder holds measurements of the job already.
    announce: told how many rounds are done, before the others begin.
    """
    job, reporters = task.job, [callback for callback in callbacks if isinstance(callback, Reporter)]

    def tell(line: str) -> None:
        for reporter in reporters:
            reporter.tell(line)

    after, before, refused = task.found(folder)
    for line in refused:
        tell(line)
    done = 0 if after is None else after.t + 1
    if done >= task.rounds > 0:
        raise InputError(f"{task.rounds} rounds are asked for and {job.method} has run {done}; ask for more")
    if measured:
        folder.forget_after(job, -1 if after is None else done)
    for reporter in reporters:
        reporter.begin(RunInfo(job, done, task.rounds, task.trials, task.facts))
    closing: dict[str, Any] | None = None
    announce(done)
    try:
        earlier = folder.records(*job) if measured else []
        result, error = task.go(after, before, (_Keeper(task, folder, asked), *callbacks), earlier)
        if error:
            tell(f"{job.method}: {error}")
        if result.warning:
            tell(f"warning: {job.method}: {result.warning}")
        if result.ended and result.last is not None:  # a later call may go on
            folder.flush()
            _save(task, folder, result.last, result.totals)
        # a method that diverged soon after it was continued has measured nothing since, and has no model to keep
        records = result.records or folder.records(*job)
        facts = summary(records[-1]) if records else {"rounds": done}
        facts |= {"measure_gamma": result.measure_gamma} | ({"jobs": task.beside} if task.beside > 1 else {})
        facts |= {"error": error} if error else {"ended": result.ended or DONE}
        facts |= {"ended_by": result.ended_by} if result.ended_by else {}
        facts |= {"warning": result.warning} if result.warning else {}
        closing = folder.finish(job, facts, None if error else task.saved(result.x))
    finally:
        for reporter in reporters:
            reporter.end(closing)
    return closing


def ended_by(stops: Sequence[Callback], closing: dict[str, Any], records: Sequence[Record]) -> dict[str, Any] | None:
    """The closing numbers of a run with the reason for which it stays ended before its rounds; None without one."""
    if not records:
        return None
    stays_ended(stops, records[:-1])  # they hear all in order
    reason = heard(stops, lambda callback: callback.on_record(records[-1]))
    return closing | {"ended": reason} if reason is not None else None


def summary(record: Record) -> dict[str, Any]:
    """The closing numbers, as `--json` prints them, with metrics of one's own; what was not measured is not there."""
    return {
        "rounds": int(record["round"]),
        **{k: v for k, v in record.items() if not quantity(k).cost},
        "test_accuracy": record.get("test_accuracy"),
        "bytes_up": int(record["bytes_up"]),
        "bytes_down": int(record["bytes_down"]),
        "seconds": record["train_seconds"] + record["eval_seconds"],
        "train_seconds": record["train_seconds"],
        "eval_seconds": record["eval_seconds"],
    }


class _Keeper(Callback):
    """Writes measurements and checkpoints; stops after the round in which the user asked to."""

    def __init__(self, task: Task, folder: RunFolder, asked: StopFlag) -> None:
        self.task, self.folder, self.asked = task, folder, asked

    def on_record(self, record: Record) -> None:
        self.folder.append(self.task.job, record)

    def on_round(self, round: Round, totals: Record) -> None:
        save, stop = _due(round, self.task, self.asked.is_set())
        if save:
            self.folder.flush()
            _save(self.task, self.folder, round, totals)
        if stop:
            raise Interrupted


def _save(task: Task, folder: RunFolder, round: Round, totals: Record) -> None:
    with clear_errors(folder.path):
        checkpoints.write(folder.checkpoints(task.job), round, totals, task.settings)


class Companion(Callback):
    """The keeper's part in the other processes of a group: their clients' states go to process 0."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def on_round(self, round: Round, totals: Record) -> None:
        save, stop = _due(round, self.task, False)
        if save:
            round.clients.tensors()
        if stop:
            raise Interrupted


def _due(round: Round, task: Task, asked: bool) -> tuple[bool, bool]:
    """Whether to write a checkpoint after this round, and whether to stop; the same in all processes."""
    done = round.t + 1
    if done == task.rounds:  # what comes next is the result itself
        return False, False
    stop = distributed.any_process(asked)
    return stop or done % task.checkpoint_every == 0, stop


_pool_flag: StopFlag | None = None


def in_pool(stop: StopFlag) -> None:
    """Take `stop` for what the user asks: this process belongs to a pool, whose owner receives the signals."""
    global _pool_flag
    _pool_flag = stop


@contextmanager
def interrupts() -> Iterator[StopFlag]:
    """Yield a flag that Ctrl-C and termination set, so that every round is completed; a second Ctrl-C ends at once."""
    if _pool_flag is not None:
        yield _pool_flag
        return
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    old = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
