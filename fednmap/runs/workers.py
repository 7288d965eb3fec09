"""Several processes for one command: `--workers 2` on one machine, torchrun between machines.

Process 0 runs the command as if it were alone. The others wait for the job that it broadcasts, compute their own
clients (`fednmap.simulation.client_groups`), and write nothing.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessContext, start_processes

from fednmap.names import InputError
from fednmap.runs.execution import run_as_worker
from fednmap.runs.process_pool import Interrupted, end_with, lost_process
from fednmap.simulation import distributed

LOOK = 0.3  # seconds between looks at the other processes


@contextmanager
def group(workers: int) -> Iterator[None]:
    """Run the block as process 0 of a group: with `workers` - 1 new processes, or with those of torchrun."""
    check_workers(workers)
    if under_torchrun():
        _take_device(int(os.environ.get("LOCAL_RANK", "0")))
        _join("env://", 0, int(os.environ["WORLD_SIZE"]))
        yield
        _dismiss()
    elif workers == 1:
        yield
    else:
        with tempfile.TemporaryDirectory() as folder:
            meeting = f"file://{Path(folder) / 'meeting'}"
            # all of them are on this machine: nobody else can reach them
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            arguments = (meeting, workers, os.getpid())
            others = start_processes(_work, arguments, workers - 1, join=False, start_method="spawn")
            try:
                _take_device(0)
                _meet(others, meeting, workers)
                yield
                _dismiss()
            except distributed.WorkerLost:
                for process in others.processes:
                    process.join(timeout=1)
                gone = (f"worker {lost_process(process)}" for process in others.processes if process.exitcode)
                raise distributed.WorkerLost(next(gone, "a worker process was lost")) from None
            finally:
                for process in others.processes:
                    process.terminate()
                    process.join()


def check_workers(workers: int, clients: int | None = None) -> None:
    """Refuse a number of processes that makes no sense, or one that leaves some without a client."""
    if workers < 1:
        raise InputError(f"workers is {workers}; at least one process must do the work")
    if under_torchrun() and workers > 1:
        raise InputError("torchrun has started the processes already; leave --workers out")
    processes = int(os.environ["WORLD_SIZE"]) if under_torchrun() else workers
    if clients is not None and processes > clients:
        raise InputError(f"{processes} processes cannot share {clients} clients; use {clients} or fewer")


def under_torchrun() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def run_as_torchrun_worker() -> bool:
    """Work for process 0 if torchrun started this process as another rank; return whether it did."""
    if not under_torchrun() or os.environ["RANK"] == "0":
        return False
    _work(int(os.environ["RANK"]) - 1, "env://", int(os.environ["WORLD_SIZE"]), os.getppid())
    return True


def _work(index: int, meeting: str, workers: int, parent: int) -> None:
    """Work for process 0; this one has the rank index + 1."""
    rank = index + 1
    _take_device(int(os.environ.get("LOCAL_RANK", "0")) if under_torchrun() else rank)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # process 0 handles it, and sets the stop flag
    end_with(parent)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UserWarning)  # process 0 prints it
    _join(meeting, rank, workers)
    try:
        run_as_worker()
    except (Interrupted, distributed.WorkerLost):
        return  # process 0 prints it
    dist.destroy_process_group()


def _take_device(rank: int) -> None:
    """`cuda` means another GPU in each process of a machine, as far as there are enough."""
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())


def _meet(others: ProcessContext, meeting: str, workers: int) -> None:
    """Join the group as process 0, unless one of the others ends before it has come."""
    failed: list[BaseException] = []

    def join() -> None:
        try:
            _join(meeting, 0, workers)
        except BaseException as error:
            failed.append(error)

    # torch waits without a time limit: in a thread, which is abandoned if one of the processes has ended
    joining = threading.Thread(target=join, daemon=True)
    joining.start()
    while joining.is_alive():
        joining.join(LOOK)
        if joining.is_alive() and any(process.exitcode is not None for process in others.processes):
            raise distributed.WorkerLost
    if failed:
        raise failed[0]


def _join(meeting: str, rank: int, workers: int) -> None:
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=workers)


def _dismiss() -> None:
    distributed.broadcast(lambda: None)
    dist.destroy_process_group()
