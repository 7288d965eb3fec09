"""From a configuration to what happens between the clients and the server: privacy, a robust centre, an attack."""

from __future__ import annotations

import warnings

from fednmap.core import Algorithm, Problem, Serverless
from fednmap.names import InputError
from fednmap.privacy import Counted, Privacy, PrivateRows, accounting, centre_of
from fednmap.privacy.client_level import check_uplink_can_change
from fednmap.privacy.example_level import gradients_per_round
from fednmap.privacy.robust import attack_of
from fednmap.problems import FiniteSum, Pooled
from fednmap.runs.configuration import Config
from fednmap.simulation.quantised import BOUND, Quantised
from fednmap.simulation.uplink import Part


def uplink_of(config: Config, algorithm: Algorithm, problem: Problem) -> list[Part]:
    """Return the parts of the uplink pipeline; none where uplinks are sent as they are and averaged."""
    inner = problem.problem if isinstance(problem, Pooled) else problem  # the mean of what the sites made private
    privacy: Part | None = privacy_of(config)
    if isinstance(inner, PrivateRows):
        privacy = Counted(inner, gradients_per_round(algorithm), config.dp_delta)
    attack = None if config.attack is None else attack_of(config.attack)
    parts = privacy, centre_of(config.aggregate), attack, grid_of(config, problem.n)
    return [part for part in parts if part is not None]


def grid_of(config: Config, clients: int) -> Quantised | None:
    """Return the grid to which uplinks are rounded for secure aggregation; None without."""
    return Quantised(clients, config.secagg_bound or BOUND, config.secagg_bits or 64) if config.secagg else None


def private_rows(config: Config, problem: FiniteSum) -> PrivateRows | None:
    """Return the problem with private gradients, where rows are to be protected."""
    if config.dp_clip is None or config.dp_unit == "client":
        return None
    return PrivateRows(problem, config.dp_clip, config.dp_noise or 0.0, rate=_rate(config, problem), seed=config.seed)


def with_noise(config: Config, problem: FiniteSum, steps: int) -> Config:
    """Return the configuration with the noise that its epsilon asks for; warned where the epsilon protects nobody.

    steps: the most gradients that a method of it takes per round.
    """
    if config.dp_clip is None:
        return config
    rows = config.dp_unit == "example"
    share = _rate(config, problem) if rows else config.participation if config.dp_among is None else 1.0
    times = config.rounds * (steps if rows else 1)
    if config.dp_epsilon or config.dp_noise:
        accounting.check_delta(config.dp_delta, int(problem.data.sizes.min()) if rows else problem.n)
    if config.dp_epsilon is not None:
        noise = accounting.noise_for(config.dp_epsilon, share, times, config.dp_delta)
        budget = config.dp_budget or config.dp_epsilon  # kept: a run that is made longer may not spend more
        config = config.model_copy(update={"dp_noise": noise, "dp_epsilon": None, "dp_budget": budget})
    if config.dp_noise:
        spent = accounting.epsilon(config.dp_noise, share, times, config.dp_delta).pld
        _check_budget(config, spent)
        line = accounting.doubt(spent, "any one row" if rows else "any one client")
        if line:
            warnings.warn(line, UserWarning, stacklevel=2)
    return config


def _check_budget(config: Config, spent: float) -> None:
    if config.dp_budget is not None and spent > config.dp_budget:
        raise InputError(
            f"{config.rounds} rounds would spend an epsilon of {spent:.4g}, and the budget is {config.dp_budget:g}; "
            "use fewer rounds, or begin a new run with more noise"
        )


def check_methods(config: Config, algorithms: list[Algorithm]) -> None:
    """Refuse methods that cannot be run this way, before anything runs."""
    serverless = [type(a).__name__ for a in algorithms if isinstance(a, Serverless)]
    if serverless:
        raise InputError(f"{', '.join(serverless)} has no server; leave dp_clip, aggregate and attack out")
    private = config.dp_clip is not None and config.dp_unit == "client"
    if private or config.aggregate.startswith("clip"):
        for algorithm in algorithms:
            check_uplink_can_change(algorithm)
    central = ", ".join(type(a).__name__ for a in algorithms if a.traits.central)
    if private and config.dp_noise != 0 and central:
        raise InputError(f"client-level DP needs at least two clients, and {central} has one; use dp_unit = example")


def check_between_machines(config: Config) -> None:
    """Refuse between machines what is for simulations: a run must not look private, or robust, and not be."""
    if config.aggregate != "mean" or config.attack is not None:
        raise InputError("aggregate and attack are for simulations (fednmap train); leave them out here")
    if config.dp_clip is None:
        return
    if config.dp_unit == "example":
        raise InputError("dp_unit = example is for simulations (fednmap train); between machines use dp_unit = client")
    if config.dp_epsilon is not None:
        noise = accounting.noise_for(config.dp_epsilon, 1.0, config.rounds, config.dp_delta)
        raise InputError(f"dp_epsilon is for simulations; give dp_noise = {noise:g}, which {config.rounds} rounds need")
    if not config.dp_noise:
        return
    if config.dp_among is None or not config.secagg:
        raise InputError(
            "dp_noise between machines is the clients' own: add secagg = true, and dp_among, the number of clients "
            "whose noise must suffice"
        )
    if config.participation < 1:
        raise InputError(
            "the server knows which clients it samples, so sampling adds no privacy against it; use participation = 1"
        )
    if config.dp_among > config.clients:
        raise InputError(f"dp_among is {config.dp_among}, of {config.clients} clients; it must be at most their number")
    accounting.check_delta(config.dp_delta, config.clients)
    if config.dp_budget is not None:
        _check_budget(config, accounting.epsilon(config.dp_noise, 1.0, config.rounds, config.dp_delta).pld)


def privacy_of(config: Config) -> Privacy | None:
    """Privacy of whole clients, if it is asked for."""
    if config.dp_clip is None or config.dp_unit == "example":
        return None
    return Privacy(config.dp_clip, config.dp_noise or 0.0, config.dp_delta, config.dp_forget, config.dp_among)  # type: ignore[arg-type]


def _rate(config: Config, problem: FiniteSum) -> float:
    """The probability of a row to be in a gradient, so that a site of mean size takes batch_size of them."""
    rows = problem.data.rows / problem.n
    return 1.0 if config.batch_size == 0 else min(1.0, config.batch_size / rows)
