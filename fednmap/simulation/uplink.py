"""What happens to the uplinks between the clients and the server: clipping, noise, attacks, another centre than a mean.

Without an `Uplink` they are sent as they are and averaged; nothing here is then called.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from torch import Tensor

from fednmap.core import Algorithm, State
from fednmap.names import InputError
from fednmap.simulation import distributed
from fednmap.simulation.participation import Sampler


class Federation(NamedTuple):
    """What is fixed before the first round."""

    n: int
    weights: Tensor | None
    """Of the clients, in f; None where they weigh equally."""
    sampler: Sampler
    drop: float
    seed: int
    slack: float = 0.0
    """The most by which rounding for secure aggregation makes an uplink longer, which comes after all else."""
    step: float = 0.0
    """Of that rounding."""

    @property
    def everybody(self) -> float:
        """The weight of all clients together; without weights, how many they are."""
        return float(self.n) if self.weights is None else float(self.weights.sum())


class Exchange(NamedTuple):
    """A round of some clients, side by side: what they heard, and what they would send if nothing came in between."""

    t: int
    ids: Tensor
    down: State
    client: State
    """Their states before the round."""
    up: State
    new: State
    """Their states after it, if `up` is what was summed."""


class Received(NamedTuple):
    """What reached the server in a round: per field of the uplink the weighted sum, or the rows of `Uplink.rows`."""

    t: int
    ids: Tensor
    parts: list[Tensor]
    weight: float
    """Of the clients that are in it together."""


class Heard(NamedTuple):
    """What the method's `aggregate` is given."""

    up: list[Tensor]
    share: float


class Uplink:
    """The way from the clients to the server; override what is different from sending all and taking the mean.

    `send` is called for some clients at a time, perhaps in several threads at once: it is a pure function of its
    arguments, and its randomness is addressed by seed, round and client. The same holds for `hear`, on the server.
    """

    rows: ClassVar[bool] = False
    """Whether `hear` is given every client's vector, (k, p), in place of their sum."""

    def check(self, algorithm: Algorithm, federation: Federation) -> None:
        """Refuse what cannot be, before the first round."""

    def method(self, algorithm: Algorithm) -> Algorithm:
        """The method as it is run this way."""
        return algorithm

    def opens(self, federation: Federation, ids: Tensor, weight: float) -> bool:
        """Whether a round with the replies of these clients moves the server; if not, theirs are lost.

        weight: of them together.
        """
        return weight > 0

    def send(self, algorithm: Algorithm, federation: Federation, exchange: Exchange) -> tuple[State, State]:
        """What these clients send, and their states that follow from having sent it."""
        return exchange.up, exchange.new

    def hear(self, federation: Federation, received: Received) -> Heard:
        """What the server makes of a round that `opens`."""
        return Heard([v / received.weight for v in received.parts], received.weight / federation.everybody)

    def spent(self, federation: Federation, rounds: int) -> dict[str, float]:
        """What else is to be told after so many rounds."""
        return {}


class Chain(Uplink):
    """One way after another: what the first sends is what the next is given. One of them at most hears for the server.

    >>> Chain(Uplink(), Uplink()).rows
    False
    """

    def __init__(self, *ways: Uplink) -> None:
        self.ways = ways
        ears = [way for way in ways if type(way).hear is not Uplink.hear]
        if len(ears) > 1:
            names = " and ".join(type(way).__name__ for way in ears)
            raise InputError(f"{names} do not go together: each says what the server makes of the uplinks; choose one")
        self._ear = ears[0] if ears else ways[0]
        self.rows = self._ear.rows  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.ways))})"

    def check(self, algorithm: Algorithm, federation: Federation) -> None:
        for way in self.ways:
            way.check(algorithm, federation)

    def method(self, algorithm: Algorithm) -> Algorithm:
        for way in self.ways:
            algorithm = way.method(algorithm)
        return algorithm

    def send(self, algorithm: Algorithm, federation: Federation, exchange: Exchange) -> tuple[State, State]:
        for way in self.ways:
            up, new = way.send(algorithm, federation, exchange)
            exchange = exchange._replace(up=up, new=new)
        return exchange.up, exchange.new

    def opens(self, federation: Federation, ids: Tensor, weight: float) -> bool:
        return self._ear.opens(federation, ids, weight)

    def hear(self, federation: Federation, received: Received) -> Heard:
        return self._ear.hear(federation, received)

    def spent(self, federation: Federation, rounds: int) -> dict[str, float]:
        return {key: value for way in self.ways for key, value in way.spent(federation, rounds).items()}


def check(uplink: Uplink, algorithm: Algorithm, federation: Federation) -> Algorithm:
    """The method as it is run with this uplink, if it can be."""
    if not isinstance(uplink, Uplink):
        kind = f"the class {uplink.__name__}" if isinstance(uplink, type) else f"of type {type(uplink).__name__}"
        raise InputError(f"uplink is {kind}; one of fednmap.privacy is due, such as Privacy(clip=1.0)")
    if uplink.rows and distributed.size() > 1:
        raise InputError("a robust centre needs every uplink in one place; run it with one worker")
    algorithm = uplink.method(algorithm)
    uplink.check(algorithm, federation)
    return algorithm
