"""What a client sends of a vector: C(v), dense in memory, and its packed form on the wire.

Every one is a contraction, |C(v) - v|^2 <= (1 - delta) |v|^2 (on average over the rounds, for coordinates drawn at
random), acts on the last axis and is a pure function; packing loses nothing.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fednmap import core
from fednmap.names import InputError, choose, renamed

ENTRIES = 5
"""In the address between seed and round: these draws are not those of who takes part, which may have the same seed."""


class SparseVector(NamedTuple):
    """K values and where they belong."""

    values: Tensor
    indices: Tensor
    size: Tensor


class Codes(NamedTuple):
    """Whole numbers of a few bits each, several in a byte, in units of a power of two."""

    codes: Tensor
    unit: Tensor
    size: Tensor


class ContractiveCompressor(core.Compressor, ABC):
    """C, and how what it gives is packed: `pack`, and `unpack`, which gives the same bits back."""

    @abstractmethod
    def delta(self, p: int) -> float:
        """Return how much of a vector of length p gets through; 1: all of it."""

    @abstractmethod
    def __call__(self, v: Tensor, t: Tensor) -> Tensor:
        """C(v) in round t."""

    def control(self, p: int) -> float:
        """EControl's share of the error that is sent on: delta / (3 sqrt(1 - delta) (1 + sqrt(1 - delta))), at most 1.

        The error obeys e' = (1 - eta) e + (C(v) - v), so that beyond 1 it would swing. At delta = 1 there is no error.
        """
        delta = self.delta(p)
        rest = (1 - delta) ** 0.5
        return min(1.0, delta / (3 * rest * (1 + rest))) if delta < 1 else 0.0

    def pace(self, p: int) -> float:
        """Return the share of a step that is stable if an entry is sent every 1/delta rounds only: 1 - sqrt(1 - delta).

        That is what EF21's theorem allows of 1/L; about delta / 2 where little gets through, 1 where all does.
        """
        return 1 - math.sqrt(1 - self.delta(p))


@dataclass(frozen=True)
class _Sparsifier(ContractiveCompressor):
    """Keeps K entries; K below 1 is a fraction of all."""

    K: float

    def kept(self, p: int) -> int:
        """How many of p entries K stands for."""
        return min(p, int(self.K) if self.K >= 1 else max(1, round(self.K * p)))

    def delta(self, p: int) -> float:
        return self.kept(p) / p

    def pack(self, v: Tensor) -> SparseVector:
        size = v.shape[-1]
        indices = v.abs().topk(self.kept(size)).indices
        return SparseVector(v.gather(-1, indices), indices.to(torch.int32), indices.new_tensor(size))

    def unpack(self, packed: SparseVector) -> Tensor:
        v = packed.values.new_zeros(*packed.values.shape[:-1], int(packed.size))
        return v.scatter(-1, packed.indices.long(), packed.values)


@dataclass(frozen=True)
class TopKCompressor(_Sparsifier):
    """Keep the K entries that are largest in magnitude; K below 1 is a fraction of all.

    >>> TopKCompressor(1)(torch.tensor([1.0, -3.0]), torch.tensor(0))
    tensor([ 0., -3.])
    """

    def pace(self, p: int) -> float:
        """Twenty times what is proved, at most 1: what matters most comes first. Measured, see `docs/family.md`."""
        return min(1.0, 20 * super().pace(p))

    def __call__(self, v: Tensor, t: Tensor) -> Tensor:
        indices = v.abs().topk(self.kept(v.shape[-1])).indices
        return torch.zeros_like(v).scatter(-1, indices, v.gather(-1, indices))


@dataclass(frozen=True)
class RandomK(_Sparsifier):
    """Keep K entries, drawn again in each round from the seed, the same for all clients; K below 1 is a fraction.

    >>> RandomK(2, seed=0)(torch.ones(5), torch.tensor(0)).sum()
    tensor(2.)
    """

    seed: int

    def __call__(self, v: Tensor, t: Tensor) -> Tensor:
        p = v.shape[-1]
        chosen = np.random.default_rng([self.seed, ENTRIES, int(t)]).choice(p, self.kept(p), replace=False)
        mask = torch.zeros(p, dtype=v.dtype, device=v.device).index_fill(0, torch.from_numpy(chosen).to(v.device), 1)
        return v * mask


@dataclass(frozen=True)
class QuantisedCompressor(ContractiveCompressor):
    """Every entry in `bits` bits: rounded to a whole multiple, at most 2^(bits - 1) - 1, of a unit.

    The unit is the smallest power of two with which the largest entry fits, one for each client: products with it are
    exact, so that packing loses nothing. No entry's error is above its magnitude, and that of the largest one is a
    seventh of it at most: a contraction for every p.

    >>> QuantisedCompressor(4)(torch.tensor([1.0, 0.3, -0.01]), torch.tensor(0))
    tensor([1.0000, 0.2500, -0.0000])
    """

    bits: int

    @property
    def _levels(self) -> int:
        return int(2 ** (self.bits - 1) - 1)

    def delta(self, p: int) -> float:
        return 1 - 1 / self.bits  # of vectors as they come; for certain it is 1/p only

    def pace(self, p: int) -> float:
        return 1.0  # every entry is sent in every round

    def __call__(self, v: Tensor, t: Tensor) -> Tensor:
        unit = self._unit(v)
        return self._numbers(v, unit) * unit

    def pack(self, v: Tensor) -> Codes:
        unit, each = self._unit(v), 8 // self.bits
        codes = (self._numbers(v, unit) + self._levels).to(torch.uint8)
        codes = torch.nn.functional.pad(codes, (0, -v.shape[-1] % each)).unflatten(-1, (-1, each))
        shifts = torch.arange(each, device=v.device, dtype=torch.uint8) * self.bits
        whole = (codes << shifts).sum(-1, dtype=torch.uint8)
        return Codes(whole, unit, torch.tensor(v.shape[-1], device=v.device))

    def unpack(self, packed: Codes) -> Tensor:
        shifts = torch.arange(8 // self.bits, device=packed.codes.device, dtype=torch.uint8) * self.bits
        codes = (packed.codes.unsqueeze(-1) >> shifts) & (2**self.bits - 1)
        numbers: Tensor = codes.flatten(-2)[..., : int(packed.size)].to(packed.unit) - self._levels
        return numbers * packed.unit

    def _unit(self, v: Tensor) -> Tensor:
        """The smallest power of two u with |v| <= levels u everywhere; 0 for v = 0."""
        mantissa, exponent = torch.frexp(v.abs().amax(-1, keepdim=True) / self._levels)
        return torch.ldexp((mantissa > 0).to(v), exponent - (mantissa == 0.5).to(exponent))

    def _numbers(self, v: Tensor, unit: Tensor) -> Tensor:
        return torch.where(unit > 0, v / unit, 0.0).round()


def compressor(name: str, K: float, bits: int, seed: int) -> ContractiveCompressor:
    """By name: top, random, quantised; what does not fit is refused."""
    if K >= 1 and int(K) != K:
        raise InputError(f"K is {K}; use a whole number of coordinates, or a fraction below 1")
    if bits not in (4, 8):
        raise InputError(f"bits is {bits}; choose from 4, 8")
    made: dict[str, ContractiveCompressor] = {
        "top": TopKCompressor(K),
        "random": RandomK(K, seed),
        "quantised": QuantisedCompressor(bits),
    }
    return choose("compressor", name, made)


__getattr__ = renamed(
    __name__, {"Compressor": "ContractiveCompressor", "TopK": "TopKCompressor", "Quantised": "QuantisedCompressor"}
)
