"""Fully connected networks: batched gradients of many clients, with backpropagation written out.

Autograd over stacked weights moves every gradient once more, into the flat vector, and its bookkeeping costs as much
as small matrix products do. Here each product is written straight into its place, and what a step needs besides (memory
between layers, views of the vectors) is made once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fednmap.problems.families import less_one
from fednmap.problems.finite_sum import Weight
from fednmap.problems.kernels.kernel import Kernel
from fednmap.problems.module_loss import ModuleLoss
from fednmap.problems.probe import hooked

aten = torch.ops.aten

Views = TypeVar("Views")


class DenseKernel(Kernel):
    """Linear layers with backpropagation written out; the loss by autograd, or written out for classes."""

    def __init__(self, function: ModuleLoss, layers: DenseLayers) -> None:
        self._function, self._layers = function, layers

    @classmethod
    def of(cls, function: ModuleLoss, sample: Tensor) -> DenseKernel | None:
        """The kernel of this function, or None if its module is another one."""
        if function.frozen or function.half:
            return None
        layers = DenseLayers.of(function.module, sample)
        return None if layers is None else cls(function, layers)

    def value_and_gradient(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
        value = x.new_zeros(())

        def slope(out: Tensor) -> Tensor:
            nonlocal value
            value, found = self._value_and_slope(out, b, weight)
            return found

        gradient = self._layers.gradient(x.detach(), self._flat(a), slope)
        return value, gradient

    def gradient(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> Tensor:
        return self._layers.gradient(x.detach(), self._flat(a), lambda out: self._slope(out, b, weight))

    def add_gradient(self, z: Tensor, x: Tensor, a: Tensor, b: Tensor, weight: Weight, scale: float) -> None:
        if z.stride(-1) == 1:
            self._layers.gradient(x.detach(), self._flat(a), lambda out: self._slope(out, b, weight), z, scale)
        else:
            z.add_(self.gradient(x, a, b, weight), alpha=scale)

    def _flat(self, a: Tensor) -> Tensor:
        return a.flatten(2 if self._function.is_stack(a) else 1)

    def _slope(self, out: Tensor, b: Tensor, weight: Weight) -> Tensor:
        """The gradient of the loss with respect to the outputs."""
        if self._function.classifies and not isinstance(weight, Tensor):  # autograd would cost more than this
            share = torch.softmax(out.mT.contiguous(), -2)  # over the last axis it takes five times as long
            return less_one(share, b, -2).mul_(weight).mT
        return self._value_and_slope(out, b, weight)[1]

    @torch.enable_grad()
    def _value_and_slope(self, out: Tensor, b: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
        """The loss, and its gradient with respect to the outputs."""
        if self._function.classifies and isinstance(weight, Tensor):
            with torch.no_grad():
                share = nn.functional.log_softmax(out, -1)
                value = -(weight * share.gather(-1, b.unsqueeze(-1)).squeeze(-1)).sum()
                return value, less_one(share.exp_(), b, -1).mul_(weight.unsqueeze(-1))
        out = out.detach().requires_grad_()
        joined = self._function.weighted if out.ndim == 2 else self._function.weighted_stack
        total = joined(out, b, weight)
        return total.detach(), torch.autograd.grad(total, out)[0]


class Activation(NamedTuple):
    forward: Callable[[Tensor], Tensor]
    """h = s(v), written over v."""
    back: Callable[[Tensor, Tensor], object]
    """(d, h): d, the gradient with respect to h, becomes the one with respect to v."""


ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.Sigmoid: Activation(torch.sigmoid_, lambda d, h: aten.sigmoid_backward.grad_input(d, h, grad_input=d)),
    nn.Tanh: Activation(torch.tanh_, lambda d, h: aten.tanh_backward.grad_input(d, h, grad_input=d)),
    nn.ReLU: Activation(torch.relu_, lambda d, h: aten.threshold_backward.grad_input(d, h, 0, grad_input=d)),
}


class Layer(NamedTuple):
    """A linear layer and what follows it: where its parameters are in the flat vector."""

    inputs: int
    outputs: int
    weight: int
    bias: int | None
    activation: Activation | None


class Point(NamedTuple):
    """The parameters of a layer, as the products that read them want them."""

    weight: Tensor | None
    """None in a first layer of several: nobody asks for it there."""
    transposed: Tensor | None
    """Its transpose; None in a last layer for a stack of clients."""
    bias: Tensor | None
    """In the shape in which it is added to the layer's outputs."""


class Target(NamedTuple):
    """Where the gradient of a layer goes."""

    weight: Tensor
    bias: Tensor | None
    """(outputs,), or (k, outputs) of k clients."""


class DenseLayers:
    """Linear layers, each followed by at most one activation, their parameters in one flat vector x.

    So an activation may overwrite its input, a product that nothing else needs.
    Samples are (B, d) at one point x (p,), or (k, B, d) for k clients at x (k, p) or at one common x (p,).
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        self._layers: list[Layer] = []
        offset = 0
        for layer in layers:
            if isinstance(layer, nn.Linear):
                weight, bias = offset, None if layer.bias is None else offset + layer.weight.numel()
                offset += sum(p.numel() for p in layer.parameters())
                self._layers.append(Layer(layer.in_features, layer.out_features, weight, bias, None))
            else:
                self._layers[-1] = self._layers[-1]._replace(activation=ACTIVATIONS[type(layer)])
        self._cache = _ThreadCache()

    @classmethod
    def of(cls, module: nn.Module, sample: Tensor) -> DenseLayers | None:
        """The module in this form, or None if it does anything else with such a sample."""
        layers = list(module) if type(module) is nn.Sequential else [module]
        flat = sample.ndim == 1
        if layers and type(layers[0]) is nn.Flatten and (layers[0].start_dim, layers[0].end_dim) == (1, -1):
            layers, flat = layers[1:], True
        neighbours = pairwise([None, *(type(layer) for layer in layers)])
        known = all(b is nn.Linear or (b in ACTIVATIONS and a is nn.Linear) for a, b in neighbours)
        in_order = [id(p) for p in module.parameters()] == [id(p) for layer in layers for p in layer.parameters()]
        return cls(layers) if flat and known and in_order and not any(map(hooked, module.modules())) else None

    def gradient(
        self,
        x: Tensor,
        a: Tensor,
        slope: Callable[[Tensor], Tensor],
        onto: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """The gradient of a loss whose gradient with respect to the outputs is slope(outputs).

        onto: where `scale` times the gradient is added instead. May be x itself: a layer's weights are done with when
              their gradient comes.
        """
        if x.stride(-1) != 1:
            x = x.contiguous()
        kept, stacked = self._cache, x.ndim == 2
        weights, space = kept.point(x, self._point), kept.workspace(self._layers, a, stacked)
        last, values = len(space) - 1, [a]  # values[i] enters layer i, values[i + 1] leaves it
        for i, (layer, at, room) in enumerate(zip(self._layers, weights, space, strict=True)):
            if at.transposed is None:
                assert at.weight is not None
                _affine(at.bias, at.weight, values[i].mT, torch.baddbmm, torch.bmm, room.flat)
            elif stacked:
                _affine(at.bias, values[i], at.transposed, torch.baddbmm, torch.bmm, room.flat)
            else:  # one point for all: one product
                _affine(at.bias, values[i].flatten(0, -2), at.transposed, torch.addmm, torch.mm, room.flat)
            values.append(room.out if layer.activation is None else layer.activation.forward(room.out))
        d = slope(values[-1])
        gradient = x.new_empty(*a.shape[:-2], x.shape[-1]) if onto is None else onto
        into = self._target(gradient) if onto is None else kept.target(onto, self._target)
        product = torch.bmm if a.ndim == 3 else torch.mm  # matmul would compute elsewhere, and copy
        for i in range(last, -1, -1):
            layer = self._layers[i]
            if layer.activation is not None:
                d = d.clone() if i == last else d  # nobody knows what else slope's answer is
                layer.activation.back(d, values[i + 1])
            below, through = space[i].below, weights[i].weight
            if below is not None:
                assert through is not None
                if stacked:
                    torch.bmm(d, through, out=below)
                else:
                    torch.mm(d.flatten(0, -2), through, out=below.view(-1, layer.inputs))
            weight, bias = into[i]
            if onto is None:
                product(d.mT, values[i], out=weight)
                if bias is not None:
                    torch.sum(d, -2, out=bias)
            else:
                _add_product(weight, d.mT, values[i], scale)
                if bias is not None:
                    bias.add_(d.sum(-2), alpha=scale)
            d = d if below is None else below
        return gradient

    def _point(self, x: Tensor) -> list[Point]:
        """Each layer at x, (p,) or (k, p)."""
        stack, jumps, first, last = x.shape[:-1], x.stride()[:-1], x.storage_offset(), len(self._layers) - 1
        found: list[Point] = []
        for i, (inputs, outputs, at, bias, _) in enumerate(self._layers):
            w = transposed = b = None
            if i > 0 or (stack and i == last):
                w = x.as_strided((*stack, outputs, inputs), (*jumps, inputs, 1), first + at)
            if i < last or not stack:
                transposed = x.as_strided((*stack, inputs, outputs), (*jumps, 1, inputs), first + at)
            if bias is not None:
                shape, steps = ((outputs, 1), (1, 0)) if transposed is None else ((1, outputs), (0, 1))
                b = x.as_strided((*stack, *shape), (*jumps, *steps), first + bias)
            found.append(Point(w, transposed, b))
        return found

    def _target(self, x: Tensor) -> list[Target]:
        """Each layer's part of x, (p,) or (k, p)."""
        stack, jumps, first = x.shape[:-1], x.stride()[:-1], x.storage_offset()
        found: list[Target] = []
        for inputs, outputs, weight, bias, _ in self._layers:
            w = x.as_strided((*stack, outputs, inputs), (*jumps, inputs, 1), first + weight)
            b = None if bias is None else x.as_strided((*stack, outputs), (*jumps, 1), first + bias)
            found.append(Target(w, b))
        return found


class _Workspace(NamedTuple):
    """Memory at a layer, written over in every step."""

    out: Tensor
    """The layer's outputs."""
    flat: Tensor
    """Where the product goes: the same for stacked layers, but (W a' + b) of the last one, whose transpose is `out`:
    losses are faster there. At one point for all: with clients and samples in one axis."""
    below: Tensor | None
    """The gradient with respect to the layer's inputs; nobody asks for that of the samples."""


class _ThreadCache(threading.local):
    """What a thread keeps from one step to the next."""

    def __init__(self) -> None:
        self._workspaces: dict[Any, list[_Workspace]] = {}
        self.point: _ViewCache[list[Point]] = _ViewCache()
        self.target: _ViewCache[list[Target]] = _ViewCache()

    def workspace(self, layers: list[Layer], a: Tensor, stacked: bool) -> list[_Workspace]:
        key = (a.shape, a.dtype, a.device, stacked)
        if key not in self._workspaces:
            if len(self._workspaces) >= SHAPES:
                self._workspaces.clear()
            self._workspaces[key] = list(_workspaces(layers, a, stacked))
        return self._workspaces[key]

    def __reduce__(self) -> tuple[type[_ThreadCache], tuple[()]]:
        return _ThreadCache, ()  # a copy begins with none


SMALL = 1 << 12  # numbers in a product
SHAPES = 4  # of batches that a thread keeps memory for


def _workspaces(layers: list[Layer], a: Tensor, stacked: bool) -> Iterator[_Workspace]:
    batch = a.shape[:-1]
    for k, layer in enumerate(layers):
        below = a.new_empty(*batch, layer.inputs) if k > 0 else None
        if stacked and k == len(layers) - 1:
            transposed = a.new_empty(*batch[:-1], layer.outputs, batch[-1])
            yield _Workspace(transposed.mT, transposed, below)
        else:
            out = a.new_empty(*batch, layer.outputs)
            yield _Workspace(out, out if stacked else out.view(-1, layer.outputs), below)


class _ViewCache(Generic[Views]):
    """The views of the vector that was asked for last: the same one comes in every local step."""

    def __init__(self) -> None:
        self._of: Callable[[], Tensor | None] = lambda: None
        self._found: Views | None = None

    def __call__(self, x: Tensor, views: Callable[[Tensor], Views]) -> Views:
        if self._of() is not x or self._found is None:
            self._of = weakref.ref(x, self._forget)
            self._found = views(x.data)  # views of x would keep x
        return self._found

    def _forget(self, gone: object) -> None:
        if self._of is gone:  # the views would keep its memory
            self._found = None


def _affine(
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    add: Callable[..., Tensor],
    product: Callable[..., Tensor],
    out: Tensor,
) -> None:
    """a b + bias, written to `out`."""
    if bias is None:
        product(a, b, out=out)
    else:
        add(bias, a, b, out=out)


def _add_product(onto: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """onto += scale a b. Of stacks that are not in one piece torch takes one product after another: where these are
    small, all of them at once and another pass over the result are faster."""
    if onto.ndim == 2:
        onto.addmm_(a, b, alpha=scale)
    elif onto.shape[-2] * onto.shape[-1] > SMALL:
        onto.baddbmm_(a, b, alpha=scale)
    else:
        onto.add_(torch.bmm(a, b), alpha=scale)
