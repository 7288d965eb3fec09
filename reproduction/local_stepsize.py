"""FedNMap under three rules for the local step size, n = 30, eta_s = 1, gamma = 4.

eta_a = 1/Q keeps the effective step eta_hat = eta_a eta_s Q; with 1/sqrt(Q) and 0.05 it grows with Q. At the paper's
scale 1/sqrt(Q) is also run with smaller Q and a larger gamma: where is the paper's sentence about it true?
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
from matplotlib.figure import Figure as Picture

from reproduction import shallow
from reproduction.figure import Figure, caption, lines, panels
from reproduction.trials import Curve, Trial, select
from reproduction.verdict import RULE, Claim, Ratio, Verdict, compare, finals, number, unsure

RULES: dict[str, Callable[[int], float]] = {
    "1/Q": lambda Q: 1 / Q,
    "1/sqrt(Q)": lambda Q: Q**-0.5,
    "0.05": lambda Q: 0.05,
}
STEPS = {"quick": (5, 20), "paper": (5, 10, 20)}
ROOT = "1/sqrt(Q)"
ELSEWHERE = {shallow.GAMMA: (2, 5, 10, 20), 4 * shallow.GAMMA: (2, 5, 10, 20)}  # gamma -> Q of the rule 1/sqrt(Q)
FEWER = 3  # trials of those
ROUNDS = 300
COMPARABLE = 3.0  # the paper says "slightly higher yet comparable"
SETTLED = 0.7

STEP_RULE = f"""{RULE}

Faster: the larger Q is lower over the first third of the rounds, by the same rule on the geometric mean of a trial's
measurements there. Comparable: the 95 % interval of the largest Q's end over the smallest's is within a factor of
{COMPARABLE:g}. It is not if the interval is outside, unless the higher of the two still falls (last third of the rounds
below {SETTLED:g} of the second); then it is not judged. This part of the rule was settled after a first look at
results; before, only a largest Q that ends higher counted."""


def jobs(scale: str, trials: int) -> list[Trial]:
    """Where two rules give the same step, as 1/Q and 0.05 do at Q = 20, one trial serves both panels."""
    settings = [
        (rule, Q, shallow.GAMMA, trial) for trial in range(trials) for rule in RULES.values() for Q in STEPS[scale]
    ]
    if scale == "paper":
        found = ((gamma, Q) for gamma, steps in ELSEWHERE.items() for Q in steps)
        settings += [(RULES[ROOT], Q, gamma, trial) for gamma, Q in found for trial in range(min(trials, FEWER))]
    wanted = [
        shallow.job(n=30, Q=Q, eta_a=rule(Q), rounds=ROUNDS, trial=trial, gamma=gamma)
        for rule, Q, gamma, trial in settings
    ]
    return list({job.name: job for job in wanted}.values())


def _of(curves: list[Curve], rule: str, Q: int, gamma: float = shallow.GAMMA) -> list[Curve]:
    return select(curves, Q=Q, eta_a=round(RULES[rule](Q), 6), gamma=gamma)


def _steps(curves: list[Curve]) -> list[int]:
    """Those that every rule was run with."""
    return [Q for Q in sorted({int(c.setting["Q"]) for c in curves}) if all(_of(curves, rule, Q) for rule in RULES)]


def _early(curves: list[Curve]) -> dict[int, float]:
    """For each trial: the geometric mean over the first third of the rounds, without the common start."""
    early = (curves[0]["round"] > 0) & (curves[0]["round"] <= curves[0]["round"][-1] / 3)
    return {int(c.setting["trial"]): float(np.exp(np.log(c["stationarity"][early]).mean())) for c in curves}


def _falls(curves: list[Curve]) -> bool:
    middle = finals(curves, rounds=curves[0]["round"][-1] * 2 / 3, share=1 / 2)
    return compare(finals(curves, share=1 / 3), middle).mean < SETTLED


def judge(curves: list[Curve]) -> Verdict:
    steps = _steps(curves)
    first, last = steps[0], steps[-1]
    end = {(rule, Q): finals(_of(curves, rule, Q)) for rule in RULES for Q in steps}
    text = "; ".join(f"Q = {Q}: {number(end['1/Q', Q])}" for Q in steps)
    share = f"Q = {last}: {compare(end['1/Q', last], end['1/Q', first])} of Q = {first}"
    claims = [
        _all_lower("eta_a = 1/Q: larger Q gives a lower value", "lower", text, share, [end["1/Q", Q] for Q in steps])
    ]
    for rule in ("1/sqrt(Q)", "0.05"):
        early = {Q: _early(_of(curves, rule, Q)) for Q in steps}
        text = "first third: " + "; ".join(f"Q = {Q}: {number(early[Q])}" for Q in steps)
        share = f"Q = {last}: {compare(early[last], early[first])} of Q = {first} in the first third"
        claim = f"eta_a = {rule}: larger Q is faster"
        claims.append(_all_lower(claim, "faster convergence", text, share, [early[Q] for Q in steps]))
        times = compare(end[rule, last], end[rule, first])
        text = "; ".join(f"Q = {Q}: {number(end[rule, Q])}" for Q in steps) + f"; ratio {times}"
        comparable, reason = _comparable(times), unsure([times])
        higher = last if times.mean > 1 else first
        if comparable is False and _falls(_of(curves, rule, higher)):
            comparable, reason = None, f"Q = {higher} still falls"
        claims.append(
            Claim.of_ratios(
                f"eta_a = {rule}: comparable final value",
                "slightly higher yet comparable",
                text,
                [times],
                f"Q = {last}: {times} of Q = {first}",
                holds=comparable,
                reason=reason,
            )
        )
    where = f"Where eta_a = {ROOT} does what the paper says"
    return Verdict(claims, {where: _elsewhere(curves)}, STEP_RULE, _reading(curves))


def _all_lower(claim: str, paper: str, measured: str, effect: str, ends: list[dict[int, float]]) -> Claim:
    """That each is lower than the one before."""
    return Claim.of_ratios(claim, paper, measured, [compare(b, a) for a, b in pairwise(ends)], effect)


def _comparable(times: Ratio) -> bool | None:
    """Whether the interval is within the factor; None if it is neither within nor outside."""
    if times.low >= 1 / COMPARABLE and times.high <= COMPARABLE:
        return True
    return False if times.low > COMPARABLE or times.high < 1 / COMPARABLE else None


def _reading(curves: list[Curve]) -> str:
    """From which Q to which, with which gamma, the sentence about 1/sqrt(Q) is true; where several gamma were run."""
    found: dict[tuple[bool, int, int], list[float]] = {}  # (true, Q, next Q) -> gammas
    gammas = sorted({float(c.setting["gamma"]) for c in curves})
    for gamma in gammas:
        steps = sorted({int(c.setting["Q"]) for c in curves})
        of = {Q: here for Q in steps if (here := _of(curves, ROOT, Q, gamma))}
        for a, b in pairwise(of):
            faster = compare(_early(of[b]), _early(of[a])).word == "lower"
            comparable = compare(finals(of[b]), finals(of[a])).mean <= COMPARABLE
            found.setdefault((faster and comparable, a, b), []).append(gamma)
    if len(gammas) < 2:
        return ""
    so, not_so = (
        ", ".join(
            f"from Q = {a} to {b} with gamma = {' and '.join(f'{v:g}' for v in gammas)}"
            for (true, a, b), gammas in found.items()
            if true is wanted
        )
        or "nowhere"
        for wanted in (True, False)
    )
    return f"""\
With eta_a = {ROOT}, where eta_hat is sqrt(Q), a larger Q is faster and ends at most {COMPARABLE:g} times as high
{so}; not so {not_so}."""


def _elsewhere(curves: list[Curve]) -> list[list[str]]:
    """From one Q to the next, for each gamma: is it faster, is the end comparable?"""
    table = [
        ["gamma", "Q", "eta_hat", "first third", "end", "faster than the Q before", "end over that of the Q before"]
    ]
    for gamma in sorted({float(c.setting["gamma"]) for c in curves}):
        before: list[Curve] = []
        for Q in sorted({int(c.setting["Q"]) for c in curves}):
            here = _of(curves, ROOT, Q, gamma)
            if not here:
                continue
            early, end = _early(here), finals(here)
            row = [f"{gamma:g}", f"{Q}", f"{Q**0.5:.2f}", number(early), number(end)]
            words = compare(early, _early(before)).word if before else "-"
            row.append({"lower": "yes", "higher": "no, slower"}.get(words, words))
            table.append([*row, f"{compare(end, finals(before))}" if before else "-"])
            before = here
    return table


def draw(curves: list[Curve]) -> Picture:
    picture, axes = panels(1, 3, sharey=True)
    names = ("1/Q", r"1/\sqrt{Q}", "0.05")
    for k, (axis, rule, name) in enumerate(zip(axes, RULES, names, strict=True)):
        lines(axis, {f"$Q={Q}$": _of(curves, rule, Q) for Q in _steps(curves)}, "stationarity")
        caption(axis, k, rf"Stationarity with $\eta_a={name}$.")
    return picture


FIGURE = Figure(
    name="local-stepsize",
    number="Figure 5",
    title="FedNMap under three local step sizes",
    jobs=jobs,
    judge=judge,
    draw=draw,
    choices=f"{shallow.CHOICES}\n\nn = 30, {ROUNDS} rounds; the numbers of local steps are chosen here. "
    f"1/sqrt(Q) was also run, {FEWER} trials, with Q = 2 and with four times the gamma: settings that were found by "
    "trying, so that they show where the sentence is true and not how often.",
    trials={"quick": 2, "paper": 3},
)
