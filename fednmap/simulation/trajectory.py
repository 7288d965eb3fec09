"""Running a method and measuring it as it goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fednmap.core import Algorithm, Problem, Regularizer
from fednmap.measure import evaluate
from fednmap.names import InputError
from fednmap.problems import FiniteSum, Network
from fednmap.simulation import distributed
from fednmap.simulation.loop import Diverged, Round, first_point, simulate

Record = dict[str, float]
"""What was measured after some number of rounds: column name -> number."""

Metric = Callable[[Tensor], float]


class Callback:
    """Hears about a run while it goes on; override what you need."""

    def on_round(self, round: Round, totals: Record) -> None:
        """After every round, with the bytes and seconds spent so far."""

    def on_record(self, record: Record) -> None:
        """After every measurement."""


@dataclass
class Result:
    """What a run leaves: the last model x and one record a measurement."""

    problem: Problem
    x: Tensor
    records: list[Record] = field(default_factory=list)

    @property
    def final(self) -> Record:
        return self.records[-1]

    def column(self, name: str) -> list[float]:
        """One quantity along the run, such as result.column("stationarity")."""
        return [record[name] for record in self.records]

    def module(self) -> nn.Module:
        """The trained torch.nn.Module, for problems made from one."""
        if not isinstance(self.problem, Network):
            raise InputError(f"{type(self.problem).__name__} is not made from a torch module; use result.x")
        return self.problem.module(self.x)


def run(
    algorithm: Algorithm,
    problem: Problem,
    *,
    rounds: int,
    every: int = 10,
    closing: int = 1,
    phi: Regularizer | None = None,
    measure_gamma: float | None = None,
    metrics: Mapping[str, Metric] | None = None,
    callbacks: Iterable[Callback] = (),
    start: Tensor | None = None,
    after: Round | None = None,
    before: Record | None = None,
    history: bool = True,
    **options: Any,
) -> Result:
    """Run `rounds` rounds, measuring before the first one, every `every` rounds and at the end.

    closing:       how many of the last rounds are all measured: a mean over them is less noisy than one of them.
    phi:           the regularizer of the objective that is measured; default the algorithm's own.
    measure_gamma: gamma of the natural residual; default the algorithm's gamma, else eta_a eta_s Q times 4.
    metrics:       more to measure: name -> function of the model x.
    callbacks:     hear every round and every record.
    after, before: to go on from a checkpoint: its round and its totals of bytes and seconds.
    history:       keep all records in the result; without, only the last, for long runs whose records a callback keeps.
    options:       of `simulate`.

    If the iterates become non-finite, the `Diverged` error carries what was measured so far as `.result`.
    """
    if every < 1 or closing < 1:
        raise InputError(f"every is {every}, closing {closing}; measure every 1 round or more, and the last 1 or more")
    phi = algorithm.phi if phi is None else phi
    gamma = measure_gamma or getattr(algorithm, "gamma", None) or 1.0
    start = first_point(problem, start)
    result = Result(problem, start if after is None else algorithm.model(after.server))
    divided = _divided(problem)
    clock = {"train_seconds": 0.0, "eval_seconds": 0.0, "bytes_up": 0.0, "bytes_down": 0.0}
    if before is not None:
        clock = {name: before[name] for name in clock}

    def measure(done: int, x: Tensor) -> None:
        began = time.perf_counter()
        values = evaluate(divided, phi, x, gamma) | {name: f(x) for name, f in (metrics or {}).items()}
        clock["eval_seconds"] += time.perf_counter() - began
        result.x = x
        if not history:
            result.records.clear()
        result.records.append({"round": done, **values, **clock})
        for callback in callbacks:
            callback.on_record(result.records[-1])

    try:
        rounds_to_go = simulate(algorithm, problem, rounds=rounds, start=start, after=after, **options)
        if after is None:
            measure(0, algorithm.model(algorithm.init(start)[0]))
        while True:
            began = time.perf_counter()
            last = next(rounds_to_go, None)
            if last is None:
                return result
            clock["train_seconds"] += time.perf_counter() - began
            clock["bytes_up"] += last.bytes_up
            clock["bytes_down"] += last.bytes_down
            done = last.t + 1
            if done % every == 0 or done > rounds - closing:
                measure(done, algorithm.model(last.server))
            for callback in callbacks:
                callback.on_round(last, dict(clock))
    except Diverged as error:
        error.result = result
        raise


def _divided(problem: Problem) -> Problem:
    """The problem with the sums over all data shared between the processes, if there are several."""
    return _Divided(problem) if distributed.size() > 1 and isinstance(problem, FiniteSum) else problem


class _Divided:
    def __init__(self, problem: FiniteSum) -> None:
        self.n, self.dim, self.oracle = problem.n, problem.dim, problem.oracle
        self._part = problem.part(distributed.rank(), distributed.size())

    def loss(self, x: Tensor) -> Tensor:
        return distributed.total([self._part.loss(x)])[0]

    def gradient(self, x: Tensor) -> Tensor:
        return distributed.total([self._part.gradient(x)])[0]
