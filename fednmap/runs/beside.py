"""Independent runs side by side, each in a process of its own, to the same bits as one after another.

The processes wait for jobs. What they measure goes straight to the run folder, one writer at a time; what they have to
tell goes to the process that gave the job, which alone talks to the user.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fednmap.names import InputError
from fednmap.runs.configuration import Config
from fednmap.runs.folder import Job
from fednmap.runs.keeping import Beginning, Interrupted, Reporter
from fednmap.simulation import Record, threads
from fednmap.simulation.distributed import WorkerLost

LOOK = 0.1  # seconds between looks at whether the user wants to stop
PARENT = 0.3  # seconds between looks at whether the parent is there


class Order(NamedTuple):
    """What a process must know of its job."""

    job: Job
    config: Config
    folder: Path
    measured: bool
    beside: int
    """How many jobs share the machine."""


Work = Callable[[Order, Reporter, Any], dict[str, Any]]
"""Does what is ordered, tells the reporter, looks at an event whether to stop; the closing numbers."""

Going = Callable[[int], Any]
"""Work that goes on to where it is asked to, and says how it stands."""


def check_jobs(jobs: int | None) -> None:
    if jobs is not None and jobs < 1:
        raise InputError(f"jobs is {jobs}; at least one run must go on")


def how_many(asked: int | None, runs: int) -> int:
    """As many as were asked for, else one per core; never more than there are runs."""
    check_jobs(asked)
    return max(1, min(runs, threads.machine() if asked is None else asked))


class Hands:
    """Processes that take jobs."""

    def __init__(self, context: Any, work: Work, count: int, each: int) -> None:
        self._stop = context.Event()
        self._free: list[tuple[BaseProcess, Connection]] = []
        for _ in range(count):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(work, there, here, self._stop, each, os.getpid()), daemon=True
            )
            process.start()
            there.close()
            self._free.append((process, here))
        self._all, self.count = list(self._free), count

    def run(
        self, orders: Sequence[Order], reporter: Reporter, asked: threading.Event
    ) -> list[tuple[Job, dict[str, Any]]]:
        """The closing numbers of each job, in the order in which they ended. What the user stops is saved first."""
        todo, busy, found, failed = deque(orders), dict[Connection, _Errand](), [], list[BaseException]()
        self._stop.clear()
        while busy or (todo and not failed and not asked.is_set()):
            while todo and self._free and not failed and not asked.is_set():
                process, pipe = self._free.pop()
                busy[pipe] = _Errand(process, todo.popleft(), reporter.twin())
                pipe.send(busy[pipe].order)
            ready = wait(list(busy), timeout=LOOK)
            for pipe in [pipe for pipe in busy if pipe in ready]:
                errand = busy[pipe]
                kind, what = _heard(pipe, errand.process)
                if errand.told(kind, what):
                    continue
                del busy[pipe]
                if kind == "lost":
                    failed.append(WorkerLost(what))
                    continue
                self._free.append((errand.process, pipe))
                if kind == "done":
                    found.append((errand.order.job, what))
                elif kind == "failed":
                    failed.append(what)
            if failed or asked.is_set():
                self._stop.set()
        if failed:
            raise failed[0]
        if len(found) < len(orders):
            raise Interrupted
        return found

    def end(self) -> None:
        for process, pipe in self._all:
            pipe.close()
            process.terminate()
            process.join()


class _Errand(NamedTuple):
    process: BaseProcess
    order: Order
    reporter: Reporter

    def told(self, kind: str, what: Any) -> bool:
        """Whether it was news for the reporter."""
        if kind == "begin":
            self.reporter.begin(what)
        elif kind == "record":
            self.reporter.on_record(what)
        elif kind == "end":
            self.reporter.end(what)
        elif kind == "tell":
            self.reporter.tell(what)
        else:
            return False
        return True


@contextmanager
def hands(work: Work, count: int) -> Iterator[Hands | None]:
    """`count` processes to take jobs, each with its share of the threads; None where one job goes on at a time.

    They are begun before anything here has threads, and know what this process knows; where a system cannot do that
    they begin anew.
    """
    if count < 2:
        yield None
        return
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    made = Hands(context, work, count, threads.share(count))
    try:
        yield made
    finally:
        made.end()


@contextmanager
def side_by_side(works: Sequence[Going], count: int) -> Iterator[Callable[[Sequence[int], int], list[Any]]]:
    """ask(which, argument): what these pieces of work answer, in their order; each always in the same process.

    They are `count` forks, which have the works as they are now; where a system has none, all is done here.
    """
    if count < 2 or sys.platform != "linux":
        yield lambda which, argument: [works[k](argument) for k in which]
        return
    context, hosts = multiprocessing.get_context("fork"), list[tuple[BaseProcess, Connection]]()
    each = threads.share(count)
    try:
        for _ in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_host, args=(works, there, here, each, os.getpid()), daemon=True)
            process.start()
            there.close()
            hosts.append((process, here))

        def ask(which: Sequence[int], argument: int) -> list[Any]:
            for k in which:
                hosts[k % count][1].send((k, argument))
            found = dict[int, Any]()
            for k in which:  # a process answers in the order in which it was asked
                process, pipe = hosts[k % count]
                kind, what = _heard(pipe, process)
                if kind == "lost":
                    raise WorkerLost(what)
                if kind == "failed":
                    raise what
                found[k] = what
            return [found[k] for k in which]

        yield ask
    finally:
        for host, pipe in hosts:
            pipe.close()
            host.terminate()
            host.join()


def _host(works: Sequence[Going], pipe: Connection, other: Connection, each: int, parent: int) -> None:
    """Do what is asked for until nobody asks."""
    other.close()
    _settle_in(each, parent)
    try:
        while True:
            k, argument = pipe.recv()
            try:
                pipe.send(("done", works[k](argument)))
            except Exception as error:
                pipe.send(("failed", ExceptionWithTraceback(error, error.__traceback__)))
    except (EOFError, OSError):  # the parent is gone
        os._exit(1)


def _heard(pipe: Connection, process: BaseProcess) -> tuple[str, Any]:
    try:
        return pipe.recv()  # type: ignore[no-any-return]
    except (EOFError, OSError):
        process.join()
        code = process.exitcode or 0
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
        return "lost", f"process {process.pid} {how}"


def _serve(work: Work, pipe: Connection, other: Connection, stop: Any, each: int, parent: int) -> None:
    """Take jobs until there is nobody who gives any."""
    other.close()
    _settle_in(each, parent)
    try:
        while True:
            order: Order = pipe.recv()
            try:
                pipe.send(("done", work(order, _Relay(pipe), stop)))
            except Interrupted:
                pipe.send(("stopped", None))
            except Exception as error:
                pipe.send(("failed", ExceptionWithTraceback(error, error.__traceback__)))
    except (EOFError, OSError):  # the parent is gone
        os._exit(1)


def _settle_in(each: int, parent: int) -> None:
    """A process that works for its parent."""
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and says when to stop
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    warnings.simplefilter("ignore", UserWarning)  # the parent tells the user
    torch.set_num_threads(1)
    threads.limit(each)


class _Relay(Reporter):
    """Tells the parent."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def begin(self, what: Beginning) -> None:
        self._pipe.send(("begin", what))

    def on_record(self, record: Record) -> None:
        self._pipe.send(("record", record))

    def end(self, result: dict[str, Any] | None) -> None:
        self._pipe.send(("end", result))

    def tell(self, line: str) -> None:
        self._pipe.send(("tell", line))


def end_with(parent: int) -> None:
    """End this process when its parent has ended, however that came about and whatever this one waits for."""

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()
