"""FedAvg, pruned: what people do instead of a composite method. The smallest weights of FedAvg's model are set to 0.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017; pruning by
magnitude as in Han, Pool, Tran and Dally, Learning both Weights and Connections for Efficient Neural Networks, 2015.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from fednmap.algorithms.fedavg import FedAvg
from fednmap.algorithms.hyperparameters import check
from fednmap.core import Algorithm, FixedPoint, NoState, Oracle, Regularizer
from fednmap.regularizers import Zero
from fednmap.regularizers.parameters import below_one


@dataclass(frozen=True)
class PrunedFedAvg(Algorithm):
    """FedAvg runs as it is; what is measured and returned is its x without the smallest entries::

        rounds:  as FedAvg
        model:   x, but 0 where |x_j| is among the smallest `zeros` share of all entries

    zeros: the share of entries that are set to 0, from 0 (FedAvg) to below 1.

    >>> import torch
    >>> method = PrunedFedAvg(zeros=0.5)
    >>> method.model(method.Server(torch.tensor([3.0, -1.0, 0.5, -2.0])))
    tensor([ 3.,  0.,  0., -2.])
    """

    phi: Regularizer = field(default_factory=Zero)
    eta_a: float = 0.1
    eta_s: float = 1.0
    Q: int = 10
    zeros: float = 0.8

    traits = replace(FedAvg.traits, fixed_point=FixedPoint.NONE)

    class Server(NamedTuple):
        x: Tensor

    class Up(NamedTuple):
        change: Tensor

    def __post_init__(self) -> None:
        check(self, "eta_a", "eta_s", "Q")
        below_one(self, "zeros")

    @cached_property
    def _fedavg(self) -> FedAvg:
        return FedAvg(self.phi, self.eta_a, self.eta_s, self.Q)

    def init(self, start: Tensor) -> tuple[Server, NoState]:
        return self.Server(start), NoState()

    def local(self, down: Server, client: NoState, g: Oracle) -> tuple[Up, NoState]:
        up, _ = self._fedavg.local(FedAvg.Server(down.x), client, g)
        return self.Up(up.change), client

    def aggregate(self, server: Server, up: Up, share: float) -> Server:
        return self.Server(server.x + self.eta_s * up.change)

    def model(self, server: Server) -> Tensor:
        x, smallest = server.x, int(self.zeros * server.x.numel() + 1e-6)  # 0.29 of 100 are 29
        if smallest == 0:
            return x
        size = x.abs()
        edge = size.kthvalue(smallest).values
        small = size <= edge
        more = int(small.sum()) - smallest
        if more > 0:  # of those that are equally small the last ones stay
            small[(size == edge).nonzero().squeeze(-1)[-more:]] = False
        return x.masked_fill(small, 0.0)
