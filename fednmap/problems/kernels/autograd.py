"""What every kernel offers to `Network`; and gradients of any module by autograd, client by client or with vmap."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat

import torch
from torch import Tensor
from torch.func import vmap

from fednmap.core import AccumulatingOracle, Oracle
from fednmap.problems.finite_sum import Batch, Samples, Weight, total
from fednmap.problems.minibatch import seeded, step_seed
from fednmap.problems.module_loss import ModuleLoss

Slopes = tuple[Tensor, Sequence[Tensor]]
"""The loss of one or more clients, and its gradient with respect to each parameter of the module, (k, ...)."""
Address = tuple[int, int]
"""The seed of the minibatches, and the number of client 0 in the whole federation."""


class Kernel(ABC):
    """Gradients of a weighted loss on a batch.

    A batch is samples a (B, ...), targets b (B, ...) and their weights, at a point x (p,); or those of k clients,
    (k, B, ...), at points x (k, p) or at one common point (p,).
    """

    concurrent = True
    """Several threads may use it at a time."""

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

    def oracle(self, make: Callable[[Tensor, int], Oracle], clients: Tensor, t: int, address: Address) -> Oracle:
        """Return the oracle of round t for these clients; make(clients, t) is that of clients in one batch."""
        return make(clients, t)

    def chunk(self, default: int, rows: int) -> int:
        """Return how many clients with minibatches of `rows` samples are computed in one call.

        default: as many as have their vectors and minibatches in cache.
        """
        return default


class ModuleKernel(Kernel):
    """Gradients that autograd gives parameter by parameter: one client after another, with the module's own layers."""

    def slopes(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> Iterator[Slopes]:
        """Of the clients in order, one or more at a time."""
        if self._function.is_stack(a):
            weights = weight if isinstance(weight, Tensor) else repeat(weight)
            batches = zip(x.expand(len(a), -1), a, b, weights, strict=False)
        else:
            batches = zip([x], [a], [b], [weight], strict=True)
        for one in batches:
            value, slopes = self._function.value_and_slopes(*one)
            yield value, [v.unsqueeze(0) for v in slopes]

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


class OneByOneKernel(ModuleKernel):
    """One client after another."""

    def chunk(self, default: int, rows: int) -> int:
        return 1


class SeededKernel(OneByOneKernel):
    """One client after another, with torch's random numbers seeded by (seed, client, round, step).

    For modules that draw random numbers, and for samples that are read when they are needed.
    """

    concurrent = False  # torch's generator, and a data set, are for one thread

    def oracle(self, make: Callable[[Tensor, int], Oracle], clients: Tensor, t: int, address: Address) -> Oracle:
        (seed, first), ids = address, clients.reshape(-1)
        seeds = [(seed, first + int(i), t) for i in ids]
        return _SeededOracle([make(i, t) for i in ids], seeds, clients.shape)


class BatchedKernel(ModuleKernel):
    """Several clients in one pass forward and backward; a client alone by the module's own layers."""

    @abstractmethod
    def outputs(self, parameters: list[Tensor], a: Tensor, x: Tensor) -> Tensor:
        """Return the outputs (k, B, ...) for samples (k, B, ...) at parameters (k, ...), which are the pieces of x."""

    def slopes(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> Iterator[Slopes]:
        if not self._function.is_stack(a) or len(a) == 1:
            return super().slopes(x, a, b, weight)
        return iter([self.batched(x, a, b, weight)])

    @torch.enable_grad()
    def batched(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> Slopes:
        """Return the slopes of k clients."""
        leaves = [v.requires_grad_() for v in self._function.pieces(x.expand(len(a), -1))]
        out = self.outputs(leaves, a, x)
        value = self._function.weighted(out.flatten(0, 1), b.flatten(0, 1), weight, len(a))
        return value.detach(), torch.autograd.grad(value, leaves, materialize_grads=True)


class VmapKernel(BatchedKernel):
    """The forward pass is batched over clients by torch.func.vmap."""

    def works(self, a: Tensor, b: Tensor) -> bool:
        """Return whether the module can be batched: recurrent layers, among others, cannot."""
        try:
            x = self._function.start.expand(2, -1)
            self.value_and_gradient(x, torch.stack([a, a]), torch.stack([b, b]), 1 / len(a))
        except Exception:  # the user's own forward pass may fail in any way
            return False
        return True

    def outputs(self, parameters: list[Tensor], a: Tensor, x: Tensor) -> Tensor:
        out: Tensor = vmap(lambda *given: self._function.outputs_at(given[1:], given[0], x))(a, *parameters)
        return out


class KernelOracle:
    """The gradients on samples(x, q), those of local step q; a `core.AccumulatingOracle`."""

    def __init__(self, kernel: Kernel, samples: Callable[[Tensor, int], Samples], stack: tuple[int, ...]) -> None:
        self._kernel, self._samples, self.stack = kernel, samples, stack

    def __call__(self, x: Tensor, q: int) -> Tensor:
        return self._kernel.value_and_gradient(x, *self._samples(x, q))[1]

    def add(self, z: Tensor, x: Tensor, q: int, scale: float) -> None:
        self._kernel.add_gradient(z, x, *self._samples(x, q), scale)


class _SeededOracle:
    """Clients one after another, each step of each with its seed."""

    def __init__(self, oracles: list[Oracle], addresses: list[tuple[int, int, int]], stack: tuple[int, ...]) -> None:
        self._oracles, self._addresses, self.stack = oracles, addresses, stack

    def __call__(self, x: Tensor, q: int) -> Tensor:
        found = x.new_zeros(len(self._oracles), x.shape[-1])
        self.add(found if self.stack else found[0], x, q, 1.0)
        return found if self.stack else found[0]

    def add(self, z: Tensor, x: Tensor, q: int, scale: float) -> None:
        rows, points = z if self.stack else z.unsqueeze(0), x.expand(len(self._oracles), -1)
        for g, address, row, point in zip(self._oracles, self._addresses, rows, points, strict=True):
            with seeded(step_seed(*address, q), x.device):
                if isinstance(g, AccumulatingOracle):
                    g.add(row, point, q, scale)
                else:
                    row.add_(g(point, q), alpha=scale)
