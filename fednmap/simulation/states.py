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

BLOCK_BYTES = 1 << 28


class _Table:
    """Rows of equal shape in blocks: nothing is copied when the table grows. Row 0 is `first`.

    rows: how many there can be, which is never more than what is allocated at first.
    file: block k is the memory-mapped file `file`.k.bin; default: in memory.
    """

    def __init__(self, first: Tensor, rows: int, file: Path | None) -> None:
        self.first, self._file = first.detach().clone(), file
        self._length = max(1, min(rows, BLOCK_BYTES // max(1, first.nbytes)))
        self._blocks: list[Tensor] = []
        self.write(torch.zeros(1, dtype=torch.int64, device="cpu"), first.unsqueeze(0))

    def read(self, rows: Tensor) -> Tensor:
        """Return copies of these rows; a view if all of them are row 0."""
        if not rows.any():
            return self.first.expand(len(rows), *self.first.shape)
        if len(self._blocks) == 1:
            return self._blocks[0].index_select(0, rows.to(self._blocks[0].device)).to(self.first.device)
        return torch.stack([self._row(row) for row in rows.tolist()]).to(self.first.device)

    def write(self, rows: Tensor, values: Tensor) -> None:
        while len(self._blocks) * self._length <= int(rows.max()):
            self._blocks.append(self._block(len(self._blocks)))
        values = values.expand(len(rows), *self.first.shape)
        if len(self._blocks) == 1:
            block = self._blocks[0]
            block.index_copy_(0, rows.to(block.device), values.to(block.device, block.dtype))
            return
        for row, value in zip(rows.tolist(), values, strict=True):
            self._row(row).copy_(value)

    def _row(self, row: int) -> Tensor:
        return self._blocks[row // self._length][row % self._length]

    def _block(self, k: int) -> Tensor:
        """Memory that takes no room before it is written."""
        shape = (self._length, *self.first.shape)
        if self._file is None:
            return self.first.new_empty(shape)
        path, dtype = f"{self._file}.{k}.bin", self.first.dtype
        return torch.from_file(path, shared=True, size=prod(shape), dtype=dtype, device="cpu").view(shape)


class Clients:
    """States of n clients: `clients[ids]` returns them stacked, `clients[ids] = states` replaces them.

    Row 0 of every table is the initial state, which is what all clients without a row of their own have. Rows are
    overwritten. The one rule that keeps a `Snapshot` a value: what is overwritten is given to the snapshots that
    somebody still holds, unless it is the initial state.

    folder: where the tables are kept as memory-mapped files; the system writes out what does not fit into memory.
            Whoever made such tables last there owns them.
    """

    def __init__(self, n: int, initial: State, folder: Path | None = None) -> None:
        self.n = n
        self._make, self._folder = type(initial), folder
        self.row = torch.zeros(n, dtype=torch.int64, device="cpu")
        """Of each client, in every table."""
        self.used = 1
        self._version = 0
        self._token = secrets.token_hex(8)
        self._snapshots: weakref.WeakSet[Snapshot] = weakref.WeakSet()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._owner.write_text(self._token)
        names = [f"{name}-{distributed.rank()}" for name in self._make._fields]
        self._tables = [
            _Table(v, n + 1, None if folder is None else folder / name) for name, v in zip(names, initial, strict=True)
        ]

    def __len__(self) -> int:
        """How many clients have a state of their own."""
        return self.used - 1

    @property
    def initial(self) -> State:
        """The state of a client that has not taken part."""
        return self._make(*(table.first for table in self._tables))

    def __getitem__(self, ids: Tensor) -> State:
        return self.read(self.row[ids.reshape(-1)], ids.shape)

    def read(self, rows: Tensor, shape: torch.Size) -> State:
        """Return the states in these rows of the tables, stacked in this shape; they must not be changed in place."""
        found = (table.read(rows) for table in self._tables)
        return self._make(*(v.reshape((*shape, *v.shape[1:])) for v in found))

    def __setitem__(self, ids: Tensor, states: State) -> None:
        self.replace(ids, self[ids], states)

    def replace(self, ids: Tensor, old: State, new: State) -> None:
        """Overwrite the states of these clients; `old` is `clients[ids]`."""
        if not self._tables or not len(ids):
            return
        self._version += 1
        if self._folder is None:
            for held in list(self._snapshots):
                held.keep(ids, old)
                if held.complete:  # nothing that comes later matters to it
                    self._snapshots.discard(held)
        without = ids[self.row[ids] == 0]
        end = self.used + len(without)
        self.row[without] = torch.arange(self.used, end, device="cpu")
        self.used, rows = end, self.row[ids]
        for table, values in zip(self._tables, new, strict=True):
            table.write(rows, values)

    def snapshot(self) -> Snapshot:
        """Return the states as they are now, whatever comes later."""
        taken = Snapshot(self, self.n, self._version, self.used)
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
        row = self._clients.row[ids]
        states = self._clients.read(torch.where(row < self._used, row, 0).reshape(-1), ids.shape)
        states = type(states)(*(v.clone() for v in states))
        if self._place is None:
            return states
        place = self._place[ids]
        here = place >= 0
        for into, kept in zip(states, zip(*self._kept, strict=True), strict=True):
            into[here.to(into.device)] = torch.cat(kept)[place[here].to(into.device)]
        return states

    @property
    def complete(self) -> bool:
        """Whether the state of every client that had its own is kept here."""
        return self._count == len(self)

    def keep(self, ids: Tensor, states: State) -> None:
        """Keep those of these states, about to be replaced, that are not kept already."""
        row = self._clients.row[ids]
        new = (row > 0) & (row < self._used)
        if self._place is not None:
            new &= self._place[ids] < 0
        if not bool(new.any()):
            return
        if not bool(new.all()):
            ids, states = ids[new], type(states)(*(v[new.to(v.device)] for v in states))
        if self._place is None:
            self._place = torch.full((self.n,), -1, device="cpu")
        self._place[ids] = torch.arange(self._count, self._count + len(ids), device="cpu")
        self._kept.append(states)
        self._count += len(ids)

    def fits(self, n: int, initial: State) -> bool:
        """Return whether these are states of n clients, like `initial`."""
        return self.n == n and same_kind(self._clients.initial, initial)

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
        row = self._clients.row
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
