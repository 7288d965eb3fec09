"""The command: the paper's figures and benchmarks of others, with a verdict on each claim."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fednmap.commands.options import Threads, take_threads
from fednmap.names import InputError, choose
from fednmap.report.progress import watched
from fednmap.report.terminal import console
from fednmap.runs.atomic_files import clear_errors, write_atomically
from fednmap.simulation.threads import machine

SCALES = ("quick", "middle", "paper")
NAMES = (
    *("nn", "nn-settings", "speedup-n", "speedup-q", "local-stepsize", "sensitivity", "mobilenet"),
    "mobilenet-sparse",
    *("table", "flamby-heart", "flamby-tcga", "sampling", "tuned-steps", "network-memory", "rates", "all"),
)


def reproduce(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help=", ".join(NAMES))],
    scale: Annotated[
        str, typer.Option(help="quick: minutes; middle: hours (mobilenet); paper: the paper's sizes, hours.")
    ] = "quick",
    trials: Annotated[
        int | None, typer.Option(help="Repetitions; default 1 to 10, by figure and scale; with --finished all.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder; each figure has its own inside. [default: runs/reproduce-SCALE]")
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            help="Trials at the same time, each in its own process; the same bits. (default one per core)",
            show_default=False,
        ),
    ] = None,
    threads: Threads = None,
    finished: Annotated[bool, typer.Option("--finished", help="Run nothing; judge the trials there are.")] = False,
) -> None:
    """Run a figure of the paper or a benchmark of others, and judge its claims. A second call continues."""
    from reproduction.figures import FIGURES  # matplotlib is loaded only where it is needed
    from reproduction.overview import overview
    from reproduction.reproduce import reproduce as reproduce_figure

    take_threads(threads)
    at_once = machine() if jobs is None else jobs
    choose("scale", scale, dict.fromkeys(SCALES))
    chosen = list(FIGURES.values()) if name == "all" else [choose("figure", name, FIGURES)]
    for figure in chosen:
        if name != "all" and scale not in figure.trials:
            raise InputError(f"expected scale {' or '.join(figure.trials)} for {name}, got {scale}")
    chosen = [figure for figure in chosen if scale in figure.trials]
    screen = console()
    folder = out or Path("runs") / f"reproduce-{scale}"
    page = folder.resolve().parent / f"{folder.resolve().name}.md"
    program = ("python", "-m", "reproduction") if context.parent is None else ("fednmap",)
    with watched(shlex.join([*program, *sys.argv[1:]]), quiet=True) as reporter:
        for figure in chosen:
            found = reproduce_figure(
                figure,
                scale,
                trials=trials,
                out=folder,
                workers=at_once,
                report=reporter.message,
                only_finished=finished,
            )
            table = Table("claim", "paper", "measured", "verdict", title=figure.title)
            for claim in found.claims:
                table.add_row(claim.claim, claim.paper, claim.measured, claim.verdict)
            screen.print(table)
            screen.print(f"figure and verdict: {folder / figure.name}", highlight=False, soft_wrap=True)
            with clear_errors(folder):
                write_atomically(page, overview(folder, FIGURES.values()).encode())
