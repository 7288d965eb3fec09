"""Running a method and measuring it as it goes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fednmap.core import Algorithm, Problem, Regularizer, State, info_of
from fednmap.measure import EVALUATED, evaluate, objective, problem_gamma, quantity, residual, rise
from fednmap.names import InputError
from fednmap.simulation import distributed
from fednmap.simulation.callbacks import Callback, Listener, Reason, Record, first_reason, listeners
from fednmap.simulation.loop import (
    Diverged,
    Round,
    check_kinds,
    federation_of,
    first_point,
    integers,
    origin,
    simulate,
    with_secagg,
)
from fednmap.simulation.sums import divided
from fednmap.simulation.threads import ThreadPool
from fednmap.simulation.uplink import Federation, Part, Pipeline, UplinkParts

Metric = Callable[[Tensor], float]

TOTALS = ("train_seconds", "eval_seconds", "bytes_up", "bytes_down")
BRIEF = ("objective", "stationarity", "zeros")
"""What the repr of a Result shows."""
KEPT = (
    *("method", "trial", "rounds", "seconds", "measure_gamma", "error", "ended", "ended_by", "warning", "check"),
    "model_sha256",
)
"""What a run folder writes apart from measured numbers; no metric may have these names."""


@dataclass(repr=False)
class Result:
    """The result of a run: the last model x, a record per measurement, and the last round, to continue from.

    >>> from fednmap.algorithms import FedNMap
    >>> from fednmap.regularizers import L1
    >>> from fednmap.testing import heterogeneous
    >>> run_and_measure(FedNMap(L1(0.2), eta_a=0.02, Q=5), heterogeneous(), rounds=20).column("round")
    [0, 10, 20]
    """

    problem: Problem
    x: Tensor
    measure_gamma: float
    """gamma of the natural residual in the records."""
    records: list[Record] = field(default_factory=list)
    last: Round | None = None
    """The last round, to continue from; None if there was none."""
    totals: Record = field(default_factory=lambda: dict.fromkeys(TOTALS, 0.0))
    """Bytes and seconds so far."""
    ended: str = ""
    """Why the run ended before its rounds were done; empty if they were."""
    ended_by: str = ""
    """The name of the callback that ended it."""
    warning: str = ""
    """That psi ended above its start; empty if it did not."""

    def __repr__(self) -> str:
        last = self.records[-1] if self.records else {}
        words = [quantity(key).words(value) for key, value in last.items() if key in BRIEF]
        done = f"{last['round']:g} rounds" if last else "no records"
        return f"Result({', '.join([done, *words, *filter(None, (self.ended, self.warning))])})"

    @property
    def final(self) -> Record:
        """The last record."""
        return self.records[-1]

    def column(self, name: str) -> list[float]:
        """Return one quantity along the run, such as result.column("stationarity")."""
        return [record[name] for record in self.records]

    def module(self) -> nn.Module:
        """Return the trained torch.nn.Module; raise InputError where the problem is not made from one."""
        module = info_of(self.problem).module
        if module is None:
            raise InputError(f"{type(self.problem).__name__} is not made from a torch module; use result.x")
        return module(self.x)


def run_and_measure(
    algorithm: Algorithm,
    problem: Problem,
    *,
    rounds: int,
    every: int = 10,
    closing: int = 1,
    phi: Regularizer | None = None,
    measure_gamma: float | None = None,
    metrics: Mapping[str, Metric] | None = None,
    sample: Problem | None = None,
    callbacks: Listener | Iterable[Listener] = (),
    stop: Listener | Iterable[Listener] | None = None,
    start: Tensor | None = None,
    after: Round | Result | None = None,
    before: Record | None = None,
    earlier: Iterable[Record] = (),
    history: bool = True,
    threads: int | None = None,
    uplink: UplinkParts | None = None,
    secagg: Part | None = None,
    **options: Any,
) -> Result:
    """Run a method and measure it: before the first round, every `every` rounds and at the end.

    The arguments are those of `fednmap.run`, which also keeps run folders; `options` are those of `simulate`.
    """
    check_kinds(algorithm, problem)
    check_measuring(every, closing, measure_gamma, metrics or {})
    if sample is not None and not (isinstance(sample, Problem) and sample.dim == problem.dim):
        raise InputError(
            f"expected sample to be a problem of {problem.dim} parameters, got {type(sample).__name__}; leave it out"
        )
    phi = algorithm.phi if phi is None else phi
    start, stops = first_point(problem, start), listeners(stop)
    pool = ThreadPool(threads)
    whole = divided(problem, pool)
    part = whole if sample is None else divided(sample, pool)
    began = time.perf_counter()
    gamma = problem_gamma(whole, phi, origin(problem, start)) if measure_gamma is None else measure_gamma
    found_gamma = time.perf_counter() - began
    others = listeners(callbacks)
    everyone = [*others, *stops]
    result = _continued(algorithm, problem, start, gamma, after, before)
    pipeline, federation = Pipeline(with_secagg(uplink, secagg)), federation_of(problem, **options)
    earlier = list(earlier) or result.records
    _check_spent(result.last, earlier, pipeline, federation)
    if isinstance(after, Round) and earlier and sample is None:
        _check_belongs(after, earlier[-1], float(objective(whole, phi, result.x)))
    clock = result.totals
    clock["eval_seconds"] += found_gamma

    def measure(done: int, server: State, ends: bool) -> Record:
        """Measure: the last time on all rows."""
        began, x, of = time.perf_counter(), algorithm.model(server), whole if ends else part
        values = evaluate(of, phi, x, gamma) | {name: float(f(x)) for name, f in (metrics or {}).items()}
        values |= algorithm.extra_metrics(server)
        values |= pipeline.spent(federation, done)
        clock["eval_seconds"] += time.perf_counter() - began
        result.x = x.clone()  # the server's own, for many methods, from which a run may continue
        return {"round": done, **values, **clock}

    def enter(record: Record) -> None:
        if not history:
            result.records.clear()
        result.records.append(record)

    for callback in everyone:
        callback.on_begin()
    known = list(earlier)
    for record in known:
        first_reason(stops, lambda callback: callback.on_record(record))  # noqa: B023

    def counted(rounds: Iterator[Round]) -> Iterator[Round]:
        """The rounds, whose seconds and bytes are entered."""
        began = time.perf_counter()
        for last in rounds:
            clock["train_seconds"] += time.perf_counter() - began
            clock["bytes_up"] += last.bytes_up
            clock["bytes_down"] += last.bytes_down
            result.last = last
            yield last
            began = time.perf_counter()

    def revealed(before: State, last: Round) -> float | None:
        mean_of_all = all(part.keeps_mean for part in pipeline.parts) and len(last.counted) == problem.n
        if not mean_of_all or not info_of(problem).exact_gradients:
            return None
        began, found = time.perf_counter(), algorithm.known_gradient(before, last.server)
        size = None if found is None else float(residual(*found, phi, gamma).norm())
        clock["eval_seconds"] += time.perf_counter() - began
        return size

    try:
        to_go = simulate(
            algorithm,
            problem,
            rounds=rounds,
            start=start,
            after=result.last,
            threads=threads,
            uplink=pipeline.parts or None,
            **options,
        )
        reason = measure_rounds(
            counted(to_go),
            algorithm.init(start)[0] if result.last is None else result.last.server,
            clock,
            measure,
            revealed,
            rounds=rounds,
            every=every,
            closing=closing,
            begin=None if result.last or result.records else 0,
            sampled=sample is not None,
            stops=stops,
            others=[*listeners(enter), *others],
        )
        known = known or [*result.records]
        result.ended, result.ended_by = (str(reason), reason.by) if reason else ("", "")
        if result.records and result.final["round"]:
            recorded = sample is None and known and not known[0]["round"]  # on all rows
            x_0 = algorithm.model(algorithm.init(start)[0])
            first = known[0]["objective"] if recorded else float(objective(whole, phi, x_0))
            result.warning = rise(first, result.final["objective"])
        return result
    except Diverged as error:
        error.result = result
        raise
    finally:
        pool.end()


def measure_rounds(
    to_go: Iterator[Round],
    server: State,
    totals: Record,
    measure: Callable[[int, State, bool], Record | None],
    revealed: Callable[[State, Round], float | None],
    *,
    rounds: int,
    every: int,
    closing: int = 1,
    begin: int | None = 0,
    sampled: bool = False,
    judged: Callable[[Record], bool] = lambda record: True,
    stops: Sequence[Callback] = (),
    others: Sequence[Callback] = (),
) -> Reason | None:
    """Go through rounds, of a simulation or between machines; measure them, and return a callback's reason to end.

    to_go:    the rounds that are not done yet; after each, `totals` has the bytes and seconds so far.
    server:   its state before them.
    measure:  (done, server, ends) -> the record; None if it comes later. `ends` at the last measurement.
    revealed: |F_nat| of the model before a round, if the round reveals it.
    begin:    the rounds done before, if the model is to be measured first; else None.
    sampled:  whether a measurement that is not the last is on some of the rows.
    judged:   whether stopping rules receive a record.
    """
    judges = [callback for callback in stops if callback.wants_residual]

    def enter(done: int, server: State, ends: bool) -> Reason | None:
        record = measure(done, server, ends)
        if record is None:
            return None
        reason = first_reason(stops, lambda callback: callback.on_record(record)) if judged(record) else None
        again = sampled and not ends and distributed.first(reason)
        final = (measure(done, server, True) if again else None) or record
        other = first_reason(others, lambda callback: callback.on_record(final))
        return reason or other

    def passes(before: State, last: Round) -> bool:
        """Whether the gradient that this round reveals lets a stopping rule pass: then the model is measured."""
        size = revealed(before, last) if judges else None
        return size is not None and distributed.any_process(any([callback.on_residual(size) for callback in judges]))

    def close(before: State, last: Round) -> Reason | None:
        """Measure if it is time and call the callbacks; return a reason to end, the same in all processes."""
        done = last.t + 1
        due = passes(before, last) or done % every == 0 or done > rounds - closing
        reason = enter(done, last.server, done == rounds) if due else None
        now = dict(totals)
        after_round = first_reason([*others, *stops], lambda callback: callback.on_round(last, now))
        spent = first_reason(stops, lambda callback: callback.on_spent(now))
        reason = distributed.first(reason or spent or after_round)
        if reason and not due:
            enter(done, last.server, True)
        return reason

    reason = None if begin is None else distributed.first(enter(begin, server, begin == rounds or not sampled))
    while not reason and (last := next(to_go, None)) is not None:
        reason, server = close(server, last), last.server
    return reason


def check_measuring(every: int, closing: int, measure_gamma: float | None, metrics: Mapping[str, Metric]) -> None:
    """Check what is measured, and when."""
    integers(every=(every, 1), closing=(closing, 1))
    if measure_gamma is not None and not 0 < measure_gamma < math.inf:
        raise InputError(f"measure_gamma is {measure_gamma}; it must be a finite number above 0")
    if not isinstance(metrics, Mapping):
        raise InputError(f"metrics is a {type(metrics).__name__}; give a dict of names and functions of the model x")
    for name, function in metrics.items():
        if not callable(function):
            raise InputError(f"the metric {name!r} is {function!r:.60}; give a function of the model x")
        if name in ("round", *EVALUATED, *TOTALS, *KEPT):
            raise InputError(f"a metric is called {name!r}, which means something else here; give it another name")


def _check_belongs(last: Round, record: Record, psi: float) -> None:
    """Refuse records of another run than the round: what is recorded of that round is its psi."""
    done, known = last.t + 1, record.get("objective", psi)
    if record["round"] > done or (record["round"] == done and not math.isclose(known, psi, rel_tol=1e-3)):
        raise InputError(
            f"expected earlier records that end at round {done} with psi = {psi:.6g}, got round {record['round']:g} "
            f"with psi = {known:.6g}; give the records of the same run"
        )


def _check_spent(last: Round | None, records: Sequence[Record], pipeline: Pipeline, federation: Federation) -> None:
    """Refuse to continue with other noise: all rounds would be counted as if they had it."""
    if last is None:
        return
    recorded = records[-1] if records else {"round": last.t + 1}
    before, now = recorded.get("epsilon"), pipeline.spent(federation, int(recorded["round"])).get("epsilon")
    if before is None and now is None:
        return
    if not records:
        raise InputError(
            "expected a Result as after, got a Round, which does not say what privacy was spent; give the Result"
        )
    if before is None or now is None or not math.isclose(before, now, rel_tol=1e-9):
        shown = ["none" if v is None else f"{v:.4g}" for v in (before, now)]
        raise InputError(
            f"expected an uplink with which the rounds so far spent an epsilon of {shown[0]}, got {shown[1]}; continue "
            "with the same noise, delta and sampling, or begin a new run"
        )


def _continued(
    algorithm: Algorithm,
    problem: Problem,
    start: Tensor,
    gamma: float,
    after: Round | Result | None,
    before: Record | None,
) -> Result:
    """Return the result to continue: a new one, or that of an earlier call or a checkpoint."""
    result = Result(problem, start, gamma)
    if isinstance(after, Result):
        if after.last is None and after.records and after.final["round"] > 0:
            raise InputError(
                f"expected a Result with its last round, got one after {after.final['round']:g} rounds without: it "
                "diverged, or was read from a folder; continue a folder by run(..., folder=) with more rounds"
            )
        result.records, result.totals, result.last = list(after.records), dict(after.totals), after.last
    elif after is not None:
        result.last = after
        result.totals |= {name: before[name] for name in TOTALS} if before is not None else {}
    if result.last is not None:
        result.x = algorithm.model(result.last.server).clone()
    return result
