"""Tables, plots and pages about runs: curves, closing numbers, which weights survived, how it was made."""

from fednmap.report.page import report
from fednmap.report.plots import plot

__all__ = ["plot", "report"]
