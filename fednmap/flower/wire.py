"""Messages between server and clients: NamedTuples of tensors as named arrays, never pickled, checked on arrival."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from torch import Tensor

from fednmap.core import State
from fednmap.names import InputError

HEADER = 1024  # numpy's own header of an array is far below this


def pack(message: State) -> ArrayRecord:
    """A NamedTuple of tensors as named arrays."""
    return ArrayRecord({name: Array(v.detach().cpu().numpy().copy()) for name, v in message._asdict().items()})


def unpack(record: Any, like: State) -> State:
    """The NamedTuple in `record`, refused unless it has the names, shapes and types of `like` and is finite."""
    if not isinstance(record, ArrayRecord):
        raise InputError("expected arrays, got something else")
    if sorted(record) != sorted(like._fields):
        given = ", ".join(map(repr, record))[:100] or "nothing"
        raise InputError(f"arrays named {given}, expected {', '.join(like._fields)}")
    return type(like)(*(_tensor(name, record[name], v) for name, v in like._asdict().items()))


def _tensor(name: str, array: Array, like: Tensor) -> Tensor:
    due = like.detach().cpu().numpy()
    if tuple(array.shape) != due.shape or array.dtype != str(due.dtype):
        raise InputError(f"{name} is {array.dtype} {tuple(array.shape)}, expected {due.dtype} {due.shape}")
    if len(array.data) > due.nbytes + HEADER:  # before anything is decoded
        raise InputError(f"{name} has {len(array.data)} bytes, expected {due.nbytes}")
    try:
        values = array.numpy()
    except Exception as error:  # whatever a stranger's bytes provoke
        raise InputError(f"{name} cannot be decoded ({type(error).__name__})") from None
    if values.shape != due.shape or values.dtype != due.dtype:
        raise InputError(f"{name} decodes to {values.dtype} {values.shape}, expected {due.dtype} {due.shape}")
    if not np.isfinite(values).all():
        raise InputError(f"{name} holds NaN or infinity")
    return torch.from_numpy(np.array(values)).to(like.device)


def digest(message: State) -> str:
    """SHA-256 of a message's numbers, by which two machines compare them."""
    return hashlib.sha256(b"".join(v.detach().cpu().numpy().tobytes() for v in message)).hexdigest()


def items(content: RecordDict) -> Iterator[dict[str, Any]]:
    """Every value in a message: its name, kind, shape and bytes."""
    for part, record in content.items():
        for name, value in record.items():
            called = f"{part}.{name}"
            if isinstance(record, ArrayRecord):
                array: Any = value
                yield {"name": called, "kind": array.dtype, "shape": list(array.shape), "bytes": len(array.data)}
            else:
                many = value if isinstance(value, list) else [value]
                size = sum(len(v) if isinstance(v, str | bytes) else 8 for v in many)
                kind = type(many[0]).__name__ if many else "nothing"
                shape = [len(value)] if isinstance(value, list) else []
                words = {"value": value} if part == "refused" else {}  # what was refused is what was sent
                yield {"name": called, "kind": kind, "shape": shape, "bytes": size, **words}


def wire_bytes(content: RecordDict) -> int:
    """Size of a message's content: names and values, arrays as they are serialised; without Flower's envelope."""
    return sum(len(item["name"]) + int(item["bytes"]) for item in items(content))
