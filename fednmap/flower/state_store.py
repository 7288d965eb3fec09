"""A client's state on its own disk, one file for each round it has computed; and what it has answered in secure sums.

The server decides which of the files is the client's state: its next message names the round of this client that was
counted last. What was computed since is only pending, so a reply that got lost leaves no trace.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from fednmap.core import State
from fednmap.flower.settings import client_name
from fednmap.names import InputError
from fednmap.runs.atomic_files import from_json, replacing, to_json, write_atomically
from fednmap.simulation import lock

TICKET = re.compile(r"[0-9]{8}-[0-9a-f]{8}")
RUN = re.compile(r"[0-9a-f]{16}")
KEEP = 2  # a server whose last checkpoint is damaged falls back to the one before, and asks for an older state
LATE = 8  # messages come late and out of order: rounds after the current one of which the states are kept

ANSWERED = 64  # marks of what was answered that are kept; only the newest ticket matters
UNMASKED = 8  # rounds of which it is known who was in the sum; a server falls back by a few at most

SECRET = 32  # bytes

SENT = "received."  # stands before the names of what the server sent


class Answers:
    """What a client has answered in secure sums, on its disk; one process at a time looks and enters."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def once(self, ticket: object, what: str) -> None:
        """Refuse a second time, even from a process that began before the first one ended."""
        with lock.exclusive(self.folder / "lock"):
            mark = self.folder / f"{_checked(ticket)}.{what}"
            if mark.exists():
                raise InputError(f"{what} of {ticket} was answered before; wait for the next round")
            mark.touch()
            marks = sorted(self.folder.glob("*-*.*"), key=lambda path: path.stat().st_mtime_ns)
            for old in marks[:-ANSWERED]:
                old.unlink()

    def settle(self, run: object, kind: str, t: int, what: list[Any], otherwise: str) -> None:
        """As the function of that name, in the client's own file of this run and kind."""
        with lock.exclusive(self.folder / "lock"):
            settle(self.folder / f"{_run(run)}.{kind}.json", t, what, otherwise)


def settled(file: Path, t: int) -> list[Any]:
    """What is settled for round t; nothing where nothing is."""
    return list(_rounds(file).get(str(t), []))


def settle(file: Path, t: int, what: list[Any], otherwise: str) -> None:
    """Enter what the first attempt at round t settles, and stays so, such as who is in its sum.

    Refuse something else, or a round too long ago to know: the file holds the last few.
    """
    known = _rounds(file)
    before = known.get(str(t))
    if before is None and len(known) == UNMASKED and t < min(map(int, known)):
        raise InputError(f"secagg: round {t} was summed long ago; begin a new run")
    if before is not None and before != what:
        raise InputError(f"secagg: round {t} {otherwise.format(', '.join(map(str, before)))}")
    newest = sorted((known | {str(t): what}).items(), key=lambda entry: int(entry[0]))[-UNMASKED:]
    write_atomically(file, to_json(dict(newest)))


def _rounds(file: Path) -> dict[str, list[Any]]:
    return dict(from_json(file, dict)) if file.exists() else {}


def _run(run: object) -> str:
    if not isinstance(run, str) or not RUN.fullmatch(run):
        raise InputError(f"the run is called {run!r:.40}; expected 16 hexadecimal digits")
    return run


def _checked(ticket: object) -> str:
    if not isinstance(ticket, str) or not TICKET.fullmatch(ticket):
        raise InputError(f"the ticket is {ticket!r:.40}; expected 8 digits, '-' and 8 hexadecimal digits")
    return ticket


def round_of(ticket: str) -> int:
    """The round of a ticket, or of the file named after it; -1 of none."""
    return int(ticket[:8]) if ticket else -1


class Store:
    """The states of client `client` in run `run`, in folder root/run/client.

    A ticket names one attempt at one round: eight digits of the round and eight random hexadecimal digits.
    """

    def __init__(self, root: Path, run: object, client: str) -> None:
        self.folder = root / _run(run) / client_name(client)
        self.folder.mkdir(parents=True, exist_ok=True)

    def secret(self) -> int:
        """A number that nobody else knows, for this client's noise: the same in all rounds of the run."""
        path = self.folder / "secret"
        if not path.exists():
            with replacing(path) as part:
                part.touch(0o600)  # nobody else's before there is anything in it
                part.write_bytes(os.urandom(SECRET))
        return int.from_bytes(path.read_bytes(), "big")

    def current(self, counted: object, initial: State) -> State:
        """The state after the round that was counted last, "" for none."""
        if counted == "":
            self._clear(-1)
            return initial
        tensors = self._read(counted)
        self._clear(round_of(str(counted)))
        return type(initial)(**{name: tensors[name].to(v) for name, v in initial._asdict().items()})

    def received(self, counted: object, like: State) -> State:
        """What the server had sent in that round, if it was kept."""
        tensors, names = self._read(counted), [SENT + name for name in like._fields]
        if not set(names) <= tensors.keys():
            raise RuntimeError(f"what was received in round {counted} is not in {self.folder}; send it again")
        return type(like)(*(tensors[name].to(v) for name, v in zip(names, like, strict=True)))

    def keep(self, ticket: object, state: State, received: State | None = None) -> None:
        """The state that will be current if the reply of this ticket is counted; and what was received for it."""
        sent = {} if received is None else {SENT + name: v for name, v in received._asdict().items()}
        data = save({name: v.detach().cpu().clone() for name, v in (state._asdict() | sent).items()})
        write_atomically(self._path(ticket), hashlib.sha256(data).hexdigest().encode() + b"\n" + data)

    def _read(self, counted: object) -> dict[str, Tensor]:
        path = self._path(counted)
        digest, _, data = (path.read_bytes() if path.exists() else b"").partition(b"\n")
        if hashlib.sha256(data).hexdigest().encode() != digest:
            raise RuntimeError(
                f"the state after round {counted} is not intact in {self.folder}: "
                "bring that folder back from a backup, or begin a new run"
            )
        return load(data)

    def _clear(self, t: int) -> None:
        """Keep all attempts at the current round t, at few before it, and at the nearest and the last after it.

        The names of attempts at one round have no order. The last may be of a trajectory that the server gave up.
        """
        files = list(self.folder.glob("*.state"))
        rounds = sorted({round_of(file.name) for file in files})
        before, after = [r for r in rounds if r < t], [r for r in rounds if r > t]
        kept = {t, *before[-KEEP:], *after[:LATE], *after[-LATE:]}
        for old in files:
            if round_of(old.name) not in kept:
                old.unlink()

    def _path(self, ticket: object) -> Path:
        return self.folder / f"{_checked(ticket)}.state"
