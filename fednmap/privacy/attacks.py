"""Clients that send something else on purpose, to see what a centre withstands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fednmap.core import Algorithm
from fednmap.names import InputError, choose
from fednmap.privacy.noise import ATTACK, gaussian
from fednmap.regularizers.parameters import integer, positive
from fednmap.simulation.uplink import Federation, Rounding, Stage, Uplinks


def _unit(v: Tensor, *address: int) -> Tensor:
    drawn = gaussian(v, 1.0, *address)
    unit: Tensor = drawn / drawn.norm()
    return unit


KINDS: dict[str, Callable[[Tensor, float, tuple[int, ...]], Tensor]] = {
    "sign-flip": lambda v, size, address: -size * v,
    "scale": lambda v, size, address: size * v,
    "random": lambda v, size, address: size * v.norm() * _unit(v, *address),
    "constant": lambda v, size, address: size * _unit(v, *address[:2]),
}
"""sign-flip: -size y. scale: size y. random: another direction in every round, size times as long as y. constant: the
same vector of length `size` in every round."""


@dataclass(frozen=True)
class Attack(Stage):
    """The first `count` clients send what `kind` makes of their uplink after the stages before this one.

    Their states stay those of honest clients.

    kind: sign-flip, scale, random or constant.
    size: factor by which the vector is longer than the honest one; of `constant`, its length.
    """

    kind: str
    count: int = 1
    size: float = 10.0

    def __post_init__(self) -> None:
        choose("attack", self.kind, KINDS)
        integer(self, "count", 1)
        positive(self, "size")

    def check(self, algorithm: Algorithm, federation: Federation) -> None:
        if self.count >= federation.n:
            raise InputError(f"{self.count} of {federation.n} clients attack; leave some that do not")

    def apply(self, federation: Federation, uplinks: Uplinks, rounding: Rounding) -> Uplinks:
        wrong = [k for k, i in enumerate(uplinks.ids.tolist()) if i < self.count]
        if not wrong:
            return uplinks
        fields = uplinks.rows()
        sent, sizes = torch.cat(fields, -1).clone(), [v.shape[-1] for v in fields]
        for k in wrong:
            address = (federation.seed, ATTACK, uplinks.t, int(uplinks.ids[k]))
            sent[k] = KINDS[self.kind](sent[k], self.size, address)
        return uplinks._replace(sent=type(uplinks.sent)(*sent.split(sizes, -1)))


def attack_of(spec: str) -> Attack:
    """KIND:COUNT[,SIZE].

    >>> attack_of("sign-flip:1,10")
    Attack(kind='sign-flip', count=1, size=10.0)
    """
    kind, _, numbers = spec.partition(":")
    try:
        count, *size = numbers.split(",")
        return Attack(kind, int(count), *map(float, size))
    except (ValueError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"attack is {spec!r}; give KIND:COUNT[,SIZE], such as sign-flip:1,10") from None
