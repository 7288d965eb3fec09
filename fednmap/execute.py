"""Running what a configuration asks for: every method, every trial, into one run folder."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor

from fednmap.config import Config
from fednmap.experiment import Experiment, prepare
from fednmap.problems import Network
from fednmap.runs import RunFolder
from fednmap.simulation import Callback, Diverged, Record, Round, run


class Interrupted(Exception):
    """The user asked to stop; the state is saved."""


class Reporter(Callback):
    """Also hears which method begins and what must be told; the default says nothing."""

    def begin(self, method: str, trial: int, done: int, config: Config) -> None:
        """A method begins, after `done` rounds of an earlier call."""

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

    experiment: the first trial, if it has been prepared already.
    """
    finished = {(r["method"], r["trial"]): r for r in folder.results()}
    jobs = [(method, trial) for trial in range(config.trials) for method in config.algorithms]
    with _interrupts() as asked:
        for method, trial in jobs:
            if (method, trial) in finished:
                continue
            if experiment is None or experiment.config.seed != config.seed + trial:
                experiment = prepare(config.model_copy(update={"seed": config.seed + trial}))
            finished[method, trial] = _job(method, trial, experiment, folder, reporter, callbacks, asked)
    return [finished[job] for job in jobs]


def _job(
    method: str,
    trial: int,
    experiment: Experiment,
    folder: RunFolder,
    reporter: Reporter,
    callbacks: tuple[Callback, ...],
    asked: threading.Event,
) -> dict[str, Any]:
    config, algorithm = experiment.config, experiment.algorithm(method)
    problem, start = experiment.problem_for(algorithm), experiment.start(algorithm)
    after, before, refused = folder.restore(method, trial, algorithm, problem, start)
    for line in refused:
        reporter.tell(line)
    done = -1 if after is None else after.t + 1
    folder.forget_after(method, trial, done)
    reporter.begin(method, trial, max(done, 0), config)
    keeper = _Keeper(method, trial, folder, config, asked)
    error = None
    try:
        result = run(
            algorithm,
            problem,
            rounds=config.rounds,
            every=config.eval_every,
            phi=experiment.phi,
            measure_gamma=experiment.measure_gamma,
            metrics=experiment.metrics(),
            callbacks=(keeper, reporter, *callbacks),
            start=start,
            after=after,
            before=before,
            participation=config.participation,
            loss=config.loss,
            seed=config.seed,
            chunk=config.chunk,
        )
    except Diverged as diverged:
        result, error = diverged.result, str(diverged)
        reporter.tell(f"{method}: {error}")
    x = result.x
    closing = summary(folder.records(method, trial)[-1]) | ({"error": error} if error else {})
    folder.finish(method, trial, closing, _parameters(experiment, x))
    return {"method": method, "trial": trial, **closing}


def summary(record: Record) -> dict[str, Any]:
    """The closing numbers, as `--json` prints them."""
    return {
        "rounds": int(record["round"]),
        **{k: record[k] for k in ("objective", "loss", "stationarity", "zeros", "hoyer")},
        "test_accuracy": record.get("test_accuracy"),
        **{k: record[k] for k in ("support_precision", "support_recall") if k in record},
        "bytes_up": int(record["bytes_up"]),
        "bytes_down": int(record["bytes_down"]),
        "seconds": record["train_seconds"] + record["eval_seconds"],
        "train_seconds": record["train_seconds"],
        "eval_seconds": record["eval_seconds"],
    }


def _parameters(experiment: Experiment, x: Tensor) -> dict[str, Tensor]:
    problem = experiment.problem
    return problem.parameters(x) if isinstance(problem, Network) else {"x": x}


class _Keeper(Callback):
    """Writes measurements and checkpoints; stops after the round in which the user asked to."""

    def __init__(self, method: str, trial: int, folder: RunFolder, config: Config, asked: threading.Event) -> None:
        self.method, self.trial, self.folder, self.config, self.asked = method, trial, folder, config, asked

    def on_record(self, record: Record) -> None:
        self.folder.append(self.method, self.trial, record)

    def on_round(self, round: Round, totals: Record) -> None:
        done = round.t + 1
        if self.asked.is_set() or (done % self.config.checkpoint_every == 0 and done < self.config.rounds):
            self.folder.save(self.method, self.trial, round, totals)
        if self.asked.is_set():
            raise Interrupted


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
