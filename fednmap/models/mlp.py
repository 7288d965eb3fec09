"""Fully connected networks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from fednmap.names import InputError, choose

ACTIVATIONS: dict[str, type[nn.Module]] = {"sigmoid": nn.Sigmoid, "relu": nn.ReLU, "tanh": nn.Tanh}


def mlp(inputs: int, outputs: int, hidden: Sequence[int] = (64,), activation: str = "sigmoid") -> nn.Sequential:
    """Linear layers with an activation between; one hidden sigmoid layer by default.

    >>> [tuple(p.shape) for p in mlp(784, 10).parameters()]
    [(64, 784), (64,), (10, 64), (10,)]
    """
    if not hidden or min(hidden) < 1:
        raise InputError(f"hidden layers of {list(hidden)} units; give at least one layer of at least 1")
    sizes = [inputs, *hidden, outputs]
    between = choose("activation", activation, ACTIVATIONS)
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in pairwise(sizes[:-1]):
        layers += [nn.Linear(a, b), between()]
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))
