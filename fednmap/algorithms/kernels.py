"""The arithmetic of local steps, in place: a round is bound by memory bandwidth.

A method calls `step.down(z, x, q, d)` where its box says z - eta_a (g(x, q) + d), and `step(z, a, b)` where it says
z - eta_a (a + b). The memory written over is allocated here: never an input of the method, never a gradient.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from fednmap.core import Oracle
from fednmap.names import renamed


class LocalSteps:
    """Local steps of size eta, each written over the iterate before it; with g, the gradients that they follow.

    step(z, *directions) = z - eta (the sum of the directions)
    step.down(z, x, q, *directions) = z - eta (g(x, q) + the sum of the directions)

    With momentum or decay, `down` is z - eta decay^q v_q, v_q = momentum v_{q-1} + g(x, q) + the sum of the directions:
    heavy-ball momentum that begins at 0 in every round, and steps that shrink within it.

    >>> step = LocalSteps(0.5, lambda x, q: 2 * x)
    >>> step(torch.zeros(2), torch.ones(2), torch.ones(2))
    tensor([-1., -1.])
    >>> step.down(torch.zeros(2), torch.ones(2), 0)
    tensor([-1., -1.])
    """

    def __init__(self, eta: float, g: Oracle | None = None, momentum: float = 0.0, decay: float = 1.0) -> None:
        # asked by name: an instance check against a protocol takes as long as a small problem's whole step
        self.eta, self._g, self._add = eta, g, getattr(g, "add", None)
        self._space: Tensor | None = None
        self._momentum, self._decay, self._velocity = momentum, decay, cast(Tensor | None, None)

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
        if self._momentum or self._decay != 1:
            v: Tensor = sum(directions, start=self._g(x, q))
            self._velocity = v if self._velocity is None else torch.add(v, self._velocity, alpha=self._momentum)
            return torch.sub(z, self._velocity, alpha=self.eta * self._decay**q)
        if self._add is None or (z is not self._space and self._space is not None):
            return self(z, self._g(x, q), *directions)
        if self._space is None:
            self._space = z.new_empty(*self._g.stack, z.shape[-1])  # type: ignore[attr-defined]
            z, directions = self(z, *directions) if directions else self._space.copy_(z), ()
        self._add(z, x, q, -self.eta)  # before the directions, since z may be x
        for direction in directions:
            z.sub_(direction, alpha=self.eta)
        return z

    def mean(self, z: Tensor, last: Tensor, count: float) -> Tensor:
        """Return (z - last) / (eta count), written over `last`, the iterate after `count` steps from z.

        With momentum or decay count is `plain_steps`: a mean of the directions, with weights that sum to 1.
        """
        return torch.sub(z, last, out=last).div_(self.eta * count)


def plain_steps(count: int, momentum: float, decay: float) -> float:
    """Return to how many plain steps along one direction `count` steps with momentum and decay amount.

    >>> plain_steps(3, 0.0, 1.0), plain_steps(2, 0.5, 1.0), plain_steps(2, 0.0, 0.5)
    (3, 2.5, 1.5)
    """
    if not momentum and decay == 1:
        return count
    velocity = total = 0.0
    for q in range(count):
        velocity = momentum * velocity + 1
        total += decay**q * velocity
    return total


__getattr__ = renamed(__name__, {"Steps": "LocalSteps"})
