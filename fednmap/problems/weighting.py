"""How much a client counts in f, and a row in its client's mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fednmap.data.clients import ClientData, tensor
from fednmap.names import InputError

Weights = Sequence[float] | Tensor | str | None
"""n numbers that sum to 1; None: clients weigh equally; "samples": every row of every client counts once."""

RowWeights = Sequence[Tensor] | Tensor | None
"""A number >= 0 per row, for each client a vector or one vector for all rows in turn; None: rows count the same."""


def client_weights(weights: Weights, sizes: Tensor, rows: Tensor | None) -> Tensor | None:
    """What each client's mean weighs in f; None for equal weights.

    rows: the weights of the rows, if they have any.
    """
    if weights is None:
        return None
    n = len(sizes)
    if isinstance(weights, str):
        if weights != "samples":
            raise InputError(f'weights is {weights!r}; give "samples", {n} numbers that sum to 1, or None')
        total = sizes.double() if rows is None else per_client(rows, sizes)
        return total / total.sum()
    w = torch.as_tensor(weights, dtype=torch.float64, device="cpu")
    if w.shape != (n,) or bool((w < 0).any()) or abs(float(w.sum()) - 1) > 1e-6:
        raise InputError(
            f"weights must be {n} numbers >= 0 that sum to 1, given {tuple(w.shape)} summing to {float(w.sum()):g}"
        )
    return w / w.sum()


def row_weights(given: RowWeights, data: ClientData) -> Tensor | None:
    """The weights of all rows as one vector on the CPU, checked; None where rows count the same."""
    if given is None:
        return None
    parts = [given] if isinstance(given, Tensor) else [tensor("sample_weights", part) for part in given]
    if len(parts) > 1 and [len(part) for part in parts] != data.sizes.tolist():
        raise InputError("sample_weights must hold one number per row of every client; their lengths differ")
    w = torch.cat([part.reshape(-1) for part in parts]).to("cpu", torch.float64)
    if len(w) != len(data.x) or not bool((torch.isfinite(w) & (w >= 0)).all()) or not bool((w > 0).any()):
        raise InputError(
            f"sample_weights must be {len(data.x)} finite numbers >= 0, one per row and not all 0, given {len(w)}"
        )
    return w


def row_shares(sizes: Tensor, rows: Tensor | None) -> Tensor:
    """What each row counts in its client's mean: they sum to 1 over a client, to 0 where all its rows weigh nothing."""
    if rows is None:
        return torch.repeat_interleave(1 / sizes.double(), sizes)
    total = torch.repeat_interleave(per_client(rows, sizes), sizes)
    return torch.where(total > 0, rows / total, 0.0)


def per_client(rows: Tensor, sizes: Tensor) -> Tensor:
    """Sums over each client's rows."""
    client = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), sizes)
    return torch.zeros(len(sizes), dtype=rows.dtype, device="cpu").index_add_(0, client, rows)
