"""PG-EXTRA: proximal gradient steps whose disagreement is summed up and taken back.

Shi, Ling, Wu and Yin, A Proximal Gradient Algorithm for Decentralized Composite Optimization, IEEE Transactions on
Signal Processing, 2015.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fednmap.core import FixedPoint, Oracle, Regularizer
from fednmap.decentralized.contract import DecentralizedAlgorithm, DecentralizedTraits


@dataclass(frozen=True)
class PGExtra(DecentralizedAlgorithm):
    """PG-EXTRA solves min f(x) + phi(x) on a graph, with one vector per link.

    Its Algorithm 1, with (I + W)/2 as the second mixing matrix, v_k for x^{k+1/2} and a prime for the round before::

        v_i = sum_j W_ij x_j + v_i' - (x_i' + sum_j W_ij x_j')/2 - eta_a (g_i(x_i) - g_i(x_i'))
        x_i = prox_{eta_a phi}(v_i)

    which is, with u_i the sum of (sum_j W_ij x_j - x_i)/2 over the rounds before::

        v_i = sum_j W_ij x_j + u_i - eta_a g_i(x_i)

    At rest all x_i are the same and the u_i, whose mean is 0, make up for what sets the g_i apart: x is the optimum of
    f + phi. Proved for convex f_i and phi, exact gradients, and a symmetric W that stays, with eigenvalues above -1 and
    eta_a < (1 + lambda_min(W)) / L. Where W changes the fixed point is the same, and whether it is reached depends on
    the graph (docs/decentralized.md).

    >>> from fednmap.regularizers import L1
    >>> PGExtra(L1(0.1), eta_a=0.05).traits.vectors
    1
    """

    phi: Regularizer
    eta_a: float = 0.1

    traits = DecentralizedTraits(
        vectors=1,
        prox="1",
        fixed_point=FixedPoint.EXACT,
        rate="f, phi convex, s2 = 0: O(1/T)",
        directed=False,
        changing=False,
    )

    class State(NamedTuple):
        x: Tensor
        u: Tensor

    class Message(NamedTuple):
        x: Tensor

    class Kept(NamedTuple):
        x: Tensor
        u: Tensor
        step: Tensor

    def init(self, start: Tensor) -> State:
        return self.State(start, torch.zeros_like(start))

    def message(self, state: State, g: Oracle) -> tuple[Message, Kept]:
        return self.Message(state.x), self.Kept(state.x, state.u, self.eta_a * g(state.x, 0))

    def update(self, kept: Kept, mixed: Message) -> State:
        v = mixed.x + kept.u - kept.step
        return self.State(self.phi.prox(v, self.eta_a), kept.u + (mixed.x - kept.x) / 2)
