"""Running a method on one machine."""

from fednmap.simulation.loop import Diverged, Round, simulate
from fednmap.simulation.trajectory import Callback, Record, Result, run

__all__ = ["Callback", "Diverged", "Record", "Result", "Round", "run", "simulate"]
