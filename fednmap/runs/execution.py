"""Running what a configuration asks for: every method, every trial, into one run folder.

Measurements and checkpoints are written as a method runs, model and closing numbers at its end. A run that was stopped
or killed continues from its last checkpoint, to the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
from fednmap.simulation import Diverged, Result, Round, distributed, schedules, threads
from fednmap.simulation.callbacks import Callback, Patience, Record, TimeLimit, Tolerance, final_reason
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


class Recorder(Callback):
    """Write the run of one method into its folder: measurements, checkpoints, the model and the closing numbers.

    config:    the settings, of which the first method is recorded; or the Task that is run.
    stop_flag: set when the user wants to stop: after its round the state is saved and Interrupted is raised.
    writes:    False in the other processes of a group, which only send their clients' states to process 0.

    >>> recorder = Recorder(config, RunFolder.create(path, config, "train"))  # doctest: +SKIP
    >>> recorder.record(0, {"objective": 2.3, **totals})  # doctest: +SKIP
    >>> recorder.finish(model, ended="all rounds done")  # doctest: +SKIP
    """

    def __init__(
        self, config: Config | Task, folder: RunFolder, stop_flag: StopFlag | None = None, writes: bool = True
    ) -> None:
        self.config, self.folder, self.stop_flag, self.writes = config, folder, stop_flag, writes
        if isinstance(config, Task):
            self.job, self.settings = config.job, config.settings
        else:
            self.job, self.settings = Job(config.algorithms[0], 0), settings(config)
        self.last: Record | None = None

    def latest(
        self, algorithm: Algorithm, start: Tensor, clients: int | None = None
    ) -> tuple[checkpoints.Checkpoint | None, list[str]]:
        """Return the checkpoint to continue from, and a line about each that was refused.

        clients: their number; None where they store their states themselves.
        """
        where, measured = self.folder.checkpoints(self.job), partial(self.folder.measured, self.job)
        return checkpoints.newest(where, algorithm, start, self.settings, clients, measured)

    def restart(self, after: checkpoints.Checkpoint | None) -> list[Record]:
        """Delete the measurements of rounds that will be run again; return the others."""
        self.folder.delete_after(self.job, -1 if after is None else after.t + 1)
        records = self.folder.records(*self.job)
        self.last = records[-1] if records else None
        return records

    def record(self, round: int, metrics: Mapping[str, float]) -> None:
        """Append what was measured after this many rounds to metrics.csv."""
        # a value that could not be measured this time is NaN: without it the measurement would look half written
        self.last = {**dict.fromkeys(self.last or (), math.nan), **metrics, "round": round}
        if self.writes:
            self.folder.append(self.job, self.last)

    def save(self, kept: checkpoints.Checkpoint, clients: Mapping[str, Tensor] | None = None) -> None:
        """Write a checkpoint; its measurements are on disk before it."""
        if self.writes:
            self.folder.flush()
            where, measured = self.folder.checkpoints(self.job), self.folder.measured(self.job)
            checkpoints.write(where, kept, self.settings, clients, measured)

    def finish(self, model: Model | None = None, **facts: Any) -> dict[str, Any]:
        """Store the model and the closing numbers: the last measurement and `facts`; return them."""
        closing = {} if self.last is None else summary(self.last)
        return self.folder.finish(self.job, closing | facts, model)

    def on_record(self, record: Record) -> None:
        self.record(int(record["round"]), record)

    def on_round(self, round: Round, totals: Record) -> None:
        done = round.t + 1
        if done == self.config.rounds:  # what comes next is the result itself
            return
        asked = self.stop_flag is not None and self.stop_flag.is_set()
        stop = distributed.any_process(asked)  # the same in all of them
        if stop or done % self.config.checkpoint_every == 0:
            self.save_round(round, totals)
        if stop:
            raise Interrupted

    def save_round(self, round: Round, totals: Record) -> None:
        """Write a checkpoint of a simulation; all processes of a group give their clients' states."""
        self.save(checkpoints.Checkpoint(round.t, round.server, totals), round.clients.tensors())


def _run(
    task: Task,
    recorder: Recorder,
    kept: checkpoints.Checkpoint | None,
    earlier: Sequence[Record],
    callbacks: Sequence[Callback] = (),
) -> tuple[Result, str]:
    """Run the rounds that are not done yet; return the result, and the error if the iterates diverged."""
    given: dict[str, Any] = task.options | {"rounds": task.rounds, "start": task.start, "earlier": earlier}
    if kept is not None:
        given |= {"after": kept.as_round(), "before": kept.totals}
    try:
        result = run_and_measure(task.algorithm, task.problem, callbacks=(recorder, *callbacks), history=False, **given)
    except Diverged as diverged:
        return diverged.result, str(diverged)
    if result.ended and result.last is not None:  # a later call may continue
        recorder.save_round(result.last, result.totals)
    return result, ""


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

    recorder = Recorder(task, folder, stop_flag)
    kept, refused = recorder.latest(task.algorithm, task.start, task.problem.n)
    for line in refused:
        message(line)
    done = 0 if kept is None else kept.t + 1
    if done >= task.rounds > 0:
        raise InputError(
            f"expected more than the {done} rounds that {job.method} has run, got rounds = {task.rounds}; give more"
        )
    earlier = recorder.restart(kept)
    for reporter in reporters:
        reporter.begin(RunInfo(job, done, task.rounds, task.trials, task.facts))
    closing: dict[str, Any] | None = None
    if request is not None:
        distributed.broadcast(lambda: request._replace(done=done))
    try:
        result, error = _run(task, recorder, kept, earlier, callbacks)
        if error:
            message(f"{job.method}: {error}")
        if result.warning:
            message(f"warning: {job.method}: {result.warning}")
        facts = {
            "rounds": done if recorder.last is None else None,
            "measure_gamma": result.measure_gamma,
            "jobs": task.parallel if task.parallel > 1 else None,
            "error": error,
            "ended": "" if error else result.ended or DONE,
            "ended_by": result.ended_by,
            "warning": result.warning,
        }
        known = {name: value for name, value in facts.items() if value not in (None, "")}
        closing = recorder.finish(None if error else task.saved(result.x), **known)
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
    shown = {k: v for k, v in record.items() if not quantity(k).cost or k in CLOCK}
    seconds = {k: record[k] for k in ("train_seconds", "eval_seconds")}
    found = {"rounds": int(record["round"]), **shown, "test_accuracy": record.get("test_accuracy")}
    found |= {k: int(record[k]) for k in ("bytes_up", "bytes_down")}
    return found | {"seconds": sum(seconds.values())} | seconds


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
            given = [request._replace(parallel=parallel) for request in requests]
            finished |= _run_in(pool, given, reporter, stop_flag)
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

    def nothing() -> JobRequest | None:
        return None

    while request := distributed.broadcast(nothing):
        threads.limit(request.threads)
        task = work.task(request)
        recorder = Recorder(task, RunFolder(request.folder), writes=False)
        kept, _ = recorder.latest(task.algorithm, task.start, task.problem.n)
        if request.done != (0 if kept is None else kept.t + 1):
            raise InputError(f"{request.folder} is not what process 0 sees; give all machines the same folder")
        records = recorder.folder.records(*request.job)
        _run(task, recorder, kept, [record for record in records if 0 < request.done >= record["round"]])


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
    tolerant = config.tol is not None or config.tol_absolute is not None
    found: list[Callback] = [Tolerance(config.tol, absolute=config.tol_absolute)] if tolerant else []
    found += [Patience(config.patience)] if config.patience is not None else []
    return found + ([TimeLimit(config.time_limit)] if config.time_limit is not None else [])


def task_of(job: Job, experiment: Experiment) -> Task:
    """Return what a configuration says about one method."""
    config, algorithm = experiment.config, experiment.algorithm(job.method)
    problem = experiment.problem_for(algorithm)
    measured: dict[str, Any] = {"every": config.eval_every, "closing": config.eval_last, "phi": experiment.phi}
    measured |= {"measure_gamma": experiment.measure_gamma, "metrics": experiment.metrics()}
    measured |= {"sample": experiment.sample, "stop": stops_of(config)}
    how = {"eta_a": scheduled_step(algorithm, config), "chunk": config.chunk}
    return Task(
        job,
        algorithm,
        problem,
        experiment.start(algorithm),
        config.rounds,
        config.checkpoint_every,
        settings(config),
        measured | how | simulated(config, algorithm, problem),
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
    # under the names that older checkpoints have
    found |= {old: found.pop(new) for old, new in Config.RENAMED.items() if new in found}
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
    shift, scale = (tuple(part.tolist()) for part in data.scaling or (x[:0], x[:0]))
    inputs, intercept = tuple(data.x_train.shape[1:]), regularized(problem) is not None
    return Model(parameters, inputs, data.features, data.labels, intercept, (shift, scale))
