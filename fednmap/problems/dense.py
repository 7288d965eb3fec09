"""Fully connected networks: the gradients of many clients at once, with backpropagation written out.

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

from fednmap.problems.probe import hooked

aten = torch.ops.aten

Views = TypeVar("Views")


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
    turned: Tensor | None
    """Its transpose; None in a last layer for a stack of clients."""
    bias: Tensor | None
    """In the shape in which it is added to the layer's outputs."""


class Target(NamedTuple):
    """Where the gradient of a layer goes."""

    weight: Tensor
    bias: Tensor | None
    """(outputs,), or (k, outputs) of k clients."""


class Dense:
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
        self._here = _Here()

    @classmethod
    def of(cls, module: nn.Module, sample: Tensor) -> Dense | None:
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
        here, stacked = self._here, x.ndim == 2
        weights, space = here.point(x, self._point), here.space(self._layers, a, stacked)
        last, values = len(space) - 1, [a]  # values[i] enters layer i, values[i + 1] leaves it
        for i, (layer, at, room) in enumerate(zip(self._layers, weights, space, strict=True)):
            if at.turned is None:
                assert at.weight is not None
                _affine(at.bias, at.weight, values[i].mT, torch.baddbmm, torch.bmm, room.flat)
            elif stacked:
                _affine(at.bias, values[i], at.turned, torch.baddbmm, torch.bmm, room.flat)
            else:  # one point for all: one product
                _affine(at.bias, values[i].flatten(0, -2), at.turned, torch.addmm, torch.mm, room.flat)
            values.append(room.out if layer.activation is None else layer.activation.forward(room.out))
        d = slope(values[-1])
        gradient = x.new_empty(*a.shape[:-2], x.shape[-1]) if onto is None else onto
        into = self._target(gradient) if onto is None else here.target(onto, self._target)
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
            w = turned = b = None
            if i > 0 or (stack and i == last):
                w = x.as_strided((*stack, outputs, inputs), (*jumps, inputs, 1), first + at)
            if i < last or not stack:
                turned = x.as_strided((*stack, inputs, outputs), (*jumps, 1, inputs), first + at)
            if bias is not None:
                shape, steps = ((outputs, 1), (1, 0)) if turned is None else ((1, outputs), (0, 1))
                b = x.as_strided((*stack, *shape), (*jumps, *steps), first + bias)
            found.append(Point(w, turned, b))
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


class _Room(NamedTuple):
    """Memory at a layer, written over in every step."""

    out: Tensor
    """The layer's outputs."""
    flat: Tensor
    """Where the product goes: the same for stacked layers, but (W a' + b) of the last one, whose transpose is `out`:
    losses are faster there. At one point for all: with clients and samples in one axis."""
    below: Tensor | None
    """The gradient with respect to the layer's inputs; nobody asks for that of the samples."""


class _Here(threading.local):
    """What a thread keeps from one step to the next."""

    def __init__(self) -> None:
        self._rooms: dict[Any, list[_Room]] = {}
        self.point: _Last[list[Point]] = _Last()
        self.target: _Last[list[Target]] = _Last()

    def space(self, layers: list[Layer], a: Tensor, stacked: bool) -> list[_Room]:
        key = (a.shape, a.dtype, a.device, stacked)
        if key not in self._rooms:
            if len(self._rooms) >= SHAPES:
                self._rooms.clear()
            self._rooms[key] = list(_rooms(layers, a, stacked))
        return self._rooms[key]

    def __reduce__(self) -> tuple[type[_Here], tuple[()]]:
        return _Here, ()  # a copy begins with none


SMALL = 1 << 12  # numbers in a product
SHAPES = 4  # of batches that a thread keeps memory for


def _rooms(layers: list[Layer], a: Tensor, stacked: bool) -> Iterator[_Room]:
    batch = a.shape[:-1]
    for k, layer in enumerate(layers):
        below = a.new_empty(*batch, layer.inputs) if k > 0 else None
        if stacked and k == len(layers) - 1:
            turned = a.new_empty(*batch[:-1], layer.outputs, batch[-1])
            yield _Room(turned.mT, turned, below)
        else:
            out = a.new_empty(*batch, layer.outputs)
            yield _Room(out, out if stacked else out.view(-1, layer.outputs), below)


class _Last(Generic[Views]):
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
