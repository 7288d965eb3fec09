"""Samples of any form, read when they are needed: torch data sets, loaders, and tensors by name, one per client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from fednmap.data.clients import ONE_PER_CLIENT, ClientRows, tensor
from fednmap.data.sparse import digest
from fednmap.names import InputError

Tree = Any
"""What a module takes: a tensor, or a tuple or dict of trees."""

READ = 256  # samples read together where all are gone through


def mapped(function: Callable[[Tensor], Any], tree: Tree) -> Tree:
    """Return the tree with each tensor replaced by function(tensor); a list becomes a tuple.

    >>> mapped(len, {"a": torch.zeros(3), "b": [torch.zeros(2)]})
    {'a': 3, 'b': (2,)}
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: mapped(function, value) for key, value in tree.items()}
    return tuple(mapped(function, value) for value in tree) if isinstance(tree, tuple | list) else tree


def leaves(tree: Tree) -> list[Tensor]:
    """Return the tensors of a tree."""
    found: list[Tensor] = []
    mapped(found.append, tree)
    return found


@dataclass(frozen=True)
class _Tensors:
    """Samples as rows of tensors, in the shape of a torch data set that gives several at a time."""

    inputs: Tree
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def __getitems__(self, rows: list[int]) -> tuple[Tree, Tensor]:
        index = torch.tensor(rows, device=self.targets.device)
        return mapped(lambda v: v.index_select(0, index), self.inputs), self.targets.index_select(0, index)


_Source = tuple[Any, Callable[[Any], Any]]
"""A client's map-style data set, and what makes a batch of its items."""


class Records(ClientRows):
    """n clients' samples, each read by number when it is needed.

    What a client may be:
        a map-style Dataset whose items are (inputs, target), (input, ..., target) or a dict with the key "labels";
        a DataLoader of one: its `collate_fn` makes the batches; which samples those are, the problem decides;
        a pair (inputs, targets), with inputs a tensor or a tuple or dict of tensors.

    >>> records = Records.of([({"ids": torch.arange(6).view(3, 2)}, torch.tensor([0, 1, 0]))])
    >>> records.batch(torch.tensor([2, 0]))
    ({'ids': tensor([[4, 5],
            [0, 1]])}, tensor([0, 0]))
    """

    stackable, read_by_client = False, True
    refused: int | None = None
    """A label that must not occur, as one that the loss ignores but that was not counted."""

    def __init__(self, sources: Sequence[_Source]) -> None:
        self._sources = list(sources)
        self.sizes = torch.tensor([len(items) for items, _ in self._sources], device="cpu")
        empty = (self.sizes < 1).nonzero()
        if len(empty):
            raise InputError(f"client {int(empty[0])} holds no sample; every client needs at least one")

    @classmethod
    def of(cls, clients: Sequence[Any], batch_size: int | None = None) -> Records:
        """From what each client holds; a loader with another batch size than `batch_size` is refused."""
        return cls([_source(i, client, batch_size) for i, client in enumerate(clients)])

    @staticmethod
    def needed(clients: object) -> bool:
        """Return whether a client's data is anything else than a pair of tensors, or a data set of two."""
        if isinstance(clients, Dataset | DataLoader):
            raise InputError(f"the data is a {type(clients).__name__}; {ONE_PER_CLIENT}, or one data set each")
        return isinstance(clients, list | tuple) and any(map(_other, clients))

    def __len__(self) -> int:
        return len(self._sources)

    def batch(self, rows: Tensor | slice) -> tuple[Tree, Tensor]:
        """Return the samples and targets in these rows, which are one client's, as one batch.

        Consecutive rows, which are what is measured, are read with torch's random numbers seeded by the first.
        """
        if isinstance(rows, slice):
            state = torch.get_rng_state()
            torch.default_generator.manual_seed(rows.start)
            try:
                return self.batch(torch.arange(rows.start, min(rows.stop, self.rows), device="cpu"))
            finally:
                torch.set_rng_state(state)
        offsets = self.offsets
        client = int(torch.searchsorted(offsets, rows[0], right=True)) - 1
        (items, collate), numbers = self._sources[client], (rows - offsets[client]).tolist()
        several = getattr(items, "__getitems__", None)  # torch's own name for reading many at a time
        inputs, targets = split(collate([items[i] for i in numbers] if several is None else several(numbers)))
        if self.refused is not None and bool((targets == self.refused).any()):  # where the data set has its labels
            raise InputError(
                f"label {self.refused} in a data set, whose labels were taken to count the same; give the loss class "
                "weights (ones will do), and all labels are counted first"
            )
        return inputs, targets

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a sample; of its first tensor, if it has several."""
        return tuple(leaves(self.batch(slice(0, 1))[0])[0].shape[1:])

    def client(self, i: int) -> Records:
        """Client i alone."""
        return self._with([self._sources[i]])

    def thinned(self, count: int) -> Records:
        """About `count` of the samples, evenly spaced: of every client its share, and at least one."""
        pairs = zip(self._sources, self.thin_sizes(count), strict=True)
        return self._with([(Subset(s, [k * len(s) // few for k in range(few)]), make) for (s, make), few in pairs])

    def _with(self, sources: Sequence[_Source]) -> Records:
        changed = Records(sources).in_batches(self.batch_rows)
        changed.refused = self.refused
        return changed

    def parts(self) -> Iterator[tuple[Tree, Tensor]]:
        """Yield all samples in order, in batches of one client each."""
        for first, size in zip(self.offsets.tolist(), self.sizes.tolist(), strict=True):
            for start in range(first, first + size, READ):
                yield self.batch(slice(start, min(start + READ, first + size)))

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a sample: those of the first one."""
        return max(1, sum(v.numel() * v.element_size() for v in leaves(self.batch(slice(0, 1)))))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all samples, which are read for it, and of whose they are."""
        return digest([("sizes", self.sizes), *(("", v) for part in self.parts() for v in leaves(part))])


def split(batch: Any) -> tuple[Tree, Tensor]:
    """Return the inputs and the targets of a batch as a data set gives it."""
    if isinstance(batch, Mapping) and "labels" in batch:
        inputs: Tree = {key: value for key, value in batch.items() if key != "labels"}
        targets = batch["labels"]
    elif isinstance(batch, tuple | list) and len(batch) > 1:
        inputs, targets = batch[0] if len(batch) == 2 else tuple(batch[:-1]), batch[-1]
    else:
        found = f"a dict of {list(batch)}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        raise InputError(f'expected items (inputs, target) or a dict with the key "labels", got {found}')
    if not isinstance(targets, Tensor):
        raise InputError(f"expected targets that collate to one tensor, got a {type(targets).__name__}")
    return mapped(lambda v: v, inputs), labelled(targets)


def labelled(targets: Tensor) -> Tensor:
    """Whole-number targets as int64, which torch's losses take."""
    return targets if targets.is_floating_point() else targets.to(torch.int64)


def _other(client: object) -> bool:
    if isinstance(client, TensorDataset):
        return len(client.tensors) != 2
    if isinstance(client, tuple | list):
        return len(client) == 2 and isinstance(client[0], Mapping | tuple)
    numbered = hasattr(client, "__getitem__") and not isinstance(client, Tensor | np.ndarray | str)
    return numbered or isinstance(client, DataLoader)


def _source(i: int, client: Any, batch_size: int | None) -> _Source:
    if isinstance(client, DataLoader):
        if client.batch_size not in (batch_size, None) and batch_size is not None:
            raise InputError(
                f"the loader of client {i} has batch_size {client.batch_size}, the problem {batch_size}; give both one"
            )
        collate, client = client.collate_fn, client.dataset
    else:
        collate = default_collate
    if isinstance(client, IterableDataset):
        raise InputError(f"client {i} is an IterableDataset, whose samples have no numbers; give a map-style one")
    if not isinstance(client, tuple | list):
        return client, collate
    if len(client) != 2 or not isinstance(client[0], Mapping | tuple | list | Tensor):
        raise InputError(f"client {i} is a {type(client).__name__} of {len(client)}; {ONE_PER_CLIENT}, or one data set")
    inputs, targets = mapped(Tensor.detach, client[0]), labelled(tensor(f"targets of client {i}", client[1]))
    lengths = {len(v) for v in (*leaves(inputs), targets)}
    if len(lengths) > 1:
        raise InputError(f"client {i} has inputs and targets of lengths {sorted(lengths)}; they must agree")
    return _Tensors(inputs, targets), tuple  # a pair already
