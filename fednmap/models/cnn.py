"""A small convolutional network."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fednmap.names import InputError


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
