"""The clients' states between rounds, kept only for clients that have taken part."""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch
from torch import Tensor

from fednmap.core import State
from fednmap.simulation import distributed


class Clients:
    """States of n clients: `clients[ids]` stacks them, `clients[ids] = states` replaces them.

    Row 0 of every table is the initial state, which is what all clients without a row of their own have.

    folder: where the tables are kept as memory-mapped files; the system writes out what does not fit into memory.
    """

    def __init__(self, n: int, initial: State, folder: Path | None = None) -> None:
        self.n = n
        self._make, self._folder = type(initial), folder
        self._row = torch.zeros(n, dtype=torch.int64)
        self._used = 1
        self._tables: list[Tensor] = [self._table(k, v.unsqueeze(0), 1) for k, v in enumerate(initial)]

    def __len__(self) -> int:
        """How many clients have a state of their own."""
        return self._used - 1

    def __getitem__(self, ids: Tensor) -> State:
        rows = self._row[ids]
        return self._make(*(table[rows] for table in self._tables))

    def view(self, ids: Tensor) -> State:
        """As `clients[ids]`, but without a copy where rows are neighbours: good until these states are replaced."""
        rows = _range(self._row[ids])
        return self._make(*(table[rows] for table in self._tables))

    def __setitem__(self, ids: Tensor, states: State) -> None:
        if not self._tables:
            return
        new = ids[self._row[ids] == 0]
        if len(new):
            self._reserve(self._used + len(new))
            self._row[new] = torch.arange(self._used, self._used + len(new))
            self._used += len(new)
        rows = _range(self._row[ids])
        for table, values in zip(self._tables, states, strict=True):
            table[rows] = values

    def tensors(self) -> dict[str, Tensor]:
        """Everything there is, for a checkpoint; `restore` is the way back.

        In a process group all processes call this together, and process 0 gets the states of all.
        """
        taken = (self._row > 0).nonzero().squeeze(1)
        rows = _range(self._row[taken])
        named = {"ids": taken, **{k: v[rows] for k, v in zip(self._make._fields, self._tables, strict=True)}}
        return {name: distributed.collected(v) for name, v in named.items()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """In a process group each process keeps the clients that are its own."""
        mine = tensors["ids"] % distributed.size() == distributed.rank()
        if bool(mine.any()):
            self[tensors["ids"][mine]] = self._make(*(tensors[name][mine] for name in self._make._fields))

    def _reserve(self, rows: int) -> None:
        """Tables at least double when they grow, never beyond a row for everybody."""
        have = len(self._tables[0])
        if rows > have:
            size = min(max(rows, 2 * have), self.n + 1)
            self._tables = [self._table(k, v, size) for k, v in enumerate(self._tables)]

    def _table(self, k: int, have: Tensor, size: int) -> Tensor:
        """The rows of `have` and room for more, `size` in all."""
        shape = (size, *have.shape[1:])
        if self._folder is None:
            table = have.new_empty(shape)
        else:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"{self._make._fields[k]}-{distributed.rank()}.bin"
            table = torch.from_file(str(path), shared=True, size=prod(shape), dtype=have.dtype).view(shape)
            if size > 1:  # a larger view of the same file: what it held is where it was
                return table
        table[: len(have)] = have
        return table


def _range(rows: Tensor) -> Tensor | slice:
    """Neighbouring rows as a slice: a view instead of a copy."""
    k = len(rows)
    if k and bool((rows == torch.arange(int(rows[0]), int(rows[0]) + k)).all()):
        return slice(int(rows[0]), int(rows[0]) + k)
    return rows
