"""Regularizers made of others: scaled, on some coordinates only, different ones on different slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fednmap.core import Regularizer
from fednmap.names import InputError
from fednmap.regularizers.parameters import positive, regularizer, shown

FEW = 256
"""Up to so many runs of consecutive coordinates are copied as slices, more through an index."""


@dataclass(frozen=True)
class Scaled(Regularizer):
    """factor phi(x), with factor > 0; rho is phi's times the factor.

    prox(v, s) = phi.prox(v, s factor).

    Reference: Parikh and Boyd, Proximal algorithms, 2014, section 2.1.

    >>> from fednmap.regularizers import L1
    >>> Scaled(L1(1.0), 0.5).prox(torch.tensor([3.0, 0.2]), 1.0)
    tensor([2.5000, 0.0000])
    """

    phi: Regularizer
    factor: float
    rho: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        regularizer(self, "phi")
        positive(self, "factor")
        object.__setattr__(self, "rho", self.phi.rho * self.factor)

    def value(self, x: Tensor) -> Tensor:
        return self.factor * self.phi.value(x)

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        return self.phi.prox(v, float(step) * self.factor)


@dataclass(frozen=True, eq=False)
class Masked(Regularizer):
    """phi on the coordinates where the mask is True, in order, as one vector; the others are left alone.

    prox(v, s) = phi.prox(v[mask], s) there, v elsewhere. For a network's weights without its biases and
    norm layers the mask comes from `restrict`.

    >>> from fednmap.regularizers import L1
    >>> Masked(L1(1.0), torch.tensor([True, False])).prox(torch.tensor([3.0, -0.2]), 1.0)
    tensor([ 2.0000, -0.2000])
    """

    phi: Regularizer
    mask: Tensor
    rho: float = field(init=False, repr=False)
    _index: Tensor = field(init=False, repr=False)
    _runs: tuple[slice, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        regularizer(self, "phi")
        mask = self.mask
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim != 1 or not bool(mask.any()):
            raise InputError(f"Masked needs a 1-D tensor of bools with a True in it, given {shown(mask)}")
        index = self.mask.nonzero().squeeze(-1)
        edges = torch.cat([index[:1], index[1:][index.diff() > 1]])
        ends = torch.cat([index[:-1][index.diff() > 1], index[-1:]]) + 1
        few = len(edges) <= FEW
        runs = tuple(slice(a, b) for a, b in zip(edges.tolist(), ends.tolist(), strict=True)) if few else ()
        object.__setattr__(self, "rho", self.phi.rho)
        object.__setattr__(self, "_index", index)
        object.__setattr__(self, "_runs", runs)

    def value(self, x: Tensor) -> Tensor:
        return self.phi.value(self._take(x))

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        part = self.phi.prox(self._take(v), step)
        out = v.clone()
        if not self._runs:
            return out.index_copy_(-1, self._index.to(v.device), part)
        start = 0
        for run in self._runs:
            end = start + run.stop - run.start
            out[..., run] = part[..., start:end]
            start = end
        return out

    def _take(self, x: Tensor) -> Tensor:
        if x.shape[-1] != len(self.mask):
            raise InputError(f"the mask has {len(self.mask)} coordinates, the vector {x.shape[-1]}")
        if not self._runs:
            return x.index_select(-1, self._index.to(x.device))
        return torch.cat([x[..., run] for run in self._runs], -1)


@dataclass(frozen=True, eq=False)
class Separable(Regularizer):
    """phi(x) = sum_k phi_k(x[slice_k]) over disjoint slices; coordinates in no slice are left alone.

    prox(v, s) is phi_k.prox(v[slice_k], s) on each slice; rho is the largest of the parts.

    Reference: Parikh and Boyd, Proximal algorithms, 2014, section 2.1.

    >>> from fednmap.regularizers import L1, Box
    >>> phi = Separable([(slice(0, 1), L1(1.0)), (slice(1, 3), Box(0, 1))])
    >>> phi.prox(torch.tensor([3.0, -0.2, 2.0]), 1.0)
    tensor([2., 0., 1.])
    """

    parts: Sequence[tuple[slice, Regularizer]]
    length: int | None = field(default=None, repr=False)
    """Of the vectors, where it is known; any other is refused."""
    rho: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for where, phi in self.parts:
            if not isinstance(phi, Regularizer):
                raise InputError(f"Separable needs pairs (slice, regularizer), given {shown(phi)}")
            if not isinstance(where, slice) or where.stop is None:
                raise InputError(f"Separable needs slices with an end, such as slice(0, 2), given {shown(where)}")
        covered = 0
        for where in sorted((where for where, _ in self.parts), key=lambda where: where.start or 0):
            if where.step not in (None, 1) or not covered <= (where.start or 0) < where.stop:
                raise InputError(f"Separable needs disjoint slices of one step, given {where}")
            covered = where.stop
        object.__setattr__(self, "rho", max((phi.rho for _, phi in self.parts), default=0.0))

    def value(self, x: Tensor) -> Tensor:
        return sum((phi.value(self._slice(x, where)) for where, phi in self.parts), x.new_zeros(x.shape[:-1]))

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        out = v.clone()
        for where, phi in self.parts:
            out[..., where] = phi.prox(self._slice(v, where), step)
        return out

    def _slice(self, x: Tensor, where: slice) -> Tensor:
        if where.stop > x.shape[-1]:
            raise InputError(f"the vector has {x.shape[-1]} coordinates, a part of Separable ends at {where.stop}")
        if self.length not in (None, x.shape[-1]):
            raise InputError(f"the vector has {x.shape[-1]} coordinates, expected {self.length}, as the network has")
        return x[..., where]
