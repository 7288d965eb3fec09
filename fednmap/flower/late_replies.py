"""Rounds of an asynchronous run between machines: replies count in the round in which they come.

Every client works on at most one message at a time, and the server does not wait for all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Message, MessageType, RecordDict
from torch import Tensor

from fednmap.asynchronous import Asynchronous, draw
from fednmap.core import Algorithm, State
from fednmap.flower import wire
from fednmap.flower.plan import Point
from fednmap.flower.roster import Content, Exchange, Mailbox
from fednmap.flower.rounds import Rounds, Step, new_ticket
from fednmap.flower.secure import Sum
from fednmap.simulation import schedules
from fednmap.simulation.loop import mean

LOOK = 1.0  # seconds between looks at who is connected


class InFlight(NamedTuple):
    """A message that a client works on: to which node it went, until when it may be answered, in which round.

    down: the broadcast that it was sent with; None if it asks for a measurement, which has no ticket either.
    """

    node: int
    end: float
    t: int
    ticket: str = ""
    down: State | None = None


class PendingMeasurement:
    """The model x after `done` rounds, which clients measure when they are free; `left` have not yet."""

    def __init__(self, done: int, x: Tensor, left: set[str]) -> None:
        self.done, self.x, self.left, self.found = done, x, left, Exchange()


class Jobs:
    """The messages in flight, by client. They end with the server: a client that is asked again starts again."""

    def __init__(self, mail: Mailbox, deadline: float) -> None:
        self.mail, self.deadline = mail, deadline
        self.open: dict[str, InFlight] = {}

    def send(self, jobs: Mapping[str, InFlight], kind: str, content: Content) -> int:
        """Send content(name) to clients that work on nothing; the bytes."""
        assert not jobs.keys() & self.open.keys()
        self.open |= jobs
        return self.mail.send({name: job.node for name, job in jobs.items()}, kind, content, self.deadline)

    def give_up(self, nodes: Mapping[str, int]) -> dict[str, tuple[InFlight, str]]:
        """Close the messages whose node is gone, or is another one by now, or whose time is over; each with why."""
        now, waiting = time.monotonic(), set(self.mail.waiting.values())
        lost = {name: (job, "its node is gone") for name, job in self.open.items() if nodes.get(name) != job.node}
        lost |= {n: (job, f"no reply within {self.deadline:g} s") for n, job in self.open.items() if now > job.end}
        lost |= {n: (job, "could not be sent a message") for n, job in self.open.items() if n not in waiting}
        for name in lost:
            self.mail.forget(name)
            del self.open[name]
        return lost

    def replies(self, end: float) -> Iterator[tuple[str, InFlight, Message]]:
        """Replies as they come until `end`; the client is then free."""
        for name, reply in self.mail.replies(end):
            yield name, self.open.pop(name), reply

    def oldest(self, t: int) -> int:
        """How many rounds before t the oldest of the jobs was sent; 0 without jobs."""
        return max((t - job.t for job in self.open.values() if job.down is not None), default=0)


class LateReplies(Rounds):
    """Rounds that count what has come.

    rule:      when the server steps, and how late replies count.
    record:    called with (rounds done, model, what clients say of it) when all have measured between two jobs.
    measuring: the measurement that they make.
    """

    def __init__(
        self, rule: Asynchronous, mail: Mailbox, record: Callable[[int, Tensor, Sum], None], *given: Any
    ) -> None:
        super().__init__(*given)
        self.rule, self.record = rule, record
        self.jobs = Jobs(mail, self.federation.deadline)
        self.measuring: PendingMeasurement | None = None

    def step(self, t: int, server: State, algorithm: Algorithm) -> Step:
        """Round t of an asynchronous run: it counts the replies that have come by then; other jobs stay in flight.

        A client whose job has failed is asked again in the next round, or when nobody is at work.
        """
        jobs, attempts, rule = self.jobs, 0, schedules.at(self.rule, self.eta_a, t)
        window = rule.window or math.inf
        end = time.monotonic() + window
        good: dict[str, tuple[InFlight, State]] = {}
        failed: dict[str, str] = {}
        while not rule.ready(len(good), len(jobs.open), jobs.oldest(t), time.monotonic() >= end):
            while not good and time.monotonic() >= end:  # windows follow one another until a reply has come
                end += window
            nodes = self.roster.refresh() or self.roster.wait(1)
            for name, (job, why) in jobs.give_up(nodes).items():
                self._without_uplink(name, job, why, failed)
            self._send_jobs(t, server, algorithm, nodes, good.keys() | failed.keys())
            if not jobs.open and not good:
                attempts += 1
                if attempts >= self.federation.attempts:
                    raise self.failed(t, {n: failed.get(n, "not connected") for n in self.names})
                time.sleep(LOOK)
                failed = {}
            for name, job, reply in jobs.replies(min(end, time.monotonic() + LOOK)):
                found = Exchange() if job.down is not None or self.measuring is None else self.measuring.found
                found.add(name, reply)
                if job.down is None or name not in found.replies:
                    self._without_uplink(name, job, found.errors.get(name, ""), failed)
                    if job.down is None:  # it has measured, and gets a job
                        break
                    continue
                self.spend(bytes_up=self.traffic.up, wire_up=found.wire_up)
                for up in found.read(partial(self.uplink, job.ticket)).values():
                    good[name] = job, rule.read(job.down, up, torch.tensor(t - job.t))
                self.refused[name] = found.errors.get(name, "")
                failed |= found.errors
                if rule.ready(len(good), len(jobs.open), jobs.oldest(t), time_is_up=False):  # a window takes all
                    break
        order = {name: good[name] for name in self.names if name in good}
        weights = [self.counts[name] for name in order]
        read = mean([value for _, value in order.values()], weights)
        return Step(
            {name: job.ticket for name, (job, _) in order.items()},
            rule.advance(server, read, sum(weights) / sum(self.counts.values())),
            failed,
            len(order) + len(failed) + len(jobs.open),
            late=tuple(t - job.t for job, _ in order.values()),
        )

    def _without_uplink(self, name: str, job: InFlight, why: str, failed: dict[str, str]) -> None:
        """A client is free again without an uplink: it has measured, or its job has failed."""
        if job.down is not None:
            failed[name] = why
        elif self.measuring is not None:
            self.measuring.left.discard(name)

    def _send_jobs(self, t: int, server: State, algorithm: Algorithm, nodes: Mapping[str, int], busy: set[str]) -> None:
        """Give free clients work: the pending measurement first, then jobs, as many as may work at a time.

        busy: clients that get no job in this round, because it counts them already, or because they failed.
        """
        jobs, end = self.jobs, time.monotonic() + self.federation.deadline
        if (pending := self.measuring) is not None:
            pending.left &= nodes.keys()
            asked = {name: InFlight(nodes[name], end, t) for name in pending.left - jobs.open.keys()}
            message = RecordDict({"model": wire.pack(Point(pending.x))})
            pending.found.wire_down += jobs.send(asked, MessageType.EVALUATE, lambda _: message)
            if not pending.left:
                self.measuring = None
                told = self.mean_of(pending.found, self.reader(pending.x))
                self.record(pending.done, pending.x, told)
        free = [i for i, name in enumerate(self.names) if name in nodes and name not in busy | jobs.open.keys()]
        at_work = len(busy) + sum(job.down is not None for job in jobs.open.values())
        slots = max(0, max(1, round(self.config.participation * self.n)) - at_work)
        drawn = [self.names[i] for i in draw(np.array(free, dtype=np.int64), slots, self.config.seed, t).tolist()]
        down, tickets = algorithm.broadcast(server), {name: new_ticket(t) for name in drawn}
        new = {name: InFlight(nodes[name], end, t, ticket, down) for name, ticket in tickets.items()}
        spent = jobs.send(new, MessageType.TRAIN, self.order(t, tickets, server, algorithm, set()))
        self.spend(bytes_down=self.traffic.down * len(new), wire_down=spent)

    def measurement(self, done: int, x: Tensor, ends: bool) -> Sum | None:
        if ends or not (self.rule.buffer or self.rule.window):
            return self.ask_about(done, x)
        self.measuring = self.measuring or PendingMeasurement(done, x, set(self.roster.nodes))
        return None
