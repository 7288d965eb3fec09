"""Families: what y may be, how a score becomes a prediction, where to begin."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from scipy.special import expit, softmax

from fednmap.estimators.sites import Floats, Sites
from fednmap.names import InputError, choose
from fednmap.problems import GLM, families
from fednmap.problems import Cox as CoxProblem

Linear = GLM | CoxProblem


class Family(ABC):
    """A distribution of y given the score <a, x> + intercept; the loss is its mean negative log-likelihood."""

    name: str
    level: bool = True
    """Whether there is an intercept to fit."""

    def check(self, y: Floats, sites: Sites) -> None:  # noqa: B027  # most take any number
        """Refuse a y that the family cannot have made; names the site."""

    @abstractmethod
    def problem(self, data: Any, outputs: int, **options: Any) -> Linear:
        """The sites' losses; `options` are intercept, weights and sample_weights."""

    @abstractmethod
    def first(self, y: Floats, weight: Floats, outputs: int) -> Floats:
        """The intercepts of the model without features, from sums over the rows."""

    def constants(self, y: Floats, weight: Floats) -> Floats:
        """Where the numbers begin that are estimated once for all rows."""
        return np.zeros(0)

    def unit(self, y: Floats, weight: Floats) -> float:
        """The size of a gradient for standardised columns: tolerances are relative to it."""
        return 1.0

    def steepness(self, y: Floats, weight: Floats, outputs: int) -> Floats:
        """The second derivative of the mean loss by each score, at the model without features."""
        return np.ones(outputs)

    @abstractmethod
    def mean(self, scores: Floats) -> Floats:
        """E[y] at scores (N,) or (N, K)."""


def deviation(y: Floats, weight: Floats) -> float:
    mean = float(weight @ y)
    found = float(np.sqrt(weight @ np.square(y - mean)))
    return found if found > 1e-12 * abs(mean) else 1.0  # which is rounding


class Gaussian(Family):
    """(score - y)^2 / 2."""

    name = "gaussian"

    def problem(self, data: Any, outputs: int, **options: Any) -> Linear:
        return GLM(data, families.Gaussian(), **options)

    def first(self, y: Floats, weight: Floats, outputs: int) -> Floats:
        return np.array([weight @ y])

    def unit(self, y: Floats, weight: Floats) -> float:
        return deviation(y, weight)

    def mean(self, scores: Floats) -> Floats:
        return scores


class Logistic(Family):
    """Labels 0 .. K-1; one score for two labels, one per label for more."""

    name = "logistic"

    def check(self, y: Floats, sites: Sites) -> None:
        if len(np.unique(y)) < 2:
            raise InputError("all rows of positive weight are of one class; two classes are needed")

    def problem(self, data: Any, outputs: int, **options: Any) -> Linear:
        return GLM(data, families.Bernoulli() if outputs == 1 else families.Multinomial(outputs), **options)

    def first(self, y: Floats, weight: Floats, outputs: int) -> Floats:
        share = np.bincount(y.astype(np.intp), weight, max(2, outputs))
        logs = np.log(np.clip(share, 1e-12, None))
        return np.array([logs[1] - logs[0]]) if outputs == 1 else logs - logs.mean()

    def steepness(self, y: Floats, weight: Floats, outputs: int) -> Floats:
        share = np.bincount(y.astype(np.intp), weight, max(2, outputs))
        curve = share * (1 - share)
        return np.full(outputs, curve.mean())  # the same for all, so that what is common to all classes stays 0

    def mean(self, scores: Floats) -> Floats:
        found: Floats = expit(scores) if scores.ndim == 1 else softmax(scores, axis=1)
        return found


class Poisson(Family):
    """Counts; the score is the logarithm of their mean."""

    name = "poisson"

    def check(self, y: Floats, sites: Sites) -> None:
        wrong = np.flatnonzero(y < 0)
        if len(wrong):
            raise InputError(f"y is {y[wrong[0]]:g} in row {wrong[0]}{sites.at(wrong[0])}; counts must be at least 0")
        if not bool((y > 0).any()):
            raise InputError("all counts are 0, so that the logarithm of their mean is not finite; give some above 0")

    def problem(self, data: Any, outputs: int, **options: Any) -> Linear:
        return GLM(data, families.Poisson(), **options)

    def first(self, y: Floats, weight: Floats, outputs: int) -> Floats:
        return np.array([np.log(weight @ y)])

    def steepness(self, y: Floats, weight: Floats, outputs: int) -> Floats:
        return np.array([weight @ y])

    def unit(self, y: Floats, weight: Floats) -> float:
        return float(weight @ y)

    def mean(self, scores: Floats) -> Floats:
        return np.exp(scores)


class Huber(Family):
    """Squared error up to epsilon sigma, linear beyond; sigma is fitted too, as in scikit-learn's HuberRegressor."""

    name = "huber"

    def __init__(self, epsilon: float = 1.35) -> None:
        if not 1 < epsilon < np.inf:
            raise InputError(f"epsilon is {epsilon!r}; it must be a finite number above 1")
        self.epsilon = float(epsilon)

    def problem(self, data: Any, outputs: int, **options: Any) -> Linear:
        return GLM(data, families.ScaledHuber(self.epsilon), **options)

    def constants(self, y: Floats, weight: Floats) -> Floats:
        return np.array([deviation(y, weight)])

    def first(self, y: Floats, weight: Floats, outputs: int) -> Floats:
        return np.array([weight @ y])

    def steepness(self, y: Floats, weight: Floats, outputs: int) -> Floats:
        return 2 / self.constants(y, weight)

    def mean(self, scores: Floats) -> Floats:
        return scores


class Cox(Family):
    """Proportional hazards, each site a stratum with its own baseline hazard; y holds (time, event).

    ties: "breslow" or "efron".
    """

    name = "cox"
    level = False

    def __init__(self, ties: str = "efron") -> None:
        choose("rule for ties", ties, dict.fromkeys(("breslow", "efron")))
        self.ties = ties

    def check(self, y: Floats, sites: Sites) -> None:
        time, event = y[:, 0], y[:, 1]
        wrong = np.flatnonzero(time < 0)
        if len(wrong):
            raise InputError(f"the time is {time[wrong[0]]:g} in row {wrong[0]}{sites.at(wrong[0])}; give times >= 0")
        wrong = np.flatnonzero((event != 0) & (event != 1))
        if len(wrong):
            raise InputError(
                f"the event is {event[wrong[0]]:g} in row {wrong[0]}{sites.at(wrong[0])}; 1 is an event, 0 censored"
            )
        if not bool(event.any()):
            raise InputError("there is no event at any site; a Cox model needs some")

    def problem(self, data: Any, outputs: int, **options: Any) -> Linear:
        weights = {name: options[name] for name in ("weights", "sample_weights")}
        return CoxProblem(data, ties=self.ties, events_elsewhere=True, **weights)  # `check` knows of all sites

    def first(self, y: Floats, weight: Floats, outputs: int) -> Floats:
        return np.zeros(0)

    def steepness(self, y: Floats, weight: Floats, outputs: int) -> Floats:
        return np.array([weight @ y[:, 1]])

    def mean(self, scores: Floats) -> Floats:
        return np.exp(scores)


class Own(Family):
    """A loss of one's own, written as a `fednmap.problems.families.Family` with one score per row."""

    name = "own"

    def __init__(self, loss: families.Family) -> None:
        if loss.outputs != 1 or loss.constants:
            words = f"{loss.outputs} outputs, {loss.constants} of them constants"
            raise InputError(f"{type(loss).__name__} has {words}; a family of one's own has one score per row")
        self.loss = loss

    def problem(self, data: Any, outputs: int, **options: Any) -> Linear:
        return GLM(data, self.loss, **options)

    def first(self, y: Floats, weight: Floats, outputs: int) -> Floats:
        return np.zeros(1)

    def mean(self, scores: Floats) -> Floats:
        return np.asarray(self.loss.mean(torch.as_tensor(scores)))


FAMILIES: dict[str, type[Family]] = {kind.name: kind for kind in (Gaussian, Logistic, Poisson, Huber, Cox)}


def family(given: str | Family | families.Family) -> Family:
    """A family by name, as it is, or of a loss of one's own."""
    if isinstance(given, families.Family):
        return Own(given)
    return given if isinstance(given, Family) else choose("family", given, FAMILIES)()
