"""What hyper-parameters must satisfy, said once."""

from __future__ import annotations

import math
from typing import Protocol

from fednmap.core import Algorithm, Regularizer
from fednmap.names import InputError
from fednmap.regularizers import Zero
from fednmap.regularizers.parameters import integer, positive, regularizer


class HasPhi(Protocol):
    @property
    def phi(self) -> Regularizer: ...


def check(algorithm: Algorithm, *names: str) -> None:
    """phi is a regularizer, each named hyper-parameter a finite positive number, Q a positive integer."""
    example = "L1(0.1), as the first argument" if algorithm.traits.composite else "Zero(), its default"
    regularizer(algorithm, "phi", example)
    for name in names:
        if name == "Q":
            integer(algorithm, name, 1)
        else:
            positive(algorithm, name)


def weakly_convex(algorithm: HasPhi, name: str, step: float) -> None:
    """The prox at `step` is single-valued: step * rho < 1. Where rho = inf none is, and phi was made knowing that."""
    rho = algorithm.phi.rho
    if rho < math.inf and step * rho >= 1:
        raise InputError(
            f"{type(algorithm).__name__}: {name} = {step:g} and {type(algorithm.phi).__name__} has rho = {rho:g}; "
            f"{name} * rho must stay below 1, so use {name} < {1 / rho:g}"
        )


def convex(algorithm: Algorithm, phi: Regularizer) -> None:
    """phi is convex, for methods whose prox weight grows without bound."""
    if phi.rho > 0:
        who = type(algorithm).__name__
        raise InputError(
            f"{who} needs a convex regularizer, {type(phi).__name__} has rho = {phi.rho:g}; "
            f"FedNMap, Zhang and FedCanon take weakly convex ones"
        )


def smooth(algorithm: Algorithm, phi: Regularizer) -> None:
    """phi = 0, for methods that know no prox."""
    if not isinstance(phi, Zero):
        raise InputError(
            f"{type(algorithm).__name__} is for smooth problems: use phi=Zero(), given {type(phi).__name__}; "
            f"composite methods are FedNMap, Zhang, FedCanon, FedDA, FedMiD, FastFedDA, EControlDA, CompressedFedNMap, "
            "FedNewton, FedDR and FedADMM"
        )


def default_gamma(phi: Regularizer, eta_a: float, eta_s: float, Q: int) -> float:
    """The paper's ratio gamma = 4 eta_a eta_s Q, at most half of what phi allows."""
    return safe_step(phi, 4 * eta_a * eta_s * Q)


def safe_step(phi: Regularizer, step: float) -> float:
    """A prox step for a default: at most half of what phi allows."""
    return min(step, 0.5 / phi.rho) if 0 < phi.rho < math.inf else step
