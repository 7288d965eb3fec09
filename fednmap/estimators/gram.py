"""Least squares from matrices that stay at the sites."""

from __future__ import annotations

import torch
from torch import Tensor

from fednmap.core import Oracle, ProblemInfo
from fednmap.problems import GLM
from fednmap.problems.curvature import largest_eigenvalue


class Gram:
    """f of a linear regression whose sites computed A'A and A'y of their own rows once, and gradients from these since.

    Nothing else leaves a site: a gradient is A'A x - A'y either way. It costs p^2 products, and not p times the site's
    rows. Here the sites' matrices are kept as their weighted sum, as their gradients would be summed.
    """

    def __init__(self, problem: GLM) -> None:
        self.problem = problem
        self.n, self.dim, self.weights, self.chunk = problem.n, problem.dim, problem.weights, problem.chunk
        self.start = problem.start
        self._H = problem.hessian(problem.start)
        self._b = -problem.gradient(torch.zeros_like(problem.start))

    def info(self) -> ProblemInfo:
        return ProblemInfo(
            start=self.start,
            weights=self.weights,
            chunk=self.chunk,
            smoothness=self.smoothness,
            hessian=self.hessian,
        )

    def oracle(self, clients: Tensor, t: int) -> Oracle:
        return self.problem.oracle(clients, t)

    def loss(self, x: Tensor) -> Tensor:
        return self.problem.loss(x)

    def gradient(self, x: Tensor) -> Tensor:
        return self._H @ x - self._b

    def gradients(self, points: Tensor) -> Tensor:
        return points @ self._H - self._b

    def losses(self, points: Tensor) -> Tensor:
        return self.problem.losses(points)

    def client_losses(self, x: Tensor) -> Tensor:
        return self.problem.client_losses(x)

    def hessian(self, x: Tensor) -> Tensor:
        return self._H

    def outer(self, x: Tensor) -> Tensor:
        return self.problem.outer(x)

    def smoothness(self) -> float:
        return largest_eigenvalue(lambda v: self._H @ v, self._b)

    def alone(self, i: int) -> GLM:
        """Client i by itself."""
        return self.problem.alone(i)
