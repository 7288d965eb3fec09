"""`fednmap tune`: step sizes for FedNMap; and the numbers for which other commands take the word `auto`.

`--eta-a auto` and `--gamma auto` become ordinary numbers before the run: in one step where the smoothness of f is known
and gradients are exact; else by pilots, which together take a tenth of the run's rounds, and at least 40.
`--eval-every auto` keeps measurements at a tenth of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Annotated, Any

import typer

from fednmap.commands.options import (
    AUTO,
    ConfigFile,
    Jobs,
    Json,
    Threads,
    TrustCode,
    settings_of,
    take_threads,
    with_config,
)
from fednmap.data import Dataset
from fednmap.names import InputError
from fednmap.report.progress import waiting
from fednmap.runs.atomic_files import json_text
from fednmap.runs.configuration import STOPPING, Config
from fednmap.runs.execution import simulated, task_of
from fednmap.runs.experiment import Experiment, load, prepare
from fednmap.runs.folder import Job
from fednmap.runs.process_pool import how_many, parallel_map
from fednmap.simulation import Diverged
from fednmap.simulation.trajectory import run_and_measure
from fednmap.theory.pilots import FEWEST, PILOTS, SHORTEST, Tuned
from fednmap.theory.pilots import tune as run_pilots
from fednmap.theory.steps_from_smoothness import steps_from_smoothness

HIDDEN = ("trials", "eval_every", "eval_last", "eval_samples", "checkpoint_every", "chunk", *STOPPING)
PILOT_SHARE = 10  # one round of pilots for so many rounds of the run
MEASURE_SHARE = 0.1
"""Of the time of a run that measurements may take."""
STEPS: tuple[int, ...] = tuple(digit * 10**power for power in range(5) for digit in (1, 2, 5))
TRIED = 5  # rounds of each method that are timed, a measurement after each


@with_config(hidden=HIDDEN)
def tune(
    values: dict[str, Any],
    config: ConfigFile = None,
    trust_code: TrustCode = False,
    budget: Annotated[
        int | None, typer.Option(help="Rounds that all pilots may take together. [default: 16 pilots of <= 100 rounds]")
    ] = None,
    residual_only: Annotated[
        bool, typer.Option("--residual-only", help="Judge by the residual alone, even at a saddle of all-zero weights.")
    ] = False,
    jobs: Jobs = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Find eta_a and gamma for FedNMap: the guaranteed pair, and the best of short pilot runs.

    If one is given on the command line, only the other is searched. Values in a TOML file are ignored.

    Example: fednmap tune --data digits --model logistic
    """
    take_threads(threads)
    base = settings_of(config, trust_code)
    given, _ = take_auto({name: value for name, value in base.items() if name not in AUTO} | values)
    auto = tuple(name for name in AUTO if name not in given)
    if not auto:
        raise InputError("eta_a and gamma are both given, so that there is nothing to find; leave one of them out")
    checked, count = Config.make(**given), how_many(jobs, PILOTS)
    for name in ("schedule", "memory"):
        if (value := getattr(checked, name)) != Config.model_fields[name].default:
            raise InputError(f"expected a constant step and no memory, got {name} {value}; leave it out")
    check_auto(checked, auto)
    options: dict[str, Any] = {"budget": budget, "residual_only": residual_only}
    with waiting(f"loading {checked.data}, and looking for step sizes by pilot runs"):
        found = search(prepare(checked), auto, parallel_map=partial(parallel_map, count=count), **options)
    if json:
        best = {"eta_a": found.eta_a, "gamma": found.gamma, "stationarity": found.pilot and found.pilot.score}
        safe = {"eta_a": found.guaranteed_eta_a, "gamma": found.guaranteed_gamma}
        measured = {"L": found.L, "rho": found.rho, "sigma2": found.sigma2}
        more = {name: getattr(found, name) for name in ("measure_gamma", "budget", "rounds_used")}
        pilots = [asdict(pilot) for pilot in found.pilots]
        print(json_text(best | {"guaranteed": safe, "measured": measured} | more | {"pilots": pilots}))
        return
    print("\n".join(found.lines()))
    print(f"use it with: fednmap train ... --eta-a {found.eta_a:.4g} --gamma {found.gamma:.4g}")


def take_auto(values: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the settings without those that are `auto`, and which these are."""
    auto = tuple(name for name in AUTO if values.get(name) == "auto")
    return {name: value for name, value in values.items() if name not in auto}, auto


def settle(config: Config, auto: tuple[str, ...], message: Callable[[str], None]) -> tuple[Config, Experiment | None]:
    """Put numbers where `auto` was, so that the run can be repeated and resumed.

    Return the configuration, and the experiment that was prepared for it; None if nothing was `auto`.
    """
    if not auto:
        return config, None
    if "fednmap" not in config.algorithms:
        raise InputError(f"auto finds FedNMap's step sizes; for {', '.join(config.algorithms)} give numbers")
    if "eta_a" in auto and config.gamma is None:
        auto = AUTO  # they belong together
    check_auto(config, auto)
    loaded = load(config)
    if not config.batch_size and (found := _from_smoothness(config, auto, loaded, message)) is not None:
        return found
    experiment = prepare(config, loaded)
    pilots = search(experiment, auto, budget=max(FEWEST * SHORTEST, config.rounds // PILOT_SHARE))
    for line in pilots.lines():
        message(line)
    steps = {name: getattr(pilots, name) for name in (*auto, "measure_gamma")}
    return config.model_copy(update=steps), experiment.with_settings(**steps)


def _from_smoothness(
    config: Config, auto: tuple[str, ...], loaded: Dataset, message: Callable[[str], None]
) -> tuple[Config, Experiment] | None:
    """Take steps from the smoothness of f; with them one local step and float64, unless the user said otherwise.

    Local steps on exact gradients cost Q times as much and save no rounds (docs/rounds.md).
    """
    settled = {"local_steps": 1, "dtype": "float64"}
    config = config.model_copy(update={k: v for k, v in settled.items() if k not in config.model_fields_set})
    experiment = prepare(config, loaded)
    method: Any = experiment.algorithm("fednmap")  # as `set` has it
    everybody = config.participation == 1 and config.drop == 0 and config.sampler == "uniform"
    found = steps_from_smoothness(
        experiment.problem,
        experiment.phi,
        everybody=everybody,
        memory=int(config.set.get("fednmap.memory", config.memory)),
        Q=method.Q,
        eta_s=method.eta_s,
        eta_a=None if "eta_a" in auto else config.eta_a,
        gamma=None if "gamma" in auto else config.gamma,
    )
    if found is None:
        return None
    message(f"{found.line()}; {method.Q} local {'step' if method.Q == 1 else 'steps'}, {config.dtype}")
    steps = {"eta_a": found.eta_a, "gamma": found.gamma}
    return config.model_copy(update=steps), experiment.with_settings(**steps)


def search(experiment: Experiment, auto: tuple[str, ...] = AUTO, **options: Any) -> Tuned:
    """Run the pilots for an experiment; `options` are those of `fednmap.theory.pilots.tune`."""
    config = experiment.config
    method: Any = experiment.algorithm("fednmap")  # as `set` has it
    kept = {name: getattr(config, name) for name in AUTO if name not in auto}
    return run_pilots(
        experiment.problem,
        experiment.phi,
        Q=method.Q,
        eta_s=method.eta_s,
        rounds=max(1, config.rounds),
        measure_gamma=experiment.measure_gamma,
        **simulated(config, method, experiment.problem),
        **kept,
        **options,
    )


def check_auto(config: Config, auto: tuple[str, ...]) -> None:
    """Refuse what would be found for another run than the one that is meant."""
    if config.dp_clip is not None:
        raise InputError(
            "auto looks at the data without clipping or noise, which no epsilon counts; give eta_a and gamma as numbers"
        )
    if config.asynchronous is not None:
        raise InputError("expected rounds that wait for all clients, got --async; give eta_a and gamma as numbers")
    for name in ("local_momentum", "local_decay"):  # a round's step is then longer or shorter than eta_a eta_s Q
        if (value := getattr(config, name)) != Config.model_fields[name].default:
            raise InputError(f"expected equal local steps, got {name} {value}; give eta_a and gamma as numbers")
    if given := [f"fednmap.{name}" for name in auto if f"fednmap.{name}" in config.set]:
        raise InputError(f"{given[0]} is set, and {given[0].partition('.')[2]} is to be found; leave one of them out")


def measured_every(experiment: Experiment) -> int:
    """Return the rounds between measurements that keep these at a tenth of the time, the same for all methods.

    A few rounds of every method are timed, and a measurement after each of them; the method whose rounds take least
    decides. The number becomes part of the configuration, so that trials, workers and resumed runs measure alike.
    """
    rounds = experiment.config.rounds
    return max(every(*_seconds(experiment, name), rounds) for name in experiment.config.algorithms)


def every(measurement: float, round: float, rounds: int) -> int:
    """Return the smallest of 1, 2, 5, 10, ... rounds whose measurement takes at most a tenth of all, up to `rounds`.

    >>> every(1.0, 1.0, 300), every(0.01, 1.0, 300), every(9.0, 0.01, 300)
    (10, 1, 300)
    """
    needed = (1 / MEASURE_SHARE - 1) * measurement / max(round, 1e-9)
    return max(1, min(rounds, next((step for step in STEPS if step >= needed), STEPS[-1])))


def _seconds(experiment: Experiment, name: str) -> tuple[float, float]:
    """Return the seconds of a measurement, and of a round of this method."""
    task = task_of(Job(name, 0), experiment)
    options = task.options | {"start": task.start, "rounds": min(TRIED, task.rounds), "every": 1, "stop": None}
    try:
        records = run_and_measure(task.algorithm, task.problem, **options).records
    except Diverged as error:  # which the run will report
        records = error.result.records
    pairs = list(pairwise(records[1:]))  # the first time other things are made too
    spent = {key: [b[key] - a[key] for a, b in pairs] for key in ("eval_seconds", "train_seconds")}
    return (median(spent["eval_seconds"]), median(spent["train_seconds"])) if pairs else (0.0, 1.0)
