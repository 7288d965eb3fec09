"""Penalty factors and bounds: what is asked of single coefficients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from fednmap.core import Regularizer
from fednmap.estimators.penalties import penalty_name
from fednmap.estimators.rows import Floats
from fednmap.names import InputError, some_of
from fednmap.regularizers import Separable
from fednmap.regularizers.constraints import indicator

FACTORED = ("l1", "ridge", "elastic-net", "mcp", "scad")
"""Penalties that are a sum over columns and have a weight."""

PenaltyFactor = Mapping[Any, float] | Sequence[float] | None
Bounds = Mapping[Any, Any] | Sequence[Any] | None


@dataclass(frozen=True, eq=False)
class Bounded(Regularizer):
    """phi(x) where lo_j <= x_j <= hi_j for every j, else +inf; phi is a sum over coordinates.

    prox(v, s) = clamp(phi.prox(v, s), lo, hi): on an interval the least value of a convex function of one number is at
    its minimiser, or at the end of the interval that is nearest to it.
    """

    phi: Regularizer
    lo: Tensor
    hi: Tensor
    rho: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rho", self.phi.rho)

    def value(self, x: Tensor) -> Tensor:
        return self.phi.value(x) + indicator(Tensor.maximum(x - self.hi, self.lo - x), x.abs())

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        return self.phi.prox(v, step).clamp(self.lo, self.hi)


def by_factor(make: Callable[[float], Regularizer], factors: Floats) -> Regularizer:
    """The sum over columns of make(factor), one part for each run of columns with the same factor."""
    ends = [0, *(np.flatnonzero(np.diff(factors)) + 1).tolist(), len(factors)]
    return Separable([(slice(a, b), make(float(factors[a]))) for a, b in pairwise(ends)])


def factors_of(
    given: PenaltyFactor, penalty: str | Regularizer, names: Sequence[str], terms: Mapping[str, Sequence[str]]
) -> Floats | None:
    """The factor of every column, 1 for those that are not named; None where none is given.

    >>> factors_of({"age": 0}, "l1", ["age", "dose"], {})
    array([0., 1.])
    """
    if given is None:
        return None
    if penalty_name(penalty) not in FACTORED:
        raise InputError(f"expected penalty {', '.join(FACTORED)} with penalty_factor, got {penalty!r:.60}")
    found = np.array(_by_column("penalty_factor", given, names, terms, 1.0, _factor))
    return found


def bounds_of(given: Bounds, names: Sequence[str], terms: Mapping[str, Sequence[str]]) -> Floats | None:
    """The least and the greatest coefficient of every column, (2, p); None where no bounds are given.

    >>> bounds_of({"age": (0, None)}, ["age", "dose"], {})
    array([[  0., -inf],
           [ inf,  inf]])
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):  # one pair for all
        given = dict.fromkeys(names, given)
    return np.array(_by_column("bounds", given, names, terms, (-np.inf, np.inf), _interval)).T


def _by_column(
    what: str,
    given: Mapping[Any, Any] | Sequence[Any],
    names: Sequence[str],
    terms: Mapping[str, Sequence[str]],
    default: Any,
    read: Callable[[str, Any], Any],
) -> list[Any]:
    """A value for every column, from columns or terms by name, columns by number, or one for each."""
    if not isinstance(given, Mapping):
        if isinstance(given, str) or len(given) != len(names):
            raise InputError(f"expected {what} by column, or {len(names)} numbers, got {given!r:.60}")
        return [read(f"{what} of {name!r}", value) for name, value in zip(names, given, strict=True)]
    found = [default] * len(names)
    for key, value in given.items():
        if isinstance(key, str) and key not in names and key not in terms:
            raise InputError(f"{what} names column {key!r}, which X has not; it has {some_of(names)}")
        if not isinstance(key, str) and (isinstance(key, bool) or key not in range(len(names))):
            raise InputError(f"{what} names column {key!r}, and X has {len(names)}; give names, or numbers from 0")
        columns = [key] if key in names else terms.get(key, ()) if isinstance(key, str) else [names[key]]
        for column in columns:
            found[list(names).index(column)] = read(f"{what} of {key!r}", value)
    return found


def _factor(what: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not 0 <= value < np.inf:
        raise InputError(f"expected {what} to be a finite number, at least 0, got {value!r:.40}")
    return float(value)


def _interval(what: str, value: Any) -> tuple[float, float]:
    try:
        low, high = (
            end if given is None else float(given) for given, end in zip(value, (-np.inf, np.inf), strict=True)
        )
    except (TypeError, ValueError):
        raise InputError(f"expected {what} to be (low, high), None for an open end, got {value!r:.40}") from None
    if not low <= 0 <= high:
        raise InputError(f"expected {what} to have 0 between low and high, got ({low:g}, {high:g})")
    return low, high
