"""Messages between server and clients: NamedTuples of tensors as named arrays, never pickled, checked on arrival."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
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
    """SHA-256 of a message's numbers, to tell whether two machines have the same."""
    return hashlib.sha256(b"".join(v.detach().cpu().numpy().tobytes() for v in message)).hexdigest()


def wire_bytes(message: Message) -> int:
    """Size of the message as Flower sends it: its arrays, records and metadata, serialised."""
    return sum(len(part.deflate()) for part in get_all_nested_objects(message).values())
