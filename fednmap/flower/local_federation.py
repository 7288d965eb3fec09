"""The app that `fednmap flower up` runs, and its files: every node loads the same data set and takes its part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w
import torch
from flwr.app import Context
from torch import Tensor

from fednmap.data import Dataset
from fednmap.data.sparse import take
from fednmap.flower.client import client_app
from fednmap.flower.local import LocalProblem
from fednmap.flower.plan import Plan, plan_from
from fednmap.flower.server import server_app
from fednmap.flower.settings import read
from fednmap.runs.configuration import Config
from fednmap.runs.execution import saved_model
from fednmap.runs.experiment import architecture, prepare, regularized


def load(context: Context) -> LocalProblem:
    """The part of the data that this node's name stands for."""
    config, federation = read(context.run_config)
    config = config.model_copy(update=dict.fromkeys(("dp_clip", "dp_noise", "dp_forget", "dp_among")))
    experiment, i = prepare(config), federation.names.index(str(context.node_config["client"]))
    natural = experiment.config.partition == "natural"
    return LocalProblem(experiment.problem.alone(i), _test_rows(experiment.dataset, i) if natural else None)


def _test_rows(data: Dataset, i: int) -> tuple[Tensor, Tensor] | None:
    """What client i keeps back to measure accuracy on; None where it keeps nothing back."""
    if data.classes is None or data.clients is None or data.test_clients is None:
        return None
    mine = data.test_clients == torch.unique(data.clients)[i]
    return (take(data.x_test, mine), data.y_test[mine]) if bool(mine.any()) else None


def plan(config: Config, start: Callable[[], Tensor]) -> Plan:
    """In a trial the server has the data too: it begins where `train` does, and measures what `train` measures."""
    experiment = prepare(config)
    problem = experiment.problem
    return replace(
        plan_from(experiment.config, experiment.problem.start, architecture(problem), regularized(problem)),
        measure_gamma=experiment.measure_gamma,
        inputs=tuple(experiment.dataset.x_train.shape[1:]),
        metrics=experiment.metrics(),
        weights=None if problem.weights is None else tuple(problem.weights.tolist()),
        about=saved_model(experiment, problem.start).about(),
    )


def write_trial(folder: Path, run_config: Mapping[str, Any]) -> Path:
    """The app of `fednmap flower up`."""
    package = folder / "fednmap_trial"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('"""A trial of a federation on one machine."""\n')
    for half in ("client", "server"):
        (package / f"{half}_app.py").write_text(
            f"from fednmap.flower.local_federation import {half} as app\n\n__all__ = ['app']\n"
        )
    project = {
        "project": {"name": "fednmap-trial", "version": "1.0.0", "license": "Apache-2.0", "dependencies": []},
        "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "fednmap",
                    "components": {
                        "serverapp": "fednmap_trial.server_app:app",
                        "clientapp": "fednmap_trial.client_app:app",
                    },
                    "config": dict(run_config),
                }
            }
        },
    }
    (folder / "pyproject.toml").write_text(tomli_w.dumps(project))
    return folder


client = client_app(load)
server = server_app(plan)
