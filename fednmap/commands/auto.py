"""`--eta-a auto` and `--gamma auto`: step sizes found by pilots before the run, and then ordinary numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fednmap.commands.options import AUTO
from fednmap.names import InputError
from fednmap.runs.configuration import Config
from fednmap.runs.experiment import prepare
from fednmap.theory.tune import Tuned, tune


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
    found = search(config, auto)
    for line in found.lines():
        tell(line)
    return config.model_copy(update={name: getattr(found, name) for name in (*auto, "measure_gamma")})


def search(config: Config, auto: tuple[str, ...] = AUTO, **options: Any) -> Tuned:
    """The pilots for what the configuration describes; `options` are those of `fednmap.theory.tune.tune`."""
    experiment = prepare(config)
    kept = {name: getattr(config, name) for name in AUTO if name not in auto}
    return tune(
        experiment.problem,
        experiment.phi,
        Q=config.local_steps,
        eta_s=config.eta_s,
        rounds=max(1, config.rounds),
        measure_gamma=experiment.measure_gamma,
        participation=config.participation,
        drop=config.drop,
        seed=config.seed,
        **kept,
        **options,
    )
