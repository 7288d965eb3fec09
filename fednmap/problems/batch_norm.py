"""Batch norm under a flat vector: statistics of the batch while training, averages of them afterwards."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.func import replace_all_batch_norm_modules_

Statistics = list[tuple[Tensor, Tensor]]
"""Mean and variance that each batch norm layer has met."""


def layers(module: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """The batch norm layers that use batch statistics; one in eval mode uses its running statistics, as in torch."""
    found = (layer for layer in module.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm))
    return [layer for layer in found if layer.training or layer.running_mean is None]


def drop_running(module: nn.Module) -> None:
    """Make the layers that use batch statistics keep no running statistics."""
    for layer in layers(module):
        replace_all_batch_norm_modules_(layer)


@torch.no_grad()
def statistics(module: nn.Module, batches: Iterable[Tensor]) -> Statistics:
    """Each layer's mean and variance in a batch, averaged over `batches`."""
    module = copy.deepcopy(module)
    found = layers(module)
    module.eval()
    for layer in found:
        layer.train()
        layer.reset_running_stats()
        layer.momentum = None  # torch's word for the plain average of all batches
    for inputs in batches:
        module(inputs)
    return [(layer.running_mean, layer.running_var) for layer in found if layer.running_mean is not None]  # type: ignore[misc]


def install(module: nn.Module, clients: Sequence[Statistics], weights: Sequence[float]) -> None:
    """Gives the module's batch norm layers the weighted mean of the clients' statistics."""
    tracked = [layer for layer in layers(module) if layer.running_mean is not None]
    for layer, *parts in zip(tracked, *clients, strict=True):
        for k, name in enumerate(("running_mean", "running_var")):
            mean = sum(
                (w * part[k] for w, part in zip(weights, parts, strict=True)), start=torch.zeros_like(parts[0][k])
            )
            getattr(layer, name).copy_(mean)
