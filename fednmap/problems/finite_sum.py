"""Problems that are means over samples: f_i(x) = mean_j loss(x; sample j of client i)."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from numbers import Integral
from typing import Any, Self, TypedDict

import torch
from torch import Tensor

from fednmap.core import Oracle, ProblemInfo
from fednmap.data.clients import ClientData, Pairs
from fednmap.data.sparse import is_sparse, stored, take
from fednmap.names import InputError, choose
from fednmap.problems.minibatch import BLOCK, blocks, by_step, reshuffled, sample_numbers
from fednmap.problems.weighting import RowWeights, Weights, client_weights, row_shares, row_weights

Weight = float | Tensor
Samples = tuple[Tensor, Tensor, Weight]

CHUNK_BYTES = 1 << 23  # samples handled at once when all data is gone through: bounds the memory
SIDE_BY_SIDE_BYTES = 4 << 20  # one vector and one minibatch of every client that is computed side by side
AT_ONCE_BYTES = 1 << 18  # minibatches of several steps are gathered together while they are as small as this
REPLACEMENT, RESHUFFLE = "replacement", "reshuffle"
MOST_PIECES = 64  # of the sums over all data: more threads than that find nothing to do
MANY, FEW = 128, 16  # chunks of data: an estimate goes through FEW of them where there are more than MANY


class Options(TypedDict, total=False):
    """Keywords that every linear model passes on to `FiniteSum`, which explains them."""

    batch_size: int | None
    seed: int
    weights: Weights
    sample_weights: RowWeights
    minibatches: str
    local_steps: int | None


class FiniteSum(ABC):
    """What the problems here share: data of n clients, addressed minibatches, exact sums in bounded memory.

    A subclass says what one weighted batch costs and what its gradient is.

    batch_size: samples drawn for each local step; None for the exact gradient.
    seed:       decides the minibatches, with client, round and step.
    weights:    n numbers summing to 1, None for equal weights, or "samples": every row of every client counts once.
    sample_weights: what each row counts in its client's mean; None where all count the same.
    minibatches: "replacement", or "reshuffle": a client goes through its rows in an order that is another one in every
                epoch, see `fednmap.problems.minibatch`.
    local_steps: of a round, for "reshuffle": epochs then run on from round to round. None: every round begins one.
    """

    dim: int
    start: Tensor
    concurrent = True
    """What is computed of a batch is a function of the batch alone, in any thread."""
    first: int = 0
    """The number of client 0 in the whole federation; with the seed it decides whose minibatches these are."""

    def __init__(
        self,
        data: Pairs,
        *,
        batch_size: int | None = None,
        seed: int = 0,
        weights: Weights = None,
        sample_weights: RowWeights = None,
        minibatches: str = "replacement",
        local_steps: int | None = None,
    ) -> None:
        if batch_size is not None and not (isinstance(batch_size, Integral) and batch_size >= 1):
            raise InputError(f"batch_size is {batch_size}; it must be at least 1, or None for exact gradients")
        self.data = ClientData.of(data)
        self.n = len(self.data)
        self.batch_size, self.seed = batch_size, seed
        self.minibatches, self.local_steps = minibatches, local_steps
        if local_steps is not None and not (isinstance(local_steps, Integral) and local_steps >= 1):
            raise InputError(f"local_steps is {local_steps!r}; it must be at least 1, or None where it is not known")
        rules = {REPLACEMENT: sample_numbers, RESHUFFLE: reshuffled(local_steps)}
        self._draw = choose("minibatches", minibatches, rules)
        held = sum(v.numel() * v.element_size() for v in stored(self.data.x))
        self._row_bytes = max(1, held // len(self.data.x))  # of one sample, on average
        self._sizes, self._offsets = self.data.sizes, self.data.offsets
        self._counts = row_weights(sample_weights, self.data)
        self._shares = row_shares(self._sizes, self._counts)
        self.weights = client_weights(weights, self._sizes, self._counts)
        self._part = (0, 1)

    @property
    def chunk(self) -> int:
        """Clients computed side by side: as many as have their vectors and minibatches in cache."""
        batch = self.batch_size or int(self._sizes.max())
        return max(1, SIDE_BY_SIDE_BYTES // (self.start.element_size() * self.dim + self._row_bytes * batch))

    @property
    def pieces(self) -> int:
        """Parts that the sums over all data are cut into: a rule, so that they add up to the same bits everywhere."""
        return min(MOST_PIECES, sum(1 for _ in self._chunks()))

    @property
    def steps_per_round(self) -> int | None:
        """Local steps of a round, from which epochs go on in the next one; None where any number will do."""
        return self.local_steps if self.minibatches == RESHUFFLE and self.batch_size is not None else None

    @property
    def exact_gradients(self) -> bool:
        """Whether a client's gradient is that of f_i, without noise."""
        return self.batch_size is None

    def info(self) -> ProblemInfo:
        return ProblemInfo(
            start=self.start,
            weights=self.weights,
            chunk=self.chunk,
            part=self.part,
            pieces=self.pieces,
            concurrent=self.concurrent,
            exact=self.exact,
            exact_gradients=self.exact_gradients,
            steps_per_round=self.steps_per_round,
            value_and_gradient=self.value_and_gradient,
            subsample=self.subsample,
            digest=self.digest,
            made_of=self.made_of,
        )

    def digest(self) -> str:
        """SHA-256 of the data."""
        return self.data.digest

    def made_of(self) -> dict[str, Any]:
        """What decides f and its gradients besides the data."""
        return {
            "batch_size": self.batch_size,
            "seed": self.seed,
            "weights": self.weights,
            "sample_weights": self._counts,
            "first": self.first,
            **({} if self.minibatches == REPLACEMENT else {RESHUFFLE: self.local_steps or 0}),
        }

    def exact(self) -> Self:
        """The same problem with exact client gradients."""
        exact = copy.copy(self)
        exact.batch_size = None
        return exact

    def part(self, rank: int, ranks: int) -> Self:
        """The terms of f that fall to one of several processes: their losses and gradients sum to f's."""
        part = copy.copy(self)
        part._part = (rank, ranks)
        return part

    def subsample(self) -> Self:
        """The same problem on fewer rows where there are very many, evenly spaced ones of every client; else itself."""
        step = self.rows_at_once()
        if len(self.data.x) <= MANY * step or self._counts is not None:
            return self
        few = copy.copy(self)
        few.data = self.data.thinned(FEW * step)
        few._sizes, few._offsets, few._shares = few.data.sizes, few.data.offsets, row_shares(few.data.sizes, None)
        return few

    def alone(self, i: int) -> Self:
        """Client i by itself: its data, and the minibatches that it has here."""
        one = copy.copy(self)
        one.data, one.n, one.weights, one.first = ClientData.of([self.data[i]]), 1, None, self.first + i
        one._sizes, one._offsets = one.data.sizes, one.data.offsets
        rows = slice(int(self._offsets[i]), int(self._offsets[i] + self._sizes[i]))
        one._shares, one._counts = self._shares[rows], None if self._counts is None else self._counts[rows]
        return one

    @abstractmethod
    def batch_loss(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> Tensor:
        """sum_j weight_j loss(x; a_j, b_j) at one point x (p,), for samples a (B, ...) and targets b (B, ...)."""

    @abstractmethod
    def batch_gradient(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> Tensor:
        """Gradient of `batch_loss`; with samples (k, B, ...) that of k clients, at x (k, p) or one common x (p,)."""

    def batch_value_and_gradient(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
        """`batch_loss` and `batch_gradient` at one point; a problem overrides it where they share their work."""
        return self.batch_loss(x, a, b, weight), self.batch_gradient(x, a, b, weight)

    @abstractmethod
    def predict(self, x: Tensor, inputs: Tensor) -> Tensor:
        """What model x says about each input: a label, or a number in regression."""

    def oracle(self, clients: Tensor, t: int) -> Oracle:
        if self.batch_size is None:
            return self._exact(clients)
        block = blocks(self.seed, clients, t, self.batch_size, self._sizes, self._offsets, self.first, self._draw)
        equal, held = 1.0 / self.batch_size, self._sizes[clients.cpu()].unsqueeze(-1)
        once = BLOCK * clients.numel() * self.batch_size * self._row_bytes <= AT_ONCE_BYTES
        if once and self._counts is None and not is_sparse(self.data.x):
            batch = by_step(lambda number: self._apart(block(number)))

            def small(x: Tensor, q: int) -> Samples:
                a, b = batch(q)
                return like(a, x), like(b, x), equal

            return self._oracle(small, clients)
        rows = by_step(block)

        def gathered(x: Tensor, q: int) -> Samples:
            drawn = rows(q)
            weight = equal if self._counts is None else (equal * held * self._shares[drawn]).to(x)
            return *self._gather(drawn, x), weight

        return self._oracle(gathered, clients)

    def _oracle(self, samples: Callable[[Tensor, int], Samples], clients: Tensor) -> Oracle:
        """The gradients on samples(x, q), those of local step q."""
        return lambda x, q: self.batch_gradient(x, *samples(x, q))

    def loss(self, x: Tensor) -> Tensor:
        return sum((self.batch_loss(x, *batch) for batch in self._everything(x)), start=x.new_zeros(()))

    def gradient(self, x: Tensor) -> Tensor:
        return sum((self.batch_gradient(x, *batch) for batch in self._everything(x)), start=torch.zeros_like(x))

    def value_and_gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """f and its gradient at x, in one pass over the data."""
        return total(self.batch_value_and_gradient, x, self._everything(x))

    def _exact(self, clients: Tensor) -> Oracle:
        """Full local gradients: clients' samples side by side, the shorter ones padded with weight 0."""
        clients = clients.cpu()
        sizes, first = self._sizes[clients].unsqueeze(-1), self._offsets[clients].unsqueeze(-1)
        longest = int(sizes.max())
        step = max(1, self.rows_at_once() // max(1, clients.numel()))

        def batch(c: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            j = torch.arange(c, min(c + step, longest), device="cpu")
            rows = first + torch.minimum(j, sizes - 1)
            return *self._gather(rows, x), ((j < sizes) * self._shares[rows]).to(x)

        kept: list[tuple[Tensor, Tensor, Tensor]] = []

        def g(x: Tensor, q: int) -> Tensor:
            if longest <= step:  # fits: gathered once, used in all local steps
                if not kept:
                    kept.append(batch(0, x))
                return self.batch_gradient(x, *kept[0])
            return sum(self.batch_gradient(x, *batch(c, x)) for c in range(0, longest, step))  # type: ignore[return-value]

        return g

    def _everything(self, x: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """All samples in chunks, each weighing what it contributes to f."""
        equal = torch.full((self.n,), 1.0 / self.n, dtype=torch.float64, device="cpu")
        clients = equal if self.weights is None else self.weights
        weights = (torch.repeat_interleave(clients, self._sizes) * self._shares).to(x)
        rank, ranks = self._part
        for rows in islice(self._chunks(), rank, None, ranks):
            yield like(take(self.data.x, rows), x), like(self.data.y[rows], x), weights[rows]

    def _chunks(self) -> Iterator[slice]:
        """Rows gone through together."""
        step = self.rows_at_once()
        return (slice(c, c + step) for c in range(0, len(self.data.x), step))

    def _gather(self, rows: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The samples in these rows."""
        flat = rows.reshape(-1).to(self.data.x.device)
        a, b = (v.index_select(0, flat).reshape(*rows.shape, *v.shape[1:]) for v in (self.data.x, self.data.y))
        return like(a, x), like(b, x)

    def _apart(self, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The samples in rows (steps, ...), step by step, as precise as they are: x may be more so than the start."""
        real = [v for v in (self.start, self.data.x, self.data.y) if v.is_floating_point()]
        a, b = self._gather(rows, max(real, key=lambda v: v.element_size()))
        return list(zip(a.unbind(), b.unbind(), strict=True))

    def rows_at_once(self) -> int:
        """Rows that are handled at once when all data is gone through."""
        return max(1, CHUNK_BYTES // self._row_bytes)


def total(
    value_and_gradient: Callable[..., tuple[Tensor, Tensor]],
    x: Tensor,
    batches: Iterable[tuple[Tensor, Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Sums over batches of values and gradients at x."""
    loss, gradient = x.new_zeros(()), torch.zeros_like(x)
    for batch in batches:
        value, slope = value_and_gradient(x, *batch)
        loss = loss + value
        gradient += slope
    return loss, gradient


def like(values: Tensor, x: Tensor) -> Tensor:
    """Real values in x's dtype, labels as they are."""
    return values if values.dtype == x.dtype or not values.is_floating_point() else values.to(x.dtype)
