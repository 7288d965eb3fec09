"""Memory that is written over again and again, for what never leaves the function that asked for it."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from math import prod

from torch import Tensor


class Space(threading.local):
    """Named pieces of memory, each thread's its own; a name has one piece, as large as it was ever asked for.

    >>> import torch
    >>> space = Space()
    >>> first = space("a", (2, 3), torch.zeros(()))
    >>> space("a", (3, 1), torch.zeros(())).data_ptr() == first.data_ptr()
    True
    """

    def __init__(self) -> None:
        self._flat: dict[Hashable, Tensor] = {}
        self._shaped: dict[Hashable, dict[tuple[int, ...], Tensor]] = {}

    def __call__(self, name: Hashable, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Room for a tensor of this shape, with the dtype and device of `like`; what it holds is anything."""
        found = self._shaped.get(name, {}).get(shape)
        if found is not None and found.dtype == like.dtype and found.device == like.device:
            return found
        flat = self._flat.get(name)
        if flat is None or flat.dtype != like.dtype or flat.device != like.device or flat.numel() < prod(shape):
            flat = self._flat[name] = like.new_empty(prod(shape))
            self._shaped[name] = {}
        found = self._shaped[name][shape] = flat[: prod(shape)].view(shape)
        return found

    def __reduce__(self) -> tuple[type[Space], tuple[()]]:
        return Space, ()  # a copy begins with none
