"""Gradients of any module by autograd: one client after another, or a stack of clients with vmap."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import vmap

from fednmap.problems.finite_sum import Weight
from fednmap.problems.kernels.kernel import Kernel, client_by_client
from fednmap.problems.module_loss import ModuleLoss


class OneByOneKernel(Kernel):
    """One client after another, with the module's own layers."""

    def __init__(self, function: ModuleLoss) -> None:
        self._function = function

    def value_and_gradient(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
        if self._function.is_stack(a):
            each = [self.value_and_gradient(*one) for one in client_by_client(x, a, b, weight)]
            values, gradients = zip(*each, strict=True)
            return sum(values), torch.stack(gradients)
        value, slopes = self._function.value_and_slopes(x.detach(), a, b, weight)
        return value, torch.cat([v.reshape(-1) for v in slopes])

    def add_gradient(self, z: Tensor, x: Tensor, a: Tensor, b: Tensor, weight: Weight, scale: float) -> None:
        if self._function.is_stack(a):
            for into, one in zip(z, client_by_client(x, a, b, weight), strict=True):
                self.add_gradient(into, *one, scale)
        else:
            slopes = self._function.value_and_slopes(x.detach(), a, b, weight)[1]
            torch._foreach_add_(z.split(self._function.numels), [v.reshape(-1) for v in slopes], alpha=scale)

    def chunk(self, default: int, rows: int) -> int:
        return 1


class VmapKernel(Kernel):
    """The forward pass is batched over clients; one backward pass then serves all of them."""

    def __init__(self, function: ModuleLoss) -> None:
        self._function, self._one_by_one = function, OneByOneKernel(function)

    def works(self, a: Tensor, b: Tensor) -> bool:
        """Whether the module can be batched: recurrent layers, among others, cannot."""
        try:
            x = self._function.start.expand(2, -1)
            self.gradient(x, torch.stack([a, a]), torch.stack([b, b]), 1 / len(a))
        except RuntimeError:
            return False
        return True

    def value_and_gradient(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
        if not self._function.is_stack(a) or len(a) == 1:
            return self._one_by_one.value_and_gradient(x, a, b, weight)
        with torch.enable_grad():
            x = x.detach().expand(len(a), -1).requires_grad_()
            axes = (0, 0, 0, 0 if isinstance(weight, Tensor) else None)
            total = vmap(self._function, axes)(x, a, b, weight).sum()
            return total.detach(), torch.autograd.grad(total, x)[0]

    def add_gradient(self, z: Tensor, x: Tensor, a: Tensor, b: Tensor, weight: Weight, scale: float) -> None:
        z.add_(self.gradient(x, a, b, weight), alpha=scale)
