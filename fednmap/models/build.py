"""Networks by name, made to measure for a data set; those of layers in a row are made here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from itertools import pairwise
from math import prod

import torch
from torch import nn

from fednmap.data.dataset import Dataset
from fednmap.models.mobilenet import mobilenet_v3_small
from fednmap.names import InputError, called, choose, imported, is_code, parted

Shape = Sequence[int]

ACTIVATIONS: dict[str, type[nn.Module]] = {"sigmoid": nn.Sigmoid, "relu": nn.ReLU, "tanh": nn.Tanh}


def linear(inputs: int, outputs: int) -> nn.Sequential:
    """Return one linear layer: logistic regression under the cross-entropy, least squares under the squared error.

    >>> sum(p.numel() for p in linear(784, 10).parameters())
    7850
    """
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, outputs))


def mlp(inputs: int, outputs: int, hidden: int | Sequence[int] = (64,), activation: str = "sigmoid") -> nn.Sequential:
    """Return linear layers with an activation between them; one hidden sigmoid layer by default.

    Layers without units raise InputError.

    >>> [tuple(p.shape) for p in mlp(784, 10).parameters()]
    [(64, 784), (64,), (10, 64), (10,)]
    """
    hidden = (hidden,) if isinstance(hidden, int) else hidden
    if not hidden or min(hidden) < 1:
        raise InputError(f"hidden layers of {list(hidden)} units; give at least one layer of at least 1")
    sizes = [inputs, *hidden, outputs]
    between = choose("activation", activation, ACTIVATIONS)
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in pairwise(sizes[:-1]):
        layers += [nn.Linear(a, b), between()]
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))


def cnn(shape: Sequence[int], outputs: int, channels: Sequence[int] = (16, 32), hidden: int = 64) -> nn.Sequential:
    """Return two 3 x 3 convolutions with ReLU and 2 x 2 max pooling, then two linear layers with ReLU between.

    shape: (channels, height, width) of a picture, at least 8 x 8; others raise InputError.

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


def _linear(shape: Shape, outputs: int) -> nn.Module:
    """linear: one linear layer."""
    return linear(prod(shape), outputs)


def _mlp(shape: Shape, outputs: int, units: str = "64", activation: str = "sigmoid") -> nn.Module:
    """mlp[:UNITS[,UNITS...][:ACTIVATION]]: fully connected; 64 sigmoid units, sigmoid, relu or tanh."""
    try:
        hidden = [int(number) for number in units.split(",")]
    except ValueError:
        raise InputError(f"mlp takes numbers of hidden units, as in mlp:64,32:relu, given {units!r}") from None
    return mlp(prod(shape), outputs, hidden, activation)


def _cnn(shape: Shape, outputs: int) -> nn.Module:
    """cnn: two convolutions and two linear layers, for pictures."""
    return cnn(shape, outputs)


def _mobilenet(shape: Shape, outputs: int, norm: str = "batch") -> nn.Module:
    """mobilenet-v3-small[:NORM]: for colour pictures, with batch (the default) or group normalisation."""
    if len(shape) != 3:
        raise InputError(f"mobilenet-v3-small needs pictures (channels, height, width), given {tuple(shape)}")
    return mobilenet_v3_small(outputs, norm, shape[0])


MODELS: dict[str, Callable[..., nn.Module]] = {
    "linear": _linear,
    "mlp": _mlp,
    "cnn": _cnn,
    "mobilenet-v3-small": _mobilenet,
}


def build(spec: str, dataset: Dataset) -> nn.Module:
    """Return the network that `spec` names, for samples of `dataset`: one output per label, or one in regression.

    linear, mlp:64, mlp:64,32:relu, cnn, mobilenet-v3-small, mobilenet-v3-small:group; or your own,
    package.module:Name:word,..., called as Name(shape of a sample, outputs, word, ...). Others raise InputError.

    >>> from fednmap.data import load
    >>> build("mlp:32:relu", load("digits"))[1]
    Linear(in_features=64, out_features=32, bias=True)
    """
    if dataset.classes == 1:
        raise InputError("all training rows have the same label; give data with at least two")
    shape, outputs = tuple(dataset.x_train.shape[1:]), dataset.classes or 1
    with torch.device("cpu"):
        if is_code(spec, MODELS):
            name, argument = parted(spec, MODELS)
            module = called(spec, imported("model", name, MODELS), (shape, outputs), argument)
        else:
            name, *arguments = spec.split(":")
            make = choose("model", name, MODELS)
            most = len(signature(make).parameters) - 2
            if len(arguments) > most:
                given = ":".join(arguments)
                raise InputError(f"model {name!r} takes {most or 'no'} arguments after a colon, given {given!r}")
            module = make(shape, outputs, *arguments)
    if not isinstance(module, nn.Module):
        raise InputError(f"model {spec!r} gave {type(module).__name__}; it must give a torch.nn.Module")
    if dataset.classes:
        return module
    # targets of a regression have shape (N,), and so must the outputs have: (N, 1) would broadcast to (N, N)
    parts = list(module) if type(module) is nn.Sequential else [module]  # a subclass may compute otherwise
    return nn.Sequential(*parts, nn.Flatten(0))
