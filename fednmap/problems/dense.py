"""Fully connected networks: the gradients of many clients at once, with backpropagation written out.

Autograd over stacked weights moves every gradient once more, into the flat vector, and its bookkeeping costs as much
as small matrix products do. Here each product is written straight into its place.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from fednmap.problems.space import Space

Activation = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]

Place = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and offset of a parameter in the flat vector."""

ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.Sigmoid: (torch.sigmoid_, torch.ops.aten.sigmoid_backward),
    nn.Tanh: (torch.tanh_, torch.ops.aten.tanh_backward),
    nn.ReLU: (torch.relu_, lambda d, h: torch.ops.aten.threshold_backward(d, h, 0)),
}
"""h = s(v), written over v, and the gradient with respect to v from (the one with respect to h, h)."""


class Dense:
    """Linear layers, each followed by at most one activation, their parameters in one flat vector x.

    So an activation may overwrite its input, a product that nothing else needs.
    Samples are (B, d) at one point x (p,), or (k, B, d) for k clients at x (k, p) or at one common x (p,).
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        self._kinds = [type(layer) for layer in layers]
        self._places: list[list[Place]] = []
        offset = 0
        for layer in layers:
            self._places.append([])
            for p in layer.parameters():
                self._places[-1].append((tuple(p.shape), (p.shape[-1], 1)[-p.ndim :], offset))
                offset += p.numel()
        self._space = Space()

    @classmethod
    def of(cls, module: nn.Module, sample: Tensor) -> Dense | None:
        """The module in this form, or None if it does anything else with such a sample."""
        layers = list(module) if type(module) is nn.Sequential else [module]
        flat = sample.ndim == 1
        if layers and type(layers[0]) is nn.Flatten and (layers[0].start_dim, layers[0].end_dim) == (1, -1):
            layers, flat = layers[1:], True
        neighbours = pairwise([None, *(type(layer) for layer in layers)])
        known = all(b is nn.Linear or (b in ACTIVATIONS and a is nn.Linear) for a, b in neighbours)
        hooked = any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
        in_order = [id(p) for p in module.parameters()] == [id(p) for layer in layers for p in layer.parameters()]
        return cls(layers) if flat and known and in_order and not hooked else None

    def gradient(self, x: Tensor, a: Tensor, slope: Callable[[Tensor], Tensor]) -> Tensor:
        """The gradient of a loss whose gradient with respect to the outputs is slope(outputs)."""
        weights, batch = self._pieces(x), a.shape[:-1]
        values = [a]  # values[i] enters layer i, values[i + 1] leaves it
        for i, kind in enumerate(self._kinds):
            if kind is nn.Linear:
                last = i == len(self._kinds) - 1
                values.append(self._linear(i, values[-1], weights[i], last))
            else:
                values.append(ACTIVATIONS[kind][0](values[-1]))
        gradient = x.new_empty(*batch[:-1], x.shape[-1])
        into, d = self._pieces(gradient), slope(values[-1])
        product = torch.bmm if a.ndim == 3 else torch.mm  # matmul would compute elsewhere, and copy
        for i, kind in reversed(list(enumerate(self._kinds))):
            if kind is nn.Linear:
                product(d.mT, values[i], out=into[i][0])
                for bias in into[i][1:]:
                    torch.sum(d, -2, out=bias)
                if i > 0:
                    d = _back(d, weights[i][0], self._space(-i, values[i].shape, x))
            else:
                d = ACTIVATIONS[kind][1](d, values[i + 1])
        return gradient

    def _linear(self, i: int, a: Tensor, parameters: list[Tensor], last: bool) -> Tensor:
        """a W' + b of layer i; of a stack of last layers as (W a' + b)', the form in which losses are faster."""
        weight, *bias = parameters
        shape = (*a.shape[:-1], weight.shape[-2])
        if weight.ndim == 2:  # one point for all: one product
            out = self._space(i, shape, a)
            flat, rows = a.flatten(0, -2), out.view(-1, shape[-1])
            torch.addmm(bias[0], flat, weight.t(), out=rows) if bias else torch.mm(flat, weight.t(), out=rows)
            return out
        if last:
            out = self._space(i, (*shape[:-2], shape[-1], shape[-2]), a)
            left, right, added = weight, a.mT, [b.unsqueeze(-1) for b in bias]
        else:
            out = self._space(i, shape, a)
            left, right, added = a, weight.mT, [b.unsqueeze(-2) for b in bias]
        torch.baddbmm(added[0], left, right, out=out) if bias else torch.bmm(left, right, out=out)
        return out.mT if last else out

    def _pieces(self, x: Tensor) -> list[list[Tensor]]:
        """The parameters of each layer, as views of x."""
        if x.stride(-1) != 1:
            x = x.contiguous()
        stack, jumps, first = x.shape[:-1], x.stride()[:-1], x.storage_offset()
        return [
            [x.as_strided((*stack, *shape), (*jumps, *strides), first + offset) for shape, strides, offset in layer]
            for layer in self._places
        ]


def _back(d: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """d W, written to `out`."""
    if weight.ndim == 2:
        torch.mm(d.flatten(0, -2), weight, out=out.view(-1, out.shape[-1]))
        return out
    return torch.bmm(d, weight, out=out)
