"""A penalty by name: which regularizer it is at a given lam, with factors and bounds of single coefficients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fednmap.core import Regularizer
from fednmap.estimators.rows import Floats
from fednmap.names import InputError, choose, some_of
from fednmap.regularizers import (
    L1,
    MCP,
    SCAD,
    Box,
    ElasticNet,
    GroupLasso,
    NonNegative,
    Scaled,
    Separable,
    SparseGroupLasso,
    SquaredL2,
    Zero,
)
from fednmap.regularizers.constraints import indicator

PENALTIES = {
    "none": "0",
    "l1": "|b|_1",
    "ridge": "|b|^2 / 2",
    "elastic-net": "r |b|_1 + (1 - r) |b|^2 / 2; r is l1_ratio",
    "mcp": "minimax concave; mcp:theta, theta = 3",
    "scad": "smoothly clipped; scad:a, a = 3.7",
    "group-lasso": "sum over groups of sqrt(size) |b_g|_2",
    "sparse-group-lasso": "r |b|_1 + (1 - r) sum over groups of |b_g|_2; r is l1_ratio",
    "nonnegative": "b >= 0",
    "box": "lo <= b <= hi; box:lo,hi",
}
"""What lam is the weight of; b are the coefficients of the scaled columns, without intercepts."""

WITHOUT_WEIGHT = ("none", "nonnegative", "box")
GROUPED = ("group-lasso", "sparse-group-lasso")
DEFAULT_LAM = 0.01

FACTORED = ("l1", "ridge", "elastic-net", "mcp", "scad")
"""Penalties that are a sum over columns and have a weight."""

PenaltyFactor = Mapping[Any, float] | Sequence[float] | None
Bounds = Mapping[Any, Any] | Sequence[Any] | None
Groups = Mapping[str, Any] | Sequence[Any] | None


def penalty_name(penalty: str | Regularizer) -> str:
    """The name without its numbers; empty for a regularizer."""
    return penalty.partition(":")[0] if isinstance(penalty, str) else ""


def weighted(penalty: str | Regularizer) -> bool:
    """Whether lam means anything."""
    return penalty_name(penalty) not in WITHOUT_WEIGHT


def settled_lam(penalty: str | Regularizer, lam: float | None) -> float:
    """lam, or its default: 0.01 for a name; 1 for a regularizer, which has its own weights."""
    if lam is None:
        return DEFAULT_LAM if isinstance(penalty, str) else 1.0
    if isinstance(lam, bool) or not isinstance(lam, int | float | np.number) or not 0 <= lam < np.inf:
        raise InputError(f"lam is {lam!r}; it must be a finite number, at least 0")
    return float(lam)


def told_lam(penalty: str | Regularizer, lam: float | None) -> float | None:
    """The weight that a fit had; None where the penalty has none."""
    return settled_lam(penalty, lam) if weighted(penalty) else None


def regularizer(
    penalty: str | Regularizer, lam: float, l1_ratio: float, groups: Sequence[int] | None, outputs: int
) -> Regularizer:
    """lam times the penalty, on the coefficients of all outputs, one output after another.

    groups: the group of every column; those of several outputs lie in one group.
    """
    if isinstance(penalty, Regularizer):
        return Zero() if lam == 0 else penalty if lam == 1 else Scaled(penalty, lam)
    if not isinstance(penalty, str):
        raise InputError(f"penalty is {penalty!r:.60}; give a name ({', '.join(PENALTIES)}) or a regularizer")
    name, _, rest = penalty.partition(":")
    if name == "l2":
        raise InputError("penalty 'l2' could be two things: 'ridge' is lam |b|^2 / 2, regularizers.L2 is lam |b|")
    choose("penalty", name, PENALTIES)
    try:
        numbers = [float(word) for word in rest.split(",") if rest]
    except ValueError:
        raise InputError(f"{rest!r} in {penalty!r} is not a list of numbers") from None
    if not 0 <= l1_ratio <= 1:
        raise InputError(f"l1_ratio is {l1_ratio!r}; it must lie in [0, 1]")
    if len(numbers) not in {"mcp": (0, 1), "scad": (0, 1), "box": (2,)}.get(name, (0,)):
        raise InputError(f"penalty {penalty!r} does not fit {name!r}: {PENALTIES[name]}")
    if name in ("box", "nonnegative"):
        return Box(*numbers) if numbers else NonNegative()
    if name == "none" or lam == 0:
        return Zero()
    if name == "l1":
        return L1(lam)
    if name == "ridge":
        return SquaredL2(lam / 2)
    if name == "elastic-net":
        return ElasticNet(lam * l1_ratio, lam * (1 - l1_ratio) / 2)
    if name in ("mcp", "scad"):
        return MCP(lam, *(numbers or [3.0])) if name == "mcp" else SCAD(lam, *(numbers or [3.7]))
    if groups is None:
        raise InputError(f"penalty {name!r} needs groups, such as groups={{'blood': ['wbc', 'rbc']}}")
    labels = torch.tensor(np.tile(np.asarray(groups), outputs), device="cpu")
    if name == "sparse-group-lasso":
        return SparseGroupLasso(lam * l1_ratio, lam * (1 - l1_ratio), labels)
    return GroupLasso(lam * labels.bincount().double().sqrt(), labels)


def shrinkage(phi: Regularizer, size: int) -> tuple[Any, Any, Any, Any] | None:
    """l1, l2, rho and knee of `path_solver.Penalties`, numbers or one for each of the `size` coefficients; None where
    phi is another penalty."""
    if isinstance(phi, Zero):
        return 0.0, 0.0, 0.0, 0.0
    if isinstance(phi, L1):
        if not isinstance(phi.weight, torch.Tensor):
            return phi.weight, 0.0, 0.0, 0.0
        return (phi.weight.double().cpu().numpy(), 0.0, 0.0, 0.0) if phi.weight.shape == (size,) else None
    if isinstance(phi, ElasticNet):
        return phi.nu1, 2 * phi.nu2, 0.0, 0.0
    if isinstance(phi, SquaredL2):
        return 0.0, 2 * phi.weight, 0.0, 0.0
    if isinstance(phi, MCP | SCAD):
        return phi.lam, 0.0, phi.rho, phi.lam if isinstance(phi, SCAD) else 0.0
    if isinstance(phi, Scaled) and (inner := shrinkage(phi.phi, size)) is not None:
        l1, l2, rho, knee = inner
        return phi.factor * l1, phi.factor * l2, phi.factor * rho, knee
    if isinstance(phi, Separable):
        found = np.zeros((4, size))
        for where, part in phi.parts:
            if (inner := shrinkage(part, where.stop - (where.start or 0))) is None:
                return None
            for values, value in zip(found, inner, strict=True):
                values[where] = value
        return found[0], found[1], found[2], found[3]
    return None


def group_numbers(groups: Groups, columns: Sequence[str]) -> list[int] | None:
    """The group of every column, from names or numbers of columns; a column that is named in none is one by itself.

    >>> group_numbers({"blood": ["wbc", "rbc"]}, ["age", "wbc", "rbc"])
    [1, 0, 0]
    """
    if groups is None:
        return None
    listed = list(groups.values()) if isinstance(groups, Mapping) else list(groups)
    if listed and not any(isinstance(group, list | tuple | np.ndarray) for group in listed):
        if isinstance(groups, Mapping) or len(listed) != len(columns):
            raise InputError(
                f"groups names {len(listed)} groups for {len(columns)} columns; give lists of columns, or one each"
            )
        return [int(k) for k in np.unique(np.asarray(listed), return_inverse=True)[1]]
    found: dict[int, int] = {}
    for k, group in enumerate(listed):
        for column in group:
            known = column in columns if isinstance(column, str) else 0 <= column < len(columns)
            if not known:
                raise InputError(f"groups names column {column!r}, which X has not; it has {', '.join(columns[:20])}")
            j = list(columns).index(column) if isinstance(column, str) else int(column)
            if found.setdefault(j, k) != k:
                raise InputError(f"column {columns[j]!r} is in two groups; groups must not overlap")
    numbers = [found.get(j, len(listed) + j) for j in range(len(columns))]
    return [int(k) for k in np.unique(numbers, return_inverse=True)[1]]


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
