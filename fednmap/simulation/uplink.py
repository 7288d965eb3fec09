"""The uplink pipeline: what clients do to their uplinks before they send them, and what the server makes of them.

`client_round` is a client's half of a round, which the simulator and the Flower client call; `Traffic` counts bytes.

A pipeline is a list. Each `Stage` changes the uplinks on the client: clipping, noise, rounding, an attack. At most one
`Aggregator` says what the server makes of the uplinks that arrive; without one it takes their mean.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fednmap.core import Algorithm, Oracle, State, nbytes, pack
from fednmap.names import InputError
from fednmap.simulation import distributed
from fednmap.simulation.participation import Sampler, Uniform


@dataclass(frozen=True, eq=False)
class Federation:
    """What is fixed before the first round."""

    n: int
    weights: Tensor | None
    """Of the clients, in f; None where they weigh equally."""
    sampler: Sampler
    drop: float
    seed: int

    @cached_property
    def each(self) -> Tensor:
        """The weight of each client in sums of uplinks: `weights`, or ones."""
        return torch.ones(self.n, dtype=torch.float64, device="cpu") if self.weights is None else self.weights

    @cached_property
    def total(self) -> float:
        """The weight of all clients together."""
        return float(self.each.sum())

    @property
    def per_round(self) -> int:
        """How many clients take part in a round, at most."""
        return max(1, round(self.sampler.share * self.n)) if type(self.sampler) is Uniform else self.n


class Rounding(NamedTuple):
    """What later stages do to an uplink, for stages that must keep a bound."""

    slack: float = 0.0
    """The most by which it gets longer, in the Euclidean norm."""
    step: float = 0.0
    """Of the grid that it is rounded to."""
    bound: float = float("inf")
    """The longest uplink that can be sent."""


class Uplinks(NamedTuple):
    """The uplinks of one client, or of a stack of clients, on their way through the stages."""

    t: int
    ids: Tensor
    sent: State
    """What is sent."""
    known: State
    """What the clients' new states are built from: `sent`, without noise and attacks that a state must not contain."""

    def rows(self) -> list[Tensor]:
        """Return the fields of `sent`, a row for every client; a field that is the same for all may come unstacked."""
        return [v.expand(*self.ids.shape, v.shape[-1]) for v in self.sent]


class Received(NamedTuple):
    """What reached the server in a round: for each field of the uplink the weighted sum, or the clients' rows."""

    t: int
    ids: Tensor
    parts: list[Tensor]
    weight: float
    """Of the clients in it together."""


class Aggregated(NamedTuple):
    """What the method's `aggregate` is given."""

    up: list[Tensor]
    share: float


class Part:
    """A part of a pipeline: a `Stage`, an `Aggregator`, or both. Override what differs from sending the mean."""

    keeps_mean: ClassVar[bool] = False
    """Whether the method still receives the mean of its uplinks, up to rounding."""

    def wrap(self, algorithm: Algorithm) -> Algorithm:
        """Return the method as it is run with this part."""
        return algorithm

    def check(self, algorithm: Algorithm, federation: Federation) -> None:
        """Raise InputError for what cannot work, before the first round."""

    def spent(self, federation: Federation, rounds: int) -> dict[str, float]:
        """Return what else to report after so many rounds, such as the privacy budget spent."""
        return {}


class Stage(Part):
    """What a client does to its uplink.

    `apply` is called for some clients at a time, perhaps in several threads: it is a pure function of its arguments,
    and its randomness is addressed by seed, round and client.

    >>> class Half(Stage):
    ...     alters_state = True
    ...
    ...     def apply(self, federation, uplinks, rounding):
    ...         sent = type(uplinks.sent)(*(v / 2 for v in uplinks.sent))
    ...         return uplinks._replace(sent=sent, known=sent)
    """

    alters_state: ClassVar[bool] = False
    """Whether a client's state depends on what this stage does (`Algorithm.state_after_sending`)."""
    hides_individuals: ClassVar[bool] = False
    """Whether the server sees the sum of the uplinks only."""

    def apply(self, federation: Federation, uplinks: Uplinks, rounding: Rounding) -> Uplinks:
        """Return the uplinks after this stage. `rounding` is what later stages do to them."""
        return uplinks

    def rounding(self, up: State) -> Rounding | None:
        """Return how the stage rounds an uplink like `up`; None where it does not."""
        return None

    def check_rounding(self, rounding: Rounding, up: State) -> None:
        """Raise InputError where the rounding of later stages leaves no room for this one."""

    def nbytes(self, up: State) -> int | None:
        """Return the bytes of one uplink as this stage encodes it; None where it does not."""
        return None


class Aggregator(Part):
    """What the server makes of the uplinks: their weighted mean, unless a subclass says otherwise.

    >>> Aggregator.needs_individual_uplinks
    False
    """

    needs_individual_uplinks: ClassVar[bool] = False
    """Whether `aggregate` is given every client's vector, (k, p), in place of their sum."""

    def accepts(self, federation: Federation, ids: Tensor, weight: float) -> bool:
        """Return whether a round with the replies of these clients moves the server; if not, the replies are lost.

        weight: of these clients together.
        """
        return weight > 0

    def aggregate(self, federation: Federation, received: Received) -> Aggregated:
        """Return what stands for the mean of the uplinks of an accepted round, and for which share of the clients."""
        return Aggregated([v / received.weight for v in received.parts], received.weight / federation.total)


UplinkParts = Part | Sequence[Part]


class Pipeline(Part):
    """The stages in their order and the aggregator.

    >>> Pipeline().aggregator.needs_individual_uplinks
    False
    """

    def __init__(self, parts: UplinkParts | None = None) -> None:
        given = parts if isinstance(parts, list | tuple) else [] if parts is None else [parts]
        self.parts: tuple[Part, ...] = tuple(p for part in given for p in _flat(part))
        self.stages = [part for part in self.parts if isinstance(part, Stage)]
        rules = [part for part in self.parts if isinstance(part, Aggregator)]
        if len(rules) > 1:
            names = " and ".join(type(rule).__name__ for rule in rules)
            raise InputError(f"expected one aggregator, got {names}; leave out all but one")
        self.aggregator = rules[0] if rules else Aggregator()
        self._rounding = [Rounding()] * len(self.stages)

    def __repr__(self) -> str:
        return repr(list(self.parts))

    def wrap(self, algorithm: Algorithm) -> Algorithm:
        for part in self.parts:
            algorithm = part.wrap(algorithm)
        return algorithm

    def check(self, algorithm: Algorithm, federation: Federation) -> None:
        hidden = any(stage.hides_individuals for stage in self.stages)
        if hidden and self.aggregator.needs_individual_uplinks:
            raise InputError(
                f"secure aggregation shows the server the sum of the uplinks alone, and "
                f"{type(self.aggregator).__name__} needs each of them; leave one out"
            )
        if self.aggregator.needs_individual_uplinks and distributed.size() > 1:
            raise InputError("a robust aggregator needs every uplink in one place; run it with one worker")
        for part in self.parts:
            part.check(algorithm, federation)

    def bind(self, algorithm: Algorithm, down: State, client: State, up: State) -> None:
        """Fix how uplinks like `up` are rounded, and check that the method and the stages can work with that."""
        self.round_before(Rounding(), up)
        if any(stage.alters_state for stage in self.stages):
            algorithm.state_after_sending(down, client, up, up)

    def round_before(self, later: Rounding, up: State) -> Rounding:
        """Tell every stage what those behind it do to an uplink like `up`, `later` in the end; return what all do."""
        for k in reversed(range(len(self.stages))):
            self._rounding[k] = later
            self.stages[k].check_rounding(later, up)
            later = self.stages[k].rounding(up) or later
        return later

    def apply(self, federation: Federation, uplinks: Uplinks) -> Uplinks:
        """Return the uplinks after all stages."""
        for stage, rounding in zip(self.stages, self._rounding, strict=True):
            uplinks = stage.apply(federation, uplinks, rounding)
        return uplinks

    def nbytes(self, up: State) -> int | None:
        """Return the bytes of one uplink as the stages encode it; None where none does."""
        encoded = [size for stage in self.stages if (size := stage.nbytes(up)) is not None]
        return encoded[-1] if encoded else None

    def spent(self, federation: Federation, rounds: int) -> dict[str, float]:
        return {key: value for part in self.parts for key, value in part.spent(federation, rounds).items()}


def Chain(*parts: Part) -> list[Part]:
    """Deprecated: a pipeline is a list of parts."""
    warnings.warn("Chain(a, b) is deprecated; give uplink=[a, b]", DeprecationWarning, stacklevel=2)
    return list(parts)


def _flat(part: object) -> tuple[Part, ...]:
    if isinstance(part, Pipeline):
        return part.parts
    if isinstance(part, Part):
        return (part,)
    kind = f"the class {part.__name__}" if isinstance(part, type) else f"{type(part).__name__}"
    raise InputError(f"uplink: expected parts of fednmap.privacy such as Privacy(clip=1.0), got {kind}")


def client_round(
    algorithm: Algorithm,
    pipeline: Pipeline,
    federation: Federation,
    t: int,
    ids: Tensor,
    down: State,
    client: State,
    g: Oracle,
) -> tuple[State, State]:
    """Run round t of one client (0-d `ids`), or of a stack of clients; return what is sent and the new state.

    The local steps are the method's. The pipeline's stages then change the uplink, and the new state is built from what
    was sent, so that the client and the server agree on it.
    """
    up, state = algorithm.local(down, client, g)
    if not pipeline.stages:
        return up, state
    done = pipeline.apply(federation, Uplinks(t, ids, up, up))
    if done.known is not up:
        state = algorithm.state_after_sending(down, client, up, done.known)
    return done.sent, state


class Traffic:
    """Bytes of one client's messages in a round.

    A client that was counted in the last round that moved the server holds what it was sent then. Where the method can
    follow from there (`Traits.broadcast_follows`), it is sent the mean uplink of that round and not the broadcast.
    """

    def __init__(self, algorithm: Algorithm, server: State, message: State, pipeline: Pipeline | None = None) -> None:
        """message: an uplink, whose shapes count."""
        down, pipeline = algorithm.broadcast(server), pipeline or Pipeline()
        encoded = pipeline.nbytes(message)
        self.up = nbytes(pack(algorithm, message)) if encoded is None else encoded
        self.down, self.following = nbytes(down), nbytes(message)
        self.follows = algorithm.traits.broadcast_follows and self.following < self.down
        """Whether following is possible, and saves something."""
