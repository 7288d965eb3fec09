"""norM-ED: exact diffusion of the normal map.

Kun Huang, Shi Pu and Angelia Nedic, Distributed Normal Map-based Stochastic Proximal Gradient Methods over Networks,
2024, arXiv:2412.13054.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fednmap.core import FixedPoint, Oracle, Regularizer
from fednmap.decentralized.contract import DecentralizedAlgorithm, DecentralizedTraits


@dataclass(frozen=True)
class NormED(DecentralizedAlgorithm):
    """norM-ED solves min f(x) + phi(x) on a graph, with one vector per link.

    With G_i = g_i(x_i) + (z_i - x_i)/gamma, x_i = prox_{gamma phi}(z_i), a round is a step, its correction, and a mix::

        s_i = z_i - eta_a G_i
        z_i = sum_j W_ij (z_j + s_j - s_j of the round before)

    beginning with the correction at 0. With a constant eta_a this is z_i = sum_j W_ij (2 z_j - z_j' - eta_a (G_j -
    G_j')), a prime for the round before. The mean over the nodes takes the step z - eta_a mean G_i whatever W is, and
    at rest all z_i are the same: x is a stationary point of f + phi, however different the f_i. For phi = 0 this is
    exact diffusion (ED, also D2).

    W must be symmetric and without eigenvalues below 0: where the graph's W has some, or changes from round to round,
    the nodes use (I + W)/2. Proved for a W that stays; where it changes the fixed point is the same, and whether it is
    reached depends on the graph (docs/decentralized.md).

    gamma: prox parameter, gamma * rho < 1. Default: 4 eta_a, at most 0.5 / rho.

    After O(n^3/(1 - lambda)^2) rounds its error is as small as that of the central method with n times the samples
    (arXiv:2412.13054, abstract), 1 - lambda the spectral gap of W.

    >>> from fednmap.regularizers import L1
    >>> NormED(L1(0.1), eta_a=0.05).traits.vectors
    1
    """

    phi: Regularizer
    eta_a: float = 0.1
    gamma: float = None  # type: ignore[assignment]  # given, or set below

    traits = DecentralizedTraits(
        vectors=1,
        prox="1",
        fixed_point=FixedPoint.EXACT,
        rate="f nonconvex: O(sqrt(s2/(nT))) after O(n^3/(1-lambda)^2) rounds",
        directed=False,
        changing=False,
        positive=True,
        normal_map=True,
    )

    class State(NamedTuple):
        z: Tensor
        s: Tensor

    class Message(NamedTuple):
        z: Tensor

    class Kept(NamedTuple):
        s: Tensor

    def init(self, start: Tensor) -> State:
        return self.State(start, start)

    def message(self, state: State, g: Oracle) -> tuple[Message, Kept]:
        z, x = state.z, self.model(state.z)
        s = z - self.eta_a * (g(x, 0) + (z - x) / self.gamma)
        return self.Message(z + s - state.s), self.Kept(s)

    def update(self, kept: Kept, mixed: Message) -> State:
        return self.State(mixed.z, kept.s)
