"""Federated methods; each is a `fednmap.core.Algorithm`."""

from dataclasses import is_dataclass

from fednmap.algorithms.central import NormalMapSGD, ProxSGD
from fednmap.algorithms.compressed import CompressedFedNMap, EControlDA
from fednmap.algorithms.fedavg import FedAvg, FedProx, PrunedFedAvg
from fednmap.algorithms.fedcanon import FedCanon
from fednmap.algorithms.fedda import FastFedDA, FedDA, FedMiD
from fednmap.algorithms.fednewton import FedNewton
from fednmap.algorithms.fednmap import FedNMap
from fednmap.algorithms.fednmap_memory import FedNMapMemory
from fednmap.algorithms.scaffnew import Scaffnew
from fednmap.algorithms.scaffold import SCAFFOLD
from fednmap.algorithms.server_optimiser import FedAdagrad, FedAdam, FedAvgM, FedYogi, ServerOptimiser
from fednmap.algorithms.splitting import FedADMM, FedDR, FedPD
from fednmap.algorithms.zhang import Zhang
from fednmap.core import Algorithm
from fednmap.names import InputError, look_up

ALGORITHMS: dict[str, type[Algorithm]] = {
    "fednmap": FedNMap,
    "fednmap-memory": FedNMapMemory,
    "compressed-fednmap": CompressedFedNMap,
    "fednewton": FedNewton,
    "zhang": Zhang,
    "fedcanon": FedCanon,
    "fedda": FedDA,
    "fedmid": FedMiD,
    "fast-fedda": FastFedDA,
    "econtrolda": EControlDA,
    "feddr": FedDR,
    "fedadmm": FedADMM,
    "scaffold": SCAFFOLD,
    "fedavg": FedAvg,
    "fedavg-pruned": PrunedFedAvg,
    "fedavgm": FedAvgM,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "fedadagrad": FedAdagrad,
    "fedprox": FedProx,
    "fedpd": FedPD,
    "scaffnew": Scaffnew,
    "prox-sgd": ProxSGD,
    "normal-map-sgd": NormalMapSGD,
}

WITH_MEMORY: dict[type[Algorithm], type[Algorithm]] = {FedNMap: FedNMapMemory}
"""What the setting `memory` makes of a method."""


def method(name: str) -> type[Algorithm]:
    """Return the method called `name`, or your own, package.module:Name; an unknown one raises InputError.

    >>> method("fedavg").__name__
    'FedAvg'
    """
    found = look_up("algorithm", name, ALGORITHMS, Algorithm)
    if not is_dataclass(found) or "traits" not in dir(found):
        raise InputError(f"algorithm {name!r} must be a dataclass that declares `traits`, see fednmap.core.Algorithm")
    return found


__all__ = [
    "ALGORITHMS",
    "SCAFFOLD",
    "CompressedFedNMap",
    "EControlDA",
    "FastFedDA",
    "FedADMM",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedCanon",
    "FedDA",
    "FedDR",
    "FedMiD",
    "FedNMap",
    "FedNMapMemory",
    "FedNewton",
    "FedPD",
    "FedProx",
    "FedYogi",
    "NormalMapSGD",
    "ProxSGD",
    "PrunedFedAvg",
    "Scaffnew",
    "ServerOptimiser",
    "Zhang",
    "method",
]
