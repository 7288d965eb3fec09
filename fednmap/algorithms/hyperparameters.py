"""Checks and defaults of hyper-parameters."""

from __future__ import annotations

import math
from typing import Any

from fednmap.core import Algorithm, Regularizer
from fednmap.names import InputError
from fednmap.regularizers import Zero
from fednmap.regularizers.parameters import below_one, integer, positive, regularizer


def check(algorithm: Algorithm, *names: str) -> None:
    """Check that phi is a regularizer, Zero() for smooth methods, that named numbers are positive and Q an integer."""
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
        elif name == "local_momentum":
            below_one(algorithm, name)
        else:
            positive(algorithm, name)


def weakly_convex(algorithm: Any, name: str, step: float) -> None:
    """Check that the prox at `step` is single-valued, step * rho < 1; not if rho = inf, where no step is."""
    rho = algorithm.phi.rho
    if rho < math.inf and step * rho >= 1:
        raise InputError(
            f"{type(algorithm).__name__}: {name} = {step:g} and {type(algorithm.phi).__name__} has rho = {rho:g}; "
            f"{name} * rho must stay below 1, so use {name} < {1 / rho:g}"
        )


def convex(algorithm: Algorithm) -> None:
    """Check that phi is convex, for methods whose prox weight grows without bound."""
    if algorithm.phi.rho > 0:
        raise InputError(
            f"{type(algorithm).__name__} needs a convex regularizer, {type(algorithm.phi).__name__} has "
            f"rho = {algorithm.phi.rho:g}; FedNMap, Zhang and FedCanon take weakly convex ones"
        )


def default(algorithm: Any, name: str, value: float) -> None:
    """Set the named hyper-parameter to `value` if it was not given; it must be finite and positive."""
    if getattr(algorithm, name) is None:
        object.__setattr__(algorithm, name, value)
    positive(algorithm, name)


def prox_step(algorithm: Any, name: str, value: float) -> None:
    """Set the step of a prox: by default at most half of what phi allows; it must have step * rho < 1."""
    default(algorithm, name, safe_step(algorithm.phi, value))
    weakly_convex(algorithm, name, getattr(algorithm, name))


def safe_step(phi: Regularizer, step: float) -> float:
    """Return a prox step for a default: at most half of what phi allows."""
    return min(step, 0.5 / phi.rho) if 0 < phi.rho < math.inf else step
