"""The rates of Table 1 over up to 8,192 rounds, with a fine grid of steps; also a nonconvex f with the PL condition.

As the rates of Table 1, on the same problems and one more. The first T rounds of a run with constant steps are the run
of T rounds, so one run gives the error for every T. All trials of a setting run as one, in blocks of coordinates.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from itertools import pairwise
from math import inf, log
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure as Picture
from torch import Tensor

from fednmap.core import Regularizer
from fednmap.measure import residual
from fednmap.simulation import Diverged, Record, simulate
from fednmap.theory.scaling import slope_with_interval
from reproduction.figure import Figure, panels
from reproduction.quadratics import Quadratics
from reproduction.runs import computed, hyperparameters
from reproduction.table1 import SLACK, Exponent, draw_errors, errors_table
from reproduction.table1_trials import MEASURE_GAMMA, NOISE, PHI, PROBLEMS, algorithm, optimum
from reproduction.trials import Array, Curve, Setting, Trial, select
from reproduction.verdict import Claim, Verdict, slope

ALL_PHI: Mapping[str, Regularizer] = {**PHI, "nonconvex PL": PHI["PL"]}
ALL: Mapping[str, partial[Quadratics]] = {
    **PROBLEMS,
    "nonconvex PL": partial(Quadratics, smallest=0.4, largest=0.4, spread=0.8, waves=0.3),
}
TRIALS = 10
LENGTHS = (32, 128, 512, 2048, 8192)
MIDDLE = {"n": 8, "Q": 4}
MOVED = {"n": (2, 8, 32), "Q": (1, 4, 16)}
MIDDLE_LENGTH = 512
"""T where n or Q moves."""
GRID = tuple(float(f"{2 ** (-k / 2):.2g}") for k in range(-3, 23))
"""Effective steps from 2.8 to 0.00049, each 1 / sqrt(2) of the one before."""


class Row(NamedTuple):
    """A row of Table 1: its stated exponents, and the steps on which it is run."""

    method: str
    problem: str
    rate: str
    exponents: Mapping[str, float]
    largest: float
    smallest: float
    reach: float
    """A step is run for T rounds if step * T is at most this: later, only noise would be seen."""

    @property
    def label(self) -> str:
        return f"{self.method}, {self.problem}"

    @property
    def steps(self) -> list[float]:
        return [s for s in GRID if self.smallest <= s <= self.largest]

    def rounds(self, T: int) -> int:
        """Without local steps there are as many more rounds."""
        return T * (MIDDLE["Q"] if self.method == "EControlDA" else 1)


LINEAR = {"n": -1.0, "Q": -1.0, "T": -1.0}
ROOT = {"n": -0.5, "Q": -0.5, "T": -0.5}
ROWS = (
    Row("FedNMap", "PL", "O~(s2/(nQT) + s2/T^2)", LINEAR, 1.4, 0.0028, 100.0),
    Row("FedNMap", "nonconvex PL", "O~(s2/(nQT) + s2/T^2)", LINEAR, 1.4, 0.00049, 100.0),
    Row("Zhang", "strongly convex", "O~((s2 + B2)/(nT))", {"n": -1.0, "Q": 0.0, "T": -1.0}, 1.4, 0.0014, 100.0),
    Row("FedNMap", "nonconvex", "O(sqrt(s2/(nQT)) + 1/T)", ROOT, 2.8, 0.022, inf),
    Row("EControlDA", "convex", "O(sqrt(s2/(nT)) + ...), Q = 1", {"n": -0.5, "T": -0.5}, 0.5, 0.0027, inf),
)
ECONTROLDA = {"trials": 3, "length": 2048}
"""Its compression acts on all coordinates together, so that its trials run one by one: fewer and shorter."""


def jobs(scale: str, trials: int) -> list[Trial]:
    """T first, then n and Q; quick: T on one problem."""
    rows = ROWS[:1] if scale == "quick" else ROWS
    factors = ("T",) if scale == "quick" else ("T", "n", "Q")
    return [
        _job(row, factor, trial)
        for factor in factors
        for row in rows
        if factor in row.exponents
        for trial in range(min(trials, ECONTROLDA["trials"] if row.method == "EControlDA" else TRIALS))
    ]


def _job(row: Row, factor: str, trial: int) -> Trial:
    setting: Setting = {"figure": "rates", "method": row.method, "problem": row.problem.replace(" ", "-")}
    setting |= {"factor": factor, "trial": trial}
    chosen = hyperparameters(algorithm(row.method, ALL_PHI[row.problem], 1.0, MIDDLE["Q"]))
    made: dict[str, Any] = {f"{row.method}.{name}": value for name, value in chosen.items()}
    made |= {f"problem.{name}": value for name, value in ALL[row.problem].keywords.items()}
    made |= {
        "noise": NOISE,
        "steps": row.steps,
        "points": [[n, Q, list(lengths)] for n, Q, lengths in points(row, factor)],
    }
    made |= {"reach": str(row.reach), "replicas": 1 if row.method == "EControlDA" else TRIALS}
    return Trial(setting, partial(computed, partial(measure, row, factor, trial)), made | setting)


def points(row: Row, factor: str) -> list[tuple[int, int, tuple[int, ...]]]:
    """(n, Q, lengths) of the runs in which a factor moves."""
    n, Q = MIDDLE["n"], 1 if row.method == "EControlDA" else MIDDLE["Q"]
    longest = ECONTROLDA["length"] if row.method == "EControlDA" else LENGTHS[-1]
    if factor == "T":
        return [(n, Q, tuple(T for T in LENGTHS if longest >= T))]
    return [(v, Q, (MIDDLE_LENGTH,)) if factor == "n" else (n, v, (MIDDLE_LENGTH,)) for v in MOVED[factor]]


def measure(row: Row, factor: str, trial: int) -> list[Record]:
    """The trial's error for every n, Q, T and step; T is in the column `round`."""
    alone = row.method == "EControlDA"
    found = []
    for n, Q, lengths in points(row, factor):
        for step in row.steps:
            reached = [T for T in lengths if step * T <= row.reach]
            if reached:
                each = errors(row.label, n, Q, tuple(reached), step, trial if alone else 0, 1 if alone else TRIALS)
                for T, values in zip(reached, each, strict=True):
                    value = float(values[0 if alone else trial])
                    found.append({"round": float(T), "n": float(n), "Q": float(Q), "step": step, "value": value})
    return found


@cache
def errors(label: str, n: int, Q: int, lengths: tuple[int, ...], step: float, seed: int, replicas: int) -> list[Array]:
    """For each T the replicas' psi(x) - psi* over the last tenth of the rounds; nonconvex: |F_nat|^2 over all."""
    row = next(row for row in ROWS if row.label == label)
    phi, f = ALL_PHI[row.problem], ALL[row.problem](n, noise=NOISE, seed=seed, replicas=replicas)
    kind = algorithm(row.method, phi, step, Q)
    ends = [row.rounds(T) for T in lengths]
    values = []
    try:
        for r in simulate(kind, f, rounds=ends[-1]):
            t = r.t + 1
            if row.problem == "nonconvex" or any(0.9 * end <= r.t < end for end in ends):
                values.append((t, _error(row.problem, f, phi, kind.model(r.server))))
    except Diverged:
        pass
    done = values[-1][0] if values else 0
    found = []
    for end in ends:
        window = [v for t, v in values if t <= end and (row.problem == "nonconvex" or t - 1 >= 0.9 * end)]
        found.append(np.mean(window, axis=0) if window and done >= end else np.full(replicas, inf))
    return found


def _error(problem: str, f: Quadratics, phi: Regularizer, x: Tensor) -> Array:
    if problem == "nonconvex":
        squares = f.copies(residual(x, f.gradient(x), phi, MEASURE_GAMMA)).square().sum(-1)
        return np.asarray(squares, dtype=float)
    penalty = [float(phi.value(copy)) for copy in f.copies(x)]
    return np.asarray(f.losses(x), dtype=float) + penalty - optimum(ALL_PHI[problem], ALL[problem])


def best(curves: list[Curve], row: Row, factor: str) -> tuple[list[float], Array, list[float], list[bool]]:
    """Along one factor: its values, each trial's error at the step that is best for all, the step, whether it ends."""
    trials = select(curves, method=row.method, problem=row.problem.replace(" ", "-"), factor=factor)
    each, one = np.array([c["value"] for c in trials]), trials[0]
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.exp(np.log(np.maximum(each, 1e-300)).mean(0))
    column = one["round" if factor == "T" else factor]
    x = sorted(set(column.tolist()))
    y, steps, ends = [], [], []
    for value in x:
        here = np.flatnonzero(column == value)
        k = here[np.argmin(error[here])]
        y.append(np.maximum(each[:, k], 1e-300))
        steps.append(float(one["step"][k]))
        ends.append(steps[-1] in (one["step"][here].min(), one["step"][here].max()))
    return x, np.array(y), steps, ends


def _there(curves: list[Curve]) -> list[tuple[Row, str]]:
    found = {(c.setting["method"], c.setting["problem"], c.setting["factor"]) for c in curves}
    return [(r, f) for r in ROWS for f in r.exponents if (r.method, r.problem.replace(" ", "-"), f) in found]


def judge(curves: list[Curve]) -> Verdict:
    claims, table = [], [["row", "factor", "values", "errors at the best step", "best steps", "exponent"]]
    for row, factor in _there(curves):
        x, y, steps, ends = best(curves, row, factor)
        measured = (
            Exponent(*slope_with_interval(x, y)) if len(y[0]) > 1 else Exponent(slope(x, y[:, 0].tolist()), -inf, inf)
        )
        hidden = row.rate.startswith("O~") and factor == "T"
        stated = slope(x, [log(T) / T for T in x]) if hidden else row.exponents[factor]
        words = f"{factor}^{stated:.2f}" + (", the slope of log(T)/T" if hidden else "")
        limit = stated + SLACK
        holds = None if any(ends) else True if measured.high <= limit else False if measured.low > limit else None
        reason = "a best step is at the end of its grid" if any(ends) else "an interval includes the stated exponent"
        reason = reason if len(y[0]) > 1 else "one trial has no interval"
        claims.append(
            Claim(
                f"{row.label}: the error falls at least like {words}",
                row.rate,
                f"{factor}^{measured}",
                holds,
                f"{factor}^{measured}" if row.method == "FedNMap" else "",
                len(y[0]),
                reason,
            )
        )
        marks = [f"{s:g}" + " (end)" * end for s, end in zip(steps, ends, strict=True)]
        means = np.exp(np.log(y).mean(1))
        neighbours = [slope(pair, means[k : k + 2].tolist()) for k, pair in enumerate(pairwise(x))]
        table.append(
            [
                row.label,
                factor,
                ", ".join(f"{v:g}" for v in x),
                ", ".join(f"{v:.2e}" for v in means),
                ", ".join(marks),
                f"{measured}; between neighbours {', '.join(f'{v:.2f}' for v in neighbours)}",
            ]
        )
    return Verdict(claims, {"Errors at the best step": table}, RULE)


RULE = f"""\
For each n, Q, T and step the error is the geometric mean over the trials, and the best step of the grid counts. The
error is psi(x) - psi* averaged over the last tenth of the rounds; for nonconvex the mean of |F_nat|^2 over all rounds.
The exponent is the slope of a least-squares line in logarithms, one for each trial; their mean has a 95 % interval by
Student's t. A stated rate is reproduced if the interval is at most the stated exponent plus {SLACK}, not reproduced if
it lies wholly above that, and otherwise not judged. Where the paper writes O~ the stated exponent in T is that of
log(T)/T over the values tested. A rate whose best step is at the end of its grid is not judged. A rate is an upper
bound: a faster fall agrees with it."""


def draw(curves: list[Curve]) -> Picture:
    """The error against T, n and Q."""
    factors = [f for f in ("T", "n", "Q") if any(there == f for _, there in _there(curves))]
    picture, axes = panels(1, len(factors))
    picture.set_size_inches(4.5 * len(factors), 4)
    for k, (axis, factor) in enumerate(zip(axes, factors, strict=True)):
        found = {
            ROWS.index(row): (row.label, *best(curves, row, factor)[:2])
            for row, moved in _there(curves)
            if moved == factor
        }
        draw_errors(axis, k, factor, found, "")
    axes[0].legend(fontsize="x-small")
    return picture


def closing(curves: list[Curve]) -> str:
    """The errors at the best steps."""
    return errors_table((r.method, r.problem, f, *best(curves, r, f)[:3]) for r, f in _there(curves))


def _nothing(_: Curve) -> dict[str, float]:
    """The errors are many, and stand in the history."""
    return {}


FIGURE = Figure(
    name="rates",
    title="The rates of Table 1, over more rounds",
    jobs=jobs,
    judge=judge,
    draw=draw,
    choices=f"""\
Rows and factors that have no line below were not run.

The quadratics of Table 1 with sigma^2 = {NOISE**2:g} ([table](../table/verdict.md)), and one problem more:

- nonconvex PL: f = 0.2 |x - b|^2 + 0.3 sum sin(x - b)^2, l1 norm 0.1, clients' curvatures that differ by up to 80 %.
  f'' is -0.2 at places, and psi has the PL condition (its constant is computed in the tests).

T moves at n = {MIDDLE["n"]}, Q = {MIDDLE["Q"]}; n and Q move at T = {MIDDLE_LENGTH}. EControlDA: Q = 1, 4 T rounds, T
up to {ECONTROLDA["length"]}, {ECONTROLDA["trials"]} trials. Effective steps {GRID[0]:g} to {GRID[-1]:g}, each 1/sqrt(2)
of the one before; of these each row has those that its best ones can be among. A step is run for T rounds only while
step times T is at most {ROWS[0].reach:g} (PL, strongly convex). FedNMap has gamma = 1. The steps of nonconvex PL below
0.0028 were added after a first run, in which that end was best at T = 8,192.""",
    trials={"quick": 2, "paper": TRIALS},
    summary=closing,
    final=_nothing,
)
