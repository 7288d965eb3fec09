"""A lock on a file: one process at a time, taken back by the system however that process ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fednmap.names import InputError


def hold(path: Path, what: str) -> Callable[[], None]:
    """Lock the file, made if need be; the function that lets go. Refused if `what` is in use by another run."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    if not _take(descriptor):
        os.close(descriptor)
        raise InputError(f"{what} is in use by another run; wait for it to end, or choose another folder")
    still_open = [descriptor]
    return lambda: os.close(still_open.pop()) if still_open else None


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Yield the file is this block's alone, among all that ask in this way; it waits until it is."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _take(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Return whether another run holds the lock now."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _take(descriptor, shared=True)
    finally:
        os.close(descriptor)


def _take(descriptor: int, shared: bool = False, wait: bool = False) -> bool:
    """Whether the lock was free; a file system that knows no locks says yes."""
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
