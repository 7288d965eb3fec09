"""What server and clients must know of a run; nothing of it is data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from fednmap.core import Algorithm, Regularizer
from fednmap.names import InputError
from fednmap.privacy import Privacy
from fednmap.regularizers.layers import trained
from fednmap.runs.configuration import Config
from fednmap.runs.experiment import Methods
from fednmap.runs.folder import Model
from fednmap.runs.uplink_config import grid_of, privacy_of
from fednmap.simulation.loop import dry_run
from fednmap.simulation.uplink import Pipeline


class Point(NamedTuple):
    """A model, or a gradient, on its way."""

    x: Tensor


class Measured(NamedTuple):
    """A measurement on its way into a secure sum: loss, accuracy, whether it has one; the gradient, or nothing."""

    numbers: Tensor
    gradient: Tensor


@dataclass(frozen=True)
class Plan:
    """The method, where it begins, and what is measured on the server's side.

    module:        the network that the model belongs to; None for a plain vector.
    measure_gamma: gamma of |F_nat|^2.
    inputs:        the shape of one sample; () where it is not known.
    metrics:       more to measure: name -> function of the model x.
    weights:       what each client counts, in the order of their names; None where all count the same.
    privacy:       how clients are hidden, if they are.
    about:         what else the saved model says of itself, as `runs.folder.Model.about` has it: names of features, ...
    """

    algorithm: Algorithm
    phi: Regularizer
    start: Tensor
    module: nn.Module | None = None
    measure_gamma: float = 1.0
    inputs: tuple[int, ...] = ()
    metrics: Mapping[str, Callable[[Tensor], float]] = field(default_factory=dict)
    weights: tuple[float, ...] | None = None
    privacy: Privacy | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    def pipeline(self, config: Config) -> Pipeline:
        """What a client does to its uplinks; refused where the method or the stages cannot work with each other.

        So is a plan that hides clients otherwise than the settings say, and noise that has no room in secure sums: a
        vector that is longer than its bound is refused by the client, whose noise is then the same again.
        """
        if self.privacy != privacy_of(config):
            raise InputError(
                f"the plan's privacy is {self.privacy}, and the settings ask for {privacy_of(config)}; make the plan "
                "by plan_from, or give it Plan(..., privacy=privacy_of(config))"
            )
        parts = (self.privacy, grid_of(config, config.clients))
        pipeline, (server, client) = Pipeline([part for part in parts if part]), self.algorithm.init(self.start)
        up, down = dry_run(self.algorithm, server, client), self.algorithm.broadcast(server)
        pipeline.bind(self.algorithm, down, client, up)
        return pipeline

    def saved(self, x: Tensor) -> Model:
        """The model x as it is saved: by the names of the network's parameters, if there is one."""
        named = {"x": x}
        if self.module is not None:
            parameters = trained(self.module)
            pieces = x.split([p.numel() for p in parameters.values()])
            named = {name: v.view(p.shape) for (name, p), v in zip(parameters.items(), pieces, strict=True)}
        return Model.of(named, {"inputs": self.inputs, **self.about})


def plan_from(
    config: Config, start: Tensor, module: nn.Module | None = None, coefficients: slice | None = None
) -> Plan:
    """The plan of whoever holds the settings, the first model and the network it belongs to, if there is one.

    No data is needed: |F_nat|^2 is measured with the settings' gamma, else with 1.

    coefficients: of a linear model with an intercept; see `Methods.of`.
    """
    size = len(start) if module is None else sum(p.numel() for p in trained(module).values())
    if size != len(start):
        raise InputError(f"the server's network has {size} parameters, the clients' {len(start)}")
    methods = Methods.of(config, module, coefficients)
    algorithm = methods.algorithm(config.algorithms[0])
    if algorithm.traits.central:
        raise InputError(f"{type(algorithm).__name__} is a central method; between machines use FedNMap")
    privacy = privacy_of(config)
    algorithm = Pipeline(privacy).wrap(algorithm)
    first, gamma = methods.start(algorithm, start), config.measure_gamma or 1.0
    return Plan(algorithm, methods.phi, first, module, gamma, privacy=privacy)
