"""What the sites of a fit agree on before round 0, by questions and answers that are sums over rows.

In one process `Federated.fit` computes the same from all rows. Between machines `negotiate` asks the questions and
`answer` is a site's half. Every site and the server build the same problem from the resulting `Agreement`.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from fednmap.algorithms import FedNMapMemory
from fednmap.core import Regularizer
from fednmap.data.clients import ClientData
from fednmap.estimators.engine import MEMORY
from fednmap.estimators.families import problem, with_outputs
from fednmap.estimators.fit_config import FitConfig, listed, ordered_classes
from fednmap.estimators.penalties import GROUPED, group_numbers, penalty_name, regularizer, settled_lam
from fednmap.estimators.prepare import Layout, Parameters, dense
from fednmap.estimators.sites import Floats
from fednmap.estimators.standardise import Scaling, from_moments
from fednmap.names import InputError
from fednmap.problems.families import Response
from fednmap.tables import FederatedPreprocessor, Table
from fednmap.tables import statistics as columns
from fednmap.tables.table import REFUSALS, SiteError

Question = columns.Question
Answers = columns.Answers


class Disagreement(InputError):
    """A question that the site's own settings do not lead to. The message has no cell, and may be sent."""


@dataclass(frozen=True, eq=False)
class Agreement:
    """The columns, classes, moments and the curvature of a fit; everything is a sum over sites, and JSON."""

    task: FitConfig
    statistics: tuple[columns.Statistic, ...]
    rows: dict[str, int]
    """Of every site, in the order in which the server knows them."""
    classes: tuple[str, ...]
    mean: Floats
    deviation: Floats
    y: tuple[Floats, Floats]
    """Values and their shares, with the mean and deviation of y, or the shares of its classes."""
    L: float
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
        return from_moments(self.mean, self.deviation, standardize=self.task.standardize, free_level=True)

    @cached_property
    def layout(self) -> Layout:
        """What the vector of the problem means, and where it begins."""
        return Layout.of(self.family, self.scaling, *self.y, self.outputs, self.family.level)

    @property
    def unit(self) -> float:
        """Tolerances are relative to it."""
        return self.family.unit(*self.y)

    @property
    def start(self) -> Tensor:
        return self.layout.start

    def parameters(self, x: Tensor) -> Parameters:
        """The model on the scale of the given columns."""
        return self.layout.parameters(x)

    def local(self, table: Table) -> Any:
        """f_i of a site: the mean loss of its rows, on scaled columns."""
        X = self.preprocessor.transform(self.task.features(table))
        scaled = self.scaling.apply(X)
        data = ClientData(dense(scaled), dense(_targets(self.task, table, self.classes)), dense(np.array([len(X)])))
        return problem(self.family, data, intercept=self.family.level, weights=dense(np.ones(1)), sample_weights=None)

    def phi(self) -> Regularizer:
        """The penalty on the coefficients; the intercepts are left alone."""
        task = self.task
        groups = self.preprocessor.groups() if penalty_name(task.penalty) in GROUPED else None
        numbers = group_numbers(groups, self.names)
        on_them = regularizer(task.penalty, settled_lam(task.penalty, task.lam), task.l1_ratio, numbers, self.outputs)
        return self.layout.with_penalty(on_them)

    @property
    def gamma(self) -> float:
        rho = self.phi().rho
        return min(1 / self.L, 0.5 / rho if rho > 0 else np.inf)

    def method(self) -> FedNMapMemory:
        """As `estimators.engine` has it: exact gradients, one local step, memory."""
        memory = min(MEMORY, len(self.start))
        return FedNMapMemory(self.phi(), eta_a=self.task.step / self.L, eta_s=1.0, Q=1, gamma=self.gamma, memory=memory)

    def check(self, task: FitConfig, site: str) -> None:
        """Refuse an agreement about something else than the site's own settings, or without it."""
        if self.task != task or site not in self.rows:
            raise Disagreement(
                f"what was agreed is not what the settings of {site!r} say; give all machines the same app"
            )

    def check_statistics(self, table: Table) -> None:
        """Refuse statistics that cannot have come of the site's own answers: a number as a category would be counted
        value by value."""
        own = columns.answer(next(self.task.preprocessor().conversation()), self.task.features(table))["columns"]
        said = {s.column: s for s in self.statistics}
        differ = [c["name"] for c in own if c["name"] not in said or not _fits(said[c["name"]], c)]
        differ += [name for name in said if name not in {c["name"] for c in own}]
        if differ:
            raise Disagreement(
                f"the statistics of column {differ[0]!r} are not those that {table.name!r} took part in; refused"
            )

    def to_dict(self) -> dict[str, Any]:
        """As JSON; `from_dict` is the way back."""
        return {
            "task": self.task.model_dump(),
            "statistics": columns.as_said(self.statistics),
            "rows": self.rows,
            "classes": list(self.classes),
            "mean": self.mean.tolist(),
            "deviation": self.deviation.tolist(),
            "y": [part.tolist() for part in self.y],
            "L": self.L,
        }

    @classmethod
    def from_dict(cls, said: dict[str, Any]) -> Agreement:
        return cls(
            FitConfig.make(**said["task"]),
            columns.statistics_from(said["statistics"]),
            dict(said["rows"]),
            tuple(said["classes"]),
            np.array(said["mean"], float),
            np.array(said["deviation"], float),
            (np.array(said["y"][0], float), np.array(said["y"][1], float)),
            float(said["L"]),
        )


def negotiate(task: FitConfig) -> Generator[Question, Answers, Agreement]:
    """All questions of a fit, from the columns to the curvature."""
    statistics = yield from task.preprocessor().conversation()
    about = yield {"ask": "target"}
    for name in listed(task.drop_columns):
        if all(name in part["lacking"] for part in about.values()):
            raise InputError(f"{name!r} is to be dropped, and no site has such a column")
    rows = {site: int(part["rows"]) for site, part in about.items()}
    classes: tuple[str, ...] = ()
    if task.family == "logistic":
        classes = ordered_classes(
            task.target, (name for part in about.values() for name in part["classes"]), task.positive
        )
        if len(classes) < 2:
            raise InputError(f"the target {task.target!r} holds one class only, {classes[0]!r}; two are needed")
    if task.family == "cox" and not sum(part["events"] for part in about.values()):
        raise InputError("there is no event at any site; a Cox model needs some")
    nothing = np.zeros(0)
    known = Agreement(task, statistics, rows, classes, nothing, nothing, (nothing, nothing), 1.0)
    sums = _summed((yield {"ask": "sums", "agreement": known.to_dict()}))
    if task.family == "poisson" and not sums["y"][0] > 0:
        raise InputError("all counts are 0, so that the logarithm of their mean is not finite; give some above 0")
    squares = _summed((yield {"ask": "squares", "agreement": known.to_dict(), "mean": sums["x"], "y": sums["y"]}))
    mean, deviation = np.array(sums["x"]), np.sqrt(squares["x"])
    y = _stand_in(task, sums, squares)
    known = Agreement(task, statistics, rows, classes, mean, deviation, y, 1.0)
    curvature = yield {"ask": "curvature", "agreement": known.to_dict()}
    L = sum(known.weight(site) * float(part["L"]) for site, part in curvature.items())
    return Agreement(task, statistics, rows, classes, mean, deviation, y, L or 1.0)


def answer(question: Question, table: Table, task: FitConfig) -> dict[str, Any]:
    """A site's answer; what it must not tell, or cannot, is refused in its name.

    task: the site's own: nothing is told that a fit of it does not ask for.
    """
    ask = question["ask"]
    if ask == "target":
        if table.rows == 1:
            raise SiteError(f"{table.where}{REFUSALS['one-row']}", "one-row")
        return _about_target(task, table)
    if ask not in ("sums", "squares", "curvature"):
        _check_asked(question, table, task)
        return columns.answer(question, task.features(table))
    known = Agreement.from_dict(question["agreement"])
    known.check(task, table.name)
    known.check_statistics(table)
    if ask == "curvature":
        return {"L": float(known.local(table).smoothness(known.start))}  # which changes with x for counts
    X = known.preprocessor.transform(task.features(table))
    y = _targets(task, table, known.classes)
    weight = np.full(len(X), known.row_weight(table.name))
    if ask == "sums":
        return {"x": (weight @ X).tolist(), "y": _y_sums(task, y, weight, len(known.classes))}
    about_y = 0.0 if task.family in ("logistic", "cox") else float(weight @ np.square(y - question["y"][0]))
    return {"x": (weight @ np.square(X - np.array(question["mean"]))).tolist(), "y": [about_y]}


def _fits(s: columns.Statistic, own: dict[str, Any]) -> bool:
    """Whether a statistic may be made from what a site says of the column."""
    kind = "number" if own["kind"] == "number" else "category"
    return s.kind == kind and {*own.get("levels", ())} <= {*s.levels} and (s.flagged or not own["gaps"])


def _check_asked(question: Question, table: Table, task: FitConfig) -> None:
    """Refuse questions about the columns that the site's own settings do not lead to."""
    ask, due = question["ask"], next(task.preprocessor().conversation())
    for name, own in due.items() if ask == due["ask"] else ():
        if question.get(name) != own:
            words = f"{name} is {question.get(name)!r:.60} in the question and {own!r:.60} in this site's settings"
            raise Disagreement(f"{table.where}{words}; give all machines the same app")
    if ask in ("ranges", "counts") and task.impute != "median":
        words = f"{ask} are for impute = 'median', and this site's settings have {task.impute!r}"
        raise Disagreement(f"{table.where}{words}; give all machines the same app")
    if ask == "counts" and any(len(cuts) > columns.CUTS for cuts in question["cuts"].values()):
        raise Disagreement(f"{table.where}expected at most {columns.CUTS} cuts of a column; refused")


def _about_target(task: FitConfig, table: Table) -> dict[str, Any]:
    y = task.y(table)
    lacking = [name for name in listed(task.drop_columns) if name not in table.columns]
    said: dict[str, Any] = {"rows": table.rows, "lacking": lacking}
    if task.family == "logistic":
        return said | {"classes": sorted(set(y.tolist()))}
    if task.family == "cox":
        return said | {"events": int((y[:, 1] == 1).sum())}
    return said


def _targets(task: FitConfig, table: Table, classes: tuple[str, ...]) -> Floats:
    y = task.y(table)
    if task.family != "logistic":
        return y
    number = {name: k for k, name in enumerate(classes)}
    return np.array([number[name] for name in y], float)


def _y_sums(task: FitConfig, y: Floats, weight: Floats, classes: int) -> list[float]:
    if task.family == "cox":
        return []
    if task.family == "logistic":
        found: list[float] = np.bincount(y.astype(np.intp), weight, classes).tolist()
        return found
    return [float(weight @ y)]


def _stand_in(task: FitConfig, sums: dict[str, Any], squares: dict[str, Any]) -> tuple[Floats, Floats]:
    """Few values that have the shares of y's classes, or its mean and deviation."""
    if task.family == "logistic":
        return np.arange(len(sums["y"]), dtype=float), np.array(sums["y"])
    if task.family == "cox":
        return np.zeros(0), np.zeros(0)
    mean, deviation = float(sums["y"][0]), float(np.sqrt(squares["y"][0]))
    return np.array([mean - deviation, mean + deviation]), np.array([0.5, 0.5])


def _summed(answers: Answers) -> dict[str, Any]:
    """Sums over the sites."""
    return {
        name: np.sum([np.array(part[name], float) for part in answers.values()], axis=0).tolist() for name in ("x", "y")
    }
