"""What a row of a linear model costs: a loss of its scores eta and its target y, with its slope and curvature in eta.

A family is all that distinguishes one generalised linear model from another; data, intercepts and sums are `GLM`'s.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import log_softmax, softplus

from fednmap.names import InputError

Floats = npt.NDArray[np.float64]

LEAST = 1e-3
"""The least scale that a family may estimate, relative to the one it begins with."""
LITTLE = 1e-2
"""The least share by which the variance of negative binomial counts is larger than Poisson's."""


class Response:
    """What y may be, and the model without features that a fit begins with, from weighted sums over rows."""

    name: ClassVar[str] = "own"
    level: ClassVar[bool] = True
    """Whether there is an intercept to fit."""
    likelihood: ClassVar[bool] = True
    """Whether the loss is a negative log likelihood, so that its Hessian gives standard errors."""
    dispersed: ClassVar[bool] = False
    """Whether the variance has a factor that is estimated from Pearson's residuals."""
    y_columns: ClassVar[int] = 1
    """How many columns the y of a user may have, at most."""
    allowed: ClassVar[str] = ""
    """What y must be, for a message."""

    @property
    def constants(self) -> int:
        """How many of the outputs, at the end, are one number for all rows, such as a scale, and not scores."""
        return 0

    @property
    def outputs(self) -> int:
        """K: the numbers per row that the loss depends on."""
        return 1 + self.constants

    def allows(self, y: Floats) -> Any:
        """Return which rows have a y of this kind."""
        return np.full(len(y), True)

    def check_rows(self, y: Floats, at: Callable[[int], str]) -> None:
        """Refuse a row whose y is not of this kind; `at` says where a row is."""
        wrong = np.flatnonzero(~self.allows(y))
        if len(wrong):
            raise InputError(f"y is {y[wrong[0]]:g}{at(int(wrong[0]))}; {self.allowed}")

    def check(self, y: Floats, at: Callable[[int], str]) -> None:
        """Refuse all rows together too if no model can be fitted to them."""
        self.check_rows(y, at)

    def as_rows(self, y: Floats, weight: Floats) -> tuple[Floats, Floats]:
        """Return the targets of the loss and what rows count, from y as a user gives it."""
        return y, weight

    def minus_two_log(self, losses: Floats, n: float) -> Floats:
        """Return -2 log likelihood of models with these mean losses of n rows, up to `left_out`."""
        return 2 * n * losses

    def left_out(self, y: Floats, weight: Floats) -> float:
        """Return the part of -2 log likelihood that is the same for all models of y, whose rows count `weight`."""
        return 0.0

    def first(self, y: Floats, weight: Floats) -> Floats:
        """Return the intercepts of the model without features; weights sum to 1."""
        return np.zeros(1)

    def first_constants(self, y: Floats, weight: Floats) -> Floats:
        """Return where the constants begin."""
        return np.zeros(0)

    def least(self, y: Floats, weight: Floats) -> float:
        """Return the least value that constants may have."""
        return LEAST * float(self.first_constants(y, weight).min())

    def fitted(self, intercept: float, constants: Floats) -> dict[str, Any]:
        """The attributes that a fitted estimator has apart from its coefficients, from the intercept and constants."""
        return {}

    def unit(self, y: Floats, weight: Floats) -> float:
        """Return the size of a gradient for standardised columns: tolerances are relative to it."""
        return 1.0

    def steepness(self, y: Floats, weight: Floats) -> Floats:
        """Return the second derivative of the mean loss by each score, at the model without features."""
        return np.ones(1)

    def mean(self, eta: Tensor) -> Tensor:
        """Return the expected target, for labels the probability of each class (of class 1 where there are two)."""
        return eta


class Family(Response, ABC):
    """loss(eta, y) of single rows.

    With one output, eta has the shape of y; with K outputs it has one more axis, the last, of length K.
    """

    bound: ClassVar[float | None] = None
    """The largest curvature anywhere; None where there is no bound, and f is smooth on bounded sets only."""

    @abstractmethod
    def loss(self, eta: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each row."""

    @abstractmethod
    def slope(self, eta: Tensor, y: Tensor) -> Tensor:
        """Its derivative with respect to eta, in eta's shape: a new tensor, which may be written over."""

    @abstractmethod
    def curvature(self, eta: Tensor, y: Tensor) -> Tensor:
        """Its second derivative with respect to eta: with K outputs a matrix (K, K) per row."""

    def information(self, eta: Tensor, y: Tensor) -> Tensor:
        """Return the expected curvature, as in Fisher scoring; it differs where the link is not canonical."""
        return self.curvature(eta, y)

    def pearson(self, eta: Tensor, y: Tensor) -> Tensor:
        """Return the squared Pearson residual of each row, of families that are `dispersed`."""
        return (y - self.mean(eta)).square()

    def saturated(self, y: Tensor, like: Tensor) -> Tensor:
        """Return the least loss of each row; constants are those of the outputs `like`."""
        return torch.zeros_like(y)

    def loss_and_slope(self, eta: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Both; a family overrides it where they share their work."""
        return self.loss(eta, y), self.slope(eta, y)

    def predict(self, eta: Tensor) -> Tensor:
        """Return what is said about a row with these scores: a number, or a label."""
        return self.mean(eta)

    def targets(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """Targets in the form that the loss takes, real numbers of this dtype or labels; others are refused."""
        if self.allowed:
            self.check_rows(y.double().cpu().numpy(), lambda row: f" (first in row {row})")
        return y.to(dtype)

    def start(self, like: Tensor) -> Tensor:
        """Return where the constants begin."""
        return like.new_zeros(self.constants)


@dataclass(frozen=True)
class Gaussian(Family):
    """(y - eta)^2 / 2: linear regression."""

    name = "gaussian"
    dispersed = True
    bound = 1.0

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

    def minus_two_log(self, losses: Floats, n: float) -> Floats:
        found: Floats = n * np.log(np.clip(2 * losses, 1e-300, None))
        return found

    def left_out(self, y: Floats, weight: Floats) -> float:
        return float(weight.sum()) * (math.log(2 * math.pi) + 1)


@dataclass(frozen=True)
class Bernoulli(Family):
    """log(1 + exp(-s eta)), s = 2 y - 1: logistic regression with labels 0 and 1."""

    name = "logistic"
    bound = 0.25

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
        share = np.clip(weight @ y, 1e-12, 1 - 1e-12)
        return np.array([np.log(share / (1 - share))])

    def steepness(self, y: Floats, weight: Floats) -> Floats:
        share = float(weight @ y)
        return np.array([share * (1 - share)])


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

    bound = 0.5

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


class _LogLink(Family):
    """A family whose score is the logarithm of the mean."""

    def mean(self, eta: Tensor) -> Tensor:
        return torch.exp(eta[..., 0] if self.constants else eta)

    def first(self, y: Floats, weight: Floats) -> Floats:
        return np.array([np.log(weight @ y)])


class _Counts(_LogLink):
    """Numbers of at least 0."""

    allowed = "counts must be at least 0"

    def allows(self, y: Floats) -> Any:
        return y >= 0

    def check(self, y: Floats, at: Callable[[int], str]) -> None:
        super().check(y, at)
        if not bool((y > 0).any()):
            raise InputError("all counts are 0, so that the logarithm of their mean is not finite; give some above 0")

    def unit(self, y: Floats, weight: Floats) -> float:
        return float(self.steepness(y, weight)[0])


@dataclass(frozen=True)
class Poisson(_Counts):
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

    def steepness(self, y: Floats, weight: Floats) -> Floats:
        return np.array([weight @ y])

    def left_out(self, y: Floats, weight: Floats) -> float:
        from scipy.special import gammaln, xlogy  # which the help of a command does not wait for

        return 2 * float(weight @ (y - xlogy(y, y) + gammaln(y + 1)))


@dataclass(frozen=True)
class Huber(Family):
    """r^2 / 2 where |r| <= delta, else delta |r| - delta^2 / 2, r = y - eta: a regression that outliers do not rule.

    delta is in the units of y. With a scale that is estimated, as scikit-learn's HuberRegressor has it: `ScaledHuber`.
    """

    likelihood = False
    delta: float = 1.35

    def __post_init__(self) -> None:
        if not 0 < self.delta < math.inf:
            raise InputError(f"delta is {self.delta}; it must be a finite positive number")

    bound = 1.0

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
    likelihood = False
    constants = 1
    epsilon: float = 1.35

    def __post_init__(self) -> None:
        if not 1.0 <= self.epsilon < math.inf:
            raise InputError(f"epsilon is {self.epsilon}; it must be finite and at least 1")

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
        return _symmetric(c, -c * u, c * u.square())

    def mean(self, eta: Tensor) -> Tensor:
        return eta[..., 0]

    def start(self, like: Tensor) -> Tensor:
        return like.new_ones(1)

    def first(self, y: Floats, weight: Floats) -> Floats:
        return np.array([weight @ y])

    def first_constants(self, y: Floats, weight: Floats) -> Floats:
        return np.array([deviation(y, weight)])

    def fitted(self, intercept: float, constants: Floats) -> dict[str, Any]:
        return {"scale_": float(constants[0])}

    def steepness(self, y: Floats, weight: Floats) -> Floats:
        return 2 / self.first_constants(y, weight)

    def _inside(self, r: Tensor, sigma: Tensor) -> Tensor:
        """r, at most epsilon sigma in size."""
        limit = self.epsilon * sigma
        return torch.minimum(torch.maximum(r, -limit), limit)


@dataclass(frozen=True)
class Binomial(Bernoulli):
    """Half the deviance of a share y of successes, log(1 + exp(eta)) - y eta + y log y + (1 - y) log(1 - y).

    A row of n trials counts n times: it is n rows of `Bernoulli`. A user's y has the columns successes and trials.
    """

    name = "binomial"
    y_columns = 2
    allowed = "expected shares from 0 to 1, or the columns successes and trials: give both columns"

    def loss(self, eta: Tensor, y: Tensor) -> Tensor:
        return softplus(eta) - y * eta + (torch.xlogy(y, y) + torch.xlogy(1 - y, 1 - y))

    def predict(self, eta: Tensor) -> Tensor:
        return self.mean(eta)

    def targets(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        return Family.targets(self, y, dtype)

    def allows(self, y: Floats) -> Any:
        return (y >= 0) & (y <= 1)

    def as_rows(self, y: Floats, weight: Floats) -> tuple[Floats, Floats]:
        if y.ndim == 1:
            return y, weight
        if y.shape[1] != 2:
            raise InputError(f"expected y with the columns successes and trials, got {y.shape[1]} columns")
        wrong = np.flatnonzero(~((y[:, 0] >= 0) & (y[:, 0] <= y[:, 1])))
        if len(wrong):
            successes, trials = y[wrong[0]]
            raise InputError(
                f"expected 0 <= successes <= trials, got {successes:g} of {trials:g} in row {wrong[0]}; give the "
                "columns successes and trials"
            )
        return np.divide(y[:, 0], y[:, 1], out=np.zeros(len(y)), where=y[:, 1] > 0), weight * y[:, 1]

    def check(self, y: Floats, at: Callable[[int], str]) -> None:
        self.check_rows(y, at)
        if not 0 < y.mean() < 1:
            raise InputError("all trials have the same outcome; a binomial model needs successes and failures")

    def left_out(self, y: Floats, weight: Floats) -> float:
        from scipy.special import betaln, xlogy

        each = weight * (xlogy(y, y) + xlogy(1 - y, 1 - y)) - np.log(weight + 1)
        return 2 * float((betaln(weight * y + 1, weight * (1 - y) + 1) - each).sum())


@dataclass(frozen=True)
class Gamma(_LogLink):
    """Half the deviance, y exp(-eta) + eta - log y - 1: positive y with mean exp(eta), and a variance that grows as its
    square.

    The curvature y exp(-eta) is not bounded, as `Poisson`'s.
    """

    name = "gamma"
    dispersed = True
    allowed = "a Gamma model needs numbers above 0"

    def loss(self, eta: Tensor, y: Tensor) -> Tensor:
        return y * torch.exp(-eta) + eta - (torch.log(y) + 1)

    def slope(self, eta: Tensor, y: Tensor) -> Tensor:
        return 1 - y * torch.exp(-eta)

    def curvature(self, eta: Tensor, y: Tensor) -> Tensor:
        return y * torch.exp(-eta)

    def information(self, eta: Tensor, y: Tensor) -> Tensor:
        return torch.ones_like(eta)

    def pearson(self, eta: Tensor, y: Tensor) -> Tensor:
        return (y * torch.exp(-eta) - 1).square()

    def allows(self, y: Floats) -> Any:
        return y > 0

    def minus_two_log(self, losses: Floats, n: float) -> Floats:
        from scipy.special import gammaln

        half = np.clip(losses, 1e-300, None)  # as in R: the dispersion is the mean deviance
        found: Floats = 2 * n * ((half + 1 + np.log(2 * half)) / (2 * half) + gammaln(1 / (2 * half)))
        return found

    def left_out(self, y: Floats, weight: Floats) -> float:
        return 2 * float(weight @ np.log(y))


@dataclass(frozen=True)
class NegativeBinomial(_Counts):
    """-log likelihood of counts y with mean m = exp(eta) and variance m + a m^2.

    lgamma(1 / a) + lgamma(y + 1) - lgamma(y + 1 / a) + (y + 1 / a) log(1 + a m) - y log(a m)

    The second output is log a, one number for all rows, the last coordinate of x. MASS::glm.nb has theta = 1 / a. The
    loss is not convex in log a, and flat where counts vary no more than Poisson's: `least` bounds it, where the
    variance of a row of mean count is 1.01 times Poisson's.

    Reference: Lawless, Negative binomial and mixed Poisson regression, 1987.
    """

    name = "negative-binomial"
    constants = 1

    def loss(self, eta: Tensor, y: Tensor) -> Tensor:
        s, log_a = eta[..., 0], eta[..., 1]
        r = torch.exp(-log_a)
        free = torch.lgamma(r) + torch.lgamma(y + 1) - torch.lgamma(y + r)
        return free + (y + r) * softplus(s + log_a) - y * (s + log_a)

    def slope(self, eta: Tensor, y: Tensor) -> Tensor:
        r, m, over, b = self._parts(eta, y)
        return torch.stack([(m - y) * over, (m - y) * over - r * b], -1)

    def curvature(self, eta: Tensor, y: Tensor) -> Tensor:
        r, m, over, b = self._parts(eta, y)
        share = m / r * over
        mixed = (y - m) * share * over
        spread = r * r * (torch.polygamma(1, r) - torch.polygamma(1, y + r))
        return _symmetric((r + y) * share * over, mixed, mixed + r * b + spread - r * share)

    def information(self, eta: Tensor, y: Tensor) -> Tensor:
        _, m, over, _ = self._parts(eta, y)
        return _symmetric(m * over, torch.zeros_like(m), self.curvature(eta, y)[..., 1, 1])

    def saturated(self, y: Tensor, like: Tensor) -> Tensor:
        best = torch.log(y.clamp_min(1e-300))
        return self.loss(torch.stack([best, like[..., 1].expand(best.shape)], -1), y)

    def first_constants(self, y: Floats, weight: Floats) -> Floats:
        mean = float(weight @ y)
        return np.array([np.log(max((deviation(y, weight) ** 2 - mean) / mean**2, 0.01))])

    def least(self, y: Floats, weight: Floats) -> float:
        return math.log(LITTLE / float(weight @ y))

    def fitted(self, intercept: float, constants: Floats) -> dict[str, Any]:
        return {"dispersion_": math.exp(constants[0]), "theta_": math.exp(-constants[0])}

    def steepness(self, y: Floats, weight: Floats) -> Floats:
        mean = float(weight @ y)
        return mean / (1 + np.exp(self.first_constants(y, weight)) * mean)

    def _parts(self, eta: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """1 / a, m, 1 / (1 + a m), and the derivative of the loss by 1 / a at m = y."""
        m, log_a = torch.exp(eta[..., 0]), eta[..., 1]
        r = torch.exp(-log_a)
        return r, m, r / (r + m), torch.digamma(r) - torch.digamma(y + r) + softplus(eta[..., 0] + log_a)


@dataclass(frozen=True)
class Ordinal(Family):
    """-log P(y), P(y > k) = 1 / (1 + exp(t_k - eta)), 0 = t_0 < t_1 < ...: ordered labels 0 .. classes - 1.

    Proportional odds, convex in coefficients and thresholds. The outputs after the first are t_1 - t_0, t_2 - t_1, ...:
    positive numbers, the last coordinates of x. MASS::polr has the thresholds t_k - c for the intercept c. With two
    classes it is `Bernoulli`.

    Reference: McCullagh, Regression models for ordinal data, JRSS B 1980.
    """

    name = "ordinal"
    classes: int = 2

    def __post_init__(self) -> None:
        if self.classes < 2:
            raise InputError(f"classes is {self.classes}; ordered labels need at least 2")

    @property
    def constants(self) -> int:
        return self.classes - 2

    def loss(self, eta: Tensor, y: Tensor) -> Tensor:
        above, below, gaps = self._ends(eta, y)
        width = torch.where(self._is_own(y), gaps, torch.inf)
        apart = torch.log(-torch.expm1(-width.clamp_min(0))).sum(-1)  # log(1 - exp(-gap)) of labels between others
        return softplus(-above) + softplus(below) - apart

    def slope(self, eta: Tensor, y: Tensor) -> Tensor:
        above, below, gaps = self._ends(eta, y)
        up, down = torch.sigmoid(-above), torch.sigmoid(below)
        by_gap = (up.unsqueeze(-1) * self._is_past(y, 1) - down.unsqueeze(-1) * self._is_past(y, 0)) - torch.where(
            self._is_own(y), 1 / torch.expm1(gaps), 0.0
        )
        found = torch.cat([(down - up).unsqueeze(-1), by_gap], -1)
        return found if self.outputs > 1 else found[..., 0]

    def curvature(self, eta: Tensor, y: Tensor) -> Tensor:
        above, below, gaps = self._ends(eta, y)
        one = torch.ones_like(above).unsqueeze(-1)
        up, down = (torch.cat([one, -self._is_past(y, k).to(one)], -1) for k in (1, 0))
        found = torch.diag_embed(
            torch.cat([0 * one, torch.where(self._is_own(y), 0.25 / torch.sinh(gaps / 2).square(), 0.0)], -1)
        )
        for score, direction in ((above, up), (below, down)):
            share = torch.sigmoid(score) * torch.sigmoid(-score)
            found = found + share[..., None, None] * direction.unsqueeze(-1) * direction.unsqueeze(-2)
        return found if self.outputs > 1 else found[..., 0, 0]

    def mean(self, eta: Tensor) -> Tensor:
        score, gaps = self._apart(eta)
        past = torch.sigmoid(score - torch.cat([0 * score, gaps.cumsum(-1)], -1))  # P(y > k)
        return -torch.diff(past, prepend=torch.ones_like(score), append=torch.zeros_like(score), dim=-1)

    def predict(self, eta: Tensor) -> Tensor:
        return self.mean(eta).argmax(-1)

    def targets(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        return labels(y, self.classes)

    def start(self, like: Tensor) -> Tensor:
        return like.new_ones(self.constants)

    def check(self, y: Floats, at: Callable[[int], str]) -> None:
        lacking = np.setdiff1d(np.arange(self.classes), y)
        if len(lacking):
            raise InputError(f"no row has label number {lacking[0] + 1} of {self.classes}; give rows of every class")

    def first(self, y: Floats, weight: Floats) -> Floats:
        return -self._levels(y, weight)[:1]

    def first_constants(self, y: Floats, weight: Floats) -> Floats:
        return np.maximum(np.diff(self._levels(y, weight)), 1e-3)

    def fitted(self, intercept: float, constants: Floats) -> dict[str, Any]:
        return {"thresholds_": np.concatenate([[0.0], np.cumsum(constants)]) - intercept}

    def steepness(self, y: Floats, weight: Floats) -> Floats:
        share = _shares(y, weight, self.classes)
        return np.array([(1 - (share**3).sum()) / 3])

    def _levels(self, y: Floats, weight: Floats) -> Floats:
        """The log-odds of y <= k."""
        below = np.clip(_shares(y, weight, self.classes).cumsum()[:-1], 1e-12, 1 - 1e-12)
        found: Floats = np.log(below / (1 - below))
        return found

    def _apart(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        """The score (..., 1) and the gaps (..., classes - 2)."""
        return (eta[..., :1], eta[..., 1:]) if self.outputs > 1 else (eta.unsqueeze(-1), eta.new_zeros(*eta.shape, 0))

    def _ends(self, eta: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """eta - t_(y-1), eta - t_y (infinite for the first and last label), and the gaps."""
        score, gaps = self._apart(eta)
        inner = score - torch.cat([0 * score, gaps.cumsum(-1)], -1)
        ends = torch.cat([torch.full_like(score, torch.inf), inner, torch.full_like(score, -torch.inf)], -1)
        label = y.long().unsqueeze(-1)
        return ends.gather(-1, label).squeeze(-1), ends.gather(-1, label + 1).squeeze(-1), gaps

    def _is_own(self, y: Tensor) -> Tensor:
        """Which gap lies at each label, (..., classes - 2)."""
        return y.long().unsqueeze(-1) == torch.arange(1, self.classes - 1, device=y.device)

    def _is_past(self, y: Tensor, k: int) -> Tensor:
        """Which gaps are part of t_(y-k)."""
        return y.long().unsqueeze(-1) - k >= torch.arange(1, self.classes - 1, device=y.device)


FAMILIES: dict[str, Callable[..., Family]] = {
    "gaussian": Gaussian,
    "logistic": Bernoulli,
    "multinomial": Multinomial,
    "poisson": Poisson,
    "binomial": Binomial,
    "gamma": Gamma,
    "negative-binomial": NegativeBinomial,
    "ordinal": Ordinal,
    "huber": Huber,
    "scaled-huber": ScaledHuber,
}
"""Families by name; `multinomial` and `ordinal` need the number of classes."""


def deviation(y: Floats, weight: Floats) -> float:
    """Of y with weights that sum to 1; 1 where it is rounding."""
    mean = float(weight @ y)
    found = float(np.sqrt(weight @ np.square(y - mean)))
    return found if found > 1e-12 * abs(mean) else 1.0


def _symmetric(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """((a, b), (b, c)) of each row."""
    return torch.stack([torch.stack([a, b], -1), torch.stack([b, c], -1)], -2)


def _shares(y: Floats, weight: Floats, classes: int) -> Floats:
    """What each label weighs."""
    return np.bincount(y.astype(np.intp), weight, classes).astype(float)


def less_one(share: Tensor, y: Tensor, axis: int = -1) -> Tensor:
    """Return `share` less 1 at the label of each row, in place; `axis` is that of the classes."""
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
