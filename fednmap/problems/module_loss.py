"""A torch module and a loss as a function of one flat vector, which holds the module's parameters."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import replace_all_batch_norm_modules_
from torch.nn.utils import parameters_to_vector

from fednmap.data.records import Tree, leaves, mapped
from fednmap.names import InputError, choose
from fednmap.problems import probe
from fednmap.problems.finite_sum import Weight
from fednmap.problems.probe import Loss

PIXEL = 255  # the largest uint8
HALF = (torch.float16, torch.bfloat16)
"""Precisions in which a module may compute, but which are too coarse for x and for sums."""


Forward = Callable[[nn.Module, Any], Tensor]
"""forward(module, inputs): the outputs, one tensor."""
Layout = Callable[[Tensor], Tensor]
"""A tensor with its numbers in another order in memory."""


def call(module: nn.Module, inputs: Tree) -> Any:
    """Return the module called with its inputs: a dict by name, a tuple in order."""
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple) else module(inputs)


def first(module: nn.Module, inputs: Tree) -> Any:
    return call(module, inputs)[0]


def logits(module: nn.Module, inputs: Tree) -> Any:
    return call(module, inputs).logits


def token_logits(module: nn.Module, inputs: Tree) -> Any:
    return logits(module, inputs).movedim(-1, 1)


FORWARDS: dict[str, Forward] = {"call": call, "first": first, "logits": logits, "token_logits": token_logits}
"""What is taken of what a module returns; `token_logits` has the classes where torch's losses want them, in axis 1."""


def forward_of(given: str | Forward) -> Forward:
    """Return the adapter of this name, or the one given."""
    return choose("forward", given, FORWARDS) if isinstance(given, str) else given


class ModuleLoss:
    """loss(module_x(a), b) for a flat vector x of the parameters that are trained, in the order of the module.

    Frozen parameters and buffers are in the precision of x, and shared by all threads. A module in half precision
    computes in it; x, gradients and losses are in float32.

    a, b:      samples and targets: their shapes and kinds are those of every batch.
    by_sample: the loss of each sample, (B,), from outputs and targets; default: one call of the loss for each.
    forward:   the outputs, from module and inputs.
    autocast:  the precision of torch.autocast, if the forward pass is computed under it.
    training:  keep the modes of the module's layers; else all are in eval mode, without dropout.
    layout:    how pictures and the kernels of convolutions lie in memory.
    """

    output_shape: tuple[int, ...]
    """Of the outputs for one sample; known after the first probe."""

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        a: Tree,
        b: Tensor,
        *,
        by_sample: Loss | None = None,
        forward: Forward = call,
        autocast: torch.dtype | None = None,
        training: bool = False,
        layout: Layout,
    ) -> None:
        self.layout = layout
        shared = {id(p): p for p in module.parameters()}
        shared |= {
            key: nn.Parameter(layout(p.detach()), requires_grad=False)
            for key, p in shared.items()
            if p.ndim == 4 and not p.requires_grad
        }
        self.module = copy.deepcopy(module, shared)  # parameters are not copied, but for frozen kernels
        for norm in batch_norm_layers(self.module):
            replace_all_batch_norm_modules_(norm)  # running statistics are not kept
        for layer in self.module.modules():
            if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
                layer.sparse = False  # the same gradients, as parts of one flat vector
        if not training:
            self.module.eval()  # batch norm without running statistics has a batch's in this mode too
        self.loss, self._by_sample = loss, by_sample
        one = a if isinstance(a, Tensor) else None
        self.axes = 0 if one is None else one.ndim
        self.real_inputs = one is not None and (one.is_floating_point() or one.dtype == torch.uint8)  # pixels
        self.classifies = loss is nn.functional.cross_entropy and not b.is_floating_point() and by_sample is None
        self.forward, self._autocast = forward, autocast
        self.plain = one is not None and forward is call and autocast is None
        """Whether the module is called with one tensor, returns one, and computes in its own precision."""
        self.local = ThreadLocalModule(self.module)
        named = dict(module.named_parameters())
        trained = {name: p for name, p in named.items() if p.requires_grad}
        if not trained:
            raise InputError(f"{type(module).__name__} has no parameters to train; give a module with some")
        self.names, self.frozen = list(trained), len(trained) < len(named)
        self._shapes, self.numels = zip(*((p.shape, p.numel()) for p in trained.values()), strict=True)
        self._kept = [p.dtype if p.dtype in HALF else None for p in trained.values()]
        self.half = any(p.dtype in HALF for p in named.values())
        first = next(p.dtype for p in named.values() if p.is_floating_point())
        self._enters = first if first in HALF else None
        # torch 2.13 crashes in group norm, channels-last, if its input needs no gradient
        self._inputs_need_gradient = any(isinstance(layer, nn.GroupNorm) for layer in module.modules())
        start = parameters_to_vector(trained.values()).detach()
        self.start = start.float() if start.dtype in HALF else start.clone()

    def is_stack(self, a: Tree) -> bool:
        """Return whether these are the samples of several clients, (k, B, ...)."""
        return isinstance(a, Tensor) and a.ndim > self.axes

    def parameters(self, x: Tensor) -> dict[str, Tensor]:
        """Return the flat vector x as named tensors."""
        return dict(zip(self.names, self.pieces(x), strict=True))

    def pieces(self, x: Tensor) -> list[Tensor]:
        """Return the parameters as views of x, (p,) or (k, p): each in its shape, or (k, shape)."""
        split = zip(x.split(self.numels, -1), self._shapes, strict=True)
        return [v.view(*v.shape[:-1], *shape) for v, shape in split]

    def flat(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return the inverse of `parameters`: named tensors as one vector."""
        return torch.cat([parameters[name].flatten() for name in self.names])

    def inputs(self, a: Tree, x: Tensor) -> Tree:
        """Return samples as the module takes them at x: on its device, in its precision, uint8 as value / 255."""

        def enter(v: Tensor) -> Tensor:
            if v.dtype == torch.uint8:
                v = v.to(x.device, x.dtype) / PIXEL
            return v.to(x.device, self._enters or x.dtype) if v.is_floating_point() else v.to(x.device)

        return mapped(enter, a)

    def outputs(self, x: Tensor, inputs: Tree) -> Tensor:
        """Return the module's outputs at x, in the precision of x."""
        return self.outputs_at(self.placed(x), mapped(self.layout, inputs), x)

    def placed(self, x: Tensor) -> list[Tensor]:
        """Return `pieces` as the module takes them; only kernels of convolutions may have to be copied, transposed."""
        pieces = zip(self.pieces(x.contiguous()), self._kept, strict=True)
        return [self.layout(v if dtype is None else v.to(dtype)) for v, dtype in pieces]

    def outputs_at(self, parameters: Sequence[Tensor], inputs: Tree, x: Tensor) -> Tensor:
        """Return the outputs with these parameters, in the precision of x."""
        self.local.bind(parameters, x)
        with nullcontext() if self._autocast is None else torch.autocast(x.device.type, self._autocast):
            out = self.forward(self.local.module, inputs)
        # a loss, and a sum of losses, is too coarse in half
        coarse = (self.half or self._autocast is not None) and isinstance(out, Tensor)
        return out.to(x.dtype) if coarse else out

    def __call__(self, x: Tensor, a: Tree, b: Tensor, weight: Weight) -> Tensor:
        """sum_j weight_j loss(x; a_j, b_j) at one point."""
        return self.weighted(self.outputs(x, a), b, weight)

    def weighted(self, out: Tensor, b: Tensor, weight: Weight, clients: int = 1) -> Tensor:
        """Return the loss of these outputs; those of several clients, one after another, summed."""
        if not isinstance(weight, Tensor):  # equal weights 1/B: the loss's own mean
            return self.loss(out, b) * clients
        each = probe.by_sample(self.loss, out, b) if self._by_sample is None else self._by_sample(out, b)
        return (weight.flatten() * each).sum()

    @torch.enable_grad()
    def value_and_slopes(self, x: Tensor, a: Tree, b: Tensor, weight: Weight) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the loss at one point, and its gradient with respect to each of the module's parameters."""
        leaves = [v.requires_grad_() for v in self.placed(x.detach())]
        a, asked = mapped(self.layout, a), list(leaves)
        if self._inputs_need_gradient and isinstance(a, Tensor) and a.is_floating_point():
            a = a.detach().requires_grad_()
            asked.append(a)
        total = self.weighted(self.outputs_at(leaves, a, x), b, weight)
        slopes = torch.autograd.grad(total, asked, materialize_grads=True)[: len(leaves)]
        return total.detach(), tuple(v.to(x.dtype) for v in slopes) if self.half else slopes

    @torch.enable_grad()
    def row_bytes(self, a: Tree) -> int:
        """Bytes per sample that a backward pass needs: what autograd saves, and three copies of the outputs.

        Rounded up to a power of two, so that small differences between machines do not change how sums are cut.
        """
        trained = [v.requires_grad_() for v in self.placed(self.start)]
        self.local.bind(trained, self.start)
        held = {v.untyped_storage()._cdata for v in (*trained, *fixed(self.local.module).values())}

        def saved(inputs: Tree) -> int:
            found: dict[int, int] = {}

            def pack(v: Tensor) -> Tensor:
                found[v.untyped_storage()._cdata] = v.untyped_storage().nbytes()
                return v

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda v: v):
                out = self.forward(self.local.module, mapped(self.layout, inputs))
            return sum(found[key] for key in found.keys() - held) + 3 * out.numel() * out.element_size()

        count, one = len(leaves(a)[0]), saved(mapped(lambda v: v[:1], a))
        more = one if count == 1 else max(0, (saved(a) - one) // (count - 1))
        return 1 << max(0, more - 1).bit_length()


class ThreadLocalModule(threading.local):
    """A copy of the module for each thread, whose parameters are replaced in each use.

    The numbers of frozen parameters are shared by all threads.
    """

    def __init__(self, module: nn.Module) -> None:
        shared = {id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in module.parameters()}
        self._given, self.module = module, copy.deepcopy(module, shared)  # with the same numbers
        numbers = {id(p): k for k, p in enumerate(p for p in self.module.parameters() if p.requires_grad)}
        self._places = [
            (layer._parameters, name, numbers[id(p)])
            for layer in self.module.modules()
            for name, p in layer._parameters.items()
            if id(p) in numbers
        ]
        self._fixed = [(v, v.detach()) for v in fixed(self.module).values()]
        self._dtype: torch.dtype | None = None

    def bind(self, parameters: Sequence[Tensor], x: Tensor) -> None:
        """Replace the module's parameters, and give what is not trained the precision of x, unless that is half."""
        for places, name, number in self._places:
            places[name] = parameters[number]  # type: ignore[assignment]
        if self._dtype != x.dtype:
            for v, given in self._fixed:
                v.data = given if v.dtype in HALF else given.to(x.dtype)
            self._dtype = x.dtype

    def __reduce__(self) -> tuple[type[ThreadLocalModule], tuple[nn.Module]]:
        return ThreadLocalModule, (self._given,)  # without the points that it has seen


def fixed(module: nn.Module) -> dict[str, Tensor]:
    """Return the real numbers of a module that are not trained: frozen parameters, and buffers."""
    frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
    return {name: v for name, v in (frozen | dict(module.named_buffers())).items() if v.is_floating_point()}


def channels_last(v: Tensor) -> Tensor:
    """Pictures and kernels in the layout in which convolutions are fastest on a CPU."""
    if v.ndim != 4:
        return v
    _, channels, height, width = v.shape
    if v.is_contiguous() and (channels == 1 or height == width == 1):  # both layouts: the strides must say which
        return v.as_strided(v.shape, (channels * height * width, 1, width * channels, channels))
    return v.to(memory_format=torch.channels_last)


contiguous = Tensor.contiguous  # as torch has it by default, for modules that use `view`


def batch_norm_layers(module: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """The batch norm layers that use batch statistics; one in eval mode uses its running statistics, as in torch."""
    found = (layer for layer in module.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm))
    return [layer for layer in found if layer.training or layer.running_mean is None]


@torch.no_grad()
def calibrate(
    module: nn.Module,
    forward: Callable[[nn.Module, Any], Tensor],
    clients: Iterable[Iterable[Any]],
    weights: Iterable[float],
) -> None:
    """Give the layers running statistics: averages over each client's batches, and their weighted mean over clients."""
    tracked = [layer for layer in batch_norm_layers(module) if layer.running_mean is not None]
    if not tracked:
        return
    means = [[torch.zeros_like(v) for v in _running(layer)] for layer in tracked]
    trial = copy.deepcopy(module)
    found = [layer for layer in batch_norm_layers(trial) if layer.running_mean is not None]
    trial.eval()
    for batches, weight in zip(clients, weights, strict=True):
        for layer in found:
            layer.train()
            layer.reset_running_stats()
            layer.momentum = None  # torch's word for the plain average of all batches
        for inputs in batches:
            forward(trial, inputs)
        for mean, layer in zip(means, found, strict=True):
            torch._foreach_add_(mean, [weight * v for v in _running(layer)])
    for layer, mean in zip(tracked, means, strict=True):
        torch._foreach_copy_(_running(layer), mean)


def _running(layer: nn.modules.batchnorm._BatchNorm) -> list[Tensor]:
    return [layer.running_mean, layer.running_var]  # type: ignore[list-item]
