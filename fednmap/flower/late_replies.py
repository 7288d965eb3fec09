"""Rounds of an asynchronous run between machines: replies count in the round in which they come.

Every client works on at most one message at a time, and the server does not wait for all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import MessageType, RecordDict
from torch import Tensor

from fednmap.asynchronous import Asynchronous, draw
from fednmap.core import Algorithm, State
from fednmap.flower import wire
from fednmap.flower.plan import Point
from fednmap.flower.roster import Content, Exchange, Mailbox
from fednmap.flower.rounds import RoundLoop, Step, new_ticket
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


class LateReplies(RoundLoop):
    """Rounds that count what has come. A client works on one message; what is in flight ends with the server.

    rule:      when the server steps, and how late replies count.
    record:    called with (rounds done, model, what clients say of it) when all have measured between two jobs.
    in_flight: the messages that clients work on.
    measuring: the rounds done and the model that clients measure when they are free; who has not yet, what others said.
    """

    def __init__(
        self, rule: Asynchronous, mail: Mailbox, record: Callable[[int, Tensor, Sum], None], *given: Any
    ) -> None:
        super().__init__(*given)
        self.rule, self.mail, self.record = rule, mail, record
        self.in_flight: dict[str, InFlight] = {}
        self.measuring: tuple[int, Tensor, set[str], Exchange] | None = None

    def step(self, t: int, server: State, algorithm: Algorithm) -> Step:
        """Round t of an asynchronous run: it counts the replies that have arrived; other jobs stay in flight.

        A client whose job has failed is asked again in the next round, or when nobody is at work.
        """
        rule, attempts = schedules.at(self.rule, self.eta_a, t), 0
        window = rule.window or math.inf
        end = time.monotonic() + window
        good: dict[str, tuple[InFlight, State]] = {}
        failed: dict[str, str] = {}

        def ready(time_is_up: bool) -> bool:
            oldest = max((t - job.t for job in self.in_flight.values() if job.down is not None), default=0)
            return rule.ready(len(good), len(self.in_flight), oldest, time_is_up)

        while not ready(time.monotonic() >= end):
            while not good and time.monotonic() >= end:  # windows follow one another until a reply has come
                end += window
            nodes = self.roster.refresh() or self.roster.wait(1)
            for name, why in self._hopeless(nodes).items():
                self.mail.forget(name)
                self._without_uplink(name, self.in_flight.pop(name), why, failed)
            self._send_jobs(t, server, algorithm, nodes, good.keys() | failed.keys())
            if not self.in_flight and not good:
                attempts += 1
                if attempts >= self.federation.attempts:
                    raise self.failed(t, {n: failed.get(n, "not connected") for n in self.names})
                time.sleep(LOOK)
                failed = {}
            for name, reply in self.mail.replies(min(end, time.monotonic() + LOOK)):
                job = self.in_flight.pop(name)
                found = Exchange() if job.down is not None or self.measuring is None else self.measuring[-1]
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
                if ready(time_is_up=False):  # a window takes all
                    break
        order = {name: good[name] for name in self.names if name in good}
        weights = [self.counts[name] for name in order]
        read = mean([value for _, value in order.values()], weights)
        return Step(
            {name: job.ticket for name, (job, _) in order.items()},
            rule.advance(server, read, sum(weights) / sum(self.counts.values())),
            failed,
            len(order) + len(failed) + len(self.in_flight),
            late=tuple(t - job.t for job, _ in order.values()),
        )

    def _hopeless(self, nodes: Mapping[str, int]) -> dict[str, str]:
        """Return the clients whose reply is not waited for any longer, each with the reason."""
        deadline, now, waiting = self.federation.deadline, time.monotonic(), set(self.mail.waiting.values())
        found: dict[str, str] = {}
        for name, job in self.in_flight.items():
            if nodes.get(name) != job.node:
                found[name] = "its node is gone"
            elif now > job.end:
                found[name] = f"no reply within {deadline:g} s"
            elif name not in waiting:
                found[name] = "could not be sent a message"
        return found

    def _without_uplink(self, name: str, job: InFlight, why: str, failed: dict[str, str]) -> None:
        """Enter that a client is free again without an uplink: it has measured, or its job has failed."""
        if job.down is not None:
            failed[name] = why
        elif self.measuring is not None:
            self.measuring[2].discard(name)

    def _send_jobs(self, t: int, server: State, algorithm: Algorithm, nodes: Mapping[str, int], busy: set[str]) -> None:
        """Give free clients work: the pending measurement first, then jobs, as many as may work at a time.

        busy: clients that get no job in this round, because it counts them already, or because they failed.
        """
        end = time.monotonic() + self.federation.deadline
        if self.measuring is not None:
            done, x, left, found = self.measuring
            left &= nodes.keys()
            asked = {name: InFlight(nodes[name], end, t) for name in left - self.in_flight.keys()}
            message = RecordDict({"model": wire.pack(Point(x))})
            found.wire_down += self._send(asked, MessageType.EVALUATE, lambda _: message)
            if not left:
                self.measuring = None
                self.record(done, x, self.mean_of(found, self.reader(x)))
        free = [i for i, name in enumerate(self.names) if name in nodes and name not in busy | self.in_flight.keys()]
        at_work = len(busy) + sum(job.down is not None for job in self.in_flight.values())
        slots = max(0, max(1, round(self.config.participation * self.n)) - at_work)
        drawn = [self.names[i] for i in draw(np.array(free, dtype=np.int64), slots, self.config.seed, t).tolist()]
        down, tickets = algorithm.broadcast(server), {name: new_ticket(t) for name in drawn}
        new = {name: InFlight(nodes[name], end, t, ticket, down) for name, ticket in tickets.items()}
        spent = self._send(new, MessageType.TRAIN, self.order(t, tickets, server, algorithm, set()))
        self.spend(bytes_down=self.traffic.down * len(new), wire_down=spent)

    def _send(self, jobs: Mapping[str, InFlight], kind: str, content: Content) -> int:
        """Send content(name) to clients that work on nothing; return the bytes."""
        self.in_flight |= jobs
        return self.mail.send({name: job.node for name, job in jobs.items()}, kind, content, self.federation.deadline)

    def measurement(self, done: int, x: Tensor, ends: bool) -> Sum | None:
        if ends or not (self.rule.buffer or self.rule.window):
            return self.ask_about(done, x)
        self.measuring = self.measuring or (done, x, set(self.roster.nodes), Exchange())
        return None
