"""What the hyper-parameters of methods on a graph must satisfy."""

from __future__ import annotations

from typing import Protocol

from fednmap.algorithms.hyperparameters import HasPhi, prox_step
from fednmap.regularizers.parameters import positive, regularizer


class Stepping(HasPhi, Protocol):
    @property
    def eta_a(self) -> float: ...


class NormalMap(Stepping, Protocol):
    @property
    def gamma(self) -> float: ...


def check_step(method: Stepping) -> None:
    """phi is a regularizer, eta_a a finite positive number."""
    regularizer(method, "phi", "L1(0.1), as the first argument")
    positive(method, "eta_a")


def check_normal_map(method: NormalMap) -> None:
    """The same; gamma is what was given, else 4 eta_a, and suits phi."""
    check_step(method)
    prox_step(method, "gamma", 4 * method.eta_a)
