"""Do sites differ? Their own estimates, the joint one, meta-analyses of the sites', and tests of heterogeneity."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from fednmap.estimators.base import Federated, check_level
from fednmap.estimators.family_problems import RATIOS
from fednmap.estimators.inference import Inference, wald
from fednmap.estimators.rows import Floats
from fednmap.names import InputError
from fednmap.report.data_table import DataTable
from fednmap.report.plots import picture

DECADE = 10.0
SHOWN = 9  # columns of a forest plot by default: those with the smallest p of Cochran's Q


@dataclass(frozen=True, eq=False)
class Heterogeneity:
    r"""Estimates of each coefficient by site and jointly, NaN where a site has none; `heterogeneity()` returns it.

    fixed:  the mean of the sites' estimates, weighted by $1 / \text{error}^2$.
    random: the same by $1 / (\text{error}^2 + \tau^2)$, with $\tau^2$ by DerSimonian and Laird.
    Q, I2:  Cochran's statistic, chi-squared with df degrees of freedom if sites do not differ, and the share of the
            variation between sites that is not chance, max(0, (Q - df) / Q).
    ratio:  likelihood ratio statistic of the joint model against one model per site, for all columns (and intercepts,
            unless these differ in the joint model), with its degrees of freedom and p; NaN where a site has no model,
            weights are relative, or the family is Gamma, whose dispersion differs too.
    """

    names: tuple[str, ...]
    sites: tuple[str, ...]
    estimate: Floats
    """(sites, columns)"""
    error: Floats
    joint: Inference
    fixed: Floats
    fixed_error: Floats
    random: Floats
    random_error: Floats
    tau2: Floats
    Q: Floats
    df: Floats
    p_value: Floats
    I2: Floats
    ratio: float
    ratio_df: float
    ratio_p: float

    def table(self) -> DataTable:
        """Return one row per column: joint, fixed and random effects, their errors, and the test."""
        p = len(self.names)
        found = {"name": self.names, "joint": self.joint.estimate[:p], "joint error": self.joint.error[:p]}
        found |= {"fixed": self.fixed, "fixed error": self.fixed_error}
        found |= {"random": self.random, "random error": self.random_error}
        found |= {"tau2": self.tau2, "Q": self.Q, "df": self.df, "p": self.p_value, "I2": self.I2}
        return DataTable.of_columns(found)

    def to_frame(self) -> Any:
        """Return the table as a polars frame."""
        return self.table().frame()

    def verdict(self) -> str:
        """Return the likelihood ratio test in one line."""
        if math.isnan(self.ratio):
            return "no likelihood ratio test: a site has no separate model, weights are relative, or a scale differs"
        return (
            f"one model per site against the joint one: likelihood ratio {self.ratio:.4g}, {self.ratio_df:g} degrees "
            f"of freedom, p = {self.ratio_p:.3g}"
        )

    def plot(self, file: str | Path, columns: Sequence[str] | None = None) -> None:
        """Draw a forest plot, one panel per column: sites, joint, fixed and random effects, with their intervals.

        columns: default the nine whose sites differ most; unknown ones raise InputError. Ratios are drawn where the
                 family has them.
        """
        from matplotlib.ticker import MaxNLocator

        order = np.argsort(self.p_value, kind="stable")[:SHOWN]
        chosen = [self.names[j] for j in order] if columns is None else columns
        missing = [name for name in chosen if name not in self.names]
        if missing or not len(chosen):
            raise InputError(f"expected columns among {', '.join(self.names[:12])}, got {missing[:3]}")
        wide = min(3, len(chosen))
        tall, labels = -(-len(chosen) // wide), [*self.sites, "joint", "fixed effect", "random effects"]
        ratio, reach = RATIOS.get(self.joint.family), stats.norm.ppf((1 + self.joint.level) / 2)
        place = np.arange(len(labels))[::-1] + np.array([0.6] * len(self.sites) + [0.0] * 3)
        size = (3.2 * wide + 1.3, tall * (0.26 * len(labels) + 1.1))
        with picture(file, tall, wide, size) as (_, axes):
            for k, axis in enumerate(axes.flat):
                if k >= len(chosen):
                    axis.set_visible(False)
                    continue
                j = self.names.index(chosen[k])
                value = np.array([*self.estimate[:, j], self.joint.estimate[j], self.fixed[j], self.random[j]])
                error = np.array([*self.error[:, j], self.joint.error[j], self.fixed_error[j], self.random_error[j]])
                ends = np.stack([value - reach * error, value, value + reach * error])
                low, middle, high = np.exp(np.clip(ends, -50, 50)) if ratio else ends
                share = 1 / np.square(error[: len(self.sites)])
                area = np.append(20 + 60 * share / np.nanmax(np.append(share, 1e-300)), [45.0] * 3)
                looks = ["0.25"] * len(self.sites) + ["C0", "C1", "C1"]
                axis.hlines(place, low, high, color=looks, linewidth=1.3)
                for at, mark in ((slice(0, len(self.sites)), "s"), (slice(len(self.sites), None), "D")):
                    axis.scatter(middle[at], place[at], area[at], color=looks[at], marker=mark, zorder=3)
                axis.axvline(1.0 if ratio else 0.0, color="grey", linewidth=0.8, linestyle=":")
                axis.axhline(2.8, color="0.85", linewidth=0.8)
                if ratio:
                    axis.set_xscale("log")
                    least, most = np.nanmin(low), np.nanmax(high)
                    if most < DECADE * least:  # too narrow for powers of ten
                        axis.set_xticks(MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(least, most))
                        axis.set_xlim(least * (least / most) ** 0.05, most * (most / least) ** 0.05)
                    axis.xaxis.set_major_formatter("{x:.3g}")
                    axis.xaxis.set_minor_formatter("")
                axis.set_yticks(place, labels if k % wide == 0 else [""] * len(labels), parse_math=False)
                axis.set_title(
                    f"{chosen[k]}\nI2 = {100 * self.I2[j]:.0f} %, p = {self.p_value[j]:.2g}", fontsize="small"
                )
                axis.title.set_parse_math(False)
                axis.tick_params(labelsize="small")
                axis.set_xlabel(ratio or "coefficient", fontsize="small")


def heterogeneity(
    self: Federated, X: Any, y: Any = None, sites: Any = None, sample_weight: Any = None, *, level: float = 0.95
) -> Heterogeneity:
    """Return per-site, joint and meta-analytic estimates of the unpenalised model, and tests of whether sites differ.

    The estimator need not be fitted. Its site_effects say whether the joint model has the sites' intercepts.

    Raises InputError with fewer than two sites, or a model of several scores.

    References: Cochran, The combination of estimates from different experiments, Biometrics 1954. DerSimonian and
    Laird, Meta-analysis in clinical trials, 1986. Higgins and Thompson, Quantifying heterogeneity, 2002.

    >>> import numpy as np
    >>> from fednmap.estimators import FederatedLinearRegression
    >>> X, y, sites = np.arange(8.0)[:, None], [1.0, 3.1, 4.9, 7.0, 9.2, 10.8, 13.0, 15.1], ["a"] * 4 + ["b"] * 4
    >>> FederatedLinearRegression().heterogeneity(X, y, sites).estimate.round(2)
    array([[1.98],
           [1.99]])
    """
    check_level(level)
    estimator, rows = self._reading(X, y, sites, sample_weight)
    if len(rows.sites) < 2:
        raise InputError(f"expected at least two sites to compare, got {len(rows.sites)}; give sites=")
    if estimator._classes() or estimator._family().constants:
        raise InputError("expected a linear, logistic (two classes), Poisson or Cox model for heterogeneity")
    together = copy(estimator)
    if together.site_effects in ("random", "sparse"):
        together.site_effects = "intercepts" if together._family().level and together.fit_intercept else "none"
    prepared = together._prepare(rows)
    joint = wald(together, prepared, rows, prepared.start.numpy(), level)
    p, alone = len(estimator._names()), copy(estimator)
    alone.site_effects = "none"
    each: list[Inference | None] = []
    for k in range(len(rows.sites)):
        mine = rows.some(rows.sites.of_row == k)
        try:
            alone._check(mine.y, mine.sites)
            prepared = alone._prepare(mine)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of columns that are aliased or infinite at this site: NaN
                each.append(wald(alone, prepared, mine, prepared.start.numpy(), level))
        except InputError:
            each.append(None)
    estimate, error = np.full((2, len(each), p), np.nan)
    for k, one in enumerate(each):
        if one is not None:
            usable = np.isfinite(one.estimate[:p]) & (one.error[:p] > 0)
            estimate[k], error[k] = (np.where(usable, v[:p], np.nan) for v in (one.estimate, one.error))
    with np.errstate(invalid="ignore", divide="ignore"):
        weight = 1 / np.square(error)
        fixed, fixed_error = _pooled(estimate, weight)
        df = np.isfinite(estimate).sum(0) - 1.0
        df[df < 1] = np.nan  # one site, or none, has nothing to compare
        Q = np.nansum(weight * np.square(estimate - fixed), 0) + 0 * df
        spread = np.nansum(weight, 0) - np.nansum(np.square(weight), 0) / np.nansum(weight, 0)
        tau2 = np.where(spread > 0, np.maximum(Q - df, 0) / spread, 0.0) + 0 * df
        random, random_error = _pooled(estimate, 1 / (np.square(error) + np.nan_to_num(tau2)))
        I2 = np.where(Q > 0, np.maximum(0.0, (Q - df) / Q), 0 * df)
    ratio, extra = math.nan, math.nan
    found = [one for one in each if one is not None]
    known = joint.family != "gamma" and len(found) == len(each)
    if known and all(math.isfinite(one.log_likelihood) for one in (*found, joint)):
        extra = sum(one.parameters for one in found) - joint.parameters
        ratio = 2 * (sum(one.log_likelihood for one in found) - joint.log_likelihood)
        if joint.family == "gaussian":  # one variance for all sites in both models
            squares = [one.rows * math.exp(-2 * one.log_likelihood / one.rows) for one in found]
            ratio = joint.rows * (-2 * joint.log_likelihood / joint.rows - math.log(sum(squares) / joint.rows))
    chance = float(stats.chi2.sf(ratio, extra)) if extra > 0 else math.nan
    pooled = (fixed, fixed_error, random, random_error, tau2, Q, df, stats.chi2.sf(Q, df), I2)
    names = tuple(estimator._names())
    return Heterogeneity(names, rows.sites.names, estimate, error, joint, *pooled, ratio, extra, chance)


def _pooled(estimate: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """The weighted mean over sites and its error, NaN where no site has an estimate."""
    total = np.nansum(weight, 0)
    return np.nansum(weight * estimate, 0) / total, 1 / np.sqrt(np.where(total > 0, total, np.nan))
