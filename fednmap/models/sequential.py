"""Networks of layers in a row: linear, fully connected, and a small convolutional one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from fednmap.names import InputError, choose

ACTIVATIONS: dict[str, type[nn.Module]] = {"sigmoid": nn.Sigmoid, "relu": nn.ReLU, "tanh": nn.Tanh}


def linear(inputs: int, outputs: int) -> nn.Sequential:
    """One linear layer: logistic regression under the cross-entropy, least squares under the squared error.

    >>> sum(p.numel() for p in linear(784, 10).parameters())
    7850
    """
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, outputs))


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


def cnn(shape: Sequence[int], outputs: int, channels: Sequence[int] = (16, 32), hidden: int = 64) -> nn.Sequential:
    """Two 3 x 3 convolutions, each with ReLU and 2 x 2 max pooling, then two linear layers with ReLU between.

    shape: (channels, height, width) of a picture, at least 8 x 8.

    There is no padding, so a filter whose weights are all zero gives the same number everywhere, and that
    number can move into the next layer's bias (`fednmap.models.prune.prune`).

    >>> sum(p.numel() for p in cnn((1, 28, 28), 10).parameters())
    79242
    """
    if len(shape) != 3 or min(shape[1:]) < 8:
        raise InputError(f"cnn needs pictures (channels, height, width) of at least 8 x 8, given {tuple(shape)}")
    depth, *size = shape
    layers: list[nn.Module] = []
    for width in channels:
        # ceil_mode keeps a last row or column that has no partner
        layers += [nn.Conv2d(depth, width, 3), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)]
        depth, size = width, [(side - 2 + 1) // 2 for side in size]
    flat = depth * size[0] * size[1]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(flat, hidden), nn.ReLU(), nn.Linear(hidden, outputs))
