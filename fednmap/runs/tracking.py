"""Callbacks for the tools people have: TensorBoard and MLflow.

Each works in a run folder (`fednmap train --track tensorboard`) and in Python:

    with TensorBoard(Path("logs")) as board:
        run(algorithm, problem, rounds=100, callbacks=[board])
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from fednmap.names import InputError, choose
from fednmap.runs.configuration import shown
from fednmap.runs.execution import Reporter, RunInfo
from fednmap.runs.folder import RunFolder
from fednmap.simulation import Record

IMPORTS = {"tensorboard": ("torch.utils.tensorboard", "SummaryWriter"), "mlflow": ("mlflow.tracking", "MlflowClient")}


class Tracker(Reporter, AbstractContextManager["Tracker"]):
    """Sends every measurement elsewhere; `end`, or the end of a `with` block, closes what is open."""

    def __exit__(self, *_: object) -> None:
        self.end(None)


class TensorBoard(Tracker):
    """Scalars for TensorBoard, one subfolder per method and trial: `tensorboard --logdir FOLDER`."""

    def __init__(self, folder: Path) -> None:
        self._writer = imported("tensorboard")
        self.folder = folder
        self._open: Any = None

    def begin(self, what: RunInfo) -> None:
        # rounds that are run again take the place of those after the checkpoint
        self._open = self._writer(self.folder / str(what.job), purge_step=what.done + 1 if what.done else None)

    def on_record(self, record: Record) -> None:
        if self._open is None:
            self._open = self._writer(self.folder)
        for name, value in record.items():
            if name != "round":
                self._open.add_scalar(name, value, int(record["round"]))

    def end(self, result: dict[str, Any] | None) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


class MLflow(Tracker):
    """A run per method and trial in MLflow, with the configuration as its parameters.

    uri:        where MLflow keeps its runs: a folder as file:..., or a server; default MLflow's own choice.
    experiment: the name under which MLflow groups runs.
    """

    def __init__(self, uri: str | None = None, experiment: str = "fednmap") -> None:
        make = imported("mlflow")
        with _mlflow_errors():
            self._client = make(tracking_uri=uri)
            found = self._client.get_experiment_by_name(experiment)
            self._experiment = found.experiment_id if found else self._client.create_experiment(experiment)
        self._run: str | None = None

    def begin(self, what: RunInfo) -> None:
        more = {"algorithm": what.job.method, "first_round": what.done}
        with _mlflow_errors():
            self._run = self._client.create_run(self._experiment, run_name=str(what.job)).info.run_id
            for name, value in (what.facts | more).items():
                self._client.log_param(self._run, name, value)

    def on_record(self, record: Record) -> None:
        with _mlflow_errors():
            if self._run is None:
                self._run = self._client.create_run(self._experiment).info.run_id
            for name, value in record.items():
                if name != "round":
                    self._client.log_metric(self._run, name, value, step=int(record["round"]))

    def end(self, result: dict[str, Any] | None) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            status = "KILLED" if result is None else "FAILED" if "error" in result else "FINISHED"
            with _mlflow_errors():
                self._client.set_terminated(run, status)


def imported(name: str) -> Any:
    """Return the class that writes for this tracker; refused if it is unknown or not installed."""
    module, kind = choose("tracker", name, IMPORTS)
    # MLflow reports its use to its makers by default, which is not for people who train on private data
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    try:
        return getattr(import_module(module), kind)
    except ImportError:
        raise InputError(f"{name} is not installed; pip install 'fednmap[tracking]'") from None


@contextmanager
def _mlflow_errors() -> Iterator[None]:
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        raise OSError(f"MLflow: {shown(str(error), 300)}") from error


def trackers(names: list[str] | None, folder: RunFolder) -> tuple[Tracker, ...]:
    """Return the trackers of a run folder: TensorBoard's files go into it, and MLflow's unless it has a server."""
    uri = None
    if "mlflow" in (names or []) and not os.environ.get("MLFLOW_TRACKING_URI"):
        # plain files need nothing but MLflow's small package, which must be asked for them
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        uri = (folder.path / "mlflow").resolve().as_uri()
    made: dict[str, Callable[[], Tracker]]
    made = {"tensorboard": lambda: TensorBoard(folder.path / "tensorboard"), "mlflow": lambda: MLflow(uri)}
    return tuple(made[name]() for name in dict.fromkeys(names or []))
