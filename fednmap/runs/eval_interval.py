"""`--eval-every auto`: how often a run can be measured without waiting for it."""

from __future__ import annotations

import time
from statistics import median

from fednmap.measure import evaluate
from fednmap.runs.execution import task_of
from fednmap.runs.experiment import Experiment
from fednmap.runs.folder import Job
from fednmap.simulation import Diverged, simulate
from fednmap.simulation.sums import divided
from fednmap.simulation.threads import Crew

SHARE = 0.1
"""Of the time of a run that measurements may take."""

STEPS: tuple[int, ...] = tuple(digit * 10**power for power in range(5) for digit in (1, 2, 5))
TRIED = 5  # rounds of each method, a measurement after each
OPTIONS = ("participation", "sampler", "eta_a", "drop", "seed", "chunk", "uplink")


def measured_every(experiment: Experiment) -> int:
    """Rounds between measurements that keep these at a tenth of the time: a round number, the same for all methods.

    A few rounds of every method are timed, and a measurement after each of them; the method whose rounds take least
    decides. The number becomes part of the configuration, so that trials, workers and resumed runs measure alike.
    """
    timed = (_seconds(experiment, name) for name in experiment.config.algorithms)
    return max(every(measurement, round, experiment.config.rounds) for measurement, round in timed)


def every(measurement: float, round: float, rounds: int) -> int:
    """The smallest of 1, 2, 5, 10, 20, ... rounds whose measurement takes at most a tenth of all; at most `rounds`.

    >>> every(1.0, 1.0, 300), every(0.01, 1.0, 300), every(9.0, 0.01, 300)
    (10, 1, 300)
    """
    needed = (1 / SHARE - 1) * measurement / max(round, 1e-9)
    return max(1, min(rounds, next((step for step in STEPS if step >= needed), STEPS[-1])))


def _seconds(experiment: Experiment, name: str) -> tuple[float, float]:
    """Of a measurement, and of a round of this method."""
    task, crew, metrics = task_of(Job(name, 0), experiment), Crew(), experiment.metrics().values()
    whole, options = divided(experiment.sample or task.problem, crew), {key: task.options[key] for key in OPTIONS}
    times = []
    try:
        running = simulate(task.algorithm, task.problem, rounds=min(TRIED, task.rounds), start=task.start, **options)
        while True:
            began = time.perf_counter()
            last = next(running, None)
            between = time.perf_counter()
            if last is None:
                break
            x = task.algorithm.model(last.server)
            evaluate(whole, experiment.phi, x, experiment.measure_gamma)
            for metric in metrics:
                metric(x)
            times.append((time.perf_counter() - between, between - began))
    except Diverged:  # which the run will tell
        pass
    finally:
        crew.end()
    if len(times) < 2:
        return 0.0, 1.0
    measurements, rounds = zip(*times[1:], strict=True)  # the first time other things are made too
    return median(measurements), median(rounds)
