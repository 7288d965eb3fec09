"""The largest eigenvalue of a symmetric operator that is only known by its products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def largest_eigenvalue(
    product: Callable[[Tensor], Tensor], start: Tensor, *, tolerance: float = 1e-3, most: int = 60
) -> float:
    """Lanczos' method: the largest Ritz value plus its residual, where an eigenvalue is known to lie below.

    It ends when the residual is within `tolerance`, after `most` products at the latest, or when the Krylov space is
    exhausted; vectors are kept orthogonal by force, so that rounding does not bring back those already found.

    Reference: Golub and Van Loan, Matrix Computations, 4th edition, section 10.1.
    """
    basis: list[Tensor] = [start / start.norm()]
    diagonal: list[float] = []
    beside: list[float] = []
    bound = 0.0
    for k in range(min(most, start.numel())):
        v = product(basis[-1])
        diagonal.append(float(v @ basis[-1]))
        known = torch.stack(basis)
        for _ in range(2):
            v = v - (known @ v) @ known
        length = float(v.norm())
        tridiagonal = torch.diag(torch.tensor(diagonal, dtype=torch.float64, device="cpu"))
        if k:
            tridiagonal += torch.diag(torch.tensor(beside, dtype=torch.float64, device="cpu"), -1)
        values, vectors = torch.linalg.eigh(tridiagonal)  # of the lower triangle
        largest, residual = float(values[-1]), length * abs(float(vectors[-1, -1]))
        bound = largest + residual
        if residual <= tolerance * abs(largest) or length <= torch.finfo(v.dtype).eps * abs(largest):
            return bound
        beside.append(length)
        basis.append(v / length)
    return bound
