"""Fully connected networks: the gradients of many clients at once, with backpropagation written out.

Autograd over stacked weights moves every gradient once more, into the flat vector, and its bookkeeping costs as much
as small matrix products do. Here each product is written straight into its place.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

Activation = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]

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
        self._shapes = [[p.shape for p in layer.parameters()] for layer in layers]
        self._numels = [shape.numel() for shapes in self._shapes for shape in shapes]

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
        layers = list(zip(self._kinds, self._pieces(x), strict=True))
        values = [a]  # values[i] enters layer i, values[i + 1] leaves it
        for kind, parameters in layers:
            values.append(_linear(values[-1], *parameters) if kind is nn.Linear else ACTIVATIONS[kind][0](values[-1]))
        product = torch.bmm if a.ndim == 3 else torch.mm  # matmul would compute elsewhere, and copy
        gradient = x.new_empty(*a.shape[:-2], x.shape[-1])
        into, d = self._pieces(gradient), slope(values[-1])
        for i, (kind, parameters) in reversed(list(enumerate(layers))):
            if kind is nn.Linear:
                product(d.mT, values[i], out=into[i][0])
                for bias in into[i][1:]:
                    torch.sum(d, -2, out=bias)
                d = torch.matmul(d, parameters[0]) if i > 0 else d
            else:
                d = ACTIVATIONS[kind][1](d, values[i + 1])
        return gradient

    def _pieces(self, x: Tensor) -> list[list[Tensor]]:
        """The parameters of each layer, as views of x."""
        flat = iter(x.split(self._numels, -1))
        return [[next(flat).view(*x.shape[:-1], *shape) for shape in shapes] for shapes in self._shapes]


def _linear(a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if weight.ndim == 2:  # one point for all
        return nn.functional.linear(a, weight, bias)
    return a @ weight.mT if bias is None else torch.baddbmm(bias.unsqueeze(-2), a, weight.mT)
