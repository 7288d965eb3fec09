"""What the sites of a fit agree on before it begins, and what they answer afterwards: a site's half of `remote`.

In one process `Federated.fit` computes with all rows. Between machines `negotiate` asks about the columns and the
target, and `reply` is a site's answer to a question of the fit: a vector whose sum over sites the server needs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from fednmap.data.clients import ClientData
from fednmap.estimators.evaluation import GRID, site_sums
from fednmap.estimators.family_problems import Linear, expected, problem, with_outputs
from fednmap.estimators.fit_config import FitConfig, complete, listed
from fednmap.estimators.model_selection import LEAVE_ONE_SITE_OUT, deal
from fednmap.estimators.prepare import dense
from fednmap.estimators.remote import UNSOLVED
from fednmap.estimators.rows import LARGEST, Floats
from fednmap.estimators.site_effects import PartialMinimum
from fednmap.names import InputError
from fednmap.problems.families import Ordinal, Response
from fednmap.tables import FederatedFormula, FederatedPreprocessor, Table, as_word
from fednmap.tables import statistics as columns
from fednmap.tables.formula import LARGEST as LARGEST_NUMBER
from fednmap.tables.table import REFUSALS, SiteError, Sites

Question = columns.Question
Answers = columns.Answers
SEED = 0
"""With which rows are dealt out into folds."""
AFTER = ("sums", "squares", "fills", "events", "left-out")
POINTS: tuple[str, ...] = ("gradients", "losses", "hessian", "information", "outer", "pearson", "curvature", "held-out")
POINTS += ("effects", "predictions")
"""Questions after the agreement: about the rows of a part, and about a model at some points."""
OF_FOLDS = ("ranges", "counts", *AFTER, *POINTS[:-3])
"""Those about the rows outside of a fold."""


class Disagreement(SiteError):
    """A question that the site's own settings do not lead to. The message has no cell, and may be sent."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "settings")


class RemoteFitConfig(FitConfig):
    """The settings of a fit between machines."""

    secagg: bool = Field(False, description="Secure aggregation: the server learns sums over all sites alone.")

    @classmethod
    def make(cls, **values: Any) -> Self:
        task = super().make(**values)
        if task.family == "ordinal" and task.order is None:
            raise InputError("expected order = 'low,mid,high', the labels from the lowest to the highest, with ordinal")
        of_single_sites = {
            "impute = 'median' asks for extremes and counts": (task.impute == "median", "use 'mean'"),
            "cv = 'leave-one-site-out' reveals the losses": (task.cv == LEAVE_ONE_SITE_OUT, "give a number of folds"),
            "bs in a formula asks for extremes": (bool(task.asked.get("ranges")), "leave it out"),
            "evaluate = 'leave-one-site-out' needs models": (
                task.evaluate == LEAVE_ONE_SITE_OUT,
                "give a number of folds",
            ),
            "cov-type = 'cluster' needs the gradients": (task.cov_type == "cluster", "use HC0 or nonrobust"),
        }
        for words, (told, advice) in of_single_sites.items():
            if task.secagg and told:
                raise InputError(f"secagg reveals only sums over all sites, and {words} of single sites; {advice}")
        if task.evaluate is not None and (task.site_effects != "none" or task.family in ("cox", "ordinal")):
            raise InputError("evaluate between machines is for one score per row, without site effects; leave it out")
        if None not in (task.cv, task.evaluate) and task.cv != task.evaluate:
            raise InputError(f"expected one dealing of folds, got cv {task.cv} and evaluate {task.evaluate}; use one")
        if task.site_effects != "none" and task.cv == LEAVE_ONE_SITE_OUT:
            raise InputError("a site that is left out has no effects of its own; give cv as a number of folds")
        return task

    @cached_property
    def formula_encoder(self) -> FederatedFormula | None:
        """The columns of the formula; None without one."""
        return None if self.formula is None else FederatedFormula(self.formula)

    @property
    def asked(self) -> Mapping[str, set[str]]:
        """Of which columns a formula leads to questions, by question; see `FederatedFormula.asked`."""
        return {} if self.formula_encoder is None else self.formula_encoder.asked

    def complete(self, rows: Table) -> Table:
        """The rows that are fitted: with a formula those without gaps."""
        return rows if self.formula_encoder is None else rows.some(self.formula_encoder.complete(rows))

    def features(self, rows: Table) -> Table:
        return super().features(rows) if self.formula_encoder is None else self.formula_encoder.variables(rows)

    def used(self, rows: Table) -> tuple[list[str], list[str], list[str]]:
        """The goals, the other columns of the model, and those whose numbers are codes."""
        others = [name for name in self.features(rows).columns if name in rows.columns]
        return self.goals, [*others, *self.extra_columns], next(self.encoder().conversation())["categorical"]

    @property
    def folding(self) -> str | None:
        """How rows are dealt into folds; None where they are not."""
        return self.cv or self.evaluate

    @property
    def questions(self) -> tuple[str, ...]:
        """Those that a fit of these settings leads to, after the agreement."""
        asked = ["sums", "squares", "gradients", "losses", "curvature"]
        asked += ["effects", "held-out"] if self.site_effects != "none" else []
        asked += ["predictions"] if self.evaluate is not None else []
        if self.family == "gaussian":
            asked.append("hessian")
        if self.penalty == "none" or self.cov_type is not None:
            asked += ["hessian", "outer", "left-out"]
            asked += ["information", "pearson"] if self.site_effects == "none" else []
        return (*asked, "fills", "events")


class Agreement(BaseModel):
    """The columns and classes of a fit, and the rows of every site; everything is a sum over sites, and JSON."""

    model_config = ConfigDict(frozen=True)

    task: RemoteFitConfig
    statistics: tuple[columns.Statistic, ...]
    rows: dict[str, int]
    """Of every site, by name, as estimators have them."""
    classes: tuple[str, ...]
    state: dict[str, Any] = {}
    """Of the functions of a formula: means, deviations, knots."""

    @cached_property
    def preprocessor(self) -> FederatedPreprocessor | FederatedFormula:
        return self._encoder(self.statistics)

    def _encoder(self, statistics: Sequence[columns.Statistic]) -> FederatedPreprocessor | FederatedFormula:
        formula = self.task.formula_encoder
        return self.task.preprocessor().know(statistics) if formula is None else formula.know(statistics, self.state)

    @cached_property
    def family(self) -> Response:
        if self.task.family == "ordinal":
            return Ordinal(len(self.classes))
        return with_outputs(self.task.made_family(), self.outputs)

    @property
    def names(self) -> list[str]:
        return [str(name) for name in self.preprocessor.get_feature_names_out()]

    @property
    def outputs(self) -> int:
        return len(self.classes) if len(self.classes) > 2 and self.task.family == "logistic" else 1

    @property
    def level(self) -> bool:
        """Whether each site has a separate intercept."""
        return self.family.level and self.task.site_effects != "none"

    @property
    def dim(self) -> int:
        """Of the vector x of f: coefficients, intercepts, what the family estimates once for all rows."""
        scores = self.family.outputs - self.family.constants
        return scores * (len(self.names) + self.family.level - self.level) + self.family.constants

    @cached_property
    def mu(self) -> float | None:
        """The weight of the sites' deviations; None where they have none. Refuses what cannot have site effects."""
        found = self.task.estimator(self.preprocessor, self.classes)._mu(self.outputs)
        return float(found) if self.task.site_effects == "sparse" else None

    def length(self, question: Question, points: int = 1) -> int:
        """Of a site's answer."""
        p, d, ask = len(self.names), self.dim, question["ask"]
        differ, extra = self.task.site_effects != "none", self.task.offset_column is not None
        known = {"sums": p + max(len(self.classes), 1) + extra, "squares": p + 1, "gradients": points * d}
        known |= {"fills": 2 * len(question.get("columns", ())), "losses": points, "held-out": points}
        known |= {"effects": int(self.level and self.task.secagg), "hessian": d * (d + differ)}
        known |= {"predictions": 5 * (len(question.get("grid", ())) + 1), "information": d * d}
        known |= {"outer": known["hessian"]}
        return known.get(ask, 1)

    @cached_property
    def sites(self) -> Sites:
        return Sites(tuple(self.rows), np.repeat(np.arange(len(self.rows)), list(self.rows.values())))

    @property
    def folds(self) -> int:
        """How many there are."""
        way = self.task.folding
        return len(self.rows) if way == LEAVE_ONE_SITE_OUT else int(way or 0)

    def part(self, part: Any, own: tuple[str, Any] | None = None) -> Any:
        """Which rows are on one side of a fold; of every site it is known how many, of a site's own also which.

        part: the number of the fold, and whether the rows are those held out; None: all rows.
        own:  a site, and by what its rows are dealt out: their labels or events.
        """
        of_row = self.sites.of_row
        if part is None:
            return np.full(len(of_row), True)
        number, held_out = part
        if self.task.folding == LEAVE_ONE_SITE_OUT:
            return (of_row == number) == bool(held_out)
        kinds = np.zeros(len(of_row))
        if own is not None:
            kinds[of_row == self.sites.names.index(own[0])] = own[1]
        return (deal(kinds, of_row, self.folds, SEED) == number) == bool(held_out)

    def weight(self, site: str, part: Any = None) -> float:
        """What the rows of the site count in f, of all rows or of those of a part."""
        sizes = np.bincount(self.sites.of_row[self.part(part)], minlength=len(self.rows))
        counts = sizes if self.task.weights == "samples" else sizes > 0
        return float(counts[self.sites.names.index(site)] / counts.sum())

    def values(self, table: Table, fill: Mapping[str, float]) -> tuple[Floats, Floats]:
        """X and the targets of a site as numbers: a label is its place among the classes, an offset a second column;
        of a Cox model time, event, and perhaps the start of the time at risk and the stratum."""
        known, task = [replace(s, fill=float(fill.get(s.column, s.fill))) for s in self.statistics], self.task
        X, y = self._encoder(known).transform(task.features(table)), task.y(table)
        if self.classes:
            y = np.array([self.classes.index(name) for name in y], float)
        if task.entry is not None:
            y = np.roll(y, -1, 1)
            if bool((y[:, 2] >= y[:, 0]).any()):
                raise SiteError(f"{table.where}a row ends before {task.entry!r}", "range", task.entry)
        if task.strata is not None:
            start = y[:, 2] if task.entry else np.full(len(y), -LARGEST)
            codes = np.unique([as_word(v) for v in complete(table, task.strata)], return_inverse=True)[1]
            y = np.column_stack([y[:, :2], start, codes])
        if task.offset_column is not None:
            added = task.offsets(table)
            y = np.column_stack([y, added if task.exposure is None else np.log(added)])
        return X, y

    def check(self, task: RemoteFitConfig, table: Table) -> None:
        """Refuse an agreement that differs from the site's settings, or whose statistics contradict the site's answers.

        A number that is treated as a category would be counted value by value.
        """
        if self.task != task or self.rows.get(table.name) != table.rows:
            raise Disagreement(
                f"what was agreed is not what the settings of {table.name!r} say; give all machines the same app"
            )
        own = columns.answer(next(task.encoder().conversation()), task.features(table))["columns"]
        said = {s.column: s for s in self.statistics}
        differ = [c["name"] for c in own if c["name"] not in said or not _fits(said[c["name"]], c)]
        differ += [name for name in said if name not in {c["name"] for c in own}]
        if differ:
            raise Disagreement(
                f"the statistics of column {differ[0]!r} are not those that {table.name!r} took part in; refused"
            )


def negotiate(task: RemoteFitConfig) -> Generator[Question, Answers, Agreement]:
    """The questions about the columns and the target."""
    formula, state = task.formula_encoder, dict[str, Any]()
    if formula is None:
        statistics = yield from task.preprocessor().conversation()
    else:
        statistics, state = yield from formula.conversation()
    about = yield {"ask": "target"}
    for name in listed(task.exclude):
        if all(name in part["lacking"] for part in about.values()):
            raise InputError(f"{name!r} is to be dropped, and no site has such a column")
    rows = {site: int(about[site]["rows"]) for site in sorted(about)}
    classes = task.classes(name for part in about.values() for name in part.get("classes", ()))
    known = Agreement(task=task, statistics=statistics, rows=rows, classes=classes, state=state)
    _ = known.mu  # refused before there is a folder
    return known


def answer(question: Question, table: Table, task: RemoteFitConfig) -> dict[str, Any]:
    """Return a site's answer about its columns; what it must not reveal, or cannot, is refused in its name.

    task: the site's own settings: nothing is revealed that such a fit does not ask for.
    """
    if question["ask"] != "target":
        _check_asked(question, table, task)
        return columns.answer(question, task.features(table))
    if table.rows == 1:
        raise SiteError(f"{table.where}{REFUSALS['one-row']}", "one-row")
    y, lacking = task.y(table), [name for name in listed(task.exclude) if name not in table.columns]
    classes = {"classes": sorted(set(y.tolist()))} if task.family in ("logistic", "ordinal") else {}
    return {"rows": table.rows, "lacking": lacking} | classes


def side(question: Question, known: Agreement, table: Table) -> Any:
    """Which rows of a site a question is about; a fold that the settings do not lead to is refused."""
    part, task = question.get("part"), known.task
    if part is None:
        return np.full(table.rows, True)
    if not (isinstance(part, list | tuple) and [*map(type, part)] == [int, bool] and part[0] in range(known.folds)):
        raise Disagreement(f"the server asks about a fold {part!r:.20} that the settings do not lead to; refused")
    held_out = ("events", "losses" if task.site_effects == "none" else "held-out")
    if question["ask"] not in (held_out if part[1] else OF_FOLDS):
        raise Disagreement(f"no fit asks {question['ask']!r:.20} about these rows of a fold; refused")
    y: Any = task.y(table) if task.family in ("logistic", "ordinal", "cox") else np.zeros(table.rows)
    if known.classes:
        y = np.array([known.classes.index(name) for name in y], float)
    own = (table.name, y[:, -1] if task.family == "cox" else y)
    inside = known.part(part, own)[known.sites.of_row == known.sites.names.index(table.name)]
    told = known.part(part) if task.secagg else inside
    if 1 in (told.sum(), (~told).sum()):  # its sums are the difference between those of all rows and of the others
        raise SiteError(f"{table.where}{REFUSALS['one-row-fold']}", "one-row-fold")
    return inside


Look = Callable[[str, Any, Tensor], None]
"""Called with the question, the site's problem and the points before an answer about them leaves; it may refuse."""


def reply(
    question: Question, points: Tensor | None, known: Agreement, table: Table, look: Look, inside: Any = None
) -> Floats:
    """A site's vector; the sum over sites is what the server asks for.

    table: all rows of the site. inside: those of the part that the question is about; None: all.
    """
    ask, site, task = question["ask"], table.name, known.task
    if ask not in task.questions or (ask == "held-out" and inside is None):
        raise Disagreement(f"the settings do not lead to the question {ask!r:.20}; refused")
    rows = table if inside is None else table.some(inside)
    if not rows.rows:  # of a site that is left out of a fold
        return np.zeros(known.length(question, 1 if points is None else len(points)))
    weight = known.weight(site, question["part"])
    if ask in POINTS:
        assert points is not None
        if ask == "held-out":
            return _held_out(question, points, known, table, inside, look)
        if ask == "predictions":
            return _predictions(question, points, known, table, look)
        return _at_points(question, points, known, rows, weight, look)
    if ask == "fills":
        if question["columns"] != [s.column for s in known.statistics if s.kind == "number" and s.missing]:
            raise Disagreement("the server asks for fills of other columns than those with gaps; refused")
        each = [columns.given(rows[name]) for name in question["columns"]]
        return np.array([*map(len, each), *(values.sum() for values in each)], float)
    X, y = known.values(rows, question["fill"])
    added = y[:, 1:] if task.offset_column is not None else np.empty((len(y), 0))
    y = y[:, 0] if added.shape[1] else y[:, 1] if task.family == "cox" else y
    one = np.ones(len(X))
    if ask == "events":
        return np.array([y.sum()])
    if ask == "left-out":
        return np.array([known.family.left_out(y, one)])
    share = weight / len(X) * one
    if ask == "squares":
        numbers = not known.classes and task.family != "cox"
        spread = float(share @ np.square(y - float(question["y"]))) if numbers else 0.0
        return np.array([*(share @ np.square(X - _by_column(question, "mean", X))), spread])
    sums = np.bincount(y.astype(np.intp), share, len(known.classes)) if known.classes else [share @ y]
    return np.array([*(share @ X), *sums, *(share @ added)])


def _at_points(question: Question, points: Tensor, known: Agreement, table: Table, weight: float, look: Look) -> Floats:
    """The weighted loss of a site's rows, or a derivative, at each of some points."""
    ask, f = question["ask"], _problem(question, known, table)
    if known.task.site_effects != "none":
        return _of_effects(question, points, known, f, table.name, look)
    look(ask, f, points)
    if ask in ("gradients", "losses"):
        one = f.gradient if ask == "gradients" else f.loss
        found = torch.stack([one(x) for x in points]) if known.family.constants else getattr(f, ask)(points)
    elif ask == "outer":
        copies = question["copies"]
        found = f.outer(points[0], copies) * (weight if copies is None else 1.0)
    elif ask in ("curvature", "pearson"):
        found = torch.tensor([(f.smoothness if ask == "curvature" else f.pearson)(points[0])])
    else:
        found = (f.information if ask == "information" and known.family.level else f.hessian)(points[0])
    return np.asarray(weight * found.double().flatten().numpy())


def _of_effects(question: Question, points: Tensor, known: Agreement, f: Any, site: str, look: Look) -> Floats:
    """The same of F_i, the least loss over the site's effects, which are not sent.

    What the rows count in an answer is what they count under the site's own model, which the rules look at.
    """
    ask, own = question["ask"], _effects(f, known, site, question["part"])
    inner, size = own.inner(points)[0]
    for kind in ("hessian", "outer") if ask == "outer" else (ask,):
        look(kind, f, inner)
    if ask in ("gradients", "losses"):
        parts = f.losses(inner) if ask == "losses" else f.gradients(inner)[:, : own.columns].flatten()
        found = (own.weights[0] * parts + (size if ask == "losses" else 0.0)).numpy()
        return np.where(np.isfinite(found), found, UNSOLVED)
    if ask == "curvature":
        return np.array([own.weights[0] * f.smoothness(inner[0])])
    return torch.cat([part.flatten() for part in own.projected(ask, points[0], question.get("copies", 1.0))]).numpy()


def _held_out(question: Question, points: Tensor, known: Agreement, table: Table, inside: Any, look: Look) -> Floats:
    """The loss of rows that are held out, under the site's own models of the others. That of a Cox model is what they
    add to the partial likelihood of these."""
    number, site, cox = question["part"][0], table.name, known.task.family == "cox"
    rest = _problem(question, known, table.some(~inside))
    inner = _effects(rest, known, site, (number, False)).inner(points)[0][0]
    f = _problem(question, known, table if cox else table.some(inside))
    look("held-out", f, inner)
    if not cox:
        return np.asarray(known.weight(site, question["part"]) * f.losses(inner).numpy())
    more = table.rows * f.losses(inner) - int((~inside).sum()) * rest.losses(inner)
    return np.asarray((more / int(known.part(question["part"]).sum())).numpy())


def _predictions(question: Question, points: Tensor, known: Agreement, table: Table, look: Look) -> Floats:
    """Sums over rows by intervals of predictions, see `site_sums`; each is predicted by the model without its fold."""
    grid, fills = np.array(question["grid"], float), question["fills"]
    if not (len(points) == len(fills) == known.folds and len(grid) < GRID and bool((np.diff(grid) > 0).all())):
        raise Disagreement("the server asks for other predictions than those of the folds; refused")
    total, place = np.zeros((5, len(grid) + 1)), np.empty(table.rows, np.intp)
    for number, (x, fill) in enumerate(zip(points, fills, strict=True)):
        inside = side({"ask": "losses", "part": [number, True]}, known, table)
        if inside.any():
            f = _problem(question | {"fill": fill}, known, table.some(inside))
            eta, y = (part.double().numpy() for part in f.rows_at(x))
            scores, constants = (eta[:, 0], eta[0, 1:]) if eta.ndim > 1 else (eta, ())
            total += site_sums(known.family, scores, y, np.ones(len(y)), grid, constants)
            place[inside] = np.searchsorted(grid, expected(known.family, scores, constants))
    look("cells", None, torch.from_numpy((place == np.arange(len(grid) + 1)[:, None]).astype(float)))
    return total.flatten()


def own_effects(question: Question, points: Tensor, known: Agreement, table: Table, look: Look) -> dict[str, Any]:
    """The effects of the site at the shared coefficients of a point, for columns as they are given."""
    f = _problem(question, known, table)
    own = _effects(f, known, table.name, None)
    look("effects", f, own.inner(points)[0][0])
    d, a = own.effects(points[0])
    X = np.empty((0, len(known.names)))
    shift, factor = (_by_column(question, name, X) for name in ("shift", "factor"))
    deviation, coef = d[0] * factor, points[0].numpy() * factor
    intercept = float(a[0] - (deviation + coef) @ shift) if known.level else 0.0
    if not np.isfinite([*deviation, intercept]).all():
        raise SiteError(f"{table.where}the site's own effects were not found", "own-intercept")
    about = {"site": table.name, "columns": known.names, "coef": coef.tolist()}
    return about | {"intercept": intercept, "deviation": deviation.tolist()}


def _effects(f: Linear, known: Agreement, site: str, part: Any) -> PartialMinimum:
    """F_i of the site, whose problem is f."""
    y = f.data.y.double().numpy()
    unit = known.family.unit(y, np.full(len(y), 1 / len(y)))
    try:
        return PartialMinimum(f, [site], np.array([known.weight(site, part)]), known.mu, unit)
    except InputError as error:
        raise SiteError(str(error), "own-intercept") from None


def _problem(question: Question, known: Agreement, table: Table) -> Any:
    """The mean loss of a site's rows, on scaled columns where the question has a scaling."""
    X, y = known.values(table, question["fill"])
    if "shift" in question:
        X = (X - _by_column(question, "shift", X)) * _by_column(question, "factor", X)
    data, level = ClientData(dense(X), dense(y), dense(np.array([len(X)]))), known.family.level
    options: Any = {"intercept": level, "offset": known.task.offset_column is not None}
    return problem(known.family, data, **options, weights=dense(np.ones(1)), sample_weights=None)


def _by_column(question: Question, name: str, X: Floats) -> Floats:
    """Numbers of a question, one for each column: with one for each row, the server would choose rows."""
    found = np.array(question[name], float)
    if found.shape != X.shape[1:]:
        raise Disagreement(f"expected {X.shape[1]} numbers as {name}, got shape {found.shape}; refused")
    return found


def _fits(s: columns.Statistic, own: dict[str, Any]) -> bool:
    """Whether a statistic may be made from what a site says of the column."""
    kind = "number" if own["kind"] == "number" else "category"
    return s.kind == kind and {*own.get("levels", ())} <= {*s.levels} and (s.flagged or not own["gaps"])


def _check_asked(question: Question, table: Table, task: RemoteFitConfig) -> None:
    """Refuse questions about the columns that the site's own settings do not lead to."""
    ask, expected, asked = question["ask"], next(task.encoder().conversation()), task.asked
    for name, own in expected.items() if ask == expected["ask"] else ():
        if question.get(name) != own:
            words = f"{name} is {question.get(name)!r:.60} in the question and {own!r:.60} in this site's settings"
            raise Disagreement(f"{table.where}{words}; give all machines the same app")
    if ask in asked:
        named: set[str] = set(question["columns" if ask == "ranges" else "cuts"])
        rows = [LARGEST_NUMBER]
        everyone = all(cuts == rows for cuts in question.get("cuts", {"": ()}).values())
        if not named <= asked["rows" if everyone else ask]:
            raise Disagreement(f"{table.where}the formula does not lead to {ask} of {sorted(named)}; refused")
    elif ask in ("ranges", "counts") and task.impute != "median":
        words = f"{ask} are for impute = 'median', and this site's settings have {task.impute!r}"
        raise Disagreement(f"{table.where}{words}; give all machines the same app")
    if ask == "counts" and any(len(cuts) > columns.CUTS for cuts in question["cuts"].values()):
        raise Disagreement(f"{table.where}expected at most {columns.CUTS} cuts of a column; refused")
