"""The rounds of a network: every node computes, sends to its neighbours, and takes in what it hears."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fednmap.core import Oracle, Problem, State, info_of, nbytes
from fednmap.decentralized.contract import DecentralizedAlgorithm
from fednmap.decentralized.exchange import Mixing
from fednmap.names import InputError
from fednmap.simulation import distributed, schedules
from fednmap.simulation.loop import Diverged, Round, check_after, first_point, side_by_side, whole_epochs
from fednmap.simulation.schedules import Schedule
from fednmap.simulation.states import Clients
from fednmap.simulation.threads import Crew, one_thread

if TYPE_CHECKING:
    from fednmap.decentralized.network import Decentralized

Piece = TypeVar("Piece")
Value = TypeVar("Value")


class Mean(NamedTuple):
    """What is known of the network as a whole, for measuring: no node ever learns it."""

    iterate: Tensor
    """The mean of the nodes' z_i or x_i."""
    consensus: Tensor
    """The mean over the nodes of |x_i - x|^2."""


def rounds_of(
    algorithm: Decentralized,
    problem: Problem,
    *,
    rounds: int,
    start: Tensor | None = None,
    participation: float = 1.0,
    drop: float = 0.0,
    seed: int = 0,
    sampler: object = None,
    eta_a: float | Schedule | None = None,
    chunk: int | None = None,
    threads: int | None = None,
    store: object = None,
    after: Round | None = None,
) -> Iterator[Round]:
    """As `fednmap.simulate`, of a network: `Round.clients` are the nodes' states, `Round.server` their Mean.

    drop:  probability that a link fails in a round, both ways.
    seed:  decides which links fail.

    `bytes_up` counts what all nodes send along all links, also along those that fail; nothing comes down. In a process
    group of torch.distributed node i lives in process i mod size, and processes exchange their nodes' messages by
    point-to-point sends; the mean that is measured is an all-reduce, which is not counted.
    """
    if participation != 1 or sampler is not None:
        raise InputError(
            f"{algorithm.name} runs on a graph where every node takes part in every round; leave participation and "
            "sampler out: drop says how many links fail"
        )
    if store is not None:
        raise InputError("store is for clients that rest between rounds; on a graph nobody does: leave it out")
    if algorithm.topology.n != problem.n:
        name = type(algorithm.topology).__name__
        raise InputError(
            f"{name} has {algorithm.topology.n} nodes and the problem {problem.n} clients; give it as many"
        )
    if not algorithm.method.traits.changing and (drop or not algorithm.topology.static):
        warnings.warn(
            f"{algorithm.name} is proved for a graph that stays; where links come and go it may diverge: use NormDSGT",
            UserWarning,
            stacklevel=3,
        )
    start, about = first_point(problem, start), info_of(problem)
    whole_epochs(algorithm, about.steps_per_round, 1)
    server, initial = algorithm.init(start)
    mixing = Mixing(algorithm.topology, drop=drop, seed=seed, positive=algorithm.method.traits.positive)
    if after is not None:
        check_after(after, problem.n, server, initial, rounds)
    clients = Clients(problem.n, initial) if after is None else after.clients.thaw(initial, None, _mine)
    crew = Crew(threads if start.device.type == "cpu" else 1) if about.concurrent else None
    everybody = torch.arange(problem.n, device="cpu")
    mine = everybody[_mine(everybody)]
    groups = mine.tensor_split(-(-len(mine) // (chunk or side_by_side(problem, start)))) if len(mine) else ()
    scale = None if about.weights is None else (problem.n * about.weights).to(start)
    vectors = nbytes(algorithm.method.message(initial, lambda x, q: torch.zeros_like(x))[0])
    first = 0 if after is None else after.t + 1

    def step(method: DecentralizedAlgorithm, t: int) -> Mean:
        clients.admit(mine)
        parts: list[tuple[State, State]] = []

        def send(ids: Tensor) -> tuple[State, State]:
            return method.message(clients.view(ids), _weighted(problem.oracle(ids, t), scale, ids))

        _share(crew, groups, send, parts.append)
        heard = mixing(t, _stacked([message for message, _ in parts]))

        def take_in(piece: tuple[Tensor, State, State]) -> None:
            ids, kept, mixed = piece
            clients.replace(ids, method.update(kept, mixed))

        mixed = [
            type(heard)(*rows) for rows in zip(*(v.split([len(ids) for ids in groups]) for v in heard), strict=True)
        ]
        pieces = [(ids, kept, rows) for ids, (_, kept), rows in zip(groups, parts, mixed, strict=True)]
        _share(crew, pieces, take_in, lambda _: None)
        with one_thread():
            return mean_of(method, clients.view(mine), problem.n)

    def loop() -> Iterator[Round]:
        try:
            for t in range(first, rounds):
                whole = step(schedules.at(algorithm, eta_a, t).method, t)  # type: ignore[attr-defined]
                if not math.isfinite(float(whole.iterate.sum())):
                    raise Diverged(t)
                yield Round(t, whole, clients.snapshot(), everybody, everybody, mixing.links(t) * vectors, 0)
        finally:
            end()

    def end() -> None:
        if crew is not None:
            crew.end()

    running = loop()
    weakref.finalize(running, end)
    return running


def _mine(nodes: Tensor) -> Tensor:
    """Which of these nodes live in this process, a bool for each."""
    return nodes % distributed.size() == distributed.rank()


def mean_of(method: DecentralizedAlgorithm, states: State, n: int) -> Mean:
    """The mean over all n nodes, of which these are the states in this process."""
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


def _share(
    crew: Crew | None, pieces: Sequence[Piece], work: Callable[[Piece], Value], take: Callable[[Value], Any]
) -> None:
    if crew is not None:
        return crew.share(pieces, work, take)
    for piece in pieces:
        take(work(piece))
