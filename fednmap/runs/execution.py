"""Running what a configuration asks for: every method, every trial, into one run folder."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor

from fednmap.measure import quantity
from fednmap.names import InputError
from fednmap.problems import Network
from fednmap.runs import checkpoints
from fednmap.runs.configuration import Config
from fednmap.runs.experiment import Experiment, prepare
from fednmap.runs.files import alone, clear_errors
from fednmap.runs.folder import EXTENDABLE, Job, Model, RunFolder
from fednmap.simulation import Callback, Diverged, Record, Result, Round, distributed, run


class Interrupted(Exception):
    """The user asked to stop; the state is saved."""


class Reporter(Callback):
    """Also hears which method begins and ends, and what must be told; the default says nothing."""

    label = ""
    """Stands before a method's name, where one command makes several runs."""

    def begin(self, method: str, trial: int, done: int, config: Config) -> None:
        """A method begins, after `done` rounds of an earlier call."""

    def end(self, result: dict[str, Any] | None) -> None:
        """The method has ended, with these closing numbers; with None if it was stopped."""

    def tell(self, line: str) -> None:
        """Something the user should know."""


def execute(
    config: Config,
    folder: RunFolder,
    reporter: Reporter,
    callbacks: tuple[Callback, ...] = (),
    experiment: Experiment | None = None,
) -> list[dict[str, Any]]:
    """Run what is not yet in the folder; the closing numbers of every method and trial, in order.

    A method whose iterates become non-finite is reported with what it had reached; the others go on.

    callbacks:  hear what the reporter hears; those that are reporters also when a method begins and ends.
    experiment: the first trial, if it has been prepared already.
    """
    jobs = [Job(method, trial) for trial in range(config.trials) for method in config.algorithms]
    with alone(folder.path), _interrupts() as asked:
        for line in folder.check(config):
            reporter.tell(line)
        finished = {Job(r["method"], r["trial"]): r for r in folder.results() if _is_finished(r, config)}
        if all(job in finished for job in jobs):
            return [finished[job] for job in jobs]
        folder.repair()
        measured = folder.measured()
        for job in jobs:
            if job in finished:
                continue
            if asked.is_set():
                raise Interrupted
            if experiment is None or experiment.config.seed != config.seed + job.trial:
                experiment = prepare(config.model_copy(update={"seed": config.seed + job.trial}))
            folder.recognise(experiment.dataset.digest)
            finished[job] = _job(job, experiment, folder, job in measured, (reporter, *callbacks), asked)
    return [finished[job] for job in jobs]


def _is_finished(result: dict[str, Any], config: Config) -> bool:
    if "error" not in result and result["rounds"] > config.rounds:
        raise InputError(
            f"run.toml asks for {config.rounds} rounds and {result['method']} has run {result['rounds']}; "
            "ask for as many or more, or start a new run with --config"
        )
    return "error" in result or result["rounds"] == config.rounds


def _job(
    job: Job,
    experiment: Experiment,
    folder: RunFolder,
    measured: bool,
    callbacks: tuple[Callback, ...],
    asked: threading.Event,
) -> dict[str, Any]:
    config, algorithm = experiment.config, experiment.algorithm(job.method)
    problem, start = experiment.problem_for(algorithm), experiment.start(algorithm)
    reporters = [callback for callback in callbacks if isinstance(callback, Reporter)]

    def tell(line: str) -> None:
        for reporter in reporters:
            reporter.tell(line)

    after, before, refused = checkpoints.newest(folder.checkpoints(job), algorithm, problem, start, settings(config))
    for line in refused:
        tell(line)
    done = 0 if after is None else after.t + 1
    if done >= config.rounds > 0:
        raise InputError(f"run.toml asks for {config.rounds} rounds and {job.method} has run {done}; ask for more")
    if measured:
        folder.forget_after(job, -1 if after is None else done)
    for reporter in reporters:
        reporter.begin(job.method, job.trial, done, config)
    closing: dict[str, Any] | None = None
    distributed.broadcast(lambda: _Task(job.method, config, folder.checkpoints(job), done))
    keeper = _Keeper(job, folder, config, asked)
    try:
        result, error = _rounds(job.method, experiment, after, before, (keeper, *callbacks))
        if error:
            tell(f"{job.method}: {error}")
        # a method that diverged soon after it was continued has measured nothing since, and has no model to keep
        records = result.records or folder.records(*job)
        closing = summary(records[-1]) if records else {"rounds": done}
        closing = folder.finish(
            job, closing | ({"error": error} if error else {}), None if error else _model(experiment, result.x)
        )
    finally:
        for reporter in reporters:
            reporter.end(closing)
    return closing


class _Task(NamedTuple):
    """What the other processes of a group must know of a job."""

    method: str
    config: Config
    checkpoints: Path
    done: int


def follow() -> None:
    """Compute what process 0 announces, until it announces nothing more."""
    experiment: Experiment | None = None
    while task := distributed.broadcast(_nothing):
        if experiment is None or experiment.config != task.config:
            experiment = prepare(task.config)
        algorithm = experiment.algorithm(task.method)
        problem, start = experiment.problem_for(algorithm), experiment.start(algorithm)
        after, before, _ = checkpoints.newest(task.checkpoints, algorithm, problem, start, settings(task.config))
        if task.done != (0 if after is None else after.t + 1):
            raise InputError(f"{task.checkpoints} is not what process 0 sees; give all machines the same folder")
        _rounds(task.method, experiment, after, before, (_Companion(task.config),))


def _nothing() -> _Task | None:
    return None


def _rounds(
    method: str,
    experiment: Experiment,
    after: Round | None,
    before: Record | None,
    callbacks: tuple[Callback, ...],
) -> tuple[Result, str | None]:
    """The rounds that are still to run, and what went wrong in them."""
    config, algorithm = experiment.config, experiment.algorithm(method)
    try:
        result = run(
            algorithm,
            experiment.problem_for(algorithm),
            rounds=config.rounds,
            every=config.eval_every,
            closing=config.eval_last,
            phi=experiment.phi,
            measure_gamma=experiment.measure_gamma,
            metrics=experiment.metrics(),
            callbacks=callbacks,
            history=False,
            start=experiment.start(algorithm),
            after=after,
            before=before,
            participation=config.participation,
            drop=config.drop,
            seed=config.seed,
            chunk=config.chunk,
            compile=config.compile,
        )
    except Diverged as diverged:
        return diverged.result, str(diverged)
    return result, None


def settings(config: Config) -> dict[str, Any]:
    """What the states of a run depend on; a setting of a later version that is not used leaves no trace."""
    return config.model_dump(mode="json", exclude=set(EXTENDABLE), exclude_defaults=True)


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


def _model(experiment: Experiment, x: Tensor) -> Model:
    problem = experiment.problem
    parameters = problem.parameters(x) if isinstance(problem, Network) else {"x": x}
    return Model(parameters, tuple(experiment.dataset.x_train.shape[1:]))


class _Keeper(Callback):
    """Writes measurements and checkpoints; stops after the round in which the user asked to."""

    def __init__(self, job: Job, folder: RunFolder, config: Config, asked: threading.Event) -> None:
        self.job, self.folder, self.config, self.asked = job, folder, config, asked

    def on_record(self, record: Record) -> None:
        self.folder.append(self.job, record)

    def on_round(self, round: Round, totals: Record) -> None:
        save, stop = _due(round, self.config, self.asked.is_set())
        if save:
            self.folder.flush()
            with clear_errors(self.folder.path):
                checkpoints.write(self.folder.checkpoints(self.job), round, totals, settings(self.config))
        if stop:
            raise Interrupted


class _Companion(Callback):
    """The keeper's part in the other processes of a group: their clients' states go to process 0."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def on_round(self, round: Round, totals: Record) -> None:
        save, stop = _due(round, self.config, False)
        if save:
            round.clients.tensors()
        if stop:
            raise Interrupted


def _due(round: Round, config: Config, asked: bool) -> tuple[bool, bool]:
    """Whether to write a checkpoint after this round, and whether to stop; the same in all processes."""
    done = round.t + 1
    if done == config.rounds:  # what comes next is the result itself
        return False, False
    stop = distributed.anywhere(asked)
    return stop or done % config.checkpoint_every == 0, stop


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Ctrl-C and termination set an event, so that a round is never left half done; a second Ctrl-C stops at once."""
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
