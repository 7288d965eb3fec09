"""Files that are whole or not there, and folders that one run has for itself."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fednmap.names import InputError

LOCK = ".lock"


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
    finally:
        part.unlink(missing_ok=True)


def to_disk(path: Path) -> None:
    """What was written to the file survives a power failure."""
    descriptor = os.open(path, os.O_RDWR)  # a file opened for reading alone cannot be synchronised everywhere
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """The folder for this process alone; the system takes the lock back however the process ends."""
    with clear_errors(path):
        descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if not _lock(descriptor):
            raise InputError(f"{path} is in use by another run; wait for it to end, or choose another folder")
        yield
    finally:
        os.close(descriptor)


def in_use(path: Path) -> bool:
    """Whether a run is writing to the folder now."""
    try:
        descriptor = os.open(path / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _lock(descriptor, shared=True)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, shared: bool = False) -> bool:
    """Whether the lock was free; a file system that knows no locks says yes."""
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def to_json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def from_json(path: Path, kind: type[Any]) -> Any:
    """What the file holds, if it is JSON of that kind."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise InputError(f"{path} was changed or cut short: it is no JSON") from None
    if not isinstance(value, kind):
        raise InputError(f"{path} was changed: it holds no {'list' if kind is list else 'object'}")
    return value
