"""A client's state on its own disk, one file for each round it has computed.

The server decides which of them is the client's state: its next message names the round of this client that was
counted last. What was computed since is only pending, so a reply that got lost leaves no trace.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fednmap.core import State
from fednmap.flower.settings import client_name
from fednmap.names import InputError
from fednmap.runs.files import from_json, replacing, to_json, write_atomically

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
        """Refuse a second time, also from a process that began before the first one ended."""
        with _exclusive(self.folder):
            mark = self.folder / f"{_checked(ticket)}.{what}"
            if mark.exists():
                raise InputError(f"{what} of {ticket} was answered before; wait for the next round")
            mark.touch()
            marks = sorted(self.folder.glob("*-*.*"), key=lambda path: path.stat().st_mtime_ns)
            for old in marks[:-ANSWERED]:
                old.unlink()

    def unmask(self, run: object, kind: str, t: int, survivors: list[int]) -> None:
        """Refuse a second sum of round t over other clients: the difference of the two would tell of single ones."""
        words = "has been unmasked for the clients {}; a sum over others would tell single vectors"
        self._settle(run, kind, t, survivors, words)

    def vector(self, run: object, t: int, digest: str) -> None:
        """Refuse a second vector of round t, whose noise is drawn once: the difference of the two has none."""
        self._settle(run, "vectors", t, [digest], "was answered with another vector under the same noise")

    def _settle(self, run: object, kind: str, t: int, what: list[Any], otherwise: str) -> None:
        with _exclusive(self.folder):
            Settled(self.folder / f"{_run(run)}.{kind}.json").settle(t, what, otherwise)


class Settled:
    """What is settled for a round by the first attempt at it, and stays so; of the last few rounds, in a file.

    Such as who is in its sum, from the beginning of the unmasking on: the server then asks the same clients again, and
    a client refuses others.
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    def of(self, t: int) -> list[Any]:
        """Of round t; nothing where nothing is settled."""
        return self._read().get(str(t), [])

    def settle(self, t: int, what: list[Any], otherwise: str) -> None:
        """Enter it, or refuse: something else is settled, or the round is too long ago to know."""
        known = self._read()
        before = known.get(str(t))
        if before is None and len(known) == UNMASKED and t < min(map(int, known)):
            raise InputError(f"secagg: round {t} was summed long ago; begin a new run")
        if before is not None and before != what:
            raise InputError(f"secagg: round {t} {otherwise.format(', '.join(map(str, before)))}")
        if before is None:
            newest = sorted([*known, str(t)], key=int)[-UNMASKED:]
            write_atomically(self.file, to_json({k: (known | {str(t): what})[k] for k in newest}))

    def _read(self) -> dict[str, list[Any]]:
        return dict(from_json(self.file, dict)) if self.file.exists() else {}


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(run: object) -> str:
    if not isinstance(run, str) or not RUN.fullmatch(run):
        raise InputError(f"the run is called {run!r:.40}; expected 16 hexadecimal digits")
    return run


def _checked(ticket: object) -> str:
    if not isinstance(ticket, str) or not TICKET.fullmatch(ticket):
        raise InputError(f"the ticket is {ticket!r:.40}; expected 8 digits, '-' and 8 hexadecimal digits")
    return ticket


def _round(name: str) -> int:
    """Of a ticket, or of the file named after it; -1 of none."""
    return int(name[:8]) if name else -1


class Store:
    """The states of client `client` in run `run`, in folder root/run/client.

    A ticket names one attempt at one round: eight digits of the round and eight random hexadecimal digits.
    """

    def __init__(self, root: Path, run: object, client: str) -> None:
        self.folder = root / _run(run) / client_name(client)
        self.folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time: an old node of the same name may not have noticed that it was replaced."""
        with _exclusive(self.folder):
            yield

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
            self._clear("")
            return initial
        path, tensors = self._read(counted)
        self._clear(path.name)
        return type(initial)(**{name: tensors[name].to(v) for name, v in initial._asdict().items()})

    def received(self, counted: object, like: State) -> State:
        """What the server had sent in that round, if it was kept."""
        _, tensors = self._read(counted)
        names = [SENT + name for name in like._fields]
        if not set(names) <= tensors.keys():
            raise RuntimeError(f"what was received in round {counted} is not in {self.folder}; send it again")
        return type(like)(*(tensors[name].to(v) for name, v in zip(names, like, strict=True)))

    def _read(self, counted: object) -> tuple[Path, dict[str, Tensor]]:
        path = self._path(counted)
        try:
            digest, data = path.read_bytes().split(b"\n", 1)
        except (FileNotFoundError, ValueError):
            digest, data = b"", b""
        if not data or hashlib.sha256(data).hexdigest().encode() != digest:
            raise RuntimeError(
                f"the state after round {counted} is not intact in {self.folder}: "
                "bring that folder back from a backup, or begin a new run"
            )
        try:
            return path, load(data)
        except SafetensorError as error:
            raise RuntimeError(f"the state in {path} cannot be read: {error}") from None

    def keep(self, ticket: object, state: State, received: State | None = None) -> None:
        """The state that will be current if the reply of this ticket is counted; and what was received for it."""
        sent = {} if received is None else {SENT + name: v for name, v in received._asdict().items()}
        data = save({name: v.detach().cpu().clone() for name, v in (state._asdict() | sent).items()})
        write_atomically(self._path(ticket), hashlib.sha256(data).hexdigest().encode() + b"\n" + data)

    def _clear(self, current: str) -> None:
        """Keep all attempts at the current round, at few before it, and at the nearest and the last after it.

        The names of attempts at one round have no order. The last may be of a trajectory that the server gave up.
        """
        files = list(self.folder.glob("*.state"))
        t, rounds = _round(current), sorted({_round(f.name) for f in files})
        before, after = [r for r in rounds if r < t], [r for r in rounds if r > t]
        kept = {t, *before[-KEEP:], *after[:LATE], *after[-LATE:]}
        for old in files:
            if _round(old.name) not in kept:
                old.unlink()

    def _path(self, ticket: object) -> Path:
        return self.folder / f"{_checked(ticket)}.state"
