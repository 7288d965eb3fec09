"""What a run has spent of its privacy, counted by Google's dp-accounting."""

from __future__ import annotations

import logging
import math
from functools import cache
from typing import Any, NamedTuple

from fednmap.names import InputError

GRID = 1e-3  # of privacy losses, rounded up: a valid bound on any grid, 1e-4 above that on one ten times finer
LARGE = (
    60.0  # beyond this epsilon the distribution of privacy losses takes long to compute, and such a guarantee is empty
)
MEANINGLESS = 10.0
SMALLEST, LARGEST = 0.05, 1e4  # noise multipliers that are tried: beyond, there is nothing but noise


class Epsilon(NamedTuple):
    """Two upper bounds on the same epsilon."""

    pld: float
    """From the distribution of privacy losses: the tighter one. That by RDP, where it would be above LARGE."""
    rdp: float
    """From Renyi divergences."""


@cache
def epsilon(noise_multiplier: float, share: float, rounds: int, delta: float) -> Epsilon:
    """Return the epsilon of `rounds` sums of contributions up to 1, with Gaussian noise, Poisson sampling at `share`.

    Neighbours differ by one contributor who is there or not. `noise_multiplier` is the noise's standard deviation.

    >>> round(epsilon(2.5, 1.0, 15, 1e-5).pld, 1)
    7.3
    """
    if rounds == 0:
        return Epsilon(0.0, 0.0)
    if noise_multiplier == 0:
        return Epsilon(math.inf, math.inf)
    dp = accountants()
    once = dp.GaussianDpEvent(noise_multiplier)
    event = dp.SelfComposedDpEvent(once if share == 1 else dp.PoissonSampledDpEvent(share, once), rounds)
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)  # a line about each Renyi order left out: the bound is valid without it
    try:
        by_rdp = float(dp.rdp.RdpAccountant().compose(event).get_epsilon(delta))
        if not by_rdp <= LARGE:
            return Epsilon(by_rdp, by_rdp)
        by_pld = dp.pld.PLDAccountant(value_discretization_interval=GRID).compose(event).get_epsilon(delta)
    finally:
        logger.setLevel(before)
    return Epsilon(min(float(by_pld), by_rdp), by_rdp)


@cache
def noise_for(target: float, share: float, rounds: int, delta: float) -> float:
    """Return the least noise multiplier, in four digits, with which `rounds` sums cost at most epsilon `target`.

    A target or a number of rounds that is not positive raises InputError.

    >>> noise_for(2.0, 0.05, 100, 1e-5)
    1.345
    """
    if not 0 < target < math.inf:
        raise InputError(f"epsilon is {target}; it must be a finite number above 0")
    if rounds == 0:
        raise InputError(f"epsilon {target:g} is asked for a run of 0 rounds, which spends nothing; give rounds")

    def cost(noise: float) -> float:
        return epsilon(noise, share, rounds, delta).pld

    if cost(LARGEST) > target:
        least = cost(LARGEST)
        raise InputError(
            f"epsilon {target:g} is reached by no noise multiplier up to {LARGEST:g}: {rounds} rounds with delta = "
            f"{delta:g} cost at least {least:.2g}; ask for a larger epsilon, or fewer rounds"
        )
    if cost(SMALLEST) <= target:
        return SMALLEST
    high = 1.0  # enough noise, and half of it is too little
    while cost(high) > target:
        high *= 2
    while cost(high / 2) <= target:
        high /= 2
    low = high / 2
    while high / low > 1.0004:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if cost(middle) <= target else (middle, high)
    digits = 3 - math.floor(math.log10(high))
    return float(math.ceil(high * 10**digits) / 10**digits)


def check_delta(delta: float, contributors: int) -> None:
    """Check that delta is a probability below 1 / contributors: a larger one would allow revealing one of them."""
    if isinstance(delta, bool) or not isinstance(delta, int | float) or not 0 < delta < 1:
        raise InputError(f"delta is {delta!r}; it must be above 0 and below 1, 1e-5 say")
    if delta >= 1 / contributors:
        raise InputError(
            f"delta is {delta:g} with {contributors} contributors; it must be below 1/{contributors}, or "
            "publishing one of them at random would count as private"
        )


def doubt(value: float, what: str) -> str | None:
    """Return a line where an epsilon protects nobody."""
    if value <= MEANINGLESS:
        return None
    odds = f"e^{value:.3g}" if value > 20 else f"{math.exp(value):.3g}"
    return (
        f"epsilon is {value:.3g}: the odds that somebody guesses about {what} may change by a factor of {odds}, which "
        f"is no protection worth the name; use more noise, fewer rounds or a smaller share"
    )


def accountants() -> Any:
    """Return the package dp_accounting, with its accountants."""
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError:
        raise InputError("counting epsilon needs dp-accounting; pip install fednmap[privacy]") from None
    return dp_accounting
