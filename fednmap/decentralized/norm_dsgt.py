"""norM-DSGT: gradient tracking of the normal map.

Kun Huang, Shi Pu and Angelia Nedic, Distributed Normal Map-based Stochastic Proximal Gradient Methods over Networks,
2024, arXiv:2412.13054.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fednmap.core import FixedPoint, Oracle, Regularizer
from fednmap.decentralized.contract import DecentralizedAlgorithm, DecentralizedTraits


@dataclass(frozen=True)
class NormDSGT(DecentralizedAlgorithm):
    """norM-DSGT solves min f(x) + phi(x) on a graph: every node follows the network's mean normal map.

    With G_i = g_i(x_i) + (z_i - x_i)/gamma, x_i = prox_{gamma phi}(z_i), a round is::

        y_i = sum_j W_ij y_j + G_i - G_i of the round before        its mean over the nodes is that of the G_i
        z_i = sum_j W_ij (z_j - eta_a y_j)

    beginning with y_i = G_i. Two vectors travel along a link. At rest all y_i are 0 and all z_i the same, with
    grad f(x) + (z - x)/gamma = 0: x is a stationary point of f + phi, however different the f_i. For phi = 0 this is
    distributed stochastic gradient tracking (DSGT). W need not be symmetric, and may change from round to round.

    gamma: prox parameter, gamma * rho < 1. Default: 4 eta_a, at most 0.5 / rho.

    After O(max(n^3/(1 - lambda)^2, n/(1 - lambda)^4)) rounds its error is as small as that of the central method with
    n times the samples (arXiv:2412.13054, abstract), 1 - lambda the spectral gap of W.

    >>> from fednmap.regularizers import L1
    >>> NormDSGT(L1(0.1), eta_a=0.05).gamma
    0.2
    """

    phi: Regularizer
    eta_a: float = 0.1
    gamma: float = None  # type: ignore[assignment]  # given, or set below

    traits = DecentralizedTraits(
        vectors=2,
        prox="1",
        fixed_point=FixedPoint.EXACT,
        rate="f nonconvex: O(sqrt(s2/(nT))) after O(max(n^3/(1-lambda)^2, n/(1-lambda)^4)) rounds",
        directed=True,
        changing=True,
        normal_map=True,
    )

    class State(NamedTuple):
        z: Tensor
        y: Tensor
        """sum_j W_ij y_j"""
        G: Tensor

    class Message(NamedTuple):
        z: Tensor
        y: Tensor

    class Kept(NamedTuple):
        G: Tensor

    def init(self, start: Tensor) -> State:
        zero = torch.zeros_like(start)
        return self.State(start, zero, zero)

    def message(self, state: State, g: Oracle) -> tuple[Message, Kept]:
        x = self.model(state.z)
        G = g(x, 0) + (state.z - x) / self.gamma
        y = state.y + G - state.G
        return self.Message(state.z - self.eta_a * y, y), self.Kept(G)

    def update(self, kept: Kept, mixed: Message) -> State:
        return self.State(mixed.z, mixed.y, kept.G)
