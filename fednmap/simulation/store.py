"""The clients' states between rounds, kept only for clients that have taken part."""

from __future__ import annotations

import torch
from torch import Tensor

from fednmap.core import State


class Clients:
    """States of n clients: `clients[ids]` stacks them, `clients[ids] = states` replaces them.

    Row 0 of every table is the initial state, which is what all clients without a row of their own have.
    """

    def __init__(self, n: int, initial: State) -> None:
        self.n = n
        self._make = type(initial)
        self._row = torch.zeros(n, dtype=torch.int64)
        self._used = 1
        self._tables: list[Tensor] = [v.unsqueeze(0).clone() for v in initial]

    def __getitem__(self, ids: Tensor) -> State:
        rows = self._row[ids]
        return self._make(*(table[rows] for table in self._tables))

    def __setitem__(self, ids: Tensor, states: State) -> None:
        if not self._tables:
            return
        new = ids[self._row[ids] == 0]
        if len(new):
            self._reserve(self._used + len(new))
            self._row[new] = torch.arange(self._used, self._used + len(new))
            self._used += len(new)
        rows = self._row[ids]
        for table, values in zip(self._tables, states, strict=True):
            table[rows] = values

    def tensors(self) -> dict[str, Tensor]:
        """Everything there is, for a checkpoint; `restore` is the way back."""
        taken = (self._row > 0).nonzero().squeeze(1)
        rows = self._row[taken]
        return {"ids": taken, **{name: v[rows] for name, v in zip(self._make._fields, self._tables, strict=True)}}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        if len(tensors["ids"]):
            self[tensors["ids"]] = self._make(*(tensors[name] for name in self._make._fields))

    def _reserve(self, rows: int) -> None:
        """Tables at least double when they grow, never beyond a row for everybody."""
        have = len(self._tables[0])
        if rows > have:
            size = min(max(rows, 2 * have), self.n + 1)
            self._tables = [torch.cat([v, v.new_empty(size - have, *v.shape[1:])]) for v in self._tables]
