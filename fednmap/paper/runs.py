"""How a trial is run: an ordinary run folder where a configuration describes it, else a note of where it comes from."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fednmap.names import InputError
from fednmap.paper.trials import Setting, Trial
from fednmap.report.progress import Warnings
from fednmap.report.terminal import console
from fednmap.runs.configuration import Config
from fednmap.runs.execution import execute
from fednmap.runs.experiment import Experiment, dataset_of, prepare
from fednmap.runs.files import clear_errors, locked, to_json, write_atomically
from fednmap.runs.folder import RunFolder, provenance
from fednmap.simulation import Record


def training(setting: Setting, config: Config, columns: tuple[str, ...]) -> Trial:
    """A trial that is an ordinary run; `columns` of what it measures are kept."""
    told = config.model_dump(mode="json", exclude={"checkpoint_every"}) | {"columns": list(columns)}
    return Trial(setting, partial(trained, config, columns), told, partial(_digest, config))


def _digest(config: Config) -> str:
    return dataset_of(config).digest


def trained(config: Config, columns: tuple[str, ...], path: Path) -> list[Record]:
    """Train as `fednmap train --config PATH/run.toml` does; what was measured of these columns.

    A trial that was stopped goes on from its checkpoint; one that was begun with other settings or data begins again.
    When it is finished its checkpoints are not needed any more.
    """
    reporter, experiment = Warnings(console(stderr=True)), prepare(config)
    folder = RunFolder(path)
    if not _is_begun(folder, experiment):
        if (path / "run.toml").exists():
            reporter.tell(f"{path} was begun with other settings or data, and begins again")
            _discard(path)
        folder = RunFolder.create(path, config, "reproduce")
    (result,) = execute(config, folder, reporter, experiment=experiment)
    if "error" in result:
        raise ArithmeticError(f"{path}: {result['error']}")
    shutil.rmtree(path / "checkpoints", ignore_errors=True)
    return [{name: record[name] for name in ("round", *columns)} for record in folder.records(result["method"], 0)]


def _is_begun(folder: RunFolder, experiment: Experiment) -> bool:
    """Whether the folder holds this very run."""
    if not (folder.path / "run.toml").exists():
        return False
    try:
        folder.check_settings(experiment.config)
        folder.recognise(experiment.dataset.digest)
    except InputError:
        return False
    return True


def _discard(path: Path) -> None:
    """Away with a run folder, unless another process is at work in it."""
    with locked(path):
        shutil.rmtree(path)


def computed(
    setting: Setting, measure: Callable[[], list[Record]], path: Path, data: str | None = None
) -> list[Record]:
    """A trial of a few seconds on a problem with no model to keep: if it is stopped, it begins again.

    data: the SHA-256 of the data, where there are any.
    """
    with clear_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        write_atomically(path / "environment.json", to_json(provenance(setting) | ({"data": data} if data else {})))
    return measure()
