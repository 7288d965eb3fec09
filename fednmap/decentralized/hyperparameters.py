"""What the hyper-parameters of methods on a graph must satisfy."""

from __future__ import annotations

from typing import Any

from fednmap.algorithms.hyperparameters import prox_step
from fednmap.decentralized.contract import DecentralizedAlgorithm
from fednmap.regularizers.parameters import positive, regularizer


def check_step(method: DecentralizedAlgorithm) -> None:
    """phi is a regularizer, eta_a a finite positive number."""
    regularizer(method, "phi", "L1(0.1), as the first argument")
    positive(method, "eta_a")


def check_normal_map(method: Any) -> None:
    """The same; gamma is what was given, else 4 eta_a, and suits phi."""
    check_step(method)
    prox_step(method, "gamma", 4 * method.eta_a)
