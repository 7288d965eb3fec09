"""The rounds of an asynchronous method on a virtual clock: a round is a step of the server."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fednmap.asynchronous.delays import Values, Whole, delays_of, uniform
from fednmap.core import Problem, State, info_of, nbytes
from fednmap.names import InputError
from fednmap.simulation import distributed, schedules
from fednmap.simulation.loop import (
    Diverged,
    Round,
    check_after,
    clients_per_group,
    federation_of,
    first_uplink,
    whole_epochs,
)
from fednmap.simulation.participation import Sampler
from fednmap.simulation.schedules import Schedule
from fednmap.simulation.states import Clients
from fednmap.simulation.threads import ThreadPool, one_thread
from fednmap.simulation.uplink import Pipeline, UplinkParts, client_round

if TYPE_CHECKING:
    from fednmap.asynchronous.method import Asynchronous

NEVER = np.inf


def rounds_of(
    algorithm: Asynchronous,
    problem: Problem,
    rounds: int,
    start: Tensor,
    *,
    participation: float = 1.0,
    drop: float = 0.0,
    seed: int = 0,
    sampler: Sampler | None = None,
    eta_a: float | Schedule | None = None,
    chunk: int | None = None,
    threads: int | None = None,
    store: object = None,
    after: Round | None = None,
    uplink: UplinkParts | None = None,
) -> Iterator[Round]:
    """As `fednmap.simulate`: yield a Round after every step of the server.

    participation: share of the clients that have a job at a time; whoever is free is drawn alike.
    drop:          probability that a reply is lost; its client starts again, when it would have arrived, from the
                   newest state.
    seed:          decides the delays, who gets a job, and whose reply is lost: by client and job.

    `Round.participants` are the clients that had a job in this round. Bytes are those of replies that arrived or were
    lost, and of the states sent for new jobs; the first round has also those of the first jobs. What client i computes
    for the reply that is counted in round t uses its minibatches of round t.
    """
    if uplink is not None:
        raise InputError(
            "secure aggregation, privacy and robust rules are for rounds that end for all clients together; leave "
            "uplink out, or run without Asynchronous"
        )
    if sampler is not None or store is not None:
        raise InputError("who gets a job is drawn among clients without one, in memory; leave sampler and store out")
    if distributed.size() > 1:
        raise InputError("an asynchronous run has one virtual clock in one process; use one worker")
    method, about = algorithm.method, info_of(problem)
    server, initial = algorithm.init(start)
    if after is not None:
        check_after(after, problem.n, server, initial, rounds)
    bare, client = method.init(start)
    message, steps = first_uplink(method, bare, client)
    whole_epochs(algorithm, about.steps_per_round, steps)
    up_bytes, down_bytes = nbytes(message), nbytes(method.broadcast(bare))
    federation, pipeline = federation_of(problem, participation=participation, drop=drop, seed=seed), Pipeline()
    together = chunk or clients_per_group(problem, start)
    pool = ThreadPool(threads if start.device.type == "cpu" else 1, concurrent=bool(about.concurrent))
    clients = Clients(problem.n, initial)
    jobs = _Jobs(algorithm, problem.n, federation.per_round, drop, seed)
    if after is not None:
        clients = after.clients.thaw(initial, None, lambda ids: torch.ones_like(ids, dtype=torch.bool))
        everybody = clients[torch.arange(problem.n, device="cpu")]
        jobs.restore(everybody.job.cpu().numpy(), float(after.server.virtual_time))
    own, sent = len(client), len(method.broadcast(bare))

    def commit(changed: Whole, counted: Whole, new: State, ids: Whole, server: State) -> None:
        """Write what has changed: the states of counted clients, what was sent to those with new jobs, all jobs."""
        who = torch.from_numpy(changed)
        rows = clients[who]
        fields = list(rows)
        down = [v.expand(len(ids), *v.shape) for v in method.broadcast(algorithm.below(server))]
        for which, first, values in ((counted, 0, new), (ids, own, down)):
            place = torch.from_numpy(np.searchsorted(changed, which))
            for k, v in enumerate(values, first):
                fields[k] = v if len(which) == len(changed) else rows[k].index_copy(0, place.to(v.device), v)
        fields[-1] = torch.from_numpy(jobs.table[changed]).to(start.device)
        clients.replace(who, rows, type(rows)(*fields))

    def step(t: int, server: State, counted: Whole, late: Whole) -> tuple[State, State]:
        """Compute the replies that count; return the server's state after its step, and these clients' new states."""
        now = schedules.at(algorithm, eta_a, t)

        def work(ids: Tensor) -> tuple[State, list[Tensor]]:
            rows, behind = clients[ids], torch.from_numpy(late[np.searchsorted(counted, ids.numpy())])
            down = type(method.broadcast(bare))(*rows[own : own + sent])
            before, g = type(client)(*rows[:own]), problem.oracle(ids, t)
            up, new = client_round(now.method, pipeline, federation, t, ids, down, before, g)
            up = type(up)(*(v.expand(len(ids), *v.shape[-1:]) for v in up))
            read, weights = now.read(down, up, behind.to(start.device)), federation.each[ids]
            return new, [weights.to(v) @ v for v in read]

        total: list[Tensor] = []
        states: list[State] = []
        groups = torch.from_numpy(counted).split(together)
        with pool.map_in_order(work, groups) as results:
            for state, parts in results:
                total = [a + b for a, b in zip(total, parts, strict=True)] if total else parts
                states.append(state)
        with one_thread():
            weight = float(federation.each[torch.from_numpy(counted)].sum())
            mean = [v / weight for v in total]
            known = tuple(mean) if now.mixing is not None else type(message)(*mean)
            new = now.advance(algorithm.below(server), known, weight / federation.total)
            if not all(isfinite(float(v.sum())) for v in new):
                raise Diverged(t)
        numbers = (jobs.clock, *_statistics(server, jobs.ledger, late, len(counted)))
        stacked = type(client)(*(torch.cat(v) for v in zip(*states, strict=True)))
        kept = (torch.tensor(v, dtype=torch.float64, device=start.device) for v in numbers)
        return type(server)(*new, *kept), stacked

    def loop(server: State) -> Iterator[Round]:
        nobody = np.zeros(0, dtype=np.int64)
        with pool:
            first = 0 if after is None else after.t + 1
            if first == 0:
                ids = jobs.send(jobs.draw(0), 0)
                commit(ids, nobody, (), ids, server)
            begun = len(ids) if first == 0 else 0
            for t in range(first, rounds):
                busy, due, lost = jobs.in_flight.copy(), jobs.due(t), 0
                while len(again := jobs.lost_by(due)[:1]):  # starts again when its reply would have arrived
                    at = float(jobs.finish[again[0]])
                    jobs.give_up(again)
                    commit(again, nobody, (), jobs.send(again, t, at), server)
                    lost, due = lost + 1, jobs.due(t)
                counted = jobs.arrived(due)
                late = jobs.count(counted, t, due)
                new: State = ()
                if float(federation.each[torch.from_numpy(counted)].sum()) > 0:
                    server, new = step(t, server, counted, late)
                else:  # nobody met the deadline
                    server = server._replace(virtual_time=torch.full_like(server.virtual_time, jobs.clock))
                if algorithm.deadline is not None:
                    jobs.give_up(np.flatnonzero(jobs.in_flight))
                ended = busy & ~jobs.in_flight
                ids = jobs.send(jobs.draw(t + 1), t + 1)
                ended[ids] = True
                commit(np.flatnonzero(ended), counted if new else nobody, new, ids, server)
                up, down = (len(counted) + lost) * up_bytes, (begun + lost + len(ids)) * down_bytes
                begun, who = 0, torch.from_numpy(np.flatnonzero(busy))
                yield Round(t, server, clients.snapshot(), who, torch.from_numpy(counted), up, down)

    return loop(after.server if after else server)


def draw(free: Whole, count: int, seed: int, t: int) -> Whole:
    """Return `count` of the free clients, by seed and version; as `take_part` draws, where everybody is free.

    >>> draw(np.arange(5), 9, seed=0, t=1).tolist(), len(draw(np.arange(5), 2, seed=0, t=1))
    ([0, 1, 2, 3, 4], 2)
    """
    if count >= len(free):
        return free
    rng = np.random.default_rng([seed, t])
    return np.asarray(free[np.sort(rng.choice(len(free), count, replace=False, shuffle=False))])


class Ledger:
    """One job per client at a time, each with a ticket; a reply counts once, and only while its job is in flight.

    A client keeps the state that a reply would give it as pending, under the reply's ticket. The next message to it
    says which ticket was counted last: it then takes the pending state of that ticket, and drops any other.

    >>> ledger = Ledger(2)
    >>> tickets = ledger.send(np.array([0, 1]), version=0)
    >>> ledger.receive(0, 1), ledger.receive(0, 1), ledger.receive(1, 7)
    (True, False, False)
    """

    def __init__(self, n: int) -> None:
        self.ticket = np.zeros(n, dtype=np.int64)
        """The number of each client's newest job; 0 before its first."""
        self.version = np.zeros(n, dtype=np.int64)
        """The server's version that this job was sent with."""
        self.in_flight = np.zeros(n, dtype=bool)
        self.last_counted = np.zeros(n, dtype=np.int64)
        """The ticket of each client that was counted last; 0 if none was."""
        self.times_counted = np.zeros(n, dtype=np.int64)

    def send(self, clients: Whole, version: int) -> Whole:
        """Open a job for each of these clients and return its ticket; raise InputError if one is in flight."""
        if self.in_flight[clients].any():
            raise InputError("expected clients without a job in flight, got some with one; give up its job first")
        self.ticket[clients] += 1
        self.version[clients] = version
        self.in_flight[clients] = True
        return np.asarray(self.ticket[clients])

    def receive(self, client: int, ticket: int) -> bool:
        """Return whether this reply counts: not if it comes twice, or its job was given up. Its job is then closed."""
        if not self.in_flight[client] or self.ticket[client] != ticket:
            return False
        self.in_flight[client] = False
        self.last_counted[client] = ticket
        self.times_counted[client] += 1
        return True

    def give_up(self, clients: Whole) -> None:
        """Close jobs whose replies, if they come, are not to be counted."""
        self.in_flight[clients] = False


class _Jobs:
    """The jobs of all clients and the time of the last step: when each job ends, which replies the next step takes."""

    def __init__(self, algorithm: Asynchronous, n: int, slots: int, drop: float, seed: int) -> None:
        self.algorithm, self.n, self.slots, self.drop, self.seed = algorithm, n, slots, drop, seed
        spec = algorithm.delays
        self.delays = delays_of(spec, algorithm.slowdown, n, seed) if isinstance(spec, str) else spec
        self.ledger, self.finish, self.clock = Ledger(n), np.full(n, NEVER), 0.0

    @property
    def in_flight(self) -> NDArray[np.bool_]:
        return self.ledger.in_flight

    @property
    def table(self) -> Values:
        """The field `job` of all clients: when it ends, then the arrays of the ledger; exact in float64."""
        ledger = self.ledger
        columns = (self.finish, ledger.ticket, ledger.version, ledger.last_counted, ledger.times_counted)
        return np.stack(columns, axis=1)

    def restore(self, table: Values, clock: float) -> None:
        """Continue from the clients' states of a Round."""
        self.clock, self.finish, whole, ledger = clock, table[:, 0].copy(), table[:, 1:].astype(np.int64), self.ledger
        ledger.ticket, ledger.version, ledger.last_counted, ledger.times_counted = (v.copy() for v in whole.T)
        ledger.in_flight = np.isfinite(self.finish)

    def draw(self, t: int) -> Whole:
        """Return the clients that get a job at version t: as many as may work, of those without one."""
        free, busy = np.flatnonzero(~self.ledger.in_flight), int(self.ledger.in_flight.sum())
        return draw(free, self.slots - busy, self.seed, t)

    def send(self, ids: Whole, version: int, at: float | None = None) -> Whole:
        """Open jobs that begin at this time, by default now; return these clients."""
        times = np.asarray(self.delays(ids, self.ledger.send(ids, version)), dtype=np.float64)
        if times.shape != ids.shape or not bool(((times > 0) & (times < NEVER)).all()):
            raise InputError(f"expected {len(ids)} delays above 0 and finite, got {str(times)[:60]}")
        self.finish[ids] = (self.clock if at is None else at) + times
        return ids

    def due(self, version: int) -> float:
        """Return when the next step is taken, if no reply is lost before."""
        rule, times = self.algorithm, np.sort(self.finish[self.ledger.in_flight])
        last = float(times[-1])
        due = last
        if rule.buffer is not None:
            due = float(times[min(rule.buffer, len(times)) - 1])
        if rule.window is not None:  # windows follow one another until a reply has arrived
            windows = max(1.0, np.ceil((times[0] - self.clock) / rule.window))
            due = min(due, max(float(times[0]), self.clock + float(windows) * rule.window))
        if rule.deadline is not None:
            due = min(due, self.clock + rule.deadline)
        if rule.staleness is not None:
            old = self.ledger.in_flight & (version - self.ledger.version >= rule.staleness)
            due = max([due, *self.finish[old]])
        return max(due, self.clock)

    def lost_by(self, due: float) -> Whole:
        """Return the clients whose replies are lost until then, the earliest first."""
        if not self.drop:
            return np.zeros(0, dtype=np.int64)
        ids = np.flatnonzero(self.ledger.in_flight & (self.finish <= due))
        ids = ids[uniform(self.seed, 6, ids, self.ledger.ticket[ids]) < self.drop]
        return np.asarray(ids[np.argsort(self.finish[ids], kind="stable")])

    def arrived(self, due: float) -> Whole:
        """Return the clients whose replies the step takes, in ascending order."""
        ids = np.flatnonzero(self.ledger.in_flight & (self.finish <= due))
        rule = self.algorithm
        if rule.buffer is not None and rule.staleness is None:  # of replies at one time the first
            ids = ids[np.argsort(self.finish[ids], kind="stable")][: rule.buffer]
        return np.sort(ids)

    def count(self, ids: Whole, version: int, now: float) -> Whole:
        """Count the replies of these clients at this time; return how many versions late they are."""
        self.clock, late = now, version - self.ledger.version[ids]
        for i in ids.tolist():
            self.ledger.receive(i, int(self.ledger.ticket[i]))
        self.finish[ids] = NEVER
        return late

    def give_up(self, ids: Whole) -> None:
        self.ledger.give_up(ids)
        self.finish[ids] = NEVER


def _statistics(server: State, ledger: Ledger, late: Whole, count: int) -> tuple[float, float, float, float]:
    """Return staleness, its mean and largest, and how often clients were counted, the least and the most."""
    total = float(ledger.times_counted.sum())
    mean = (float(server.staleness) * (total - count) + float(late.sum())) / total
    times: Values = ledger.times_counted.astype(np.float64)
    return mean, max(float(server.staleness_max), float(late.max())), float(times.min()), float(times.max())
