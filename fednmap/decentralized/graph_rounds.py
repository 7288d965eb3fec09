"""The rounds of a network: every node computes, sends to its neighbours, and mixes what it receives."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fednmap.core import Oracle, Problem, State, info_of, nbytes
from fednmap.decentralized.contract import DecentralizedAlgorithm
from fednmap.decentralized.exchange import Mixing
from fednmap.names import InputError
from fednmap.simulation import distributed, schedules
from fednmap.simulation.loop import Diverged, Round, check_after, clients_per_group, whole_epochs
from fednmap.simulation.schedules import Schedule
from fednmap.simulation.states import Clients
from fednmap.simulation.threads import ThreadPool, one_thread

if TYPE_CHECKING:
    from fednmap.decentralized.on_graph import Decentralized


class Mean(NamedTuple):
    """What is known of the network as a whole, for measuring: no node ever learns it."""

    iterate: Tensor
    """The mean of the nodes' z_i or x_i."""
    consensus: Tensor
    """The mean over the nodes of |x_i - x|^2."""


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
    group of torch.distributed node i lives in process i mod size, and processes exchange their nodes' messages by
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
    """Which of these nodes live in this process, a bool for each."""
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
