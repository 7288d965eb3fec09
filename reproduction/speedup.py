"""Linear speedup: how the final value falls as the clients n or the local steps Q grow; eta_s = 1, gamma = 4.

n: Q = 10, eta_a = 0.1 for all n. Q: n = 30, eta_a = 1/Q for all Q.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
from matplotlib.figure import Figure as Picture

from fednmap.theory.scaling import LINEAR, Speedup, fit_speedup
from reproduction import shallow
from reproduction.figure import Figure, caption, lines, panels
from reproduction.trials import Curve, Trial, select
from reproduction.verdict import LEVEL, RULE, Claim, Verdict, compare, finals, number, shift, together

CLIENTS = {"quick": (5, 20), "paper": (5, 10, 20, 50, 100)}
STEPS = {"quick": (2, 10), "paper": (2, 5, 10, 20)}
ROUNDS = 300

SPEEDUP_RULE = f"""{RULE}

Throughout: the rounds are cut into ten equal parts and a trial's measurements averaged in each. From the second part
on, for every pair of neighbours, the larger n or Q must be lower in most parts and higher in none, by the rule above
without Holm's correction. Where it is higher in none and lower in too few, that is not judged.
The slope is that of a least-squares line through log(final value) against log n or log Q, one for each trial; the mean
of these has a 95 % interval by Student's t. "At most {LINEAR}" is reproduced if the interval ends below {LINEAR}, not
reproduced if it begins above, and not judged if {LINEAR} is inside."""


def jobs_in_n(scale: str, trials: int) -> list[Trial]:
    return [
        shallow.job(n=n, Q=10, eta_a=0.1, rounds=ROUNDS, trial=trial) for trial in range(trials) for n in CLIENTS[scale]
    ]


def jobs_in_q(scale: str, trials: int) -> list[Trial]:
    return [
        shallow.job(n=30, Q=Q, eta_a=1 / Q, rounds=ROUNDS, trial=trial) for trial in range(trials) for Q in STEPS[scale]
    ]


def judge_speedup(curves: list[Curve], factor: str, paper: str, shown: str) -> Verdict:
    """paper: the slope that it has; shown: what it says of the curves."""
    values = _values(curves, factor)
    last = curves[0]["round"][-1]
    pairs = [_parts(select(curves, **{factor: a}), select(curves, **{factor: b})) for a, b in pairwise(values)]
    measured = "; ".join(
        f"{a} to {b}: "
        + ", ".join(f"{p.count(w)} {w}" for w in ("lower", "level", "higher", "undecided") if w in p)
        + f" of {len(p)} parts"
        for (a, b), p in zip(pairwise(values), pairs, strict=True)
    )
    falls = together(
        False if "higher" in p or p.count("level") > len(p) / 2 else p.count("lower") > len(p) / 2 or None
        for p in pairs
    )
    found = exponent(curves, factor)
    grids = (values, values[1:], values[:-1]) if len(values) > 3 else ()
    by_grid = {grid: exponent([c for c in curves if c.setting[factor] in grid], factor) for grid in map(tuple, grids)}
    elsewhere = ", ".join(f"{s.slope:.3f} on {grid[0]} to {grid[-1]}" for grid, s in list(by_grid.items())[1:])
    steep = True if found.high <= LINEAR else False if found.low > LINEAR else None
    claims = [
        Claim(
            f"larger {factor} gives a smaller |F_nat|^2 throughout",
            shown,
            measured,
            falls,
            reason="too many parts are undecided",
        ),
        Claim(
            f"slope of log(final |F_nat|^2) against log {factor} at most {LINEAR}",
            paper,
            f"{_with_interval(found)} ({factor} = {values[0]} to {values[-1]}{elsewhere and '; ' + elsewhere})",
            steep,
            f"slope {_with_interval(found)}",
            reason=f"the interval includes {LINEAR}",
            power=_power(found),
        ),
    ]
    table = [[factor, f"final |F_nat|^2 after {last:g} rounds"]]
    table += [[str(v), number(finals(select(curves, **{factor: v})))] for v in values]
    by_rounds = [["rounds", "slope"]]
    by_rounds += [[f"{r:g}", _with_interval(exponent(curves, factor, r))] for r in (last / 3, 2 * last / 3, last)]
    tables = {"Final values": table, "After fewer rounds": by_rounds}
    if by_grid:
        rows = [[f"{factor} = {', '.join(map(str, grid))}", _with_interval(s)] for grid, s in by_grid.items()]
        tables["On other grids"] = [["grid", "slope"], *rows]
    return Verdict(claims, tables, SPEEDUP_RULE)


def exponent(curves: list[Curve], factor: str, rounds: float | None = None) -> Speedup:
    """From the trials that all values of n or Q have."""
    each = {v: finals(select(curves, **{factor: v}), rounds=rounds) for v in _values(curves, factor)}
    common = sorted(set.intersection(*(set(v) for v in each.values())))
    return fit_speedup(lambda v, k: each[v][common[k]], "n" if factor == "n" else "q", list(each), len(common))


def _with_interval(found: Speedup) -> str:
    return f"{found.slope:.3f}" + (f" [{found.low:.3f}, {found.high:.3f}]" if found.reached.shape[1] > 1 else "")


def _power(found: Speedup) -> str:
    """The distance from the bound that these trials would show with probability 0.8."""
    from scipy.stats import t

    freedom = found.reached.shape[1] - 1
    if not freedom:
        return "none"
    error = (found.high - found.low) / 2 / float(t.ppf(1 - LEVEL / 2, freedom))
    return f"{error * shift(freedom):.2f} in the slope"


def draw_speedup(curves: list[Curve], factor: str) -> Picture:
    """Left the curves, right the final values with the fitted line."""
    values = _values(curves, factor)
    picture, (left, right) = panels(1, 2)
    lines(left, {f"${factor}={v}$": select(curves, **{factor: v}) for v in values}, "stationarity")
    caption(left, 0, f"Stationarity with different ${factor}$.")
    y = [list(finals(select(curves, **{factor: v})).values()) for v in values]
    means, found = np.array([np.exp(np.log(v).mean()) for v in y]), exponent(curves, factor).slope
    line = np.exp(np.log(means).mean()) * (np.array(values) / np.exp(np.mean(np.log(values)))) ** found
    for value, each in zip(values, y, strict=True):
        right.plot([value] * len(each), each, ".", color="C0", alpha=0.5)
    right.plot(values, means, "o", color="C0", label="mean over the trials")
    right.plot(values, line, "--", color="C1", label=f"slope {found:.3f}")
    right.set_xscale("log")
    right.set_yscale("log")
    right.set_xticks(values, [str(v) for v in values])
    right.minorticks_off()
    right.grid(alpha=0.3)
    right.legend(fontsize="small")
    caption(right, 1, rf"Final stationarity against $\log {factor}$.", x=f"${factor}$")
    return picture


def _values(curves: list[Curve], factor: str) -> list[int]:
    return sorted({int(c.setting[factor]) for c in curves})


def _parts(small: list[Curve], large: list[Curve]) -> list[str]:
    """In each tenth of the rounds but the first: is the larger value's curve lower?"""
    last = small[0]["round"][-1]
    edges = [(k / 10 * last, (k + 1) / 10 * last) for k in range(1, 10)]
    return [compare(_means(large, *edge), _means(small, *edge)).word for edge in edges]


def _means(curves: list[Curve], after: float, until: float) -> dict[int, float]:
    def mean(c: Curve) -> float:
        return float(c["stationarity"][(c["round"] > after) & (c["round"] <= until)].mean())

    return {int(c.setting["trial"]): mean(c) for c in curves}


IN_N = Figure(
    name="speedup-n",
    number="Figure 3",
    title="Linear speedup of FedNMap in the number of clients",
    jobs=jobs_in_n,
    judge=partial(judge_speedup, factor="n", paper="-1.436, theory -0.5", shown="throughout the rounds"),
    draw=partial(draw_speedup, factor="n"),
    choices=f"{shallow.CHOICES}\n\nQ = 10, eta_a = 0.1, {ROUNDS} rounds; the numbers of clients are chosen here.",
    trials={"quick": 2, "paper": 3},
)
IN_Q = Figure(
    name="speedup-q",
    number="Figure 4",
    title="Linear speedup of FedNMap in the number of local steps",
    jobs=jobs_in_q,
    judge=partial(judge_speedup, factor="Q", paper="-1.181, theory -0.5", shown="smaller with larger Q"),
    draw=partial(draw_speedup, factor="Q"),
    choices=f"{shallow.CHOICES}\n\nn = 30, eta_a = 1/Q, {ROUNDS} rounds; the numbers of local steps are chosen here.",
    trials={"quick": 2, "paper": 3},
)
