"""Who hears about a run while it goes on, and may end it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fednmap.names import InputError
from fednmap.simulation.loop import Round

Record = dict[str, float]
"""What was measured after some number of rounds: column name -> number."""

Answer = bool | str | None
"""True or a reason ends the run after this round; anything else lets it go on."""


class Callback:
    """Hears about a run while it goes on; override what you need. Returning True, or a reason, ends the run."""

    def on_begin(self) -> None:
        """Before the first round, or before the first of those that are still to do."""

    def on_round(self, round: Round, totals: Record) -> Answer:
        """After every round, with the bytes and seconds spent so far."""
        return None

    def on_record(self, record: Record) -> Answer:
        """After every measurement. A reason to `stop` also hears those of the earlier part of a run that goes on."""
        return None


class Tolerance(Callback):
    """Ends a run when |F_nat| has fallen to `tol` times its first value, or to `tol` where that was below 1."""

    def __init__(self, tol: float) -> None:
        self.tol = _positive("tol", tol)
        self.on_begin()

    def on_begin(self) -> None:
        self._first: float | None = None

    def on_record(self, record: Record) -> Answer:
        residual = math.sqrt(record["stationarity"])
        self._first = residual if self._first is None else self._first
        if residual <= self.tol * max(1.0, self._first):
            return f"converged: |F_nat| = {residual:.1e}, tolerance {self.tol:g}"
        return None


class Patience(Callback):
    """Ends a run when `quantity` has not fallen by `least` (relative) in so many measurements."""

    def __init__(self, measurements: int, quantity: str = "objective", least: float = 1e-4) -> None:
        self.measurements, self.quantity, self.least = measurements, quantity, least
        _positive("measurements", measurements)
        self.on_begin()

    def on_begin(self) -> None:
        self._best, self._waited = math.inf, 0

    def on_record(self, record: Record) -> Answer:
        if self.quantity not in record:
            raise InputError(
                f"Patience waits for {self.quantity!r}, which is not measured; there is {', '.join(record)}"
            )
        value = record[self.quantity]
        if value < self._best - self.least * abs(self._best) or self._best == math.inf:
            self._best, self._waited = min(value, self._best), 0
            return None
        self._waited += 1
        if self._waited >= self.measurements:
            return f"no progress: {self.quantity} has not fallen in {self._waited} measurements"
        return None


class TimeLimit(Callback):
    """Ends a run after so many seconds of computing and measuring."""

    def __init__(self, seconds: float) -> None:
        self.seconds = _positive("seconds", seconds)

    def on_round(self, round: Round, totals: Record) -> Answer:
        spent = totals["train_seconds"] + totals["eval_seconds"]
        return f"time limit of {self.seconds:g} s reached" if spent >= self.seconds else None


class _Function(Callback):
    """A function of the record as a callback."""

    def __init__(self, function: Callable[[Record], Any]) -> None:
        self._function = function

    def on_record(self, record: Record) -> Answer:
        answer: Answer = self._function(record)
        return answer


Listener = Callback | Callable[[Record], Any]


def listeners(*given: Listener | Iterable[Listener] | None) -> list[Callback]:
    """One callback, several, or functions of the record, as a list of callbacks."""
    found: list[Callback] = []
    for one in given:
        if one is None:
            continue
        if isinstance(one, Callback):
            found.append(one)
        elif callable(one) and not isinstance(one, type):
            found.append(_Function(one))
        elif isinstance(one, Iterable) and not isinstance(one, str):
            found += [callback for each in one for callback in listeners(each)]
        else:
            raise InputError(f"a callback is {one!r:.60}; give a Callback, or a function of the record")
    return found


def heard(callbacks: Iterable[Callback], tell: Callable[[Callback], Answer]) -> str | None:
    """Tell all of them; the first reason that one of them gives to end the run."""
    reason = None
    for callback in callbacks:
        try:
            answer = tell(callback)
        except StopIteration:
            answer = True
        if reason is None and isinstance(answer, str):
            reason = answer or None
        elif reason is None and _is_true(answer):
            reason = f"ended by {_name(callback)}"
    return reason


def _is_true(answer: object) -> bool:
    """True, also as a comparison of arrays or tensors gives it; no other value ends a run."""
    is_word = isinstance(answer, bool | np.bool_) or (isinstance(answer, Tensor) and answer.dtype == torch.bool)
    return is_word and bool(answer)


def _name(callback: Callback) -> str:
    inner = callback._function if isinstance(callback, _Function) else type(callback)
    return str(getattr(inner, "__name__", "a callback"))


def _positive(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < value < math.inf:
        raise InputError(f"{name} is {value!r}; it must be a finite number above 0")
    return value
