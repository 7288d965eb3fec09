"""The process group of a simulation, and its collective operations.

Without a process group of torch.distributed there is one process, and every function here costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
Text = TypeVar("Text", bound=str)


class WorkerLost(ConnectionError):
    """Another process of the group has ended."""

    def __init__(self, cause: str = "a worker process was lost") -> None:
        super().__init__(cause)


def size() -> int:
    """Return the number of processes in the group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process; rank 0 writes and prints."""
    return dist.get_rank() if size() > 1 else 0


def all_sum(parts: Sequence[Tensor]) -> list[Tensor]:
    """Return the sum over all processes, of each tensor: one all-reduce."""
    if size() == 1:
        return list(parts)
    joined = torch.cat([v.reshape(-1) for v in parts])
    _talk(lambda: dist.all_reduce(joined))
    return [v.reshape(part.shape) for v, part in zip(joined.split([p.numel() for p in parts]), parts, strict=True)]


def share(pieces: int, of: int | None = None) -> range:
    """Return the pieces of work, out of so many, that fall to a process; to this one unless said otherwise."""
    process, processes = rank() if of is None else of, size()
    return range(process * pieces // processes, (process + 1) * pieces // processes)


def all_gather(parts: Sequence[Sequence[Tensor]], like: Sequence[Tensor], most: int) -> list[list[list[Tensor]]]:
    """What every process has, by process: at most `most` parts, each some tensors like `like`. Those that are missing
    at the end come as anything."""
    sizes = [v.numel() for v in like]
    joined = like[0].new_empty(most, sum(sizes))
    for row, part in zip(joined, parts, strict=False):
        torch.cat([v.reshape(-1) for v in part], out=row)
    found = [torch.empty_like(joined) for _ in range(size())]
    _talk(lambda: dist.all_gather(found, joined))
    return [
        [[v.view(one.shape) for v, one in zip(row.split(sizes), like, strict=True)] for row in rows] for rows in found
    ]


def any_process(flag: bool) -> bool:
    """Return whether it holds in any process."""
    return bool(all_sum([torch.tensor(float(flag), device="cpu")])[0] > 0)


def first(text: Text | None) -> Text | None:
    """Return the text of the first process that has one, in every process."""
    if size() == 1 or not any_process(bool(text)):
        return text
    found: list[Text | None] = [None] * size()
    _talk(lambda: dist.all_gather_object(found, text))
    return next(filter(None, found))


def broadcast(make: Callable[[], T]) -> T:
    """Return what process 0 makes, in every process."""
    box = [make() if rank() == 0 else None]
    if size() > 1:
        _talk(lambda: dist.broadcast_object_list(box, src=0))
    return box[0]  # type: ignore[return-value]


def gather(rows: Tensor) -> Tensor:
    """Return the rows of all processes, one after another, in process 0; elsewhere this process's own."""
    if size() == 1:
        return rows
    counts: list[int] = [0] * size()
    _talk(lambda: dist.all_gather_object(counts, len(rows)))
    if rank() > 0:
        if len(rows):
            _talk(lambda: dist.send(rows.contiguous(), 0))
        return rows
    parts = [rows, *(rows.new_empty(count, *rows.shape[1:]) for count in counts[1:])]
    for source, part in enumerate(parts):
        if source > 0 and len(part):
            _talk(lambda part=part, source=source: dist.recv(part, source))  # type: ignore[misc]
    return torch.cat(parts)


def swap(out: Mapping[int, Tensor], into: Mapping[int, Tensor]) -> None:
    """Send each process its rows and fill `into` with theirs, by point-to-point sends; empty ones do not travel."""
    sends = [(rows.contiguous(), other) for other, rows in out.items() if len(rows)]
    waits = [(rows, other) for other, rows in into.items() if len(rows)]

    def call() -> None:
        pending = [dist.irecv(rows, other) for rows, other in waits]
        pending += [dist.isend(rows, other) for rows, other in sends]
        for one in pending:
            if one is not None:
                one.wait()

    _talk(call)


def _talk(call: Callable[[], object]) -> None:
    try:
        call()
    except RuntimeError as error:  # gloo's word for a connection that is gone
        raise WorkerLost from error
