"""A torch module whose parameters are views of one flat vector."""

from __future__ import annotations

import copy
import threading
from itertools import accumulate

import torch
from torch import Tensor, nn

from fednmap.problems.folded import Folded

HALF = (torch.float16, torch.bfloat16)
"""Precisions in which a module may compute, but which are too coarse for x and for sums."""


class Here(threading.local):
    """The module in this thread: others have copies of it, since its parameters are replaced while it is used.

    The numbers of frozen parameters are shared by all threads.
    """

    def __init__(self, module: nn.Module) -> None:
        shared = {id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in module.parameters()}
        self._given, self.module = module, copy.deepcopy(module, shared)  # with the same numbers
        self.leaves = [p for p in self.module.parameters() if p.requires_grad]
        self.folded = Folded.of(module)
        ends = list(accumulate((p.numel() for p in self.leaves), initial=0))
        self._views = [
            (p, p.shape, _strides(p.shape), end, p.dtype if p.dtype in HALF else None)
            for p, end in zip(self.leaves, ends, strict=False)
        ]
        self._fixed = [(v, v.detach()) for v in fixed(self.module).values()]
        self._dtype: torch.dtype | None = None

    def become(self, x: Tensor) -> None:
        """The module's own parameters become views of x, which costs nothing but for kernels that must be turned."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        first = x.storage_offset()
        for p, shape, strides, at, half in self._views:
            if half is not None:
                p.data = channels_last(x[at : at + p.numel()].view(shape).to(half))
            elif strides is None:
                p.data = channels_last(x[at : at + p.numel()].view(shape))
            else:
                p.data = x.as_strided(shape, strides, first + at)
        if self._dtype != x.dtype:
            for v, given in self._fixed:
                v.data = channels_last(given.to(used_dtype(given, x)))
            self._dtype = x.dtype

    def __reduce__(self) -> tuple[type[Here], tuple[nn.Module]]:
        return Here, (self._given,)  # parameters that are views of x would each be written with all of x


def fixed(module: nn.Module) -> dict[str, Tensor]:
    """The real numbers that a module has besides what is trained: frozen parameters, and buffers."""
    frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
    return {name: v for name, v in (frozen | dict(module.named_buffers())).items() if v.is_floating_point()}


def used_dtype(v: Tensor, x: Tensor) -> torch.dtype:
    """The precision in which a module's tensor is used at x: half precision stays, another one becomes that of x."""
    return v.dtype if v.dtype in HALF else x.dtype


def places(module: nn.Module) -> dict[str, str]:
    """Every place of a parameter in the module, and the name it has in `named_parameters()`.

    A layer that is used twice has one place: torch's own way to find them takes it for two, and does not restore it.
    """
    names = {id(p): name for name, p in module.named_parameters()}
    return {
        f"{path}.{leaf}" if path else leaf: names[id(p)]
        for path, layer in module.named_modules()
        for leaf, p in layer.named_parameters(recurse=False, remove_duplicate=False)
    }


def channels_last(v: Tensor) -> Tensor:
    """Pictures and kernels in the layout in which convolutions are fastest on a CPU."""
    if v.ndim != 4:
        return v
    strides = _strides(v.shape) if v.is_contiguous() else None
    return v.to(memory_format=torch.channels_last) if strides is None else v.as_strided(v.shape, strides)


def _strides(shape: torch.Size) -> tuple[int, ...] | None:
    """Those in which numbers that lie one after another have the layout of `channels_last`; None if they cannot."""
    if len(shape) != 4:
        return torch.empty(shape, device="meta").stride()
    _, channels, height, width = shape
    if channels == 1 or height == width == 1:
        return channels * height * width, 1, width * channels, channels
    return None
