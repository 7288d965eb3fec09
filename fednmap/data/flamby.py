"""The divisions of FLamby: which patients are for the test, what is cut from training to validate, how to normalise.

du Terrail et al., FLamby: Datasets and Benchmarks for Cross-Silo Federated Learning in Realistic Healthcare Settings,
NeurIPS 2022; the rules are those of its code (owkin/FLamby) and of owkin/benchmark_flamby.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fednmap.data.dataset import Dataset
from fednmap.names import choose

TRAIN = 0.66
SPLIT_SEED = 43
EPSILON = 1e-9
"""Added to a deviation before it divides."""
NORMALISED = {"flamby": False, "flamby-pooled": True}
"""Variant -> whether all hospitals share mean and deviation."""


def heart(variant: str, x: Tensor, y: Tensor, clients: Tensor) -> Dataset:
    """The patients of `heart_disease.patients` divided and normalised as Fed-Heart-Disease."""
    pooled = choose("variant of heart-disease", variant, NORMALISED)
    test = _held_out(y, clients, 1 - TRAIN, TRAIN, SPLIT_SEED)
    x = _normalised(x, ~test, torch.zeros_like(clients) if pooled else clients)
    return Dataset(x[~test], y[~test], x[test], y[test], clients[~test], clients[test])


def validation(labels: Tensor, clients: Tensor, share: float, seed: int) -> Tensor:
    """Which of these rows are kept back to validate: `share` of each client's, by label where there are enough."""
    return _held_out(labels, clients, share, None, seed)


def _held_out(labels: Tensor, clients: Tensor, test: float, train: float | None, seed: int) -> Tensor:
    """Which rows are for the test: drawn client by client, by label if each has more than two of the client's rows."""
    from sklearn.model_selection import train_test_split  # takes a second to import

    kept = torch.zeros(len(labels), dtype=torch.bool, device="cpu")
    for i in torch.unique(clients):
        rows = (clients == i).nonzero().squeeze(1).numpy()
        _, counts = torch.unique(labels[rows], return_counts=True)
        by_label = labels[rows].numpy() if len(counts) > 1 and bool((counts > 2).all()) else None
        _, chosen = train_test_split(rows, test_size=test, train_size=train, random_state=seed, stratify=by_label)
        kept[chosen] = True
    return kept


def _normalised(x: Tensor, train: Tensor, groups: Tensor) -> Tensor:
    """Each group less the mean of its training rows, over their deviation."""
    found = torch.empty_like(x)
    for i in torch.unique(groups):
        mine = groups == i
        known = x[mine & train]
        found[mine] = (x[mine] - known.mean(0)) / (known.std(0) + EPSILON)
    return found
