"""`--eta-a auto` and `--gamma auto`: step sizes found before the run, and then ordinary numbers.

In one step where the smoothness of f is known and gradients are exact; else by pilots, which together take a tenth of
the run's rounds, and at least 40.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fednmap.commands.options import AUTO
from fednmap.names import InputError
from fednmap.runs.configuration import Config
from fednmap.runs.experiment import prepare
from fednmap.runs.trust import uplink_of
from fednmap.simulation.participation import sampler_of
from fednmap.theory.at_once import at_once
from fednmap.theory.tune import FEWEST, SHORTEST, Tuned, tune

SHARE = 10  # one round of pilots for so many rounds of the run


def take_auto(values: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The settings without those that are `auto`, and which these are."""
    auto = tuple(name for name in AUTO if values.get(name) == "auto")
    return {name: value for name, value in values.items() if name not in auto}, auto


def settle(config: Config, auto: tuple[str, ...], tell: Callable[[str], None]) -> Config:
    """The configuration with numbers where `auto` was, so that its run can be repeated and resumed."""
    if not auto:
        return config
    if "fednmap" not in config.algorithms:
        raise InputError(f"auto finds FedNMap's step sizes; for {', '.join(config.algorithms)} give numbers")
    if "eta_a" in auto and config.gamma is None:
        auto = AUTO  # they belong together
    _check(config, auto)
    found = _at_once(config, auto, tell)
    if found is not None:
        return found
    pilots = search(config, auto, budget=max(FEWEST * SHORTEST, config.rounds // SHARE))
    for line in pilots.lines():
        tell(line)
    return config.model_copy(update={name: getattr(pilots, name) for name in (*auto, "measure_gamma")})


def _at_once(config: Config, auto: tuple[str, ...], tell: Callable[[str], None]) -> Config | None:
    """Steps from the smoothness of f; with them one local step and float64, unless the user said otherwise.

    Local steps on exact gradients cost Q times as much and save no rounds (docs/rounds.md).
    """
    settled = {"local_steps": 1, "dtype": "float64"}
    config = config.model_copy(update={k: v for k, v in settled.items() if k not in config.model_fields_set})
    if config.batch_size:
        return None
    experiment = prepare(config)
    method: Any = experiment.algorithm("fednmap")  # as `set` has it
    everybody = config.participation == 1 and config.drop == 0 and config.sampler == "uniform"
    steps = at_once(
        experiment.problem,
        experiment.phi,
        everybody=everybody,
        memory=int(config.set.get("fednmap.memory", config.memory)),
        Q=method.Q,
        eta_s=method.eta_s,
        eta_a=None if "eta_a" in auto else config.eta_a,
        gamma=None if "gamma" in auto else config.gamma,
    )
    if steps is None:
        return None
    tell(f"{steps.line()}; {method.Q} local {'step' if method.Q == 1 else 'steps'}, {config.dtype}")
    return config.model_copy(update={"eta_a": steps.eta_a, "gamma": steps.gamma})


def search(config: Config, auto: tuple[str, ...] = AUTO, **options: Any) -> Tuned:
    """The pilots for what the configuration describes; `options` are those of `fednmap.theory.tune.tune`."""
    _check(config, auto)
    experiment = prepare(config)
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


def _check(config: Config, auto: tuple[str, ...]) -> None:
    """Refuse what would be found for another run than the one that is meant."""
    if config.dp_clip is not None:
        raise InputError(
            f"dp_clip is {config.dp_clip:g}, and step sizes are found from the data as they are, without clipping or "
            "noise, which no epsilon counts; give eta_a and gamma as numbers"
        )
    if given := [f"fednmap.{name}" for name in auto if f"fednmap.{name}" in config.set]:
        raise InputError(f"{given[0]} is set, and {given[0].partition('.')[2]} is to be found; leave one of them out")
