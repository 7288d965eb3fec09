"""Batch norm under a flat vector: statistics of the batch while training, averages of them afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import replace_all_batch_norm_modules_


def layers(module: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """The batch norm layers that use batch statistics; one in eval mode uses its running statistics, as in torch."""
    found = (layer for layer in module.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm))
    return [layer for layer in found if layer.training or layer.running_mean is None]


def drop_running(module: nn.Module) -> None:
    """Make the layers that use batch statistics keep no running statistics."""
    for layer in layers(module):
        replace_all_batch_norm_modules_(layer)


@torch.no_grad()
def calibrate(
    module: nn.Module,
    forward: Callable[[nn.Module, Any], Tensor],
    clients: Iterable[Iterable[Any]],
    weights: Iterable[float],
) -> None:
    """Give the layers running statistics: averages over each client's batches, and their weighted mean over clients."""
    tracked = [layer for layer in layers(module) if layer.running_mean is not None]
    if not tracked:
        return
    means = [[torch.zeros_like(v) for v in _running(layer)] for layer in tracked]
    trial = copy.deepcopy(module)
    found = [layer for layer in layers(trial) if layer.running_mean is not None]
    trial.eval()
    for batches, weight in zip(clients, weights, strict=True):
        for layer in found:
            layer.train()
            layer.reset_running_stats()
            layer.momentum = None  # torch's word for the plain average of all batches
        for inputs in batches:
            forward(trial, inputs)
        for mean, layer in zip(means, found, strict=True):
            torch._foreach_add_(mean, [weight * v for v in _running(layer)])
    for layer, mean in zip(tracked, means, strict=True):
        torch._foreach_copy_(_running(layer), mean)


def _running(layer: nn.modules.batchnorm._BatchNorm) -> list[Tensor]:
    return [layer.running_mean, layer.running_var]  # type: ignore[list-item]
