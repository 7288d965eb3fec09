"""The arithmetic of local steps, in place: a round is bound by memory bandwidth.

A method calls `step.down(z, x, q, d)` where its box says z - eta_a (g(x, q) + d), and `step(z, a, b)` where it says
z - eta_a (a + b). The memory written over is allocated here: never an input of the method, never a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fednmap.core import Oracle
from fednmap.names import renamed


class LocalSteps:
    """Local steps of size eta, each written over the iterate before it; with g, the gradients that they follow.

    step(z, *directions) = z - eta (the sum of the directions)
    step.down(z, x, q, *directions) = z - eta (g(x, q) + the sum of the directions)

    >>> step = LocalSteps(0.5, lambda x, q: 2 * x)
    >>> step(torch.zeros(2), torch.ones(2), torch.ones(2))
    tensor([-1., -1.])
    >>> step.down(torch.zeros(2), torch.ones(2), 0)
    tensor([-1., -1.])
    """

    def __init__(self, eta: float, g: Oracle | None = None) -> None:
        # asked by name: an instance check against a protocol takes as long as a small problem's whole step
        self.eta, self._g, self._add = eta, g, getattr(g, "add", None)
        self._space: Tensor | None = None

    def __call__(self, z: Tensor, first: Tensor, *others: Tensor) -> Tensor:
        if self._space is None:  # the first step allocates: z may be common, and a direction that of k clients
            z = torch.sub(z, first, alpha=self.eta)
            for direction in others:
                z = torch.sub(z, direction, alpha=self.eta)
            self._space = z
            return z
        z = torch.sub(z.expand(self._space.shape), first, alpha=self.eta, out=self._space)
        for direction in others:  # one pass each: a sum first would be written and read once more
            z.sub_(direction, alpha=self.eta)
        return z

    def down(self, z: Tensor, x: Tensor, q: int, *directions: Tensor) -> Tensor:
        """Return z - eta (g(x, q) + the sum of the directions); in place for an `AccumulatingOracle`."""
        assert self._g is not None
        if self._add is None or (z is not self._space and self._space is not None):
            return self(z, self._g(x, q), *directions)
        if self._space is None:
            self._space = z.new_empty(*self._g.stack, z.shape[-1])  # type: ignore[attr-defined]
            z, directions = self(z, *directions) if directions else self._space.copy_(z), ()
        self._add(z, x, q, -self.eta)  # before the directions, since z may be x
        for direction in directions:
            z.sub_(direction, alpha=self.eta)
        return z

    def mean(self, z: Tensor, last: Tensor, count: int) -> Tensor:
        """Return (z - last) / (eta count), written over `last`, the iterate after `count` steps from z."""
        return torch.sub(z, last, out=last).div_(self.eta * count)


__getattr__ = renamed(__name__, {"Steps": "LocalSteps"})
