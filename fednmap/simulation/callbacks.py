"""Callbacks and stopping rules: called during a run, they may end it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fednmap.measure import rise
from fednmap.names import InputError
from fednmap.simulation.loop import Round

Record = dict[str, float]
"""What was measured after some number of rounds: column name -> number."""

Answer = bool | str | None
"""True or a reason ends the run after this round; anything else lets it continue."""


class Callback:
    """What is called during a run; override what you need. To return True, or a reason, ends the run.

    >>> class Enough(Callback):
    ...     def on_record(self, record):
    ...         return "small enough" if record["objective"] < 0.1 else None
    """

    wants_residual: ClassVar[bool] = False
    """Whether `on_residual` is to be called."""

    def on_begin(self) -> None:
        """Run before the first round."""

    def on_round(self, round: Round, totals: Record) -> Answer:
        """Run after every round, with the bytes and seconds spent so far."""
        return None

    def on_spent(self, totals: Record) -> Answer:
        """Run after every round, without the Round: stopping rules on bytes and time work between machines too."""
        return None

    def on_residual(self, residual: float) -> bool:
        """Return True to measure now; called after a round that revealed $|F_{nat}|$ of the model before it."""
        return False

    def on_record(self, record: Record) -> Answer:
        """Run after every measurement; a stopping rule also gets the earlier records of a continued run."""
        return None


class Tolerance(Callback):
    r"""A rule that ends a run when its model is stationary up to a tolerance.

    tol:      relative: $|F_{nat}(x_t)| \le \text{tol} \, |F_{nat}(x_0)|$, with $x_0$ the model before the first round.
    absolute: $|F_{nat}(x_t)| \le \text{absolute}$.

    If both are given, either suffices; $\psi$ must not be above its first value. $F_{nat}$ has the gamma with which the
    run is measured. A run always ends with a measurement. A method that knows $\nabla f(x_t)$ from its round (FedNMap
    with one local step, exact gradients and every client counted; see `Algorithm.known_gradient`) is judged after each
    round; when $x_t$ has passed, $x_{t+1}$ is measured, and the run ends if it passes too. Any other is judged at each
    measurement.

    >>> Tolerance(1e-6).on_record({"stationarity": 4.0})
    >>> Tolerance(absolute=1e-6).on_record({"stationarity": 1e-14})
    'converged: |F_nat| 1.0e-07, absolute tolerance 1e-06'
    """

    wants_residual = True

    def __init__(self, tol: float | None = None, *, absolute: float | None = None) -> None:
        if tol is None and absolute is None:
            raise InputError("a tolerance needs a number: Tolerance(1e-6), or Tolerance(absolute=1e-6)")
        if tol is not None and _positive("tol", tol) >= 1:
            raise InputError(f"tol is {tol}; relative to the first |F_nat| it must be below 1")
        self.tol, self.absolute = tol, None if absolute is None else _positive("absolute", absolute)
        self.on_begin()

    def on_begin(self) -> None:
        self._first: float | None = None
        self._psi = math.inf

    def on_residual(self, residual: float) -> bool:
        return residual <= self._limit

    def on_record(self, record: Record) -> Answer:
        if "stationarity" not in record:
            raise InputError("a tolerance needs |F_nat|, which is not measured here; use Patience or TimeLimit")
        residual = math.sqrt(record["stationarity"])
        if not math.isfinite(residual):
            return None  # not measured, or too large for the precision
        if self._first is None:
            self._first, self._psi = residual, record.get("objective", math.inf)
        if not residual <= self._limit:
            return None
        if rise(self._psi, record.get("objective", -math.inf)):
            return None  # far out the residual drowns in the rounding of x
        words = f"converged: |F_nat| {residual:.1e}"
        if self.absolute is not None and residual <= self.absolute:
            return f"{words}, absolute tolerance {self.absolute:g}"
        return f"{words}, first {self._first:.1e}, tolerance {self.tol:g}"

    @property
    def _limit(self) -> float:
        relative = 0.0 if self.tol is None or self._first is None else self.tol * self._first
        return max(relative, self.absolute or 0.0)


class Patience(Callback):
    """Ends a run when `quantity` has not fallen by the share `least` in this many measurements.

    >>> rule = Patience(1)
    >>> rule.on_record({"objective": 2.0})
    >>> rule.on_record({"objective": 2.0})
    'no progress: objective has not fallen in 1 measurements'
    """

    def __init__(self, measurements: int, quantity: str = "objective", least: float = 1e-4) -> None:
        self.measurements, self.quantity, self.least = measurements, quantity, least
        _positive("measurements", measurements)
        self.on_begin()

    def on_begin(self) -> None:
        self._best, self._waited = math.inf, 0

    def on_record(self, record: Record) -> Answer:
        if self.quantity not in record:
            raise InputError(
                f"Patience needs {self.quantity!r}, which is not measured; choose one of {', '.join(record)}"
            )
        value = record[self.quantity]
        if not math.isfinite(value):
            return None
        if value < self._best - self.least * abs(self._best) or self._best == math.inf:
            self._best, self._waited = min(value, self._best), 0
            return None
        self._waited += 1
        if self._waited >= self.measurements:
            return f"no progress: {self.quantity} has not fallen in {self._waited} measurements"
        return None


class TimeLimit(Callback):
    """Ends a run after a round when computing and measuring took this many seconds, earlier parts of it included.

    >>> TimeLimit(60).on_spent({"train_seconds": 59.0, "eval_seconds": 2.0})
    'time limit of 60 s reached'
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = _positive("seconds", seconds)

    def on_spent(self, totals: Record) -> Answer:
        spent = totals["train_seconds"] + totals["eval_seconds"]
        return f"time limit of {self.seconds:g} s reached" if spent >= self.seconds else None

    def on_record(self, record: Record) -> Answer:
        return self.on_spent(record) if record["round"] else None


class _Function(Callback):
    """A function of the record as a callback."""

    def __init__(self, function: Callable[[Record], Any]) -> None:
        self.on_record = function  # type: ignore[method-assign, assignment]


Listener = Callback | Callable[[Record], Any]


def listeners(*given: Listener | Iterable[Listener] | None) -> list[Callback]:
    """Return one callback, several, or functions of the record as a list of callbacks."""
    found: list[Callback] = []
    for one in given:
        if isinstance(one, Callback):
            found.append(one)
        elif callable(one) and not isinstance(one, type):
            found.append(_Function(one))
        elif isinstance(one, Iterable) and not isinstance(one, str):
            found += listeners(*one)
        elif one is not None:
            raise InputError(f"expected a Callback or a function of the record, got {one!r:.60}")
    return found


class Reason(str):
    """Why a run ends, in words; `by` names the callback that ends it."""

    by: str


def first_reason(callbacks: Iterable[Callback], call: Callable[[Callback], Answer]) -> Reason | None:
    """Call every callback; return the first reason to end the run."""
    reason = None
    for callback in callbacks:
        try:
            answer = call(callback)
        except StopIteration:
            answer = True
        if isinstance(answer, bool | np.bool_) or (isinstance(answer, Tensor) and answer.dtype == torch.bool):
            answer = f"ended by {name_of(callback)}" if answer else None
        if reason is None and isinstance(answer, str) and answer:
            reason = Reason(answer)
            reason.by = name_of(callback)
    return reason


def final_reason(stops: Iterable[Callback], records: Iterable[Record]) -> Reason | None:
    """Return the reason to end that the last record of a run gives; the stopping rules receive all records in order."""
    stops, reason = list(stops), None
    for callback in stops:
        callback.on_begin()
    for record in records:
        reason = first_reason(stops, lambda callback: callback.on_record(record))  # noqa: B023
    return reason


def name_of(callback: Callback) -> str:
    """Of its class, or of the function that it calls."""
    inner = callback.on_record if isinstance(callback, _Function) else type(callback)
    return str(getattr(inner, "__name__", "a callback"))


def _positive(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < value < math.inf:
        raise InputError(f"{name} is {value!r}; it must be a finite number above 0")
    return value
