"""Files that are complete or absent, and folders that one run has for itself."""

from __future__ import annotations

import hashlib
import json
import math
import os
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fednmap.names import InputError
from fednmap.simulation import lock

LOCK = ".lock"


class FolderError(OSError):
    """A folder cannot be written."""


@contextmanager
def clear_errors(path: Path) -> Iterator[None]:
    """Raise what the system says about writing to `path` as a FolderError of one line, with what to do."""
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
    """Write a file that holds all of `data`, or after a crash what it held before."""
    with replacing(path) as part:
        part.write_bytes(data)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a file to write, which replaces `path` when the block ends without an error."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with clear_errors(path.parent):
        try:
            yield part
            to_disk(part)
            part.replace(path)
            if os.name == "posix":
                with suppress(OSError):  # some network file systems cannot synchronise folders
                    to_disk(path.parent, os.O_RDONLY)
        finally:
            part.unlink(missing_ok=True)


def to_disk(path: Path, mode: int = os.O_RDWR) -> None:
    """Synchronise a file, or the names in a folder, so that it survives a power failure."""
    descriptor = os.open(path, mode)  # a file opened for reading alone cannot be synchronised everywhere
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the folder's lock; the system releases it however the process ends."""
    with clear_errors(path):
        release = lock.hold(path / LOCK, f"{path}")
    try:
        yield
    finally:
        release()


def to_json(value: Any) -> bytes:
    """Return the contents of a JSON file."""
    return (json_text(value) + "\n").encode()


def json_text(value: Any) -> str:
    """Return strict JSON: a number that is not finite, such as psi outside a constraint, becomes null."""
    return json.dumps(finite(value), indent=1, allow_nan=False)


def finite(value: Any) -> Any:
    """Return the value as JSON holds it, with None for each number that is not finite."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def from_json(path: Path, kind: type[Any]) -> Any:
    """Read a JSON file that holds a value of this kind, `dict` or `list`."""
    value = _read(path, json.loads, "JSON")
    if not isinstance(value, kind):
        raise InputError(f"{path} was changed: it does not hold {'a list' if kind is list else 'an object'}")
    return value


def from_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file."""
    return dict(_read(path, tomllib.loads, "valid TOML"))


def _read(path: Path, parse: Callable[[str], Any], what: str) -> Any:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise InputError(f"{path} was changed or cut short: it is not {what}") from None


def digest(value: Any) -> str:
    """Return the SHA-256 of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file; "" if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def add_checksum(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts as JSON keeps them, with their digest under `check`; `verified` is the way back."""
    facts = finite(facts)
    return facts | {"check": digest(facts)}


def verified(facts: dict[str, Any]) -> dict[str, Any] | None:
    """Return the facts without their digest, None if it does not fit; where there is none, nothing is checked."""
    bare = {name: value for name, value in facts.items() if name != "check"}
    return bare if facts.get("check", digest(bare)) == digest(bare) else None
