"""A method on a graph, as everything that runs and measures methods knows them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fednmap.core import Problem, Regularizer, Serverless, State, Traits
from fednmap.decentralized.contract import DecentralizedAlgorithm
from fednmap.decentralized.graph_rounds import Mean, rounds_of
from fednmap.decentralized.topologies import Topology
from fednmap.decentralized.weights import check_sums, connected
from fednmap.names import InputError
from fednmap.simulation.loop import Round


@dataclass(frozen=True)
class Decentralized(Serverless):
    """A method without a server on a topology: `fednmap.simulate` and `fednmap.run` take it like any other.

    The clients of the problem are the nodes of the graph; each begins at `start`. Every node takes part in every round;
    `drop` is the probability that a link fails in a round, both ways. What is measured is one model x for all: of
    methods that keep z_i the prox of their mean, of others the mean of the x_i; with it `consensus`, the mean over
    the nodes of |x_i - x|^2.

    eta_a: the method's own step, unless another one is given.

    >>> import fednmap
    >>> from fednmap.decentralized import NormED, Ring
    >>> from fednmap.regularizers import L1
    >>> from fednmap.testing import heterogeneous
    >>> method = Decentralized(NormED(L1(0.2), eta_a=0.1, gamma=0.3), Ring(6))
    >>> result = fednmap.run(method, heterogeneous(), rounds=500)
    >>> result.final["stationarity"] < 1e-12, result.final["consensus"] < 1e-12
    (True, True)
    """

    method: DecentralizedAlgorithm
    topology: Topology
    eta_a: float = None  # type: ignore[assignment]  # given, or the method's
    phi: Regularizer = field(init=False, repr=False)

    def __post_init__(self) -> None:
        method, graph = self.method, self.topology
        for value, kind, example in (
            (method, DecentralizedAlgorithm, "NormED(L1(0.1))"),
            (graph, Topology, "Ring(8)"),
        ):
            if not isinstance(value, kind):
                shown = value.__name__ if isinstance(value, type) else type(value).__name__
                raise InputError(f"expected a method and a topology, such as {example}, got {shown} in its place")
        name, where = type(method).__name__, type(graph).__name__
        if not (graph.symmetric or method.traits.directed):
            raise InputError(
                f"{name} needs a symmetric mixing matrix, and links of {where} lead one way; it would diverge: use "
                "NormDSGT, or links in both directions, such as exponential-undirected"
            )
        first = graph.weights(0)
        check_sums(first, where)
        if len(first) != graph.n:
            raise InputError(f"{where} says {graph.n} nodes and its mixing matrix has {len(first)}")
        if graph.static:
            connected(first, where)
        if self.eta_a is None:
            object.__setattr__(self, "eta_a", method.eta_a)
        elif self.eta_a != method.eta_a:
            object.__setattr__(self, "method", replace(method, eta_a=self.eta_a))  # type: ignore[type-var]
        said = method.traits
        traits = Traits(
            composite=said.composite,
            up=said.vectors,
            down=0,
            prox=said.prox,
            fixed_point=said.fixed_point,
            rate=said.rate,
            full_participation=True,
            normal_map=said.normal_map,
        )
        object.__setattr__(self, "gamma", method.prox_parameter)
        object.__setattr__(self, "phi", method.phi)
        object.__setattr__(self, "traits", traits)

    @property
    def name(self) -> str:
        return type(self.method).__name__

    def simulate(self, problem: Problem, rounds: int, start: Tensor, **options: Any) -> Iterator[Round]:
        return rounds_of(self, problem, rounds, start, **options)

    def init(self, start: Tensor) -> tuple[Mean, State]:
        return Mean(start, start.new_zeros(())), self.method.init(start)

    def model(self, server: Mean) -> Tensor:
        return self.method.model(server.iterate)

    def extra_metrics(self, server: Mean) -> dict[str, float]:
        return {"consensus": float(server.consensus)}
