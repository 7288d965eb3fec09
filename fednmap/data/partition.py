"""Partitions of pooled samples over n clients: each function returns, per client, the indices of its rows.

Every sample goes to exactly one client, every client gets at least one, and the result is a pure
function of its arguments. Indices are on the CPU, wherever the labels are.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fednmap.data.clients import tensor
from fednmap.names import InputError, unknown

Parts = list[Tensor]


def sorted_by_label(y: Tensor, n: int, seed: int = 0) -> Parts:
    """Sort samples by label and cut them into n consecutive parts whose sizes differ by at most one.

    >>> sorted_by_label(torch.tensor([1, 0, 1, 0]), 2)
    [tensor([1, 3]), tensor([0, 2])]
    """
    y = _labels(y, n)
    return list(torch.sort(y, stable=True).indices.tensor_split(n))


def iid(y: Tensor, n: int, seed: int = 0) -> Parts:
    """Return a random permutation cut into n parts whose sizes differ by at most one.

    >>> [len(part) for part in iid(torch.zeros(5), 2)]
    [3, 2]
    """
    y = _labels(y, n)
    return list(torch.from_numpy(np.random.default_rng(seed).permutation(len(y))).tensor_split(n))


def shards(y: Tensor, n: int, seed: int = 0, per_client: int = 2) -> Parts:
    """Sort samples by label and cut them into n * per_client shards; every client gets `per_client` at random.

    Raises InputError if there are fewer samples than shards.

    Reference: McMahan et al., Communication-efficient learning of deep networks, AISTATS 2017.

    >>> [len(part) for part in shards(torch.tensor([1, 0, 1, 0]), 2)]
    [2, 2]
    """
    if per_client < 1:
        raise InputError(f"shards per client is {per_client}; it must be at least 1")
    y = _labels(y, n * per_client)
    pieces = torch.sort(y, stable=True).indices.tensor_split(n * per_client)
    order = np.random.default_rng(seed).permutation(len(pieces)).reshape(n, per_client)
    return [torch.cat([pieces[j] for j in row]) for row in order]


def dirichlet(y: Tensor, n: int, seed: int = 0, alpha: float = 0.5) -> Parts:
    """Share each label's samples out in proportions from Dirichlet(alpha); small alpha is heterogeneous.

    A client without samples receives one of the largest client's. An alpha that is not positive raises InputError.

    Reference: Hsu, Qi and Brown, Measuring the effects of non-identical data distribution, 2019.

    >>> sum(len(part) for part in dirichlet(torch.tensor([1, 0, 1, 0]), 2))
    4
    """
    if not alpha > 0:
        raise InputError(f"Dirichlet alpha is {alpha}; it must be positive")
    y = _labels(y, n)
    rng = np.random.default_rng(seed)
    held: list[list[Tensor]] = [[] for _ in range(n)]
    for label in torch.unique(y):
        rows = torch.from_numpy(rng.permutation((y == label).nonzero().squeeze(1).numpy()))
        cuts = np.rint(np.cumsum(rng.dirichlet(np.full(n, alpha))) * len(rows)).astype(int)[:-1]
        for client, piece in zip(held, torch.tensor_split(rows, torch.from_numpy(cuts)), strict=True):
            client.append(piece)
    parts = [torch.cat(pieces) for pieces in held]
    for i in range(n):
        if not len(parts[i]):
            rich = max(range(n), key=lambda j: len(parts[j]))
            parts[i], parts[rich] = parts[rich][-1:], parts[rich][:-1]
    return parts


def by_client(ids: Tensor) -> Parts:
    """Return one client for each distinct id, in ascending order of the ids.

    >>> by_client(torch.tensor([7, 3, 7]))
    [tensor([1]), tensor([0, 2])]
    """
    ids = tensor("ids", ids).cpu()
    return [(ids == i).nonzero().squeeze(1) for i in torch.unique(ids)]


PARTITIONS: dict[str, Callable[..., Parts]] = {
    "sorted": sorted_by_label,
    "iid": iid,
    "shards": shards,
    "dirichlet": dirichlet,
}


def partition(spec: str, y: Tensor, n: int, *, seed: int = 0, ids: Tensor | None = None) -> Parts:
    """Return the partition `spec` names: sorted, iid, shards[:per client], dirichlet[:alpha], natural (by `ids`).

    An unknown name, or more parts than samples, raises InputError.

    >>> partition("sorted", torch.tensor([1, 0]), 2)
    [tensor([1]), tensor([0])]
    """
    name, _, argument = spec.partition(":")
    if name == "natural":
        if ids is None:
            raise InputError("this data has no natural clients; choose from " + ", ".join(sorted(PARTITIONS)))
        return by_client(ids)
    if name not in PARTITIONS:
        raise unknown("partition", name, [*PARTITIONS, "natural"])
    if not argument:
        return PARTITIONS[name](y, n, seed)
    if name not in ("shards", "dirichlet"):
        raise InputError(f"partition {name!r} takes no argument, given {argument!r}")
    try:
        value = int(argument) if name == "shards" else float(argument)
    except ValueError:
        raise InputError(f"partition {name!r} takes a number after the colon, given {argument!r}") from None
    return PARTITIONS[name](y, n, seed, value)


def _labels(y: Tensor, parts: int) -> Tensor:
    """The labels where rows are counted, on the CPU, if they are enough for so many parts."""
    y = tensor("y", y).cpu()
    if parts < 1:
        raise InputError(f"{parts} clients; at least 1 is needed")
    if parts > len(y):
        raise InputError(f"{parts} parts of {len(y)} samples: every client needs a sample; use fewer clients")
    return y
