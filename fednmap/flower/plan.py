"""What server and clients must know of a run; nothing of it is data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fednmap.asynchronous import Asynchronous
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
    """A client's measurement, of which the server takes the mean.

    numbers: the loss; for each metric its value and 1, or 0 and 0 where the client has none.
    """

    numbers: Tensor
    gradient: Tensor

    @classmethod
    def of(cls, loss: float, metrics: Mapping[str, float], names: Sequence[str], gradient: Tensor) -> Measured:
        """Return the measurement in which these metrics stand in this order."""
        pairs = [(metrics.get(name, 0.0), float(name in metrics)) for name in names]
        return cls(torch.tensor([loss, *chain(*pairs)], dtype=torch.float64), gradient)

    def values(self, names: Sequence[str]) -> dict[str, float]:
        """Return the loss, and the means of the metrics over the clients that have them."""
        loss, *rest = self.numbers.tolist()
        pairs = zip(names, rest[::2], rest[1::2], strict=True)
        return {"loss": loss} | {name: value / weight for name, value, weight in pairs if weight}


@dataclass(frozen=True)
class Plan:
    """The method, where it begins, and what is measured on the server's side.

    saved:         turns the vector x into the model that is stored.
    measure_gamma: gamma of |F_nat|^2.
    metrics:       more to measure: name -> function of the model x.
    weights:       what each client counts, in the order of their names; None where all count the same.
    privacy:       how clients are hidden, if they are.
    asynchronous:  how the server counts replies that are late; None where it waits for all of a round.
    """

    algorithm: Algorithm
    phi: Regularizer
    start: Tensor
    saved: Callable[[Tensor], Model]
    measure_gamma: float = 1.0
    metrics: Mapping[str, Callable[[Tensor], float]] = field(default_factory=dict)
    weights: tuple[float, ...] | None = None
    privacy: Privacy | None = None
    asynchronous: Asynchronous | None = None

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


def plan_from(
    config: Config, start: Tensor, module: nn.Module | None = None, coefficients: slice | None = None
) -> Plan:
    """The plan of whoever holds the settings, the first model and the network it belongs to, if there is one.

    No data is needed: |F_nat|^2 is measured with the settings' gamma, else with 1.

    coefficients: of a linear model with an intercept; see `Methods.of`.
    """
    parameters = {"x": start} if module is None else trained(module)
    sizes = [p.numel() for p in parameters.values()]
    if sum(sizes) != len(start):
        raise InputError(f"the server's network has {sum(sizes)} parameters, the clients' {len(start)}")

    def saved(x: Tensor) -> Model:
        pieces = zip(parameters.items(), x.split(sizes), strict=True)
        return Model.of({name: v.view(p.shape) for (name, p), v in pieces}, {})

    methods = Methods.of(config, module, coefficients)
    algorithm = methods.algorithm(config.algorithms[0])
    late: Asynchronous | None = None
    if isinstance(algorithm, Asynchronous):  # which the clients' half does not notice
        late = algorithm
        algorithm = late.method
    if algorithm.traits.central:
        raise InputError(f"{type(algorithm).__name__} is a central method; between machines use FedNMap")
    privacy = privacy_of(config)
    algorithm = Pipeline(privacy).wrap(algorithm)
    first = methods.start_from(start, algorithm)
    return Plan(algorithm, methods.phi, first, saved, config.measure_gamma or 1.0, privacy=privacy, asynchronous=late)
