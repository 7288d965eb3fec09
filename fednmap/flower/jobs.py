"""What each client works on, at most one message at a time, where the server does not wait for all of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from flwr.app import Message
from torch import Tensor

from fednmap.core import State
from fednmap.flower.roster import Content, Exchange, Mailbox, Roster


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

    def __init__(self, roster: Roster) -> None:
        self.mail, self.deadline = Mailbox(roster.grid), roster.deadline
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
