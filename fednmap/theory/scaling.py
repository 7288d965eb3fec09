"""Does more of something, clients or local steps, pay in proportion? A sweep, its slope, and the theory's forecast."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from fednmap.names import InputError

LINEAR = -0.5
"""Slope of log |F_nat|^2 against log n or log Q under linear speedup: |F_nat|^2 = O(1/sqrt(n Q T)), Theorem 1."""

Over = Literal["n", "q"]


@dataclass(frozen=True, eq=False)
class Speedup:
    """A sweep over n or Q: what was reached, how it scales, where it stops paying."""

    over: Over
    values: tuple[int, ...]
    reached: npt.NDArray[np.float64]
    """Final squared residual, (values, trials)."""
    slope: float
    """Mean over the trials of the slope of log residual against log value."""
    low: float
    high: float
    """95 % confidence interval of the slope (Student's t over the trials); infinite for a single trial."""

    @property
    def name(self) -> str:
        """The symbol of what is swept."""
        return "n" if self.over == "n" else "Q"

    @property
    def verdict(self) -> str:
        """Whether linear speedup is seen: the whole interval at or below -1/2."""
        if self.high <= LINEAR:
            return "linear speedup is seen"
        return "linear speedup is not seen" if self.low > LINEAR else "undecided: use more trials or a wider sweep"

    @property
    def steps(self) -> tuple[float, ...]:
        """Slopes between neighbouring values, of the trials' geometric means."""
        y, x = np.log(self.reached).mean(1), np.log(self.values)
        return tuple(float(v) for v in np.diff(y) / np.diff(x))

    @property
    def saturates_at(self) -> int | None:
        """The first value from which on no step keeps half of the linear slope; None if the last step still does."""
        flat = [slope > LINEAR / 2 for slope in self.steps]
        for k, value in enumerate(self.values[:-1]):
            if all(flat[k:]):
                return value
        return None

    def lines(self, linear_until: float | None = None) -> list[str]:
        """Return what was found; `linear_until` is the value up to which the theory expects it."""
        name = self.name
        trials = self.reached.shape[1]
        interval = f"95 % interval [{self.low:.3f}, {self.high:.3f}] over {trials} trials"
        if trials == 1:
            interval = "one trial, so without an interval"
        at = self.saturates_at
        lines = [
            f"slope of log |F_nat|^2 against log {name}: {self.slope:.3f}, {interval}; linear is {LINEAR} or steeper",
            f"{self.verdict}; " + ("no saturation in the sweep" if at is None else f"saturates at {name} = {at}"),
        ]
        if linear_until is not None:
            expected = f"linear up to about {name} = {linear_until:.3g}" if linear_until >= 1 else "not linear"
            lines.append(f"theory (rounds_to, constants 1): {expected}")
        return lines


def fit_speedup(run: Callable[[int, int], float], over: Over, values: Sequence[int], trials: int) -> Speedup:
    """Return the sweep: run(value, trial) is the squared residual reached with `value` clients or local steps.

    >>> found = fit_speedup(lambda n, trial: 3.0 / n, "n", [2, 4, 8], trials=2)
    >>> round(found.slope, 6), found.verdict, found.saturates_at
    (-1.0, 'linear speedup is seen', None)
    """
    over, ordered = checked(over, values)
    if trials < 1:
        raise InputError(f"trials is {trials}; it must be at least 1")
    reached = np.array([[run(value, trial) for trial in range(trials)] for value in ordered])
    if not (np.isfinite(reached).all() and (reached > 0).all()):
        raise ArithmeticError(f"a run of the sweep reached {reached.max():g}; use smaller step sizes")
    return Speedup(over, ordered, reached, *slope_with_interval(ordered, reached))


def slope_with_interval(values: Sequence[float], reached: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """Slope of log reached, (values, trials), against log value: mean over the trials and its 95 % interval."""
    slopes, trials = np.polyfit(np.log(values), np.log(reached), 1)[0], reached.shape[1]
    half = math.inf
    if trials > 1:
        from scipy import stats  # slow to import, and needed only here

        half = float(stats.t.ppf(0.975, trials - 1) * slopes.std(ddof=1) / math.sqrt(trials))
    mean = float(slopes.mean())
    return mean, mean - half, mean + half


def checked(over: str, values: Sequence[int]) -> tuple[Over, tuple[int, ...]]:
    """Return what is swept, the values in order."""
    if over not in ("n", "q"):
        raise InputError(f"over is {over!r}; sweep over n (clients) or q (local steps)")
    different = tuple(sorted(set(values)))
    if len(different) < 2 or different[0] < 1:
        raise InputError(f"values are {list(different)}; a slope needs two different numbers, 1 or more")
    return "n" if over == "n" else "q", different
