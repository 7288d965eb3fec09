"""Composite federated learning: minimise f(x) + phi(x) across clients that keep their data."""

from fednmap import algorithms, data, measure, models, problems, regularizers
from fednmap.simulation import Diverged, Round, simulate

__version__ = "0.1.0"

__all__ = [
    "Diverged",
    "Round",
    "algorithms",
    "data",
    "measure",
    "models",
    "problems",
    "regularizers",
    "simulate",
]
