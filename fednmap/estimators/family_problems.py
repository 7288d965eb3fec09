"""The families of the estimators by name, and their problems."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fednmap.estimators.rows import Floats
from fednmap.names import InputError, choose
from fednmap.problems import GLM
from fednmap.problems import Cox as CoxProblem
from fednmap.problems.families import (
    Bernoulli,
    Binomial,
    Family,
    Gamma,
    Gaussian,
    Multinomial,
    NegativeBinomial,
    Ordinal,
    Poisson,
    Response,
    ScaledHuber,
)

Linear = GLM | CoxProblem


class CoxResponse(Response):
    """Proportional hazards, each site a stratum with its own baseline hazard; y holds (time, event), and perhaps the
    start of the time at risk and a stratum.

    ties: "breslow" or "efron".
    """

    name = "cox"
    level = False

    def __init__(self, ties: str = "efron") -> None:
        choose("rule for ties", ties, dict.fromkeys(("breslow", "efron")))
        self.ties = ties

    def check(self, y: Floats, at: Callable[[int], str]) -> None:
        rules = (
            ("time", y[:, 0] >= 0, "give times >= 0"),
            ("event", np.isin(y[:, 1], (0, 1)), "1 is an event, 0 censored"),
        )
        for k, (name, right, words) in enumerate(rules):
            wrong = np.flatnonzero(~right)
            if len(wrong):
                raise InputError(f"the {name} is {y[wrong[0], k]:g}{at(int(wrong[0]))}; {words}")
        if y.shape[1] > 2 and bool((late := y[:, 2] >= y[:, 0]).any()):
            row = int(late.argmax())
            raise InputError(f"expected start < time, got {y[row, 2]:g} and {y[row, 0]:g}{at(row)}; leave the row out")
        if not bool(y[:, 1].any()):
            raise InputError("there is no event at any site; a Cox model needs some")

    def first(self, y: Floats, weight: Floats) -> Floats:
        return np.zeros(0)

    def steepness(self, y: Floats, weight: Floats) -> Floats:
        return np.array([weight @ y[:, 1]])

    def mean(self, eta: Tensor) -> Tensor:
        return torch.exp(eta)


FAMILIES: dict[str, type[Response]] = {
    kind.name: kind
    for kind in (
        Gaussian,
        Bernoulli,
        Binomial,
        Ordinal,
        Poisson,
        NegativeBinomial,
        Gamma,
        ScaledHuber,
        CoxResponse,
    )
}

RATIOS = {
    "logistic": "odds ratio",
    "binomial": "odds ratio",
    "ordinal": "odds ratio",
    "cox": "hazard ratio",
    "poisson": "rate ratio",
    "negative-binomial": "rate ratio",
    "gamma": "mean ratio",
}


def threshold_names(classes: Any) -> tuple[str, ...]:
    """As MASS::polr calls the thresholds of ordered labels."""
    return tuple(f"{a}|{b}" for a, b in pairwise(classes))


def family(given: str | Response) -> Response:
    """A family by name, or one of your own with one score per row."""
    if not isinstance(given, Response):
        return choose("family", given, FAMILIES)()
    if given.outputs != 1:
        raise InputError(
            f"{type(given).__name__} has {given.outputs} outputs, {given.constants} of them constants; expected a "
            "family with one score per row"
        )
    return given


def with_outputs(family: Response, outputs: int) -> Response:
    """The family with this many scores per row: of more than two labels each has one."""
    return Multinomial(outputs) if outputs > 1 else family


def first_level(family: Response, y: Floats, weight: Floats, offset: Floats | None) -> Floats:
    """The intercepts of the model without features; with offsets by Newton steps, on sums over rows."""
    if offset is None or not isinstance(family, Family) or family.outputs - family.constants > 1:
        return family.first(y, weight)  # `problem` refuses an offset there
    level, constants = family.first(y, weight) - weight @ offset, family.first_constants(y, weight)
    for _ in range(50):
        eta, target = outputs_at(family, level + offset, constants), torch.from_numpy(y)
        slope, curve = (
            part(eta, target).reshape(len(y), -1)[:, 0].numpy() for part in (family.slope, family.curvature)
        )
        step = weight @ slope / max(float(weight @ curve), 1e-300)
        level = level - np.clip(step, -2, 2)
        if abs(step) < 1e-12:
            break
    return level


def problem(family: Response, data: Any, *, intercept: bool, offset: bool = False, **options: Any) -> Linear:
    """The sites' losses; `options` are weights and sample_weights. With an offset y has it as a second column."""
    if isinstance(family, CoxResponse):
        if offset:
            raise InputError("expected no offset with family cox, got one; leave it out")
        return CoxProblem(data, ties=family.ties, events_elsewhere=True, **options)  # `check` knows of all sites
    assert isinstance(family, Family)
    return GLM(data, family, intercept=intercept, offset=offset, **options)


def outputs_at(family: Response, scores: Floats, constants: Any = ()) -> Tensor:
    """What the loss of a family takes: the scores (N,), with its constants (default 0) where it has any."""
    if not family.constants:
        return torch.from_numpy(np.require(scores, float, "W"))
    known = np.asarray(constants, float) if len(constants) else np.zeros(family.constants)
    return torch.from_numpy(np.column_stack([scores, np.tile(known, (len(scores), 1))]))


def expected(family: Response, scores: Floats, constants: Any = ()) -> Floats:
    """E[y] at scores (N,), or (N, K) for K labels; of ordered labels the probability of each."""
    if family.constants or isinstance(family, Ordinal):
        return np.asarray(family.mean(outputs_at(family, scores, constants)))
    return np.asarray(with_outputs(family, 1 if scores.ndim == 1 else scores.shape[1]).mean(torch.as_tensor(scores)))
