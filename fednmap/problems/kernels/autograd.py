"""What every kernel offers to `Network`; and gradients of any module by autograd, client by client or with vmap."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.func import vmap

from fednmap.problems.finite_sum import Batch, Weight, total
from fednmap.problems.module_loss import ModuleLoss

Slopes = tuple[Tensor, Sequence[Tensor]]
"""The loss of one or more clients, and its gradient with respect to each parameter of the module, (k, ...)."""


class Kernel(ABC):
    """Gradients of a weighted loss on a batch.

    A batch is samples a (B, ...), targets b (B, ...) and their weights, at a point x (p,); or those of k clients,
    (k, B, ...), at points x (k, p) or at one common point (p,).
    """

    def __init__(self, function: ModuleLoss) -> None:
        self._function = function

    @abstractmethod
    def value_and_gradient(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
        """Return the loss, summed over clients, and the gradient, (p,) or (k, p) of k clients."""

    def add_gradient(self, z: Tensor, x: Tensor, a: Tensor, b: Tensor, weight: Weight, scale: float) -> None:
        """Compute z += scale * gradient, in place; z may be x itself."""
        z.add_(self.value_and_gradient(x, a, b, weight)[1], alpha=scale)

    def total(self, x: Tensor, batches: Iterable[Batch]) -> tuple[Tensor, Tensor]:
        """Return the sum of `value_and_gradient` over batches, at one point x (p,)."""
        return total(self.value_and_gradient, x, batches)

    def chunk(self, default: int, rows: int) -> int:
        """Return how many clients with minibatches of `rows` samples are computed in one call.

        default: as many as have their vectors and minibatches in cache.
        """
        return default


class ModuleKernel(Kernel):
    """Gradients that autograd gives parameter by parameter, of one client or of several."""

    @abstractmethod
    def slopes(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> Iterator[Slopes]:
        """Of the clients in order, one or more at a time."""

    def value_and_gradient(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
        found = ((v, torch.cat([w.flatten(1) for w in few], 1)) for v, few in self.slopes(x.detach(), a, b, weight))
        values, rows = zip(*found, strict=True)
        gradient = torch.cat(rows) if len(rows) > 1 else rows[0]
        return sum(values[1:], start=values[0]), gradient if self._function.is_stack(a) else gradient[0]

    def add_gradient(self, z: Tensor, x: Tensor, a: Tensor, b: Tensor, weight: Weight, scale: float) -> None:
        rows, first = z if self._function.is_stack(a) else z.unsqueeze(0), 0
        for _, slopes in self.slopes(x.detach(), a, b, weight):
            into = rows[first : first + len(slopes[0])].split(self._function.numels, 1)
            torch._foreach_add_(into, [v.flatten(1) for v in slopes], alpha=scale)
            first += len(slopes[0])

    def one_by_one(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> Iterator[Slopes]:
        """Yield the slopes with the module's own layers."""
        if self._function.is_stack(a):
            weights = weight if isinstance(weight, Tensor) else [weight] * len(a)
            batches = zip(x.expand(len(a), -1), a, b, weights, strict=True)
        else:
            batches = zip([x], [a], [b], [weight], strict=True)
        for one in batches:
            value, slopes = self._function.value_and_slopes(*one)
            yield value, [v.unsqueeze(0) for v in slopes]


class OneByOneKernel(ModuleKernel):
    """One client after another, with the module's own layers."""

    def slopes(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> Iterator[Slopes]:
        return self.one_by_one(x, a, b, weight)

    def chunk(self, default: int, rows: int) -> int:
        return 1


class VmapKernel(Kernel):
    """The forward pass is batched over clients; one backward pass then serves all of them."""

    def works(self, a: Tensor, b: Tensor) -> bool:
        """Return whether the module can be batched: recurrent layers, among others, cannot."""
        try:
            x = self._function.start.expand(2, -1)
            self.value_and_gradient(x, torch.stack([a, a]), torch.stack([b, b]), 1 / len(a))
        except Exception:  # the user's own forward pass may fail in any way
            return False
        return True

    def value_and_gradient(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
        if not self._function.is_stack(a) or len(a) == 1:
            return OneByOneKernel(self._function).value_and_gradient(x, a, b, weight)
        with torch.enable_grad():
            x = x.detach().expand(len(a), -1).requires_grad_()
            axes = (0, 0, 0, 0 if isinstance(weight, Tensor) else None)
            total = vmap(self._function, axes)(x, a, b, weight).sum()
            return total.detach(), torch.autograd.grad(total, x)[0]
