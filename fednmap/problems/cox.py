"""Cox's model of survival times, each client a stratum with its own baseline hazard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fednmap.core import Oracle, ProblemInfo
from fednmap.data.clients import ClientData, Pairs
from fednmap.data.sparse import is_sparse, numbers, take
from fednmap.names import InputError
from fednmap.problems.curvature import client_hessians, largest_eigenvalue
from fednmap.problems.design import Design, design_of
from fednmap.problems.finite_sum import ClientSum, RowWeights, Weights, row_weights

TIES = ("efron", "breslow")


class Cox(ClientSum):
    r"""Cox regression: $f_i$ is the negative log partial likelihood of client i, divided by its rows $m_i$.

    With times $t_j$, events in {0, 1} and features $a_j$, by Breslow's rule $m_i f_i$ is

    $$\sum_{j \text{ with event}} \log \sum_{k: t_k \ge t_j} e^{\langle a_k, x \rangle} - \langle a_j, x \rangle$$

    By Efron's, in the inner sum of the l-th of d tied events (from 0) the tied ones count $1 - l / d$.

    data:    for each client a pair (features (m, d), targets (m, 2)): time and event of each row. A third column is
             the start of the row's time at risk, so that it is only in later risk sets, up to its time; a
             fourth one is a stratum, and only rows of one stratum are compared with each other.
    weights: of the clients in f; "samples" makes f the whole log likelihood over all rows, divided by their number.
    sample_weights: what each row counts, in its own term and in the sums over risk sets: by Breslow's rule 2 is two
             equal rows; by Efron's the terms of tied events weigh what these weigh on average, as in R's survival.

    events_elsewhere: these are some of the clients of a federation; they may all lack events, and f is then 0.

    The risk sets stay within a client, so that f is a sum over clients, and a joint fit is exact: it is the stratified
    model on pooled data. A row's term depends on other rows: there are no minibatches. Sums are taken in float64, by
    logarithms, so that large scores do not overflow.

    References: Cox, Regression models and life-tables, 1972; Efron, The efficiency of Cox's likelihood function for
    censored data, 1977.

    >>> features, targets = torch.tensor([[1.0], [0.0]]), torch.tensor([[2.0, 1.0], [3.0, 0.0]])
    >>> Cox([(features, targets)]).gradient(torch.zeros(1))
    tensor([-0.2500])
    """

    def __init__(
        self,
        data: Pairs,
        *,
        ties: str = "efron",
        weights: Weights = "samples",
        sample_weights: RowWeights = None,
        events_elsewhere: bool = False,
    ) -> None:
        if ties not in TIES:
            raise InputError(f"ties is {ties!r}; choose from {', '.join(TIES)}")
        given = ClientData.of(data)
        counts = row_weights(sample_weights, given)
        if counts is not None and not bool((counts > 0).all()):
            raise InputError("sample_weights holds a 0; leave such rows out of a Cox model, in which rows are compared")
        sorted_data, order, self._pieces = _by_time(given, events_elsewhere)
        super().__init__(sorted_data, weights, None if counts is None else counts[order.cpu()])
        self.ties, self.dim = ties, self.data.x.shape[1]
        self.start = numbers(self.data.x).new_zeros(self.dim)
        one = torch.ones(len(order), dtype=torch.float64, device="cpu") if self._counts is None else self._counts
        each = one.to(self.data.y.device).split(self.data.sizes.tolist())
        self._strata = [
            [_Strata.of(part, ties, w) for part, w in zip(y.split(sizes), weight.split(sizes), strict=True)]
            for (_, y), weight, sizes in zip(self.data, each, self._pieces, strict=True)
        ]
        self._designs: dict[int, Design] = {}

    def info(self) -> ProblemInfo:
        hessians = partial(client_hessians, self)
        return replace(super().info(), smoothness=self.smoothness, hessian=self.hessian, hessians=hessians)

    def made_of(self) -> dict[str, Any]:
        made = {"ties": self.ties, "weights": self.weights}
        return made if self._counts is None else made | {"sample_weights": self._counts}

    def alone(self, i: int) -> Self:
        return super().alone(i)._changed(_strata=[self._strata[i]], _pieces=[self._pieces[i]], _designs={})

    def oracle(self, clients: Tensor, t: int) -> Oracle:
        ids = clients.reshape(-1).tolist()

        def g(x: Tensor, q: int) -> Tensor:
            each = self._client(ids, x.expand(len(ids), -1))[1]
            return torch.stack(each) if clients.ndim else each[0]

        return g

    def value_and_gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        ids = self._mine()
        losses, gradients = self._client(ids, x.expand(len(ids), -1))
        weights = self._client_weights()[ids].to(x)
        loss = sum((w * v for w, v in zip(weights, losses, strict=True)), start=x.new_zeros(()))
        return loss, sum((w * v for w, v in zip(weights, gradients, strict=True)), start=torch.zeros_like(x))

    def gradients(self, points: Tensor) -> Tensor:
        """Return the gradients of f at several points (k, dim)."""
        return torch.stack([self.gradient(x) for x in points])

    def losses(self, points: Tensor) -> Tensor:
        """Return f at several points (k, dim)."""
        return torch.stack([self.loss(x) for x in points])

    def client_losses(self, x: Tensor) -> Tensor:
        """Return f_i of every client, (n,)."""
        return torch.stack(self._client(list(range(self.n)), x.expand(self.n, -1))[0])

    def hessian(self, x: Tensor) -> Tensor:
        """Return the Hessian of f at x, (p, p): a sum over clients, as the gradient is."""
        total = x.new_zeros(self.dim, self.dim, dtype=torch.float64)
        for i in self._mine():
            rows = _dense(self.data[i][0]).double().split(self._pieces[i])
            spread = sum(_spread(a, a @ x.double(), s) for a, s in zip(rows, self._strata[i], strict=True))
            total += self._client_weights()[i] / self._total(i) * spread
        return total.to(x)

    def smoothness(self, x: Tensor | None = None) -> float:
        """Return the largest Hessian eigenvalue of f at x (default: the start), from differences of gradients."""
        x = (self.start if x is None else x).double()
        e = 1e-5 * max(1.0, float(x.norm()))
        return largest_eigenvalue(
            lambda v: (self.gradient(x + e * v) - self.gradient(x - e * v)) / (2 * e), x, tolerance=1e-2
        )

    def predict(self, x: Tensor, inputs: Tensor) -> Tensor:
        """Return the logarithm of each input's hazard relative to its stratum's baseline."""
        return inputs.to(x.dtype) @ x

    def baseline(self, x: Tensor, i: int, stratum: int = 0) -> tuple[Tensor, Tensor]:
        """Return client i's event times, ascending, and its baseline cumulative hazard after each, in one stratum.

        The survival curve of a row a in that stratum is exp(-hazard exp<a, x>).
        """
        sizes, s = self._pieces[i], self._strata[i][stratum]
        eta = self._design(i, torch.float64).times(x.double()).split(sizes)[stratum]
        happened = s.event > 0
        moments = self.data[i][1][:, 0].split(sizes)[stratum]
        times, place = torch.unique(moments[happened], return_inverse=True)
        steps = torch.zeros(len(times), dtype=torch.float64, device=times.device)
        return times, steps.index_add_(0, place, torch.exp(_hazards(eta, s)[happened])).cumsum(0)

    def change_in_time(self, x: Tensor, g: Callable[[Tensor], Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return score and information, sums over events, of coefficients $x + c g(t)$ at $c = 0$.

        These are the sum of g (a - mean) and those of 1, g and $g^2$ times the variance. Mean and variance are of the
        features over the risk set, weighted by hazards.
        """
        score = x.new_zeros(self.dim, dtype=torch.float64)
        sums = [x.new_zeros(self.dim, self.dim, dtype=torch.float64) for _ in range(3)]
        for i in self._mine():
            x_i, y_i = self.data[i]
            parts = zip(*(v.split(self._pieces[i]) for v in (_dense(x_i).double(), y_i)), self._strata[i], strict=True)
            for a, y, s in parts:
                eta, value = a @ x.double(), torch.where(s.event > 0, g(y[:, 0]), 0.0)
                for power in range(3):  # of weights that are positive: the sums are linear in them
                    by = value**power
                    least = by.min() - 1
                    shifted = s._replace(mean=s.mean * (by - least))
                    sums[power] += _spread(a, eta, shifted) + least * _spread(a, eta, s)
                    if power == 1:
                        each = _partial(eta, shifted)[1] + least * _partial(eta, s)[1]
                        own = s.weight * s.event * (1 + least)  # what `_partial` counts once for an event
                        score += a.mT @ (s.weight * s.event * by - each - own)
        return score, sums

    def strata(self, i: int) -> list[float]:
        """Return the strata of client i, in the order of `baseline`; one is 0."""
        y = self.data[i][1]
        return torch.unique(y[:, 3]).tolist() if y.shape[1] > 3 else [0.0]

    def _total(self, i: int) -> float:
        """What the rows of client i count."""
        return float(sum(s.weight.sum() for s in self._strata[i]))

    def _mine(self) -> list[int]:
        rank, ranks = self._part
        return list(range(rank, self.n, ranks))

    def _client(self, ids: list[int], points: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """f_i and its gradient at a point for each, for these clients; those of like size are computed together."""
        rows = [self._design(i, points.dtype) for i in ids]
        scores = [part for a, x, i in zip(rows, points, ids, strict=True) for part in a.times(x).split(self._pieces[i])]
        strata = [s for i in ids for s in self._strata[i]]
        values, residuals = [points.new_zeros(())] * len(scores), list(scores)
        for group in _of_like_size([len(part) for part in scores]):
            eta = pad_sequence([scores[k] for k in group], batch_first=True, padding_value=-torch.inf).double()
            for k, value, residual in zip(
                group, *_partial(eta, _Strata.together([strata[k] for k in group])), strict=True
            ):
                values[k], residuals[k] = value, residual[: len(scores[k])]
        losses: list[Tensor] = []
        gradients: list[Tensor] = []
        end = 0
        for a, i in zip(rows, ids, strict=True):
            mine, end = slice(end, end + len(self._pieces[i])), end + len(self._pieces[i])
            total = self._total(i)
            losses.append((-torch.stack(values[mine]).sum() / total).to(points))
            gradients.append(a.transposed((torch.cat(residuals[mine]) / total).to(points)))
        return losses, gradients

    def _design(self, i: int, dtype: torch.dtype) -> Design:
        """Client i's rows to compute with, kept for the next round."""
        if dtype != self.start.dtype:
            return design_of(self.data[i][0], self.data[i][1].shape[:1], dtype)
        if i not in self._designs:
            self._designs[i] = design_of(self.data[i][0], self.data[i][1].shape[:1], dtype)
        return self._designs[i]


class _Strata(NamedTuple):
    """Rows from the last time to the first: of one client (m,), of k (k, m), padded with rows that count nothing."""

    event: Tensor
    """1 where the event happened, 0 where the row was censored."""
    first: Tensor
    """The first row with the same time."""
    last: Tensor
    """The last row with the same time: up to it goes the risk set."""
    share: Tensor
    """l / d of Efron's correction at events, 0 elsewhere and for Breslow."""
    weight: Tensor
    """What each row counts."""
    mean: Tensor
    """What the events of the same time count on average, at events; 1 elsewhere."""
    order: Tensor | None = None
    """Rows from the last start to the first; None where all are at risk from the beginning."""
    later: Tensor | None = None
    """How many of these start at the row's time or later."""
    begin: Tensor | None = None
    """How many rows have a time after the row's start."""

    @classmethod
    def of(cls, targets: Tensor, ties: str, weight: Tensor) -> _Strata:
        time, event = targets[:, 0].contiguous(), targets[:, 1].double()
        _, group, counts = torch.unique_consecutive(time, return_inverse=True, return_counts=True)
        ends = counts.cumsum(0)
        before = event.cumsum(0) - event
        first, last = (ends - counts)[group], (ends - 1)[group]
        place = before - before[first]  # how many events of this time come before
        many = torch.zeros(len(counts), dtype=torch.float64, device=time.device).index_add_(0, group, event)[group]
        share = event * place / many.clamp_min(1) if ties == "efron" else torch.zeros_like(event)
        sums = torch.zeros(len(counts), dtype=torch.float64, device=time.device).index_add_(0, group, weight * event)
        mean = torch.where(event > 0, sums[group] / many.clamp_min(1), 1.0)
        known = cls(event, first, last, share, weight, mean)
        if targets.shape[1] < 3:
            return known
        start, order = targets[:, 2].sort(descending=True)
        begin = torch.searchsorted(-time, -targets[:, 2].contiguous())
        return known._replace(order=order, later=torch.searchsorted(-start, -time, right=True), begin=begin)

    @classmethod
    def together(cls, strata: list[_Strata]) -> _Strata:
        columns: dict[str, Any] = {name: list(rows) for name, *rows in zip(cls._fields, *strata, strict=True)}
        for name, rows in columns.items():
            fill = 1.0 if name in ("weight", "mean") else 0.0
            columns[name] = None if rows[0] is None else pad_sequence(rows, batch_first=True, padding_value=fill)
        return cls(**columns)

    def logarithm_at_risk(self, eta: Tensor) -> Tensor:
        """log of the sum of exp(eta) over each row's risk set."""
        found = torch.logcumsumexp(eta, -1).gather(-1, self.last)
        if self.order is None or self.later is None:
            return found
        not_yet = _from_nothing(torch.logcumsumexp(eta.gather(-1, self.order), -1), -torch.inf).gather(-1, self.later)
        tied = found + torch.log(self.tied(torch.exp(eta - found)))  # at risk, whatever rounding says
        return torch.maximum(torch.maximum(_less(found, not_yet), tied), eta)

    def at_risk(self, values: Tensor) -> Tensor:
        """The sum of `values` (m, d) over each row's risk set."""
        found = values.cumsum(0)[self.last]
        if self.order is None or self.later is None:
            return found
        return found - _from_nothing(values[self.order].cumsum(0).mT, 0.0).mT[self.later]

    def logarithm_until(self, hazard: Tensor) -> Tensor:
        """log of the sum of exp(hazard), by rows, over the times at which each row is at risk."""
        past = torch.logcumsumexp(hazard.flip(-1), -1).flip(-1)  # of this row's time and before
        found = past.gather(-1, self.first)
        if self.begin is None:
            return found
        before = _from_nothing(past.flip(-1), -torch.inf).flip(-1).gather(-1, self.begin)
        return _less(found, before)

    def tied(self, values: Tensor) -> Tensor:
        """The sum of `values` (..., m) over the rows with the same time."""
        last = self.last.expand(values.shape)
        return torch.zeros_like(values).scatter_add_(-1, last, values).gather(-1, last)


def _hazards(eta: Tensor, s: _Strata) -> Tensor:
    """log(its weight / the sum over its risk set), by events; -inf elsewhere."""
    risk, left, _ = _risks(eta, s)
    return torch.where(s.event > 0, torch.log(s.mean) - risk - torch.log(left), -torch.inf)


def _risks(eta: Tensor, s: _Strata) -> tuple[Tensor, Tensor, Tensor]:
    """log R of each row's risk set; what Efron leaves of R, as a share; weight exp(eta) / R."""
    eta = eta + torch.log(s.weight)
    risk = s.logarithm_at_risk(eta)
    relative = torch.exp(eta - risk)
    return risk, 1 - s.share * s.tied(s.event * relative), relative


def _partial(eta: Tensor, s: _Strata) -> tuple[Tensor, Tensor]:
    """The log partial likelihood of each stratum (k,), and its negative derivative with respect to eta (k, m)."""
    risk, left, relative = _risks(eta, s)
    each = -risk - torch.log(left)
    hazard = torch.where(s.event > 0, torch.log(s.mean) + each, -torch.inf)
    likelihood = torch.where(s.event > 0, s.weight * eta + s.mean * each, 0.0).sum(-1)
    cumulative = s.logarithm_until(hazard)
    expected = s.weight * torch.exp(eta + cumulative) - s.event * relative * s.tied(s.mean * s.share / left)
    return likelihood, expected - s.weight * s.event


def _spread(a: Tensor, eta: Tensor, s: _Strata) -> Tensor:
    """The Hessian of minus the log partial likelihood of a stratum with features a and scores eta."""
    expected = _partial(eta, s)[1] + s.weight * s.event
    w = s.weight * torch.exp(eta - eta.max())
    risk = s.at_risk(w[:, None])[:, 0] - s.share * s.tied(s.event * w)
    sums = s.at_risk(w[:, None] * a) - s.share[:, None] * s.tied(((s.event * w)[:, None] * a).mT).mT
    means = (sums / risk[:, None])[s.event > 0]
    return a.mT @ (expected[:, None] * a) - means.mT @ (s.mean[s.event > 0][:, None] * means)


def _from_nothing(sums: Tensor, zero: float) -> Tensor:
    """Cumulative sums with that of nothing before them."""
    return torch.cat([torch.full_like(sums[..., :1], zero), sums], -1)


def _less(a: Tensor, b: Tensor) -> Tensor:
    """log(exp(a) - exp(b)) for b <= a, to rounding; -inf where both are."""
    return a + torch.log1p(-torch.exp(b - a).nan_to_num(0.0).clamp(max=1.0))


def _dense(x: Tensor) -> Tensor:
    """A client's rows, dense."""
    return x.to_dense() if is_sparse(x) else x


def coarse(times: Any) -> Any:
    """Return times in float64, rounded to 40 bits: 0.1 + 0.2 and 0.3 are one time, as in R's survival.

    >>> coarse(0.1 + 0.2) == coarse(0.3)
    True
    """
    large = (2.0**13 + 1) * times  # Veltkamp's splitting
    return large - (large - times)


def same_times(times: Any) -> Any:
    """Return an array of times with the first one in place of all that are it but for rounding."""
    _, first, place = np.unique(coarse(times), return_index=True, return_inverse=True)
    return times.ravel()[first[place]].reshape(times.shape)


def _by_time(data: ClientData, events_elsewhere: bool) -> tuple[ClientData, Tensor, list[list[int]]]:
    """The rows of each client by stratum, from the last time to the first, where they were, and the sizes of strata;
    other tables are refused."""
    x, y = data.x, data.y
    if x.ndim != 2:
        raise InputError(f"x has shape {tuple(x.shape)}; give one row of features per sample, shape (N, features)")
    if y.ndim != 2 or y.shape[1] not in (2, 3, 4):
        raise InputError(f"y has shape {tuple(y.shape)}; Cox needs a time and an event (0 or 1) per row, shape (N, 2)")
    if y.dtype == torch.float64:
        y, columns = y.clone(), [0, 2][: y.shape[1] - 1]
        for target in y.split(data.sizes.tolist()):
            target[:, columns] = torch.from_numpy(same_times(target[:, columns].cpu().numpy())).to(y)
    if y.shape[1] > 2 and bool((y[:, 2] >= y[:, 0]).any()):
        row = int((y[:, 2] >= y[:, 0]).nonzero()[0])
        raise InputError(f"expected start < time, got {float(y[row, 2]):g} and {float(y[row, 0]):g} in row {row}")
    wrong = ((y[:, 1] != 0) & (y[:, 1] != 1)).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise InputError(f"the event in row {row} is {float(y[row, 1]):g}; give 1 where it happened, 0 where censored")
    if not events_elsewhere and not bool((y[:, 1] == 1).any()):
        raise InputError("no event happened: every row is censored, and nothing can be learnt; give data with events")
    x = x if is_sparse(x) or x.is_floating_point() else x.to(torch.get_default_dtype())
    order, pieces = [], []
    for start, target in zip(data.offsets.tolist(), y.split(data.sizes.tolist()), strict=True):
        place = torch.argsort(target[:, 0], descending=True, stable=True)
        if y.shape[1] > 3:
            place = place[torch.argsort(target[place, 3], stable=True)]
        order.append(start + place.cpu())
        strata = target[:, 3] if y.shape[1] > 3 else torch.zeros(len(target))
        pieces.append(torch.unique(strata, return_counts=True)[1].tolist())
    rows = torch.cat(order).to(x.device)
    return ClientData(take(x, rows), y[rows], data.sizes), rows, pieces


def _of_like_size(sizes: list[int]) -> list[list[int]]:
    """Positions, in order, in groups whose padding is at most as long as their rows."""
    groups: list[list[int]] = []
    longest = total = 0
    for k, size in enumerate(sizes):
        longest, total = max(longest, size), total + size
        if not groups or len(groups[-1] + [k]) * longest > 2 * total:
            groups.append([])
            longest = total = size
        groups[-1].append(k)
    return groups
