"""Progress of a command on stderr, and how it ends on Ctrl-C."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

import typer

from fednmap.report.progress import Bar, Lines, Warnings
from fednmap.report.terminal import console
from fednmap.runs.execution import Reporter
from fednmap.runs.process_pool import Interrupted


@contextmanager
def waiting(line: str, quiet: bool = False) -> Iterator[None]:
    """Print the line on stderr if what follows takes longer than a second."""
    timer = Timer(1.0, lambda: console(stderr=True).print(line, highlight=False))
    timer.daemon = True
    if not quiet:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def watched(again: str, quiet: bool = False) -> Iterator[Reporter]:
    """Yield a reporter: a bar in a terminal, lines elsewhere, warnings only if `quiet`.

    again: the command that continues the run, printed after Ctrl-C; exit code 130.
    """
    screen = console(stderr=True)
    try:
        if quiet:
            yield Warnings(screen)
        elif not screen.is_terminal:
            yield Lines(screen)
        else:
            bar = Bar(screen)
            with bar.progress:
                yield bar
    except (Interrupted, KeyboardInterrupt) as stop:
        how = "stopped and saved" if isinstance(stop, Interrupted) else "stopped without saving"
        screen.print(f"{how}; continue with\n  {again}", highlight=False, soft_wrap=True)
        raise typer.Exit(130) from None
