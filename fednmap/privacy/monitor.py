"""Whose uplinks are unlike the others'?"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fednmap.core import Algorithm
from fednmap.privacy.robust import median
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

USUAL = 0.1  # spread of logarithms below which everybody is taken to be alike: a tenth more or less is no news
SUSPECT = 3.5  # robust z-score from which a client is named (Iglewicz and Hoaglin, 1993)


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
    """Records how unlike the others each client's uplinks are: z = (log v - median) / (1.4826 MAD) in each round.

    inner:      the pipeline that it watches; default: the mean.
    norms_only: where secure aggregation hides the vectors, every client reports the norm of its own: enough against
                faults, not against a client that lies about it too.

    A score says "unlike the others", not "wrong": a client with other patients is unlike the others too. FedNMap's
    corrections take the clients' differences out of what they send, so its uplinks are more alike than those of a
    method without.
    """

    def __init__(self, inner: UplinkParts | None = None, *, norms_only: bool = False) -> None:
        self.inner, self.norms_only = Pipeline(inner), norms_only
        self._rule = self.inner.aggregator
        self.needs_individual_uplinks = not norms_only or self._rule.needs_individual_uplinks  # type: ignore[misc]
        self.alters_state = any(stage.alters_state for stage in self.inner.stages)  # type: ignore[misc]
        self._norms: dict[int, dict[int, float]] = {}
        self._distances: dict[int, dict[int, float]] = {}

    def __repr__(self) -> str:
        return f"Monitor({self.inner!r}, norms_only={self.norms_only})"

    def wrap(self, algorithm: Algorithm) -> Algorithm:
        return self.inner.wrap(algorithm)

    def check(self, algorithm: Algorithm, federation: Federation) -> None:
        self.inner.check(algorithm, federation)

    def apply(self, federation: Federation, uplinks: Uplinks, rounding: Rounding) -> Uplinks:
        for stage in self.inner.stages:
            uplinks = stage.apply(federation, uplinks, rounding)
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
