"""A convolution network at the parameters of several clients at once: the clients are folded into the channels.

The pictures of k clients, (k, B, C, H, W), become one batch (B, k C, H, W), one client's channels after another's. What
treats each channel by itself takes it as it is: nonlinearities, pooling, means over the picture, sums with the input.
The other layers, with the parameters of all clients, are

    linear layers, 1 x 1 convolutions    k products in one call
    convolutions of few channels         k products with the patches of the pictures in one call
    depthwise convolutions, batch norm   the same layer with k C channels
    group norm of G groups               the same layer with k G groups

so that k clients cost few calls more than one: gradients of MobileNetV3-Small with 8 pictures take 8 ms per client for
5 clients and 7 for 10, in place of 14. A module with other layers, and one that mixes its channels in a forward pass of
its own, is not folded.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold

from fednmap.problems.finite_sum import Weight
from fednmap.problems.probe import hooked

SIDE_BY_SIDE = 5
"""Clients whose vectors a method has at once: those of more are often too large for an allocator to keep."""
MOST = 10
"""Clients that are folded, where there are so many: with more the numbers between layers leave the cache."""
FEW_ROWS = 16
"""Samples per client, at most, with which so many are folded, and not half."""
ROWS = 128
"""Samples per client, at most, that are computed folded; for more, calls are no longer what a client costs."""
FEW = 64
"""Numbers in a patch, at most, of a convolution that is computed as a product."""

CHANNEL_BY_CHANNEL = (
    nn.AdaptiveAvgPool2d,
    nn.AvgPool2d,
    nn.ELU,
    nn.Flatten,
    nn.GELU,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Identity,
    nn.LeakyReLU,
    nn.MaxPool2d,
    nn.ReLU,
    nn.ReLU6,
    nn.Sigmoid,
    nn.SiLU,
    nn.Tanh,
)
"""Layers without parameters that may be met."""


class Folded:
    """A copy of a module, to be computed at k vectors of parameters."""

    def __init__(self, module: nn.Module) -> None:
        self._module = copy.deepcopy(module)
        self._places: list[tuple[nn.Module, str]] = []
        for parent in list(self._module.modules()):
            for name, layer in list(parent.named_children()):
                if not list(layer.children()):
                    setattr(parent, name, _folded(layer))
        for layer in self._module.modules():
            self._places += [(layer, name) for name in _taken(layer)]

    @classmethod
    def of(cls, module: nn.Module) -> Folded | None:
        """None where a layer cannot be folded, has hooks, is met twice, or has parameters that are shared or stay."""
        leaves = [v for _, v in module.named_modules(remove_duplicate=False) if not list(v.children())]
        own = [p for layer in leaves for p in layer.parameters()]
        alone = len(own) == len(list(module.parameters())) and len(set(leaves)) == len(leaves)
        moving = all(p.requires_grad for p in own) and not any(map(hooked, module.modules()))
        return cls(module) if module not in leaves and alone and moving and all(map(_known, leaves)) else None

    def outputs(self, parameters: Sequence[Tensor], inputs: Tensor, shape: Sequence[int]) -> Tensor:
        """Outputs (k, B, *shape) of the inputs (k, B, C, H, W) at parameters that are (k, ...) each."""
        for (layer, name), value in zip(self._places, parameters, strict=True):
            layer.__dict__[name] = value
        out: Tensor = self._module(inputs.transpose(0, 1).flatten(1, 2))
        return out.reshape(len(out), len(inputs), *shape).transpose(0, 1)


def side_by_side(rows: int) -> int:
    """How many clients with so many samples each are folded."""
    return MOST if rows <= FEW_ROWS else MOST // 2


def by_few(x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> Iterator[tuple[Tensor, Tensor, Tensor, Weight]]:
    """As many clients at once as are folded."""
    k = side_by_side(a.shape[1])
    parts = (v.split(k) for v in (x.expand(len(a), -1), a, b))
    return zip(*parts, weight.split(k) if isinstance(weight, Tensor) else repeat(weight), strict=False)


def alike(batches: Iterable[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Batches that follow each other and are of one length, a few at once."""
    for rows, group in groupby(batches, key=lambda batch: len(batch[0])):
        while some := list(islice(group, side_by_side(rows))):
            a, b, weight = map(torch.stack, zip(*some, strict=True))
            yield a, b, weight


def _known(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Conv2d):
        plain = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        replaced = type(layer) is nn.Conv2d and (
            _is_product(layer) or (layer.groups == 1 and layer.weight[0].numel() <= FEW)
        )
        return plain and (_is_depthwise(layer) or replaced)
    if isinstance(layer, nn.Linear):
        return type(layer) is nn.Linear  # another class may have a forward pass of its own
    if isinstance(layer, nn.BatchNorm2d):
        return layer.running_mean is None
    if isinstance(layer, nn.Flatten):
        return layer.start_dim == 1 and layer.end_dim == -1
    return isinstance(layer, (nn.GroupNorm, *CHANNEL_BY_CHANNEL))


def _is_depthwise(layer: nn.Conv2d) -> bool:
    return layer.groups == layer.in_channels == layer.out_channels > 1


def _is_product(layer: nn.Conv2d) -> bool:
    ones = (*layer.kernel_size, *layer.stride, layer.groups)
    return all(v == 1 for v in ones) and not any(layer.padding)


def _folded(layer: nn.Module) -> nn.Module:
    if isinstance(layer, nn.Linear):
        return _Products(layer)
    if isinstance(layer, nn.Conv2d) and not _is_depthwise(layer):
        return _Products(layer) if _is_product(layer) else _Patches(layer)
    return _Wider(layer) if isinstance(layer, nn.Conv2d | nn.BatchNorm2d | nn.GroupNorm) else layer


def _taken(layer: nn.Module) -> list[str]:
    """The names under which a layer takes its parameters, in the order in which modules have them."""
    return layer.parameters_taken if isinstance(layer, _Folded) else []


class _Folded(nn.Module):
    """Instead of a layer: `weight` and `bias` are put here before every call, (k, ...)."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.parameters_taken = [name for name, p in layer.named_parameters() if p is not None]
        self.bias = None


class _Products(_Folded):
    """A linear layer, or a 1 x 1 convolution: one on the channels of every point of the picture."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.movedim(1, -1)
        out = self._products(rows.unflatten(-1, (len(self.weight), -1)).flatten(0, -3))
        return out.view(*rows.shape[:-1], -1).movedim(-1, 1)

    def _products(self, rows: Tensor) -> Tensor:
        """(N, k, C) to (N, k, outputs)."""
        out: Tensor = _Product.apply(rows, self.weight.flatten(2))  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias


class _Product(torch.autograd.Function):
    """rows (N, k, C) times weights (k, outputs, C), client by client; what is computed lies as it is needed next."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return _by_client(rows, weight.mT)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, Tensor]:
        if torch.is_grad_enabled():  # asked for a graph of this
            raise NotImplementedError("products of folded clients have no second derivatives")
        rows, weight = ctx.saved_tensors
        onward = _by_client(slope, weight) if ctx.needs_input_grad[0] else None
        return onward, torch.bmm(slope.permute(1, 2, 0), rows.transpose(0, 1))


def _by_client(rows: Tensor, weight: Tensor) -> Tensor:
    """(N, k, C) times (k, C, outputs)."""
    out = rows.new_empty(*rows.shape[:2], weight.shape[2])
    torch.bmm(rows.transpose(0, 1), weight, out=out.transpose(0, 1))
    return out


class _Patches(_Products):
    """A convolution of few channels: a linear layer on the patches of the picture."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__(layer)
        self._kernel, self._stride, self._dilation = layer.kernel_size, layer.stride, layer.dilation
        self._padding = tuple(map(int, layer.padding))

    def forward(self, x: Tensor) -> Tensor:
        k, sides = len(self.weight), self._sides(x)
        each = x.unflatten(1, (k, -1)).flatten(0, 1)
        patches = unfold(each, self._kernel, self._dilation, self._padding, self._stride)
        out = self._products(patches.unflatten(0, (-1, k)).permute(0, 3, 1, 2).flatten(0, 1))
        return out.view(len(x), *sides, -1).movedim(-1, 1)

    def _sides(self, x: Tensor) -> list[int]:
        every = zip(x.shape[2:], self._kernel, self._stride, self._padding, self._dilation, strict=True)
        return [(side + 2 * p - d * (kernel - 1) - 1) // s + 1 for side, kernel, s, p, d in every]


class _Wider(_Folded):
    """The layer itself, with the channels of all clients."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self._layer = layer
        for name in self.parameters_taken:
            delattr(layer, name)
        counted = ("groups", "num_groups")
        self._counts: dict[str, int] = {name: getattr(layer, name) for name in counted if hasattr(layer, name)}
        self._channels: int = getattr(layer, "in_channels" if isinstance(layer, nn.Conv2d) else "num_channels", 1)

    def forward(self, x: Tensor) -> Tensor:
        here = self._layer.__dict__
        for name in self.parameters_taken:
            here[name] = self.__dict__[name].flatten(0, 1)
        for name, count in self._counts.items():
            here[name] = count * (x.shape[1] // self._channels)
        out: Tensor = self._layer(x)
        return out
