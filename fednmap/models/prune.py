"""Taking out hidden units that do nothing: what sparsity by rows, filters or columns is worth."""

from __future__ import annotations

import copy
from itertools import pairwise

import torch
from torch import nn

from fednmap.names import InputError

Layer = nn.Linear | nn.Conv2d

POINTWISE = (nn.ReLU, nn.Sigmoid, nn.Tanh)
SAME = (nn.Flatten, nn.Identity, nn.Dropout, nn.Dropout2d)  # a constant stays what it is, in eval mode
POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)


def prunable(module: nn.Module) -> bool:
    """Return whether `prune` can handle the module: a sequence of layers with only activations and pools between."""
    return _pairs(module) is not None


@torch.no_grad()
def prune(module: nn.Module) -> nn.Module:
    """Return a smaller copy that computes the same: without hidden units that are constant or that nothing reads.

    A unit with zero incoming weights gives the constant c = activation(bias); c times its outgoing weights moves into
    the next layer's bias. A unit with zero outgoing weights goes too. Where a convolution pads its input with zeros
    a constant other than 0 is not constant at the border: that unit stays. Each layer keeps at least one unit.

    For layers in a row (linear, mlp, cnn); any other module is refused, see `prunable`.

    >>> from fednmap.models import mlp
    >>> module = mlp(4, 2, hidden=(3,))
    >>> _ = torch.nn.init.zeros_(module[1].weight[:2])
    >>> prune(module)[1]
    Linear(in_features=4, out_features=1, bias=True)
    """
    if not prunable(module):
        raise InputError(f"{type(module).__name__} is not a row of layers without normalisation; only those are pruned")
    module = copy.deepcopy(module)
    before = -1
    while (size := sum(p.numel() for p in module.parameters())) != before:  # what goes can free what came before it
        before = size
        for pair in _pairs(module) or []:
            _shrink(*pair)
    return module


def _pairs(module: nn.Module) -> list[tuple[Layer, list[nn.Module], Layer]] | None:
    """Each layer, what stands between, and the layer that reads its units; None if there are other layers."""
    if type(module) is not nn.Sequential:  # one of the user's own may compute otherwise
        return None
    parts = list(module)
    if not all(_known(part) for part in parts):
        return None
    layers = [(i, part) for i, part in enumerate(parts) if isinstance(part, nn.Linear | nn.Conv2d)]
    return [(before, parts[i + 1 : j], after) for (i, before), (j, after) in pairwise(layers)]


def _known(part: nn.Module) -> bool:
    if isinstance(part, nn.Conv2d):
        return part.groups == 1 and part.padding_mode == "zeros"
    if isinstance(part, nn.AvgPool2d):
        return part.padding in (0, (0, 0))  # padding would pull a constant towards 0 at the border
    return isinstance(part, (nn.Linear, *POINTWISE, *SAME, *POOLS))


def _shrink(before: Layer, between: list[nn.Module], after: Layer) -> None:
    units = len(before.weight)
    # outgoing weights of each unit: (out, units, rest), rest = places of a picture or of a kernel
    outgoing = after.weight.reshape(len(after.weight), units, -1)
    constant = (before.weight.flatten(1) == 0).all(1)
    value = before.bias.clone() if before.bias is not None else torch.zeros_like(before.weight.flatten(1)[:, 0])
    for part in between:
        if isinstance(part, POINTWISE):
            value = part(value)
    unread = (outgoing == 0).all(0).all(1)
    if isinstance(after, nn.Conv2d) and after.padding not in ("valid", 0, (0, 0)):
        constant &= value == 0
    drop = constant | unread
    if bool(drop.all()):
        drop[0] = False
    shift = outgoing[:, drop & constant].sum(2) @ value[drop & constant]
    kept = outgoing[:, ~drop]
    before.weight = nn.Parameter(before.weight[~drop].clone())
    if before.bias is not None:
        before.bias = nn.Parameter(before.bias[~drop].clone())
    after.weight = nn.Parameter(kept.reshape(len(kept), -1, *after.weight.shape[2:]).clone())
    if bool((shift != 0).any()):
        after.bias = nn.Parameter(shift if after.bias is None else after.bias + shift)
    for layer in (before, after):  # the sizes that a layer prints
        names = ("out_features", "in_features") if isinstance(layer, nn.Linear) else ("out_channels", "in_channels")
        for name, size in zip(names, layer.weight.shape, strict=False):
            setattr(layer, name, size)
