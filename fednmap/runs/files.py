"""Files that are whole or not there, and folders that one run has for itself."""

from __future__ import annotations

import hashlib
import json
import math
import os
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fednmap.names import InputError
from fednmap.simulation import lock

LOCK = ".lock"
TURN = ".turn"
"""Held by the one of several processes of a run that writes to its folder."""


class FolderError(OSError):
    """A folder cannot be written."""


@contextmanager
def clear_errors(path: Path) -> Iterator[None]:
    """What the system says about writing to `path`, in one line with what to do."""
    try:
        yield
    except FolderError:
        raise
    except OSError as error:
        raise FolderError(
            f"cannot write to {path}: {error.strerror or error}; what was saved before is intact, "
            "make room or choose another folder"
        ) from error


def write_atomically(path: Path, data: bytes) -> None:
    """All of `data` under that name, or what was there before."""
    with replacing(path) as part:
        part.write_bytes(data)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write; it takes the place of `path` when the block ends well."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        to_disk(part)
        part.replace(path)
        _names_to_disk(path.parent)
    finally:
        part.unlink(missing_ok=True)


def to_disk(path: Path) -> None:
    """What was written to the file survives a power failure."""
    descriptor = os.open(path, os.O_RDWR)  # a file opened for reading alone cannot be synchronised everywhere
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _names_to_disk(folder: Path) -> None:
    """The names of the folder's files survive it too."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems cannot synchronise folders
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """The folder for this process alone; the system takes the lock back however the process ends."""
    with clear_errors(path):
        release = lock.hold(path / LOCK, f"{path}")
    try:
        yield
    finally:
        release()


def in_use(path: Path) -> bool:
    """Whether a run is writing to the folder now."""
    return lock.is_held(path / LOCK)


def to_json(value: Any) -> bytes:
    """The contents of a JSON file."""
    return (json_text(value) + "\n").encode()


def json_text(value: Any) -> str:
    """Strict JSON: what is not finite, such as psi outside a constraint, becomes null."""
    return json.dumps(finite(value), indent=1, allow_nan=False)


def finite(value: Any) -> Any:
    """The value as JSON knows it: None in the place of each number that is not finite."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def from_json(path: Path, kind: type[Any]) -> Any:
    """What the file holds, if it is JSON of that kind."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise InputError(f"{path} was changed or cut short: it is not JSON") from None
    if not isinstance(value, kind):
        raise InputError(f"{path} was changed: it does not hold {'a list' if kind is list else 'an object'}")
    return value


def from_toml(path: Path) -> dict[str, Any]:
    """What the file holds, if it is TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise InputError(f"{path} was changed or cut short: it is not valid TOML") from None


def digest(value: Any) -> str:
    """SHA-256 of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def sealed(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts as JSON keeps them, and their digest, which `unsealed` checks."""
    facts = finite(facts)
    return facts | {"check": digest(facts)}


def unsealed(facts: dict[str, Any]) -> dict[str, Any] | None:
    """The facts without their digest, or None if it does not fit; where there is none, nothing is checked."""
    bare = {name: value for name, value in facts.items() if name != "check"}
    return bare if facts.get("check", digest(bare)) == digest(bare) else None
