"""Composite federated learning: minimise f(x) + phi(x) across clients that keep their data."""

from fednmap import algorithms, data, measure, models, problems, regularizers, theory
from fednmap.simulation import Callback, Diverged, Result, Round, run, simulate

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "Diverged",
    "Result",
    "Round",
    "algorithms",
    "data",
    "measure",
    "models",
    "problems",
    "regularizers",
    "run",
    "simulate",
    "theory",
]
