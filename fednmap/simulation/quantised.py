"""Vectors on a grid, for sums that are exact in whole numbers: what secure aggregation needs, and its inverse."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fednmap.core import Algorithm, State
from fednmap.names import InputError
from fednmap.simulation.uplink import Federation, Rounding, Stage, Uplinks

BOUND = 2.0**20
WORDS: dict[int, np.dtype[Any]] = {32: np.dtype(np.uint32), 64: np.dtype(np.uint64)}
SIGNED: dict[int, np.dtype[Any]] = {32: np.dtype(np.int32), 64: np.dtype(np.int64)}

Levels = NDArray[Any]
"""Unsigned whole numbers, whose sums and differences are those modulo 2^bits."""


@dataclass(frozen=True)
class Quantised(Stage):
    """Rounding to multiples of a step, the finest power of 2 with which sums stay within the ring of 2^bits numbers::

        level(v) = round(v / step)  in  -bound/step .. bound/step,   clients * bound / step < 2^(bits - 1)

    Whole numbers are summed modulo 2^bits, so that masks drop out exactly; the sum of at most `clients` vectors comes
    back as it is. Rounding is to the nearest, ties to even: nothing is drawn. A vector longer than `bound` is refused,
    never clipped. A multiple of a power of 2 nearest to a float is a float: what `rounded` gives is what was sent.

    clients: how many vectors may be summed.
    bound:   the longest vector, in the Euclidean norm.
    bits:    of a number on its way, 32 or 64.

    >>> grid = Quantised(clients=4)
    >>> grid.step == 2.0**-40
    True
    >>> v = torch.tensor([0.1, -3.0])
    >>> torch.equal(grid.sum(grid.levels(v) + grid.levels(v)), 2 * grid.rounded(v).double())
    True
    """

    keeps_mean: ClassVar[bool] = True
    alters_state: ClassVar[bool] = True
    hides_individuals: ClassVar[bool] = True
    clients: int
    bound: float = BOUND
    bits: int = 64
    step: float = field(init=False)

    def __post_init__(self) -> None:
        if self.bits not in WORDS:
            raise InputError(f"secagg: bits is {self.bits}; use 32 or 64")
        if not 0 < self.bound < float("inf"):
            raise InputError(f"secagg: bound is {self.bound}; the longest vector must be above 0 and finite")
        if self.clients < 2:
            raise InputError(f"secagg hides a client among others and there is {self.clients}; use at least 2")
        step = math.ldexp(1.0, math.frexp(self.clients * self.bound)[1] - (self.bits - 1))
        tight = self.clients * (self.bound / step + 0.5) >= 2.0 ** (self.bits - 1)
        object.__setattr__(self, "step", 2 * step if tight else step)

    def rounded(self, v: Tensor, times: Tensor | float = 1.0) -> Tensor:
        """Return the nearest vector whose multiple by `times` is on the grid; rows are vectors of different clients."""
        scaled = v * times
        longest = float(torch.linalg.vector_norm(scaled, dim=-1).max())
        if longest > self.bound:
            raise InputError(
                f"secagg: an uplink has norm {longest:.3g}, above the bound {self.bound:g}; nothing is clipped: set a "
                "larger bound, or a smaller step size if the method diverges"
            )
        return (scaled / self.step).round_().mul_(self.step) / times

    def check(self, algorithm: Algorithm, federation: Federation) -> None:
        if self.clients < federation.per_round:
            raise InputError(
                f"secagg has room for the sum of {self.clients} vectors, and {federation.per_round} clients may take "
                f"part in a round; use Quantised({federation.per_round})"
            )

    def rounding(self, up: State) -> Rounding:
        return Rounding(self.slack(up), self.step, self.bound)

    def apply(self, federation: Federation, uplinks: Uplinks, rounding: Rounding) -> Uplinks:
        times: Tensor | float = 1.0
        if federation.weights is not None:  # by n w_i before rounding: the sum is then the weighted one
            each = (federation.n * federation.each[uplinks.ids]).to(uplinks.sent[0])
            times = each.where(each > 0, 1.0).unsqueeze(-1)
        sent = self.sent(uplinks.sent, times)
        if uplinks.known is uplinks.sent:
            return uplinks._replace(sent=sent, known=sent)
        changed = zip(uplinks.known, uplinks.sent, sent, strict=True)
        return uplinks._replace(sent=sent, known=type(sent)(*(known + (new - old) for known, old, new in changed)))

    def sent(self, up: State, times: Tensor | float = 1.0) -> State:
        """Return the uplink that is sent in place of `up`."""
        return type(up)(*(self.rounded(v, times) for v in up))

    def levels(self, v: Tensor) -> Levels:
        """Return the vector as numbers of the ring."""
        if not bool(torch.isfinite(v).all()):
            raise InputError("secagg: an uplink holds NaN or infinity; set a smaller step size")
        exact = (self.rounded(v).detach().cpu().double() / self.step).numpy()
        return exact.astype(SIGNED[self.bits]).view(WORDS[self.bits])

    def sum(self, levels: Levels) -> Tensor:
        """Return what a sum in the ring stands for, in float64."""
        return torch.from_numpy(levels.view(SIGNED[self.bits]).astype(np.float64)) * self.step

    def length(self, up: State) -> int:
        """Return numbers of one client's masked uplink: one more than `up` has, by which their sum is checked."""
        return 1 + sum(int(v.numel()) for v in up)

    def slack(self, up: State) -> float:
        """Return the most by which rounding makes a message like `up` longer."""
        return 0.5 * self.step * math.sqrt(self.length(up) - 1)

    def nbytes(self, up: State) -> int:
        return self.length(up) * self.bits // 8
