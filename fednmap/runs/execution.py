"""Running what a configuration asks for: every method, every trial, into one run folder."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
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
    Interrupted,
    Recorder,
    Reporter,
    RunInfo,
    StopFlag,
    Task,
    interrupts,
    run_and_record,
    stored_result,
)
from fednmap.runs.uplink_config import uplink_of
from fednmap.simulation import Callback, Patience, Record, TimeLimit, Tolerance, distributed, schedules, threads
from fednmap.simulation.participation import sampler_of
from fednmap.simulation.schedules import Schedule, schedule_of


class Order(NamedTuple):
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
    with locked(folder.path), interrupts() as asked:
        for line in folder.check_settings(config):
            reporter.message(line)
        stored = {job: stored_result(folder, job, config.rounds, stops_of(config)) for job in jobs}
        finished = {job: result for job, result in stored.items() if result is not None}
        if len(finished) == len(jobs):
            return [finished[job] for job in jobs]
        folder.repair()
        seeded = [config.model_copy(update={"seed": config.seed + trial}) for trial in range(config.trials)]
        orders = [Order(job, seeded[job.trial], folder.path) for job in jobs if job not in finished]
        if pool is not None and len(orders) > 1 and not callbacks:
            parallel = min(pool.count, len(orders))
            finished |= _run_in(pool, [order._replace(parallel=parallel) for order in orders], reporter, asked)
            folder.arrange(jobs)
            return [finished[job] for job in jobs]
        work = Worker(experiment, seeded[0])
        for order in orders:
            if asked.is_set():
                raise Interrupted
            announce = partial(_announce, order._replace(threads=threads.asked()))
            finished[order.job] = run_and_record(work.task(order), folder, (reporter, *callbacks), asked, announce)
    return [finished[job] for job in jobs]


def _announce(order: Order, done: int) -> None:
    distributed.broadcast(lambda: order._replace(done=done))


class Worker:
    """Runs one order after another, also in a process of a pool; what the last one was prepared from is kept.

    experiment: of the first order, prepared from `config`, which is by default its own.
    """

    def __init__(self, experiment: Experiment | None, config: Config | None = None) -> None:
        self._experiment = experiment
        self._config = experiment.config if experiment is not None and config is None else config

    def task(self, order: Order) -> Task:
        if self._experiment is None or self._config != order.config:
            self._experiment, self._config = prepare(order.config), order.config
        RunFolder(order.folder).check_data_digest(self._experiment.digest)
        return replace(task_of(order.job, self._experiment), parallel=order.parallel)

    def __call__(self, order: Order, send: Send) -> dict[str, Any]:
        with interrupts() as asked:
            return run_and_record(self.task(order), RunFolder(order.folder), (_Relay(send),), asked)

    def __reduce__(self) -> tuple[type[Worker], tuple[None]]:
        return Worker, (None,)  # where processes are spawned, each prepares its own


def follow() -> None:
    """Compute what process 0 announces, until it announces nothing more."""
    work = Worker(None)
    while order := distributed.broadcast(_nothing):
        threads.limit(order.threads)
        task, folder = work.task(order), RunFolder(order.folder)
        after, before, _ = task.found(folder)
        if order.done != (0 if after is None else after.t + 1):
            raise InputError(f"{order.folder} is not what process 0 sees; give all machines the same folder")
        earlier = [record for record in folder.records(*order.job) if 0 < order.done >= record["round"]]
        recorder = Recorder(task)
        result, _ = task.go(after, before, (recorder,), earlier)
        if result.ended and result.last is not None:
            recorder.save(result.last, result.totals)


def _nothing() -> Order | None:
    return None


def _run_in(pool: ProcessPool, orders: list[Order], reporter: Reporter, asked: StopFlag) -> dict[Job, dict[str, Any]]:
    """Run the jobs in the pool, with a reporter for each that has begun; return their closing numbers."""
    reporters: dict[int, Reporter] = {}

    def report(k: int, message: tuple[str, Any]) -> None:
        if k not in reporters:
            reporters[k] = reporter.clone()
        getattr(reporters[k], message[0])(message[1])

    return {orders[k].job: closing for k, closing in pool.run(orders, report, asked)}


class _Relay(Reporter):
    """Sends what it receives to the owner of the pool."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def begin(self, what: RunInfo) -> None:
        self._send(("begin", what))

    def on_record(self, record: Record) -> None:
        self._send(("on_record", record))

    def end(self, result: dict[str, Any] | None) -> None:
        self._send(("end", result))

    def message(self, line: str) -> None:
        self._send(("message", line))


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
        partial(saved_model, experiment),
        config.model_dump(mode="json", exclude={"algorithms", "set"}, exclude_none=True) | config.set,
        config.trials,
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
