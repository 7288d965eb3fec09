"""No regularizer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fednmap.core import Regularizer


@dataclass(frozen=True)
class Zero(Regularizer):
    """phi(x) = 0, whose prox is the identity.

    >>> import torch
    >>> Zero().prox(torch.tensor([1.0, -2.0]), 0.5)
    tensor([ 1., -2.])
    """

    def value(self, x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[:-1])

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        self.check_step(step)
        return v
