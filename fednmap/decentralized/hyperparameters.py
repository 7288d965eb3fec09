"""What the hyper-parameters of methods on a graph must satisfy."""

from __future__ import annotations

from typing import Any

from fednmap.algorithms.hyperparameters import default_gamma, weakly_convex
from fednmap.decentralized.contract import DecentralizedAlgorithm
from fednmap.regularizers.parameters import positive, regularizer


def check_step(method: DecentralizedAlgorithm) -> None:
    """phi is a regularizer, eta_a a finite positive number."""
    regularizer(method, "phi", "L1(0.1), as the first argument")
    positive(method, "eta_a")


def check_normal_map(method: Any) -> None:
    """The same; gamma is what was given, else 4 eta_a, and suits phi."""
    check_step(method)
    if method.gamma is None:
        object.__setattr__(method, "gamma", default_gamma(method.phi, method.eta_a, 1.0, 1))
    positive(method, "gamma")
    weakly_convex(method, "gamma", method.gamma)
