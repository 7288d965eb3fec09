"""What the sites of a fit agree on before round 0, by questions and answers that are sums over rows.

In one process `Federated.fit` computes the same from all rows. Between machines `negotiate` asks the questions and
`answer` is a site's half. Every site and the server build the same problem from the resulting `Agreement`.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import cached_property
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from fednmap.algorithms import FedNMapMemory
from fednmap.core import Regularizer
from fednmap.data.clients import ClientData
from fednmap.estimators.engine import MEMORY
from fednmap.estimators.families import problem, with_outputs
from fednmap.estimators.fit_config import FitConfig, listed, ordered_classes
from fednmap.estimators.penalties import GROUPED, group_numbers, penalty_name, regularizer, settled_lam
from fednmap.estimators.prepare import Layout, Scaling, dense
from fednmap.estimators.rows import Floats
from fednmap.names import InputError
from fednmap.problems.families import Response
from fednmap.tables import FederatedPreprocessor, Table
from fednmap.tables import statistics as columns
from fednmap.tables.table import REFUSALS, SiteError

Question = columns.Question
Answers = columns.Answers


class Disagreement(SiteError):
    """A question that the site's own settings do not lead to. The message has no cell, and may be sent."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "settings")


class Agreement(BaseModel):
    """The columns, classes, moments and the curvature of a fit; everything is a sum over sites, and JSON."""

    model_config = ConfigDict(frozen=True)

    task: FitConfig
    statistics: tuple[columns.Statistic, ...]
    rows: dict[str, int]
    """Of every site, in the order in which the server knows them."""
    classes: tuple[str, ...]
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()
    y: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    """Values and their shares, with the mean and deviation of y, or the shares of its classes."""
    L: float = 1.0
    """The smoothness of f, at most."""

    @cached_property
    def preprocessor(self) -> FederatedPreprocessor:
        return self.task.preprocessor().know(self.statistics)

    @cached_property
    def family(self) -> Response:
        return with_outputs(self.task.made_family(), self.outputs)

    @property
    def names(self) -> list[str]:
        return [str(name) for name in self.preprocessor.get_feature_names_out()]

    @property
    def outputs(self) -> int:
        return len(self.classes) if len(self.classes) > 2 else 1

    def row_weight(self, site: str) -> float:
        """What a row of the site counts in f."""
        if self.task.weights == "samples":
            return 1 / sum(self.rows.values())
        return 1 / (self.rows[site] * len(self.rows))

    def weight(self, site: str) -> float:
        """What the site counts in f."""
        return self.row_weight(site) * self.rows[site]

    @cached_property
    def scaling(self) -> Scaling:
        mean, deviation = np.array(self.mean), np.array(self.deviation)
        return Scaling.of(mean, deviation, standardize=self.task.standardize, free_level=True)

    @cached_property
    def layout(self) -> Layout:
        """What the vector of the problem means, and where it begins."""
        return Layout(self.family, self.scaling, np.array(self.y[0]), np.array(self.y[1]), self.family.level)

    def local(self, table: Table) -> Any:
        """f_i of a site: the mean loss of its rows, on scaled columns."""
        X, y = self.values(table)
        data = ClientData(dense(self.scaling.apply(X)), dense(y), dense(np.array([len(X)])))
        return problem(self.family, data, intercept=self.family.level, weights=dense(np.ones(1)), sample_weights=None)

    def values(self, table: Table) -> tuple[Floats, Floats]:
        """X and y of a site as numbers; a label is its place among the classes."""
        X, y = self.preprocessor.transform(self.task.features(table)), self.task.y(table)
        return X, np.array([self.classes.index(name) for name in y], float) if self.classes else y

    def phi(self) -> Regularizer:
        """The penalty on the coefficients; the intercepts are left alone."""
        task = self.task
        grouped = penalty_name(task.penalty) in GROUPED
        numbers = group_numbers(self.preprocessor.groups() if grouped else None, self.names)
        on_them = regularizer(task.penalty, settled_lam(task.penalty, task.lam), task.l1_ratio, numbers, self.outputs)
        return self.layout.with_penalty(on_them)

    @property
    def gamma(self) -> float:
        rho = self.phi().rho
        return min(1 / self.L, 0.5 / rho if rho > 0 else np.inf)

    def method(self) -> FedNMapMemory:
        """As `estimators.engine` has it: exact gradients, one local step, memory."""
        memory = min(MEMORY, len(self.layout.start))
        return FedNMapMemory(self.phi(), eta_a=self.task.step / self.L, eta_s=1.0, Q=1, gamma=self.gamma, memory=memory)

    def check(self, task: FitConfig, table: Table) -> None:
        """Refuse an agreement about something else than the site's own settings, or with statistics that cannot have
        come of its own answers: a number as a category would be counted value by value."""
        if self.task != task or table.name not in self.rows:
            raise Disagreement(
                f"what was agreed is not what the settings of {table.name!r} say; give all machines the same app"
            )
        own = columns.answer(next(task.preprocessor().conversation()), task.features(table))["columns"]
        said = {s.column: s for s in self.statistics}
        differ = [c["name"] for c in own if c["name"] not in said or not _fits(said[c["name"]], c)]
        differ += [name for name in said if name not in {c["name"] for c in own}]
        if differ:
            raise Disagreement(
                f"the statistics of column {differ[0]!r} are not those that {table.name!r} took part in; refused"
            )


def negotiate(task: FitConfig) -> Generator[Question, Answers, Agreement]:
    """All questions of a fit, from the columns to the curvature."""
    statistics = yield from task.preprocessor().conversation()
    about = yield {"ask": "target"}
    for name in listed(task.exclude):
        if all(name in part["lacking"] for part in about.values()):
            raise InputError(f"{name!r} is to be dropped, and no site has such a column")
    rows = {site: int(part["rows"]) for site, part in about.items()}
    classes: tuple[str, ...] = ()
    if task.family == "logistic":
        found = [name for part in about.values() for name in part["classes"]]
        classes = ordered_classes(task.target, found, task.positive)
        if len(classes) < 2:
            raise InputError(f"the target {task.target!r} holds one class only, {classes[0]!r}; two are needed")
    if task.family == "cox" and not sum(part["events"] for part in about.values()):
        raise InputError("there is no event at any site; a Cox model needs some")
    known = Agreement(task=task, statistics=statistics, rows=rows, classes=classes)
    sums = _summed((yield {"ask": "sums", "agreement": known.model_dump()}))
    if task.family == "poisson" and not sums["y"][0] > 0:
        raise InputError("all counts are 0, so that the logarithm of their mean is not finite; give some above 0")
    asked = {"ask": "squares", "agreement": known.model_dump(), "mean": sums["x"], "y": sums["y"]}
    squares = _summed((yield asked))
    deviation, y = np.sqrt(squares["x"]).tolist(), _stand_in(task, sums["y"], squares["y"])
    known = known.model_copy(update={"mean": tuple(sums["x"]), "deviation": tuple(deviation), "y": y})
    curvature = yield {"ask": "curvature", "agreement": known.model_dump()}
    L = sum(known.weight(site) * float(part["L"]) for site, part in curvature.items())
    return known.model_copy(update={"L": L or 1.0})


def answer(question: Question, table: Table, task: FitConfig) -> dict[str, Any]:
    """A site's answer; what it must not tell, or cannot, is refused in its name.

    task: the site's own: nothing is told that a fit of it does not ask for.
    """
    ask = question["ask"]
    if ask == "target":
        return _about_target(task, table)
    if ask not in ("sums", "squares", "curvature"):
        _check_asked(question, table, task)
        return columns.answer(question, task.features(table))
    known = Agreement.model_validate(question["agreement"])
    known.check(task, table)
    if ask == "curvature":
        return {"L": float(known.local(table).smoothness(known.layout.start))}  # which changes with x for counts
    X, y = known.values(table)
    weight = np.full(len(X), known.row_weight(table.name))
    if ask == "squares":
        about_y = 0.0 if task.family in ("logistic", "cox") else float(weight @ np.square(y - question["y"][0]))
        return {"x": (weight @ np.square(X - np.array(question["mean"]))).tolist(), "y": [about_y]}
    shares: list[float] = [] if task.family == "cox" else [float(weight @ y)]
    if task.family == "logistic":
        shares = np.bincount(y.astype(np.intp), weight, len(known.classes)).tolist()
    return {"x": (weight @ X).tolist(), "y": shares}


def _fits(s: columns.Statistic, own: dict[str, Any]) -> bool:
    """Whether a statistic may be made from what a site says of the column."""
    kind = "number" if own["kind"] == "number" else "category"
    return s.kind == kind and {*own.get("levels", ())} <= {*s.levels} and (s.flagged or not own["gaps"])


def _check_asked(question: Question, table: Table, task: FitConfig) -> None:
    """Refuse questions about the columns that the site's own settings do not lead to."""
    ask, expected = question["ask"], next(task.preprocessor().conversation())
    for name, own in expected.items() if ask == expected["ask"] else ():
        if question.get(name) != own:
            words = f"{name} is {question.get(name)!r:.60} in the question and {own!r:.60} in this site's settings"
            raise Disagreement(f"{table.where}{words}; give all machines the same app")
    if ask in ("ranges", "counts") and task.impute != "median":
        words = f"{ask} are for impute = 'median', and this site's settings have {task.impute!r}"
        raise Disagreement(f"{table.where}{words}; give all machines the same app")
    if ask == "counts" and any(len(cuts) > columns.CUTS for cuts in question["cuts"].values()):
        raise Disagreement(f"{table.where}expected at most {columns.CUTS} cuts of a column; refused")


def _about_target(task: FitConfig, table: Table) -> dict[str, Any]:
    if table.rows == 1:
        raise SiteError(f"{table.where}{REFUSALS['one-row']}", "one-row")
    y = task.y(table)
    lacking = [name for name in listed(task.exclude) if name not in table.columns]
    said: dict[str, Any] = {"rows": table.rows, "lacking": lacking}
    if task.family == "logistic":
        said["classes"] = sorted(set(y.tolist()))
    if task.family == "cox":
        said["events"] = int((y[:, 1] == 1).sum())
    return said


def _stand_in(task: FitConfig, sums: list[float], squares: list[float]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Few values that have the shares of y's classes, or its mean and deviation."""
    if task.family == "logistic":
        return tuple(map(float, range(len(sums)))), tuple(sums)
    if task.family == "cox":
        return (), ()
    deviation = float(np.sqrt(squares[0]))
    return (sums[0] - deviation, sums[0] + deviation), (0.5, 0.5)


def _summed(answers: Answers) -> dict[str, Any]:
    """Sums over the sites."""
    return {
        name: np.sum([np.array(part[name], float) for part in answers.values()], axis=0).tolist() for name in ("x", "y")
    }
