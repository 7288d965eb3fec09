"""Methods without a server: nodes on a graph that exchange messages with their neighbours only."""

from dataclasses import is_dataclass

from fednmap.algorithms import ALGORITHMS
from fednmap.algorithms import method as server_method
from fednmap.core import Algorithm
from fednmap.decentralized.methods import (
    DecentralizedAlgorithm,
    DecentralizedTraits,
    NormDSGT,
    NormED,
    PGExtra,
    ProxDSGD,
)
from fednmap.decentralized.on_graph import Decentralized
from fednmap.decentralized.topologies import (
    TOPOLOGIES,
    Complete,
    ErdosRenyi,
    Exponential,
    Grid,
    Lossy,
    Matchings,
    OnePeer,
    Ring,
    Sequence,
    Star,
    Topology,
    Torus,
    UndirectedExponential,
    Weights,
    from_file,
    metropolis,
    spectral_gap,
    topology_of,
)
from fednmap.names import InputError, choose, imported, is_code

DECENTRALIZED: dict[str, type[DecentralizedAlgorithm]] = {
    "norm-dsgt": NormDSGT,
    "norm-ed": NormED,
    "prox-dsgd": ProxDSGD,
    "pg-extra": PGExtra,
}


def method(name: str) -> type[Algorithm] | type[DecentralizedAlgorithm]:
    """Return a method by name, with a server or without, or your own, package.module:Name; else raise InputError.

    >>> method("norm-ed").__name__
    'NormED'
    """
    known: dict[str, type[Algorithm] | type[DecentralizedAlgorithm]] = {**ALGORITHMS, **DECENTRALIZED}
    if not is_code(name, known):
        return choose("algorithm", name, known)
    try:
        found: type[DecentralizedAlgorithm] = imported("algorithm", name, known, DecentralizedAlgorithm)
    except InputError:
        return server_method(name)
    if not is_dataclass(found) or "traits" not in dir(found):
        raise InputError(f"algorithm {name!r} must be a dataclass that declares `traits`, see DecentralizedAlgorithm")
    return found


__all__ = [
    "DECENTRALIZED",
    "TOPOLOGIES",
    "Complete",
    "Decentralized",
    "DecentralizedAlgorithm",
    "DecentralizedTraits",
    "ErdosRenyi",
    "Exponential",
    "Grid",
    "Lossy",
    "Matchings",
    "NormDSGT",
    "NormED",
    "OnePeer",
    "PGExtra",
    "ProxDSGD",
    "Ring",
    "Sequence",
    "Star",
    "Topology",
    "Torus",
    "UndirectedExponential",
    "Weights",
    "from_file",
    "method",
    "metropolis",
    "spectral_gap",
    "topology_of",
]
