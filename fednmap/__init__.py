"""Composite federated learning: minimise f(x) + phi(x) across clients that keep their data."""

__version__ = "0.1.0"
