"""Which jobs are in flight, and which replies count."""

from __future__ import annotations

import numpy as np

from fednmap.asynchronous.delays import Whole
from fednmap.names import InputError


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
        """Open a job for each of these clients and return its ticket; they must have none in flight."""
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

    def staleness(self, clients: Whole, version: int) -> Whole:
        """Return how many versions the server has moved on since these clients' jobs were sent."""
        return np.asarray(version - self.version[clients])
