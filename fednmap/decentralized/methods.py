"""What a method without a server is, and those that there are: norM-DSGT, norM-ED, PG-EXTRA and prox-DSGD.

Kun Huang, Shi Pu and Angelia Nedic, Distributed Normal Map-based Stochastic Proximal Gradient Methods over Networks,
2024, arXiv:2412.13054. Shi, Ling, Wu and Yin, A Proximal Gradient Algorithm for Decentralized Composite Optimization,
IEEE Transactions on Signal Processing, 2015. Zeng and Yin, On Nonconvex Decentralized Gradient Descent, 2018
(Prox-DGD); Chen and Sayed, Diffusion Adaptation Strategies for Distributed Optimization, 2012 (adapt, then combine).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fednmap.algorithms.hyperparameters import prox_step, weakly_convex
from fednmap.core import FixedPoint, Oracle, Regularizer, State
from fednmap.regularizers.parameters import positive, regularizer


@dataclass(frozen=True)
class DecentralizedTraits:
    """What a method needs of its graph and what it promises.

    >>> from fednmap.decentralized import NormED
    >>> NormED.traits.vectors, NormED.traits.directed
    (1, False)
    """

    vectors: int
    """Vectors that travel along a link, in each direction, in a round."""
    prox: str
    """Prox evaluations of a node in a round."""
    fixed_point: FixedPoint
    """Where it ends with exact gradients on heterogeneous nodes."""
    rate: str
    """Convergence as published; '-' where none is established for f + phi."""
    directed: bool
    """Ends there also where W is doubly stochastic but not symmetric; else such a W is refused."""
    changing: bool
    """Ends there also where W is another one in every round, or links fail; else it is warned that it may diverge."""
    positive: bool = False
    """W must have no eigenvalue below 0: where the graph's has, or changes, (I + W)/2 takes its place."""
    normal_map: bool = False
    """Keeps z_i, with prox_{gamma phi}(z_i) its model and `gamma` its field: it starts at a z, not at an x."""
    composite: bool = True
    """Handles a nonsmooth phi; otherwise phi must be Zero()."""


class DecentralizedAlgorithm(ABC):
    r"""A method of nodes on a graph: frozen hyper-parameters and pure functions of what one node holds.

    A round of node i, with W doubly stochastic and positive only for its neighbours and itself:

    $$
    & m_i, \text{kept}_i = \text{message}(\text{state}_i, g_i) \\
    & \text{state}_i = \text{update}(\text{kept}_i, \textstyle\sum_j W_{ij} m_j)
    $$

    A subclass declares NamedTuples of tensors for its state, its message and what it keeps meanwhile. Both functions
    are written for one node; given stacked states (k, p) the same lines run k nodes. All nodes begin alike.
    """

    traits: ClassVar[DecentralizedTraits]
    phi: Regularizer
    """The regularizer that the method minimises with f."""
    eta_a: float
    """Its step size, alpha in the papers on networks; it may follow a schedule."""

    def __post_init__(self) -> None:
        """Check phi and the step sizes; gamma is what was given, else 4 eta_a, and suits phi."""
        regularizer(self, "phi", "L1(0.1), as the first argument")
        positive(self, "eta_a")
        if self.traits.normal_map:
            prox_step(self, "gamma", 4 * self.eta_a)
        else:
            weakly_convex(self, "eta_a", self.eta_a)

    @property
    def prox_parameter(self) -> float | None:
        """gamma where the model is prox_{gamma phi}(z_i), else None."""
        return float(self.gamma) if self.traits.normal_map else None  # type: ignore[attr-defined]

    @abstractmethod
    def init(self, start: Tensor) -> State:
        """Return a node's state before the first round."""

    @abstractmethod
    def message(self, state: State, g: Oracle) -> tuple[State, State]:
        """Return what the node sends to its neighbours, and what it keeps until their messages arrive."""

    @abstractmethod
    def update(self, kept: State, mixed: State) -> State:
        r"""Return the node's new state from what it kept and the mixed messages $\sum_j W_{ij} m_j$, its own too."""

    def iterate(self, state: State) -> Tensor:
        """Return z_i or x_i, the first field of the state: what is averaged over the nodes when the run is measured."""
        first: Tensor = state[0]
        return first

    def model(self, iterate: Tensor) -> Tensor:
        """Return x from an iterate, of a node or of their mean."""
        gamma = self.prox_parameter
        return iterate if gamma is None else self.phi.prox(iterate, gamma)


@dataclass(frozen=True)
class NormDSGT(DecentralizedAlgorithm):
    r"""norM-DSGT solves $\min f(x) + \phi(x)$ on a graph: every node tracks the network's mean normal map.

    With $G_i = g_i(x_i) + (z_i - x_i)/\gamma$, $x_i = \prox_{\gamma \phi}(z_i)$, and a prime for the round before:

    $$
    y_i &= \textstyle\sum_j W_{ij} y_j' + G_i - G_i', \quad \text{whose mean over the nodes is that of the } G_i \\
    z_i &= \textstyle\sum_j W_{ij} (z_j - \eta_a y_j)
    $$

    beginning with $y_i = G_i$. Two vectors travel along a link. At rest all $y_i$ are 0 and all $z_i$ the same, with
    $\nabla f(x) + (z - x)/\gamma = 0$: x is a stationary point of $f + \phi$, however different the $f_i$. For
    $\phi = 0$ this is distributed stochastic gradient tracking (DSGT). W need not be symmetric, and may change from
    round to round.

    gamma: prox parameter, $\gamma \rho < 1$. Default: 4 eta_a, at most 0.5 / rho.

    After $O(\max(n^3/(1 - \lambda)^2, n/(1 - \lambda)^4))$ rounds its error is as small as that of the central method
    with n times the samples (arXiv:2412.13054, abstract), $1 - \lambda$ the spectral gap of W.

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


@dataclass(frozen=True)
class NormED(DecentralizedAlgorithm):
    r"""norM-ED solves $\min f(x) + \phi(x)$ on a graph, with one vector per link.

    With $G_i = g_i(x_i) + (z_i - x_i)/\gamma$, $x_i = \prox_{\gamma \phi}(z_i)$, a round is a step, its correction, and
    a mix; a prime is for the round before:

    $$s_i = z_i - \eta_a G_i, \qquad z_i = \textstyle\sum_j W_{ij} (z_j + s_j - s_j')$$

    beginning with the correction at 0. The mean over the nodes takes the step $z - \eta_a \mean G_i$ whatever W is, and
    at rest all $z_i$ are the same: x is a stationary point of $f + \phi$, however different the $f_i$. For $\phi = 0$
    this is exact diffusion (ED, also D2).

    W must be symmetric and without eigenvalues below 0: where the graph's W has some, or changes from round to round,
    the nodes use (I + W)/2. Proved for a W that stays; where it changes the fixed point is the same, and whether it is
    reached depends on the graph (docs/decentralized.md).

    gamma: prox parameter, $\gamma \rho < 1$. Default: 4 eta_a, at most 0.5 / rho.

    After $O(n^3/(1 - \lambda)^2)$ rounds its error is as small as that of the central method with n times the samples
    (arXiv:2412.13054, abstract), $1 - \lambda$ the spectral gap of W.

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


@dataclass(frozen=True)
class PGExtra(DecentralizedAlgorithm):
    r"""PG-EXTRA solves $\min f(x) + \phi(x)$ on a graph, with one vector per link.

    With $u_i$ the sum of $(\sum_j W_{ij} x_j - x_i)/2$ over the rounds before:

    $$x_i = \prox_{\eta_a \phi}(\textstyle\sum_j W_{ij} x_j + u_i - \eta_a g_i(x_i))$$

    This is its Algorithm 1 with (I + W)/2 as the second mixing matrix. At rest all $x_i$ are the same and the $u_i$,
    whose mean is 0, make up for what sets the $g_i$ apart: x is the optimum of $f + \phi$. Proved for convex $f_i$ and
    $\phi$, exact gradients, and a symmetric W that stays, with eigenvalues above -1 and
    $\eta_a < (1 + \lambda_{\min}(W)) / L$. Where W changes the fixed point is the same, and whether it is reached
    depends on the graph (docs/decentralized.md).

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


@dataclass(frozen=True)
class ProxDSGD(DecentralizedAlgorithm):
    r"""prox-DSGD takes proximal gradient steps of what the neighbours agree on; it ends near the optimum of $f + \phi$.

    $$x_i = \prox_{\eta_a \phi}(\textstyle\sum_j W_{ij} (x_j - \eta_a g_j(x_j)))$$

    Each node's own gradient pulls it away from the others for ever: where the $f_i$ differ the nodes do not agree, and
    their mean is off by $O(\eta_a)$. One vector per link, any doubly stochastic W. On the complete graph it is
    Prox-SGD; in the terms of the literature it is decentralised proximal SGD, adapt-then-combine.

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
