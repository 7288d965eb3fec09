"""Local step sizes that change from round to round: functions of the round."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace

from fednmap.core import Algorithm
from fednmap.names import InputError, choose

Schedule = Callable[[int], float]
"""eta_a of round t = 0, 1, 2, ..."""


@dataclass(frozen=True)
class Cosine:
    """From `first` down to `last` along half a cosine, over `rounds` rounds.

    Reference: Loshchilov and Hutter, SGDR, ICLR 2017.
    """

    first: float
    rounds: int
    last: float = 0.0

    def __call__(self, t: int) -> float:
        turn = math.pi * min(t, self.rounds) / max(1, self.rounds)
        return self.last + (self.first - self.last) * (1 + math.cos(turn)) / 2


@dataclass(frozen=True)
class InverseSqrt:
    """first / sqrt(t + 1)."""

    first: float

    def __call__(self, t: int) -> float:
        return self.first / math.sqrt(t + 1)


@dataclass(frozen=True)
class StepDown:
    """first * factor^k after k times `every` rounds."""

    first: float
    factor: float
    every: int

    def __call__(self, t: int) -> float:
        return float(self.first * self.factor ** (t // self.every))


def schedule_of(spec: str, rounds: int) -> float | Schedule:
    """A number, or by name: cosine:FIRST[,LAST], sqrt:FIRST, steps:FIRST,FACTOR,EVERY.

    >>> schedule_of("0.1", 100), schedule_of("sqrt:0.1", 100)
    (0.1, InverseSqrt(first=0.1))
    """
    name, colon, text = spec.strip().partition(":")
    if not colon:
        return _numbers(spec, spec, 1, 1)[0]
    low, high = choose("step size schedule", name, {"cosine": (1, 2), "sqrt": (1, 1), "steps": (3, 3)})
    values = _numbers(spec, text, low, high)
    if name == "cosine":
        return Cosine(values[0], rounds, *values[1:])
    if name == "sqrt":
        return InverseSqrt(values[0])
    if values[2] != int(values[2]) or values[2] < 1:
        raise InputError(f"{spec}: the step goes down every {values[2]:g} rounds; use a whole number, 1 or more")
    return StepDown(values[0], values[1], int(values[2]))


def first_of(eta_a: float | Schedule) -> float:
    """The step of round 0."""
    return eta_a(0) if callable(eta_a) else eta_a


def at(algorithm: Algorithm, eta_a: float | Schedule | None, t: int) -> Algorithm:
    """The method with its step of round t; everything else that was made from eta_a, such as gamma, stays."""
    if eta_a is None:
        return algorithm
    if not is_dataclass(algorithm) or "eta_a" not in {field.name for field in fields(algorithm)}:
        raise InputError(f"{type(algorithm).__name__} has no eta_a that could follow a schedule; leave eta_a out")
    value = eta_a(t) if callable(eta_a) else eta_a
    return algorithm if value == algorithm.eta_a else replace(algorithm, eta_a=value)


def _numbers(spec: str, text: str, low: int, high: int) -> list[float]:
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        values = []
    if not low <= len(values) <= high or not all(0 <= v < math.inf for v in values) or not values[0] > 0:
        allowed = "a number above 0, cosine:FIRST[,LAST], sqrt:FIRST or steps:FIRST,FACTOR,EVERY"
        raise InputError(f"the step size is {spec!r}; use {allowed}")
    return values
