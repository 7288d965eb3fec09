"""FedAvg, pruned: what people do instead of a composite method. The smallest weights of FedAvg's model are set to 0.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017; pruning by
magnitude as in Han, Pool, Tran and Dally, Learning both Weights and Connections for Efficient Neural Networks, 2015.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

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

    Server, Up = FedAvg.Server, FedAvg.Up

    def __post_init__(self) -> None:
        check(self, "eta_a", "eta_s", "Q")
        below_one(self, "zeros")

    @cached_property
    def _fedavg(self) -> FedAvg:
        return FedAvg(self.phi, self.eta_a, self.eta_s, self.Q)

    def init(self, start: Tensor) -> tuple[FedAvg.Server, NoState]:
        return self._fedavg.init(start)

    def local(self, down: FedAvg.Server, client: NoState, g: Oracle) -> tuple[FedAvg.Up, NoState]:
        return self._fedavg.local(down, client, g)

    def aggregate(self, server: FedAvg.Server, up: FedAvg.Up, share: float) -> FedAvg.Server:
        return self._fedavg.aggregate(server, up, share)

    def model(self, server: FedAvg.Server) -> Tensor:
        smallest = int(self.zeros * server.x.numel() + 1e-6)  # 0.29 of 100 are 29
        order = server.x.abs().sort(stable=True).indices  # of those that are equally small the last ones stay
        return server.x.index_fill(0, order[:smallest], 0.0)
