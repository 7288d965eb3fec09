"""Threads and memory of this machine: a thread pool, because torch releases the GIL inside its operations.

Which pieces there are, and the order in which their results are taken, do not depend on the number of threads, and
each piece is computed by one thread of torch: the same bits on any number of cores.
"""

from __future__ import annotations

import ctypes
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

LARGE = 16 << 20  # bytes of a block above which glibc needs mallopt; below it adapts when a block is freed
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h

_limit: int | None = None


def limit(count: int | None) -> None:
    """Set how many threads this process uses by default; None for one per core."""
    global _limit
    _limit = None if count is None else checked(count)


def current_limit() -> int | None:
    """Return the number last given to `limit`."""
    return _limit


def default() -> int:
    """Return the default number of threads: that of `limit`, else OMP_NUM_THREADS, else one per usable core."""
    return machine() if _limit is None else _limit


def machine() -> int:
    """Return OMP_NUM_THREADS, else the number of cores that this process may use."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    return int(said) if said.isdecimal() and int(said) > 0 else cores()


def share(processes: int) -> int:
    """Return the default number of threads of each of several processes: one per core in all."""
    return _limit or max(1, machine() // processes)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def checked(count: int) -> int:
    if count < 1:
        raise InputError(f"threads is {count}; it must be at least 1")
    return count


class ThreadPool:
    """Threads that compute pieces of work. They start when there is more than one piece, and end with the pool.

    concurrent: whether several threads may work; if not, the caller's does, with as many threads of torch as it has.
    """

    def __init__(self, threads: int | None = None, *, concurrent: bool = True) -> None:
        self.threads, self._concurrent = default() if threads is None else checked(threads), concurrent
        self._pool: ThreadPoolExecutor | None = None

    @contextmanager
    def map_in_order(self, work: Callable[[Piece], Value], pieces: Sequence[Piece]) -> Iterator[Iterator[Value]]:
        """Iterate over work(piece), in the pieces' order, in a `with` block; any thread may do the work.

        >>> with ThreadPool(2).map_in_order(abs, [-1, 2, -3]) as results:
        ...     list(results)
        [1, 2, 3]
        """
        waiting = deque[Future[Value]]()

        def results(pool: ThreadPoolExecutor, graded: bool) -> Iterator[Value]:
            for piece in pieces:
                waiting.append(pool.submit(_with_grad_mode, graded, work, piece))
                if len(waiting) > 2 * self.threads:  # results that wait take memory
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

        with one_thread() if self._concurrent else nullcontext():
            if min(self.threads, len(pieces)) < 2 or not self._concurrent:
                yield map(work, pieces)
                return
            try:
                yield results(self._started(), torch.is_grad_enabled())
            finally:  # after an error or Ctrl-C nothing of this call continues
                for future in waiting:
                    future.cancel()
                wait(waiting)

    def end(self, wait: bool = False) -> None:
        """Let the threads end, and wait for that if asked to; a later call starts others."""
        if self._pool is not None:
            self._pool.shutdown(wait=wait)
            self._pool = None

    def __enter__(self) -> ThreadPool:
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


def _with_grad_mode(graded: bool, work: Callable[[Piece], Value], piece: Piece) -> Value:
    """Compute a piece with the caller's grad mode, which torch keeps per thread."""
    with torch.set_grad_enabled(graded):
        return work(piece)


def reuse_freed_memory(size: int) -> None:
    """Let glibc keep freed blocks of `size` bytes, whose pages stay mapped for the next step.

    Where these are large, all up to 1 GB are kept until the process ends.
    """
    torch.empty(31 << 20, dtype=torch.uint8, device="cpu")  # freed immediately: raises the thresholds, to 32 MB at most
    if size > LARGE and sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
        if mallopt is not None:
            mallopt(M_MMAP_THRESHOLD, 1 << 30)
            mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
