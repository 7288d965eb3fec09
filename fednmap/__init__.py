"""Composite federated learning: minimise f(x) + phi(x) across clients that keep their data.

What is named here is loaded when it is first used: `import fednmap` alone loads nothing heavy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fednmap.estimators.fitted_model import load as load
    from fednmap.names import InputError as InputError
    from fednmap.runs.api import run as run
    from fednmap.simulation import Callback as Callback
    from fednmap.simulation import Diverged as Diverged
    from fednmap.simulation import Patience as Patience
    from fednmap.simulation import Result as Result
    from fednmap.simulation import Round as Round
    from fednmap.simulation import TimeLimit as TimeLimit
    from fednmap.simulation import Tolerance as Tolerance
    from fednmap.simulation import simulate as simulate

__version__ = "0.2.0"

_ROOMS = (
    *("algorithms", "asynchronous", "core", "data", "decentralized", "estimators", "measure", "models", "privacy"),
    *("problems", "regularizers", "simulation", "tables", "testing", "theory"),
)
_DEFINED_IN = {
    **dict.fromkeys(("Callback", "Diverged", "Patience", "Result", "Round"), "fednmap.simulation"),
    **dict.fromkeys(("TimeLimit", "Tolerance", "simulate"), "fednmap.simulation"),
    "InputError": "fednmap.names",
    "load": "fednmap.estimators.fitted_model",
    "run": "fednmap.runs.api",
}
__all__ = sorted([*_ROOMS, *_DEFINED_IN])


def __getattr__(name: str) -> object:
    if name in _DEFINED_IN:
        found: object = getattr(import_module(_DEFINED_IN[name]), name)
    elif name in _ROOMS:
        found = import_module(f"fednmap.{name}")
    else:
        raise AttributeError(f"module 'fednmap' has no attribute {name!r}")
    globals()[name] = found  # from now on without this function
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
