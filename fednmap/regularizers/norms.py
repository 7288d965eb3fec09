"""Norms, their squares and their relatives: sparsity, weight decay, low rank, piecewise constant models."""

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
from torch.linalg import vector_norm
from torch.nn.functional import softshrink

from fednmap.core import Regularizer
from fednmap.names import InputError
from fednmap.regularizers.parameters import nonnegative, plain, weights, weights_for, wrong

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Zero(Regularizer):
    r"""No penalty: $\phi(x) = 0$, whose prox is the identity.

    >>> Zero().prox(torch.tensor([1.0, -2.0]), 0.5)
    tensor([ 1., -2.])
    """

    def value(self, x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[:-1])

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        self.check_step(step)
        return v


@dataclass(frozen=True, eq=False)
class L1(Regularizer):
    r"""The l1 norm $\phi(x) = w |x|_1$ with w = weight, or $\sum_j w_j |x_j|$ for a tensor of p weights.

    $$\prox(v, s) = \text{soft}(v, s w) = \sign(v) \max(|v| - s w, 0)$$

    Reference: Tibshirani, Regression shrinkage and selection via the lasso, JRSS B 1996.

    >>> L1(1.0).prox(torch.tensor([3.0, 0.2]), 0.5)
    tensor([2.5000, 0.0000])
    """

    weight: float | Tensor

    def __post_init__(self) -> None:
        weights(self, "weight")

    def value(self, x: Tensor) -> Tensor:
        weight = weights_for(self, self.weight, x, "coordinates")
        return (weight * x.abs()).sum(-1) if isinstance(weight, Tensor) else weight * x.abs().sum(-1)

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        threshold = self.check_step(step) * weights_for(self, self.weight, v, "coordinates")
        return v - v.clamp(-threshold, threshold) if isinstance(threshold, Tensor) else softshrink(v, threshold)


@dataclass(frozen=True)
class ElasticNet(Regularizer):
    r"""The elastic net $\phi(x) = \nu_1 |x|_1 + \nu_2 |x|_2^2$ (no factor 1/2).

    $$\prox(v, s) = \text{soft}(v, s \nu_1) / (1 + 2 s \nu_2)$$

    Reference: Zou and Hastie, Regularization and variable selection via the elastic net, JRSS B 2005.

    >>> ElasticNet(1.0, 0.5).prox(torch.tensor([3.0, 0.2]), 1.0)
    tensor([1., 0.])
    """

    nu1: float
    nu2: float

    def __post_init__(self) -> None:
        nonnegative(self, "nu1", "nu2")

    def value(self, x: Tensor) -> Tensor:
        return self.nu1 * x.abs().sum(-1) + self.nu2 * x.square().sum(-1)

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        step = self.check_step(step)
        return softshrink(v, step * self.nu1).mul_(1 / (1 + 2 * step * self.nu2))


@dataclass(frozen=True)
class SquaredL2(Regularizer):
    r"""Weight decay $\phi(x) = w |x|_2^2$ with w = weight (no factor 1/2).

    $$\prox(v, s) = v / (1 + 2 s w)$$

    Reference: Hoerl and Kennard, Ridge regression, Technometrics 1970.

    >>> SquaredL2(0.5).prox(torch.tensor([3.0, -0.2]), 1.0)
    tensor([ 1.5000, -0.1000])
    """

    weight: float

    def __post_init__(self) -> None:
        nonnegative(self, "weight")

    def value(self, x: Tensor) -> Tensor:
        return self.weight * x.square().sum(-1)

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        return v / (1 + 2 * self.check_step(step) * self.weight)


@dataclass(frozen=True)
class L2(Regularizer):
    r"""The l2 norm $\phi(x) = w |x|_2$, w = weight, and not its square: the whole vector is zero, or shortened.

    $$\prox(v, s) = \max(1 - s w / |v|_2, 0) \, v$$

    Reference: Parikh and Boyd, Proximal algorithms, 2014, section 6.5.1.

    >>> L2(1.0).prox(torch.tensor([3.0, -4.0]), 2.5)
    tensor([ 1.5000, -2.0000])
    """

    weight: float

    def __post_init__(self) -> None:
        nonnegative(self, "weight")

    def value(self, x: Tensor) -> Tensor:
        norm: Tensor = vector_norm(x, dim=-1)
        return self.weight * norm

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        return v * shrinkage(vector_norm(v, dim=-1, keepdim=True), self.check_step(step) * self.weight)


def shrinkage(norm: Tensor, threshold: float | Tensor) -> Tensor:
    """Return max(1 - threshold / norm, 0): 1 for a zero threshold, 0 for a zero norm, NaN for a NaN."""
    return (1 - threshold / norm.clamp_min(torch.finfo(norm.dtype).tiny)).clamp_min_(0)


@dataclass(frozen=True)
class LInf(Regularizer):
    r"""The maximum norm $\phi(x) = w \max_j |x_j|$, w = weight: the largest entries are pulled to a common size.

    $\prox(v, s)$ clamps v to $[-\tau, \tau]$ with $\sum_j \max(|v_j| - \tau, 0) = s w$; 0 where $|v|_1 \le s w$.

    Reference: Parikh and Boyd, Proximal algorithms, 2014, section 6.5.2.

    >>> LInf(1.0).prox(torch.tensor([3.0, -2.0, 0.5]), 2.0)
    tensor([ 1.5000, -1.5000,  0.5000])
    """

    weight: float

    def __post_init__(self) -> None:
        nonnegative(self, "weight")

    def value(self, x: Tensor) -> Tensor:
        return self.weight * x.abs().amax(-1)

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        total = self.check_step(step) * self.weight
        if total == 0:
            return v
        # tau is within `total` of the largest: measured from there and cut, it is right however small `total` is.
        size = v.abs()
        top = size.amax(-1, keepdim=True)
        tau = threshold(size.sub_(top).clamp_min_(-total), total).add_(top).clamp_min_(0)
        return v.clamp(-tau, tau)


def threshold(a: Tensor, total: float) -> Tensor:
    """Return the tau with sum_j max(a_j - tau, 0) = total on each row, of shape (..., 1); total > 0.

    The sum is convex, decreasing and piecewise linear in tau, so Newton's method from the left is
    monotone and drops coordinates for good: it ends when no row drops one. Elsewhere than on the CPU, where
    each iteration would wait for the device, tau is the largest of (a_(1) + ... + a_(k) - total) / k, by a sort.

    Reference: Michelot, A finite algorithm for finding the projection of a point onto the canonical
    simplex of R^n, JOTA 1986.
    """
    if a.device.type != "cpu":
        sums = a.sort(-1, descending=True).values.cumsum(-1)
        ranks = torch.arange(1, a.shape[-1] + 1, device=a.device)
        return ((sums - total) / ranks).amax(-1, keepdim=True)
    count = a.new_full((*a.shape[:-1], 1), a.shape[-1])
    tau = (a.sum(-1, keepdim=True) - total) / count
    while True:
        above = (a - tau).clamp_min_(0)
        excess = above.sum(-1, keepdim=True) - total
        active = above.sign_().sum(-1, keepdim=True)  # a quarter of the time of count_nonzero
        tau = tau + excess / active
        # Rounding may bring a dropped coordinate back, and a NaN has none: "not <" ends the search there too.
        if not bool((active < count).any()):
            return tau
        count = active.minimum(count)


@dataclass(frozen=True, eq=False)
class Slope(Regularizer):
    r"""Sorted l1, $\phi(x) = \sum_j w_j |x|_{(j)}$, with the largest $|x_j|$ first and $w_1 \ge w_2 \ge \dots \ge 0$.

    `weight` is the tensor of the p weights, or the largest of them: then $w_j = w z_j / z_1$ with the Gaussian
    quantiles $z_j = \Phi^{-1}(1 - j q / (2 p))$, which control the false discovery rate at q.

    $\prox(v, s)$: sort $|v|$, subtract $s w$, take the nearest nonincreasing nonnegative sequence (isotonic
    regression, scikit-learn's), undo the sort and give the signs back.

    Reference: Bogdan, van den Berg, Sabatti, Su and Candes, SLOPE - adaptive variable selection via
    convex optimization, Annals of Applied Statistics 2015, equation 1.9 and algorithm 3.

    >>> Slope(torch.tensor([2.0, 1.0])).prox(torch.tensor([3.0, -4.0]), 1.0)
    tensor([ 2., -2.])
    """

    weight: float | Tensor
    q: float = 0.1

    def __post_init__(self) -> None:
        weights(self, "weight")
        if isinstance(self.weight, Tensor) and self.weight.ndim != 1:
            raise wrong(self, "weight", "a number, or a tensor of one weight per coordinate")
        if isinstance(self.weight, Tensor) and bool((self.weight.diff() > 0).any()):
            raise InputError("Slope needs weights that do not increase; sort them in descending order")
        q = plain(self, "q")
        if q is None or not 0 < q < 1:
            raise wrong(self, "q", "a number between 0 and 1")

    def value(self, x: Tensor) -> Tensor:
        return (self._weights(x) * x.abs().sort(-1, descending=True).values).sum(-1)

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        step = self.check_step(step)
        size, order = v.abs().sort(-1, descending=True)
        fit = nonincreasing(size - step * self._weights(v)).clamp_min_(0)
        return torch.empty_like(v).scatter_(-1, order, fit).copysign_(v)

    def _weights(self, x: Tensor) -> Tensor:
        weight = weights_for(self, self.weight, x, "coordinates")
        return weight if isinstance(weight, Tensor) else weight * _quantiles(x.shape[-1], self.q).to(x)


@lru_cache(maxsize=8)
def _quantiles(p: int, q: float) -> Tensor:
    """z_1, ..., z_p over z_1."""
    tail = torch.arange(1, p + 1, dtype=torch.float64, device="cpu") * (q / (2 * p))
    z = -torch.special.ndtri(tail)
    return torch.div(z, z[0])


def nonincreasing(z: Tensor) -> Tensor:
    """Return the nearest nonincreasing sequence to each row of z.

    All rows in one call: each is moved to its own interval, below the row before, so that no pool
    crosses from one row into the next. Done in float64; k rows cost log2(k) of its 53 bits.
    """
    from sklearn.isotonic import isotonic_regression  # a slow import that only this regularizer should cost

    rows = z.detach().reshape(-1, z.shape[-1]).double().cpu()
    lo, hi = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    width = (hi - lo).clamp_min(torch.finfo(torch.float64).tiny)
    floor = 2.0 * torch.arange(len(rows), 0, -1, dtype=torch.float64, device="cpu")[:, None]
    # A row that is not finite is left out of the regression and comes back as NaN, through lo or width.
    flat = (rows - lo) / width + floor
    flat = torch.where(flat.isnan(), floor, flat)  # where it stands, between its neighbours, it pools with none
    fit = torch.from_numpy(isotonic_regression(flat.flatten().numpy(), increasing=False).copy()).view_as(rows)
    nearest: Tensor = ((fit - floor) * width + lo).to(z).view_as(z)
    return nearest


@dataclass(frozen=True)
class Nuclear(Regularizer):
    r"""The nuclear norm $\phi(x) = w \sum_k \sigma_k$, w = weight, of the matrix of `shape` stored in x row by row.

    $$\prox(v, s) = U \text{diag}(\max(\sigma - s w, 0)) V^T \quad \text{for} \quad v = U \text{diag}(\sigma) V^T$$

    For the weight matrices of a network use `PerLayer`, which gives each its own.

    Reference: Cai, Candes and Shen, A singular value thresholding algorithm for matrix completion, SIAM
    Journal on Optimization 2010.

    >>> Nuclear(1.0, (2, 2)).prox(torch.tensor([3.0, 0.0, 0.0, 0.5]), 1.0)
    tensor([2., 0., 0., 0.])
    """

    weight: float
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        nonnegative(self, "weight")
        if len(self.shape) != 2 or min(self.shape) < 1:
            raise InputError(f"Nuclear needs the shape (rows, columns) of a matrix, given {self.shape}")

    def value(self, x: Tensor) -> Tensor:
        # The decomposition refuses numbers that are not finite; those rows are to be NaN, not an error, here and below.
        broken = ~x.sum(-1, keepdim=True).isfinite()
        sigma: Tensor = torch.linalg.svdvals(self._matrices(x.masked_fill(broken, 0.0)))
        return (self.weight * sigma.sum(-1)).masked_fill(broken.squeeze(-1), torch.nan)

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        threshold = self.check_step(step) * self.weight
        broken = ~v.sum(-1, keepdim=True).isfinite()
        u, sigma, wt = torch.linalg.svd(self._matrices(v.masked_fill(broken, 0.0)), full_matrices=False)
        x: Tensor = (u * softshrink(sigma, threshold).unsqueeze(-2)) @ wt
        return x.flatten(-2).masked_fill_(broken, torch.nan)

    def _matrices(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.shape[0] * self.shape[1]:
            raise InputError(f"a matrix of shape {self.shape} has not {x.shape[-1]} entries, as the vector has")
        return x.reshape(*x.shape[:-1], *self.shape)


@dataclass(frozen=True)
class TotalVariation(Regularizer):
    r"""Total variation $\phi(x) = w \sum_j |x_{j+1} - x_j|$ with w = weight: piecewise constant models.

    $\prox(v, s)$ has no closed form; it is computed exactly, in time linear in p, row by row, in float64.
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
