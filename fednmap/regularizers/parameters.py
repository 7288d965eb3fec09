"""What the numbers of a regularizer or a method must satisfy, checked where they enter.

Each is stored as a plain int or float, whatever kind of number it was given as; a bool, a string or a tensor is not a
number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral, Real

import numpy as np
import torch
from torch import Tensor

from fednmap.core import Regularizer
from fednmap.names import InputError


def plain(owner: object, name: str) -> float | None:
    """Return owner.name as an int or float, stored in its place; None where it is not a number."""
    value = getattr(owner, name)
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    number = int(value) if isinstance(value, Integral) else float(value)
    object.__setattr__(owner, name, number)
    return number


def wrong(owner: object, name: str, allowed: str) -> InputError:
    """Return the error for owner.name, in one line."""
    return InputError(f"{type(owner).__name__}: {name} is {shown(getattr(owner, name))}; it must be {allowed}")


def shown(value: object) -> str:
    """Return what was given, in one line of moderate length; a class by its name."""
    text = f"the class {value.__name__}" if isinstance(value, type) else " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:56]} ..."


def _numbers(fits: Callable[[float], bool], allowed: str) -> Callable[..., None]:
    """A check of an owner's named numbers, check(owner, "name", ...)."""

    def check(owner: object, *names: str) -> None:
        for name in names:
            number = plain(owner, name)
            if number is None or not fits(number):
                raise wrong(owner, name, allowed)

    return check


nonnegative = _numbers(lambda number: 0 <= number < math.inf, "a finite number, at least 0")
positive = _numbers(lambda number: 0 < number < math.inf, "a finite positive number")
fraction = _numbers(lambda number: 0 <= number <= 1, "a number from 0 to 1")
below_one = _numbers(lambda number: 0 <= number < 1, "a number, at least 0 and below 1")


def integer(owner: object, name: str, least: int) -> None:
    """Check that the named number is whole and at least `least`."""
    number = plain(owner, name)
    if not isinstance(number, int) or number < least:
        raise wrong(owner, name, f"an integer, at least {least}")


def weights(owner: object, name: str) -> None:
    """Check that the named value is a finite number, at least 0, or a tensor or array of such."""
    value = getattr(owner, name)
    if not isinstance(value, Tensor | np.ndarray):
        nonnegative(owner, name)
        return
    tensor = value if isinstance(value, Tensor) else torch.from_numpy(value)
    if tensor.dtype == torch.bool or tensor.is_complex() or not bool(((tensor >= 0) & tensor.isfinite()).all()):
        raise wrong(owner, name, "a tensor of finite numbers, at least 0")
    if tensor.ndim > 1:
        raise InputError(f"{type(owner).__name__}: {name} has shape {tuple(tensor.shape)}; it must have one axis")
    object.__setattr__(owner, name, tensor)


def weights_for(owner: object, weight: float | Tensor, x: Tensor, what: str) -> float | Tensor:
    """Return the weights in the dtype of x; refuse a tensor without one weight for each entry of its last axis."""
    if not isinstance(weight, Tensor):
        return weight
    if weight.ndim and weight.shape != x.shape[-1:]:
        given, count = tuple(weight.shape), x.shape[-1]
        raise InputError(f"{type(owner).__name__} has weights of shape {given} for {count} {what}; give one for each")
    return weight.to(x)


def regularizer(owner: object, name: str, example: str = "L1(0.1)") -> None:
    """Check that the named value is a regularizer."""
    if not isinstance(getattr(owner, name), Regularizer):
        raise wrong(owner, name, f"a regularizer, such as {example}")
