"""The Hessians of single clients, where a problem knows that of one by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, Self

import torch
from torch import Tensor


class Curved(Protocol):
    """A problem with a Hessian, and its clients by themselves."""

    def alone(self, i: int) -> Self: ...

    def hessian(self, x: Tensor) -> Tensor: ...


def by_client(problem: Curved, clients: Tensor) -> Callable[[Tensor], Tensor]:
    """hessians(x) of these clients, (k, p, p) at x (k, p) or one common point; of one client (p, p)."""
    each = [problem.alone(i) for i in clients.reshape(-1).tolist()]

    def hessians(x: Tensor) -> Tensor:
        found = [one.hessian(v) for one, v in zip(each, x.expand(len(each), -1), strict=True)]
        return torch.stack(found) if clients.ndim else found[0]

    return hessians
