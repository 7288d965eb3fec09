"""`--eta-a auto` and `--gamma auto`: step sizes found before the run, and then ordinary numbers.

In one step where the smoothness of f is known and gradients are exact; else by pilots, which together take a tenth of
the run's rounds, and at least 40.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fednmap.commands.options import AUTO
from fednmap.data import Dataset
from fednmap.names import InputError
from fednmap.runs.configuration import Config
from fednmap.runs.experiment import Experiment, load, prepare
from fednmap.runs.uplink_config import uplink_of
from fednmap.simulation.participation import sampler_of
from fednmap.theory.at_once import at_once
from fednmap.theory.tune import FEWEST, SHORTEST, Tuned, tune

SHARE = 10  # one round of pilots for so many rounds of the run


def take_auto(values: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The settings without those that are `auto`, and which these are."""
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
    found = _from_smoothness(config, auto, loaded, message)
    if found is not None:
        return found
    experiment = prepare(config, loaded)
    pilots = search(experiment, auto, budget=max(FEWEST * SHORTEST, config.rounds // SHARE))
    for line in pilots.lines():
        message(line)
    steps = {name: getattr(pilots, name) for name in (*auto, "measure_gamma")}
    return config.model_copy(update=steps), experiment.with_steps(**steps)


def _from_smoothness(
    config: Config, auto: tuple[str, ...], loaded: Dataset, message: Callable[[str], None]
) -> tuple[Config, Experiment] | None:
    """Take steps from the smoothness of f; with them one local step and float64, unless the user said otherwise.

    Local steps on exact gradients cost Q times as much and save no rounds (docs/rounds.md).
    """
    if config.batch_size:
        return None
    settled = {"local_steps": 1, "dtype": "float64"}
    config = config.model_copy(update={k: v for k, v in settled.items() if k not in config.model_fields_set})
    experiment = prepare(config, loaded)
    method: Any = experiment.algorithm("fednmap")  # as `set` has it
    everybody = config.participation == 1 and config.drop == 0 and config.sampler == "uniform"
    found = at_once(
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
    return config.model_copy(update=steps), experiment.with_steps(**steps)


def search(experiment: Experiment, auto: tuple[str, ...] = AUTO, **options: Any) -> Tuned:
    """Run the pilots for an experiment; `options` are those of `fednmap.theory.tune.tune`."""
    config = experiment.config
    method: Any = experiment.algorithm("fednmap")  # as `set` has it
    kept = {name: getattr(config, name) for name in AUTO if name not in auto}
    return tune(
        experiment.problem,
        experiment.phi,
        Q=method.Q,
        eta_s=method.eta_s,
        rounds=max(1, config.rounds),
        measure_gamma=experiment.measure_gamma,
        participation=config.participation,
        drop=config.drop,
        seed=config.seed,
        sampler=None if config.sampler == "uniform" else sampler_of(config.sampler, config.participation),
        uplink=uplink_of(config, method, experiment.problem) or None,
        **kept,
        **options,
    )


def check_auto(config: Config, auto: tuple[str, ...]) -> None:
    """Refuse what would be found for another run than the one that is meant."""
    if config.dp_clip is not None:
        raise InputError(
            f"dp_clip is {config.dp_clip:g}, and step sizes are found from the data as they are, without clipping or "
            "noise, which no epsilon counts; give eta_a and gamma as numbers"
        )
    if given := [f"fednmap.{name}" for name in auto if f"fednmap.{name}" in config.set]:
        raise InputError(f"{given[0]} is set, and {given[0].partition('.')[2]} is to be found; leave one of them out")
