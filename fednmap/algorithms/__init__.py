"""Methods, one file each; every one is a `fednmap.core.Algorithm`."""

from fednmap.algorithms.fedavg import FedAvg
from fednmap.algorithms.fednmap import FedNMap
from fednmap.algorithms.scaffold import SCAFFOLD

ALGORITHMS = {"fednmap": FedNMap, "scaffold": SCAFFOLD, "fedavg": FedAvg}

__all__ = ["ALGORITHMS", "SCAFFOLD", "FedAvg", "FedNMap"]
