"""A method on a graph as everything that runs and measures methods knows it: its rounds, and the nodes' messages."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fednmap.core import Oracle, Problem, Regularizer, Serverless, State, Traits, info_of, nbytes
from fednmap.decentralized.methods import DecentralizedAlgorithm
from fednmap.decentralized.topologies import Lossy, Topology, check_sums, connected
from fednmap.names import InputError
from fednmap.simulation import distributed, schedules
from fednmap.simulation.loop import Diverged, Round, check_after, clients_per_group, whole_epochs
from fednmap.simulation.schedules import Schedule
from fednmap.simulation.states import Clients
from fednmap.simulation.threads import ThreadPool, one_thread

SPARSE = 0.1  # share of the entries below which a matrix is kept as its nonzeros
ROUNDING = 1e-12  # an eigenvalue so little below 0 is 0
FEW = 128  # nodes for which it is not worth it


class Mean(NamedTuple):
    """What is known of the network as a whole, for measuring: no node ever learns it."""

    iterate: Tensor
    """The mean of the nodes' z_i or x_i."""
    consensus: Tensor
    """The mean over the nodes of |x_i - x|^2."""


@dataclass(frozen=True)
class Decentralized(Serverless):
    """A method without a server on a topology: `fednmap.simulate` and `fednmap.run` take it like any other.

    The clients of the problem are the nodes of the graph; each begins at `start`. Every node takes part in every round;
    `drop` is the probability that a link fails in a round, both ways. What is measured is one model x for all: of
    methods that keep z_i the prox of their mean, of others the mean of the x_i; with it `consensus`, the mean over
    the nodes of |x_i - x|^2.

    eta_a: the method's own step, unless another one is given.

    >>> import fednmap
    >>> from fednmap.decentralized import NormED, Ring
    >>> from fednmap.regularizers import L1
    >>> from fednmap.testing import heterogeneous
    >>> method = Decentralized(NormED(L1(0.2), eta_a=0.1, gamma=0.3), Ring(6))
    >>> result = fednmap.run(method, heterogeneous(), rounds=500)
    >>> result.final["stationarity"] < 1e-12, result.final["consensus"] < 1e-12
    (True, True)
    """

    method: DecentralizedAlgorithm
    topology: Topology
    eta_a: float = None  # type: ignore[assignment]  # given, or the method's
    phi: Regularizer = field(init=False, repr=False)

    def __post_init__(self) -> None:
        method, graph = self.method, self.topology
        for value, wanted in ((method, DecentralizedAlgorithm), (graph, Topology)):
            if not isinstance(value, wanted):
                got = getattr(value, "__name__", type(value).__name__)
                raise InputError(f"expected a method and a topology, NormED(L1(0.1)) and Ring(8) say, got {got}")
        name, where = type(method).__name__, type(graph).__name__
        if not (graph.symmetric or method.traits.directed):
            raise InputError(
                f"{name} needs a symmetric mixing matrix, and links of {where} lead one way; it would diverge: use "
                "NormDSGT, or links in both directions, such as exponential-undirected"
            )
        first = graph.weights(0)
        check_sums(first, where)
        if len(first) != graph.n:
            raise InputError(f"{where} says {graph.n} nodes and its mixing matrix has {len(first)}")
        if graph.static:
            connected(first, where)
        if self.eta_a is None:
            object.__setattr__(self, "eta_a", method.eta_a)
        elif self.eta_a != method.eta_a:
            object.__setattr__(self, "method", replace(method, eta_a=self.eta_a))  # type: ignore[type-var]
        names = ("composite", "prox", "fixed_point", "rate", "normal_map")
        said = {name: getattr(method.traits, name) for name in names}
        traits = Traits(up=method.traits.vectors, down=0, full_participation=True, **said)
        object.__setattr__(self, "gamma", method.prox_parameter)
        object.__setattr__(self, "phi", method.phi)
        object.__setattr__(self, "traits", traits)

    @property
    def name(self) -> str:
        return type(self.method).__name__

    def simulate(self, problem: Problem, rounds: int, start: Tensor, **options: Any) -> Iterator[Round]:
        """Yield rounds whose `clients` are the nodes' states and whose `server` is their `Mean`; see `rounds_of`."""
        return rounds_of(self, problem, rounds, start, **options)

    def init(self, start: Tensor) -> tuple[Mean, State]:
        return Mean(start, start.new_zeros(())), self.method.init(start)

    def model(self, server: Mean) -> Tensor:
        return self.method.model(server.iterate)

    def extra_metrics(self, server: Mean) -> dict[str, float]:
        return {"consensus": float(server.consensus)}


def rounds_of(
    algorithm: Decentralized,
    problem: Problem,
    rounds: int,
    start: Tensor,
    *,
    drop: float = 0.0,
    seed: int = 0,
    eta_a: float | Schedule | None = None,
    chunk: int | None = None,
    threads: int | None = None,
    after: Round | None = None,
) -> Iterator[Round]:
    """As `fednmap.simulate`, of a network: `Round.clients` are the nodes' states, `Round.server` their Mean.

    drop:  probability that a link fails in a round, both ways.
    seed:  decides which links fail.

    `bytes_up` counts what all nodes send along all links, also along those that fail; nothing comes down. In a process
    group of torch.distributed node i is in process i mod size, and processes exchange their nodes' messages by
    point-to-point sends; the mean that is measured is an all-reduce, which is not counted.
    """
    if algorithm.topology.n != problem.n:
        name = type(algorithm.topology).__name__
        raise InputError(
            f"{name} has {algorithm.topology.n} nodes and the problem {problem.n} clients; give it as many"
        )
    if not algorithm.method.traits.changing and (drop or not algorithm.topology.static):
        warnings.warn(
            f"{algorithm.name} is proved for a graph that stays; where links come and go it may diverge: use NormDSGT",
            UserWarning,
            stacklevel=4,
        )
    about = info_of(problem)
    whole_epochs(algorithm, about.steps_per_round, 1)
    server, initial = algorithm.init(start)
    mixing = Mixing(algorithm.topology, drop=drop, seed=seed, positive=algorithm.method.traits.positive)
    if after is not None:
        check_after(after, problem.n, server, initial, rounds)
    clients = Clients(problem.n, initial) if after is None else after.clients.thaw(initial, None, _mine)
    pool = ThreadPool(threads if start.device.type == "cpu" else 1, concurrent=bool(about.concurrent))
    everybody = torch.arange(problem.n, device="cpu")
    mine = everybody[_mine(everybody)]
    groups = mine.tensor_split(-(-len(mine) // (chunk or clients_per_group(problem, start)))) if len(mine) else ()
    scale = None if about.weights is None else (problem.n * about.weights).to(start)
    vectors = nbytes(algorithm.method.message(initial, lambda x, q: torch.zeros_like(x))[0])

    def step(method: DecentralizedAlgorithm, t: int) -> Mean:
        def send(ids: Tensor) -> tuple[State, State, State]:
            """The states before, the messages, and what is kept until the neighbours' messages arrive."""
            before = clients[ids]
            return before, *method.message(before, _weighted(problem.oracle(ids, t), scale, ids))

        with pool.map_in_order(send, groups) as results:
            sent = list(results)
        befores, messages, kept = zip(*sent, strict=True)
        mixed = mixing(t, _stacked(messages))
        rows = zip(*(v.split([len(ids) for ids in groups]) for v in mixed), strict=True)
        pieces = list(zip(kept, rows, strict=True))
        with pool.map_in_order(lambda piece: method.update(piece[0], type(mixed)(*piece[1])), pieces) as results:
            new = list(results)
        for ids, before, states in zip(groups, befores, new, strict=True):
            clients.replace(ids, before, states)
        with one_thread():
            return mean_of(method, _stacked(new), problem.n)

    def loop() -> Iterator[Round]:
        with pool:
            for t in range(0 if after is None else after.t + 1, rounds):
                whole = step(schedules.at(algorithm, eta_a, t).method, t)
                if not math.isfinite(float(whole.iterate.sum())):
                    raise Diverged(t)
                yield Round(t, whole, clients.snapshot(), everybody, everybody, mixing.links(t) * vectors, 0)

    return loop()


def _mine(nodes: Tensor) -> Tensor:
    """Which of these nodes are in this process, a bool for each."""
    return nodes % distributed.size() == distributed.rank()


def mean_of(method: DecentralizedAlgorithm, states: State, n: int) -> Mean:
    """Return the mean over all n nodes, of which these are the states in this process."""
    iterates = method.iterate(states)
    mean = distributed.all_sum([iterates.sum(0)])[0] / n
    apart = (method.model(iterates) - method.model(mean)).square().sum()
    return Mean(mean, distributed.all_sum([apart])[0] / n)


def _weighted(g: Oracle, scale: Tensor | None, ids: Tensor) -> Oracle:
    """f = sum_i w_i f_i is the plain mean of n w_i f_i, which is what mixing finds."""
    if scale is None:
        return g
    own = scale[ids.to(scale.device)][:, None]
    return lambda x, q: own * g(x, q)


def _stacked(parts: Sequence[State]) -> State:
    return type(parts[0])(*(torch.cat(fields) for fields in zip(*parts, strict=True)))


class Mixing:
    """The mixing matrix of each round, applied to stacked messages (k, p) of this process's nodes.

    positive: use (I + W)/2 where W has eigenvalues below 0, or changes from round to round.
    """

    def __init__(self, topology: Topology, *, drop: float = 0.0, seed: int = 0, positive: bool = False) -> None:
        self.sound, self.topology = topology, Lossy(topology, drop, seed) if drop != 0 else topology
        static = self.topology.static
        self.lazy = positive and not (static and float(torch.linalg.eigvalsh(topology.weights(0))[0]) >= -ROUNDING)
        self._used: Tensor | None = None
        self._links: int | None = None

    def weights(self, t: int) -> Tensor:
        """W of round t, as it is used."""
        W = self.topology.weights(t)
        return (torch.eye(len(W), dtype=W.dtype, device="cpu") + W) / 2 if self.lazy else W

    def links(self, t: int) -> int:
        """Along how many links, each direction for itself, something is sent in round t, whether it arrives or not."""
        if self._links is None or not self.sound.static:
            W = self.sound.weights(t)
            self._links = int((W != 0).sum() - (W.diagonal() != 0).sum())
        return self._links

    def __call__(self, t: int, messages: State) -> State:
        """The mixed messages of this process's nodes."""
        W, alone = self._used, distributed.size() == 1
        if W is None or not self.topology.static:
            W = self.weights(t).to(messages[0].device, messages[0].dtype)
            if alone and len(W) >= FEW and float((W != 0).sum()) < SPARSE * W.numel():
                W = W.to_sparse_coo().coalesce()
            self._used = W
        if not alone:
            return _across(W, messages)
        with one_thread():
            return type(messages)(*(W @ v for v in messages))


def _across(W: Tensor, messages: State) -> State:
    """Node i is in process i mod size. Each process sends every other the messages that its nodes need, and no more.

    All know W, hence what comes from where: one send and one receive for each pair of processes that are neighbours.
    """
    size, rank = distributed.size(), distributed.rank()
    rows = torch.cat(list(messages), -1)

    def needed(by: int, of: int) -> Tensor:
        """Which nodes of process `of` some node of process `by` receives from, by their place among those of `of`."""
        return (W[by::size, of::size] != 0).any(0).nonzero().squeeze(1)

    others = [other for other in range(size) if other != rank]
    into = {other: rows.new_empty(len(needed(rank, other)), rows.shape[-1]) for other in others}
    distributed.swap({other: rows[needed(other, rank)] for other in others}, into)
    mixed = W[rank::size, rank::size] @ rows
    for other in others:
        mixed += W[rank::size, other::size][:, needed(rank, other)] @ into[other]
    return type(messages)(*mixed.split([v.shape[-1] for v in messages], -1))
