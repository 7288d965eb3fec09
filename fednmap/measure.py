"""What is measured of a model x: objective, stationarity, sparsity, accuracy, bytes. The same for every method."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fednmap.core import Problem, Regularizer, nbytes

__all__ = [
    "accuracy",
    "evaluate",
    "hoyer",
    "natural_residual",
    "nbytes",
    "normal_map",
    "objective",
    "problem_gamma",
    "residual",
    "stationarity",
    "zeros",
]


def objective(problem: Problem, phi: Regularizer, x: Tensor) -> Tensor:
    """psi(x) = f(x) + phi(x)."""
    return problem.loss(x) + phi.value(x)


def hessian_norms(gradient: Callable[[Tensor], Tensor], x: Tensor, v: Tensor, iterations: int) -> Tensor:
    """|H| at x for each row of a stack of functions with these gradients, by power iteration from the vectors v (k, p).

    H v = (grad(x + e v) - grad(x - e v)) / (2 e), e = eps^(1/3) max(1, |x|): two gradients per iteration.
    """
    e = torch.finfo(x.dtype).eps ** (1 / 3) * max(1.0, float(x.norm()))
    for _ in range(iterations):
        v = v / v.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
        v = (gradient(x + e * v) - gradient(x - e * v)) / (2 * e)
    size: Tensor = v.norm(dim=-1)
    return size


@torch.no_grad()
def problem_gamma(problem: Problem, phi: Regularizer, x: Tensor, iterations: int = 8) -> float:
    """The gamma with which a problem is measured by default: 1 / L, at most 0.5 / rho; 1 where f is linear at x.

    L is the smoothness of f at x, the problem's first point, by a few power iterations, in two digits: a yardstick
    that belongs to the problem, the same for every method and step size, and for every way of adding up f.
    """
    first = torch.randn(
        1, x.numel(), generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float64, device="cpu"
    )
    L = float(hessian_norms(lambda u: problem.gradient(u[0])[None], x, first.to(x), iterations))
    gamma = float(f"{1 / L:.2g}") if 0 < L < math.inf else 1.0
    return min(gamma, 0.5 / phi.rho) if 0 < phi.rho < math.inf else gamma


def residual(x: Tensor, gradient: Tensor, phi: Regularizer, gamma: float) -> Tensor:
    """(x - prox(x - gamma gradient, gamma)) / gamma, where the gradient of f at x is known already."""
    return (x - phi.prox(x - gamma * gradient, gamma)) / gamma


def natural_residual(problem: Problem, phi: Regularizer, x: Tensor, gamma: float) -> Tensor:
    """F_nat(x) = (x - prox(x - gamma grad f(x), gamma)) / gamma: zero exactly at stationary points.

    It shrinks as gamma grows: use one gamma for everything that is compared.
    """
    return residual(x, problem.gradient(x), phi, gamma)


def normal_map(problem: Problem, phi: Regularizer, z: Tensor, gamma: float) -> Tensor:
    """F_nor(z) = grad f(prox(z)) + (z - prox(z)) / gamma, at least (1 - gamma rho) |F_nat(prox(z))| long."""
    x = phi.prox(z, gamma)
    return problem.gradient(x) + (z - x) / gamma


def stationarity(problem: Problem, phi: Regularizer, x: Tensor, gamma: float) -> Tensor:
    """|F_nat(x)|^2, what the paper plots."""
    return natural_residual(problem, phi, x, gamma).square().sum()


def zeros(x: Tensor) -> Tensor:
    """The share of coordinates that are exactly zero."""
    return (x == 0).to(x.dtype).mean()


def hoyer(x: Tensor) -> Tensor:
    """Hoyer's sparsity (sqrt(p) - |x|_1 / |x|_2) / (sqrt(p) - 1).

    0 when all magnitudes are equal, 1 for a single nonzero coordinate and, by convention, for x = 0.
    """
    root = x.numel() ** 0.5
    norm = x.norm()
    ratio = x.abs().sum() / norm if norm > 0 else x.new_tensor(1.0)
    return (root - ratio) / (root - 1) if x.numel() > 1 else x.new_tensor(1.0)


def support(x: Tensor, truth: Tensor) -> tuple[float, float]:
    """Precision and recall of the nonzero coordinates of x, as guesses of those of `truth`.

    1 where the question is empty: no guess is wrong, nothing there was missed.
    """
    found, true = x != 0, truth != 0
    hits = int((found & true).sum())
    return (hits / int(found.sum()) if found.any() else 1.0, hits / int(true.sum()) if true.any() else 1.0)


def accuracy(predictions: Tensor, labels: Tensor) -> float:
    """The share of labels that were predicted."""
    return float((predictions == labels).double().mean())


EVALUATED = ("objective", "loss", "stationarity", "zeros", "hoyer")
"""What `evaluate` measures."""


@torch.no_grad()
def evaluate(problem: Problem, phi: Regularizer, x: Tensor, gamma: float) -> dict[str, float]:
    """The numbers a run reports of a model."""
    return numbers(x, float(problem.loss(x)), problem.gradient(x), phi, gamma)


def numbers(x: Tensor, loss: float, gradient: Tensor | None, phi: Regularizer, gamma: float) -> dict[str, float]:
    """The numbers a run reports of a model whose loss is known; no stationarity where the gradient is not."""
    found = {"objective": loss + float(phi.value(x)), "loss": loss}
    if gradient is not None:
        found["stationarity"] = float(residual(x, gradient, phi, gamma).square().sum())
    return found | {"zeros": float(zeros(x)), "hoyer": float(hoyer(x))}
