"""Who takes part in a round, and whose reply is lost: a pure function of (seed, round)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fednmap.names import InputError, choose, renamed

Generator = np.random.Generator

Sampler = Callable[[int, int, Generator], Any]
"""sampler(n, t, rng): the clients of round t, different numbers from 0 to n - 1; rng is made of (seed, t)."""


@dataclass(frozen=True)
class _Share:
    """A share of the clients, in (0, 1]."""

    share: float = 0.1

    def __post_init__(self) -> None:
        if not isinstance(self.share, Real) or not 0 < self.share <= 1:
            raise InputError(f"participation is {self.share!r}; it must be in (0, 1]")


@dataclass(frozen=True)
class Uniform(_Share):
    """Draw max(1, round(share n)) different clients, all sets equally likely.

    >>> len(Uniform(0.5)(10, 0, np.random.default_rng(0)))
    5
    """

    share: float = 1.0

    def __call__(self, n: int, t: int, rng: Generator) -> Any:
        count = max(1, round(self.share * n))
        return np.arange(n) if count == n else np.sort(rng.choice(n, count, replace=False, shuffle=False))


@dataclass(frozen=True)
class PoissonSampler(_Share):
    """Draw every client independently with probability `share`; sometimes nobody.

    >>> PoissonSampler(1.0)(3, 0, np.random.default_rng(0)).tolist()
    [0, 1, 2]
    """

    def __call__(self, n: int, t: int, rng: Generator) -> Any:
        return np.flatnonzero(rng.random(n) < self.share)


@dataclass(frozen=True)
class Weighted:
    """Draw max(1, round(share n)) different clients, one after another with these odds.

    The mean of the uplinks is not corrected for the odds: a method without client state, such as FedAvg, then minimises
    a mean of the f_i that weighs clients with higher odds more. FedNMap and other methods whose clients keep a
    correction end at the optimum of f + phi whatever the odds, as long as they are above 0.

    >>> Weighted([0, 0, 1], share=0.3)(3, 0, np.random.default_rng(0)).tolist()
    [2]
    """

    odds: Sequence[float]
    share: float = 0.1

    def __post_init__(self) -> None:
        _Share(self.share)
        if not len(self.odds) or not all(0 <= v < float("inf") for v in self.odds) or not sum(self.odds) > 0:
            raise InputError(f"odds are {list(self.odds)[:4]} ...; give a number of at least 0 for every client")

    def __call__(self, n: int, t: int, rng: Generator) -> Any:
        count, odds = max(1, round(self.share * n)), np.asarray(self.odds, dtype=float)
        if len(odds) != n or count > (odds > 0).sum():
            raise InputError(f"{len(odds)} odds, {(odds > 0).sum()} above 0, for {count} of {n} clients per round")
        return rng.choice(n, count, replace=False, p=odds / odds.sum())


@dataclass(frozen=True)
class Cyclic(_Share):
    """Take max(1, round(share n)) clients in turn: 0, 1, 2, ..., and from the beginning again.

    >>> Cyclic(0.5)(4, 1, np.random.default_rng(0)).tolist()
    [2, 3]
    """

    def __call__(self, n: int, t: int, rng: Generator) -> Any:
        count = max(1, round(self.share * n))
        return (t * count + np.arange(count)) % n


@dataclass(frozen=True)
class Trace:
    """Take who was there: a list of client numbers per round, repeated when it ends.

    As with `Weighted`, clients that are there more often weigh more in a method without client state.

    >>> Trace([[0, 2], [1]])(3, 2, np.random.default_rng(0)).tolist()
    [0, 2]
    """

    rounds: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        if not len(self.rounds):
            raise InputError("the trace is empty; give the clients of at least one round")

    @classmethod
    def read(cls, path: str | Path) -> Trace:
        """From a text file: a line per round, client numbers separated by spaces or commas; an empty line is nobody."""
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
            return cls([[int(word) for word in line.replace(",", " ").split()] for line in lines])
        except OSError as error:
            raise InputError(f"cannot read the trace {path}: {error.strerror}") from None
        except ValueError:
            raise InputError(f"{path} is not a trace: a line per round, client numbers separated by spaces") from None

    def __call__(self, n: int, t: int, rng: Generator) -> Any:
        return np.asarray(self.rounds[t % len(self.rounds)], dtype=np.int64)


def uneven(sampler: Sampler, n: int) -> bool:
    """Return whether this sampler is known to draw some of n clients more often than others."""
    if isinstance(sampler, Weighted):
        return len(set(sampler.odds)) > 1 and round(sampler.share * n) < n
    if isinstance(sampler, Trace):
        all_rounds = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in sampler.rounds])
        ids, times = np.unique(all_rounds, return_counts=True)
        return len(ids) < n or len(set(times.tolist())) > 1
    return False


SAMPLERS: dict[str, Callable[[float], Sampler]] = {"uniform": Uniform, "poisson": PoissonSampler, "cyclic": Cyclic}


def sampler_of(spec: str, share: float) -> Sampler:
    """By name: uniform, poisson, cyclic, or trace:FILE.

    >>> sampler_of("cyclic", 0.5)(4, 1, np.random.default_rng(0)).tolist()
    [2, 3]
    """
    name, _, argument = spec.partition(":")
    if name == "trace":
        return Trace.read(argument)
    if argument:
        raise InputError(
            f"sampler {name!r} takes nothing after a colon, given {argument!r}; its share is participation"
        )
    return choose("sampler", name, {**SAMPLERS, "trace": Uniform})(share)


class Participation(NamedTuple):
    participants: Tensor
    """Clients that receive the broadcast and work, in ascending order."""
    counted: Tensor
    """Those of them whose reply arrived."""


def take_part(n: int, t: int, *, sampler: Sampler, drop: float, seed: int) -> Participation:
    """Return the clients that `sampler` names for round t; each reply is lost with probability `drop`."""
    if drop == 0 and type(sampler) is Uniform and round(sampler.share * n) == n:  # nothing is drawn
        everybody = torch.arange(n, device="cpu")
        return Participation(everybody, everybody)
    rng = np.random.default_rng([seed, t])
    named = sampler(n, t, rng)
    chosen = np.asarray(sorted(named) if isinstance(named, set | frozenset) else named)
    # a mask of who takes part is not taken for client numbers 0 and 1
    whole = chosen.ndim == 1 and (not len(chosen) or np.issubdtype(chosen.dtype, np.integer))
    chosen = np.sort(chosen.astype(np.int64)) if whole else chosen
    if not whole or (len(chosen) and (chosen[0] < 0 or chosen[-1] >= n or bool((np.diff(chosen) == 0).any()))):
        raise InputError(
            f"expected different client numbers from 0 to {n - 1} of the sampler in round {t}, got {str(named)[:60]}; "
            "use np.flatnonzero of a mask"
        )
    participants = torch.from_numpy(chosen)
    if drop == 0:
        return Participation(participants, participants)
    return Participation(participants, participants[torch.from_numpy(rng.random(len(chosen)) >= drop)])


__getattr__ = renamed(__name__, {"Poisson": "PoissonSampler"})
