"""Threads over pieces of work: torch lets go of the interpreter inside its operations.

Which pieces there are, and the order in which their results are taken, do not depend on the number of threads, and
each piece is computed by one thread of torch: the same bits on any number of cores.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from threading import Barrier
from typing import TypeVar

import torch

from fednmap.names import InputError

Piece = TypeVar("Piece")
Value = TypeVar("Value")

_asked: int | None = None


def limit(count: int | None) -> None:
    """How many threads this process takes where a call does not say; None for one per core."""
    global _asked
    _asked = None if count is None else checked(count)


def asked() -> int | None:
    """What `limit` was told last."""
    return _asked


def default() -> int:
    """As many as `limit` says, else as OMP_NUM_THREADS says, else one per core that this process may use."""
    return machine() if _asked is None else _asked


def machine() -> int:
    """What there is to share: as OMP_NUM_THREADS says, else the cores that this process may use."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    return int(said) if said.isdecimal() and int(said) > 0 else cores()


def share(processes: int) -> int:
    """How many threads each of several processes takes, where nobody said: all of them together one per core."""
    return _asked or max(1, machine() // processes)


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def checked(count: int) -> int:
    if count < 1:
        raise InputError(f"threads is {count}; it must be at least 1")
    return count


class Crew:
    """Some threads that share pieces of work. They start when there is more than one piece, and end with the crew.

    concurrent: whether several threads may work; if not, this one does, with as many threads of torch as it has.
    """

    def __init__(self, threads: int | None = None, *, concurrent: bool = True) -> None:
        self.threads, self._concurrent = default() if threads is None else checked(threads), concurrent
        self._pool: ThreadPoolExecutor | None = None

    def share(self, pieces: Sequence[Piece], work: Callable[[Piece], Value], take: Callable[[Value], object]) -> None:
        """take(work(piece)) for every piece: `work` in any thread, `take` in this one and in the pieces' order."""
        with one_thread() if self._concurrent else nullcontext():
            if min(self.threads, len(pieces)) < 2 or not self._concurrent:
                for piece in pieces:
                    take(work(piece))
                return
            pool, waiting, graded = self._started(), deque[Future[Value]](), torch.is_grad_enabled()
            try:
                for piece in pieces:
                    waiting.append(pool.submit(_as_here, graded, work, piece))
                    if len(waiting) > 2 * self.threads:  # results that wait take memory
                        take(waiting.popleft().result())
                while waiting:
                    take(waiting.popleft().result())
            finally:  # after an error or Ctrl-C nothing of this call goes on
                for future in waiting:
                    future.cancel()
                wait(waiting)

    def end(self, wait: bool = False) -> None:
        """The threads go, at once if this is to wait for it; a later call starts others."""
        if self._pool is not None:
            self._pool.shutdown(wait=wait)
            self._pool = None

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(wait=True)

    def _started(self) -> ThreadPoolExecutor:
        """The pool, every thread of it with its own setting of torch; that of other threads, old or new, stays."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads, "fednmap", torch.set_num_threads, (1,))
            meeting = Barrier(self.threads)
            wait([self._pool.submit(meeting.wait) for _ in range(self.threads)])
        return self._pool


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch uses one thread in this block; afterwards as many as before, here and in threads that start later."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _as_here(graded: bool, work: Callable[[Piece], Value], piece: Piece) -> Value:
    """Whether torch records gradients is a thread's own affair; a piece is computed as its caller would."""
    with torch.set_grad_enabled(graded):
        return work(piece)
