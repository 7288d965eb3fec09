"""`fednmap report`: a page to look at in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fednmap.names import InputError
from fednmap.report import report as write
from fednmap.runs.atomic_files import write_atomically
from fednmap.runs.folder import RunFolder
from fednmap.runs.sweep import Sweep, is_sweep


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Run folders; several are shown together. Or one folder of `fednmap fit`.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("report.html"),
) -> None:
    """Write one self-contained HTML page about runs: curves, closing numbers, surviving weights, configuration."""
    if out.is_dir():
        raise InputError(f"{out} is a folder; name a file, such as {out / 'report.html'}")
    folders = [f for run in runs for f in (Sweep.open(run).parts() if is_sweep(run) else [RunFolder.open(run)])]
    fits = [folder.path for folder in folders if folder.about().made_in == "fit"]
    if fits and len(runs) > 1:
        raise InputError(f"expected the folder of one fit, or of runs, got {fits[0]} among {len(runs)}; give it alone")
    if fits:
        page = fits[0] / "report.html"  # `fednmap fit` has written it
        if not page.is_file():
            raise InputError(f"{page} is missing; put it back from a copy, or fit again")
        write_atomically(out, page.read_bytes())
    else:
        write(folders, out)
    print(out)
