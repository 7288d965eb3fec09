"""A torch module and a loss as a function of one flat vector, which holds the module's parameters."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector

from fednmap.data.records import Tree, leaves, mapped
from fednmap.names import InputError, choose
from fednmap.problems import batch_norm, probe
from fednmap.problems.finite_sum import Weight
from fednmap.problems.probe import Loss

HALF = (torch.float16, torch.bfloat16)
"""Precisions in which a module may compute, but which are too coarse for x and for sums."""


Forward = Callable[[nn.Module, Any], Tensor]
"""forward(module, inputs): the outputs, one tensor."""


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
    ) -> None:
        shared = {id(p): p for p in module.parameters()}
        shared |= {
            id(p): nn.Parameter(channels_last(p.detach()), requires_grad=False)
            for p in module.parameters()
            if p.ndim == 4 and not p.requires_grad
        }
        self.module = copy.deepcopy(module, shared)  # parameters are not copied, but for frozen kernels
        batch_norm.drop_running(self.module)
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
        self.local = ThreadLocalModule(self.module, forward)
        self._places = {f"module.{place}": name for place, name in places(self.local.module).items()}
        named = dict(self.local.module.named_parameters())
        self.names = [name for name, p in named.items() if p.requires_grad]
        if not self.names:
            raise InputError(f"{type(module).__name__} has no parameters to train; give a module with some")
        self.frozen = len(self.names) < len(named)
        leaves = self.local.leaves
        self._shapes, self.numels = [p.shape for p in leaves], [p.numel() for p in leaves]
        self._fixed = fixed(self.module)
        self._buffers = [name for name in self._fixed if name not in named]
        self._half = {name: p.dtype for name, p in named.items() if p.dtype in HALF}
        self.half = bool(self._half)
        first = next(p.dtype for p in named.values() if p.is_floating_point())
        self._enters = first if first in HALF else None
        # torch 2.13 crashes in group norm, channels-last, if its input needs no gradient
        self._inputs_need_gradient = any(isinstance(layer, nn.GroupNorm) for layer in module.modules())
        start = parameters_to_vector(leaves).detach()
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

    def outputs(self, x: Tensor, inputs: Tree) -> Tensor:
        """Return the module's outputs at x, in the precision of x."""
        values = self.parameters(x)
        values |= {name: values[name].to(dtype) for name, dtype in self._half.items() if name in values}
        values |= {name: v.to(used_dtype(v, x)) for name, v in self._fixed.items()}
        named = {place: values[name] for place, name in self._places.items() if name in values}
        named |= {f"module.{name}": values[name] for name in self._buffers}
        with self._precision(x):
            out: Tensor = functional_call(self.local.adapted, named, (self.entering(inputs),), tie_weights=False)
        return self._leaving(out, x)

    def _precision(self, x: Tensor) -> AbstractContextManager[Any]:
        return nullcontext() if self._autocast is None else torch.autocast(x.device.type, self._autocast)

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
        here = self.local
        here.bind(x)
        a, asked = mapped(channels_last, self.entering(a)), list[Tensor](here.leaves)
        if self._inputs_need_gradient and isinstance(a, Tensor) and a.is_floating_point():
            a = a.detach().requires_grad_()
            asked.append(a)
        with self._precision(x):
            out = self.forward(here.module, a)
        total = self.weighted(self._leaving(out, x), b, weight)
        slopes = torch.autograd.grad(total, asked, materialize_grads=True)[: len(here.leaves)]
        return total.detach(), tuple(v.to(x.dtype) for v in slopes) if self.half else slopes

    @torch.enable_grad()
    def row_bytes(self, a: Tree) -> int:
        """Bytes per sample that a backward pass needs: what autograd saves, and three copies of the outputs.

        Rounded up to a power of two, so that small differences between machines do not change how sums are cut.
        """
        here = self.local
        here.bind(self.start)
        held = {v.untyped_storage()._cdata for v in (*here.module.parameters(), *here.module.buffers())}

        def saved(inputs: Tree) -> int:
            found: dict[int, int] = {}

            def pack(v: Tensor) -> Tensor:
                found[v.untyped_storage()._cdata] = v.untyped_storage().nbytes()
                return v

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda v: v):
                out = self.forward(here.module, mapped(channels_last, self.entering(inputs)))
            return sum(found[key] for key in found.keys() - held) + 3 * out.numel() * out.element_size()

        count, one = len(leaves(a)[0]), saved(mapped(lambda v: v[:1], a))
        more = one if count == 1 else max(0, (saved(a) - one) // (count - 1))
        return 1 << max(0, more - 1).bit_length()

    def entering(self, inputs: Tree) -> Tree:
        """Real inputs in the precision of the module's first parameter, if that is half."""
        enters = self._enters
        if enters is None:
            return inputs
        return mapped(lambda v: v.to(enters) if v.is_floating_point() else v, inputs)

    def _leaving(self, out: Tensor, x: Tensor) -> Tensor:
        """Outputs in the precision of x: a loss, and a sum of losses, is too coarse in half."""
        coarse = (self.half or self._autocast is not None) and isinstance(out, Tensor)
        return out.to(x.dtype) if coarse else out


class _Adapted(nn.Module):
    """A module behind its `forward` adapter."""

    def __init__(self, module: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.module, self._call = module, forward

    def forward(self, inputs: Tree) -> Tensor:
        return self._call(self.module, inputs)


class ThreadLocalModule(threading.local):
    """A copy of the module for each thread: its parameters are replaced while it is used.

    The numbers of frozen parameters are shared by all threads.
    """

    def __init__(self, module: nn.Module, forward: Forward) -> None:
        shared = {id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in module.parameters()}
        self._given, self.module = module, copy.deepcopy(module, shared)  # with the same numbers
        self._forward, self.adapted = forward, _Adapted(self.module, forward)
        self.leaves = [p for p in self.module.parameters() if p.requires_grad]
        self._numels = [p.numel() for p in self.leaves]
        self._fixed = [(v, v.detach()) for v in fixed(self.module).values()]
        self._dtype: torch.dtype | None = None

    def bind(self, x: Tensor) -> None:
        """Make the module's parameters views of x; only kernels of convolutions may have to be copied, transposed."""
        for p, piece in zip(self.leaves, x.contiguous().split(self._numels), strict=True):
            p.data = channels_last(piece.view(p.shape).to(used_dtype(p, x)))
        if self._dtype != x.dtype:
            for v, given in self._fixed:
                v.data = channels_last(given.to(used_dtype(given, x)))
            self._dtype = x.dtype

    def __reduce__(self) -> tuple[type[ThreadLocalModule], tuple[nn.Module, Forward]]:
        return ThreadLocalModule, (
            self._given,
            self._forward,
        )  # parameters that are views of x would each be written with all of x


def fixed(module: nn.Module) -> dict[str, Tensor]:
    """Return the real numbers that a module has besides what is trained: frozen parameters, and buffers."""
    frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
    return {name: v for name, v in (frozen | dict(module.named_buffers())).items() if v.is_floating_point()}


def used_dtype(v: Tensor, x: Tensor) -> torch.dtype:
    """The precision in which a module's tensor is used at x: half precision stays, another one becomes that of x."""
    return v.dtype if v.dtype in HALF else x.dtype


def places(module: nn.Module) -> dict[str, str]:
    """Return every place of a parameter in the module, and the name it has in `named_parameters()`.

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
    _, channels, height, width = v.shape
    if v.is_contiguous() and (channels == 1 or height == width == 1):  # both layouts: the strides must say which
        return v.as_strided(v.shape, (channels * height * width, 1, width * channels, channels))
    return v.to(memory_format=torch.channels_last)
