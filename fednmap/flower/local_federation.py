"""The app that `fednmap flower up` runs: every node loads the same data set and takes its part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
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
from fednmap.flower.new import write_project
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
        plan_from(experiment.config, problem.start, architecture(problem), regularized(problem)),
        saved=partial(saved_model, experiment),
        measure_gamma=experiment.measure_gamma,
        metrics=experiment.metrics(),
        weights=None if problem.weights is None else tuple(problem.weights.tolist()),
    )


def write_trial(folder: Path, run_config: Mapping[str, Any]) -> Path:
    """The app of `fednmap flower up`."""
    halves = {f"{half}_app.py": f"from {__name__} import {half}\n\napp = {half}\n" for half in ("client", "server")}
    write_project(folder, "fednmap-trial", halves, tomli_w.dumps(dict(run_config)))
    return folder


client = client_app(load)
server = server_app(plan)
