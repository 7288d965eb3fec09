"""Data sets, and ways to divide them among clients."""

from fednmap.data.clients import ClientData
from fednmap.data.datasets import DATASETS, Dataset, load
from fednmap.data.partition import PARTITIONS, by_client, dirichlet, iid, partition, shards, sorted_by_label

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "ClientData",
    "Dataset",
    "by_client",
    "dirichlet",
    "iid",
    "load",
    "partition",
    "shards",
    "sorted_by_label",
]
