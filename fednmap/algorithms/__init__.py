"""Methods, one file each; every one is a `fednmap.core.Algorithm`."""

from fednmap.algorithms.econtrolda import EControlDA
from fednmap.algorithms.fast_fedda import FastFedDA
from fednmap.algorithms.fedadmm import FedADMM
from fednmap.algorithms.fedavg import FedAvg
from fednmap.algorithms.fedcanon import FedCanon
from fednmap.algorithms.fedda import FedDA
from fednmap.algorithms.feddr import FedDR
from fednmap.algorithms.fedmid import FedMiD
from fednmap.algorithms.fednmap import FedNMap
from fednmap.algorithms.fedpd import FedPD
from fednmap.algorithms.fedprox import FedProx
from fednmap.algorithms.normal_map_sgd import NormalMapSGD
from fednmap.algorithms.prox_sgd import ProxSGD
from fednmap.algorithms.scaffnew import Scaffnew
from fednmap.algorithms.scaffold import SCAFFOLD
from fednmap.algorithms.zhang import Zhang
from fednmap.core import Algorithm

ALGORITHMS: dict[str, type[Algorithm]] = {
    "fednmap": FedNMap,
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
    "fedprox": FedProx,
    "fedpd": FedPD,
    "scaffnew": Scaffnew,
    "prox-sgd": ProxSGD,
    "normal-map-sgd": NormalMapSGD,
}

__all__ = [
    "ALGORITHMS",
    "SCAFFOLD",
    "EControlDA",
    "FastFedDA",
    "FedADMM",
    "FedAvg",
    "FedCanon",
    "FedDA",
    "FedDR",
    "FedMiD",
    "FedNMap",
    "FedPD",
    "FedProx",
    "NormalMapSGD",
    "ProxSGD",
    "Scaffnew",
    "Zhang",
]
