"""prox-DSGD: what everybody would try first, a proximal gradient step of what the neighbours agree on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fednmap.core import FixedPoint, Oracle, Regularizer
from fednmap.decentralized.contract import DecentralizedAlgorithm, DecentralizedTraits


@dataclass(frozen=True)
class ProxDSGD(DecentralizedAlgorithm):
    """prox-DSGD, decentralised proximal SGD in the adapt-then-combine form, ends near the optimum of f + phi::

        x_i = prox_{eta_a phi}(sum_j W_ij (x_j - eta_a g_j(x_j)))

    Each node's own gradient pulls it away from the others for ever: where the f_i differ the nodes do not agree, and
    their mean is off by O(eta_a). One vector per link, any doubly stochastic W. On the complete graph it is Prox-SGD.

    Reference: Zeng and Yin, On Nonconvex Decentralized Gradient Descent, 2018 (Prox-DGD); Chen and Sayed, Diffusion
    Adaptation Strategies for Distributed Optimization, 2012 (adapt, then combine).

    >>> from fednmap.regularizers import L1
    >>> ProxDSGD(L1(0.1), eta_a=0.05).traits.fixed_point.value
    'biased, O(eta_a)'
    """

    phi: Regularizer
    eta_a: float = 0.1

    traits = DecentralizedTraits(
        vectors=1, prox="1", fixed_point=FixedPoint.BIASED, rate="-", directed=True, changing=True
    )

    class State(NamedTuple):
        x: Tensor

    class Message(NamedTuple):
        v: Tensor

    class Kept(NamedTuple):
        pass

    def init(self, start: Tensor) -> State:
        return self.State(start)

    def message(self, state: State, g: Oracle) -> tuple[Message, Kept]:
        return self.Message(state.x - self.eta_a * g(state.x, 0)), self.Kept()

    def update(self, kept: Kept, mixed: Message) -> State:
        return self.State(self.phi.prox(mixed.v, self.eta_a))
