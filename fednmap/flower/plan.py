"""What the server must know of a run; nothing of it is data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fednmap.core import Algorithm, Regularizer
from fednmap.names import InputError
from fednmap.problems import FiniteSum, LeastSquares, Network
from fednmap.runs.configuration import Config
from fednmap.runs.experiment import Experiment, assemble
from fednmap.runs.folder import Model


class Point(NamedTuple):
    """A model, or a gradient, on its way."""

    x: Tensor


def plain(x: Tensor) -> Model:
    return Model({"x": x}, ())


@dataclass(frozen=True)
class Plan:
    """The method, where it begins, and what is measured on the server's side.

    metrics:    more to measure: name -> function of the model x.
    saved:      the model x as it is saved.
    """

    algorithm: Algorithm
    phi: Regularizer
    start: Tensor
    measure_gamma: float
    metrics: Mapping[str, Callable[[Tensor], float]] = field(default_factory=dict)
    saved: Callable[[Tensor], Model] = plain


def plan_of(experiment: Experiment) -> Plan:
    """The plan of an experiment whose method is the first that its configuration names."""
    algorithm = experiment.algorithm(experiment.config.algorithms[0])
    if algorithm.traits.central:
        raise InputError(f"{type(algorithm).__name__} is a central method; between machines use FedNMap")
    problem, inputs = experiment.problem, () if experiment.dataset is None else experiment.dataset.x_train.shape[1:]

    def saved(x: Tensor) -> Model:
        return Model(problem.parameters(x) if isinstance(problem, Network) else {"x": x}, tuple(inputs))

    return Plan(algorithm, experiment.phi, experiment.start(algorithm), experiment.measure_gamma, saved=saved)


def plan_from(config: Config, start: Tensor, module: nn.Module | None = None) -> Plan:
    """The plan where the server holds no data: only the first model, and the network it belongs to, if there is one."""
    nothing: FiniteSum
    if module is None:
        nothing = LeastSquares([(start.new_zeros(1, len(start)), start.new_zeros(1))])
    else:
        nothing = Network(module, nn.functional.mse_loss, [(torch.zeros(1), torch.zeros(1))], batch_size=1)
        if nothing.dim != len(start):
            raise InputError(f"the server's network has {nothing.dim} parameters, the clients' {len(start)}")
    nothing.start = start
    return plan_of(assemble(config, None, nothing))  # type: ignore[arg-type]  # no data set is needed for that
