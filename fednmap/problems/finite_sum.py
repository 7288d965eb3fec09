"""Problems that are sums over clients' data, f = sum_i weight_i f_i, most of them with f_i a mean over samples."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from numbers import Integral
from typing import Any, Self, TypedDict, cast

import torch
from torch import Tensor

from fednmap.core import Oracle, ProblemInfo
from fednmap.data.clients import ClientData, Pairs, tensor
from fednmap.data.records import Records
from fednmap.names import InputError, choose
from fednmap.problems.minibatch import BLOCK, Draw, blocks, by_step, reshuffled_numbers, sample_numbers

Weight = float | Tensor
Samples = tuple[Tensor, Tensor, Weight]
Batch = tuple[Tensor, Tensor, Tensor]
"""Samples, targets, and what each weighs."""
Weights = Sequence[float] | Tensor | str | None
"""n numbers that sum to 1; None: clients weigh equally; "samples": every row of every client counts once."""
RowWeights = Sequence[Tensor] | Tensor | None
"""A number >= 0 per row, for each client a vector or one vector for all rows in turn; None: rows count the same."""

CHUNK_BYTES = 1 << 23  # samples handled in one pass over all data: bounds the memory
SIDE_BY_SIDE_BYTES = 4 << 20  # one vector and one minibatch of every client that is computed in one call
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


class ClientSum(ABC):
    """f = sum_i weight_i f_i over clients that hold data: what the problems here share."""

    dim: int
    start: Tensor
    concurrent = True
    """What is computed is a function of the data and x alone, in any thread."""

    def __init__(self, data: ClientData, weights: Weights, rows: Tensor | None) -> None:
        """rows: the weights of the rows, if they have any."""
        self.data, self.n, self._counts = data, len(data), rows
        self.weights = client_weights(weights, data.sizes, rows)
        self._part = (0, 1)

    @property
    def exact_gradients(self) -> bool:
        """Whether a client's gradient is that of f_i, without noise."""
        return True

    def info(self) -> ProblemInfo:
        """Return what the problem declares beyond the protocol."""
        return ProblemInfo(
            start=self.start,
            weights=self.weights,
            part=self.part,
            concurrent=self.concurrent,
            exact=self.exact,
            exact_gradients=self.exact_gradients,
            value_and_gradient=self.value_and_gradient,
            digest=self.digest,
            made_of=self.made_of,
        )

    def digest(self) -> str:
        """SHA-256 of the data."""
        return self.data.digest

    @abstractmethod
    def made_of(self) -> dict[str, Any]:
        """Return what decides f and its gradients apart from the data."""

    def exact(self) -> Self:
        """Return the same problem with exact client gradients."""
        return self

    def part(self, rank: int, ranks: int) -> Self:
        """Return the terms of f that fall to one of several processes: their losses and gradients sum to f's."""
        return self._changed(_part=(rank, ranks))

    def alone(self, i: int) -> Self:
        """Client i by itself: its data, and the minibatches that it has here."""
        counts = None if self._counts is None else self._counts[self.data.rows_of(i)]
        return self._changed(n=1, weights=None, _counts=counts, data=self.data.client(i))

    @abstractmethod
    def oracle(self, clients: Tensor, t: int) -> Oracle:
        """Return the gradients of round t for `clients`, see `fednmap.core.Problem`."""

    @abstractmethod
    def value_and_gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return f and its gradient at x, in one pass over the data."""

    def loss(self, x: Tensor) -> Tensor:
        """Return f(x) on all data."""
        return self.value_and_gradient(x)[0]

    def gradient(self, x: Tensor) -> Tensor:
        return self.value_and_gradient(x)[1]

    def _changed(self, **fields: Any) -> Self:
        """A copy with other values in these fields."""
        changed = copy.copy(self)
        changed.__dict__.update(fields)
        return changed

    def _client_weights(self) -> Tensor:
        equal = torch.full((self.n,), 1.0 / self.n, dtype=torch.float64, device="cpu")
        return equal if self.weights is None else self.weights


class FiniteSum(ClientSum):
    r"""A mean over samples, $f_i(x) = \mean_j \text{loss}(x; \text{sample } j)$, with minibatches and exact sums.

    A subclass computes the loss of one weighted batch and its gradient.

    batch_size: samples drawn for each local step; None for the exact gradient.
    seed:       decides the minibatches, with client, round and step.
    weights:    n numbers summing to 1, None for equal weights, or "samples": every row of every client counts once.
    sample_weights: what each row counts in its client's mean; None where all count the same.
    minibatches: "replacement", or "reshuffle": a client goes through its rows in an order that is another one in every
                epoch, see `fednmap.problems.minibatch`.
    local_steps: of a round, for "reshuffle": epochs then continue from round to round. None: every round begins one.
    """

    first: int = 0
    """The number of client 0 in the whole federation; with the seed it decides whose minibatches these are."""

    def __init__(
        self,
        data: Pairs | Records,
        *,
        batch_size: int | None = None,
        seed: int = 0,
        weights: Weights = None,
        sample_weights: RowWeights = None,
        minibatches: str = "replacement",
        local_steps: int | None = None,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("local_steps", local_steps)):
            if value is not None and not (isinstance(value, Integral) and value >= 1):
                raise InputError(f"{name} is {value!r}; expected a whole number of at least 1, or None")
        given = cast(ClientData, data) if isinstance(data, Records) else ClientData.of(data)  # they offer the same
        super().__init__(given, weights, row_weights(sample_weights, given))
        self.batch_size, self.seed = batch_size, seed
        self.minibatches, self.local_steps = minibatches, local_steps
        reshuffled = partial(reshuffled_numbers, local_steps=local_steps)
        rules: dict[str, Draw] = {REPLACEMENT: sample_numbers, RESHUFFLE: reshuffled}
        self._draw = choose("minibatches", minibatches, rules)
        self._row_bytes = given.row_bytes
        self._shares = row_shares(self.data.sizes, self._counts)

    @property
    def chunk(self) -> int:
        """Clients computed in one call: as many as have their vectors and minibatches in cache."""
        batch = self.batch_size or int(self.data.sizes.max())
        return max(1, SIDE_BY_SIDE_BYTES // (self.start.element_size() * self.dim + self._row_bytes * batch))

    @property
    def pieces(self) -> int:
        """Parts that the sums over all data are cut into: a rule, so that they add up to the same bits everywhere."""
        return min(MOST_PIECES, sum(1 for _ in self._chunks()))

    @property
    def steps_per_round(self) -> int | None:
        """Local steps of a round, from which epochs continue in the next one; None where any number will do."""
        return self.local_steps if self.minibatches == RESHUFFLE and self.batch_size is not None else None

    @property
    def exact_gradients(self) -> bool:
        return self.batch_size is None

    def info(self) -> ProblemInfo:
        computed: dict[str, Any] = {"chunk": self.chunk, "pieces": self.pieces, "steps_per_round": self.steps_per_round}
        return replace(super().info(), subsample=self.subsample, **computed)

    def made_of(self) -> dict[str, Any]:
        return {
            "batch_size": self.batch_size,
            "seed": self.seed,
            "weights": self.weights,
            "sample_weights": self._counts,
            "first": self.first,
            **({} if self.minibatches == REPLACEMENT else {RESHUFFLE: self.local_steps or 0}),
        }

    def exact(self) -> Self:
        return self._changed(batch_size=None)

    def subsample(self) -> Self:
        """Return the problem on fewer rows, evenly spaced ones of every client, if there are very many; else itself."""
        step = self.rows_at_once()
        if self.data.rows <= MANY * step or self._counts is not None:
            return self
        few = self.data.thinned(FEW * step)
        return self._changed(_shares=row_shares(few.sizes, None), data=few)

    def alone(self, i: int) -> Self:
        return super().alone(i)._changed(first=self.first + i, _shares=self._shares[self.data.rows_of(i)])

    @abstractmethod
    def batch_loss(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> Tensor:
        r"""Return $\sum_j w_j \, \text{loss}(x; a_j, b_j)$ at x (p,), for samples a (B, ...) and targets b (B, ...)."""

    @abstractmethod
    def batch_gradient(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> Tensor:
        """Return the gradient of `batch_loss`; with samples (k, B, ...) of k clients, at x (k, p) or a common x."""

    def batch_value_and_gradient(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
        """Return `batch_loss` and `batch_gradient` at one point; a problem overrides it where they share their work."""
        return self.batch_loss(x, a, b, weight), self.batch_gradient(x, a, b, weight)

    @abstractmethod
    def predict(self, x: Tensor, inputs: Tensor) -> Tensor:
        """Return what model x says about each input: a label, or a number in regression."""

    def oracle(self, clients: Tensor, t: int) -> Oracle:
        if self.batch_size is None:
            return self._exact(clients)
        block = blocks(
            self.seed, clients, t, self.batch_size, self.data.sizes, self.data.offsets, self.first, self._draw
        )
        equal, held = 1.0 / self.batch_size, self.data.sizes[clients.cpu()].unsqueeze(-1)
        once = BLOCK * clients.numel() * self.batch_size * self._row_bytes <= AT_ONCE_BYTES
        if once and self._counts is None and self.data.stackable:
            batch = by_step(lambda number: self._apart(block(number)))

            def small(x: Tensor, q: int) -> Samples:
                a, b = batch(q)
                return self._inputs(a, x), like(b, x), equal

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

    def value_and_gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return total(self.batch_value_and_gradient, x, self._everything(x))

    def _exact(self, clients: Tensor) -> Oracle:
        """Full local gradients: one client's by its rows; several clients' in one batch, the shorter ones padded."""
        step, kept = max(1, self.rows_at_once() // max(1, clients.numel())), list[Batch]()
        if clients.ndim:
            longest = int(self.data.sizes[clients.cpu()].max())
            parts = [partial(self._padded, clients, c, min(c + step, longest)) for c in range(0, longest, step)]
        else:
            parts = [partial(self._weighted_rows, rows) for rows in self.data.chunks_of(int(clients), step)]

        def g(x: Tensor, q: int) -> Tensor:
            if len(parts) > 1:
                return sum(self.batch_gradient(x, *part(x)) for part in parts)  # type: ignore[return-value]
            if not kept:  # fits: gathered once, used in all local steps
                kept.append(parts[0](x))
            return self.batch_gradient(x, *kept[0])

        return g

    def _weighted_rows(self, rows: slice, x: Tensor) -> Batch:
        """Consecutive rows of one client, each weighing what it counts in the client's mean."""
        return *self._read(rows, x), self._shares[rows].to(x)

    def _padded(self, clients: Tensor, first: int, end: int, x: Tensor) -> Batch:
        """Samples first .. end - 1 of each client; where it has fewer, its last one with weight 0."""
        sizes, offsets = (v[clients.cpu()].unsqueeze(-1) for v in (self.data.sizes, self.data.offsets))
        j = torch.arange(first, end, device="cpu")
        rows = offsets + torch.minimum(j, sizes - 1)
        return *self._gather(rows, x), ((j < sizes) * self._shares[rows]).to(x)

    def _everything(self, x: Tensor) -> Iterator[Batch]:
        """All samples in chunks, each weighing what it contributes to f."""
        weights = self._row_weights(x)
        rank, ranks = self._part
        for rows in islice(self._chunks(), rank, None, ranks):
            yield *self._read(rows, x), weights[rows]

    def _row_weights(self, like: Tensor) -> Tensor:
        """What each row contributes to f."""
        return (torch.repeat_interleave(self._client_weights(), self.data.sizes) * self._shares).to(like)

    def _chunks(self) -> Iterator[slice]:
        """Rows gone through together."""
        return self.data.chunks(self.rows_at_once())

    def _gather(self, rows: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The samples in these rows."""
        return self._read(rows, x)

    def _read(self, rows: Tensor | slice, x: Tensor) -> tuple[Tensor, Tensor]:
        """The samples in these rows, as they enter the model x, and their targets."""
        a, b = self.data.batch(rows)
        return self._inputs(a, x), like(b, x)

    def _inputs(self, a: Tensor, x: Tensor) -> Tensor:
        """Samples as they enter the model x."""
        return like(a, x)

    def _apart(self, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The samples in rows (steps, ...), step by step, as precise as they are: x may be more so than the start."""
        real = [v for v in (self.start, self.data.x, self.data.y) if v.is_floating_point()]
        a, b = self._gather(rows, max(real, key=lambda v: v.element_size()))
        return list(zip(a.unbind(), b.unbind(), strict=True))

    def rows_at_once(self) -> int:
        """Return the number of rows in a batch of a pass over all data."""
        return max(1, CHUNK_BYTES // self._row_bytes)


def total(
    value_and_gradient: Callable[..., tuple[Tensor, Tensor]], x: Tensor, batches: Iterable[Batch]
) -> tuple[Tensor, Tensor]:
    """Sums over batches of values and gradients at x."""
    loss, gradient = x.new_zeros(()), torch.zeros_like(x)
    for batch in batches:
        value, slope = value_and_gradient(x, *batch)
        loss = loss + value
        gradient += slope
    return loss, gradient


def like(values: Tensor, x: Tensor) -> Tensor:
    """Real values in x's dtype, labels as they are; both on x's device."""
    dtype = x.dtype if values.is_floating_point() else values.dtype
    return values if values.dtype == dtype and values.device == x.device else values.to(x.device, dtype)


def client_weights(weights: Weights, sizes: Tensor, rows: Tensor | None) -> Tensor | None:
    """Return what each client's mean weighs in f; None for equal weights.

    rows: the weights of the rows, if they have any.
    """
    if weights is None:
        return None
    n = len(sizes)
    if isinstance(weights, str):
        if weights != "samples":
            raise InputError(f'weights is {weights!r}; give "samples", {n} numbers that sum to 1, or None')
        total = sizes.double() if rows is None else per_client(rows, sizes)
        return total / total.sum()
    w = torch.as_tensor(weights, dtype=torch.float64, device="cpu")
    if w.shape != (n,) or bool((w < 0).any()) or abs(float(w.sum()) - 1) > 1e-6:
        raise InputError(
            f"weights must be {n} numbers >= 0 that sum to 1, given {tuple(w.shape)} summing to {float(w.sum()):g}"
        )
    return w / w.sum()


def row_weights(given: RowWeights, data: ClientData) -> Tensor | None:
    """Return the weights of all rows as one vector on the CPU, checked; None where rows count the same."""
    if given is None:
        return None
    parts = [given] if isinstance(given, Tensor) else [tensor("sample_weights", part) for part in given]
    if len(parts) > 1 and [len(part) for part in parts] != data.sizes.tolist():
        raise InputError("sample_weights must hold one number per row of every client; their lengths differ")
    w = torch.cat([part.reshape(-1) for part in parts]).to("cpu", torch.float64)
    if len(w) != data.rows or not bool((torch.isfinite(w) & (w >= 0)).all()) or not bool((w > 0).any()):
        raise InputError(
            f"sample_weights must be {data.rows} finite numbers >= 0, one per row and not all 0, given {len(w)}"
        )
    return w


def row_shares(sizes: Tensor, rows: Tensor | None) -> Tensor:
    """What each row counts in its client's mean: they sum to 1 over a client, to 0 where all its rows weigh nothing."""
    if rows is None:
        return torch.repeat_interleave(1 / sizes.double(), sizes)
    total = torch.repeat_interleave(per_client(rows, sizes), sizes)
    return torch.where(total > 0, rows / total, 0.0)


def per_client(rows: Tensor, sizes: Tensor) -> Tensor:
    """Sums over each client's rows."""
    client = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), sizes)
    return torch.zeros(len(sizes), dtype=rows.dtype, device="cpu").index_add_(0, client, rows)
