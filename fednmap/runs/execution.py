"""Running what a configuration asks for: every method, every trial, into one run folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fednmap.core import Algorithm
from fednmap.decentralized.topologies import fingerprint
from fednmap.names import InputError
from fednmap.problems import Network
from fednmap.runs.configuration import Config
from fednmap.runs.experiment import Experiment, prepare, regularized
from fednmap.runs.files import locked
from fednmap.runs.folder import EXTENDABLE, Job, Model, RunFolder
from fednmap.runs.process_pool import ProcessPool, Send
from fednmap.runs.recording import (
    Companion,
    Interrupted,
    Reporter,
    RunInfo,
    StopFlag,
    Task,
    ended_by,
    interrupts,
    run_and_record,
)
from fednmap.runs.uplink_config import uplink_of
from fednmap.simulation import Callback, Patience, Record, TimeLimit, Tolerance, distributed, schedules, threads
from fednmap.simulation.participation import sampler_of
from fednmap.simulation.schedules import Schedule, schedule_of


def execute(
    config: Config,
    folder: RunFolder,
    reporter: Reporter,
    callbacks: tuple[Callback, ...] = (),
    experiment: Experiment | None = None,
    pool: ProcessPool | None = None,
) -> list[dict[str, Any]]:
    """Run what is not yet in the folder; the closing numbers of every method and trial, in order.

    A method whose iterates become non-finite is reported with what it had reached; the others go on.

    callbacks:  hear what the reporter hears; those that are reporters also when a method begins and ends.
    experiment: the first trial, if it has been prepared already.
    pool:       processes that run several methods or trials at a time; without callbacks.
    """
    jobs = [Job(method, trial) for trial in range(config.trials) for method in config.algorithms]
    with locked(folder.path), interrupts() as asked:
        for line in folder.check_settings(config):
            reporter.tell(line)
        ended = {Job(r["method"], r["trial"]): _finished(r, config, folder) for r in folder.results()}
        finished = {job: closing for job, closing in ended.items() if closing is not None}
        if all(job in finished for job in jobs):
            return [finished[job] for job in jobs]
        folder.repair()
        measured = folder.measured()
        pending = [job for job in jobs if job not in finished]
        if pool is not None and len(pending) > 1 and not callbacks:
            seeded = {job.trial: config.model_copy(update={"seed": config.seed + job.trial}) for job in pending}
            parallel = min(pool.count, len(pending))
            orders = [PoolJob(job, seeded[job.trial], folder.path, job in measured, parallel) for job in pending]
            finished |= _run_in(pool, orders, reporter, asked)
            folder.arrange(jobs)
            return [finished[job] for job in jobs]
        for job in pending:
            if asked.is_set():
                raise Interrupted
            if experiment is None or experiment.config.seed != config.seed + job.trial:
                experiment = prepare(config.model_copy(update={"seed": config.seed + job.trial}))
            folder.recognise(experiment.digest)
            task, order = task_of(job, experiment), _Order(job, experiment.config, folder.path, threads.asked())
            finished[job] = run_and_record(
                task,
                folder,
                (reporter, *callbacks),
                asked,
                measured=job in measured,
                announce=lambda done, order=order: distributed.broadcast(lambda: order._replace(done=done)),  # type: ignore[misc]
            )
    return [finished[job] for job in jobs]


def stops_of(config: Config) -> list[Callback]:
    """When a configuration asks a run to end early."""
    found: list[Callback] = []
    if config.tol is not None or config.tol_absolute is not None:
        found.append(Tolerance(config.tol, absolute=config.tol_absolute))
    if config.patience is not None:
        found.append(Patience(config.patience))
    if config.time_limit is not None:
        found.append(TimeLimit(config.time_limit))
    return found


def _finished(result: dict[str, Any], config: Config, folder: RunFolder) -> dict[str, Any] | None:
    """The closing numbers, if the rounds are done, or what the configuration says of stopping has ended them."""
    if "error" not in result and result["rounds"] > config.rounds:
        raise InputError(
            f"run.toml asks for {config.rounds} rounds and {result['method']} has run {result['rounds']}; "
            "ask for as many or more, or start a new run with --config"
        )
    if "error" in result or result["rounds"] == config.rounds:
        return result
    return ended_by(stops_of(config), result, folder.records(result["method"], result["trial"]))


class PoolJob(NamedTuple):
    """One method in one trial, as a process of a pool receives it."""

    job: Job
    config: Config
    folder: Path
    measured: bool
    parallel: int
    """How many jobs share the machine."""


def _run_in(pool: ProcessPool, orders: list[PoolJob], reporter: Reporter, asked: StopFlag) -> dict[Job, dict[str, Any]]:
    """Run the jobs in the pool, with a reporter for each that has begun; their closing numbers."""
    reporters: dict[int, Reporter] = {}

    def report(k: int, message: tuple[str, Any]) -> None:
        if k not in reporters:
            reporters[k] = reporter.clone()
        getattr(reporters[k], message[0])(message[1])

    return {orders[k].job: closing for k, closing in pool.run(orders, report, asked)}


class _Relay(Reporter):
    """Sends what it is told to the owner of the pool."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def begin(self, what: RunInfo) -> None:
        self._send(("begin", what))

    def on_record(self, record: Record) -> None:
        self._send(("on_record", record))

    def end(self, result: dict[str, Any] | None) -> None:
        self._send(("end", result))

    def tell(self, line: str) -> None:
        self._send(("tell", line))


class PoolWork:
    """Runs a job in a process of a pool."""

    def __init__(self, experiment: Experiment | None) -> None:
        self._experiment = experiment

    def __call__(self, order: PoolJob, send: Send) -> dict[str, Any]:
        experiment, folder = self._experiment, RunFolder(order.folder, shared=True)
        if experiment is None or experiment.config != order.config:
            experiment = self._experiment = prepare(order.config)
        folder.recognise(experiment.digest)
        task = replace(task_of(order.job, experiment), beside=order.parallel)
        with interrupts() as asked:
            return run_and_record(task, folder, (_Relay(send),), asked, measured=order.measured)

    def __reduce__(self) -> tuple[type[PoolWork], tuple[None]]:
        return PoolWork, (None,)  # where processes are spawned, each prepares its own


def task_of(job: Job, experiment: Experiment) -> Task:
    """What a configuration says about one method."""
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
        "participation": config.participation,
        "sampler": None if config.sampler == "uniform" else sampler_of(config.sampler, config.participation),
        "eta_a": scheduled_step(algorithm, config),
        "drop": config.drop,
        "seed": config.seed,
        "chunk": config.chunk,
        "uplink": uplink_of(config, algorithm, problem) or None,
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
        lambda x: saved_model(experiment, x),
        config.trials,
        config.model_dump(mode="json", exclude={"algorithms", "set"}, exclude_none=True) | config.set,
    )


def settings(config: Config) -> dict[str, Any]:
    """What the states of a run depend on; a setting of a later version that is not used leaves no trace."""
    told = config.model_dump(mode="json", exclude=set(extendable(config)), exclude_defaults=True)
    return told if config.topology is None else told | {"links": fingerprint(config.topology)}


def extendable(config: Config) -> frozenset[str]:
    """Settings that may be others when a run goes on."""
    return EXTENDABLE - ({"rounds"} if config.schedule.strip().startswith("cosine") else set())  # they decide the steps


def scheduled_step(algorithm: Algorithm, config: Config) -> Schedule | None:
    """eta_a as a function of the round, from the method's own on; None where it stays."""
    if config.schedule == "constant":
        return None
    return schedule_of(config.schedule, schedules.step_of(algorithm), config.rounds)


def saved_model(experiment: Experiment, x: Tensor) -> Model:
    """The model x as it is kept: by the names of parameters, columns and labels."""
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


class _Order(NamedTuple):
    """What the other processes of a group must know of a job."""

    job: Job
    config: Config
    folder: Path
    threads: int | None
    done: int = 0


def follow() -> None:
    """Compute what process 0 announces, until it announces nothing more."""
    experiment: Experiment | None = None
    while order := distributed.broadcast(_nothing):
        threads.limit(order.threads)
        if experiment is None or experiment.config != order.config:
            experiment = prepare(order.config)
        task, folder = task_of(order.job, experiment), RunFolder(order.folder)
        after, before, _ = task.found(folder)
        if order.done != (0 if after is None else after.t + 1):
            raise InputError(f"{order.folder} is not what process 0 sees; give all machines the same folder")
        earlier = [record for record in folder.records(*order.job) if 0 < order.done >= record["round"]]
        result, _ = task.go(after, before, (Companion(task),), earlier)
        if result.ended and result.last is not None:
            result.last.clients.tensors()  # process 0 writes a checkpoint


def _nothing() -> _Order | None:
    return None
