"""A torch module whose parameters are views of one flat vector."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor, nn

from fednmap.problems.folded import Folded


class Here(threading.local):
    """The module in this thread: others have copies of it, since its parameters are replaced while it is used."""

    def __init__(self, module: nn.Module) -> None:
        self._given, self.module = module, copy.deepcopy(module)
        self.parameters = dict(self.module.named_parameters())
        self.leaves = [p for p in self.parameters.values() if p.requires_grad]
        self.folded = Folded.of(module)
        ends = list(accumulate((p.numel() for p in self.leaves), initial=0))
        self._views = [(p, p.shape, _strides(p.shape), end) for p, end in zip(self.leaves, ends, strict=False)]

    def become(self, x: Tensor, frozen: Mapping[str, Tensor]) -> None:
        """The module's own parameters become views of x, which costs nothing but for kernels that must be turned."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        first = x.storage_offset()
        for p, shape, strides, at in self._views:
            if strides is None:
                p.data = channels_last(x[at : at + p.numel()].view(shape))
            else:
                p.data = x.as_strided(shape, strides, first + at)
        for name, v in frozen.items():
            self.parameters[name].data = channels_last(v.to(x.dtype))

    def __reduce__(self) -> tuple[type[Here], tuple[nn.Module]]:
        return Here, (self._given,)  # parameters that are views of x would each be written with all of x


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
