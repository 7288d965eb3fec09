"""What every way to compute a network's gradients offers to `Network`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

from torch import Tensor

from fednmap.problems.finite_sum import Weight, total


class Kernel(ABC):
    """Gradients of a weighted loss on a batch.

    A batch is samples a (B, ...), targets b (B, ...) and their weights, at a point x (p,); or those of k clients,
    (k, B, ...), at points x (k, p) or at one common point (p,).
    """

    @abstractmethod
    def value_and_gradient(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
        """The loss, summed over clients, and the gradient, (p,) or (k, p) of k clients."""

    @abstractmethod
    def add_gradient(self, z: Tensor, x: Tensor, a: Tensor, b: Tensor, weight: Weight, scale: float) -> None:
        """z += scale * gradient, in place; z may be x itself."""

    def gradient(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> Tensor:
        """The gradient alone; a kernel overrides it if the loss is extra work."""
        return self.value_and_gradient(x, a, b, weight)[1]

    def total(self, x: Tensor, batches: Iterable[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """The sum of `value_and_gradient` over batches, at one point x (p,)."""
        return total(self.value_and_gradient, x, batches)

    def chunk(self, default: int, rows: int) -> int:
        """How many clients with minibatches of `rows` samples are computed in one call.

        default: as many as have their vectors and minibatches in cache.
        """
        return default


def client_by_client(
    x: Tensor, a: Tensor, b: Tensor, weight: Weight
) -> Iterator[tuple[Tensor, Tensor, Tensor, Weight]]:
    """The batch of each of k clients."""
    weights = weight if isinstance(weight, Tensor) else [weight] * len(a)
    return zip(x.expand(len(a), -1), a, b, weights, strict=True)
