"""Tables of which most entries are zero, kept as torch's sparse_csr tensors: only what is not zero takes memory."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fednmap.names import InputError


def is_sparse(values: Tensor) -> bool:
    """Return whether it is a table in rows of nonzero entries."""
    return values.layout is torch.sparse_csr


def csr(crow: Tensor, col: Tensor, values: Tensor, columns: int) -> Tensor:
    """Return the table with these rows: row i holds the entries crow[i] .. crow[i + 1]."""
    _silence_beta_warning()
    size = (len(crow) - 1, columns)
    return torch.sparse_csr_tensor(crow, col, values, size, check_invariants=False, device=values.device)


@cache
def _silence_beta_warning() -> None:
    """torch warns once per process that the layout is beta; only the container is used here."""
    none = torch.zeros(1, dtype=torch.int32, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor(none, none[:0], torch.zeros(0, device="cpu"), (0, 1), check_invariants=False)


def from_scipy(name: str, values: Any) -> Tensor:
    """Return a matrix or array of scipy.sparse, in any format, with indices of 32 bits where these suffice."""
    if values.ndim != 2:
        raise InputError(f"{name} is sparse with {values.ndim} axes; give a table, one row per sample")
    table = values.tocsr()
    if not table.has_canonical_format:
        table = table.copy()
        table.sum_duplicates()
    if table.dtype.kind not in "fiub":
        raise InputError(f"{name} is sparse with entries of type {table.dtype}; give real numbers")
    entries = table.data if table.dtype.kind == "f" else table.data.astype(np.float64)
    index = np.int32 if max(table.nnz, *table.shape) < 2**31 else np.int64
    crow, col = (torch.from_numpy(v.astype(index, copy=False)) for v in (table.indptr, table.indices))
    return csr(crow, col, torch.from_numpy(np.ascontiguousarray(entries)), table.shape[1])


def to_scipy(values: Tensor) -> Any:
    """Return the same numbers as an array of scipy.sparse, not copied."""
    from scipy.sparse import csr_array

    parts = (v.numpy() for v in (values.values(), values.col_indices(), values.crow_indices()))
    return csr_array(tuple(parts), shape=tuple(values.shape), copy=False)


def is_scipy(values: object) -> bool:
    """Return whether it comes from scipy.sparse; without loading scipy."""
    return type(values).__module__.startswith("scipy.sparse")


def take(values: Tensor, rows: Tensor | slice) -> Tensor:
    """Return values[rows]: a slice in steps of 1, numbers of rows or a mask; of a sparse table a sparse one."""
    if not is_sparse(values):
        return values[rows]
    crow, col, entries, columns = values.crow_indices(), values.col_indices(), values.values(), values.shape[1]
    if isinstance(rows, slice):
        first, last, step = rows.indices(len(values))
        if step != 1:
            raise InputError(f"expected a slice of rows in steps of 1, got steps of {step}")
        kept = crow[first : max(first, last) + 1]
        inside = slice(int(kept[0]), int(kept[-1]))
        return csr(kept - kept[0], col[inside], entries[inside], columns)
    return _picked(values, rows)


def _picked(values: Tensor, rows: Tensor, blocks: int = 1) -> Tensor:
    """These rows of a sparse table, cut into so many blocks on the diagonal of the result."""
    table = to_scipy(values)[rows.cpu().numpy()]
    first = np.arange(blocks, dtype=table.indices.dtype) * values.shape[1]
    each = np.diff(table.indptr[:: max(1, table.shape[0] // blocks)]) if blocks > 1 else table.nnz
    parts = table.indptr, table.indices + np.repeat(first, each), table.data
    crow, col, entries = map(torch.from_numpy, parts)
    return csr(crow, col, entries, blocks * values.shape[1])


def stacked(values: Tensor, rows: Tensor) -> Tensor:
    """Return the rows (..., B) of a sparse table; those of k clients, (k, B), in k blocks on the diagonal."""
    return _picked(values, rows.reshape(-1), rows.shape[0] if rows.ndim > 1 else 1)


def joined(tables: Sequence[Tensor]) -> Tensor:
    """Tables one below the other."""
    if not is_sparse(tables[0]):
        return torch.cat(list(tables))
    from scipy.sparse import vstack

    return from_scipy("x", vstack([to_scipy(table) for table in tables], format="csr"))


def numbers(values: Tensor) -> Tensor:
    """Return the entries that are stored: all of a dense tensor, those that are not zero of a sparse one."""
    return values.values() if is_sparse(values) else values


def stored(values: Tensor) -> Iterator[Tensor]:
    """Yield the dense tensors that make up a tensor."""
    if is_sparse(values):
        yield from (values.crow_indices(), values.col_indices(), values.values())
    else:
        yield values


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 of these tensors, each with its label."""
    found = hashlib.sha256()
    for label, values in tensors:
        found.update(f"{label}{values.dtype} {tuple(values.shape)}".encode())
        for part in stored(values.detach()):
            found.update(part.cpu().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


def deviations(values: Tensor) -> Tensor:
    """Return the standard deviation of each column of a table, in float64."""
    if not is_sparse(values):
        return values.double().std(0, correction=0)
    col, entries, count = values.col_indices().long(), values.values().double(), len(values)
    zeros = torch.zeros(values.shape[1], dtype=torch.float64, device=entries.device)
    mean = zeros.index_add(0, col, entries) / count
    filled = zeros.index_add(0, col, torch.ones_like(entries))
    around = zeros.index_add(0, col, (entries - mean[col]).square()) + (count - filled) * mean.square()
    return (around / count).sqrt()
