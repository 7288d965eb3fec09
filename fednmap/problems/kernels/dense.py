"""Fully connected networks: batched gradients of many clients, with backpropagation written out.

Autograd over stacked weights moves every gradient once more, into the flat vector, and its bookkeeping costs as much
as small matrix products do. Here each product is written straight into its place.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from fednmap.problems.families import less_one
from fednmap.problems.finite_sum import Weight
from fednmap.problems.kernels.autograd import Kernel
from fednmap.problems.module_loss import ModuleLoss
from fednmap.problems.probe import hooked

aten = torch.ops.aten

SMALL = 1 << 12  # numbers in a product

Activation = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]
"""h = s(v), written over v; and from (d, h), the gradient with respect to h and h, the one with respect to v."""

ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.Sigmoid: (torch.sigmoid_, aten.sigmoid_backward),
    nn.Tanh: (torch.tanh_, aten.tanh_backward),
    nn.ReLU: (torch.relu_, lambda d, h: aten.threshold_backward(d, h, 0)),
}


class DenseKernel(Kernel):
    """Linear layers, each followed by at most one activation, with backpropagation written out.

    So an activation may overwrite its input, a product that nothing else needs.
    """

    def __init__(self, function: ModuleLoss, layers: list[nn.Module]) -> None:
        super().__init__(function)
        self._layers: list[tuple[int, int, bool, type[nn.Module] | None]] = []  # inputs, outputs, bias, activation
        for layer in layers:
            if isinstance(layer, nn.Linear):
                self._layers.append((layer.in_features, layer.out_features, layer.bias is not None, None))
            else:
                self._layers[-1] = *self._layers[-1][:3], type(layer)

    @classmethod
    def of(cls, function: ModuleLoss, sample: Tensor) -> DenseKernel | None:
        """Return the kernel of this function, or None if its module does anything else with such a sample."""
        layers = dense_layers(function.module, sample) if function.plain else None
        return None if layers is None or function.frozen or function.half else cls(function, layers)

    def add_gradient(self, z: Tensor, x: Tensor, a: Tensor, b: Tensor, weight: Weight, scale: float) -> None:
        if z.stride(-1) == 1:
            self.value_and_gradient(x, a, b, weight, z, scale)
        else:
            super().add_gradient(z, x, a, b, weight, scale)

    def value_and_gradient(
        self, x: Tensor, a: Tensor, b: Tensor, weight: Weight, onto: Tensor | None = None, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and its gradient.

        onto: where `scale` times the gradient is added instead. May be x itself: a layer's weights are done with when
              their gradient comes.
        """
        x, a = x.detach(), a.flatten(1 - self._function.axes)
        x = x if x.stride(-1) == 1 else x.contiguous()
        parameters, values = self._parameters(x), [a]  # values[i] enters layer i, values[i + 1] leaves it
        for (w, bias), (*_, activation) in zip(parameters, self._layers, strict=True):
            if x.ndim == 1:  # one point for all: one product
                out = nn.functional.linear(values[-1], w, bias)
            elif bias is None:
                out = torch.bmm(values[-1], w.mT)
            else:
                out = torch.baddbmm(bias.unsqueeze(-2), values[-1], w.mT)
            values.append(out if activation is None else ACTIVATIONS[activation][0](out))
        value, d = self._value_and_slope(values[-1], b, weight, onto is None)
        into = x.new_empty(*a.shape[:-2], x.shape[-1]) if onto is None else onto
        targets, product = self._parameters(into), torch.mm if a.ndim == 2 else torch.bmm  # matmul would copy
        for i in range(len(parameters) - 1, -1, -1):
            activation = self._layers[i][3]
            if activation is not None:
                d = ACTIVATIONS[activation][1](d, values[i + 1])
            w, below = parameters[i][0], d
            if i > 0:
                below = torch.bmm(d, w) if w.ndim == 3 else torch.mm(d.flatten(0, -2), w).view(*d.shape[:-1], -1)
            w, bias = targets[i]
            if onto is None:
                product(d.mT, values[i], out=w)
                if bias is not None:
                    torch.sum(d, -2, out=bias)
            else:
                _add_product(w, d.mT, values[i], scale)
                if bias is not None:
                    bias.add_(d.sum(-2), alpha=scale)
            d = below
        return value, into

    def _parameters(self, x: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        """Weight and bias of each layer, as views of x, (p,) or (k, p)."""
        stack, jumps, at = x.shape[:-1], x.stride()[:-1], x.storage_offset()
        found: list[tuple[Tensor, Tensor | None]] = []
        for inputs, outputs, has_bias, _ in self._layers:
            weight = x.as_strided((*stack, outputs, inputs), (*jumps, inputs, 1), at)
            at += outputs * inputs
            found.append((weight, x.as_strided((*stack, outputs), (*jumps, 1), at) if has_bias else None))
            at += outputs * has_bias
        return found

    @torch.enable_grad()
    def _value_and_slope(self, out: Tensor, b: Tensor, weight: Weight, wanted: bool) -> tuple[Tensor, Tensor]:
        """The loss, 0 unless it is wanted, and its gradient with respect to the outputs."""
        if self._function.classifies:  # autograd would cost more than this
            with torch.no_grad():
                share = torch.log_softmax(out.mT.contiguous(), -2)  # over the last axis it takes five times as long
                right = share.gather(-2, b.unsqueeze(-2)).squeeze(-2) if wanted else None
                each = weight.unsqueeze(-2) if isinstance(weight, Tensor) else weight
                slope = less_one(share.exp_(), b, -2).mul_(each).mT
                return slope.new_zeros(()) if right is None else -(weight * right).sum(), slope
        out = out.detach().requires_grad_()
        joined = (out, b) if out.ndim == 2 else (out.flatten(0, 1), b.flatten(0, 1))
        total = self._function.weighted(*joined, weight, 1 if out.ndim == 2 else len(out))
        return total.detach(), torch.autograd.grad(total, out)[0]


def dense_layers(module: nn.Module, sample: Tensor) -> list[nn.Module] | None:
    """The linear layers and activations that are all a module does with such a sample, or None if there is more."""
    layers = list(module) if type(module) is nn.Sequential else [module]
    flat = sample.ndim == 1
    if layers and type(layers[0]) is nn.Flatten and (layers[0].start_dim, layers[0].end_dim) == (1, -1):
        layers, flat = layers[1:], True
    neighbours = pairwise([None, *(type(layer) for layer in layers)])
    known = all(b is nn.Linear or (b in ACTIVATIONS and a is nn.Linear) for a, b in neighbours)
    in_order = [id(p) for p in module.parameters()] == [id(p) for layer in layers for p in layer.parameters()]
    return layers if flat and known and in_order and not any(map(hooked, module.modules())) else None


def _add_product(onto: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """onto += scale a b. Torch computes stacks with gaps one product at a time: small ones are faster in two passes."""
    if onto.ndim == 2:
        onto.addmm_(a, b, alpha=scale)
    elif onto.shape[-2] * onto.shape[-1] > SMALL:
        onto.baddbmm_(a, b, alpha=scale)
    else:
        onto.add_(torch.bmm(a, b), alpha=scale)
