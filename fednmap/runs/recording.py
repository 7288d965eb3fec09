"""One method's run on disk: measurements and checkpoints as it goes, model and closing numbers at its end.

A run that was stopped or killed continues from its last checkpoint, to the same bits.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
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
    """What a reporter receives when a method begins."""

    job: Job
    done: int
    """Rounds of an earlier call."""
    rounds: int
    trials: int
    facts: dict[str, Any]
    """Its settings."""


class Reporter(Callback):
    """A callback that also receives the begin and end of each method, and messages for the user."""

    label = ""
    """Stands before a method's name, where one command makes several runs."""

    def begin(self, what: RunInfo) -> None:
        """A method begins."""

    def end(self, result: dict[str, Any] | None) -> None:
        """The method has ended, with these closing numbers; with None if it was stopped."""

    def message(self, line: str) -> None:
        """Show a line to the user."""

    def clone(self) -> Reporter:
        """Return a reporter for a method that runs at the same time."""
        return copy(self)


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
    """Those of `run_and_measure`."""
    saved: Callable[[Tensor], Model]
    """Turns the vector x into the model that is stored."""
    facts: dict[str, Any]
    """All that is known of the run, for reporters."""
    trials: int = 1
    parallel: int = 1
    """How many runs share the machine: their seconds are not comparable with those of one alone."""

    def found(self, folder: RunFolder) -> tuple[Round | None, Record | None, list[str]]:
        """Return the state to continue from, its totals, and a line about each checkpoint that was refused."""
        where = folder.checkpoints(self.job)
        return checkpoints.newest(where, self.algorithm, self.problem, self.start, self.settings)

    def go(
        self, after: Round | None, before: Record | None, callbacks: Sequence[Callback], earlier: Sequence[Record] = ()
    ) -> tuple[Result, str | None]:
        """Run the rounds that are not done yet; return the result, and the error if the iterates diverged."""
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
    announce: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Run the rounds of the task that are not done yet; return its closing numbers, which are then in the folder.

    asked:    set when the user wants to stop.
    announce: receives the number of rounds done, before the others begin.
    """
    job, reporters = task.job, [callback for callback in callbacks if isinstance(callback, Reporter)]

    def message(line: str) -> None:
        for reporter in reporters:
            reporter.message(line)

    after, before, refused = task.found(folder)
    for line in refused:
        message(line)
    done = 0 if after is None else after.t + 1
    if done >= task.rounds > 0:
        raise InputError(f"{task.rounds} rounds are asked for and {job.method} has run {done}; ask for more")
    folder.forget_after(job, -1 if after is None else done)
    for reporter in reporters:
        reporter.begin(RunInfo(job, done, task.rounds, task.trials, task.facts))
    closing: dict[str, Any] | None = None
    announce(done)
    try:
        earlier = folder.records(*job)
        recorder = Recorder(task, folder, asked)
        result, error = task.go(after, before, (recorder, *callbacks), earlier)
        if error:
            message(f"{job.method}: {error}")
        if result.warning:
            message(f"warning: {job.method}: {result.warning}")
        if result.ended and result.last is not None:  # a later call may continue
            recorder.save(result.last, result.totals)
        # a method that diverged soon after it was continued has measured nothing since, and has no model to keep
        records = result.records or earlier
        facts = summary(records[-1]) if records else {"rounds": done}
        facts |= {"measure_gamma": result.measure_gamma} | ({"jobs": task.parallel} if task.parallel > 1 else {})
        facts |= {"error": error} if error else {"ended": result.ended or DONE}
        facts |= {"ended_by": result.ended_by} if result.ended_by else {}
        facts |= {"warning": result.warning} if result.warning else {}
        closing = folder.finish(job, facts, None if error else task.saved(result.x))
    finally:
        for reporter in reporters:
            reporter.end(closing)
    return closing


def stored_result(
    folder: RunFolder, job: Job, rounds: int, stops: Sequence[Callback], enders: Sequence[str] = ()
) -> dict[str, Any] | None:
    """Return the closing numbers of a job with nothing left to run: all rounds are done, or it stays ended early.

    stops:  reasons to stop, which are asked again.
    enders: names of callbacks; a run that one of them ended is not continued.
    """
    found = next((r for r in folder.results() if (r["method"], r["trial"]) == job), None)
    if found is None or "error" in found or found["rounds"] == rounds:
        return found
    if found["rounds"] > rounds:
        raise InputError(
            f"{rounds} rounds are asked for and {job.method} in {folder.path} has run {found['rounds']}; "
            "ask for as many or more, or start a new run"
        )
    records = folder.records(*job)
    if found.get("ended_by") in enders or not records:
        return found if records else None
    stays_ended(stops, records[:-1])  # they receive all in order
    reason = heard(stops, lambda callback: callback.on_record(records[-1]))
    return found | {"ended": reason} if reason is not None else None


def summary(record: Record) -> dict[str, Any]:
    """Return the closing numbers, as `--json` prints them; what was not measured is left out."""
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


class Recorder(Callback):
    """Writes measurements and checkpoints; stops after the round in which the user asked to.

    folder: None in the other processes of a group, which only send their clients' states to process 0.
    """

    def __init__(self, task: Task, folder: RunFolder | None = None, asked: StopFlag | None = None) -> None:
        self.task, self.folder, self.asked = task, folder, asked

    def on_record(self, record: Record) -> None:
        if self.folder is not None:
            self.folder.append(self.task.job, record)

    def on_round(self, round: Round, totals: Record) -> None:
        done = round.t + 1
        if done == self.task.rounds:  # what comes next is the result itself
            return
        stop = distributed.any_process(self.asked is not None and self.asked.is_set())  # the same in all of them
        if stop or done % self.task.checkpoint_every == 0:
            self.save(round, totals)
        if stop:
            raise Interrupted

    def save(self, round: Round, totals: Record) -> None:
        """Write a checkpoint; its measurements are on disk before it."""
        if self.folder is None:
            round.clients.tensors()
            return
        self.folder.flush()
        with clear_errors(self.folder.path):
            checkpoints.write(self.folder.checkpoints(self.task.job), round, totals, self.task.settings)


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
