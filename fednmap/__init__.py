"""Composite federated learning: minimise f(x) + phi(x) across clients that keep their data.

What is named here is loaded when it is first used: `import fednmap` alone loads nothing heavy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fednmap import (
        algorithms,
        asynchronous,
        core,
        data,
        decentralized,
        estimators,
        measure,
        models,
        privacy,
        problems,
        regularizers,
        simulation,
        tables,
        testing,
        theory,
    )
    from fednmap.estimators.fitted_model import load
    from fednmap.names import InputError
    from fednmap.runs.api import run
    from fednmap.simulation import Callback, Diverged, Patience, Result, Round, TimeLimit, Tolerance, simulate

__version__ = "0.2.0"

__all__ = [
    "Callback",
    "Diverged",
    "InputError",
    "Patience",
    "Result",
    "Round",
    "TimeLimit",
    "Tolerance",
    "algorithms",
    "asynchronous",
    "core",
    "data",
    "decentralized",
    "estimators",
    "load",
    "measure",
    "models",
    "privacy",
    "problems",
    "regularizers",
    "run",
    "simulate",
    "simulation",
    "tables",
    "testing",
    "theory",
]

_FROM = {
    "Callback": "fednmap.simulation",
    "Diverged": "fednmap.simulation",
    "InputError": "fednmap.names",
    "Patience": "fednmap.simulation",
    "Result": "fednmap.simulation",
    "Round": "fednmap.simulation",
    "TimeLimit": "fednmap.simulation",
    "Tolerance": "fednmap.simulation",
    "load": "fednmap.estimators.fitted_model",
    "run": "fednmap.runs.api",
    "simulate": "fednmap.simulation",
}
"""Where a name is defined; the other names of `__all__` are modules."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'fednmap' has no attribute {name!r}")
    if name in _FROM:
        found: object = getattr(import_module(_FROM[name]), name)
    else:
        found = import_module(f"fednmap.{name}")
    globals()[name] = found  # from now on without this function
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
