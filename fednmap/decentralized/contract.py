"""What a method without a server is: what a node keeps, what it sends to its neighbours, what it makes of theirs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fednmap.algorithms.hyperparameters import prox_step, weakly_convex
from fednmap.core import FixedPoint, Oracle, Regularizer, State
from fednmap.regularizers.parameters import positive, regularizer


@dataclass(frozen=True)
class DecentralizedTraits:
    """What a method needs of its graph and what it promises."""

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
    """A method of nodes on a graph: frozen hyper-parameters and pure functions of what one node holds.

    A round of node i, with W doubly stochastic and W_ij > 0 only for its neighbours j and itself::

        m_i, kept_i = message(state_i, g_i)           its gradient, and what it sends
        state_i = update(kept_i, sum_j W_ij m_j)      its new state from the mix of messages

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
        """Return the node's new state from what it kept and the mixed messages, sum_j W_ij m_j, its own among them."""

    def iterate(self, state: State) -> Tensor:
        """Return z_i or x_i, the first field of the state: what is averaged over the nodes when the run is measured."""
        first: Tensor = state[0]
        return first

    def model(self, iterate: Tensor) -> Tensor:
        """Return x from an iterate, of a node or of their mean."""
        gamma = self.prox_parameter
        return iterate if gamma is None else self.phi.prox(iterate, gamma)
