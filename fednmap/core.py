r"""The interfaces: Regularizer, Algorithm, Problem, Oracle.

All of them are about one problem: minimise $\psi(x) = f(x) + \phi(x)$ over $x \in R^p$, where f is the mean of n
clients' smooth losses $f_i$ and $\phi$ is a regularizer whose prox is cheap.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor

from fednmap.names import InputError, renamed

Oracle = Callable[[Tensor, int], Tensor]
"""g(x, q): the gradient at x on the minibatch of local step q. The next step may overwrite x.

An `AccumulatingOracle` saves a local step the memory traffic of its gradient."""


@runtime_checkable
class AccumulatingOracle(Protocol):
    """An oracle that can also add its gradient to a vector in place, without writing it to memory first."""

    stack: tuple[int, ...]
    """(k,) if its gradients are those of k clients, (k, p); () for one client."""

    def __call__(self, x: Tensor, q: int) -> Tensor: ...

    def add(self, z: Tensor, x: Tensor, q: int, scale: float) -> None:
        """Add scale g(x, q) to z in place. z has the gradient's shape, and may be x itself."""
        ...


@dataclass(frozen=True)
class SecondOrder:
    """An oracle with Hessians: g(x, q) as any other, and g.hessian(x), the clients' Hessians at x.

    Methods whose traits ask for `hessians` receive it. x is (k, p) or one common point (p,), the result (k, p, p), for
    one client (p, p).

    >>> g = SecondOrder(lambda x, q: 2 * x, lambda x: 2 * torch.eye(2))
    >>> g(torch.ones(2), 0)
    tensor([2., 2.])
    """

    gradient: Oracle
    hessian: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, q: int) -> Tensor:
        return self.gradient(x, q)


State = Any
"""A NamedTuple of tensors, declared by the algorithm that uses it."""


class NoState(NamedTuple):
    """The state of a client that keeps nothing."""


def extended(below: Any, more: tuple[str, ...]) -> Any:
    """Return the type of a state with further fields; its `below` is the type without them.

    >>> extended(NoState, ("job",))(torch.tensor(1))
    NoState(job=tensor(1))
    """
    return _extended(below, more)


@cache
def _extended(below: Any, more: tuple[str, ...]) -> Any:
    state = cast(Any, namedtuple)(below.__name__, (*below._fields, *more))
    state.below = below
    # pickle finds classes by name, and this one has none
    state.__reduce__ = lambda self: (_extended_state, (below, more, *self))
    return state


def _extended_state(below: Any, more: tuple[str, ...], *values: Tensor) -> State:
    return extended(below, more)(*values)


A = TypeVar("A")


class Regularizer(ABC):
    r"""A regularizer $\phi$: its value and its prox.

    Both act on the last axis; leading axes are a batch of clients. `rho` is the weak convexity of $\phi$, 0 for convex
    $\phi$: $\phi(x) + \frac{\rho}{2} |x|^2$ is convex, and the prox is unique while step times rho is below 1.
    """

    rho: float = 0.0

    @abstractmethod
    def value(self, x: Tensor) -> Tensor:
        r"""Return $\phi(x)$, a real number or +inf."""

    @abstractmethod
    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        r"""Return $\arg\min_y \phi(y) + |y - v|^2 / (2 s)$, s = `step`. At step 0: v or its projection."""

    def check_step(self, step: float | Tensor) -> float:
        """Return `step` as a float; raise InputError where the prox is not unique, except for infinite `rho`."""
        step = float(step)
        if not 0.0 <= step < float("inf"):
            raise InputError(f"the prox step is {step:g}; it must be finite and at least 0")
        if 1.0 <= step * self.rho < float("inf"):
            raise InputError(
                f"{type(self).__name__} is weakly convex with rho = {self.rho:g}: its prox needs step * rho < 1, "
                f"given step = {step:g} (step * rho = {step * self.rho:g}); use a step below {1 / self.rho:g}"
            )
        return step


class FixedPoint(Enum):
    """Where a method ends with exact gradients on heterogeneous clients; `check_algorithm` tests EXACT."""

    EXACT = "exact"
    EXACT_IN_THE_LIMIT = "exact as t grows"
    BIASED = "biased, O(eta_a)"
    OF_F_PLUS_2_PHI = "biased, tends to the optimum of f + 2 phi"
    NONE = "none: its model is altered afterwards"


@dataclass(frozen=True)
class Traits:
    """What a method needs and what it promises.

    composite: Handles a nonsmooth phi; otherwise phi must be Zero().
    up: Vectors a client sends in a round.
    down: Vectors a client receives in a round.
    prox: Prox evaluations of a round: on each client + on the server.
    fixed_point: Where it ends with exact gradients on heterogeneous clients.
    rate: Convergence as published; '-' where none is established for f + phi.
    full_participation: Every client must reply in every round.
    broadcast_follows: The broadcast is the server's state, which follows from the one before and the mean uplink: a
        client that was counted in a round needs only that mean; see `next_broadcast`.
    control_variate: The field of the server's and of the client's state that is h and h_i: h is the mean of all
        h_i.
    normal_map: Keeps z, and its model is prox_{gamma phi}(z) with its field `gamma`: it starts at a z, not at an x.
    server_variable: The field of the server's state that may take another step than the method's own, as a server
        optimiser does; None where the step is part of a prox, or the clients rely on it.
    central: Runs where all data is in one place, as one client.
    steps_may_change: eta_a may be another one in every round; else it only sets gamma, before the first round.
    hessians: Symmetric matrices that a client sends too, p (p + 1) / 2 numbers each; the oracle is then a
        `SecondOrder`, and gradients must be exact.

    >>> from fednmap.algorithms import FedAvg
    >>> FedAvg.traits.up, FedAvg.traits.composite
    (1, False)
    """

    composite: bool
    up: int
    down: int
    prox: str
    fixed_point: FixedPoint
    rate: str
    full_participation: bool = False
    broadcast_follows: bool = False
    control_variate: str | None = None
    normal_map: bool = False
    server_variable: str | None = None
    central: bool = False
    steps_may_change: bool = True
    hessians: int = 0


class Algorithm(ABC):
    """A federated method: frozen hyper-parameters and pure functions, a client half and a server half.

    A subclass declares NamedTuples: `Server` and `Client` are the states, `Up` and `Down` the messages. `Client` may be
    left out if clients have no state, `Down` if they receive the server's state. `local` is written for one client;
    given stacked client states (k, p) the same lines run k clients.
    """

    traits: ClassVar[Traits]
    phi: Regularizer
    """The regularizer that the method minimises with f; Zero() for smooth methods."""
    Client: ClassVar[type[Any]] = NoState  # where a method does not declare its own

    def __repr__(self) -> str:
        """Return the class with its arguments; keyword-only options that have their default are left out."""
        if not is_dataclass(self):  # a method of the user's own
            return object.__repr__(self)
        shown = [f for f in fields(cast(Any, self)) if not f.kw_only or getattr(self, f.name) != f.default]
        return f"{type(self).__qualname__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"

    @property
    def name(self) -> str:
        """The name of the method in messages and run folders."""
        return type(self).__name__

    @property
    def prox_parameter(self) -> float | None:
        r"""$\gamma$ where the model is $\prox_{\gamma \phi}(z)$, else None."""
        return float(self.gamma) if self.traits.normal_map else None  # type: ignore[attr-defined]

    @abstractmethod
    def init(self, start: Tensor) -> tuple[State, State]:
        """Return the server's state and one client's state before the first round."""

    def broadcast(self, server: State) -> State:
        """Return the message to every participating client, by default the server's state."""
        return server

    @abstractmethod
    def local(self, down: State, client: State, g: Oracle) -> tuple[State, State]:
        """Run the local steps of one client, or of a stack of clients; return the uplink and the new client state."""

    def state_after_sending(self, down: State, client: State, up: State, sent: State) -> State:
        """Return the client's new state if `sent`, and not the `up` that `local` returned, was summed.

        Clipping and rounding change an uplink after `local`. The method stays exact if its client state is computed
        from the vector that was sent; if that is `up` it is the state that `local` returned. A method with client state
        that does not override this function raises InputError when its uplink is changed.
        """
        if not client:
            return client
        raise InputError(
            f"{type(self).__name__} has no state_after_sending, which clipped or rounded uplinks need; write it, or "
            "use FedNMap, Zhang, FedCanon, SCAFFOLD or a method without client state, such as FedAvg"
        )

    @abstractmethod
    def aggregate(self, server: State, up: State, share: float) -> State:
        """Return the new server state from the MEAN of the uplinks received and the share of clients that sent them."""

    def model(self, server: State) -> Tensor:
        """Return the model x_t: by default the first field of the server's state, or its prox with a normal map."""
        first: Tensor = server[0]
        gamma = self.prox_parameter
        return first if gamma is None else self.phi.prox(first, gamma)

    def known_gradient(self, before: State, after: State) -> tuple[Tensor, Tensor] | None:
        r"""Return $(x, \nabla f(x))$ if the round from `before` to `after` reveals it to the server, else None.

        Called only for rounds in which every client was counted, with exact gradients. Tolerances can then be checked
        without another pass over the data.
        """
        return None

    def extra_metrics(self, server: State) -> dict[str, float]:
        """Return numbers of the server's state that go into every record of a run."""
        return {}

    def compression(self) -> Compressor | None:
        """Return how the one vector of the uplink is encoded; None where it travels as it is."""
        return None


class OwnRounds(Algorithm):
    """A method that runs its rounds itself; its server state is what is measured."""

    @abstractmethod
    def simulate(self, problem: Problem, rounds: int, start: Tensor, **options: Any) -> Iterator[Any]:
        """Yield the rounds, as `fednmap.simulate` does; options are those of `simulate`."""

    def local(self, down: State, client: State, g: Oracle) -> tuple[State, State]:
        raise InputError(f"{self.name} runs its rounds itself; use fednmap.simulate or fednmap.run")

    def aggregate(self, server: State, up: State, share: float) -> State:
        raise InputError(f"{self.name} runs its rounds itself; use fednmap.simulate or fednmap.run")


class Serverless(OwnRounds):
    """A method without a server; options of its `simulate`: drop, seed, eta_a, chunk, threads, after."""


class Compressor(Protocol):
    """Encodes a vector as a NamedTuple of smaller tensors, and decodes it to the same bits."""

    def pack(self, v: Tensor) -> Any: ...

    def unpack(self, packed: Any) -> Tensor: ...


def pack(algorithm: Algorithm, up: State) -> State:
    """Return the uplink as it is sent: encoded by the method's compressor, if it has one.

    >>> from fednmap.algorithms import FedAvg
    >>> pack(FedAvg(), FedAvg.Up(torch.ones(2)))
    Up(change=tensor([1., 1.]))
    """
    compressor = algorithm.compression()
    return up if compressor is None else compressor.pack(*up)


def unpack(algorithm: Algorithm, packed: State, like: State) -> State:
    """Return the uplink that `pack` was given; `like` is an uplink of the method.

    >>> from fednmap.algorithms import FedAvg
    >>> up = FedAvg.Up(torch.ones(2))
    >>> unpack(FedAvg(), pack(FedAvg(), up), like=up)
    Up(change=tensor([1., 1.]))
    """
    compressor = algorithm.compression()
    return packed if compressor is None else type(like)(compressor.unpack(packed))


def next_broadcast(algorithm: Algorithm, down: State, up: State, share: float) -> State:
    """Return the next broadcast to the bit, from the last one and the mean uplink, if it follows (see `Traits`).

    >>> from fednmap.algorithms import FedAvg
    >>> algorithm = FedAvg()
    >>> server, _ = algorithm.init(torch.zeros(2))
    >>> next_broadcast(algorithm, server, algorithm.Up(torch.ones(2)), share=1.0)
    Server(x=tensor([1., 1.]))
    """
    return algorithm.aggregate(down, up, share)


def with_fields(algorithm: A, **values: Any) -> A:
    """Return the method with these fields replaced, as far as it has them; a wrapper passes on the rest.

    >>> from fednmap.algorithms import FedAvg
    >>> with_fields(FedAvg(Q=2), Q=5, gamma=1.0).Q
    5
    """
    if not is_dataclass(algorithm):
        return algorithm
    named = {f.name: getattr(algorithm, f.name) for f in fields(algorithm) if f.init}
    changed: dict[str, Any] = {name: value for name, value in values.items() if name in named}
    others = {name: value for name, value in values.items() if name not in named}
    for name, value in named.items() if others else ():
        if isinstance(value, Algorithm) and (inner := with_fields(value, **others)) is not value:
            changed[name] = inner
    return replace(algorithm, **changed) if changed else algorithm  # type: ignore[type-var]


@runtime_checkable
class Problem(Protocol):
    """n clients, each a gradient oracle on one flat vector of length dim.

    A method `info` may return more, as a `ProblemInfo`, which also gives the defaults. Of a problem without it only
    the attributes `start` and `weights` are read, if it has them.
    """

    @property
    def n(self) -> int: ...

    @property
    def dim(self) -> int: ...

    def oracle(self, clients: Tensor, t: int) -> Oracle:
        """Return the gradients of round t for `clients`, a LongTensor (k,): x is (k, p), or one common point (p,)
        for all k; the result is (k, p). For one client (0-d `clients`) it maps (p,) to (p,)."""
        ...

    def loss(self, x: Tensor) -> Tensor:
        """Return f(x) on all data."""
        ...

    def gradient(self, x: Tensor) -> Tensor:
        """Return the exact gradient of f."""
        ...


@dataclass(frozen=True, kw_only=True)
class Computation:
    """How a problem is best computed; None for what it does not say. A part of `ProblemInfo`.

    >>> from fednmap.problems import LeastSquares
    >>> info_of(LeastSquares([(torch.eye(2), torch.ones(2))])).concurrent
    True
    """

    chunk: int | None = None
    """Clients that are best computed in one call. Default: as many as fit into the cache."""
    part: Callable[[int, int], Problem] | None = None
    """part(k, of): the terms of f that fall to process k of several; they sum to f. Default: every process has all."""
    pieces: int | None = None
    """Into how many such parts the sums over all data are cut, for threads and processes. Default: one part for each
    process; their number then shows in the last bits of what is measured."""
    concurrent: bool | None = None
    """Whether oracles of different clients, and parts, may be called by several threads. Default: no."""
    exact: Callable[[], Problem] | None = None
    """The same problem with exact client gradients. Default: the gradients are taken as they are."""
    exact_gradients: bool | None = None
    """Whether the clients' gradients are exact already. Default: they may be noisy."""
    steps_per_round: int | None = None
    """The local steps of a round for which its minibatches are cut into epochs. Default: any number."""
    value_and_gradient: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    """f and its gradient at x in one pass over the data. Default: `loss`, then `gradient`."""
    subsample: Callable[[], Problem] | None = None
    """A problem with about the same f and fewer data, for estimates. Default: all data is used."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What a problem is made of. A part of `ProblemInfo`.

    >>> from fednmap.problems import LeastSquares
    >>> len(info_of(LeastSquares([(torch.eye(2), torch.ones(2))])).digest())
    64
    """

    digest: Callable[[], str] | None = None
    """A digest of the data. Default: that of all that the problem holds."""
    made_of: Callable[[], Mapping[str, Any]] | None = None
    """What else decides f and the clients' gradients, by name: the minibatches' size and seed, the loss, ..."""
    module: Callable[[Tensor], torch.nn.Module] | None = None
    """The torch module that a model x stands for. Default: none."""


@dataclass(frozen=True, kw_only=True)
class Curvature:
    """What a problem knows about its second derivatives. A part of `ProblemInfo`.

    >>> from fednmap.problems import LeastSquares
    >>> info_of(LeastSquares([(torch.eye(2), torch.ones(2))])).smoothness()
    0.5
    """

    smoothness: Callable[[], float] | None = None
    """L of f: its gradient changes by at most L times the distance; if there is no such L, that at the start.
    Default: estimated from gradients."""
    hessian: Callable[[Tensor], Tensor] | None = None
    """The Hessian of f at x, (p, p)."""
    hessians: Callable[[Tensor], Callable[[Tensor], Tensor]] | None = None
    """hessians(clients)(x): the Hessians of these clients' f_i at x, as in `SecondOrder`."""


@dataclass(frozen=True, kw_only=True)
class ProblemInfo(Computation, Identity, Curvature):
    """What a problem says beyond the protocol, as the result of its method `info`.

    Its fields are in three groups: how it is computed, what identifies it, its curvature.

    >>> class Mine:
    ...     n, dim, start = 2, 3, torch.zeros(3)
    ...
    ...     def info(self):
    ...         return ProblemInfo(start=self.start, concurrent=True)
    """

    start: Tensor | None = None
    """The first model; decides dtype and device. Default: zeros."""
    weights: Tensor | None = None
    """n numbers, at least 0, brought to the sum 1. Default: clients weigh equally."""


def info_of(problem: Problem) -> ProblemInfo:
    """Return the `info` of a problem; of one without it only `start` and `weights`. Wrong ones raise InputError.

    >>> from fednmap.problems import LeastSquares
    >>> info_of(LeastSquares([(torch.eye(2), torch.ones(2))])).exact_gradients
    True
    """
    info = getattr(problem, "info", None)
    if info is None:
        found = ProblemInfo(start=getattr(problem, "start", None), weights=getattr(problem, "weights", None))
    else:
        found = info() if callable(info) else info
        if not isinstance(found, ProblemInfo):
            raise InputError(
                f"expected {type(problem).__name__}.info() to return a ProblemInfo, got {type(found).__name__}; "
                "return fednmap.core.ProblemInfo(...), or give the attribute another name"
            )
    return found if found.weights is None else replace(found, weights=_weights(problem, found.weights))


def _weights(problem: Problem, given: Any) -> Tensor:
    """In float64, summing to 1; those that do so already, to 1e-6, stay as they are to the bit."""
    w = torch.as_tensor(given, dtype=torch.float64, device="cpu")
    total = float(w.sum())
    if w.shape != (problem.n,) or not 0 < total < torch.inf or not bool((w >= 0).all()):
        raise InputError(
            f"expected {problem.n} finite weights of {type(problem).__name__}, at least 0 and not all 0, got shape "
            f"{tuple(w.shape)} and sum {total:g}"
        )
    return w if abs(total - 1) <= 1e-6 else w / total


def oracle_of(algorithm: Algorithm, problem: Problem, clients: Tensor, t: int) -> Oracle:
    """Return the oracle of `clients` in round t, with Hessians if the method needs them; raise InputError without.

    >>> from fednmap.algorithms import FedAvg
    >>> from fednmap.problems import LeastSquares
    >>> g = oracle_of(FedAvg(), LeastSquares([(torch.eye(2), torch.ones(2))]), torch.tensor(0), t=0)
    >>> g(torch.zeros(2), 0)
    tensor([-0.5000, -0.5000])
    """
    g = problem.oracle(clients, t)
    if not algorithm.traits.hessians:
        return g
    about, name = info_of(problem), type(algorithm).__name__
    if about.hessians is None:
        what = type(problem).__name__
        raise InputError(f"{name} needs the clients' Hessians, and {what} has none; use a linear model, or FedNMap")
    if about.exact_gradients is False:
        raise InputError(f"{name} needs exact gradients, and these are of minibatches; use batch_size = 0 (None)")
    return SecondOrder(g, about.hessians(clients))


def nbytes(message: State) -> int:
    """Return the bytes of a message's tensors; 0-d tensors are counters and do not count.

    >>> nbytes((torch.zeros(3), torch.tensor(1)))
    12
    """
    return sum(v.numel() * v.element_size() for v in message if isinstance(v, torch.Tensor) and v.ndim > 0)


__getattr__ = renamed(__name__, {"Adding": "AccumulatingOracle", "declared": "info_of"})
