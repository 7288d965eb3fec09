"""What a row of a linear model costs: a loss of its scores eta and its target y, with its slope and curvature in eta.

A family is all that distinguishes one generalised linear model from another; data, intercepts and sums are `GLM`'s.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import log_softmax, softplus

from fednmap.names import InputError

Floats = npt.NDArray[np.float64]


class Response:
    """What y may be, and the model without features that a fit begins with, from weighted sums over rows."""

    name: ClassVar[str] = "own"
    level: ClassVar[bool] = True
    """Whether there is an intercept to fit."""

    @property
    def outputs(self) -> int:
        """K: the numbers per row that the loss depends on."""
        return 1

    @property
    def constants(self) -> int:
        """How many of the outputs, at the end, are one number for all rows, such as a scale, and not scores."""
        return 0

    def check(self, y: Floats, at: Callable[[int], str]) -> None:
        """Refuse a y that is not of this kind; `at` says where a row is."""

    def first(self, y: Floats, weight: Floats) -> Floats:
        """The intercepts of the model without features; weights sum to 1."""
        return np.zeros(1)

    def first_constants(self, y: Floats, weight: Floats) -> Floats:
        """Where the constants begin."""
        return np.zeros(0)

    def unit(self, y: Floats, weight: Floats) -> float:
        """The size of a gradient for standardised columns: tolerances are relative to it."""
        return 1.0

    def steepness(self, y: Floats, weight: Floats) -> Floats:
        """The second derivative of the mean loss by each score, at the model without features."""
        return np.ones(1)

    def mean(self, eta: Tensor) -> Tensor:
        """The expected target, for labels the probability of each class (of class 1 where there are two)."""
        return eta


class Family(Response, ABC):
    """loss(eta, y) of single rows.

    With one output, eta has the shape of y; with K outputs it has one more axis, the last, of length K.
    """

    @property
    def bound(self) -> float | None:
        """The largest curvature anywhere; None where there is no bound, and f is smooth on bounded sets only."""
        return None

    @abstractmethod
    def loss(self, eta: Tensor, y: Tensor) -> Tensor:
        """The loss of each row."""

    @abstractmethod
    def slope(self, eta: Tensor, y: Tensor) -> Tensor:
        """Its derivative with respect to eta, in eta's shape: a tensor of its own, which may be written over."""

    @abstractmethod
    def curvature(self, eta: Tensor, y: Tensor) -> Tensor:
        """Its second derivative with respect to eta: with K outputs a matrix (K, K) per row."""

    def loss_and_slope(self, eta: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Both; a family overrides it where they share their work."""
        return self.loss(eta, y), self.slope(eta, y)

    def predict(self, eta: Tensor) -> Tensor:
        """What is said about a row with these scores: a number, or a label."""
        return self.mean(eta)

    def targets(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """Targets in the form that the loss takes, real numbers of this dtype or labels; others are refused."""
        return y.to(dtype)

    def start(self, like: Tensor) -> Tensor:
        """Where the constants begin."""
        return like.new_zeros(self.constants)


@dataclass(frozen=True)
class Gaussian(Family):
    """(y - eta)^2 / 2: linear regression."""

    name = "gaussian"

    @property
    def bound(self) -> float:
        return 1.0

    def loss(self, eta: Tensor, y: Tensor) -> Tensor:
        return 0.5 * (eta - y).square()

    def slope(self, eta: Tensor, y: Tensor) -> Tensor:
        return eta - y

    def curvature(self, eta: Tensor, y: Tensor) -> Tensor:
        return torch.ones_like(eta)

    def first(self, y: Floats, weight: Floats) -> Floats:
        return np.array([weight @ y])

    def unit(self, y: Floats, weight: Floats) -> float:
        return deviation(y, weight)


@dataclass(frozen=True)
class Bernoulli(Family):
    """log(1 + exp(-s eta)), s = 2 y - 1: logistic regression with labels 0 and 1."""

    name = "logistic"

    @property
    def bound(self) -> float:
        return 0.25

    def loss(self, eta: Tensor, y: Tensor) -> Tensor:
        return softplus((1 - 2 * y) * eta)

    def slope(self, eta: Tensor, y: Tensor) -> Tensor:
        return torch.sigmoid(eta).sub_(y)

    def curvature(self, eta: Tensor, y: Tensor) -> Tensor:
        share = torch.sigmoid(eta)
        return share * (1 - share)

    def mean(self, eta: Tensor) -> Tensor:
        return torch.sigmoid(eta)

    def predict(self, eta: Tensor) -> Tensor:
        return (eta > 0).to(torch.int64)

    def targets(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        return labels(y, 2)

    def check(self, y: Floats, at: Callable[[int], str]) -> None:
        if len(np.unique(y)) < 2:
            raise InputError("all rows of positive weight are of one class; two classes are needed")

    def first(self, y: Floats, weight: Floats) -> Floats:
        logs = np.log(np.clip(_shares(y, weight, 2), 1e-12, None))
        return np.array([logs[1] - logs[0]])

    def steepness(self, y: Floats, weight: Floats) -> Floats:
        share = _shares(y, weight, 2)
        return np.array([(share * (1 - share)).mean()])


@dataclass(frozen=True)
class Multinomial(Family):
    """logsumexp(eta) - eta_y: logistic regression with labels 0 .. classes - 1, one output for each."""

    name = "logistic"
    classes: int

    def __post_init__(self) -> None:
        if self.classes < 2:
            raise InputError(f"classes is {self.classes}; a classification needs at least 2")

    @property
    def outputs(self) -> int:
        return self.classes

    @property
    def bound(self) -> float:
        return 0.5

    def loss(self, eta: Tensor, y: Tensor) -> Tensor:
        return -log_softmax(eta, -1).gather(-1, y.unsqueeze(-1)).squeeze(-1)

    def slope(self, eta: Tensor, y: Tensor) -> Tensor:
        return less_one(torch.softmax(eta, -1), y)

    def curvature(self, eta: Tensor, y: Tensor) -> Tensor:
        share = torch.softmax(eta, -1)
        return torch.diag_embed(share) - share.unsqueeze(-1) * share.unsqueeze(-2)

    def loss_and_slope(self, eta: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logarithm = log_softmax(eta, -1)
        loss = -logarithm.gather(-1, y.unsqueeze(-1)).squeeze(-1)
        return loss, less_one(logarithm.exp_(), y)

    def mean(self, eta: Tensor) -> Tensor:
        return torch.softmax(eta, -1)

    def predict(self, eta: Tensor) -> Tensor:
        return eta.argmax(-1)

    def targets(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        return labels(y, self.classes)

    def first(self, y: Floats, weight: Floats) -> Floats:
        logs = np.log(np.clip(_shares(y, weight, self.classes), 1e-12, None))
        found: Floats = logs - logs.mean()
        return found

    def steepness(self, y: Floats, weight: Floats) -> Floats:
        share = _shares(y, weight, self.classes)
        return np.full(self.classes, (share * (1 - share)).mean())  # equal: what is common to all classes stays 0


@dataclass(frozen=True)
class Poisson(Family):
    """Half the deviance, exp(eta) - y eta + y log y - y: counts y with mean exp(eta).

    The curvature exp(eta) is not bounded: f is smooth on bounded sets only, and a step size that suits the start may be
    too long elsewhere.
    """

    name = "poisson"

    def loss(self, eta: Tensor, y: Tensor) -> Tensor:
        return torch.exp(eta) - y * eta + (torch.xlogy(y, y) - y)

    def slope(self, eta: Tensor, y: Tensor) -> Tensor:
        return torch.exp(eta) - y

    def curvature(self, eta: Tensor, y: Tensor) -> Tensor:
        return torch.exp(eta)

    def mean(self, eta: Tensor) -> Tensor:
        return torch.exp(eta)

    def targets(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        negative = (y < 0).nonzero()
        if len(negative):
            row = int(negative[0])
            raise InputError(f"y holds {float(y[row]):g} (first in row {row}); counts must be at least 0")
        return y.to(dtype)

    def check(self, y: Floats, at: Callable[[int], str]) -> None:
        wrong = np.flatnonzero(y < 0)
        if len(wrong):
            raise InputError(f"y is {y[wrong[0]]:g} in row {wrong[0]}{at(wrong[0])}; counts must be at least 0")
        if not bool((y > 0).any()):
            raise InputError("all counts are 0, so that the logarithm of their mean is not finite; give some above 0")

    def first(self, y: Floats, weight: Floats) -> Floats:
        return np.array([np.log(weight @ y)])

    def steepness(self, y: Floats, weight: Floats) -> Floats:
        return np.array([weight @ y])

    def unit(self, y: Floats, weight: Floats) -> float:
        return float(weight @ y)


@dataclass(frozen=True)
class Huber(Family):
    """r^2 / 2 where |r| <= delta, else delta |r| - delta^2 / 2, r = y - eta: a regression that outliers do not rule.

    delta is in the units of y. With a scale that is estimated, as scikit-learn's HuberRegressor has it: `ScaledHuber`.
    """

    delta: float = 1.35

    def __post_init__(self) -> None:
        if not 0 < self.delta < math.inf:
            raise InputError(f"delta is {self.delta}; it must be a finite positive number")

    @property
    def bound(self) -> float:
        return 1.0

    def loss(self, eta: Tensor, y: Tensor) -> Tensor:
        r = eta - y
        inside = r.clamp(-self.delta, self.delta)
        return inside * (r - 0.5 * inside)

    def slope(self, eta: Tensor, y: Tensor) -> Tensor:
        return (eta - y).clamp(-self.delta, self.delta)

    def curvature(self, eta: Tensor, y: Tensor) -> Tensor:
        return ((eta - y).abs() <= self.delta).to(eta)


@dataclass(frozen=True)
class ScaledHuber(Family):
    """sigma + sigma H(r / sigma), r = y - eta, H(u) = u^2 where |u| < epsilon, else 2 epsilon |u| - epsilon^2.

    The objective of scikit-learn's HuberRegressor, convex in coefficients and scale together. The second output is
    sigma, one number for all rows, the last coordinate of x. Where sigma <= 0 the loss is +inf, so phi must bound it:
    `Separable([(problem.coefficients, phi), (problem.constants, Box(1e-6, inf))])`.

    Reference: Owen, A robust hybrid of lasso and ridge regression, 2007.
    """

    name = "huber"
    epsilon: float = 1.35

    def __post_init__(self) -> None:
        if not 1.0 <= self.epsilon < math.inf:
            raise InputError(f"epsilon is {self.epsilon}; it must be finite and at least 1")

    @property
    def outputs(self) -> int:
        return 2

    @property
    def constants(self) -> int:
        return 1

    def loss(self, eta: Tensor, y: Tensor) -> Tensor:
        r, sigma = eta[..., 0] - y, eta[..., 1]
        inside = self._inside(r, sigma)
        return torch.where(sigma > 0, sigma + inside * (2 * r - inside) / sigma, torch.inf)

    def slope(self, eta: Tensor, y: Tensor) -> Tensor:
        r, sigma = eta[..., 0] - y, eta[..., 1]
        u = self._inside(r, sigma) / sigma
        return torch.stack([2 * u, 1 - u.square()], -1)

    def curvature(self, eta: Tensor, y: Tensor) -> Tensor:
        r, sigma = eta[..., 0] - y, eta[..., 1]
        u, c = r / sigma, 2 / sigma * (r.abs() <= self.epsilon * sigma)
        rows = torch.stack([c, -c * u], -1), torch.stack([-c * u, c * u.square()], -1)
        return torch.stack(rows, -2)

    def mean(self, eta: Tensor) -> Tensor:
        return eta[..., 0]

    def start(self, like: Tensor) -> Tensor:
        return like.new_ones(1)

    def first(self, y: Floats, weight: Floats) -> Floats:
        return np.array([weight @ y])

    def first_constants(self, y: Floats, weight: Floats) -> Floats:
        return np.array([deviation(y, weight)])

    def steepness(self, y: Floats, weight: Floats) -> Floats:
        return 2 / self.first_constants(y, weight)

    def _inside(self, r: Tensor, sigma: Tensor) -> Tensor:
        """r, at most epsilon sigma in size."""
        limit = self.epsilon * sigma
        return torch.minimum(torch.maximum(r, -limit), limit)


FAMILIES: dict[str, Callable[..., Family]] = {
    "gaussian": Gaussian,
    "logistic": Bernoulli,
    "multinomial": Multinomial,
    "poisson": Poisson,
    "huber": Huber,
    "scaled-huber": ScaledHuber,
}
"""Families by name; `multinomial` needs the number of classes."""


def deviation(y: Floats, weight: Floats) -> float:
    """Of y with weights that sum to 1; 1 where it is rounding."""
    mean = float(weight @ y)
    found = float(np.sqrt(weight @ np.square(y - mean)))
    return found if found > 1e-12 * abs(mean) else 1.0


def _shares(y: Floats, weight: Floats, classes: int) -> Floats:
    """What each label weighs."""
    return np.bincount(y.astype(np.intp), weight, classes).astype(float)


def less_one(share: Tensor, y: Tensor, axis: int = -1) -> Tensor:
    """`share` less 1 at the label of each row, in place; `axis` is that of the classes."""
    return share.scatter_(axis, y.unsqueeze(axis), -1.0, reduce="add")


def labels(y: Tensor, classes: int | None = None) -> Tensor:
    """Whole numbers of any type as int64, -1 and 1 as 0 and 1; below `classes` if that is known."""
    found = y.to(torch.int64)
    if not torch.equal(found.to(y.dtype), y):
        raise InputError("Logistic needs whole-number labels; for real targets use LeastSquares")
    if found.min() == -1 and found.max() <= 1 and not bool((found == 0).any()):
        found = found.clamp(min=0)
    if classes is not None and (found.min() < 0 or found.max() >= classes):
        raise InputError(f"labels are {found.min()} to {found.max()}; with {classes} classes use 0 to {classes - 1}")
    return found
