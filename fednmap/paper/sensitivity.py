"""When does FedNMap end lower than Zhang? What the paper leaves open, varied: hidden width, batch size, gamma.

n = 20, Q = 10, eta_a = 1/Q, eta_s = 1, equal rounds: batch size and gamma together, the width by itself.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from fednmap.paper import shallow
from fednmap.paper.figure import Figure, panels
from fednmap.paper.trials import Curve, Trial, select
from fednmap.paper.verdict import RULE, Claim, Verdict, compare, finals, number, ratio, span

METHODS = ("FedNMap", "Zhang")
ROUNDS = 300
CLIENTS, LOCAL_STEPS = 20, 10


class Case(NamedTuple):
    hidden: int
    batch: int
    gamma: float

    def __str__(self) -> str:
        return f"width {self.hidden}, batch {self.batch}, gamma {self.gamma:g}"


WIDTHS, BATCHES, GAMMAS = (32, 64, 128), (8, 32, 128), (1.0, 4.0, 16.0)
BASE = Case(shallow.HIDDEN, shallow.BATCH, shallow.GAMMA)
CASES = {
    "quick": [BASE._replace(gamma=gamma) for gamma in (1.0, 16.0)],
    "paper": [
        *(BASE._replace(batch=batch, gamma=gamma) for batch in BATCHES for gamma in GAMMAS),
        *(BASE._replace(hidden=hidden) for hidden in WIDTHS[1:]),
    ],
}


def jobs(scale: str, trials: int) -> list[Trial]:
    return [
        shallow.job(
            method=method,
            n=CLIENTS,
            Q=LOCAL_STEPS,
            eta_a=1 / LOCAL_STEPS,
            rounds=ROUNDS,
            trial=trial,
            **case._asdict(),
        )
        for trial in range(trials)
        for case in CASES[scale]
        for method in METHODS
    ]


def _ends(curves: list[Curve], case: Case) -> tuple[dict[int, float], dict[int, float]]:
    ours, theirs = (finals(select(curves, method=method, **case._asdict())) for method in METHODS)
    return ours, theirs


def _shown(curves: list[Curve]) -> list[Case]:
    found = {Case(int(c.setting["hidden"]), int(c.setting["batch"]), float(c.setting["gamma"])) for c in curves}
    return [case for case in sorted(found) if all(_ends(curves, case))]


def judge(curves: list[Curve]) -> Verdict:
    claims = []
    for what, cases in _axes(_shown(curves)).items():
        words = {case: compare(*_ends(curves, case)) for case in cases}
        ratios = {case: ratio(*_ends(curves, case)) for case in cases}
        told = "; ".join(f"{case}: {words[case]}, ratio {ratios[case]:.2f}" for case in cases)
        every = all(word == "lower" for word in words.values())
        claim = f"FedNMap ends lower than Zhang for every {what}"
        claims.append(Claim(claim, "lowest", told, every, f"{span(list(ratios.values()))} of Zhang's"))
    table = [["width", "batch", "gamma", *METHODS, "FedNMap against Zhang", "ratio"]]
    for case in _shown(curves):
        ours, theirs = _ends(curves, case)
        row = [f"{v:g}" for v in case] + [number(ours), number(theirs)]
        table.append([*row, compare(ours, theirs), f"{ratio(ours, theirs):.2f}"])
    return Verdict(claims, {"Every case": table}, RULE)


def _axes(shown: list[Case]) -> dict[str, list[Case]]:
    """The cases in which one thing varies, the others as in the paper's figures."""
    found = {
        "hidden width": [case for case in shown if case._replace(hidden=BASE.hidden) == BASE],
        "batch size": [case for case in shown if case._replace(batch=BASE.batch) == BASE],
        "gamma": [case for case in shown if case._replace(gamma=BASE.gamma) == BASE],
    }
    return {what: cases for what, cases in found.items() if len(cases) > 1}


def draw(curves: list[Curve]) -> Picture:
    """The ratio of the closing values, FedNMap over Zhang: against batch size and gamma, and against the width."""
    picture, (left, right) = panels(1, 2, sharey=True)
    shown = _shown(curves)
    batches = sorted({case.batch for case in shown})
    for k, batch in enumerate(batches):
        cases = [case for case in shown if case.batch == batch and case.hidden == BASE.hidden]
        _ratios(left, curves, cases, [case.gamma for case in cases], k, f"batch {batch}")
    left.set_xlabel(r"$\gamma$")
    wide = [case for case in shown if case._replace(hidden=BASE.hidden) == BASE]
    _ratios(right, curves, wide, [case.hidden for case in wide], 0, f"batch {BASE.batch}, $\\gamma={BASE.gamma:g}$")
    right.set_xlabel("hidden width")
    left.set_ylabel(r"$\|F_{nat}\|^2$, FedNMap / Zhang")
    for axis in (left, right):
        axis.axhline(1, color="0.5", linewidth=1)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    for axis, marks in ((left, {case.gamma for case in shown}), (right, {case.hidden for case in wide})):
        ticks = sorted(marks)
        axis.set_xticks(ticks, [f"{v:g}" for v in ticks])
    return picture


def _ratios(axis: Axes, curves: list[Curve], cases: list[Case], places: list[float], k: int, label: str) -> None:
    """Geometric means with bars from the least to the most over the trials."""
    ends = [_ends(curves, case) for case in cases]
    means = np.array([ratio(*pair) for pair in ends])
    each = [[ours[trial] / theirs[trial] for trial in ours if trial in theirs] for ours, theirs in ends]
    bars = np.maximum(0, [means - [min(r) for r in each], [max(r) for r in each] - means])
    axis.errorbar(places, means, bars, fmt=("o-", "s--", "^-.")[k % 3], capsize=3, label=label)


FIGURE = Figure(
    name="sensitivity",
    title="FedNMap against Zhang where the paper leaves settings open",
    jobs=jobs,
    judge=judge,
    draw=draw,
    choices=f"""{shallow.CHOICES}

n = {CLIENTS}, Q = {LOCAL_STEPS}, eta_a = 1/Q, {ROUNDS} rounds for all. gamma is FedNMap's prox parameter and, through
the common start x_0 = prox(z_0, gamma), where both methods begin; |F_nat|^2 always has gamma = {shallow.GAMMA:g}.""",
    trials={"quick": 2, "paper": 3},
)
