"""How a trial is run: an ordinary run folder where a configuration describes it, else a note of where it comes from."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from fednmap.paper.trials import Setting
from fednmap.report.progress import Warnings
from fednmap.runs.configuration import Config
from fednmap.runs.execution import execute
from fednmap.runs.files import clear_errors, to_json, write_atomically
from fednmap.runs.folder import RunFolder, provenance
from fednmap.simulation import Record


def trained(config: Config, columns: tuple[str, ...], path: Path) -> list[Record]:
    """Train as `fednmap train --config PATH/run.toml` does; what was measured of these columns.

    A trial that was stopped goes on from its checkpoint. When it is finished its checkpoints are not needed any more.
    """
    begun = (path / "run.toml").exists()
    folder = RunFolder.open(path) if begun else RunFolder.create(path, config, "reproduce")
    (result,) = execute(config, folder, Warnings(Console(stderr=True)))
    if "error" in result:
        raise ArithmeticError(f"{path}: {result['error']}")
    shutil.rmtree(path / "checkpoints", ignore_errors=True)
    return [{name: record[name] for name in ("round", *columns)} for record in folder.records(result["method"], 0)]


def computed(setting: Setting, measure: Callable[[], list[Record]], path: Path) -> list[Record]:
    """A trial of a few seconds on a problem with no model to keep: if it is stopped, it begins again."""
    with clear_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        write_atomically(path / "environment.json", to_json(provenance(setting)))
    return measure()
