"""Running a method on one machine."""

from fednmap.names import renamed
from fednmap.simulation.callbacks import Callback, Patience, Record, TimeLimit, Tolerance
from fednmap.simulation.loop import Diverged, Round, simulate
from fednmap.simulation.trajectory import Result

__all__ = ["Callback", "Diverged", "Patience", "Record", "Result", "Round", "TimeLimit", "Tolerance", "simulate"]


__getattr__ = renamed(__name__, {"run": "fednmap:run"})
