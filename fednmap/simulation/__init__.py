"""Running a method on one machine."""

from fednmap.simulation.callbacks import Callback, Patience, Record, TimeLimit, Tolerance
from fednmap.simulation.loop import Diverged, Round, simulate
from fednmap.simulation.trajectory import Result, run

__all__ = [
    "Callback",
    "Diverged",
    "Patience",
    "Record",
    "Result",
    "Round",
    "TimeLimit",
    "Tolerance",
    "run",
    "simulate",
]
