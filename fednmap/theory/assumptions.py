"""Constants that make no sense, refused where they enter."""

from __future__ import annotations

import math

from fednmap.names import InputError


def positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise InputError(f"{name} is {value:g}; it must be finite and above 0")


def nonnegative(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise InputError(f"{name} is {value:g}; it must be finite and at least 0")


def at_least_one(**values: int) -> None:
    for name, value in values.items():
        if value != int(value) or value < 1:
            raise InputError(f"{name} is {value}; it must be a whole number, 1 or more")
