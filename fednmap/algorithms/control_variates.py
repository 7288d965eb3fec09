"""Control variates: what FedNMap, Zhang's method, FedCanon and SCAFFOLD correct their local gradients by."""

from __future__ import annotations

import torch
from torch import Tensor


def correction(h: Tensor, h_i: Tensor, forget: float, common: Tensor | float = 0.0) -> Tensor:
    """Return common + (1 - forget)(h - h_i), where h is the mean of all clients' h_i.

    forget: the share of the correction that is forgotten; 0 in the published methods.
    common: a term that all clients share.

    >>> correction(torch.tensor([3.0]), torch.tensor([1.0]), forget=0.5)
    tensor([1.])
    """
    keep = 1 - forget
    return torch.sub(common + keep * h, h_i, alpha=keep)


def revealed_gradient(x: Tensor, h: Tensor, Q: int, forget: float) -> tuple[Tensor, Tensor] | None:
    """Return (x, grad f(x)) after a round from x whose mean local gradient is h; None where h is not grad f(x).

    With one local step, exact gradients and every client counted, h is the gradient of f at x.
    """
    return (x, h) if Q == 1 and not forget else None
