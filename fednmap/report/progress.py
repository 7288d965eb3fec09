"""Progress of a run on stderr: a progress bar in a terminal, plain lines elsewhere; and how it ends on Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fednmap.measure import quantities
from fednmap.report.closing import rounds_text
from fednmap.report.terminal import console
from fednmap.runs.configuration import shown
from fednmap.runs.execution import DONE, Reporter, RunInfo
from fednmap.runs.process_pool import Interrupted
from fednmap.simulation import Record, Round

PLAIN_SECONDS = 5.0  # between lines where there is no terminal
PATIENCE = 1.0  # seconds after which a line says what is waited for


def describe(record: Record, width: int = 200) -> str:
    """Return the state of a run in a few words; of these the first ones that fit into the width."""
    line = ""
    for words in (q.words(record[q.key]) for q in quantities(record) if q.brief):
        if len(line) + 2 + len(words) > width:
            break
        line += "  " * bool(line) + words
    return line


class Warnings(Reporter):
    """Prints warnings and other messages, and no progress."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def message(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)


class Bar(Reporter):
    """A progress bar per method, updated in place."""

    def __init__(self, console: Console) -> None:
        self.bar_width = 20 if console.width >= 100 else 10
        self.progress = Progress(
            TextColumn("{task.fields[name]:<13}", markup=False),
            BarColumn(bar_width=self.bar_width),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[state]}", markup=False),
            console=console,
        )
        self.task, self.room = TaskID(0), 0  # for the state, next to name, bar, counter and time

    def begin(self, what: RunInfo) -> None:
        name = shown(self.label + _named(what), max(13, self.progress.console.width // 4))
        self.room = self.progress.console.width - self.bar_width - max(13, len(name)) - 2 * len(str(what.rounds)) - 12
        self.task = self.progress.add_task("", total=what.rounds, completed=what.done, name=name, state="")

    def on_round(self, round: Round, totals: Record) -> None:
        self.progress.update(self.task, completed=round.t + 1)

    def on_record(self, record: Record) -> None:
        self.progress.update(self.task, completed=record["round"], state=describe(record, self.room))

    def message(self, line: str) -> None:
        self.progress.console.print(line, highlight=False)


class Lines(Warnings):
    """A line now and then."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.name, self.rounds, self.next = "", 0, 0.0

    def begin(self, what: RunInfo) -> None:
        self.name, self.rounds, self.next = self.label + _named(what), what.rounds, 0.0

    def on_record(self, record: Record) -> None:
        now = time.monotonic()
        if now >= self.next or record["round"] == self.rounds:
            self.next = now + PLAIN_SECONDS
            self.message(f"{self.name}  round {int(record['round'])}/{self.rounds}  {describe(record)}")

    def end(self, result: dict[str, Any] | None) -> None:
        if result is not None and result.get("ended", DONE) != DONE:
            self.message(f"{self.name}  {rounds_text(result['rounds'])}, {result['ended']}")


def _named(what: RunInfo) -> str:
    """Return the method as tables call it, with the number of its trial if there are several."""
    name = what.facts.get("labels", {}).get(what.job.method, what.job.method)
    return name if what.trials == 1 else f"{name} #{what.job.trial + 1}"


@contextmanager
def waiting(line: str, quiet: bool = False) -> Iterator[None]:
    """Print the line on stderr if what follows takes longer than a second."""
    timer = Timer(PATIENCE, lambda: console(stderr=True).print(line, highlight=False))
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
