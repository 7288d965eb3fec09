"""The 1-D fused lasso."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fednmap.core import Regularizer
from fednmap.regularizers.parameters import nonnegative

Array = NDArray[np.float64]


@dataclass(frozen=True)
class TotalVariation(Regularizer):
    r"""Total variation $\phi(x) = w \sum_j |x_{j+1} - x_j|$ with w = weight: piecewise constant models.

    prox(v, s) has no closed form; it is computed exactly, in time linear in p, row by row, in float64.
    The routine is compiled by numba, an optional extra: `pip install "fednmap[numba]"`. Without, it is interpreted.

    Reference: Johnson, A dynamic programming algorithm for the fused lasso and L0-segmentation, JCGS 2013.

    >>> TotalVariation(1.0).prox(torch.tensor([0.0, 0.0, 6.0, 6.0]), 1.0)
    tensor([0.5000, 0.5000, 5.5000, 5.5000])
    """

    weight: float

    def __post_init__(self) -> None:
        nonnegative(self, "weight")
        _solver()

    def value(self, x: Tensor) -> Tensor:
        return self.weight * x.diff(dim=-1).abs().sum(-1)

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        threshold = self.check_step(step) * self.weight
        if threshold == 0 or v.shape[-1] == 1:
            return v
        rows = v.detach().reshape(-1, v.shape[-1]).double().cpu().contiguous().numpy()
        out = np.empty_like(rows)
        _solver()(rows, threshold, out)
        return torch.from_numpy(out).to(v).view_as(v)


@lru_cache(maxsize=1)
def _solver() -> Callable[[Array, float, Array], None]:
    """`fuse_rows`, compiled where numba is installed."""
    try:
        from numba import njit
    except ImportError:
        warnings.warn(
            "TotalVariation is not compiled, and some hundred times slower; pip install 'fednmap[numba]'",
            UserWarning,
            stacklevel=4,  # the line that calls the constructor, past __post_init__ and __init__
        )
        return fuse_rows
    solver: Any = njit(nogil=True)(fuse_rows)
    return solver  # type: ignore[no-any-return]


def fuse_rows(rows: Array, weight: float, out: Array) -> None:
    r"""Write $\arg\min_x \sum_j (x_j - y_j)^2 / 2 + w |x_{j+1} - x_j|$, w = weight, into `out` for each row y.

    Let m_j(b) be the smallest cost of coordinates 1..j given x_j = b. Its derivative is increasing and
    piecewise linear; passing the next edge clips it to [-weight, weight], at the points low_j and high_j.
    The derivative is kept as its knots, each with the change of slope and of intercept there: clipping
    drops knots from both ends and adds one at each, so all clips together cost O(p). Going back,
    x_j = clip(x_{j+1}, low_j, high_j).
    """
    p = rows.shape[1]
    low, high = np.empty(p), np.empty(p)
    work: Any = np.empty((3, 2 * p))
    knot, slope, shift = work[0], work[1], work[2]
    given = weight
    for i in range(rows.shape[0]):
        y, x = rows[i], out[i]
        if not np.isfinite(np.sum(y)):
            x[:] = np.nan
            continue
        # From this weight on x is constant; more would only push y out of the sums by rounding.
        weight = min(given, p * (np.max(y) - np.min(y)))
        # knots left..right; before any clip there are none, and the derivative is b - y_0 everywhere
        left, right = p, p - 1
        slope_lo, shift_lo = 1.0, -y[0]  # the leftmost line
        slope_hi, shift_hi = 1.0, -y[0]  # the rightmost line
        for j in range(p - 1):
            while left <= right and slope_lo * knot[left] + shift_lo <= -weight:
                slope_lo += slope[left]
                shift_lo += shift[left]
                left += 1
            low[j] = (-weight - shift_lo) / slope_lo
            while right >= left and slope_hi * knot[right] + shift_hi >= weight:
                slope_hi -= slope[right]
                shift_hi -= shift[right]
                right -= 1
            high[j] = (weight - shift_hi) / slope_hi
            left -= 1
            knot[left], slope[left], shift[left] = low[j], slope_lo, shift_lo + weight
            right += 1
            knot[right], slope[right], shift[right] = high[j], -slope_hi, weight - shift_hi
            # outside the knots the clipped derivative is constant; the next coordinate adds b - y
            slope_lo, shift_lo = 1.0, -weight - y[j + 1]
            slope_hi, shift_hi = 1.0, weight - y[j + 1]
        while left <= right and slope_lo * knot[left] + shift_lo <= 0.0:
            slope_lo += slope[left]
            shift_lo += shift[left]
            left += 1
        x[p - 1] = -shift_lo / slope_lo
        for j in range(p - 2, -1, -1):
            x[j] = min(max(x[j + 1], low[j]), high[j])
