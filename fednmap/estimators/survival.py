"""Survival curves of groups across sites, the log-rank test, and a test of proportional hazards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats

from fednmap.estimators import rows as inputs
from fednmap.estimators.base import check_level
from fednmap.estimators.rows import Floats
from fednmap.names import InputError
from fednmap.problems import Cox
from fednmap.problems.cox import coarse, same_times
from fednmap.report.data_table import DataTable
from fednmap.tables.table import as_word, divide

TRANSFORMS = ("km", "identity", "log")
ROUNDING = 1e-12  # variance of the log-rank test, relative to that of all events, that is none


@dataclass(frozen=True, eq=False)
class SurvivalCurves:
    """Kaplan-Meier curves of groups, and the log-rank test of whether they are the same; `kaplan_meier` returns it.

    Arrays are (groups, times).
    """

    groups: tuple[str, ...]
    times: Floats
    at_risk: Floats
    events: Floats
    survival: Floats
    error: Floats
    low: Floats
    high: Floats
    chi2: float
    """Of the log-rank test; NaN with one group."""
    df: int
    p_value: float

    def table(self) -> DataTable:
        """Return a row for each group and time with an event."""
        group, time = self.events.nonzero()
        found = {"group": [self.groups[k] for k in group], "time": self.times[time]}
        parts = {"at risk": self.at_risk, "events": self.events, "survival": self.survival}
        parts |= {"standard error": self.error, "low": self.low, "high": self.high}
        return DataTable.of_columns(found | {name: v[group, time] for name, v in parts.items()})

    def at(self, times: Any) -> Floats:
        """Return $P(T > t)$ of each group at these times, (groups, times)."""
        places = np.searchsorted(coarse(self.times), coarse(np.asarray(times, float)), "right")
        found: Floats = np.column_stack([np.ones(len(self.groups)), self.survival])[:, places]
        return found


def kaplan_meier(
    y: Any, group: Any = None, sites: Any = None, *, times: Any = None, stratify: bool = False, level: float = 0.95
) -> SurvivalCurves:
    """Return survival curves of each group over all sites, with log intervals, and the log-rank test.

    y:        time and event of each row, or start, stop and event.
    times:    a common grid, ascending: times are rounded up to it, those beyond it are censored at its end, and a site
              sends two counts for each group and time of the grid. None: every distinct time, which is exact.
    stratify: whether the log-rank test compares rows of the same site only.

    As `survfit` and `survdiff` of R's survival. Wrong times, events, groups or levels raise InputError.

    >>> found = kaplan_meier([[1, 1], [2, 0], [3, 1], [4, 1]], sites=["a", "a", "b", "b"])
    >>> found.survival.round(3)
    array([[0.75 , 0.75 , 0.375, 0.   ]])
    """
    check_level(level)
    found = np.array(inputs.times_and_events(y), float)
    if found.ndim != 2 or found.shape[1] not in (2, 3) or not np.isin(found[:, -1], (0, 1)).all():
        raise InputError("expected y with the columns time and event (1 or 0), or start, stop and event")
    where = divide(sites, len(found))
    wrong = np.flatnonzero(found[:, 0] >= found[:, 1])
    if found.shape[1] == 3 and len(wrong):
        row = int(wrong[0])
        raise InputError(f"expected start < time, got {found[row, 0]:g} and {found[row, 1]:g} in row {row}")
    inputs.finite_targets(found, where, *["start", "time", "event"][-found.shape[1] :])
    labels = np.array(["all"] * len(found) if group is None else [as_word(v) for v in np.asarray(group).tolist()])
    if len(labels) != len(found):
        raise InputError(f"y has {len(found)} rows and group has {len(labels)}; give one of each row")
    grid = np.unique(same_times(found[:, -2])) if times is None else np.asarray(times, float)
    if grid.ndim != 1 or not len(grid) or not bool((np.diff(grid) > 0).all()):
        raise InputError("expected times as ascending numbers, such as range(0, 365, 30)")
    groups, places = np.unique(labels), coarse(grid)
    found[:, :-1] = coarse(found[:, :-1])
    n, d = np.zeros((2, len(where), len(groups), len(grid)))
    for k in range(len(where)):
        for j, name in enumerate(groups):  # what a site sends
            n[k, j], d[k, j] = _counts(found[(where.of_row == k) & (labels == name)], places)
    chi2, df = _log_rank(n if stratify else n.sum(0)[None], d if stratify else d.sum(0)[None])
    n, d = n.sum(0), d.sum(0)
    share = np.divide(d, n, out=np.zeros_like(d), where=n > 0)
    survival = (1 - share).cumprod(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.sqrt(np.divide(d, n * (n - d), out=np.zeros_like(d), where=d > 0).cumsum(1))  # Greenwood
        reach = np.exp(stats.norm.ppf((1 + level) / 2) * relative)
        low, high = survival / reach, np.minimum(survival * reach, 1.0)
        error = survival * relative
    p_value = float(stats.chi2.sf(chi2, df)) if df else np.nan
    return SurvivalCurves(tuple(map(str, groups)), grid, n, d, survival, error, low, high, chi2, df, p_value)


def _counts(y: Floats, grid: Floats) -> tuple[Floats, Floats]:
    """The rows at risk and the events at each time of the grid."""
    last = np.searchsorted(grid, y[:, -2], "left")
    died = last[(y[:, -1] == 1) & (last < len(grid))]
    n = len(y) - np.bincount(last, minlength=len(grid) + 1).cumsum()[: len(grid)]
    n = n + np.bincount(last, minlength=len(grid) + 1)[: len(grid)]
    if y.shape[1] == 3:  # those that start at the time or later are not at risk yet
        first = np.searchsorted(grid, y[:, 0], "right")
        n = n - (len(y) - np.bincount(first, minlength=len(grid) + 1).cumsum()[: len(grid)])
    return n.astype(float), np.bincount(died, minlength=len(grid)).astype(float)


def _log_rank(n: Floats, d: Floats) -> tuple[float, int]:
    """The statistic and its degrees of freedom, from counts (strata, groups, times)."""
    all_n, all_d = n.sum(1, keepdims=True), d.sum(1, keepdims=True)
    share = np.divide(n, all_n, out=np.zeros_like(n), where=all_n > 0)
    excess = (d - share * all_d).sum((0, 2))
    spread = all_d * np.divide(all_n - all_d, all_n - 1, out=np.zeros_like(all_n), where=all_n > 1)
    V = np.diag((spread * share).sum((0, 2))) - np.einsum("sgt,sht->gh", spread * share, share)
    values, vectors = np.linalg.eigh(V)
    used = values > ROUNDING * spread.sum()  # fewer where a group is not at risk with others at an event
    if not used.any():
        return np.nan, 0
    return float((np.square(excess @ vectors)[used] / values[used]).sum()), int(used.sum())


def concordance_sums(scores: Floats, y: Floats, weight: Floats) -> Floats:
    """Return the sums that a site sends for the concordance of its rows: of ordered pairs that the scores order too
    (ties count half), of pairs that can be compared, and over rows of squares and products of what each takes part in.

    y: time, event and perhaps the start of the time at risk.
    """
    right, pairs = np.zeros((2, len(y)))
    time, start, event = coarse(y[:, 0]), coarse(y[:, 2:]), y[:, 1] == 1
    for i in np.flatnonzero(event):
        later = (time > time[i]) | ((time == time[i]) & ~event)
        later &= (start < time[i]).all(1)
        difference, each = scores[i] - scores[later], weight[i] * weight[later]
        agree = each * ((difference > 0) + 0.5 * (difference == 0))
        right[later] += agree
        pairs[later] += each
        right[i] += agree.sum()
        pairs[i] += each.sum()
    return np.array([right.sum() / 2, pairs.sum() / 2, right @ right, right @ pairs, pairs @ pairs])


def concordance(scores: Floats, y: Floats, weight: Floats | None, *parts: Any) -> Floats:
    """Return `concordance_sums` over all rows; those that differ in one of `parts`, unless it is None, are no pair."""
    _, part = np.unique(np.column_stack([p for p in parts if p is not None]), axis=0, return_inverse=True)
    weight, each = np.ones(len(y)) if weight is None else weight, [part.ravel() == k for k in range(part.max() + 1)]
    return np.asarray(np.sum([concordance_sums(scores[r], y[r], weight[r]) for r in each], 0))


def proportional_hazards(f: Cox, point: Floats, names: Any, y: Floats, transform: str) -> DataTable:
    """Return the score test of coefficients that change with g(t), by column and for all, as R's cox.zph.

    Reference: Grambsch and Therneau, Proportional hazards tests and diagnostics, Biometrika 1994.
    """
    if transform not in TRANSFORMS:
        raise InputError(f"expected transform to be one of {', '.join(TRANSFORMS)}, got {transform!r}")
    curve = kaplan_meier(y[:, [2, 0, 1]] if y.shape[1] > 2 else y[:, :2])

    def g(time: torch.Tensor) -> torch.Tensor:
        if transform == "km":  # 1 - S just before
            place = np.searchsorted(coarse(curve.times), coarse(time.numpy()), "left")
            before = np.concatenate([[1.0], curve.survival[0]])[place]
            return torch.from_numpy(1 - before)
        return time.log() if transform == "log" else time

    u, H = f.change_in_time(torch.from_numpy(point), g)
    score, p = np.concatenate([np.zeros(len(u)), u.numpy()]), len(u)
    whole = np.block([[H[0].numpy(), H[1].numpy()], [H[1].numpy(), H[2].numpy()]])
    rows = []
    for name, tested in [*((name, [j]) for j, name in enumerate(names)), ("GLOBAL", list(range(p)))]:
        some = [*range(p), *(p + j for j in tested)]
        value = float(score[some] @ np.linalg.lstsq(whole[np.ix_(some, some)], score[some], rcond=None)[0])
        rows.append([name, value, len(tested), float(stats.chi2.sf(value, len(tested)))])
    return DataTable(("name", "chi2", "df", "p"), rows)
