"""Convolution networks: batched gradients of several clients, which are folded into the channels.

The pictures of k clients, (k, B, C, H, W), become one batch (B, k C, H, W), one client's channels after another's. What
treats each channel by itself takes it as it is: nonlinearities, pooling, means over the picture, sums with the input.
The other layers, with the parameters of all clients, are

    linear layers, 1 x 1 convolutions    k products in one call
    depthwise convolutions, batch norm   the same layer with k C channels
    group norm of G groups               the same layer with k G groups
    convolutions of few channels         the same layer with k groups

so that k clients cost few calls more than one: gradients of MobileNetV3-Small with 8 pictures take 8 ms per client for
5 clients and 7 for 10, in place of 14. A module with other layers, and one that mixes its channels in a forward pass of
its own, is not folded.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, islice, repeat
from typing import Any

import torch
from torch import Tensor, nn

from fednmap.problems.finite_sum import Batch, Weight, like
from fednmap.problems.kernels.autograd import BatchedKernel, ModuleKernel, OneByOneKernel, Slopes
from fednmap.problems.module_loss import ModuleLoss, batch_norm_layers
from fednmap.problems.probe import hooked

FOLDED = 5
"""Clients in one pass: with more, the numbers between layers leave the cache, and vectors the allocator's memory."""
ROWS = 128
"""Samples per client, at most, that are computed folded; for more, calls are no longer what a client costs."""
TOLERANCE = 1e-8
"""Relative difference, at most, of two gradients that are the same but for rounding, in double precision."""
FEW = 64
"""Numbers in a filter, at most, of a convolution that is computed in groups."""

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


class FoldedKernel(BatchedKernel):
    """Several clients in one pass through the folded module."""

    def __init__(self, function: ModuleLoss) -> None:
        super().__init__(function)
        self._folded = FoldedModule(function.module)

    @classmethod
    def of(cls, function: ModuleLoss, a: Tensor, b: Tensor) -> FoldedKernel | None:
        """The kernel of this function, or None if its module, tried on samples a and targets b, is another one."""
        if function.half or not (function.plain and function.real_inputs) or not FoldedModule.accepts(function.module):
            return None
        kernel, four = cls(function), torch.arange(4, device=a.device) % len(a)  # batch norm rounds coarsely with two
        return kernel if kernel._agrees(a[four], b[four]) else None

    def slopes(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> Iterator[Slopes]:
        if not self._function.is_stack(a) or a.shape[1] > ROWS:
            yield from ModuleKernel.slopes(self, x, a, b, weight)
            return
        parts = (v.split(FOLDED) for v in (x.expand(len(a), -1), a, b))
        weights = weight.split(FOLDED) if isinstance(weight, Tensor) else repeat(weight)
        for few in zip(*parts, weights, strict=False):
            yield from super().slopes(*few)

    def total(self, x: Tensor, batches: Iterable[Batch]) -> tuple[Tensor, Tensor]:
        if not batch_norm_layers(self._function.module):  # batches are then as large as memory allows
            return super().total(x, batches)
        x, loss, gradient = x.detach(), x.new_zeros(()), torch.zeros_like(x)
        for few in equal_batches(batches):  # each has its own statistics, as a client has
            value, slopes = self.batched(x, *few)
            loss = loss + value
            torch._foreach_add_(gradient.split(self._function.numels), [v.sum(0).view(-1) for v in slopes])
        return loss, gradient

    def chunk(self, default: int, rows: int) -> int:
        return FOLDED if rows <= ROWS else 1

    def outputs(self, parameters: list[Tensor], a: Tensor, x: Tensor) -> Tensor:
        return self._folded.outputs(parameters, a, self._function.output_shape)

    @torch.no_grad()
    def _agrees(self, a: Tensor, b: Tensor) -> bool:
        """Whether any number of clients, at different points with different samples, have the gradients of each alone.

        Even if parameters are 0 at the start, and their layers without effect.
        """
        function, random = self._function, torch.Generator().manual_seed(0)

        def perturbed(v: Tensor, least: float) -> Tensor:
            noise = torch.randn(FOLDED, *v.shape, generator=random, dtype=torch.float32, device="cpu")
            return torch.addcmul(v.double(), 0.1 * v.abs() + least, noise.to(v))

        def outputs(x: Tensor, a: Tensor) -> Tensor:
            return self.outputs(function.pieces(x), a, x)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of shapes that differ
            try:
                x, a = perturbed(function.start, 0.01), perturbed(a, 0.0)
                b, weight = like(b, x).expand(FOLDED, *b.shape), 1 / b.shape[0]
                found = self.value_and_gradient(x, a, b, weight)[1][:3]
                alone = OneByOneKernel(function).value_and_gradient(x[:3], a[:3], b[:3], weight)[1]
                some = [outputs(x[:k], a[:k]) for k in range(1, FOLDED + 1)]
                ones = torch.cat([outputs(*one) for one in zip(x.split(1), a.split(1), strict=True)])
                return _same(found, alone) and all(_same(out, ones[: len(out)]) for out in some)
            except Exception:  # the user's own forward pass may fail in any way
                return False


def _same(found: Tensor, wanted: Tensor) -> bool:
    return bool(torch.dist(found, wanted) <= TOLERANCE * wanted.norm())


class FoldedModule(threading.local):
    """A copy of a module for each thread, to be computed at k vectors of parameters, which are replaced in each use."""

    def __init__(self, module: nn.Module) -> None:
        self._given, self._module = module, copy.deepcopy(module)
        for parent in list(self._module.modules()):
            for name, layer in list(parent.named_children()):
                fold = None if list(layer.children()) else _replacement(layer)
                if fold is not None:
                    setattr(parent, name, fold(layer))
        folded = [layer for layer in self._module.modules() if isinstance(layer, _FoldedLayer)]
        self._places = [(layer, name) for layer in folded for name in layer.parameters_taken]

    def __reduce__(self) -> tuple[type[FoldedModule], tuple[nn.Module]]:
        return FoldedModule, (self._given,)  # without the points that it has seen

    @staticmethod
    def accepts(module: nn.Module) -> bool:
        """False if a layer cannot be folded, has hooks, is used twice, or has parameters that are shared or frozen."""
        leaves = [v for _, v in module.named_modules(remove_duplicate=False) if not list(v.children())]
        own = [p for layer in leaves for p in layer.parameters()]
        alone = len(own) == len(list(module.parameters())) and len(set(leaves)) == len(leaves)
        moving = all(p.requires_grad for p in own) and not any(map(hooked, module.modules()))
        return module not in leaves and alone and moving and None not in map(_replacement, leaves)

    def outputs(self, parameters: Sequence[Tensor], inputs: Tensor, shape: Sequence[int]) -> Tensor:
        """Outputs (k, B, *shape) of the inputs (k, B, C, H, W) at parameters that are (k, ...) each."""
        for (layer, name), value in zip(self._places, parameters, strict=True):
            layer.__dict__[name] = value
        out: Tensor = self._module(inputs.transpose(0, 1).flatten(1, 2))
        return out.reshape(len(out), len(inputs), *shape).transpose(0, 1)


def equal_batches(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Stacks of consecutive batches of one length, as many as are folded in one pass."""
    for _, group in groupby(batches, key=lambda batch: len(batch[0])):
        while some := list(islice(group, FOLDED)):
            a, b, weight = map(torch.stack, zip(*some, strict=True))
            yield a, b, weight


def _replacement(layer: nn.Module) -> Callable[[Any], nn.Module] | None:
    """What makes of a layer the one that takes its place; None if it cannot be folded."""
    if isinstance(layer, nn.Conv2d):
        if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
            return None
        if layer.groups == layer.in_channels == layer.out_channels > 1:
            return _GroupedLayer
        if type(layer) is not nn.Conv2d or layer.groups > 1:  # another class may have another forward pass
            return None
        if all(v == 1 for v in (*layer.kernel_size, *layer.stride)) and not any(layer.padding):
            return _Products
        return _GroupedLayer if layer.weight[0].numel() <= FEW else None
    if isinstance(layer, nn.Linear):
        return _Products if type(layer) is nn.Linear else None
    if isinstance(layer, nn.GroupNorm):
        return _GroupedLayer
    if isinstance(layer, nn.BatchNorm2d):
        return _GroupedLayer if layer.running_mean is None else None
    whole = not isinstance(layer, nn.Flatten) or (layer.start_dim == 1 and layer.end_dim == -1)
    return (lambda layer: layer) if whole and isinstance(layer, CHANNEL_BY_CHANNEL) else None


class _FoldedLayer(nn.Module):
    """Instead of a layer: `weight` and `bias` are put here before every call, (k, ...)."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.parameters_taken = [name for name, p in layer.named_parameters() if p is not None]
        self.bias = None


class _Products(_FoldedLayer):
    """A linear layer, or a 1 x 1 convolution: one on the channels of every point of the picture."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.movedim(1, -1)
        each = rows.unflatten(-1, (len(self.weight), -1)).flatten(0, -3)
        out: Tensor = _Product.apply(each, self.weight.flatten(2))  # type: ignore[no-untyped-call]
        out = out if self.bias is None else out + self.bias
        return out.view(*rows.shape[:-1], -1).movedim(-1, 1)


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


class _GroupedLayer(_FoldedLayer):
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
