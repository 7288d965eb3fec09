"""Who holds which samples: the data of n clients, one client's rows after another's."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from fednmap.data.sparse import digest, from_scipy, is_scipy, is_sparse, joined, numbers, stored, take
from fednmap.names import InputError

ONE_PER_CLIENT = "give a list with one pair (x, y) per client"

Pairs = Iterable[tuple[Any, Any] | TensorDataset]
"""Samples and targets of each client, as tensors, numpy arrays, sparse tables of scipy, or data sets of tensors."""


class ClientRows:
    """n clients' rows, one client's after another's: those of client i are offsets[i] .. offsets[i] + sizes[i]."""

    sizes: Tensor
    batch_rows: int | None = None
    """All rows are gone through by client, in batches of so many: with batch norm a sample's output depends on the
    others of its batch. None: in batches of any size."""
    read_by_client = False
    """A batch holds rows of one client."""

    @cached_property
    def offsets(self) -> Tensor:
        return self.sizes.cumsum(0) - self.sizes

    @property
    def rows(self) -> int:
        """Rows of all clients."""
        return int(self.sizes.sum())

    def rows_of(self, i: int) -> slice:
        """Return client i's rows."""
        return slice(int(self.offsets[i]), int(self.offsets[i] + self.sizes[i]))

    def chunks(self, step: int) -> Iterator[slice]:
        """All rows in order, about `step` at a time."""
        if self.batch_rows is None and not self.read_by_client:
            return (slice(c, c + step) for c in range(0, self.rows, step))
        return chain.from_iterable(self.chunks_of(i, step) for i in range(len(self.sizes)))

    def chunks_of(self, i: int, step: int) -> Iterator[slice]:
        """Client i's rows, about `step` at a time; what is left over joins the last chunk."""
        step, first, size = self.batch_rows or step, int(self.offsets[i]), int(self.sizes[i])
        starts = [*range(first, first + max(1, size // step) * step, step), first + size]
        return (slice(a, b) for a, b in pairwise(starts))

    def in_batches(self, rows: int | None) -> Self:
        """The same with other `batch_rows`."""
        changed = copy.copy(self)
        object.__setattr__(changed, "batch_rows", rows)
        return changed

    def thin_sizes(self, count: int) -> list[int]:
        """How many rows each client has if there are about `count` in all: its share, and at least one batch."""
        least = self.sizes.clamp(max=self.batch_rows or 1)
        return torch.maximum((min(1.0, count / self.rows) * self.sizes).round().long(), least).tolist()


@dataclass(frozen=True, eq=False)
class ClientData(ClientRows, Sequence[tuple[Tensor, Tensor]]):
    """n clients' samples as two tensors; client i holds rows offsets[i] .. offsets[i] + sizes[i].

    A sequence of pairs (x_i, y_i), which is also what `of` takes. x may be sparse, in rows (see `fednmap.data.sparse`);
    it is then never made dense here.

    >>> len(ClientData.of([(torch.zeros(3, 2), torch.zeros(3)), (torch.zeros(1, 2), torch.zeros(1))]).client(0).x)
    3
    """

    x: Tensor
    y: Tensor
    sizes: Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", self.sizes.cpu())  # with the offsets: indices are computed on the CPU
        for name in ("x", "y"):
            object.__setattr__(self, name, getattr(self, name).detach())  # data are not trained
        if self.x.device != self.y.device:
            raise InputError(f"x is on {self.x.device} and y on {self.y.device}; move them to one device")
        if len(self.x) != len(self.y) or len(self.x) != int(self.sizes.sum()):
            raise InputError(
                f"{len(self.x)} rows of x, {len(self.y)} of y, {int(self.sizes.sum())} by the sizes: must agree"
            )
        empty = (self.sizes < 1).nonzero()
        if len(empty):
            raise InputError(f"client {int(empty[0])} holds no sample; every client needs at least one")
        if is_sparse(self.y):
            raise InputError("y is sparse; give targets as a dense vector")
        for name, values in (("x", numbers(self.x)), ("y", self.y)):
            if values.is_floating_point() and not bool(torch.isfinite(values).all()):
                row = int((~torch.isfinite(values)).reshape(len(values), -1).any(1).nonzero()[0])
                if values is not self.x and name == "x":  # the row that holds this entry
                    row = int(torch.searchsorted(self.x.crow_indices(), row, right=True)) - 1
                raise InputError(
                    f"{name} holds NaN or infinity (first in row {row}); clean or impute the data before training"
                )

    @classmethod
    def of(cls, pairs: Pairs) -> ClientData:
        """Make it from one pair (x_i, y_i) per client (tensors, arrays, a TensorDataset); else raise InputError."""
        if isinstance(pairs, ClientData):
            return pairs
        whole = isinstance(pairs, Tensor | np.ndarray | TensorDataset | str) or is_scipy(pairs)
        if whole or not isinstance(pairs, Iterable):
            raise InputError(f"the data is a {type(pairs).__name__}; {ONE_PER_CLIENT}")
        found = list(pairs)
        if not found:
            raise InputError(f"no clients: {ONE_PER_CLIENT}")
        if isinstance(found[0], Tensor | np.ndarray):
            raise InputError(
                "the data is not divided among clients: give [(x, y)] for one client, "
                "or ClientData.split(x, y, partition('iid', y, n)) for n of them"
            )
        each = [_pair(i, value) for i, value in enumerate(found)]
        for k, name in enumerate("xy"):
            for i, pair in enumerate(each):
                mine, first = (tuple(v.shape[1:]) for v in (pair[k], each[0][k]))
                if mine != first:
                    raise InputError(
                        f"one {name} of client {i} has shape {mine}, of client 0 {first}; all clients' must agree"
                    )
        if len({pair[0].layout for pair in each}) > 1:
            raise InputError("some clients' x are sparse and some dense; give all in one form")
        x, y = (joined([pair[k] for pair in each]) for k in (0, 1))
        return cls(x, y, torch.tensor([len(pair[0]) for pair in each], device="cpu"))

    @classmethod
    def split(cls, x: Any, y: Any, parts: Sequence[Tensor]) -> ClientData:
        """Make it from pooled data and the indices of each client's rows (see `fednmap.data.partition`)."""
        x, y, order = tensor("x", x), tensor("y", y), torch.cat([tensor("parts", part) for part in parts])
        sizes = torch.tensor([len(part) for part in parts], device="cpu")
        return cls(take(x, order.to(x.device)), y[order.to(y.device)], sizes)

    def mixed(self, seed: int = 0) -> ClientData:
        """Return the same with each client's rows shuffled."""
        generator = torch.Generator("cpu").manual_seed(seed)
        pairs = zip(self.offsets.tolist(), self.sizes.tolist(), strict=True)
        return ClientData.split(
            self.x, self.y, [first + torch.randperm(size, generator=generator, device="cpu") for first, size in pairs]
        )

    def thinned(self, count: int) -> ClientData:
        """Return about `count` of the rows, evenly spaced: of every client its share, and at least one."""
        pairs = zip(self.offsets.tolist(), self.sizes.tolist(), self.thin_sizes(count), strict=True)
        rows = [first + torch.arange(few, device="cpu") * size // few for first, size, few in pairs]
        return ClientData.split(self.x, self.y, rows).in_batches(self.batch_rows)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all numbers and of whose they are: the same for the same data."""
        return digest(("", values) for values in (self.x, self.y, self.sizes))

    @property
    def row_bytes(self) -> int:
        """Bytes of a sample, on average."""
        return max(1, sum(v.numel() * v.element_size() for v in stored(self.x)) // len(self.x))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a sample."""
        return tuple(self.x.shape[1:])

    @property
    def stackable(self) -> bool:
        """Whether `batch` takes rows of several clients, (k, B)."""
        return not is_sparse(self.x)

    def batch(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Return the samples and targets in these rows, in the shape of `rows`."""
        if isinstance(rows, slice):
            return take(self.x, rows), self.y[rows]
        flat = rows.reshape(-1).to(self.x.device)
        a, b = (v.index_select(0, flat).reshape(*rows.shape, *v.shape[1:]) for v in (self.x, self.y))
        return a, b

    def client(self, i: int) -> ClientData:
        """Return the data of client i."""
        return ClientData.of([self[i]]).in_batches(self.batch_rows)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        return self.batch(self.rows_of(i))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self[i] for i in range(len(self)))


def tensor(name: str, values: Any) -> Tensor:
    """Return numbers in a form that others use, such as a numpy array, as a tensor; `name` says what they are."""
    if isinstance(values, Tensor):
        return values
    if is_scipy(values):
        return from_scipy(name, values)
    try:
        return torch.tensor(np.array(values, order="C"), device="cpu")
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} is a {type(values).__name__} that does not hold numbers only ({error})") from None


def _pair(i: int, value: Any) -> tuple[Tensor, Tensor]:
    """Client i's samples and targets."""
    parts = value.tensors if isinstance(value, TensorDataset) else value
    if not isinstance(parts, tuple | list) or len(parts) != 2:
        raise InputError(f"client {i} is a {type(value).__name__}, not a pair; {ONE_PER_CLIENT}")
    x, y = (tensor(f"{name} of client {i}", part) for name, part in zip("xy", parts, strict=True))
    if not x.ndim or not y.ndim:
        raise InputError(f"client {i} has one number for x or y; give one row of x and one entry of y per sample")
    if len(x) != len(y):
        raise InputError(f"client {i} has {len(x)} rows of x and {len(y)} of y; they must agree")
    return x, y
