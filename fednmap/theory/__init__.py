"""The theory as code: steps with a guarantee, complexities, Lyapunov functions, constants measured on a problem."""

from fednmap.theory.complexity import Rate, Rounds, complexity_table, rounds_to
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
from fednmap.theory.lyapunov import Descent, Lyapunov, descent, lyapunov
from fednmap.theory.steps import Steps, c0, nonconvex, pl

__all__ = [
    "Descent",
    "Gap",
    "Lyapunov",
    "Rate",
    "Rounds",
    "Smoothness",
    "Steps",
    "Variance",
    "c0",
    "complexity_table",
    "descent",
    "estimate_gap",
    "estimate_heterogeneity",
    "estimate_smoothness",
    "estimate_variance",
    "lyapunov",
    "mean_gradient2",
    "nonconvex",
    "pl",
    "rounds_to",
]
