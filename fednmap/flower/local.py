"""What a client supplies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fednmap.core import Algorithm, Oracle, SecondOrder, oracle_of
from fednmap.measure import accuracy
from fednmap.names import InputError
from fednmap.problems import FiniteSum
from fednmap.simulation.trajectory import Metric, check_measuring


@dataclass(frozen=True)
class LocalProblem:
    """One client's own problem: f_i with its gradient oracle, made from data that stays here.

    problem: a LeastSquares, Logistic or Network (or another FiniteSum) of one client.
    test:    samples and labels kept back to measure accuracy on; None, or none of them, if nothing is.
    weight:  a factor of f_i: n times this client's share where not all count the same.
    columns: names of the features, in their order; sites whose names differ are found before the first round.
    labels:  names of the classes, in the order of their numbers; compared likewise.
    metrics: more to measure: name -> function of the model x on data of this client, such as
             `problem.metric("f1", (inputs, labels))` of a Network. The server records the mean over the clients.
    look:    called with every point before a gradient or loss there leaves; it may refuse.

    >>> from fednmap.problems import LeastSquares
    >>> local = LocalProblem(LeastSquares([(torch.eye(2), torch.ones(2))]))
    >>> local.samples, local.loss(torch.zeros(2))
    (2, 0.5)
    """

    problem: FiniteSum
    test: tuple[Tensor, Tensor] | None = None
    weight: float = 1.0
    columns: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    look: Callable[[Tensor], None] | None = None

    def __post_init__(self) -> None:
        if self.problem.n != 1:
            raise InputError(f"a client's problem holds its own data alone, given {self.problem.n} clients")
        check_measuring(1, 1, None, self.metrics)

    @property
    def samples(self) -> int:
        return self.problem.data.rows

    @property
    def start(self) -> Tensor:
        return self.problem.start

    @property
    def exact_gradients(self) -> bool:
        return self.problem.exact_gradients

    def oracle(self, client: int, t: int) -> Oracle:
        """g(x, q) of round t; the minibatches are those that client number `client` has in a simulation."""
        self.problem.first = client
        g = self.problem.oracle(torch.tensor(0), t)
        return g if self.weight == 1 and self.look is None else lambda x, q: self.weight * g(self._seen(x), q)

    def _seen(self, x: Tensor) -> Tensor:
        """The point, after `look` has seen it."""
        if self.look is not None:
            self.look(x)
        return x

    def oracle_for(self, algorithm: Algorithm, client: int, t: int) -> Oracle:
        """The oracle that the method needs: of gradients, or also of Hessians."""
        g = self.oracle(client, t)
        if not algorithm.traits.hessians:
            return g
        curved = oracle_of(algorithm, self.problem, torch.tensor(0), t)
        assert isinstance(curved, SecondOrder)
        return SecondOrder(g, lambda x: self.weight * curved.hessian(self._seen(x)))

    def loss(self, x: Tensor) -> float:
        return self.weight * float(self.problem.loss(self._seen(x)))

    def gradient(self, x: Tensor) -> Tensor:
        return self.weight * self.problem.gradient(self._seen(x))

    def accuracy(self, x: Tensor) -> float | None:
        """Return the share of test labels that x predicts; None without test samples."""
        if self.test is None or not len(self.test[1]):
            return None
        inputs, labels = self.test
        return accuracy(self.problem.predict(x, inputs), labels)

    def measured(self, x: Tensor) -> dict[str, float]:
        """Return the accuracy and the client's own metrics of x, without those that are not a finite number here."""
        said = {"accuracy": self.accuracy(x), **{name: float(f(self._seen(x))) for name, f in self.metrics.items()}}
        return {name: v for name, v in said.items() if v is not None and math.isfinite(v)}
