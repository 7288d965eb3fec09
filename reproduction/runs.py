"""How one trial is run: in an ordinary run folder where a configuration describes it, else as a plain computation."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from fednmap.algorithms import FedCanon
from fednmap.core import Algorithm
from fednmap.names import InputError
from fednmap.report.progress import Warnings
from fednmap.report.terminal import console
from fednmap.runs.atomic_files import locked
from fednmap.runs.configuration import Config
from fednmap.runs.execution import execute
from fednmap.runs.experiment import Experiment, dataset_of, prepare
from fednmap.runs.folder import RunFolder
from fednmap.simulation import Record
from reproduction.trials import Setting, Trial


def training(setting: Setting, config: Config, columns: tuple[str, ...]) -> Trial:
    """A trial that is an ordinary run; `columns` of what it measures are kept."""
    return of_config(setting, config, partial(trained, columns=columns), columns=list(columns))


def of_config(setting: Setting, config: Config, measure: Callable[[Config, Path], list[Record]], **more: Any) -> Trial:
    """A trial that `measure(config, path)` runs; more: what its numbers depend on besides the configuration."""
    configuration = config.model_dump(mode="json", exclude={"checkpoint_every"}) | more
    return Trial(setting, partial(measure, config), configuration, partial(_digest, config))


def _digest(config: Config) -> str:
    return dataset_of(config).digest


def trained(config: Config, path: Path, columns: tuple[str, ...]) -> list[Record]:
    """Train as `fednmap train --config PATH/run.toml` does; return what was measured of these columns.

    A trial that was stopped continues from its checkpoint; one of other settings or data begins again. The checkpoints
    of a finished trial are deleted.
    """
    reporter, experiment = Warnings(console(stderr=True)), prepare(config)
    folder = RunFolder(path)
    if not _is_begun(folder, experiment):
        if (path / "run.toml").exists():
            reporter.message(f"{path} holds a run of other settings or data; it begins again")
            _discard(path)
        folder = RunFolder.create(path, config, "reproduce")
    (result,) = execute(config, folder, reporter, experiment=experiment)
    if "error" in result:
        raise ArithmeticError(f"{path}: {result['error']}")
    shutil.rmtree(path / "checkpoints", ignore_errors=True)
    folder.write_checksums()
    return [{name: record[name] for name in ("round", *columns)} for record in folder.records(result["method"], 0)]


def _is_begun(folder: RunFolder, experiment: Experiment) -> bool:
    """Whether the folder holds this very run."""
    if not (folder.path / "run.toml").exists():
        return False
    try:
        folder.check_settings(experiment.config.model_dump(mode="json"))
        folder.check_data_digest(experiment.dataset.digest)
    except InputError:
        return False
    return True


def _discard(path: Path) -> None:
    """Delete a run folder, unless another process uses it."""
    with locked(path):
        shutil.rmtree(path)


def hyperparameters(algorithm: Algorithm) -> dict[str, str]:
    """Return each field's name and value in words; FedCanon's default alpha as the number that it stands for."""
    found = {field.name: str(getattr(algorithm, field.name)) for field in fields(algorithm)}  # type: ignore[arg-type]
    return found | {"alpha": str(algorithm.server_step)} if isinstance(algorithm, FedCanon) else found


def computed(measure: Callable[[], list[Record]], path: Path) -> list[Record]:
    """Run a trial of a few seconds that keeps nothing on disk: if it is stopped, it begins again."""
    return measure()
