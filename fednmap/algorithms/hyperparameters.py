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
    """phi is a regularizer, Zero() for smooth methods; each named number is finite and positive, Q an integer."""
    composite, phi = algorithm.traits.composite, algorithm.phi
    regularizer(algorithm, "phi", "L1(0.1), as the first argument" if composite else "Zero(), its default")
    if not composite and not isinstance(phi, Zero):
        raise InputError(
            f"{type(algorithm).__name__} is for smooth problems: use phi=Zero(), given {type(phi).__name__}; "
            f"composite methods are FedNMap, Zhang, FedCanon, FedDA, FedMiD, FastFedDA, EControlDA, CompressedFedNMap, "
            "FedNewton, FedDR and FedADMM"
        )
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


def convex(algorithm: Algorithm) -> None:
    """phi is convex, for methods whose prox weight grows without bound."""
    if algorithm.phi.rho > 0:
        raise InputError(
            f"{type(algorithm).__name__} needs a convex regularizer, {type(algorithm.phi).__name__} has "
            f"rho = {algorithm.phi.rho:g}; FedNMap, Zhang and FedCanon take weakly convex ones"
        )


def default(algorithm: HasPhi, name: str, value: float) -> None:
    """The named hyper-parameter is `value` if it was not given; it is finite and positive."""
    if getattr(algorithm, name) is None:
        object.__setattr__(algorithm, name, value)
    positive(algorithm, name)


def prox_step(algorithm: HasPhi, name: str, value: float) -> None:
    """The same for the step of a prox: the default is at most half of what phi allows, and step * rho < 1."""
    default(algorithm, name, safe_step(algorithm.phi, value))
    weakly_convex(algorithm, name, getattr(algorithm, name))


def default_gamma(phi: Regularizer, eta_a: float, eta_s: float, Q: int) -> float:
    """The paper's ratio gamma = 4 eta_a eta_s Q, at most half of what phi allows."""
    return safe_step(phi, 4 * eta_a * eta_s * Q)


def safe_step(phi: Regularizer, step: float) -> float:
    """A prox step for a default: at most half of what phi allows."""
    return min(step, 0.5 / phi.rho) if 0 < phi.rho < math.inf else step
