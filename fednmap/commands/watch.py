"""What the user sees while a command runs, and how it ends when the user asks it to stop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from fednmap.report.progress import Bar, Lines, Warnings
from fednmap.runs.keeping import Interrupted, Reporter


@contextmanager
def watched(again: str, quiet: bool = False) -> Iterator[Reporter]:
    """A bar in a terminal, lines elsewhere, only what must be told if `quiet`.

    again: the command that goes on, told after Ctrl-C; exit code 130.
    """
    console = Console(stderr=True)
    try:
        if quiet:
            yield Warnings(console)
        elif not console.is_terminal:
            yield Lines(console)
        else:
            bar = Bar(console)
            with bar.progress:
                yield bar
    except (Interrupted, KeyboardInterrupt) as stop:
        how = "stopped and saved" if isinstance(stop, Interrupted) else "stopped at once"
        console.print(f"{how}; continue with\n  {again}", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(130) from None
