"""Curvature: the Hessians of single clients, and the largest eigenvalue of a Hessian."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def client_hessians(problem: Any, clients: Tensor) -> Callable[[Tensor], Tensor]:
    """Return hessians(x) of these clients, (k, p, p) at x (k, p) or one common point; of one client (p, p)."""
    each = [problem.alone(i) for i in clients.reshape(-1).tolist()]

    def hessians(x: Tensor) -> Tensor:
        found = [one.hessian(v) for one, v in zip(each, x.expand(len(each), -1), strict=True)]
        return torch.stack(found) if clients.ndim else found[0]

    return hessians


def largest_eigenvalue(
    product: Callable[[Tensor], Tensor], like: Tensor, *, tolerance: float = 1e-3, most: int = 60
) -> float:
    """Return the largest eigenvalue of a symmetric operator on vectors `like` this one, from its products with vectors.

    Lanczos' method: the largest Ritz value plus its residual, which bounds an eigenvalue from above. It ends when the
    residual is within `tolerance`, after `most` products, or when the Krylov space is exhausted. Vectors are
    orthogonalised in full, so that rounding does not bring back those already found.

    Reference: Golub and Van Loan, Matrix Computations, 4th edition, section 10.1.
    """
    from scipy.linalg import eigh_tridiagonal

    random = torch.Generator("cpu").manual_seed(0)
    first = torch.randn(like.numel(), generator=random, dtype=torch.float64, device="cpu").to(like)
    basis: list[Tensor] = [first / first.norm()]
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    bound = 0.0
    for _ in range(min(most, like.numel())):
        v = product(basis[-1])
        diagonal.append(float(v @ basis[-1]))
        known = torch.stack(basis)
        v = v - (known @ v) @ known
        v = v - (known @ v) @ known  # again: the first pass leaves rounding errors
        length = float(v.norm())
        values, vectors = eigh_tridiagonal(diagonal, off_diagonal)
        largest, residual = float(values[-1]), length * abs(float(vectors[-1, -1]))
        bound = largest + residual
        if residual <= tolerance * abs(largest) or length <= torch.finfo(v.dtype).eps * abs(largest):
            return bound
        off_diagonal.append(length)
        basis.append(v / length)
    return bound
