"""`fednmap show`: a run, or the runs of a folder, in the terminal; `fednmap report`: a page for a browser."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import ArrayLike
from rich import box
from rich.table import Table

from fednmap.measure import quantity
from fednmap.names import InputError, is_number
from fednmap.report import coefficients
from fednmap.report import report as write_report
from fednmap.report.closing import about_line, closing_table, made_by
from fednmap.report.data_table import DataTable
from fednmap.report.series import Series, collect, drawn, expected, models, positive
from fednmap.report.terminal import TextTable, console
from fednmap.runs.atomic_files import write_atomically
from fednmap.runs.folder import RunFolder
from fednmap.runs.sweep import Sweep, is_sweep

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 14
RUNAWAY = 1e100  # a method that is lost does not set the scale


def show(
    run: Annotated[Path | None, typer.Argument(help="Run folder; default the newest in runs.")] = None,
    list: Annotated[bool, typer.Option("--list", help="List the runs in a folder, default runs.")] = False,
) -> None:
    """Show a run in the terminal, or list the runs of a folder.

    Example: fednmap show runs/RUN
    """
    if list:
        _list(run or Path("runs"))
        return
    folder = RunFolder.open(run or run_folders(Path("runs"))[-1])
    screen, said, began = console(), folder.about(), folder.environment()
    sweep = Sweep.open(folder.path) if is_sweep(folder.path) else None
    varied = [f"sweep: {', '.join(map(sweep.name, sweep.values))}"] if sweep else []
    lines = [str(folder.path), about_line(said), *varied, f"state: {state(folder)}", *made_by(began)]
    screen.print("\n".join(lines), highlight=False, soft_wrap=True)
    parts = sweep.parts() if sweep else []
    if results := folder.results() + [{**r, "method": part.path.name} for part in parts for r in part.results()]:
        screen.print(closing_table(results, said))
    if measured := [one for one in collect(parts or [folder]) if one.trials]:
        screen.print(_sparks(measured))
    if not sweep:
        for table in _coefficients(folder):
            screen.print(table)
    for line in (line for part in (folder, *parts) for line in part.damages()):
        screen.print(line, highlight=False, soft_wrap=True)
    if sweep and (found := sweep.outcome()):
        screen.print(f"slope of log |F_nat|^2: {found['slope']:.3f}; {found['verdict']}", highlight=False)


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Run folders; several are shown together. Or one folder of `fednmap fit`.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("report.html"),
) -> None:
    """Write one self-contained HTML page about runs: curves, closing numbers, surviving weights, configuration.

    Example: fednmap report runs/RUN -o report.html
    """
    if out.is_dir():
        raise InputError(f"{out} is a folder; name a file, such as {out / 'report.html'}")
    folders = [f for run in runs for f in (Sweep.open(run).parts() if is_sweep(run) else [RunFolder.open(run)])]
    fits = [folder.path for folder in folders if folder.about().made_in == "fit"]
    if not fits:
        write_report(folders, out)
    elif len(runs) > 1:
        raise InputError(f"expected the folder of one fit, or of runs, got {fits[0]} among {len(runs)}; give it alone")
    elif not (page := fits[0] / "report.html").is_file():  # `fednmap fit` has written it
        raise InputError(f"{page} is missing; put it back from a copy, or fit again")
    else:
        write_atomically(out, page.read_bytes())
    print(out)


def sparkline(values: ArrayLike, width: int = WIDTH, log: bool = False, scale: ArrayLike | None = None) -> str:
    """Return a curve in one line of text, scaled to its least and largest values, or to those of `scale`.

    >>> sparkline([0, 1, 2, 3, 2, 1, 0])
    '▁▃▆█▆▃▁'
    """
    y, common = (np.asarray(v, dtype=float) for v in (values, values if scale is None else scale))
    if log:
        y, common = (np.log10(np.where(v > 0, v, np.nan)) for v in (y, common))
    if len(y) > width:
        y = y[np.linspace(0, len(y) - 1, width).round().astype(int)]
    finite = common[np.isfinite(common)]
    if not len(finite):
        return ""
    low, span = finite.min(), np.ptp(finite) or 1.0
    return "".join(BLOCKS[min(7, round(7 * (v - low) / span))] if np.isfinite(v) else " " for v in y)


def _coefficients(folder: RunFolder) -> Sequence[Table | TextTable]:
    """The table that a fit has written, else one per linear model."""
    file = folder.path / "coefficients.csv"
    if not file.exists():
        return coefficients.shown(models(collect([folder]))[0])
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            head, *rows = csv.reader(lines)
    except (OSError, ValueError, csv.Error):
        return []  # `damages` says so
    cells = [[float(cell) if is_number(cell) else cell for cell in row] for row in rows]
    return [coefficients.readable(DataTable(head, cells)).text()]


def _sparks(series: list[Series]) -> TextTable:
    """The curves in small, a row per method, each column on one scale."""
    columns = []
    for shown in (q for q in drawn(series) if q.brief):
        log = shown.log and positive(series, shown.key)
        curves = [one.having(shown.key).values(shown.key).mean(0) if one.has(shown.key) else None for one in series]
        scale = np.concatenate([y for y in curves if y is not None])
        scale = scale[np.abs(scale) < RUNAWAY]
        cells = [
            "-" if y is None else sparkline(np.where(np.abs(y) < RUNAWAY, y, np.nan), log=log, scale=scale)
            for y in curves
        ]
        columns.append((f"{shown.label} (log)" if log else shown.label, cells))
    return TextTable("along the rounds", [one.label for one in series], columns)


def state(folder: RunFolder) -> str:
    """Finished, running, or how far it came."""
    if is_sweep(folder.path):
        return Sweep.open(folder.path).state()
    results, jobs = folder.results(), expected(folder)
    if folder.running():
        return f"running, {len(results)} of {jobs} methods done" if jobs > 1 else "running"
    if len(results) >= jobs:
        return "finished" if not any("error" in r for r in results) else "finished, with methods that diverged"
    done = max((int(max(c["round"])) for c in folder.curves().values()), default=0)
    end = "" if (rounds := folder.about().rounds) is None else f" of {rounds}"
    return f"stopped, {len(results)} of {jobs} methods done, last measured at round {done}{end}"


def _list(path: Path) -> None:
    rows = []
    for folder in map(RunFolder, run_folders(path)):
        try:
            said, results = folder.about(), folder.results()
            psi = _few([quantity("objective").text(r.get("objective")) for r in results])
            sweep = is_sweep(folder.path)
            methods = f"speedup over {Sweep.open(folder.path).over}" if sweep else _few(said.algorithms)
            rows.append([folder.path.name, said.data or "-", methods, state(folder), psi])
        except InputError as error:
            rows.append([folder.path.name, "", "", f"damaged: {str(error).splitlines()[0]}", ""])
    console().print(DataTable(["run", "data", "methods", "state", "psi"], rows).rich(box=box.SIMPLE_HEAD))


def _few(words: Sequence[str]) -> str:
    return ", ".join(words[:3]) + (" ..." if len(words) > 3 else "")


def run_folders(path: Path) -> list[Path]:
    """Return the run folders directly in `path`, oldest first."""
    if not path.is_dir():
        raise InputError(f"{path} is not a folder")
    files = sorted(path.glob("*/run.toml"), key=lambda file: (file.stat().st_mtime, file.parent.name))
    if not files:
        raise InputError(f"{path} holds no run folders; name one, or make one with `fednmap train`")
    return [file.parent for file in files]
