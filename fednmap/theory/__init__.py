"""The theory as code: steps with a guarantee, complexities, constants measured on a problem."""

from fednmap.theory.constants import (
    Gap,
    Smoothness,
    Variance,
    estimate_gap,
    estimate_heterogeneity,
    estimate_smoothness,
    estimate_variance,
    mean_gradient2,
)
from fednmap.theory.steps import Rounds, Steps, c0, nonconvex, pl, rounds_to

__all__ = [
    "Gap",
    "Rounds",
    "Smoothness",
    "Steps",
    "Variance",
    "c0",
    "estimate_gap",
    "estimate_heterogeneity",
    "estimate_smoothness",
    "estimate_variance",
    "mean_gradient2",
    "nonconvex",
    "pl",
    "rounds_to",
]
