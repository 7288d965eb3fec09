"""What the paper claims, what was measured, and whether it is reproduced: decided by the numbers alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from math import log1p
from typing import Any, NamedTuple

import numpy as np

from reproduction.store import CODE
from reproduction.trials import Array, Curve

SMALLEST = 0.02
"""The smallest effect that counts: final values that differ by less than this share are level."""
LEVEL = 0.05
"""Of the tests; intervals have 1 minus this."""

RULE = f"""\
The final value of a trial is the mean of its measurements in the last tenth of the rounds. Two methods are compared
by the mean over the trials of log(final A / final B), trial by trial, with its 95 % interval by Student's t. In the
tables it is a ratio of geometric means, with the interval in brackets.

- "A is lower than B" is *reproduced* if the interval is below 1 and the ratio at least {100 * SMALLEST:g} % below it.
  Where a claim has several comparisons, Holm's procedure must reject equality in each at the level {LEVEL:g}.
- It is *not reproduced* if the interval excludes that A is lower by {100 * SMALLEST:g} % or more.
- Otherwise it is *not judged*. The smallest effect says what the trials could have shown: the difference that this
  test finds with probability 0.8, given the spread over the trials.

One trial has no interval. A claim about several comparisons is reproduced if each is, and not reproduced if one is
not."""


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
    reason: str = ""
    """Why it is not judged."""
    power: str = ""
    """The smallest effect that the trials could have shown."""
    settings: str = ""
    """Under which settings it was reproduced, where others were tried in which it was not."""
    tried: int = 1
    """In how many settings."""

    @classmethod
    def of_ratios(
        cls,
        claim: str,
        paper: str,
        measured: str,
        ratios: Sequence[Ratio],
        effect: str = "",
        *,
        wanted: str = "lower",
        **more: Any,
    ) -> Claim:
        """Judge a claim about all of these comparisons, with Holm's correction; `more` replaces what follows."""
        follows = {"holds": together(judged(ratios, wanted)), "reason": unsure(ratios), "power": power(ratios)}
        return cls(claim, paper, measured, **{"effect": effect, **follows, **more})

    @property
    def verdict(self) -> str:
        """In words."""
        if self.holds:
            return f"reproduced under named settings: {self.settings}" if self.settings else "reproduced"
        if self.holds is None:
            return f"not judged: {self.reason}" if self.reason else "not judged"
        return f"not reproduced in any of {self.tried} settings" if self.tried > 1 else "not reproduced"


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


@cache
def shift(freedom: float) -> float:
    """The difference, in standard errors, that Student's test finds with probability 0.8."""
    from scipy.optimize import brentq
    from scipy.stats import nct, t

    bound = float(t.ppf(1 - LEVEL / 2, freedom))
    return float(brentq(lambda d: nct.sf(bound, freedom, d) - 0.8, 0.0, 3 * bound))


class Difference(NamedTuple):
    """The mean difference of two things, with its 95 % interval and the p-value of Student's test that it is 0."""

    mean: float
    low: float
    high: float
    p: float
    power: float
    """The smallest difference that is found with probability 0.8."""
    trials: int

    @classmethod
    def of(cls, mean: float, error: float, freedom: float, trials: int) -> Difference:
        """error: the standard error of the mean."""
        from scipy.stats import t

        half = float(t.ppf(1 - LEVEL / 2, freedom)) * error
        p = 2 * float(t.sf(abs(mean) / error, freedom)) if error else float(mean == 0)
        return cls(mean, mean - half, mean + half, p, error * shift(freedom), trials)

    def word(self, smallest: float) -> str:
        """`lower` or `higher` if the interval says so, `level` if it excludes both, else `undecided`."""
        if abs(self.mean) >= smallest and (self.high < 0 or self.low > 0):
            return "lower" if self.mean < 0 else "higher"
        return "level" if -smallest < self.low and self.high < smallest else "undecided"

    def in_points(self) -> str:
        """A difference of percentages with its interval."""
        interval = f" [{self.low:+.1f}, {self.high:+.1f}]" if self.trials > 1 else ""
        return f"{self.mean:+.1f}{interval} points"

    def judged(self, wanted: str, smallest: float) -> bool | None:
        """Whether it is `lower` or `higher`, as wanted; None if the interval allows both answers."""
        if self.word(smallest) == wanted:
            return True
        against = self.low > -smallest if wanted == "lower" else self.high < smallest
        return False if against else None


class Ratio(NamedTuple):
    """A's final value over B's: the geometric mean over paired trials. It prints with its 95 % interval."""

    log: Difference

    @property
    def mean(self) -> float:
        return math.exp(self.log.mean)

    @property
    def low(self) -> float:
        return math.exp(self.log.low)

    @property
    def high(self) -> float:
        return math.inf if self.log.high > 700 else math.exp(self.log.high)

    @property
    def p(self) -> float:
        return self.log.p

    @property
    def word(self) -> str:
        """`lower`, `level`, `higher` or `undecided`."""
        return self.log.word(log1p(SMALLEST))

    def judged(self, wanted: str = "lower") -> bool | None:
        return self.log.judged(wanted, log1p(SMALLEST))

    def __str__(self) -> str:
        if not math.isfinite(self.log.high - self.log.low):
            return f"{self.mean:.2f}"
        digits = 4 if abs(self.log.mean) < 0.005 else 2
        return f"{self.mean:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def compare(a: Values, b: Values) -> Ratio:
    """Compare the trials that both have. The interval is the whole line for fewer than two.

    A value that is not finite has diverged. If some diverged, the signs of the differences decide.

    >>> print(compare({0: 1.0, 1: 2.0, 2: 4.0}, {0: 2.0, 1: 4.1, 2: 7.9}))
    0.50 [0.48, 0.52]
    """
    logs = _logs(a, b)
    count = len(logs)
    mixed = not count or {np.inf, -np.inf} <= set(logs)  # nothing to compare, or each diverged where the other did not
    mean = 0.0 if mixed else float(logs.mean())
    if count > 1 and np.isfinite(logs).all():
        error = float(logs.std(ddof=1)) / math.sqrt(count)
        return Ratio(Difference.of(mean, error, count - 1, count))
    if count > 1 and not mixed:
        signs = [bool((logs * s > 0).all()) for s in (-1, 1)]
        p = 2 * 0.5**count if any(signs) else 1.0
        sure = [sign and p < LEVEL for sign in signs]
        low, high = (1e-9 if sure[1] else -math.inf), (-1e-9 if sure[0] else math.inf)
        return Ratio(Difference(mean, low, high, p, math.inf, count))
    return Ratio(Difference(mean, -math.inf, math.inf, 1.0, math.inf, count))


def holm(p: Sequence[float], level: float = LEVEL) -> list[bool]:
    """Which hypotheses Holm's procedure rejects.

    >>> holm([0.01, 0.04, 0.03])
    [True, False, False]
    """
    order = np.argsort(p)
    passed = np.minimum.accumulate([p[k] <= level / (len(p) - rank) for rank, k in enumerate(order)])
    found = [False] * len(p)
    for k, ok in zip(order, passed, strict=True):
        found[int(k)] = bool(ok)
    return found


def judged(ratios: Sequence[Ratio], wanted: str = "lower") -> list[bool | None]:
    """Each comparison of a family by the rule, with Holm's correction."""
    each = [ratio.judged(wanted) for ratio in ratios]
    sure = holm([ratio.p for ratio in ratios]) if ratios else []
    return [None if one and not enough else one for one, enough in zip(each, sure, strict=True)]


def together(each: Iterable[bool | None]) -> bool | None:
    """Whether all hold: not if one does not, and not judged if one is not."""
    each = list(each)
    return False if False in each else None if None in each or not each else True


def power(ratios: Iterable[Ratio]) -> str:
    """The smallest effect that the weakest of the comparisons could have shown."""
    largest = max((ratio.log.power for ratio in ratios), default=math.inf)
    share = 100 * math.expm1(min(largest, 99.0))
    return f"{share:.2g} %" if share < 10 else f"{share:.0f} %" if share < 1000 else "none"


def unsure(ratios: Iterable[Ratio]) -> str:
    """Why comparisons are not judged."""
    trials = min((ratio.log.trials for ratio in ratios), default=0)
    return "one trial has no interval" if trials < 2 else f"an interval from {trials} trials includes both answers"


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


def span(ratios: Sequence[Ratio]) -> str:
    """Several ratios as one: from the smallest to the largest."""
    low, high = min(r.mean for r in ratios), max(r.mean for r in ratios)
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent s of the power law y ~ x^s, by least squares in logarithms."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def number(values: Values) -> str:
    """Mean and standard deviation over the trials."""
    every = np.array(list(values.values()))
    with np.errstate(invalid="ignore"):
        return f"{every.mean():.2e}" + (f" ± {every.std(ddof=1):.0e}" if len(every) > 1 else "")


def command(name: str, scale: str, trials: int) -> str:
    return f"`fednmap reproduce {name} --scale {scale} --trials {trials}`"


def by_code(codes: Mapping[str, int]) -> str:
    """Say which code the trials were run with, and whether the page was written with it. codes: digest -> trials."""
    counts = sorted(codes.items(), key=lambda pair: (-pair[1], pair[0]))
    words = "; ".join(f"{count} by {code}" for code, count in counts)
    older, every = sum(count for code, count in counts if code != CODE), sum(codes.values())
    mark = f"{'all' if older == every else f'{older} of the {every}'} trials are of older code"
    mark = mark if older else "all trials are of this code"
    return f"Trials by code: {words}. This page was written with code {CODE}: {mark}."


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
    facts["claims"] = [asdict(claim) | {"verdict": claim.verdict} for claim in verdict.claims]
    facts |= {"reading": verdict.reading} if verdict.reading else {}
    return json.dumps(facts, indent=1, ensure_ascii=False) + "\n"


def as_markdown(name: str, title: str, scale: str, asked: int, choices: str, verdict: Verdict, trials: str = "") -> str:
    """trials: what is said about their provenance."""
    rows = [["claim", "paper", "measured", "smallest effect", "verdict"]]
    rows += [[c.claim, c.paper, c.measured, c.power or "-", f"**{c.verdict}**"] for c in verdict.claims]
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
