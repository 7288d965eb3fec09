"""Rows at sites that are asked by messages: the estimators run at a server that holds no row.

`RemoteRows` and `RemoteProblem` stand in for the rows and for the problem that is made of them. Whatever an estimator
asks of these is a sum over rows, so a sum over sites: a question to all of them, and the sum of their answers.
`handshake.reply` is a site's half.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Tensor

from fednmap.estimators.rows import Floats, Rows
from fednmap.estimators.site_effects import identified
from fednmap.names import InputError
from fednmap.problems.families import Response
from fednmap.tables import statistics as columns

UNSOLVED = 2.0**44
"""What a site sends for a point at which it cannot find its effects; the server takes a shorter step."""

if TYPE_CHECKING:
    from fednmap.estimators.handshake import Agreement
    from fednmap.estimators.prepare import Scaling


class Asker(Protocol):
    """Puts questions to all sites."""

    def answers(self, question: columns.Question) -> columns.Answers:
        """Every site's answer in words and numbers."""
        ...

    def sum(self, question: columns.Question, length: int, points: Tensor | None) -> Floats:
        """The sum of the sites' vectors of this length."""
        ...

    def each(self, question: columns.Question, length: int, points: Tensor | None) -> Mapping[str, Floats]:
        """The vector of every site; nothing where only sums are sent."""
        ...


@dataclass(frozen=True, eq=False)
class RemoteRows:
    """All rows of the sites, or one side of a fold.

    part: the number of a fold, and whether the rows are those held out; None: all rows.
    fill: what fills gaps, where other than in the agreement.
    """

    known: Agreement
    asker: Asker
    part: tuple[int, bool] | None = None
    fill: Mapping[str, float] = field(default_factory=dict)

    def rows(self) -> Rows:
        """As estimators take them: how many rows each site has, and nothing that is in them."""
        sites, y_columns = self.known.sites, (2,) if self.known.task.family == "cox" else ()
        n = len(sites.of_row)
        return Rows(np.empty((n, 0)), np.full((n, *y_columns), np.nan), sites, np.ones(n), None, self)

    def of_fold(self, number: int, held_out: bool) -> RemoteRows:
        return replace(self, part=(number, held_out))

    def question(self, ask: str, **more: Any) -> columns.Question:
        return {"ask": ask, "part": self.part, "fill": dict(self.fill), **more}

    def sum(self, ask: str, points: Tensor | None = None, **more: Any) -> Floats:
        """The sum of the sites' answers."""
        question = self.question(ask, **more)
        return self.asker.sum(question, self.known.length(question, 1 if points is None else len(points)), points)

    def each(self, ask: str, points: Tensor, **more: Any) -> Mapping[str, Floats]:
        """The answer of every site; nothing where only sums are sent."""
        question = self.question(ask, **more)
        return self.asker.each(question, self.known.length(question, len(points)), points)

    def refilled(self, number: int) -> RemoteRows:
        """The rows with gaps in numbers filled by what the rows outside of a fold say: rows held out must not count."""
        names = [s.column for s in self.known.statistics if s.kind == "number" and s.missing]
        if not names:
            return self
        train, fill = self.of_fold(number, False), {s.column: s.fill for s in self.known.statistics}
        count, total = train.sum("fills", columns=names).reshape(2, -1)
        told = {name: total[k] / count[k] for k, name in enumerate(names) if count[k]}
        if self.known.task.impute == "median" and told:
            ranks = {name: count[k] / 2 for k, name in enumerate(names) if count[k]}
            asked = columns.order_statistics(ranks)
            told = columns.carry(asked, lambda q: self.asker.answers(q | {"part": train.part}))
        return replace(self, fill={name: float(told.get(name, fill[name])) for name in names})

    @cached_property
    def _sums(self) -> tuple[Floats, Floats, Floats]:
        """The weighted sums of the columns, of y or of its classes, and of offsets."""
        found, p, end = self.sum("sums"), len(self.known.names), len(self.known.names) + max(len(self.known.classes), 1)
        return found[:p], found[p:end], found[end:]

    @cached_property
    def _squares(self) -> Floats:
        """The weighted sums of squared deviations, of y last."""
        mean, y, _ = self._sums
        return self.sum("squares", mean=mean.tolist(), y=float(y[0]))

    def moments(self) -> tuple[Floats, Floats]:
        """Mean and deviation of every column."""
        return self._sums[0], np.sqrt(self._squares[:-1])

    @property
    def mean_offset(self) -> float | None:
        """Of the offsets; None where there are none."""
        return float(self._sums[2][0]) if self.known.task.offset_column is not None else None

    def response(self) -> tuple[Floats, Floats]:
        """Few values that have the shares of y's classes or events, or its mean and deviation; and their shares."""
        self.check()
        family, y = self.known.task.family, self._sums[1]
        if self.known.classes:
            return np.arange(len(y), dtype=float), y / y.sum()
        if family == "cox":
            return np.array([[0.0, 1.0], [0.0, 0.0]]), np.array([y[0], 1 - y[0]])
        deviation = np.sqrt(self._squares[-1])
        return np.array([y[0] - deviation, y[0] + deviation]), np.array([0.5, 0.5])

    def check(self) -> None:
        """Refuse rows without one of the classes, without an event, or with counts of 0 alone."""
        family, y = self.known.task.family, self._sums[1]
        for name, share in zip(self.known.classes, y, strict=False):
            if not share > 0:
                words = "leave the class out, or choose folds that share it"
                raise InputError(f"no row of class {name!r} is left to learn it from; {words}")
        if family == "cox" and not y[0] > 0:
            raise InputError("there is no event at any site; a Cox model needs some")
        if family in ("poisson", "negative-binomial") and not y[0] > 0:
            raise InputError("all counts are 0, so that the logarithm of their mean is not finite; give some above 0")

    def events(self) -> float:
        return float(self.sum("events")[0])

    def left_out(self) -> float:
        """The part of -2 log likelihood that is the same for all models."""
        return float(self.sum("left-out")[0])

    def problem(self, family: Response, scaling: Scaling | None = None) -> RemoteProblem:
        """The loss of these rows, on scaled columns or on the columns as they are."""
        return RemoteProblem(self, family, scaling)


class RemoteProblem:
    """f, the mean loss of rows at sites, and its derivatives, as `GLM` and `Cox` have them."""

    def __init__(self, rows: RemoteRows, family: Response, scaling: Scaling | None) -> None:
        self._rows, self.n = rows, len(rows.known.rows)
        self.dim = rows.known.dim
        self.start = torch.zeros(self.dim, dtype=torch.float64)
        self.site_effects = rows.known.task.site_effects != "none"
        self._scaling: dict[str, Any] = {}
        if scaling is not None:
            self._scaling = {"shift": scaling.shift.tolist(), "factor": scaling.factor.tolist()}

    def _ask(self, what: str, points: Tensor, **more: Any) -> Tensor:
        found = self._rows.sum(what, points, **self._scaling, **more)
        if self.site_effects and what in ("gradients", "losses"):
            found = np.where(np.abs(found) < UNSOLVED / 2, found, np.nan)
        return torch.from_numpy(found)

    def gradients(self, points: Tensor) -> Tensor:
        return self._ask("gradients", points).reshape(points.shape)

    def losses(self, points: Tensor) -> Tensor:
        return self._ask("losses", points)

    def gradient(self, x: Tensor) -> Tensor:
        return self.gradients(x[None])[0]

    def loss(self, x: Tensor) -> Tensor:
        return self.losses(x[None])[0]

    def _matrix(self, what: str, x: Tensor, **more: Any) -> Tensor:
        found = self._ask(what, x[None], **more)
        matrix, whole = found[: self.dim**2].reshape(self.dim, -1), found[self.dim**2 :]
        return identified(matrix, whole) if self.site_effects else matrix

    def hessian(self, x: Tensor) -> Tensor:
        return self._matrix("hessian", x)

    def information(self, x: Tensor) -> Tensor:
        return self._matrix("hessian" if self.site_effects else "information", x)

    def outer(self, x: Tensor, copies: float | None = None) -> Tensor:
        return self._matrix("outer", x, copies=copies)

    def held_out(self, points: Tensor) -> Floats:
        """The mean loss of the rows of a fold under models whose site effects are those of the other rows."""
        number, _ = self._rows.part or (0, False)
        return self._rows.of_fold(number, True).sum("held-out", points, **self._scaling)

    def keep_effects(self, x: Tensor) -> float | None:
        """Let every site keep its own effects at the end of a fit; the mean intercept, where sites only send sums."""
        if self._rows.part is not None:
            return None
        told = self._rows.sum("effects", x[None], **self._scaling)
        return float(told[0]) if len(told) else None

    def null_level(self, guess: float) -> float:
        """The intercept of the model without columns: where the slope of the loss along it is 0."""
        place = len(self._rows.known.names)

        def slope(level: float) -> float:
            x = self.start.clone()
            x[place] = level
            return float(self.gradient(x)[place])

        step, first = 1.0, slope(guess)
        other = guess - math.copysign(step, first)
        while first and slope(other) * first > 0:
            step *= 2
            other -= math.copysign(step, first)
        return float(brentq(slope, guess, other, xtol=1e-14, rtol=1e-14)) if first else guess

    def pearson(self, x: Tensor) -> float:
        return float(self._ask("pearson", x[None]))

    def smoothness(self) -> float:
        """At most the sum of that of the sites, at the start."""
        return float(self._ask("curvature", self.start[None])) or 1.0

    def site_gradients(self, points: Tensor) -> list[Tensor]:
        """What each site adds to the gradient at each point, (sites, d)."""
        asked = self._rows.each("gradients", points, **self._scaling)
        if not asked:
            raise InputError("expected the gradient of every site for cov_type='cluster', got sums alone")
        return list(torch.from_numpy(np.stack([part.reshape(points.shape) for part in asked.values()], 1)))

    def client_losses(self, x: Tensor) -> Tensor:
        """The mean loss of every site; NaN where only sums are sent."""
        asked, known = self._rows.each("losses", x[None], **self._scaling), self._rows.known
        return torch.tensor([float(asked[s][0]) / known.weight(s) if s in asked else np.nan for s in known.rows])
