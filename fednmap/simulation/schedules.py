"""Local step sizes that change from round to round: functions of the round."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import TypeVar

from fednmap.core import Algorithm, with_fields
from fednmap.names import InputError, choose

AnyAlgorithm = TypeVar("AnyAlgorithm", bound=Algorithm)

Schedule = Callable[[int], float]
"""eta_a of round t = 0, 1, 2, ..."""


@dataclass(frozen=True)
class Cosine:
    """From `first` down to `last` along half a cosine, over `rounds` rounds.

    Reference: Loshchilov and Hutter, SGDR, ICLR 2017.

    >>> Cosine(0.2, rounds=100)(50)
    0.1
    """

    first: float
    rounds: int
    last: float = 0.0

    def __call__(self, t: int) -> float:
        turn = math.pi * min(t, self.rounds) / max(1, self.rounds)
        return self.last + (self.first - self.last) * (1 + math.cos(turn)) / 2


@dataclass(frozen=True)
class InverseSqrt:
    r"""The step $\text{first} / \sqrt{t + 1}$ in round t.

    >>> InverseSqrt(0.2)(3)
    0.1
    """

    first: float

    def __call__(self, t: int) -> float:
        return self.first / math.sqrt(t + 1)


@dataclass(frozen=True)
class StepDown:
    r"""The step $\text{first} \cdot \text{factor}^k$ after k times `every` rounds.

    >>> StepDown(0.2, 0.5, every=10)(15)
    0.1
    """

    first: float
    factor: float
    every: int

    def __post_init__(self) -> None:
        if not self.every >= 1:
            raise InputError(f"StepDown: every is {self.every}; the step falls every 1 round or more")

    def __call__(self, t: int) -> float:
        return float(self.first * self.factor ** (t // self.every))


def schedule_of(spec: str, first: float, rounds: int) -> Schedule | None:
    """By name, beginning at `first`: constant, cosine[:LAST], sqrt, or steps:FACTOR,EVERY; None for a constant step.

    >>> schedule_of("constant", 0.1, 100), schedule_of("sqrt", 0.1, 100)
    (None, InverseSqrt(first=0.1))
    """
    name, _, text = spec.strip().partition(":")
    least, most = choose("schedule", name, {"constant": (0, 0), "cosine": (0, 1), "sqrt": (0, 0), "steps": (2, 2)})
    try:
        values = [float(word) for word in text.split(",")] if text else []
    except ValueError:
        values = [math.nan]
    fits = least <= len(values) <= most and all(0 <= v < math.inf for v in values)
    if not fits or (name == "steps" and not (values[0] > 0 and values[1] >= 1 and values[1].is_integer())):
        raise InputError(
            f"the schedule is {spec!r}; use constant, cosine[:LAST], sqrt or steps:FACTOR,EVERY, with a "
            "factor above 0 and a whole number of rounds"
        )
    if name == "cosine":
        return Cosine(first, rounds, *values)
    if name == "sqrt":
        return InverseSqrt(first)
    return StepDown(first, values[0], int(values[1])) if name == "steps" else None


def step_of(algorithm: Algorithm) -> float:
    """Return the method's own eta_a."""
    name = type(algorithm).__name__
    if not is_dataclass(algorithm) or "eta_a" not in {field.name for field in fields(algorithm)}:
        raise InputError(f"{name} has no eta_a that could follow a schedule; leave it out")
    if not algorithm.traits.steps_may_change:
        raise InputError(f"{name} uses eta_a only to set gamma, once: it cannot follow a schedule; leave that out")
    return float(algorithm.eta_a)


def at(algorithm: AnyAlgorithm, eta_a: float | Schedule | None, t: int) -> AnyAlgorithm:
    """Return the method with its step of round t; what else was made from eta_a, such as gamma, stays."""
    if eta_a is None:
        return algorithm
    value = eta_a(t) if callable(eta_a) else eta_a
    return algorithm if value == step_of(algorithm) else with_fields(algorithm, eta_a=value)


def check_end(eta_a: float | Schedule | None, rounds: int) -> None:
    """Refuse a schedule that is at its end before the run is: its step of the last round is not a step."""
    if callable(eta_a) and rounds > 0 and not 0 < eta_a(rounds - 1) < math.inf:
        raise InputError(
            f"eta_a is {eta_a(rounds - 1):g} in round {rounds - 1}, by {eta_a}; it must be above 0 in all {rounds} "
            "rounds: give the schedule as many rounds as the run has, or a last step above 0"
        )
