"""The round loop on one machine."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import isfinite
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fednmap.core import Algorithm, Oracle, OwnRounds, Problem, SecondOrder, Serverless, State, info_of, oracle_of
from fednmap.names import InputError
from fednmap.simulation import distributed, lock, schedules
from fednmap.simulation.client_groups import Group, Groups, TreeSum
from fednmap.simulation.participation import Sampler, Uniform, take_part, uneven
from fednmap.simulation.schedules import Schedule
from fednmap.simulation.states import Clients, Snapshot, same_kind
from fednmap.simulation.threads import ThreadPool, one_thread, reuse_freed_memory
from fednmap.simulation.uplink import Federation, Part, Pipeline, Received, Traffic, UplinkParts, client_round

VECTORS_BYTES = 2 << 20  # of one vector per client: a round keeps some six of them, and these are faster in cache


class Round(NamedTuple):
    """What is known after round t; the model is `algorithm.model(round.server)`. A value: it never changes.

    participants: the clients that received the broadcast; counted: those of them whose reply arrived.
    """

    t: int
    server: State
    clients: Snapshot
    participants: Tensor
    counted: Tensor
    bytes_up: int
    bytes_down: int


class Diverged(ArithmeticError):
    """Raised when the server's state is no longer finite; `result` is what was measured before, if it was."""

    def __init__(self, t: int) -> None:
        super().__init__(f"the iterate is no longer finite after round {t}; use a smaller eta_a (or eta_s)")
        self.t = t
        self.result: Any = None

    @classmethod
    def from_message(cls, message: str) -> Diverged:
        """Make the error again from its message, as stored in a run folder."""
        found = re.search(r"after round (\d+)", message)
        return cls(int(found[1]) if found else 0)


def simulate(
    algorithm: Algorithm,
    problem: Problem,
    *,
    rounds: int,
    start: Tensor | None = None,
    participation: float = 1.0,
    drop: float = 0.0,
    seed: int = 0,
    sampler: Sampler | None = None,
    eta_a: float | Schedule | None = None,
    chunk: int | None = None,
    threads: int | None = None,
    store: str | Path | None = None,
    after: Round | None = None,
    uplink: UplinkParts | None = None,
    secagg: Part | None = None,
) -> Iterator[Round]:
    """Run a method round by round and yield a Round after each.

    rounds:        how many there are in all, counted from the start of the run: `rounds=500` after the 300th round runs
                   200 more.
    start:         where to begin, of length problem.dim; decides dtype and device. Default: problem.start, else zeros.
    participation: share of the clients drawn in each round.
    drop:          probability that a participant's reply is lost; it then leaves no trace on the server or the client.
    seed:          decides who takes part and whose reply is lost; the minibatches belong to the problem.
    sampler:       who takes part, in place of `participation`: see `fednmap.simulation.participation`, or a function
                   of (n, t, rng).
    eta_a:         the local step size as a function of the round (see `fednmap.simulation.schedules`), in place of the
                   method's own.
    chunk:         clients computed in one batch; any value gives the same trajectory, to the order of the sums.
                   Default: the problem's own, else what keeps the clients' vectors in cache.
    threads:       how many share the work; any number gives the same bits. Default: OMP_NUM_THREADS if set, else one
                   for each core that this process may use.
    store:         a folder for the clients' states, when they are too many for memory; default: in memory.
    after:         a round of an earlier call with the same arguments, to continue from.
    uplink:        what happens to the uplinks, a part or a list of parts in order: differential privacy, attacks, a
                   robust aggregator in place of the mean (`fednmap.privacy`); last `Quantised(problem.n)`, which rounds
                   to the grid of secure aggregation: the trajectory is then that of a federation with masked sums.
    secagg:        deprecated: give it as the last part of `uplink`.

    In a process group of torch.distributed every process makes the same call: each computes and keeps some of the
    clients (`fednmap.simulation.client_groups`). The server's state is the same everywhere, to the bit what one process
    has.

    Raises InputError for what does not go together, before the first round, and Diverged when the state overflows.

    >>> from fednmap.algorithms import FedNMap
    >>> from fednmap.regularizers import L1
    >>> from fednmap.testing import heterogeneous
    >>> rounds = simulate(FedNMap(L1(0.2), eta_a=0.02, Q=5), heterogeneous(6), rounds=3, participation=0.5)
    >>> [len(round.counted) for round in rounds]
    [3, 3, 3]
    """
    check_kinds(algorithm, problem)
    integers(rounds=(rounds, 0), seed=(seed, 0), chunk=(1 if chunk is None else chunk, 1))
    if not isinstance(drop, Real) or not 0 <= drop < 1:
        raise InputError(f"expected drop, the probability of a lost reply, in [0, 1), got {drop!r}")
    if isinstance(sampler, type) or not (sampler is None or callable(sampler)):
        raise InputError(f"expected a sampler such as participation.Cyclic(0.1), got {kind(sampler)}")
    if isinstance(eta_a, type):
        raise InputError(f"expected eta_a to be a schedule such as Cosine(0.1, 200), got {kind(eta_a)}")
    schedules.check_end(eta_a, rounds)
    uplink = with_secagg(uplink, secagg)
    if isinstance(algorithm, Serverless):
        if uplink is not None:
            raise InputError(f"{algorithm.name} has no server that receives uplinks; leave uplink out")
        if participation != 1 or sampler is not None:
            raise InputError(
                f"{algorithm.name} runs on a graph where every node takes part in every round; leave participation and "
                "sampler out: drop says how many links fail"
            )
        if store is not None:
            raise InputError("store is for clients that rest between rounds; on a graph nobody does: leave it out")
    if isinstance(algorithm, OwnRounds):
        options = {"drop": drop, "seed": seed, "eta_a": eta_a, "chunk": chunk, "threads": threads, "after": after}
        if not isinstance(algorithm, Serverless):
            options |= {"participation": participation, "sampler": sampler, "store": store, "uplink": uplink}
        return algorithm.simulate(problem, rounds, first_point(problem, start), **options)
    everybody = participation == 1 and drop == 0 and sampler is None
    who = Uniform(participation) if sampler is None else sampler
    name = type(algorithm).__name__
    if algorithm.traits.central and problem.n != 1:
        raise InputError(f"{name} is a central method, given {problem.n} clients; use problems.Pooled(problem)")
    if algorithm.traits.full_participation and not everybody:
        raise InputError(f"{name} needs every client in every round; use participation=1 and drop=0, or FedNMap")
    if algorithm.traits.hessians:
        oracle_of(algorithm, problem, torch.tensor(0, device="cpu"), 0)  # refused here where it cannot be had
    about, start = info_of(problem), first_point(problem, start)
    federation, pipeline = federation_of(problem, sampler=who, drop=drop, seed=seed), Pipeline(uplink)
    algorithm = pipeline.wrap(algorithm)
    pipeline.check(algorithm, federation)
    algorithm = schedules.at(algorithm, eta_a, 0)
    server, initial = algorithm.init(start)
    if not initial and uneven(who, problem.n):
        warnings.warn(
            f"{algorithm.name} keeps no client state, and the sampler draws some clients more often: these weigh more "
            "in what it minimises; draw all alike, or use FedNMap",
            UserWarning,
            stacklevel=2,
        )
    message, steps = first_uplink(algorithm, server, initial)
    for field, v in zip(message._fields, message, strict=True):
        if v.ndim != 1:  # a number per client would look like a vector once clients are stacked
            raise InputError(
                f"{algorithm.name} sends {field} of shape {tuple(v.shape)}, and uplinks are vectors: give it one axis, "
                "as norm(dim=-1, keepdim=True) does"
            )
    pipeline.bind(algorithm, algorithm.broadcast(server), initial, message)
    whole_epochs(algorithm, about.steps_per_round, steps)
    traffic = Traffic(algorithm, server, message, pipeline)
    if after is not None:
        check_after(after, problem.n, server, initial, rounds)
    together = chunk or clients_per_group(problem, start)
    reuse_freed_memory(min(together, federation.per_round) * start.numel() * start.element_size())
    groups = Groups(problem.n, federation.per_round, together, sampled=not everybody)
    pool = ThreadPool(threads if start.device.type == "cpu" else 1, concurrent=bool(about.concurrent))
    oracle = partial(oracle_of, algorithm, problem) if algorithm.traits.hessians else problem.oracle
    step = _Step(oracle, federation, pipeline, message, groups, pool, alone=distributed.size() == 1)
    folder = None if store is None else Path(store)

    def loop(server: State) -> Iterator[Round]:
        with pool, _hold(folder):
            clients = after.clients.thaw(initial, folder, groups.mine) if after else Clients(problem.n, initial, folder)
            first, holders = after.t + 1 if after else 0, torch.zeros(problem.n, dtype=torch.bool, device="cpu")
            for t in reversed(range(first if traffic.follows else 0)):  # who was counted last, before this call
                counted = take_part(problem.n, t, sampler=who, drop=drop, seed=seed).counted
                if pipeline.aggregator.accepts(federation, counted, float(federation.each[counted].sum())):
                    holders[counted] = True
                    break
            for t in range(first, rounds):
                participants, counted = take_part(problem.n, t, sampler=who, drop=drop, seed=seed)
                following = int(holders[participants].sum()) if traffic.follows else 0
                down = traffic.following * following + traffic.down * (len(participants) - following)
                weight = float(federation.each[counted].sum())
                if pipeline.aggregator.accepts(federation, counted, weight):
                    holders = torch.zeros_like(holders).index_fill_(0, counted, True)
                    method = algorithm if eta_a is None else schedules.at(algorithm, eta_a, t)
                    server = step(method, t, server, clients, counted, weight)
                yield Round(t, server, clients.snapshot(), participants, counted, len(participants) * traffic.up, down)

    with _hold(folder):  # refused here, not in the first round
        if after is not None:
            after.clients.check_store(folder)
    return loop(after.server if after else server)


def with_secagg(uplink: UplinkParts | None, secagg: Part | None) -> UplinkParts | None:
    """Return the deprecated argument `secagg` as the last part of the pipeline."""
    if secagg is None:
        return uplink
    warnings.warn("secagg= is deprecated; give it as the last part of uplink=[...]", DeprecationWarning, stacklevel=3)
    return [*Pipeline(uplink).parts, *Pipeline(secagg).parts]


def federation_of(
    problem: Problem,
    *,
    participation: float = 1.0,
    sampler: Sampler | None = None,
    drop: float = 0.0,
    seed: int = 0,
    **others: Any,
) -> Federation:
    """Return what the uplink pipeline knows of a run with these options of `simulate`."""
    who = Uniform(participation) if sampler is None else sampler
    return Federation(problem.n, info_of(problem).weights, who, drop, seed)


@contextmanager
def _hold(store: Path | None) -> Iterator[None]:
    """Lock the folder of client states: it is for one simulation at a time."""
    if store is None:
        yield
        return
    store.mkdir(parents=True, exist_ok=True)
    release = lock.hold(store / f".lock-{distributed.rank()}", f"{store}")
    try:
        yield
    finally:
        release()


def check_kinds(algorithm: Algorithm, problem: Problem) -> None:
    """Refuse swapped arguments, and anything else that is not a method and a problem."""
    if not isinstance(algorithm, Algorithm):
        raise InputError(
            f"expected a method as the first argument, got {kind(algorithm)}; give FedNMap(L1(0.1), eta_a=0.1), say"
        )
    if not isinstance(problem, Problem):
        raise InputError(
            f"expected a problem as the second argument, got {kind(problem)}; it needs n, dim, oracle, loss, gradient"
        )


def kind(value: object) -> str:
    """Return in words what was given: a class, or an object of one."""
    return f"the class {value.__name__}" if isinstance(value, type) else f"an object of type {type(value).__name__}"


def integers(**given: tuple[int, int]) -> None:
    """Check that each value is an integer, not below its bound."""
    for name, (value, least) in given.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise InputError(f"expected {name} to be an integer of at least {least}, got {value!r}")


def check_after(after: Round, n: int, server: State, initial: State, rounds: int) -> None:
    """Check that `after` is a round of this method on this problem, and not the last of `rounds`."""
    if not isinstance(after, Round):
        raise InputError(f"expected a Round as after, got {kind(after)}; give `last` of a Result, say")
    if not same_kind(after.server, server) or not after.clients.fits(n, initial):
        wanted, got = (
            f"{count} clients and {type(state).__qualname__} of {str(state[0].dtype)[6:]} {tuple(state[0].shape)}"
            for count, state in ((n, server), (after.clients.n, after.server))
        )
        raise InputError(
            f"expected a round of this run as after, with {wanted}, got {got}; give the same method, problem and start"
        )
    if rounds <= after.t + 1:
        raise InputError(
            f"expected rounds above the {after.t + 1} that are done, got {rounds}; it counts from the start of the "
            f"run: give rounds={after.t + 1 + max(rounds, 1)} for {max(rounds, 1)} more"
        )


def first_point(problem: Problem, start: Tensor | None = None) -> Tensor:
    """Return `start` if given, else the problem's own, else zeros; raise InputError if it does not fit."""
    start = info_of(problem).start if start is None else start
    if start is None:
        return torch.zeros(problem.dim, device="cpu")
    if not isinstance(start, Tensor):
        raise InputError(
            f"expected start to be a tensor of length {problem.dim}, got {kind(start)}; use torch.tensor(...)"
        )
    if start.shape != (problem.dim,):
        raise InputError(
            f"expected start of length {problem.dim}, got shape {tuple(start.shape)}; flatten it, or leave it out"
        )
    if start.dtype not in (torch.float32, torch.float64):
        raise InputError(f"expected start in float32 or float64, got {start.dtype}; use start.float()")
    return start.detach()


def origin(problem: Problem, start: Tensor) -> Tensor:
    """Return the problem's own start, or zeros like `start`."""
    return torch.zeros_like(start) if info_of(problem).start is None else first_point(problem)


def clients_per_group(problem: Problem, start: Tensor) -> int:
    """Return how many clients are computed in one call: the problem's own choice, else as many as fit into the cache.

    A rule and not a measurement at run time: sums may round differently in another grouping, and the same seed must
    give the same bits again.
    """
    chunk = info_of(problem).chunk
    return max(1, VECTORS_BYTES // (start.numel() * start.element_size())) if chunk is None else chunk


def first_uplink(algorithm: Algorithm, server: State, client: State) -> tuple[State, int]:
    """Run the first round of one client without data; return its uplink and how many gradients it asked for."""
    asked = 0

    def g(x: Tensor, q: int) -> Tensor:
        nonlocal asked
        asked += 1
        return torch.zeros_like(x)

    hessian = SecondOrder(g, lambda x: x.new_zeros(*x.shape, x.shape[-1]))
    return algorithm.local(algorithm.broadcast(server), client, hessian)[0], asked


def dry_run(algorithm: Algorithm, server: State, client: State) -> State:
    """Return an uplink of one client, made without data; its shapes are what counts."""
    return first_uplink(algorithm, server, client)[0]


def whole_epochs(algorithm: Algorithm, steps_per_round: int | None, steps: int) -> None:
    """Warn if a round takes another number of gradients than the problem cuts its epochs for."""
    if steps_per_round is not None and steps != steps_per_round:
        warnings.warn(
            f"{algorithm.name} takes {steps} gradient{'s' * (steps != 1)} in a round, and the reshuffled minibatches "
            f"are cut for {steps_per_round}: some rows are drawn more often than others; give both the same number",
            UserWarning,
            stacklevel=3,
        )


def mean(ups: Sequence[State], weights: Sequence[float] | None = None) -> State:
    """Return the (weighted) mean of uplinks."""
    each = [1.0] * len(ups) if weights is None else list(weights)
    total = sum(each)
    return type(ups[0])(
        *(sum(w * v for w, v in zip(each, values, strict=True)) / total for values in zip(*ups, strict=True))
    )


@dataclass(frozen=True)
class _Step:
    """One round: returns the server's new state, and replaces the clients' states.

    What a lost reply held is never used, so only the clients that are counted are computed.
    """

    oracle: Callable[[Tensor, int], Oracle]
    federation: Federation
    pipeline: Pipeline
    message: State
    """An uplink, whose shapes count."""
    groups: Groups
    pool: ThreadPool
    alone: bool
    """Whether one process has all clients."""

    def __call__(
        self, algorithm: Algorithm, t: int, server: State, clients: Clients, counted: Tensor, weight: float
    ) -> State:
        down, aggregator = algorithm.broadcast(server), self.pipeline.aggregator
        individual = aggregator.needs_individual_uplinks
        rows: list[list[Tensor]] = []  # the uplinks of all clients, where the aggregator needs them
        tree = TreeSum(self.groups.sections, self.message, self.alone)

        def work(group: Group) -> tuple[Group, State, State, list[Tensor]]:
            """The clients' old and new states, and the weighted sum of their uplinks, or these themselves."""
            before, ids = clients.read(group.ids), group.ids
            if not len(ids):
                return group, before, before, [v.new_zeros(v.shape) for v in self.message]
            g = self.oracle(ids, t)
            up, new = client_round(algorithm, self.pipeline, self.federation, t, ids, down, before, g)
            each = [v.expand(len(ids), *v.shape[-1:]) for v in up]  # a field that is the same for all comes unstacked
            if individual:
                return group, before, new, each
            weights = self.federation.each[ids]
            return group, before, new, [torch.matmul(weights.to(v), v) for v in each]

        with self.pool.map_in_order(work, self.groups(counted)) as results:
            for group, before, new, parts in results:
                if not individual:
                    tree.add(group.section, parts, group.last)
                elif len(group.ids):
                    rows.append(parts)
                clients.replace(group.ids, before, new)
        with one_thread():  # OpenMP threads spin after use and slow the next kernel
            parts = [torch.cat(v) for v in zip(*rows, strict=True)] if individual else tree.total()
            up, share = aggregator.aggregate(self.federation, Received(t, counted, parts, weight))
            server = algorithm.aggregate(server, type(self.message)(*up), share)
            if not all(isfinite(float(v.sum())) for v in server):
                raise Diverged(t)
        return server
