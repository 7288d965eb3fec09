"""Centres of the uplinks that a few wrong-on-purpose clients cannot move far, in place of their mean.

The server needs every client's vector for them: they do not go with secure aggregation, nor with noise for privacy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fednmap.core import Algorithm, with_fields
from fednmap.names import InputError, choose
from fednmap.privacy.client_level import clipped, without_phi
from fednmap.regularizers.parameters import fraction, integer, plain, positive, wrong
from fednmap.simulation.uplink import Aggregated, Aggregator, Federation, Received, Rounding, Stage, Uplinks

FORGET = 0.2
"""What corrections forget by default with a centre that is not the mean, by measurement: see `docs/privacy.md`."""


class Centre(Aggregator):
    """What the server takes for the mean: `centre` of the clients' vectors, those of one client concatenated.

    No centre but the mean keeps mean h_i = h: what it leaves out stays in the clients' h_i and not in the server's h,
    and adds up there. The corrections must forget it (`forget`), as noise; a method without corrections need not.

    forget: default 0.2 for methods with corrections; 0 for `NormClip`.
    """

    needs_individual_uplinks: ClassVar[bool] = True
    exact: ClassVar[bool] = False
    """Whether mean h_i = h stays true, so that nothing must be forgotten."""
    forget: float | None

    def __post_init__(self) -> None:
        if self.forget is not None:
            fraction(self, "forget")

    def centre(self, rows: Tensor) -> Tensor:
        """Return the centre (p,) of k vectors (k, p)."""
        raise NotImplementedError

    def wrap(self, algorithm: Algorithm) -> Algorithm:
        share = FORGET if self.forget is None else self.forget
        changed = with_fields(algorithm, forget=share) if share else algorithm
        if self.forget and changed is algorithm:
            name = type(algorithm).__name__
            raise InputError(f"forget is {self.forget:g}, and {name} has no correction that could; leave it out")
        return changed

    def check(self, algorithm: Algorithm, federation: Federation) -> None:
        if federation.weights is not None and float(federation.weights.max() - federation.weights.min()) > 0:
            raise InputError(
                f"{type(self).__name__} knows no weights, and the clients weigh from {federation.weights.min():.3g} to "
                f"{federation.weights.max():.3g}; use a problem whose clients weigh equally, or the mean"
            )
        kept = without_phi(algorithm).init(torch.zeros(1, device="cpu"))[1]
        if kept and not self.exact and with_fields(algorithm, forget=FORGET) is algorithm:
            raise InputError(
                f"{type(self).__name__} is not the mean, and what it leaves out would add up in the clients' states of "
                f"{algorithm.name}, which cannot forget; use FedNMap, Zhang, FedCanon, SCAFFOLD or FedAvg"
            )

    def aggregate(self, federation: Federation, received: Received) -> Aggregated:
        sizes = [v.shape[-1] for v in received.parts]
        found = self.centre(torch.cat(received.parts, -1)).split(sizes)
        return Aggregated(list(found), len(received.ids) / federation.n)


@dataclass(frozen=True)
class Median(Centre):
    """The median of each coordinate (Yin, Chen, Ramchandran and Bartlett, ICML 2018).

    >>> Median().centre(torch.tensor([[1.0], [2.0], [1e9]]))
    tensor([2.])
    """

    forget: float | None = None

    def centre(self, rows: Tensor) -> Tensor:
        return median(rows)


@dataclass(frozen=True)
class Trimmed(Centre):
    """The mean of each coordinate without its `share` largest and `share` smallest values, rounded up to whole clients.

    >>> Trimmed(0.2).centre(torch.tensor([[1.0], [2.0], [3.0], [2.0], [1e9]]))
    tensor([2.3333])
    """

    share: float = 0.1
    forget: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        number = plain(self, "share")
        if number is None or not 0 < number < 0.5:
            raise wrong(self, "share", "above 0 and below 0.5")

    def centre(self, rows: Tensor) -> Tensor:
        k = len(rows)
        cut = min(math.ceil(self.share * k - 1e-9), (k - 1) // 2)
        return rows.sort(0).values[cut : k - cut].mean(0)


@dataclass(frozen=True)
class GeometricMedian(Centre):
    """The point with the least sum of distances, by Weiszfeld's iteration (Pillutla, Kakade and Harchaoui, 2022).

    >>> GeometricMedian().centre(torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [9.0, 9.0]])).norm() < 1e-3
    tensor(True)
    """

    forget: float | None = None
    iterations: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        integer(self, "iterations", 1)

    def centre(self, rows: Tensor) -> Tensor:
        found = median(rows)
        scale = (rows - found).norm(dim=-1).median()
        if scale == 0:  # half of the vectors are this one: no other point is nearer to all together
            return found
        least = (1e-6 * scale).clamp_min(torch.finfo(rows.dtype).tiny)  # a client's own vector may be the median
        for _ in range(self.iterations):
            weights = 1 / (rows - found).norm(dim=-1).clamp_min(least)
            new = torch.matmul(weights / weights.sum(), rows)
            if float((new - found).norm()) <= 1e-8 * float(scale):
                return new
            found = new
        return found


@dataclass(frozen=True)
class NormClip(Centre, Stage):
    """The mean of vectors no longer than `clip`: every client clips its own and builds its state from that, and the
    server clips again whoever did not.

    mean h_i = h stays true: nothing is forgotten, and without attackers the fixed point is exact. An attacker moves the
    mean by clip / n per round, in the same direction if it likes, for ever.
    """

    exact: ClassVar[bool] = True
    alters_state: ClassVar[bool] = True
    clip: float
    forget: float | None = 0.0

    def __post_init__(self) -> None:
        positive(self, "clip")
        super().__post_init__()

    def apply(self, federation: Federation, uplinks: Uplinks, rounding: Rounding) -> Uplinks:
        sent = clipped(uplinks, self.clip)
        return uplinks._replace(sent=sent, known=sent)

    def centre(self, rows: Tensor) -> Tensor:
        norm = rows.norm(dim=-1, keepdim=True)
        short: Tensor = rows * (self.clip / norm.clamp_min(self.clip))
        return short.mean(0)


def median(rows: Tensor) -> Tensor:
    """Of each coordinate; of an even number the mean of the two in the middle."""
    ordered = rows.sort(0).values
    return (ordered[(len(rows) - 1) // 2] + ordered[len(rows) // 2]) / 2


CENTRES: dict[str, Callable[..., Centre]] = {
    "median": Median,
    "trimmed": Trimmed,
    "geometric-median": GeometricMedian,
    "clip": NormClip,
}


def centre_of(spec: str, **options: Any) -> Centre | None:
    """Return the aggregator of a name: mean (None), median, trimmed[:SHARE], geometric-median, or clip:C.

    >>> centre_of("trimmed:0.2")
    Trimmed(share=0.2, forget=None)
    """
    if spec == "mean":
        return None
    name, colon, argument = spec.partition(":")
    kind = choose("aggregate", name, {"mean": None, **CENTRES})
    try:
        if kind is None or (colon and name not in ("trimmed", "clip")) or (name == "clip" and not colon):
            raise ValueError
        numbers = [float(argument)] if colon else []
    except ValueError:
        raise InputError(
            f"aggregate: expected mean, median, trimmed[:SHARE], geometric-median or clip:C (clip:1.0), got {spec!r}"
        ) from None
    return kind(*numbers, **options)
