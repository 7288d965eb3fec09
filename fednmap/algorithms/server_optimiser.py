"""Another optimiser on the server of a method: what FedAvgM, FedAdam, FedYogi and FedAdagrad have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections import namedtuple
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, ClassVar, cast

from torch import Tensor

from fednmap.core import Algorithm, Compressor, Oracle, Regularizer, State
from fednmap.names import InputError
from fednmap.regularizers.parameters import regularizer, shown

PASSED_ON = ("phi", "eta_a", "eta_s", "Q")


class ServerOptimiser(Algorithm):
    """The clients, the messages and the corrections of the method `of`; its server goes another way.

    The method makes of its mean uplink the step from x to y, where x is what `Traits.server_variable` names; the
    optimiser goes from x by a step of its own, for which it takes d = y - x. All else that the server keeps becomes
    what the method makes of it. A fixed point of the method has d = 0 and is one of the optimiser, and vice versa.

    >>> from fednmap.algorithms import FedAvgM, SCAFFOLD
    >>> FedAvgM(of=SCAFFOLD(eta_a=0.1, Q=5)).Q
    5
    """

    of: Algorithm
    phi: Regularizer
    eta_a: float
    eta_s: float
    Q: int
    kept: ClassVar[tuple[str, ...]]
    """The optimiser's own vectors on the server."""

    def __post_init__(self) -> None:
        given = {name: value for name in PASSED_ON if (value := getattr(self, name)) is not None}
        if "phi" in given:
            regularizer(self, "phi")
        if not isinstance(self.of, Algorithm) or not is_dataclass(self.of):
            raise InputError(
                f"{self.name}: of is {shown(self.of)}; it must be a method, such as SCAFFOLD(eta_a=0.1, Q=10)"
            )
        of = cast(Algorithm, self.of)
        if of.traits.server_variable is None:
            raise InputError(
                f"{self.name} cannot be of {of.name}, whose server takes no step that could be another one; "
                "use FedAvg, FedProx, SCAFFOLD, FedNMap or CompressedFedNMap"
            )
        own = {f.name for f in fields(self.of) if f.init}
        if strange := [name for name in given if name not in own]:
            raise InputError(f"{self.name}: {of.name} has no {strange[0]}; leave it out")
        if given:
            of = replace(self.of, **given)
        object.__setattr__(self, "of", of)
        object.__setattr__(self, "traits", replace(of.traits, broadcast_follows=False, server_variable=None, rate="-"))
        for name in own.intersection((*PASSED_ON, "gamma")):
            object.__setattr__(self, name, getattr(of, name))

    @abstractmethod
    def begin(self, x: Tensor) -> tuple[Tensor, ...]:
        """The optimiser's vectors before the first round."""

    @abstractmethod
    def step(self, x: Tensor, y: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        """The new x, and the optimiser's new vectors, where the method would go from x to y."""

    def init(self, start: Tensor) -> tuple[State, State]:
        server, client = self.of.init(start)
        below: Any = type(server)
        return _beside(below, self.kept)(*server, *self.begin(start)), client

    def broadcast(self, server: State) -> State:
        return self.of.broadcast(self._below(server))

    def local(self, down: State, client: State, g: Oracle) -> tuple[State, State]:
        return self.of.local(down, client, g)

    def state_after_sending(self, down: State, client: State, up: State, sent: State) -> State:
        return self.of.state_after_sending(down, client, up, sent)

    def aggregate(self, server: State, up: State, share: float) -> State:
        before, kept = self._below(server), server[-len(self.kept) :]
        after = self.of.aggregate(before, up, share)
        name = cast(str, self.of.traits.server_variable)
        x, *kept = self.step(getattr(before, name), getattr(after, name), *kept)
        return type(server)(*after._replace(**{name: x}), *kept)

    def model(self, server: State) -> Tensor:
        return self.of.model(self._below(server))

    def known_gradient(self, before: State, after: State) -> tuple[Tensor, Tensor] | None:
        return self.of.known_gradient(self._below(before), self._below(after))

    def extra_metrics(self, server: State) -> dict[str, float]:
        return self.of.extra_metrics(self._below(server))

    def compression(self) -> Compressor | None:
        return self.of.compression()

    def _below(self, server: State) -> State:
        """The server's state as the method knows it."""
        return type(server).below(*server[: -len(self.kept)])


@cache
def _beside(below: Any, kept: tuple[str, ...]) -> Any:
    """The method's state with the optimiser's vectors beside it."""
    state = cast(Any, namedtuple)("Server", (*below._fields, *kept))
    state.below = below
    state.__reduce__ = lambda self: (_again, (below, kept, tuple(self)))
    return state


def _again(below: Any, kept: tuple[str, ...], values: tuple[Tensor, ...]) -> State:
    """Such a state out of a pickle, which finds classes by name."""
    return _beside(below, kept)(*values)
