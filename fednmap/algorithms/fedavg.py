"""FedAvg, FedProx with a proximal term in the local problem, and PrunedFedAvg, which prunes the result.

McMahan, Moore, Ramage, Hampson and Aguera y Arcas, Communication-Efficient Learning of Deep Networks from
Decentralized Data, AISTATS 2017. Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith, Federated Optimization in
Heterogeneous Networks, MLSys 2020. Pruning by magnitude: Han, Pool, Tran and Dally, Learning both Weights and
Connections for Efficient Neural Networks, 2015.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from fednmap.algorithms.hyperparameters import check
from fednmap.algorithms.kernels import LocalSteps
from fednmap.core import Algorithm, FixedPoint, NoState, Oracle, Regularizer, Traits
from fednmap.regularizers import Zero
from fednmap.regularizers.parameters import below_one, nonnegative


@dataclass(frozen=True, repr=False)
class Averaging(Algorithm):
    """Local SGD whose changes are averaged: what the methods of this file share."""

    phi: Regularizer = field(default_factory=Zero)
    eta_a: float = 0.1
    eta_s: float = 1.0
    Q: int = 10
    local_momentum: float = field(default=0.0, kw_only=True)
    local_decay: float = field(default=1.0, kw_only=True)

    traits = Traits(
        composite=False, up=1, down=1, prox="0 + 0", fixed_point=FixedPoint.BIASED, rate="-", server_variable="x"
    )

    class Server(NamedTuple):
        x: Tensor

    class Up(NamedTuple):
        change: Tensor

    def __post_init__(self) -> None:
        check(self, "eta_a", "eta_s", "Q", "local_momentum", "local_decay")

    def init(self, start: Tensor) -> tuple[Server, NoState]:
        return self.Server(start), NoState()

    def local(self, down: Server, client: NoState, g: Oracle) -> tuple[Up, NoState]:
        y, step = down.x, LocalSteps(self.eta_a, g, self.local_momentum, self.local_decay)
        for q in range(self.Q):
            y = step.down(y, y, q)
        return self.Up(y - down.x), client

    def aggregate(self, server: Server, up: Up, share: float) -> Server:
        return self.Server(server.x + self.eta_s * up.change)


@dataclass(frozen=True, repr=False)
class FedAvg(Averaging):
    r"""FedAvg solves $\min f(x)$, up to a bias of order $\eta_a$ on heterogeneous clients.

    $$
    \text{client } i:\quad & y_i = x, \text{ then } Q \text{ times } y_i = y_i - \eta_a g_i(y_i) \\
    \text{server}:\quad & x = x + \eta_s \mean (y_i - x)
    $$

    With $\eta_s = 1$ the server averages the local models, as published.

    local_momentum, local_decay: options of the local steps, in every round from the beginning: step q is
            $y_i - \eta_a \beta^q v_q$ with $v_q = \mu v_{q-1} + g_i(y_i)$, $\mu$ the momentum and $\beta$ the decay.
            Default 0 and 1, plain steps.

    >>> FedAvg(eta_a=0.1, Q=5).traits.composite
    False
    """


@dataclass(frozen=True, repr=False)
class FedProx(Averaging):
    r"""FedProx solves $\min f(x)$, up to a bias on heterogeneous clients.

    $$
    \text{client } i:\quad & y_i = x, \text{ then } Q \text{ times } y_i = y_i - \eta_a (g_i(y_i) + \mu (y_i - x)) \\
    \text{server}:\quad & x = x + \eta_s \mean (y_i - x)
    $$

    mu: weight of $\frac{\mu}{2} |y - x|^2$ in the local problem; 0 is FedAvg.

    >>> FedProx(eta_a=0.1, Q=5, mu=0.1).traits.composite
    False
    """

    mu: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        nonnegative(self, "mu")

    def local(self, down: Averaging.Server, client: NoState, g: Oracle) -> tuple[Averaging.Up, NoState]:
        y, step = down.x, LocalSteps(self.eta_a, g, self.local_momentum, self.local_decay)
        for q in range(self.Q):
            y = step.down(y, y, q, self.mu * (y - down.x))
        return self.Up(y - down.x), client


@dataclass(frozen=True, repr=False)
class PrunedFedAvg(Averaging):
    """PrunedFedAvg runs FedAvg and prunes its model: what people do instead of a composite method.

    What is measured and returned is FedAvg's x with 0 where $|x_j|$ is among the smallest `zeros` share of all entries.

    zeros: the share of entries that are set to 0, from 0 (FedAvg) to below 1.

    >>> import torch
    >>> method = PrunedFedAvg(zeros=0.5)
    >>> method.model(method.Server(torch.tensor([3.0, -1.0, 0.5, -2.0])))
    tensor([ 3.,  0.,  0., -2.])
    """

    zeros: float = 0.8

    traits = replace(Averaging.traits, fixed_point=FixedPoint.NONE)

    def __post_init__(self) -> None:
        super().__post_init__()
        below_one(self, "zeros")

    def model(self, server: Averaging.Server) -> Tensor:
        smallest = int(self.zeros * server.x.numel() + 1e-6)  # 0.29 of 100 are 29
        order = server.x.abs().sort(stable=True).indices  # of those that are equally small the last ones stay
        return server.x.index_fill(0, order[:smallest], 0.0)
