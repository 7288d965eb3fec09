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
    return [layer for layer in module.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]


def without_running(module: nn.Module) -> nn.Module:
    """A copy that normalises by the statistics of each batch and remembers none."""
    return replace_all_batch_norm_modules_(copy.deepcopy(module))


@torch.no_grad()
def statistics(module: nn.Module, batches: Iterable[Tensor]) -> Statistics:
    """Each layer's mean and variance in a batch, averaged over `batches`."""
    module = copy.deepcopy(module).eval()
    found = layers(module)
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
