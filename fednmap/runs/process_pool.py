"""Ctrl-C, and one pool of processes: for `--jobs`, for the pilots of `tune` and for the trials of the paper's figures.

The number of processes does not change the bits of a run. Only the process that owns the pool prints.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, Protocol

import torch

from fednmap.names import InputError
from fednmap.simulation import threads
from fednmap.simulation.distributed import WorkerLost

POLL = 0.1  # seconds between looks at messages and at whether the user wants to stop
PARENT = 0.3  # seconds between looks at whether the parent is there

Send = Callable[[Any], None]
Work = Callable[[Any, Send], Any]
"""work(job, send): the result of a job; `send` passes a message to the owner of the pool."""


class Interrupted(Exception):
    """The user asked to stop; the state is saved."""


class StopFlag(Protocol):
    """Whether the user wants to stop: an event, of threads or of processes."""

    def is_set(self) -> bool: ...


def how_many(jobs: int | None, runs: int) -> int:
    """Return the number of processes: `jobs`, by default one per core; never more than there are runs."""
    if jobs is not None and jobs < 1:
        raise InputError(f"jobs is {jobs}; --jobs must be at least 1")
    return max(1, min(runs, threads.machine() if jobs is None else jobs))


class ProcessPool(AbstractContextManager["ProcessPool"]):
    """`count` processes that do `work` on jobs, each with its share of the threads.

    spawn: begin the processes as new interpreters, which `work` is pickled for. Default: forks, which have `work` as it
           is now; make the pool before this process has threads. Where a system cannot fork, they are spawned.
    """

    def __init__(self, work: Work, count: int, *, spawn: bool = False) -> None:
        context = multiprocessing.get_context("fork" if sys.platform == "linux" and not spawn else "spawn")
        self.count = count
        self._stop, self._messages = _SharedFlag(context), context.SimpleQueue()
        self._others = multiprocessing.active_children()
        given = (work, self._messages, self._stop, threads.share(count), os.getpid())
        self._executor = ProcessPoolExecutor(count, context, _begin, given)
        self._executor.submit(int)  # forks begin with the first job
        self._processes = self._begun()

    def run(
        self, jobs: Sequence[Any], on_message: Callable[[int, Any], None] | None = None, stop: StopFlag | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Run the jobs and yield the number and the result of each as it ends.

        If a job fails or `stop` is set, no job begins any more and those that run save their state. Then the failure
        is raised, or Interrupted; WorkerLost if a process was killed.
        """
        self._stop.clear()
        pending: dict[Future[Any], int] = {self._executor.submit(_do, k, job): k for k, job in enumerate(jobs)}
        self._processes = self._begun()
        failure: BaseException | None = None
        while pending:
            done, _ = wait(pending, timeout=POLL, return_when=FIRST_COMPLETED)
            while not self._messages.empty():
                message = self._messages.get()
                if on_message is not None:
                    on_message(*message)
            for future in done:
                k, error = pending.pop(future), future.exception()
                if error is None:
                    yield k, future.result()
                elif isinstance(error, BrokenProcessPool):  # a process was killed, and the executor ended the others
                    self._executor.shutdown()
                    ended = sorted(self._processes, key=lambda process: process.exitcode == -signal.SIGTERM)
                    raise WorkerLost(lost_process(ended[0])) from None
                elif failure is None or isinstance(failure, Interrupted):
                    failure = error
            if failure is not None or (stop is not None and stop.is_set()):
                self._stop.set()
        if failure is not None:
            raise failure

    def _begun(self) -> list[BaseProcess]:
        return [process for process in multiprocessing.active_children() if process not in self._others]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            for process in self._processes:
                process.terminate()
        self._executor.shutdown(cancel_futures=True)


def process_pool(work: Work, count: int) -> AbstractContextManager[ProcessPool | None]:
    """Return a pool of forks; None in its place if one job runs at a time."""
    return ProcessPool(work, count) if count > 1 else nullcontext()


def parallel_map(function: Callable[[Any], Any], jobs: Sequence[Any], count: int) -> list[Any]:
    """Return [function(job) for job in jobs], computed in `count` forks; in this process where a system has none."""
    if count < 2 or sys.platform != "linux":
        return [function(job) for job in jobs]
    with ProcessPool(lambda job, _: function(job), count) as pool:  # forks need not pickle it
        found = dict(pool.run(jobs))
    return [found[k] for k in range(len(jobs))]


class _SharedFlag:
    """An event between processes without a lock, which a process that is killed could keep."""

    def __init__(self, context: Any) -> None:
        self._value = context.RawValue("b", 0)

    def is_set(self) -> bool:
        return bool(self._value.value)

    def set(self) -> None:
        self._value.value = 1

    def clear(self) -> None:
        self._value.value = 0


_work: Work
_messages: Any
_stop: _SharedFlag | None = None
"""Set in a process of a pool, whose owner receives the signals."""


@contextmanager
def interrupts() -> Iterator[StopFlag]:
    """Yield a flag that Ctrl-C and termination set, so that every round is completed; a second Ctrl-C kills."""
    flag = threading.Event()
    if _stop is not None or threading.current_thread() is not threading.main_thread():
        yield _stop or flag
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if flag.is_set():
            raise KeyboardInterrupt
        flag.set()

    old = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _begin(work: Work, messages: Any, stop: _SharedFlag, each: int, parent: int) -> None:
    """Set up a process of the pool."""
    global _work, _messages, _stop
    _work, _messages, _stop = work, messages, stop
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it, and sets the stop flag
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    warnings.simplefilter("ignore", UserWarning)  # the parent prints it
    torch.set_num_threads(1)
    threads.limit(each)


def _do(k: int, job: Any) -> Any:
    assert _stop is not None  # by `_begin`
    if _stop.is_set():
        raise Interrupted
    try:
        return _work(job, lambda message: _messages.put((k, message)))
    except Exception:
        _stop.set()  # here, because the next job may begin before the owner knows
        raise


def lost_process(process: BaseProcess) -> str:
    """Describe how a process has ended."""
    code = process.exitcode or 0
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    return f"process {process.pid} {how}"


def end_with(parent: int) -> None:
    """End this process when its parent has ended, even if it was killed or this process waits."""
    if sys.platform == "linux":  # also where a long computation does not let the thread below run
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()
