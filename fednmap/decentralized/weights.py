"""Mixing matrices: how much of what each node sends the others take; doubly stochastic, so that the mean stays."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fednmap.names import InputError

Edge = tuple[int, int]

CLOSE = 1e-6  # how far from 1 a row or column of a matrix that is given may sum
MIXES = 1e-9  # a smaller spectral gap is none


def metropolis(n: int, edges: Iterable[Edge]) -> Tensor:
    """W_ij = 1 / (1 + max(degree i, degree j)) for neighbours, the rest of each row on its diagonal.

    Symmetric and doubly stochastic, with a positive diagonal: all eigenvalues but one lie within (-1, 1) if the graph
    is connected. Reference: Xiao, Boyd and Kim, Distributed average consensus with least-mean-square deviation, 2007.

    >>> metropolis(3, [(0, 1), (1, 2)])[1].tolist() == [1 / 3, 1 - 2 / 3, 1 / 3]
    True
    """
    W = torch.zeros(n, n, dtype=torch.float64, device="cpu")
    for i, j in edges:
        W[i, j] = W[j, i] = 1.0
    degree = W.sum(1)
    W = W / (1 + torch.maximum(degree[:, None], degree[None, :]))
    return W + torch.diag(1 - W.sum(1))


def connected(W: Tensor, what: str) -> None:
    """Raise InputError unless the graph is connected."""
    from scipy.sparse.csgraph import connected_components  # `fednmap --help` loads nothing heavy

    _, part = connected_components((W != 0).numpy(), directed=False)
    if part.any():
        raise InputError(
            f"expected a connected graph, got {what} without a path from node 0 to node {part.argmax()}, only to "
            f"{(part == 0).sum()} of {len(W)} nodes; add links"
        )


def doubly_stochastic(W: Tensor, what: str) -> Tensor:
    """W with its rounding mended, if it is square, at least 0, sums to 1 along rows and columns, and mixes."""
    check_sums(W, what)
    symmetric = bool((W - W.T).abs().max() <= CLOSE)
    for _ in range(50):
        W = W / W.sum(1, keepdim=True)
        W = W / W.sum(0)
    W = (W + W.T) / 2 if symmetric else W
    connected(W, what)
    if spectral_gap(W) < MIXES:
        raise InputError(
            f"{what} has another eigenvalue of modulus 1 and never mixes; give nodes a weight on the diagonal"
        )
    return W


def check_sums(W: Tensor, what: str) -> None:
    """Square, at least 0, and every row and column sums to 1."""
    if W.ndim != 2 or W.shape[0] != W.shape[1] or not len(W):
        raise InputError(f"{what} has shape {tuple(W.shape)}; a mixing matrix is square, a row for each node")
    if not bool((W.isfinite() & (W >= 0)).all()):
        raise InputError(f"{what} holds a weight below 0 or none at all; all must be finite and at least 0")
    for name, sums in (("row", W.sum(1)), ("column", W.sum(0))):
        worst = int((sums - 1).abs().argmax())
        if abs(float(sums[worst]) - 1) > CLOSE:
            raise InputError(
                f"{what}: {name} {worst} sums to {float(sums[worst]):.6g}; W must be doubly stochastic, every row and "
                "column summing to 1; give an edge list for Metropolis weights"
            )


def spectral_gap(W: Tensor) -> float:
    """Return 1 - lambda, lambda the second largest modulus among the eigenvalues of W: 1 if one round makes all agree.

    >>> round(spectral_gap(metropolis(4, [(0, 1), (1, 2), (2, 3), (3, 0)])), 6)
    0.666667
    """
    if len(W) == 1:
        return 1.0
    sizes = torch.linalg.eigvals(W).abs().sort(descending=True).values
    return 1.0 - float(sizes[1])


def smallest_eigenvalue(W: Tensor) -> float:
    """Of a symmetric W."""
    return float(torch.linalg.eigvalsh(W)[0])
