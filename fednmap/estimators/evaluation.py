"""How well a model predicts rows that it was not fitted to: calibration, ROC, concordance, with intervals.

A site sends sums over its rows (`site_sums`), by intervals of predictions that are the same at every site; the server
adds them up and computes everything from the total (`from_sums`). In a Cox model rows of one site are compared with
each other, and a site sends five sums (`concordance_sums`).

References: DeLong, DeLong and Clarke-Pearson, Comparing the areas under two or more correlated receiver operating
characteristic curves, 1988. Van Calster and others, Calibration: the Achilles heel of predictive analytics, 2019.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from scipy import stats
from sklearn.utils.validation import check_is_fitted

from fednmap.estimators import rows as inputs
from fednmap.estimators.base import Federated, check_level, warn_unconverged
from fednmap.estimators.family_problems import FAMILIES, CoxResponse, expected, outputs_at
from fednmap.estimators.linear_models import FederatedCoxRegression
from fednmap.estimators.model_selection import CV, Fold, folds_of
from fednmap.estimators.rows import Floats, Rows
from fednmap.estimators.survival import concordance
from fednmap.names import InputError
from fednmap.problems.families import Family, Gaussian, Response
from fednmap.report.data_table import DataTable
from fednmap.report.plots import picture
from fednmap.tables.table import divide

CLASSES = ("logistic", "binomial")  # families of two classes
GRID = 20  # intervals of predictions, between machines
GROUPS = 10  # of rows in a calibration curve
STEPS = 50  # Newton steps of a recalibration, at most
CLOSE = 1e-10  # change of scores, relative to the largest, at which they end
VANISHED = 1e-9  # curvature over that at first, below which the estimate is infinite: one class, or separated ones


class Interval(NamedTuple):
    """An estimate and the ends of its confidence interval."""

    value: float
    low: float
    high: float

    @classmethod
    def normal(cls, value: float, error: float, level: float, least: float = -math.inf, most: float = math.inf) -> Self:
        """Return value -+ a multiple of its standard error, within least and most."""
        reach = float(stats.norm.ppf((1 + level) / 2)) * error
        return cls(value, max(value - reach, least), min(value + reach, most))


UNKNOWN = Interval(math.nan, math.nan, math.nan)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Measures of predictions of rows that the model has not seen; `evaluate` returns it.

    auc:               of two classes: the area under the ROC curve, with DeLong's interval.
    concordance:       of a Cox model: Harrell's, of pairs within a site and stratum; its error is the infinitesimal
                       jackknife's, as in R's survival.
    slope:             coefficient of the score in a model of y by the score alone; below 1 predictions are too extreme.
    intercept:         what must be added to every score so that the mean prediction is right; None in a Cox model.
    squared_error:     mean square of y - prediction: Brier's score where y is a class; NaN in a Cox model.
    calibration_curve: observed against predicted means in ten groups of rows, by their predictions.
    roc:               sensitivity and specificity of "prediction > threshold".
    """

    family: str
    rows: float
    level: float
    slope: Interval
    intercept: Interval | None = None
    auc: Interval | None = None
    concordance: Interval | None = None
    squared_error: float = math.nan
    calibration_curve: DataTable | None = None
    roc: DataTable | None = None

    def table(self) -> DataTable:
        """Return one row for each measure."""
        measures = {"AUC": self.auc, "concordance": self.concordance}
        measures |= {"calibration slope": self.slope, "calibration intercept": self.intercept}
        rows: list[list[Any]] = [[name, *found] for name, found in measures.items() if found is not None]
        if not math.isnan(self.squared_error):
            rows.append(["Brier score" if self.family in CLASSES else "squared error", self.squared_error, None, None])
        return DataTable(("measure", "value", "low", "high"), rows)

    def plot(self, file: str | Path) -> None:
        """Draw the calibration curve, and the ROC curve of two classes; without rows InputError is raised."""
        if self.calibration_curve is None:
            raise InputError(f"expected a model of rows, got {self.family}: it has no calibration curve to draw")
        with picture(file, 1, 2 if self.roc else 1, (8.0 if self.roc else 4.2, 4.0)) as (_, axes):
            mean, observed, low, high = np.array(self.calibration_curve.rows, float).T[:4]
            axis, ends = axes[0][0], [min(mean.min(), observed.min()), max(mean.max(), observed.max())]
            axis.plot(ends, ends, color="grey", linewidth=0.8, linestyle=":")
            axis.errorbar(mean, observed, [observed - low, high - observed], fmt="o", markersize=4)
            axis.set(xlabel="predicted", ylabel="observed", title="Calibration")
            if self.auc and self.roc:
                right, wrong = np.array(self.roc.rows)[:, 1], 1 - np.array(self.roc.rows)[:, 2]
                axis = axes[0][1]
                axis.plot([0, 1], [0, 1], color="grey", linewidth=0.8, linestyle=":")
                axis.plot(wrong, right)
                axis.set(xlabel="1 - specificity", ylabel="sensitivity", title=f"ROC, AUC {self.auc.value:.3f}")


def evaluate(
    model: Federated,
    X: Any,
    y: Any = None,
    sites: Any = None,
    sample_weight: Any = None,
    *,
    cv: CV = None,
    grid: int | Sequence[float] | None = None,
    level: float = 0.95,
    random_state: int = 0,
) -> Evaluation:
    """Return measures of a fitted model's predictions, from sums over the sites.

    cv:   None: X and y are rows that the model has not seen. A number of folds, "leave-one-site-out", a splitter or
          pairs: they are the rows of the fit, and each is predicted by a model of the same lam without its fold.
    grid: ascending predictions between which rows are counted together, the same at all sites; a number stands for so
          many equal intervals from 0 to 1, for classes. None: every distinct score, which is exact and shows them.

    Intervals assume that weights count equal rows. Raises InputError for three or more classes and ordered labels.

    >>> import numpy as np
    >>> from fednmap.estimators import FederatedLogisticRegression
    >>> X, y, hospital = np.arange(8.0)[:, None], [0, 0, 1, 0, 1, 0, 1, 1], ["a", "b"] * 4
    >>> model = FederatedLogisticRegression("none").fit(X, y, sites=hospital)
    >>> evaluate(model, X, y, hospital).auc.value
    0.8125
    """
    check_is_fitted(model)
    check_level(level)
    kind, constants = model._family(), vars(model).get("constants_", ())
    if model._classes() or kind.name not in FAMILIES or kind.name == "ordinal":
        raise InputError("expected a model with one score for each row, got classes or a family of your own")
    if cv is None:
        scores = model._scores(X, sites)
        where = divide(sites, len(scores))
        weight = inputs.sample_weights(sample_weight, len(scores), where)
        y, weight = kind.as_rows(_targets(model, y, where), weight)
        stratum: Any = model._parts(X)[3]
    else:
        fitted, rows = model._reading(X, y, sites, sample_weight)
        fitted.__dict__.update({"mu": model.mu_} if hasattr(model, "mu_") else {})
        folds = folds_of(fitted, cv, random_state, rows, X, y, sites, sample_weight)
        if rows.remote is not None:
            return _between_machines(fitted, rows, folds, level)
        scores, tested = _held_out_scores(fitted, rows, folds)
        rows, scores = rows.some(tested), scores[tested]
        y, weight, where, stratum = rows.y, rows.weight, rows.sites, None
    if isinstance(kind, CoxResponse):
        stratum = y[:, 3] if y.shape[1] > 3 else stratum
        part = np.zeros(len(y)) if stratum is None else np.unique(stratum, return_inverse=True)[1]
        return _of_times(kind, scores, y[:, :3], weight, where.of_row, part, level)
    assert isinstance(kind, Family)
    if isinstance(grid, int | np.integer):
        if kind.name not in CLASSES or grid < 2:
            raise InputError(f"expected a grid of predictions, ascending, got {grid}; a number is for classes, from 2")
        grid = np.linspace(0, 1, int(grid) + 1)[1:-1].tolist()
    # not by predictions: how one is rounded depends on its place in the array, and far out all are 1
    known = np.unique(scores) if grid is None else None
    edges = expected(kind, known, constants) if known is not None else np.asarray(grid, float)
    if edges.ndim != 1 or not len(edges) or (known is None and not bool((np.diff(edges) > 0).all())):
        raise InputError("expected a grid of ascending predictions, such as np.linspace(0.01, 0.99, 99)")
    each = (where.of_row == k for k in range(len(where)))
    sums = np.sum([site_sums(kind, scores[r], y[r], weight[r], edges, constants, known) for r in each], 0)
    return from_sums(kind, sums, edges, constants, level)


def _between_machines(model: Federated, rows: Rows, folds: list[Fold], level: float) -> Evaluation:
    """Measures of rows at sites that are asked by messages, from one sum over sites by intervals of predictions."""
    kind, points, fills, converged = model._family(), [], [], []
    assert rows.remote is not None
    assert isinstance(kind, Family)
    for fold in folds:
        part = rows.remote.refilled(fold.number)
        train, other = rows._replace(remote=part).of_fold(fold.train, fold.number, held_out=False), copy(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of convergence, below for all folds
            Federated.fit(other, train)
        constants = vars(other).get("constants_", ())
        points.append(np.concatenate([np.ravel(other.coef_), np.ravel(other.intercept_), constants]))
        fills.append(dict(part.fill))
        converged.append(other.converged_)
    warn_unconverged(converged, "models without a fold")
    values, _ = rows.remote.response()
    quantiles = stats.norm.ppf(np.arange(1, GRID) / GRID)
    if kind.name in CLASSES:
        edges = np.arange(1, GRID) / GRID
    elif kind.name in ("gaussian", "huber"):
        edges = values.mean() + np.ptp(values) / 2 * quantiles
    else:
        edges = values.mean() * np.exp(quantiles)
    told = rows.remote.sum("predictions", torch.from_numpy(np.stack(points)), grid=edges.tolist(), fills=fills)
    return from_sums(kind, told.reshape(5, -1), edges, vars(model).get("constants_", ()), level)


def site_sums(
    kind: Response,
    scores: Floats,
    y: Floats,
    weight: Floats,
    grid: Floats,
    constants: Any = (),
    known: Floats | None = None,
) -> Floats:
    """Return what a site sends, (5, len(grid) + 1): of the rows whose prediction is in (grid[k - 1], grid[k]] their
    number, and the sums of y, of its squares, of predictions and of scores.

    known: the scores that have these predictions, where they and not the predictions are counted.
    """
    mean, size = expected(kind, scores, constants), len(grid) + 1
    place = np.searchsorted(grid, mean) if known is None else np.searchsorted(known, scores)
    return np.stack([np.bincount(place, weight * v, size) for v in (np.ones(len(y)), y, y * y, mean, scores)])


def from_sums(kind: Family, sums: Floats, grid: Floats, constants: Any = (), level: float = 0.95) -> Evaluation:
    """Return the measures of rows with these sums over all sites, see `site_sums`."""
    n, total, squares, mean, score = sums[:, sums[0] > 0]
    squares = total if kind.name in CLASSES else squares  # a trial is 0 or 1, and so is its square
    mean, score = mean / n, score / n
    intercept, slope = (_recalibrated(kind, c, n, total, squares, score, constants, level) for c in (False, True))
    error = float((squares - 2 * mean * total + n * mean * mean).sum() / n.sum())
    curve = _curve(kind, n, total, squares, mean, level)
    found = Evaluation(kind.name, float(n.sum()), level, slope, intercept, None, None, error, curve)
    events, others = sums[1], sums[0] - sums[1]
    if kind.name not in CLASSES or not events.sum() * others.sum() > 0:
        return found
    right, wrong = 1 - events.cumsum() / events.sum(), 1 - others.cumsum() / others.sum()
    roc = [[float(t), float(a), 1 - float(b)] for t, a, b in zip(grid, right, wrong, strict=False)]
    roc = [[-math.inf, 1.0, 0.0], *roc]
    table = DataTable(("threshold", "sensitivity", "specificity"), roc)
    return replace(found, auc=_auc(events, others, level), roc=table)


def _auc(events: Floats, others: Floats, level: float) -> Interval:
    """The area and DeLong's interval, from counts by intervals of predictions; ties count half."""
    m, n = events.sum(), others.sum()
    below, above = (others.cumsum() - others / 2) / n, (m - events.cumsum() + events / 2) / m
    area = float(events @ below / m)
    variance = [
        c @ np.square(v - area) / max(c.sum() - 1, 1e-300) / c.sum() for c, v in ((events, below), (others, above))
    ]
    return Interval.normal(area, math.sqrt(sum(variance)) if min(m, n) > 1 else math.nan, level, 0.0, 1.0)


def _recalibrated(
    kind: Family, free: bool, n: Floats, total: Floats, squares: Floats, score: Floats, constants: Any, level: float
) -> Interval:
    """The intercept of y by the score as it is, or, with a free slope, the slope; NaN if it is not finite."""
    kind = Gaussian() if kind.name == "huber" else kind
    constants = constants if kind.constants else ()
    middle, y = float(n @ score / n.sum()), torch.from_numpy(total / n)
    unit = float(np.sqrt(n @ np.square(score - middle) / n.sum())) if free else 1.0
    if free and not np.ptp(score) > 0:
        return UNKNOWN
    Z = np.column_stack([np.ones(len(n)), (score - middle) / unit] if free else [np.ones(len(n))])
    c, base = np.array([middle, unit] if free else [0.0]), np.zeros(len(n)) if free else score
    first, longest = None, math.inf if isinstance(kind, Gaussian) else 4.0  # change of a score in a step
    for _ in range(STEPS):
        scores = base + Z @ c
        out = outputs_at(kind, scores, constants)
        slope, curve = kind.slope(out, y), kind.information(out, y)
        if kind.constants:
            slope, curve = slope[:, 0], curve[:, 0, 0]
        H = (Z.T * (n * curve.numpy())) @ Z
        first = H.diagonal() if first is None else first
        if not bool((H.diagonal() > VANISHED * first).all()):
            return UNKNOWN
        step = np.linalg.lstsq(H, Z.T @ (n * slope.numpy()), rcond=None)[0]
        change = float(np.abs(Z @ step).max())
        c = c - step / max(1.0, change / longest)
        if change <= CLOSE * (1 + float(np.abs(scores).max())):
            break
    else:
        return UNKNOWN
    noise = 1.0
    if kind.dispersed:
        mean = np.asarray(kind.mean(out))
        each = (squares - 2 * mean * total + n * mean * mean) / (1.0 if kind.name == "gaussian" else mean * mean)
        noise = float(each.sum() / max(n.sum() - len(c), 1))
    return Interval.normal(float(c[-1]) / unit, math.sqrt(noise * np.linalg.inv(H)[-1, -1]) / unit, level)


def _curve(kind: Family, n: Floats, total: Floats, squares: Floats, mean: Floats, level: float) -> DataTable:
    """Groups of about equally many rows: mean prediction, mean y and its interval (Wilson's for classes), rows."""
    group = (GROUPS * (n.cumsum() - n / 2) / n.sum()).astype(int)
    z, found = stats.norm.ppf((1 + level) / 2), []
    for k in np.unique(group):
        size, events, square = (float(v[group == k].sum()) for v in (n, total, squares))
        observed, predicted = events / size, float((n * mean)[group == k].sum()) / size
        if kind.name in CLASSES:
            middle, wide = observed + z * z / (2 * size), observed * (1 - observed) + z * z / (4 * size)
            low, high = ((middle + s * z * math.sqrt(wide / size)) / (1 + z * z / size) for s in (-1, 1))
            low, high = min(low, observed), max(high, observed)  # equal at 0 and 1, but for rounding
        else:
            spread = max(square - size * observed**2, 0) / max(size - 1, 1)
            low, high = (observed + s * z * math.sqrt(spread / size) for s in (-1, 1))
        found.append([predicted, observed, low, high, size])
    return DataTable(("predicted", "observed", "low", "high", "rows"), found)


def _of_times(
    kind: CoxResponse, scores: Floats, y: Floats, weight: Floats, site: Any, part: Any, level: float
) -> Evaluation:
    """Concordance of the pairs within sites and strata, and the coefficient of the score in a Cox model of it alone."""
    right, pairs, *squares = concordance(scores, y, weight, site, part)
    ordered = slope = UNKNOWN
    if pairs > 0:
        share = float(right / pairs)
        error = math.sqrt(max(squares @ np.array([1, -2 * share, share * share]), 0)) / float(pairs)
        ordered = Interval.normal(share, error, level, 0.0, 1.0)
    alone = FederatedCoxRegression(ties=kind.ties, strata=1, tol=1e-9)
    table, targets = np.column_stack([scores, part]), y if y.shape[1] == 2 else y[:, [2, 0, 1]]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a slope that is not finite
            fitted = alone.fit(table, targets, site, weight)
            if fitted.converged_:
                errors = fitted.inference(table, targets, site, weight, level=level)
                slope = Interval(*(float(v[0]) for v in (errors.estimate, errors.low, errors.high)))
    except InputError:  # a site of one row, or no events
        pass
    return Evaluation(kind.name, float(weight.sum()), level, slope, None, None, ordered)


def _targets(model: Federated, y: Any, where: Any) -> Floats:
    """y as the model's family takes it; labels are those of the fit."""
    if model._family().name != "logistic":
        return copy(model)._targets(y, where)
    found = np.asarray(y).ravel()
    if len(found) != len(where.of_row) or not np.isin(found, model.classes_).all():
        raise InputError(f"expected a label of {list(model.classes_)} for each of {len(where.of_row)} rows, got others")
    return np.asarray(found == model.classes_[1], float)


def _held_out_scores(model: Federated, rows: Rows, folds: list[Fold]) -> tuple[Floats, Any]:
    """The score of every row that is held out, by the model without its fold; and which rows are."""
    scores, converged, labels = np.zeros(len(rows.y)), [], np.array(rows.sites.names)[rows.sites.of_row]
    for fold in folds:
        if model.refill is not None:
            rows = rows._replace(X=model.refill(np.isin(np.arange(len(rows.y)), fold.train)))
        train, other = rows.some(fold.train), copy(model)
        try:
            other._check(train.y, train.sites)
        except InputError as error:
            raise InputError(f"without {fold.name}: {error}") from None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of convergence, below for all folds
            Federated.fit(other, train)  # at the lam of the model, even if it has chosen that
        converged.append(other.converged_)
        found = other._linear(rows.X[fold.test], labels[fold.test])[:, 0] - vars(other).get("centre_", 0.0)
        scores[fold.test] = found if rows.offset is None else found + rows.offset[fold.test]
    warn_unconverged(converged, "models without a fold")
    return scores, np.unique(np.concatenate([fold.test for fold in folds]))
