"""One self-contained page about runs: curves, closing numbers, which weights survived, how it was made."""

from fednmap.report.page import report

__all__ = ["report"]
