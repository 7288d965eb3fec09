"""The clients' states between rounds, kept only for clients that have taken part; each round's are a value."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fednmap.core import State
from fednmap.names import InputError
from fednmap.simulation import distributed


class Clients:
    """States of n clients: `clients[ids]` stacks them, `clients[ids] = states` replaces them.

    Row 0 of every table is the initial state, which is what all clients without a row of their own have.

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
        self._snapshots: list[weakref.ref[Snapshot]] = []
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._owner.write_text(self._token)
        self._tables: list[Tensor] = [self._table(k, v.unsqueeze(0), 1) for k, v in enumerate(initial)]

    def __len__(self) -> int:
        """How many clients have a state of their own."""
        return self._used - 1

    def __getitem__(self, ids: Tensor) -> State:
        rows = self._row[ids].reshape(-1)
        near = _range(rows.numpy())
        copies = (
            table[near].clone() if isinstance(near, slice) else table.index_select(0, rows.to(table.device))
            for table in self._tables
        )
        return self._make(*(v.reshape((*ids.shape, *v.shape[1:])).to(self._device) for v in copies))

    def view(self, ids: Tensor, rows: Tensor | slice | None = None) -> State:
        """As `clients[ids]`, but without a copy where rows are neighbours: valid until `replace`."""
        rows = self.rows(ids) if rows is None else rows
        return self._make(*(table[rows].to(self._device) for table in self._tables))

    def rows(self, ids: Tensor) -> Tensor | slice:
        """Where the states of these clients are, until others are admitted."""
        return _range(self._row.numpy()[ids.numpy()])

    def __setitem__(self, ids: Tensor, states: State) -> None:
        self.admit(ids)
        self.replace(ids, states)

    def admit(self, ids: Tensor) -> None:
        """Every client among these gets a row of its own, as all of them are about to be replaced."""
        if not self._tables:
            return
        self._version += 1
        self._save(ids)
        if self._used > self.n:  # everybody has one
            return
        new = ids[self._row[ids] == 0]
        if len(new):
            self._reserve(self._used + len(new))
            for table in self._tables:
                table[self._used : self._used + len(new)] = table[0]
            self._row[new] = torch.arange(self._used, self._used + len(new), device="cpu")
            self._used += len(new)

    def replace(self, ids: Tensor, states: State, rows: Tensor | slice | None = None) -> None:
        """New states of clients that were admitted; different clients may be replaced in several threads at once."""
        rows = self.rows(ids) if rows is None else rows
        for table, values in zip(self._tables, self.without_aliases(states), strict=True):
            table[rows] = values.to(table.device)

    def without_aliases(self, tensors: State) -> State:
        """The same values, copied where they share memory with the tables, as old states lent by `view` do."""
        places = [(table.data_ptr(), table.data_ptr() + table.nbytes) for table in self._tables]
        return type(tensors)(
            *(v.clone() if any(low <= v.data_ptr() < high for low, high in places) else v for v in tensors)
        )

    @property
    def replaced(self) -> bool:
        """Whether the folder holds the tables of a later run by now."""
        return self._folder is not None and self._owner.read_text() != self._token

    @property
    def _owner(self) -> Path:
        assert self._folder is not None
        return self._folder / f"owner-{distributed.rank()}"

    def snapshot(self) -> Snapshot:
        """The states as they are now, whatever comes later."""
        taken = Snapshot(self, self._version, self._used)
        self._snapshots.append(weakref.ref(taken))
        return taken

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """What `Snapshot.tensors` gave; in a process group every process has all, until a simulation takes its own."""
        if len(tensors["ids"]):
            self[tensors["ids"]] = self._make(*(tensors[name] for name in self._make._fields))

    def _save(self, ids: Tensor) -> None:
        """What is about to be replaced goes to the snapshots that somebody still holds."""
        held = [taken for ref in self._snapshots if (taken := ref()) is not None]
        self._snapshots = [weakref.ref(taken) for taken in held]
        if held and self._folder is None:
            states = self[ids]
            for taken in held:
                taken.save(ids, states)
            self._snapshots = [weakref.ref(taken) for taken in held if not taken.complete]

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
            path = self._folder / f"{self._make._fields[k]}-{distributed.rank()}.bin"
            table = torch.from_file(str(path), shared=True, size=prod(shape), dtype=have.dtype, device="cpu").view(
                shape
            )
            if size > 1:  # a larger view of the same file: what it held is where it was
                return table
        table[: len(have)] = have.to(table.device)
        return table


class Snapshot:
    """The clients' states after one round. They stay what they are while the simulation goes on.

    Nothing is copied as long as nothing is replaced; what is replaced later is saved here first, if anybody still holds
    this object. States on disk are not saved: there only the newest snapshot can be read.
    """

    def __init__(self, clients: Clients, version: int, used: int) -> None:
        self.n = clients.n
        self._clients, self._version, self._used = clients, version, used
        self._is_saved: Tensor | None = None
        self._saved: list[tuple[Tensor, State]] = []

    def __len__(self) -> int:
        """How many clients have a state of their own."""
        return self._used - 1

    def fits(self, n: int, initial: State) -> bool:
        """Whether these are states of n clients, like `initial`."""
        mine = self._clients._make(*(table[0] for table in self._clients._tables))
        return self.n == n and alike(mine, initial)

    def __getitem__(self, ids: Tensor) -> State:
        self._check()
        now = self._clients[ids]
        if self._is_saved is None or not bool(self._is_saved[ids].any()):
            return now
        flat = ids.reshape(-1)
        stacked = [v.reshape(len(flat), *v.shape[ids.ndim :]).clone() for v in now]
        place = torch.full((self.n,), -1, device="cpu")
        for saved, states in self._saved:
            place[saved] = torch.arange(len(saved), device="cpu")
            rows = place[flat]
            for into, values in zip(stacked, states, strict=True):
                into[rows >= 0] = values[rows[rows >= 0]]
            place[saved] = -1
        return type(now)(*(v.reshape(old.shape) for v, old in zip(stacked, now, strict=True)))

    @property
    def complete(self) -> bool:
        """Whether every client's state is saved here: nothing that comes later matters."""
        return self._is_saved is not None and bool(self._is_saved.all())

    def save(self, ids: Tensor, states: State) -> None:
        """The states of these clients, which are about to be replaced."""
        if self._is_saved is None and len(ids) == self.n:  # all at once
            self._saved.append((ids, states))
            self._is_saved = torch.ones(self.n, dtype=torch.bool, device="cpu")
            return
        if self._is_saved is None:
            self._is_saved = torch.zeros(self.n, dtype=torch.bool, device="cpu")
        new = ~self._is_saved[ids]
        if bool(new.all()):
            self._saved.append((ids, states))
        elif bool(new.any()):
            self._saved.append((ids[new], type(states)(*(v[new] for v in states))))
        self._is_saved[ids] = True

    def tensors(self) -> dict[str, Tensor]:
        """Everything there is, for a checkpoint; `Clients.restore` is the way back.

        In a process group all processes call this together, and process 0 gets the states of all.
        """
        taken = self._taken()
        named = {"ids": taken, **self[taken]._asdict()}
        return {name: distributed.gather(v) for name, v in named.items()}

    def thaw(self, initial: State, folder: Path | None, mine: Callable[[Tensor], Tensor]) -> Clients:
        """States of their own to go on from: the tables themselves where these are on disk, else a copy.

        mine: which of some clients this process keeps.
        """
        self._check()
        if self._clients._folder is not None:
            if folder is None or folder.resolve() != self._clients._folder.resolve():
                raise InputError(f"the clients' states are in {self._clients._folder}; go on with store= that folder")
            return self._clients
        clients, ids = Clients(self.n, initial, folder), self._taken()
        ids = ids[mine(ids)]
        if len(ids):
            ids = ids[self._clients._row[ids].argsort()]  # neighbours stay neighbours
            clients[ids] = self[ids]
        return clients

    def _taken(self) -> Tensor:
        """The clients that had a state of their own."""
        row = self._clients._row
        return ((row > 0) & (row < self._used)).nonzero().squeeze(1)

    def _check(self) -> None:
        clients = self._clients
        if clients._folder is not None and (self._version != clients._version or clients.replaced):
            raise InputError(
                f"the clients' states in {clients._folder} have moved on since this round; states on disk keep "
                "the newest round only: go on from the last one, or leave store= out"
            )


def alike(state: State, like: State) -> bool:
    """Whether two states are of one kind, with tensors of the same shapes and types."""
    return type(state) is type(like) and all(
        v.shape == due.shape and v.dtype == due.dtype for v, due in zip(state, like, strict=True)
    )


def _range(numbers: npt.NDArray[np.int64]) -> Tensor | slice:
    """Neighbouring rows as a slice: a view instead of a copy."""
    k = len(numbers)
    if k and numbers[-1] - numbers[0] == k - 1 and bool((numbers[1:] > numbers[:-1]).all()):
        return slice(int(numbers[0]), int(numbers[0]) + k)
    return torch.from_numpy(numbers)
