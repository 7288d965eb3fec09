"""Running a method on one machine."""

import warnings

from fednmap.simulation.callbacks import Callback, Patience, Record, TimeLimit, Tolerance
from fednmap.simulation.loop import Diverged, Round, simulate
from fednmap.simulation.trajectory import Result

__all__ = [
    "Callback",
    "Diverged",
    "Patience",
    "Record",
    "Result",
    "Round",
    "TimeLimit",
    "Tolerance",
    "simulate",
]


def __getattr__(name: str) -> object:
    if name != "run":
        raise AttributeError(f"module 'fednmap.simulation' has no attribute {name!r}")
    from fednmap.simulation.trajectory import run_and_measure

    warnings.warn("fednmap.simulation.run is deprecated; use fednmap.run", DeprecationWarning, stacklevel=2)
    return run_and_measure
