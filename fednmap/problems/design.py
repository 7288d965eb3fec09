"""The features of a batch of rows as a linear map, dense or sparse: what a linear model computes with them."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Size, Tensor

from fednmap.data.sparse import is_sparse, to_scipy
from fednmap.names import InputError


class DenseDesign:
    """Rows A (..., B, d): one client's, or with a leading axis those of k clients.

    With products by name: torch.matmul finds the same ones, later, and for stacks a slower one for A w.
    """

    def __init__(self, a: Tensor) -> None:
        self.a, self._transposed = a, a.mT

    def kept(self) -> DenseDesign:
        """The same for many products: a stack of small tables is also kept transposed, so that A w is read in order."""
        if self.a.ndim == 3:
            self._transposed = self._transposed.contiguous()
        return self

    def times(self, w: Tensor) -> Tensor:
        """Return a w for w (..., d): (..., B)."""
        if self.a.ndim == 2:
            return torch.mv(self.a, w)
        if w.ndim == 1:
            return torch.matmul(self.a, w)
        return torch.bmm(w.unsqueeze(1), self._transposed).squeeze(1)

    def transposed(self, r: Tensor) -> Tensor:
        """A^T r for r (..., B): (..., d)."""
        if self.a.ndim == 2:
            return torch.mv(self._transposed, r)
        return torch.bmm(r.unsqueeze(1), self.a).squeeze(1)

    def times_each(self, w: Tensor) -> Tensor:
        """Return a w for S vectors w (..., S, d): (..., B, S)."""
        return torch.matmul(w, self._transposed).mT

    def transposed_each(self, r: Tensor) -> Tensor:
        """A^T r for S columns r (..., B, S): (..., S, d)."""
        return torch.matmul(r.mT, self.a)

    def gram(self, c: Tensor) -> Tensor:
        """A^T diag(c) A, (d, d), for one batch A (B, d)."""
        return self.a.mT @ (c.unsqueeze(-1) * self.a)


class SparseDesign:
    """The same with sparse rows; k clients' rows are the blocks on the diagonal of one matrix, as `stacked` makes it.

    By scipy's products: torch's own take as long for A x, and sixty times as long for A^T r.
    """

    def __init__(self, a: Tensor, batch: Size, dtype: torch.dtype) -> None:
        if a.device.type != "cpu":
            raise InputError(f"sparse data is on {a.device}; it is computed on the CPU only, use device cpu")
        self._matrix, self._batch = to_scipy(a.to(dtype)), batch

    def kept(self) -> SparseDesign:
        return self

    @cached_property
    def _transpose(self) -> Any:
        return self._matrix.T

    def times(self, w: Tensor) -> Tensor:
        return self._product(self._matrix, self._each(w).reshape(-1)).view(self._batch)

    def transposed(self, r: Tensor) -> Tensor:
        return self._product(self._transpose, r.reshape(-1)).view(*self._batch[:-1], -1)

    def times_each(self, w: Tensor) -> Tensor:
        columns = self._each(w, 2).mT.reshape(-1, w.shape[-2])
        return self._product(self._matrix, columns).view(*self._batch, -1)

    def transposed_each(self, r: Tensor) -> Tensor:
        rows = self._product(self._transpose, r.reshape(-1, r.shape[-1]))
        return rows.view(*self._batch[:-1], -1, r.shape[-1]).mT

    def gram(self, c: Tensor) -> Tensor:
        scaled = self._matrix.multiply(c.reshape(-1, 1).numpy())
        return torch.from_numpy((self._transpose @ scaled).toarray())

    def _each(self, w: Tensor, axes: int = 1) -> Tensor:
        """A common point once for each client."""
        return w.expand(*self._batch[:-1], *w.shape[-axes:])

    @staticmethod
    def _product(matrix: Any, values: Tensor) -> Tensor:
        return torch.from_numpy(matrix @ values.detach().numpy())


Design = DenseDesign | SparseDesign


def design_of(a: Tensor | Design, batch: Size, dtype: torch.dtype) -> Design:
    """Return the rows a, whose targets have the shape `batch`, computed in this dtype."""
    if not isinstance(a, Tensor):
        return a
    if is_sparse(a):
        return SparseDesign(a, batch, dtype)
    a = a if a.ndim == len(batch) + 1 else a.flatten(len(batch))
    return DenseDesign(a if a.dtype == dtype else a.to(dtype))
