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


class Clients:
    """States of n clients: `clients[ids]` returns them stacked, `clients[ids] = states` replaces them.

    States are rows of tables, which are in blocks: nothing is copied when they grow. Row 0 is the initial state, which
    is what all clients without a row have. Rows are overwritten. The one rule that keeps a `Snapshot` a
    value: what is overwritten is given to the snapshots that somebody still holds, unless it is the initial state.

    folder: where the tables are kept as memory-mapped files; the system writes out what does not fit into memory.
            Whoever made such tables last there owns them.
    """

    def __init__(self, n: int, initial: State, folder: Path | None = None) -> None:
        self.n = n
        self.initial: State = type(initial)(*(v.detach().clone() for v in initial))
        self._make, self._folder = type(initial), folder
        self.row = torch.zeros(n, dtype=torch.int64, device="cpu")
        """Of each client."""
        self.used = 1
        self._version = 0
        self._token = secrets.token_hex(8)
        self._snapshots: weakref.WeakSet[Snapshot] = weakref.WeakSet()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._owner.write_text(self._token)
        self._length = max(1, min(n + 1, BLOCK_BYTES // max([1, *(v.nbytes for v in initial)])))
        """Rows of a block."""
        self._blocks = [self._block(0)]
        for table, value in zip(self._blocks[0], initial, strict=True):
            table[0] = value

    def __len__(self) -> int:
        """How many clients have another state than the first one."""
        return self.used - 1

    def __getitem__(self, ids: Tensor) -> State:
        return self.read(ids)

    def read(self, ids: Tensor, used: int | None = None) -> State:
        """Return the states of these clients, stacked; they must not be changed in place.

        used: as they were when so many rows were in use, but for rows that were overwritten since.
        """
        rows = self.row[ids.reshape(-1)]
        if used is not None:
            rows = torch.where(rows < used, rows, 0)
        if not rows.any():
            found = [v.expand(len(rows), *v.shape) for v in self.initial]
        elif len(self._blocks) == 1:
            found = [table.index_select(0, rows.to(table.device)) for table in self._blocks[0]]
        else:
            blocks = [(self._blocks[row // self._length], row % self._length) for row in rows.tolist()]
            found = [torch.stack([tables[k][row] for tables, row in blocks]) for k in range(len(self.initial))]
        pairs = zip(found, self.initial, strict=True)
        return self._make(*(v.to(like.device).reshape((*ids.shape, *like.shape)) for v, like in pairs))

    def __setitem__(self, ids: Tensor, states: State) -> None:
        self.replace(ids, self[ids], states)

    def replace(self, ids: Tensor, old: State, new: State) -> None:
        """Overwrite the states of these clients; `old` is `clients[ids]`."""
        if not self.initial or not len(ids):
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
        while len(self._blocks) * self._length < end:
            self._blocks.append(self._block(len(self._blocks)))
        for k, values in enumerate(new):
            values = values.expand(len(ids), *self.initial[k].shape)
            if len(self._blocks) == 1:
                table = self._blocks[0][k]
                table.index_copy_(0, rows.to(table.device), values.to(table.device, table.dtype))
                continue
            for row, value in zip(rows.tolist(), values, strict=True):
                self._blocks[row // self._length][k][row % self._length] = value

    def _block(self, k: int) -> list[Tensor]:
        """A block of each table; it takes no room before it is written."""
        shapes = [(self._length, *v.shape) for v in self.initial]
        if self._folder is None:
            return [v.new_empty(shape) for v, shape in zip(self.initial, shapes, strict=True)]
        files = [str(self._folder / f"{name}-{distributed.rank()}.{k}.bin") for name in self._make._fields]
        each = zip(files, self.initial, shapes, strict=True)
        made = (torch.from_file(f, shared=True, size=prod(s), dtype=v.dtype, device="cpu").view(s) for f, v, s in each)
        return list(made)

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
        """How many clients have another state than the first one."""
        return self._used - 1

    def __getitem__(self, ids: Tensor) -> State:
        self._check()
        states = self._clients.read(ids, self._used)
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
        """The clients whose state was not the first one."""
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
