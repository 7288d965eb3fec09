"""The problems that are timed: the paper's network on random pictures, and MobileNetV3-Small."""

from __future__ import annotations

import torch
from torch import nn

from fednmap.data.clients import ClientData
from fednmap.models import mlp, mobilenet_v3_small
from fednmap.problems import Network


def random_data(n: int, shape: tuple[int, ...], samples: int) -> ClientData:
    rng = torch.Generator().manual_seed(0)
    x = torch.rand(n * samples, *shape, generator=rng)
    return ClientData(x, torch.randint(10, (n * samples,), generator=rng), torch.full((n,), samples))


def network(n: int = 50, samples: int = 600) -> Network:
    """784-64-10 with sigmoid units, 50,890 parameters."""
    torch.manual_seed(0)
    return Network(mlp(784, 10), nn.functional.cross_entropy, random_data(n, (784,), samples), batch_size=32)


def mobilenet(n: int = 2, samples: int = 64) -> Network:
    """MobileNetV3-Small on pictures of 32 x 32, 1,528,106 parameters."""
    torch.manual_seed(0)
    module = mobilenet_v3_small(10)
    return Network(module, nn.functional.cross_entropy, random_data(n, (3, 32, 32), samples), batch_size=32)
