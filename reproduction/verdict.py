"""What the paper claims, what was measured, and whether it holds: decided by the numbers alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import log1p
from typing import Any

import numpy as np

from reproduction.store import CODE
from reproduction.trials import Array, Curve

SMALLEST = 0.02
"""The smallest effect that counts: final values that differ by less than this share are level."""

DOUBT = """\
Where there is no difference at all, and spreads are normal, this rule without its smallest effect would call two
methods different with probability 0.39 from 2 trials, 0.23 from 3, 0.09 from 5 and 0.01 from 10: a single comparison of
few trials is a hint, and several that agree are more."""

RULE = f"""\
The final value of a trial is the mean of its measurements in the last tenth of the rounds. A is lower than B if the
mean over the trials of log(final A / final B), trial by trial, is below zero by more than its standard deviation over
the trials and by at least {100 * SMALLEST:g} %, the smallest effect that counts; higher if above by as much; else
they are level. With one trial there is no spread. Ratios: geometric means.

{DOUBT}"""


@dataclass(frozen=True)
class Claim:
    claim: str
    paper: str
    measured: str
    holds: bool | None
    """None: the numbers do not allow to judge it."""
    effect: str = ""
    """How much it is, in a few words: a claim that says so stands in the page's first table."""
    trials: int | None = None
    """Of each thing that it compares, at least; None: as many as the figure has."""


@dataclass(frozen=True)
class Verdict:
    claims: list[Claim]
    tables: dict[str, list[list[str]]] = field(default_factory=dict)
    """More to read after the claims: title -> rows, the first of them the heads."""
    rule: str = RULE
    reading: str = ""
    """What the numbers say together, in a paragraph."""


Values = Mapping[int, float]
"""A number for each trial."""


def ratio(a: Values, b: Values) -> float:
    """The geometric mean of a_k / b_k over the trials k that both have."""
    with np.errstate(invalid="ignore"):
        return float(np.exp(_logs(a, b).mean()))


def compare(a: Values, b: Values) -> str:
    """`lower`, `level` or `higher`: a against b by the rule."""
    logs = _logs(a, b)
    if not len(logs) or {np.inf, -np.inf} <= set(logs):  # nothing to compare; each diverged where the other did not
        return "level"
    spread = float(logs.std(ddof=1)) if len(logs) > 1 and np.isfinite(logs).all() else 0.0
    if abs(logs.mean()) <= max(spread, log1p(SMALLEST)):
        return "level"
    return "lower" if logs.mean() < 0 else "higher"


def _logs(a: Values, b: Values) -> Array:
    """log(a_k / b_k); what is no number has diverged, which is infinitely much, and where both have they are level."""
    common = sorted(a.keys() & b.keys())
    ours, theirs = (np.nan_to_num([v[k] for k in common], nan=np.inf, posinf=np.inf) for v in (a, b))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(ours == theirs, 0.0, np.log(ours) - np.log(theirs))


def finals(
    curves: Sequence[Curve], metric: str = "stationarity", rounds: float | None = None, share: float = 0.1
) -> dict[int, float]:
    return {int(curve.setting["trial"]): curve.final(metric, rounds, share) for curve in curves}


def span(ratios: Sequence[float]) -> str:
    """Several ratios as one: from the smallest to the largest."""
    low, high = min(ratios), max(ratios)
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent s of the power law y ~ x^s, by least squares in logarithms."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def number(values: Values) -> str:
    """Mean and standard deviation over the trials."""
    every = np.array(list(values.values()))
    with np.errstate(invalid="ignore"):
        return f"{every.mean():.2e}" + (f" ± {every.std(ddof=1):.0e}" if len(every) > 1 else "")


def word(holds: bool | None) -> str:
    return {True: "holds", False: "does not hold", None: "not judged"}[holds]


def command(name: str, scale: str, trials: int) -> str:
    return f"`fednmap reproduce {name} --scale {scale} --trials {trials}`"


def by_code(codes: Mapping[str, int]) -> str:
    """Say which code the trials were run with, and whether it is today's. codes: digest -> number of trials."""
    counts = sorted(codes.items(), key=lambda pair: (-pair[1], pair[0]))
    words = "; ".join(f"{count} by {code}" for code, count in counts)
    older, every = sum(count for code, count in counts if code != CODE), sum(codes.values())
    mark = f"{'all' if older == every else f'{older} of the {every}'} trials are of older code"
    return f"Trials by code: {words}. Today's code is {CODE}: {mark if older else 'all trials are of this code'}."


def provenance(codes: Mapping[str, int], histories: bool) -> str:
    """The paragraph of a figure's page about its trials."""
    more = " and [histories.csv.gz](histories.csv.gz) what it measured along the rounds" if histories else ""
    return f"""\
{by_code(codes)}

[trials.csv](trials.csv) has the seed, configuration, data, code, versions and final numbers of each trial{more}."""


def as_json(
    name: str, scale: str, trials: int, asked: int, verdict: Verdict, codes: Mapping[str, int] | None = None
) -> str:
    """trials: that every setting has; asked: as many as some have, or are to have; codes: as in `by_code`."""
    facts: dict[str, Any] = {"name": name, "scale": scale, "trials": trials, "asked": asked}
    facts |= {"codes": dict(sorted(codes.items()))} if codes else {}
    facts["claims"] = [asdict(claim) for claim in verdict.claims]
    facts |= {"reading": verdict.reading} if verdict.reading else {}
    return json.dumps(facts, indent=1, ensure_ascii=False) + "\n"


def as_markdown(name: str, title: str, scale: str, asked: int, choices: str, verdict: Verdict, trials: str = "") -> str:
    """trials: what is said about their provenance."""
    rows = [["claim", "paper", "measured", "verdict"]]
    rows += [[c.claim, c.paper, c.measured, f"**{word(c.holds)}**"] for c in verdict.claims]
    parts = [f"# {title}", command(name, scale, asked), f"![{title}]({name}.png)"]
    parts += [markdown_table(rows), *([verdict.reading] if verdict.reading else [])]
    parts += ["## How it is judged", verdict.rule, "## Setting", choices]
    for heading, table in verdict.tables.items():
        parts += [f"## {heading}", markdown_table(table)]
    parts += ["## Trials", trials] if trials else []
    return "\n\n".join(parts) + "\n"


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])
