"""Clients that are wrong, on purpose or not: centres that withstand them, attacks, and a monitor that finds them.

The server needs every client's vector for a centre that is not the mean: it does not go with secure aggregation, nor
with noise for privacy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fednmap.core import Algorithm, State, with_fields
from fednmap.names import InputError, choose
from fednmap.privacy.client_level import ATTACK, clipped, gaussian, without_phi
from fednmap.regularizers.parameters import fraction, integer, plain, positive, wrong
from fednmap.simulation.uplink import (
    Aggregated,
    Aggregator,
    Federation,
    Pipeline,
    Received,
    Rounding,
    Stage,
    UplinkParts,
    Uplinks,
)

FORGET = 0.2
"""What corrections forget by default with a centre that is not the mean, by measurement: see `docs/privacy.md`."""
USUAL = 0.1  # spread of logarithms below which everybody is taken to be alike: a tenth more or less is no news
SUSPECT = 3.5  # robust z-score from which a client is named (Iglewicz and Hoaglin, 1993)


class Centre(Aggregator):
    r"""What replaces the mean on the server: `centre` of the clients' vectors, those of one client concatenated.

    No centre but the mean keeps $\mean h_i = h$: what it leaves out stays in the clients' $h_i$ and not in the server's
    h, and adds up there. The corrections must forget it (`forget`), as noise; a method without corrections need not.

    forget: default 0.2 for methods with corrections; 0 for `NormClip`.

    >>> @dataclass(frozen=True)
    ... class Midrange(Centre):
    ...     forget: float | None = None
    ...
    ...     def centre(self, rows):
    ...         return (rows.amin(0) + rows.amax(0)) / 2
    >>> Midrange().centre(torch.tensor([[1.0], [2.0], [5.0]]))
    tensor([3.])
    """

    needs_individual_uplinks: ClassVar[bool] = True
    exact: ClassVar[bool] = False
    """Whether mean h_i = h stays true, so that nothing must be forgotten."""
    forget: float | None

    def __post_init__(self) -> None:
        if self.forget is not None:
            fraction(self, "forget")

    def centre(self, rows: Tensor) -> Tensor:
        """Return the centre (p,) of k vectors (k, p); a class without it raises NotImplementedError."""
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
    r"""The mean of vectors no longer than `clip`: each client clips its uplink and builds its state from that, and the
    server clips again.

    $\mean h_i = h$ stays true: nothing is forgotten, and without attackers the fixed point is exact. An attacker moves
    the mean by at most clip / n per round, every time in the same direction if it likes.

    >>> NormClip(1.0).centre(torch.tensor([[1.0], [1e9]]))
    tensor([1.])
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
    """Return an aggregator: mean (None), median, trimmed[:SHARE], geometric-median, clip:C; else raise InputError.

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
    """Let the first `count` clients send what `kind` makes of their uplink after the stages before this one.

    Their states stay those of honest clients.

    kind: sign-flip, scale, random or constant.
    size: factor by which the vector is longer than the honest one; of `constant`, its length.

    >>> Attack("sign-flip", count=2).size
    10.0
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


class Score(NamedTuple):
    """A client's robust z-scores, medians over the rounds in which it was counted."""

    client: int
    norm: float
    """Of log |y_i| among the round's clients."""
    distance: float
    """Of log |y_i - median|; 0 where only norms are known."""
    rounds: int

    @property
    def worst(self) -> float:
        return max(abs(self.norm), self.distance)


class Monitor(Stage, Aggregator):
    r"""A record of how unlike the others each client's uplinks are, in each round by a robust z-score.

    $$z = (\log v - \text{median}) / (1.4826 \cdot \text{MAD})$$

    where v is the norm of the uplink, or its distance from the median of all.

    inner:      the pipeline that it watches; default: the mean.
    norms_only: where secure aggregation hides the vectors, every client reports the norm of its vector: enough against
                faults, not against a client that lies about it too.

    A score says "unlike the others", not "wrong": a client with other patients is unlike the others too. FedNMap's
    corrections take the clients' differences out of what they send, so its uplinks are more alike than those of a
    method without.

    >>> import fednmap
    >>> from fednmap.algorithms import FedNMap
    >>> from fednmap.regularizers import L1
    >>> from fednmap.testing import heterogeneous
    >>> monitor = Monitor([Attack("scale", size=100.0), Median()])
    >>> result = fednmap.run(FedNMap(L1(0.2), eta_a=0.01, Q=5), heterogeneous(), rounds=10, uplink=monitor)
    >>> monitor.named()
    [0]
    """

    def __init__(self, inner: UplinkParts | None = None, *, norms_only: bool = False) -> None:
        self.inner, self.norms_only = Pipeline(inner), norms_only
        self._rule = self.inner.aggregator
        self.needs_individual_uplinks = not norms_only or self._rule.needs_individual_uplinks  # type: ignore[misc]
        self.alters_state = any(stage.alters_state for stage in self.inner.stages)  # type: ignore[misc]
        self.hides_individuals = any(stage.hides_individuals for stage in self.inner.stages)  # type: ignore[misc]
        self._norms: dict[int, dict[int, float]] = {}
        self._distances: dict[int, dict[int, float]] = {}

    def __repr__(self) -> str:
        return f"Monitor({self.inner!r}, norms_only={self.norms_only})"

    def wrap(self, algorithm: Algorithm) -> Algorithm:
        return self.inner.wrap(algorithm)

    def check(self, algorithm: Algorithm, federation: Federation) -> None:
        self.inner.check(algorithm, federation)

    def check_rounding(self, rounding: Rounding, up: State) -> None:
        self._rounding = self.inner.round_before(rounding, up)

    def rounding(self, up: State) -> Rounding:
        return self._rounding

    def nbytes(self, up: State) -> int | None:
        return self.inner.nbytes(up)

    def apply(self, federation: Federation, uplinks: Uplinks, rounding: Rounding) -> Uplinks:
        uplinks = self.inner.apply(federation, uplinks)
        if self.norms_only:
            self._note(self._norms, uplinks.t, uplinks.ids, torch.cat(uplinks.rows(), -1).norm(dim=-1))
        return uplinks

    def accepts(self, federation: Federation, ids: Tensor, weight: float) -> bool:
        return self._rule.accepts(federation, ids, weight)

    def aggregate(self, federation: Federation, received: Received) -> Aggregated:
        if not self.norms_only and len(received.ids):
            together = torch.cat(received.parts, -1)
            self._note(self._norms, received.t, received.ids, together.norm(dim=-1))
            apart = (together - median(together)).norm(dim=-1)
            self._note(self._distances, received.t, received.ids, apart)
        if self.needs_individual_uplinks and not self._rule.needs_individual_uplinks:
            weights = federation.each[received.ids]
            received = received._replace(parts=[torch.matmul(weights.to(v), v) for v in received.parts])
        return self._rule.aggregate(federation, received)

    def spent(self, federation: Federation, rounds: int) -> dict[str, float]:
        return self.inner.spent(federation, rounds)

    def scores(self, last: int | None = None) -> list[Score]:
        """Return the score of every client counted so far, the least like the others first.

        last: of the newest so many rounds only.
        """
        norms, distances = _medians(self._norms, last), _medians(self._distances, last)
        found = [Score(i, z, distances.get(i, (0.0, 0))[0], rounds) for i, (z, rounds) in norms.items()]
        return sorted(found, key=lambda score: -score.worst)

    def named(self, last: int | None = None, above: float = SUSPECT) -> list[int]:
        """Return the clients that are unlike the others."""
        return [score.client for score in self.scores(last) if score.worst > above]

    @staticmethod
    def _note(book: dict[int, dict[int, float]], t: int, ids: Tensor, values: Tensor) -> None:
        book.setdefault(t, {}).update(zip(ids.tolist(), values.tolist(), strict=True))


def z_scores(values: Tensor) -> Tensor:
    """Robust z-scores of positive numbers, on a logarithmic scale.

    >>> z_scores(torch.tensor([1.0, 1.1, 0.9, 1.0, 20.0]))[-1] > 3.5
    tensor(True)
    """
    logs = values.double().clamp_min(torch.finfo(torch.float64).tiny).log()
    away = logs - median(logs)
    return away / (1.4826 * median(away.abs())).clamp_min(USUAL)


def _medians(book: dict[int, dict[int, float]], last: int | None) -> dict[int, tuple[float, int]]:
    """Client -> the median of its scores over the rounds, and how many these are."""
    scores: dict[int, list[float]] = {}
    for t in sorted(book)[-last if last else 0 :]:
        heard = book[t]
        for i, z in zip(heard, z_scores(torch.tensor(list(heard.values()), device="cpu")).tolist(), strict=True):
            scores.setdefault(i, []).append(z)
    return {i: (float(median(torch.tensor(zs, device="cpu"))), len(zs)) for i, zs in scores.items()}
