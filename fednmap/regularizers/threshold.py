"""The one equation behind the simplex, the l1 ball and the l-infinity norm."""

from __future__ import annotations

from torch import Tensor


def threshold(a: Tensor, total: float) -> Tensor:
    """The tau with sum_j max(a_j - tau, 0) = total on each row, of shape (..., 1); total > 0.

    The sum is convex, decreasing and piecewise linear in tau, so Newton's method from the left is
    monotone and drops coordinates for good: it ends when no row drops one. A sort would do it in one
    pass that costs more than all the iterations.

    Reference: Michelot, A finite algorithm for finding the projection of a point onto the canonical
    simplex of R^n, JOTA 1986.
    """
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
