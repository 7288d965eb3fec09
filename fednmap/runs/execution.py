"""Running what a configuration asks for: every method, every trial, into one run folder.

Measurements and checkpoints are written as a method runs, model and closing numbers at its end. A run that was stopped
or killed continues from its last checkpoint, to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fednmap.asynchronous.method import CLOCK
from fednmap.core import Algorithm, Problem
from fednmap.decentralized.topologies import fingerprint
from fednmap.measure import quantity
from fednmap.names import InputError
from fednmap.problems import Network
from fednmap.runs import checkpoints
from fednmap.runs.atomic_files import locked
from fednmap.runs.configuration import Config
from fednmap.runs.experiment import Experiment, prepare, regularized
from fednmap.runs.folder import EXTENDABLE, MISSING, Job, Model, RunFolder
from fednmap.runs.process_pool import Interrupted, ProcessPool, Send, StopFlag, interrupts
from fednmap.runs.uplink_config import uplink_of
from fednmap.simulation import (
    Callback,
    Diverged,
    Patience,
    Record,
    Result,
    Round,
    TimeLimit,
    Tolerance,
    distributed,
    schedules,
    threads,
)
from fednmap.simulation.callbacks import final_reason
from fednmap.simulation.participation import sampler_of
from fednmap.simulation.schedules import Schedule, schedule_of
from fednmap.simulation.trajectory import run_and_measure

DONE = "all rounds done"
"""How a run ends that nothing ends earlier."""


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
        """Called when a method begins."""

    def end(self, result: dict[str, Any] | None) -> None:
        """Called when the method has ended, with its closing numbers; with None if it was stopped."""

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

    def latest_checkpoint(self, folder: RunFolder) -> tuple[Round | None, Record | None, list[str]]:
        """Return the state to continue from, its totals, and a line about each checkpoint that was refused."""
        where, measured = folder.checkpoints(self.job), partial(folder.measured, self.job)
        return checkpoints.newest(where, self.algorithm, self.problem, self.start, self.settings, measured)

    def recorder(self, folder: RunFolder | None, stop_flag: StopFlag | None = None) -> Recorder:
        """Return what writes its measurements and checkpoints."""
        return Recorder(self.job, self.settings, folder, self.rounds, self.checkpoint_every, stop_flag)

    def run(self, **given: Any) -> tuple[Result, str]:
        """Run the rounds that are not done yet; return the result, and the error if the iterates diverged."""
        given |= self.options | {"rounds": self.rounds, "start": self.start, "history": False}
        try:
            return run_and_measure(self.algorithm, self.problem, **given), ""
        except Diverged as diverged:
            return diverged.result, str(diverged)


class Recorder(Callback):
    """Writes measurements and checkpoints of a job; stops after the round in which the stop flag was set.

    settings: what the states depend on.
    folder:   None in the other processes of a group, which only send their clients' states to process 0.
    rounds:   of the run: after the last one there is no checkpoint, as the result follows.
    every:    rounds between checkpoints.
    """

    def __init__(
        self,
        job: Job,
        settings: dict[str, Any],
        folder: RunFolder | None,
        rounds: int = 0,
        every: int = 1,
        stop_flag: StopFlag | None = None,
    ) -> None:
        self.job, self.settings, self.folder = job, settings, folder
        self.rounds, self.every, self.stop_flag = rounds, every, stop_flag

    def on_record(self, record: Record) -> None:
        if self.folder is not None:
            self.folder.append(self.job, record)

    def on_round(self, round: Round, totals: Record) -> None:
        done = round.t + 1
        if done == self.rounds:  # what comes next is the result itself
            return
        stop = distributed.any_process(
            self.stop_flag is not None and self.stop_flag.is_set()
        )  # the same in all of them
        if stop or done % self.every == 0:
            self.save(round, totals)
        if stop:
            raise Interrupted

    def save(self, round: Round, totals: dict[str, Any]) -> None:
        """Write a checkpoint; its measurements are on disk before it."""
        if self.folder is None:
            round.clients.tensors()
            return
        self.folder.flush()
        where, measured = self.folder.checkpoints(self.job), self.folder.measured(self.job)
        checkpoints.write(where, round, totals, self.settings, measured)


def run_and_record(
    task: Task,
    folder: RunFolder,
    callbacks: Sequence[Callback],
    stop_flag: StopFlag,
    request: JobRequest | None = None,
) -> dict[str, Any]:
    """Run the rounds of the task that are not done yet; return its closing numbers, which are then in the folder.

    stop_flag: set when the user wants to stop.
    request: what the other processes of a group are to compute too.
    """
    job, reporters = task.job, [callback for callback in callbacks if isinstance(callback, Reporter)]

    def message(line: str) -> None:
        for reporter in reporters:
            reporter.message(line)

    after, before, refused = task.latest_checkpoint(folder)
    for line in refused:
        message(line)
    done = 0 if after is None else after.t + 1
    if done >= task.rounds > 0:
        raise InputError(
            f"expected more than the {done} rounds that {job.method} has run, got rounds = {task.rounds}; give more"
        )
    folder.delete_after(job, -1 if after is None else done)
    for reporter in reporters:
        reporter.begin(RunInfo(job, done, task.rounds, task.trials, task.facts))
    closing: dict[str, Any] | None = None
    if request is not None:
        distributed.broadcast(lambda: request._replace(done=done))
    try:
        earlier, recorder = folder.records(*job), task.recorder(folder, stop_flag)
        result, error = task.run(after=after, before=before, callbacks=(recorder, *callbacks), earlier=earlier)
        if error:
            message(f"{job.method}: {error}")
        if result.warning:
            message(f"warning: {job.method}: {result.warning}")
        if result.ended and result.last is not None:  # a later call may continue
            recorder.save(result.last, result.totals)
        # a method that diverged soon after it was continued has measured nothing since, and has no model to keep
        records = result.records or earlier
        facts = summary(records[-1]) if records else {"rounds": done}
        more = {
            "measure_gamma": result.measure_gamma,
            "jobs": task.parallel if task.parallel > 1 else None,
            "error": error,
            "ended": "" if error else result.ended or DONE,
            "ended_by": result.ended_by,
            "warning": result.warning,
        }
        facts |= {name: value for name, value in more.items() if value}
        closing = folder.finish(job, facts, None if error else task.saved(result.x))
    finally:
        for reporter in reporters:
            reporter.end(closing)
    return closing


def stored_result(
    folder: RunFolder,
    job: Job,
    rounds: int,
    stops: Sequence[Callback],
    message: Callable[[str], None],
    enders: Sequence[str] = (),
) -> dict[str, Any] | None:
    """Return the closing numbers of a job that is complete: all rounds are done, or a stopping rule still holds.

    A job whose files were damaged has something left: its last rounds, from the checkpoint before them.

    stops:   stopping rules, which are evaluated again.
    message: receives what is damaged.
    enders:  names of callbacks; a run that one of them ended is not continued.
    """
    found = folder.result(job)
    if found is not None and found["rounds"] <= rounds and (damage := folder.damage(job)):
        message(f"{damage}; {job} is run again from its last intact checkpoint")
        checkpoints.drop(folder.checkpoints(job), found["rounds"])
        return None
    if found is None or "error" in found or found["rounds"] == rounds:
        return found
    if found["rounds"] > rounds:
        raise InputError(
            f"expected at least the {found['rounds']} rounds that {job.method} in {folder.path} has run, got rounds = "
            f"{rounds}; give as many or more, or start a new run"
        )
    records = folder.records(*job)
    if found.get("ended_by") in enders or not records:
        return found if records else None
    reason = final_reason(stops, records)
    return found | {"ended": reason} if reason is not None else None


def summary(record: Record) -> dict[str, Any]:
    """Return the closing numbers, as `--json` prints them; what was not measured is left out."""
    return {
        "rounds": int(record["round"]),
        **{k: v for k, v in record.items() if not quantity(k).cost or k in CLOCK},
        "test_accuracy": record.get("test_accuracy"),
        "bytes_up": int(record["bytes_up"]),
        "bytes_down": int(record["bytes_down"]),
        "seconds": record["train_seconds"] + record["eval_seconds"],
        "train_seconds": record["train_seconds"],
        "eval_seconds": record["eval_seconds"],
    }


class JobRequest(NamedTuple):
    """One method in one trial, as another process receives it."""

    job: Job
    config: Config
    folder: Path
    parallel: int = 1
    """How many jobs share the machine."""
    threads: int | None = None
    """Of each process that shares the clients."""
    done: int = 0


def execute(
    config: Config,
    folder: RunFolder,
    reporter: Reporter,
    callbacks: tuple[Callback, ...] = (),
    experiment: Experiment | None = None,
    pool: ProcessPool | None = None,
) -> list[dict[str, Any]]:
    """Run what is not yet in the folder; return the closing numbers of every method and trial, in order.

    A method whose iterates become non-finite is reported with what it had reached; the others continue.

    callbacks:  receive what the reporter receives.
    experiment: the first trial, if it has been prepared already.
    pool:       processes that run several methods or trials at a time; without callbacks.
    """
    jobs = [Job(method, trial) for trial in range(config.trials) for method in config.algorithms]
    with locked(folder.path), interrupts() as stop_flag:
        for line in folder.check_settings(config.model_dump(mode="json")):
            reporter.message(line)
        for line in folder.changed_files():
            reporter.message(line)
        stored = {job: stored_result(folder, job, config.rounds, stops_of(config), reporter.message) for job in jobs}
        finished = {job: result for job, result in stored.items() if result is not None}
        if len(finished) == len(jobs):
            if not folder.is_complete():
                reporter.message(f"{MISSING}; it is written again")
                folder.write_checksums()
            return [finished[job] for job in jobs]
        folder.remove_checksums()
        folder.repair()
        seeded = [config.model_copy(update={"seed": config.seed + trial}) for trial in range(config.trials)]
        requests = [JobRequest(job, seeded[job.trial], folder.path) for job in jobs if job not in finished]
        if pool is not None and len(requests) > 1 and not callbacks:
            parallel = min(pool.count, len(requests))
            finished |= _run_in(
                pool, [request._replace(parallel=parallel) for request in requests], reporter, stop_flag
            )
        else:
            work = Worker(experiment, seeded[0])
            for request in requests:
                if stop_flag.is_set():
                    raise Interrupted
                request = request._replace(threads=threads.current_limit())
                finished[request.job] = run_and_record(
                    work.task(request), folder, (reporter, *callbacks), stop_flag, request
                )
        folder.sort_jobs(jobs)
        folder.write_checksums()
    return [finished[job] for job in jobs]


class Worker:
    """Runs one request after another, also in a process of a pool; keeps the last prepared experiment.

    experiment: that of the first request, prepared from `config`; default: the experiment's own configuration.
    """

    def __init__(self, experiment: Experiment | None, config: Config | None = None) -> None:
        self._experiment = experiment
        self._config = experiment.config if experiment is not None and config is None else config

    def task(self, request: JobRequest) -> Task:
        if self._experiment is None or self._config != request.config:
            self._experiment, self._config = prepare(request.config), request.config
        RunFolder(request.folder).check_data_digest(self._experiment.digest)
        return replace(task_of(request.job, self._experiment), parallel=request.parallel)

    def __call__(self, request: JobRequest, send: Send) -> dict[str, Any]:
        with interrupts() as stop_flag:
            return run_and_record(self.task(request), RunFolder(request.folder), (_Relay(send),), stop_flag)

    def __reduce__(self) -> tuple[type[Worker], tuple[None]]:
        return Worker, (None,)  # where processes are spawned, each prepares its own


def run_as_worker() -> None:
    """Compute the requests that process 0 broadcasts, until it broadcasts None."""
    work = Worker(None)
    while request := distributed.broadcast(_nothing):
        threads.limit(request.threads)
        task, folder = work.task(request), RunFolder(request.folder)
        after, before, _ = task.latest_checkpoint(folder)
        if request.done != (0 if after is None else after.t + 1):
            raise InputError(f"{request.folder} is not what process 0 sees; give all machines the same folder")
        earlier = [record for record in folder.records(*request.job) if 0 < request.done >= record["round"]]
        recorder = task.recorder(None)
        result, _ = task.run(after=after, before=before, callbacks=(recorder,), earlier=earlier)
        if result.ended and result.last is not None:
            recorder.save(result.last, result.totals)


def _nothing() -> JobRequest | None:
    return None


def _run_in(
    pool: ProcessPool, requests: list[JobRequest], reporter: Reporter, stop_flag: StopFlag
) -> dict[Job, dict[str, Any]]:
    """Run the jobs in the pool, with a reporter for each that has begun; return their closing numbers."""
    reporters: dict[int, Reporter] = {}

    def report(k: int, message: tuple[str, Any]) -> None:
        if k not in reporters:
            reporters[k] = reporter.clone()
        getattr(reporters[k], message[0])(message[1])

    return {requests[k].job: closing for k, closing in pool.run(requests, report, stop_flag)}


class _Relay(Reporter):
    """Sends what it receives to the owner of the pool."""

    def __init__(self, send: Send) -> None:
        for name in ("begin", "on_record", "end", "message"):
            setattr(self, name, lambda value, name=name: send((name, value)))


def stops_of(config: Config) -> list[Callback]:
    """Return the reasons to end early that a configuration names."""
    found: list[Callback] = []
    if config.tol is not None or config.tol_absolute is not None:
        found.append(Tolerance(config.tol, absolute=config.tol_absolute))
    if config.patience is not None:
        found.append(Patience(config.patience))
    if config.time_limit is not None:
        found.append(TimeLimit(config.time_limit))
    return found


def task_of(job: Job, experiment: Experiment) -> Task:
    """Return what a configuration says about one method."""
    config, algorithm = experiment.config, experiment.algorithm(job.method)
    problem = experiment.problem_for(algorithm)
    options: dict[str, Any] = {
        "every": config.eval_every,
        "closing": config.eval_last,
        "phi": experiment.phi,
        "measure_gamma": experiment.measure_gamma,
        "metrics": experiment.metrics(),
        "sample": experiment.sample,
        "stop": stops_of(config),
        "eta_a": scheduled_step(algorithm, config),
        "chunk": config.chunk,
        **simulated(config, algorithm, problem),
    }
    return Task(
        job,
        algorithm,
        problem,
        experiment.start(algorithm),
        config.rounds,
        config.checkpoint_every,
        settings(config),
        options,
        partial(saved_model, experiment),
        config.model_dump(mode="json", exclude={"algorithms", "set"}, exclude_none=True) | config.set,
        config.trials,
    )


def simulated(config: Config, algorithm: Algorithm, problem: Problem) -> dict[str, Any]:
    """Return the options of `simulate` that a configuration names: who takes part, what is lost, what is sent."""
    return {
        "participation": config.participation,
        "sampler": None if config.sampler == "uniform" else sampler_of(config.sampler, config.participation),
        "drop": config.drop,
        "seed": config.seed,
        "uplink": uplink_of(config, algorithm, problem) or None,
    }


def settings(config: Config) -> dict[str, Any]:
    """Return what the states of a run depend on; a setting of a later version that is not used leaves no trace."""
    found = config.model_dump(mode="json", exclude=set(extendable(config)), exclude_defaults=True)
    found |= {
        old: found.pop(new) for old, new in Config.RENAMED.items() if new in found
    }  # as older checkpoints have it
    return found if config.topology is None else found | {"links": fingerprint(config.topology)}


def extendable(config: Config) -> frozenset[str]:
    """Settings that may differ when a run continues."""
    return EXTENDABLE - ({"rounds"} if config.schedule.strip().startswith("cosine") else set())  # they decide the steps


def scheduled_step(algorithm: Algorithm, config: Config) -> Schedule | None:
    """Return eta_a as a function of the round, from the method's own on; None where it stays."""
    if config.schedule == "constant":
        return None
    return schedule_of(config.schedule, schedules.step_of(algorithm), config.rounds)


def saved_model(experiment: Experiment, x: Tensor) -> Model:
    """Return the model x as it is kept: by the names of parameters, columns and labels."""
    problem = experiment.problem
    parameters = problem.parameters(x) if isinstance(problem, Network) else {"x": x}
    data = experiment.dataset
    scaling = tuple(tuple(part.tolist()) for part in data.scaling) if data.scaling else ((), ())
    return Model(
        parameters,
        tuple(data.x_train.shape[1:]),
        data.features,
        data.labels,
        regularized(problem) is not None,
        scaling,  # type: ignore[arg-type]
    )
