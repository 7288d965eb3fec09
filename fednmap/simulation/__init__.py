"""Running a method on one machine."""

from fednmap.simulation.loop import Diverged, Round, simulate

__all__ = ["Diverged", "Round", "simulate"]
