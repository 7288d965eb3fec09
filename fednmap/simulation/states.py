"""The clients' states between rounds, stored only for clients that have taken part; each round's are a value."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from fednmap.core import State
from fednmap.names import InputError
from fednmap.simulation import distributed


class Clients:
    """States of n clients: `clients[ids]` returns a stacked copy, `clients[ids] = states` replaces them.

    Row 0 of every table is the initial state, which is what all clients without a row of their own have. Rows are
    overwritten. The one rule that keeps a `Snapshot` a value: what is overwritten is given to the snapshots that
    somebody still holds.

    folder: where the tables are kept as memory-mapped files; the system writes out what does not fit into memory.
            Whoever made such tables last there owns them.
    """

    def __init__(self, n: int, initial: State, folder: Path | None = None) -> None:
        self.n = n
        self._make, self._folder = type(initial), folder
        self._device = next(iter(initial)).device if len(initial) else torch.device("cpu")
        self._row = torch.zeros(n, dtype=torch.int64, device="cpu")
        self._used = 1
        self._version = 0
        self._token = secrets.token_hex(8)
        self._snapshots: weakref.WeakSet[Snapshot] = weakref.WeakSet()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._owner.write_text(self._token)
        self._tables: list[Tensor] = [self._table(k, v.unsqueeze(0), 1) for k, v in enumerate(initial)]

    def __len__(self) -> int:
        """How many clients have a state of their own."""
        return self._used - 1

    def __getitem__(self, ids: Tensor) -> State:
        rows = self._row[ids.reshape(-1)]
        copies = (table.index_select(0, rows.to(table.device)).to(self._device) for table in self._tables)
        return self._make(*(v.reshape((*ids.shape, *v.shape[1:])) for v in copies))

    def __setitem__(self, ids: Tensor, states: State) -> None:
        self.replace(ids, self[ids], states)

    def replace(self, ids: Tensor, old: State, new: State) -> None:
        """Overwrite the states of these clients; `old` is `clients[ids]`."""
        if not self._tables:
            return
        self._version += 1
        if self._folder is None:
            for held in list(self._snapshots):
                held.keep(ids, old)
                if held.complete:  # nothing that comes later matters to it
                    self._snapshots.discard(held)
        without = ids[self._row[ids] == 0]
        end = self._used + len(without)
        if end > len(self._tables[0]):  # tables at least double, never beyond a row for everybody
            size = min(max(end, 2 * len(self._tables[0])), self.n + 1)
            self._tables = [self._table(k, v, size) for k, v in enumerate(self._tables)]
        self._row[without] = torch.arange(self._used, end, device="cpu")
        self._used, rows = end, self._row[ids]
        for table, values in zip(self._tables, new, strict=True):
            each = values.expand(len(ids), *table.shape[1:])
            table.index_copy_(0, rows.to(table.device), each.to(table.device, table.dtype))

    def snapshot(self) -> Snapshot:
        """Return the states as they are now, whatever comes later."""
        taken = Snapshot(self, self.n, self._version, self._used)
        self._snapshots.add(taken)
        return taken

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Set what `Snapshot.tensors` returned; in a process group every process has all, until a simulation begins."""
        if len(tensors["ids"]):
            self[tensors["ids"]] = self._make(*(tensors[name] for name in self._make._fields))

    @property
    def replaced(self) -> bool:
        """Whether the folder holds the tables of a later run by now."""
        return self._folder is not None and self._owner.read_text() != self._token

    @property
    def _owner(self) -> Path:
        assert self._folder is not None
        return self._folder / f"owner-{distributed.rank()}"

    def _table(self, k: int, have: Tensor, size: int) -> Tensor:
        """The rows of `have` and room for more, `size` in all."""
        shape = (size, *have.shape[1:])
        if self._folder is None:
            table = have.new_empty(shape)
        else:
            path = self._folder / f"{self._make._fields[k]}-{distributed.rank()}.bin"
            table = torch.from_file(str(path), shared=True, size=prod(shape), dtype=have.dtype, device="cpu").view(
                shape
            )
            if size > 1:  # a larger view of the same file: what it held is where it was
                return table
        table[: len(have)] = have.to(table.device)
        return table


@dataclass(eq=False)
class Snapshot:
    """The clients' states after one round. They stay what they are while the simulation continues.

    States on disk are not kept: there only the newest snapshot can be read.
    """

    _clients: Clients
    n: int
    _version: int
    _used: int
    _place: Tensor | None = None
    """Of each client's state among those kept here, -1 if it is not."""
    _kept: list[State] = field(default_factory=list)
    _count: int = 0

    def __len__(self) -> int:
        """How many clients have a state of their own."""
        return self._used - 1

    def __getitem__(self, ids: Tensor) -> State:
        self._check()
        states = self._clients[ids]
        if self._place is None:
            return states
        place = self._place[ids]
        here = place >= 0
        for into, kept in zip(states, zip(*self._kept, strict=True), strict=True):
            into[here.to(into.device)] = torch.cat(kept)[place[here].to(into.device)]
        return states

    @property
    def complete(self) -> bool:
        """Whether every client's state is kept here."""
        return self._count == self.n

    def keep(self, ids: Tensor, states: State) -> None:
        """Keep those of these states, about to be replaced, that are not kept already."""
        if self._place is None:
            self._place = torch.full((self.n,), -1, device="cpu")
        new = self._place[ids] < 0
        if not bool(new.any()):
            return
        if not bool(new.all()):
            ids, states = ids[new], type(states)(*(v[new.to(v.device)] for v in states))
        self._place[ids] = torch.arange(self._count, self._count + len(ids), device="cpu")
        self._kept.append(states)
        self._count += len(ids)

    def fits(self, n: int, initial: State) -> bool:
        """Return whether these are states of n clients, like `initial`."""
        mine = self._clients._make(*(table[0] for table in self._clients._tables))
        return self.n == n and same_kind(mine, initial)

    def tensors(self) -> dict[str, Tensor]:
        """Return all states, for a checkpoint; `Clients.restore` sets them again.

        In a process group all processes call this together, and process 0 gets the states of all.
        """
        taken = self._taken()
        named = {"ids": taken, **self[taken]._asdict()}
        return {name: distributed.gather(v) for name, v in named.items()}

    def thaw(self, initial: State, folder: Path | None, mine: Callable[[Tensor], Tensor]) -> Clients:
        """Return states to continue from: the tables themselves where these are on disk, else a copy.

        mine: which of some clients this process keeps.
        """
        self.check_store(folder)
        if self._clients._folder is not None:
            return self._clients
        clients, ids = Clients(self.n, initial, folder), self._taken()
        ids = ids[mine(ids)]
        clients[ids] = self[ids]
        return clients

    def check_store(self, folder: Path | None) -> None:
        """Refuse to continue from states on disk in another folder, or from an older round of them."""
        self._check()
        own = self._clients._folder
        if own is not None and (folder is None or folder.resolve() != own.resolve()):
            raise InputError(
                f"expected store={own}, where the clients' states of this round are, got {folder}; give that folder"
            )

    def _taken(self) -> Tensor:
        """The clients that had a state of their own."""
        row = self._clients._row
        return ((row > 0) & (row < self._used)).nonzero().squeeze(1)

    def _check(self) -> None:
        clients = self._clients
        if clients._folder is not None and (self._version != clients._version or clients.replaced):
            raise InputError(
                f"expected the last round of the run in {clients._folder}, got an earlier one; the folder has the "
                "states of the newest round only: continue from that one, or leave store= out"
            )


def same_kind(state: State, like: State) -> bool:
    """Return whether two states are of one type, with tensors of the same shapes and types."""
    return type(state) is type(like) and all(
        v.shape == other.shape and v.dtype == other.dtype for v, other in zip(state, like, strict=True)
    )
