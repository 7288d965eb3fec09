"""Generalised linear models: scores that are linear in the features, and a family that says what they cost."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, Self, Unpack

import torch
from torch import Tensor
from torch.nn.functional import pad

from fednmap.core import Oracle, ProblemInfo
from fednmap.data.clients import ClientData, Pairs
from fednmap.data.sparse import is_sparse, stacked, take
from fednmap.names import InputError, choose
from fednmap.problems.curvature import client_hessians, largest_eigenvalue
from fednmap.problems.design import Design, design_of
from fednmap.problems.families import FAMILIES, Bernoulli, Family, Gaussian, Multinomial, Ordinal, labels
from fednmap.problems.finite_sum import FiniteSum, Options, Weight, per_client

SMALL_BYTES = 64 << 10  # clients with less data than this on average are computed in one batch, padded to one length
PIECE_BYTES = 2 << 20  # of rows that are gone through together for gradients at several points
SPARSE_BYTES = 256 << 10  # of their outputs, if the rows are sparse: a few such tables must be small compared with them
KEPT_BYTES = 16 << 20  # of padded copies of small clients that a problem keeps between rounds


Prepared = tuple[Design, Tensor, Tensor]
"""Rows to compute with, their targets, and what each weighs."""


class GLM(FiniteSum):
    r"""A generalised linear model, $f_i(x) = \mean_j \text{loss}(\eta_j, y_j)$, $\eta_j = \langle a_j, w \rangle + c$.

    x holds the coefficients w, then the intercept c.

    family:    what a row costs: a `Family`, or its name: gaussian, logistic, multinomial, poisson, binomial, gamma,
               negative-binomial, ordinal, huber, scaled-huber.
               With K scores per row (multinomial) w is K vectors one after another, and c is K numbers.
    intercept: whether there is c; it comes after the coefficients: a regularizer on `coefficients` leaves it alone.
    weights:   of the clients in f; "samples" makes f the mean over all rows of all clients.
    sample_weights: what each row counts in its client's mean (by "samples": in f).
    offset:    whether y has a second column, a known part of eta.
    batch_size: None for exact gradients; seed, minibatches, local_steps: how samples are drawn, see `FiniteSum`.

    Numbers that a family estimates once for all rows, such as a scale, come last in x.

    >>> problem = GLM([(torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 2.0]))], "gaussian", intercept=True)
    >>> problem.coefficients, problem.intercepts
    (slice(0, 1, None), slice(1, 2, None))
    >>> problem.gradient(torch.tensor([1.0, 1.0]))
    tensor([1.5000, 1.0000])
    """

    def __init__(
        self,
        data: Pairs,
        family: Family | str,
        *,
        intercept: bool = False,
        offset: bool = False,
        **options: Unpack[Options],
    ) -> None:
        rows = samples(data, 1 + offset)
        given = rows.y[:, 0] if offset else rows.y
        self.family, self.offset = _family(family, given) if isinstance(family, str) else family, offset
        y = self.family.targets(given, rows.x.dtype)
        if offset:
            y = torch.stack([y.to(rows.x.dtype), rows.y[:, 1].to(rows.x.dtype)], 1)
        super().__init__(rows if y is rows.y else ClientData(rows.x, y, rows.sizes), **options)
        self.features = self.data.x.shape[1:].numel()
        self.intercept = intercept
        self._scores = self.family.outputs - self.family.constants
        if offset and self._scores > 1:
            raise InputError(f"expected a family with one score for an offset, got {self.family.name}; leave it out")
        end = self._scores * self.features
        after = end + self._scores * intercept
        self.dim = after + self.family.constants
        self.coefficients, self.intercepts, self.constants = slice(0, end), slice(end, after), slice(after, self.dim)
        zeros = torch.zeros(after, dtype=self.data.x.dtype, device=self.data.x.device)
        self.start = torch.cat([zeros, self.family.start(zeros)])
        self._plain = self.family.outputs == 1 and not intercept  # x is what the rows are multiplied with
        self._offsets_of = self.dim - end  # the last outputs, to which a number of x is added
        self._small: dict[tuple[tuple[int, ...], torch.dtype], Prepared] = {}
        self._cut: dict[tuple[int, torch.dtype], list[Prepared]] = {}

    def info(self) -> ProblemInfo:
        hessians = partial(client_hessians, self)
        return replace(super().info(), smoothness=self.smoothness, hessian=self.hessian, hessians=hessians)

    def made_of(self) -> dict[str, Any]:
        made = {"family": self.family, "intercept": self.intercept} | ({"offset": True} if self.offset else {})
        return super().made_of() | made

    def _changed(self, **fields: Any) -> Self:
        return super()._changed(_small={}, _cut={}, **fields)

    def scores(self, x: Tensor, inputs: Tensor) -> Tensor:
        """Return eta of each input, and the family's constants if it has any."""
        return self._outputs(x, design_of(inputs, inputs.shape[:1], x.dtype))

    def mean(self, x: Tensor, inputs: Tensor) -> Tensor:
        """Return the expected target of each input; for labels their probabilities."""
        return self.family.mean(self.scores(x, inputs))

    def predict(self, x: Tensor, inputs: Tensor) -> Tensor:
        return self.family.predict(self.scores(x, inputs))

    def batch_loss(self, x: Tensor, a: Tensor | Design, b: Tensor, weight: Weight) -> Tensor:
        return (weight * self.family.loss(*self._at(x, self._rows(a, b, x.dtype), b))).sum(-1)

    def batch_gradient(self, x: Tensor, a: Tensor | Design, b: Tensor, weight: Weight) -> Tensor:
        return self._gradient(x, self._rows(a, b, x.dtype), b, weight)

    def _gradient(self, x: Tensor, a: Design, b: Tensor, weight: Weight) -> Tensor:
        return self._back(self._weighted(weight, self.family.slope(*self._at(x, a, b))), a)

    def batch_value_and_gradient(
        self, x: Tensor, a: Tensor | Design, b: Tensor, weight: Weight
    ) -> tuple[Tensor, Tensor]:
        design = self._rows(a, b, x.dtype)
        loss, slope = self.family.loss_and_slope(*self._at(x, design, b))
        return (weight * loss).sum(-1), self._back(self._weighted(weight, slope), design)

    def smoothness(self, x: Tensor | None = None) -> float:
        """Return L of f, the largest eigenvalue of its Hessian: anywhere if the family's curvature is bounded, or at x.

        By products with the features alone, a few dozen passes over the data; within a thousandth. x: default the
        start.
        """
        x = self.start if x is None else x
        bound = self.family.bound
        batches = []
        for a, b, weight in self._everything(x):
            design = self._rows(a, b, x.dtype)
            curve = None if bound is not None else self.family.curvature(*self._at(x, design, b))
            batches.append((design, weight, curve))

        def product(v: Tensor) -> Tensor:
            total = torch.zeros_like(v)
            for design, weight, curve in batches:
                total += self._back(self._weighted(weight, _times(curve, bound, self._outputs(v, design))), design)
            return total

        return largest_eigenvalue(product, x)

    def gradients(self, points: Tensor) -> Tensor:
        """Return gradients of f at several points (k, dim), in one pass; not for families with constants."""
        if len(points) == 1:
            return sum(
                (self.batch_gradient(points[0], *piece) for piece in self._pieces(1, points.dtype)),
                start=torch.zeros_like(points[0]),
            )[None]
        total = torch.zeros_like(points)
        w, c = total[:, self.coefficients], total[:, self.intercepts]
        for design, b, weight in self._pieces(len(points), points.dtype):
            eta = self._outputs_each(points, design)
            slope = self.family.slope(*self._known(eta, self._at_each(b, eta)))
            slope = slope.mul_(weight.reshape(-1, *[1] * (eta.ndim - 1))).flatten(1)
            w += design.transposed_each(slope).reshape(w.shape)
            if self.intercept:
                c += slope.sum(0).reshape(c.shape)
        return total

    def losses(self, points: Tensor) -> Tensor:
        """Return f at several points (k, dim), in one pass over the rows; not for families with constants."""
        total = points.new_zeros(len(points))
        for design, b, weight in self._pieces(len(points), points.dtype):
            eta = self._outputs_each(points, design)
            total += weight @ self.family.loss(*self._known(eta, self._at_each(b, eta)))
        return total

    def client_losses(self, x: Tensor) -> Tensor:
        """Return f_i of every client, (n,)."""
        each = [self.family.loss(*self._at(x, design, b)).double() for design, b, _ in self._pieces(1, x.dtype)]
        return per_client(self._shares * torch.cat(each).cpu(), self.data.sizes)

    def _rows(self, a: Tensor | Design, b: Tensor, dtype: torch.dtype) -> Design:
        """The rows a with the targets b, to compute with."""
        return design_of(a, b.shape[: b.ndim - self.offset], dtype)

    def _at_each(self, b: Tensor, eta: Tensor) -> Tensor:
        """The targets b of rows at each of k points, (B, k) or with several columns (B, k, columns)."""
        return b.unsqueeze(1).expand(*eta.shape[:2], *b.shape[1:])

    def _outputs_each(self, points: Tensor, a: Design) -> Tensor:
        """The outputs at points (k, dim): (B, k), with K of them (B, k, K)."""
        k, each = len(points), self.family.outputs
        eta = a.times_each(points[:, self.coefficients].reshape(k * each, -1))
        eta = eta if each == 1 else eta.reshape(-1, k, each)
        return eta + points[:, self.intercepts].reshape(eta.shape[1:]) if self.intercept else eta

    def _pieces(self, points: int, dtype: torch.dtype) -> list[Prepared]:
        """All rows, cut so that a piece and its outputs at so many points stay in cache; kept for the next round."""
        of_outputs = points * self.family.outputs * self.data.x.element_size()
        most = SPARSE_BYTES if is_sparse(self.data.x) else PIECE_BYTES
        step = max(64, min(PIECE_BYTES // self._row_bytes, most // of_outputs))
        kept = self._cut.get((step, dtype))
        if kept is None:
            cuts = [slice(first, first + step) for first in range(0, len(self.data.x), step)]
            weights = self._row_weights(self.data.x.new_empty((), dtype=dtype, layout=torch.strided))
            kept = [self._prepared(rows, weights, dtype) for rows in cuts]
            self._cut = {(step, dtype): kept}
        return kept

    def hessian(self, x: Tensor) -> Tensor:
        """Return the Hessian of f at x, (p, p): a sum over clients, as the gradient is."""
        return self._sum_of_squares(x, lambda eta, b, weight: _per_row(weight, self.family.curvature(eta, b)))

    def information(self, x: Tensor) -> Tensor:
        """Return the expected Hessian of f at x, (p, p), as Fisher scoring has it."""
        return self._sum_of_squares(x, lambda eta, b, weight: _per_row(weight, self.family.information(eta, b)))

    def pearson(self, x: Tensor) -> float:
        """Return the mean of the rows' squared Pearson residuals, weighted as in f."""
        parts = ((weight, self._at(x, self._rows(a, b, x.dtype), b)) for a, b, weight in self._everything(x))
        return sum(float(weight @ self.family.pearson(*at)) for weight, at in parts)

    def outer(self, x: Tensor, copies: float | None = None) -> Tensor:
        """Return the sum over rows of g_j g_j', (p, p), where the g_j sum to the gradient of f: how much rows disagree.

        copies: the number of rows if a row that weighs twice as much as another one stands for two of them.
        """

        def squares(eta: Tensor, b: Tensor, weight: Tensor) -> Tensor:
            slope = self.family.slope(eta, b).reshape(len(b), self.family.outputs)
            square = weight.square() if copies is None else weight / copies
            return _per_row(square, slope.unsqueeze(-1) * slope.unsqueeze(-2))

        return self._sum_of_squares(x, squares)

    def _sum_of_squares(self, x: Tensor, inside: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """The sum over rows of J_j' M_j J_j, for M_j = inside (K, K) of the outputs and their derivative J_j by x."""
        outputs, d = self.family.outputs, self.features
        total = x.new_zeros(outputs, d + 1, outputs, d + 1)  # as if every output had coefficients and an intercept
        for a, b, weight in self._everything(x):
            design = self._rows(a, b, x.dtype)
            curve = inside(*self._at(x, design, b), weight).reshape(len(b), outputs, outputs)
            for i in range(outputs):
                for j in range(outputs):
                    c, block = curve[:, i, j], total[i, :, j]
                    block[:d, :d] += design.gram(c)
                    block[:d, d] += design.transposed(c)
                    block[d, d] += c.sum()
        total[:, d, :, :d] = total[:, :d, :, d].permute(2, 0, 1)
        return total.reshape(outputs * (d + 1), -1)[self._places()[:, None], self._places()]

    def _places(self) -> Tensor:
        """Where the coordinates of x are among (output, feature or constant 1)."""
        every = torch.arange(self.family.outputs * (self.features + 1), device=self.data.x.device)
        table = every.reshape(self.family.outputs, -1)
        return torch.cat([table[: self._scores, :-1].flatten(), table[self.family.outputs - self._offsets_of :, -1]])

    def rows_at(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs for all rows and their targets, as the family takes them."""
        eta, y = self._known(self.scores(x, self.data.x), self.data.y)
        return eta, self.family.targets(y, x.dtype)

    def _at(self, x: Tensor, a: Design, b: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs for rows a, and their targets."""
        eta = self._outputs(x, a)
        return self._known(eta, b) if self.offset else (eta, b)

    def _known(self, eta: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs with the known part of their scores, which b holds, and the targets alone."""
        if not self.offset:
            return eta, b
        b, known = b.unbind(-1)
        return eta + (known if self.family.outputs == 1 else pad(known.unsqueeze(-1), (0, self.family.constants))), b

    def _outputs(self, x: Tensor, a: Design) -> Tensor:
        """The outputs for rows a (..., B, d), linear in x: (..., B), with K of them (..., B, K)."""
        if self._plain:
            return a.times(x)
        w, offset = x[..., self.coefficients], x[..., self.coefficients.stop :]
        if self.family.outputs == 1:
            eta = a.times(w)
            return eta + offset if self.intercept else eta
        eta = a.times_each(w.unflatten(-1, (self._scores, -1)))
        if not self._offsets_of:
            return eta
        eta = pad(eta, (0, self.family.constants))
        return eta + pad(offset, (self.family.outputs - self._offsets_of, 0)).unsqueeze(-2)

    def _back(self, r: Tensor, a: Design) -> Tensor:
        """The transpose of `_outputs`: sum_j of r_j times what output j has by coordinate of x."""
        if self._plain:
            return a.transposed(r)
        if self.family.outputs == 1:
            w, sums = a.transposed(r), r.unsqueeze(-1)
        else:
            w, sums = a.transposed_each(r[..., : self._scores]).flatten(-2), r
        if not self._offsets_of:
            return w
        return torch.cat([w, sums.sum(-2)[..., self.family.outputs - self._offsets_of :]], -1)

    def _weighted(self, weight: Weight, r: Tensor) -> Tensor:
        """weight r, written over r."""
        return r.mul_(weight.unsqueeze(-1) if isinstance(weight, Tensor) and self.family.outputs > 1 else weight)

    def _exact(self, clients: Tensor) -> Oracle:
        """Full local gradients: large clients one after another on their own rows, small ones in one call, padded."""
        ids = clients.reshape(-1).tolist()
        sizes = self.data.sizes.numpy()[ids]
        total, longest = int(sizes.sum()), int(sizes.max())
        small = len(ids) * longest <= 2 * total and self._row_bytes * total <= SMALL_BYTES * len(ids)
        if clients.ndim and small:
            names = tuple(ids)
            return lambda x, q: self._gradient(x, *self._stack(names, x.dtype))

        @cache
        def rows(i: int, dtype: torch.dtype) -> Prepared:
            return self._prepared(self.data.rows_of(i), self._shares, dtype)

        def g(x: Tensor, q: int) -> Tensor:
            points = zip(ids, x.expand(len(ids), -1), strict=True)
            each = [self._gradient(x_i, *rows(i, x.dtype)) for i, x_i in points]
            return torch.stack(each) if clients.ndim else each[0]

        return g

    def _prepared(self, rows: slice, weights: Tensor, dtype: torch.dtype) -> Prepared:
        """Consecutive rows, as they lie; a copy only in another dtype."""
        b = self.data.y[rows]
        design = self._rows(take(self.data.x, rows), b, dtype)
        return design, self._targets(b, dtype), weights[rows].to(b.device, dtype)

    def _stack(self, ids: tuple[int, ...], dtype: torch.dtype) -> Prepared:
        """Small clients' rows, padded to one length; kept for the next round while there is room."""
        kept = self._small.get((ids, dtype))
        if kept is None:
            clients = torch.tensor(ids, device="cpu")
            a, b, weight = self._padded(clients, 0, int(self.data.sizes[clients].max()), self.start.to(dtype))
            kept = self._rows(a, b, dtype).kept(), b, weight
            if (len(self._small) + 1) * b.numel() * self._row_bytes > KEPT_BYTES:
                self._small.clear()
            self._small[ids, dtype] = kept
        return kept

    def _targets(self, b: Tensor, dtype: torch.dtype) -> Tensor:
        """Labels that name one of several outputs as they are, all else as real numbers: these need not be converted
        in every step."""
        return b.to(dtype) if self.family.outputs == 1 or b.is_floating_point() else b

    def _gather(self, rows: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        if is_sparse(self.data.x):
            return stacked(self.data.x, rows), self._targets(self.data.y[rows], x.dtype)
        a, b = super()._gather(rows, x)
        return a, self._targets(b, x.dtype)


def samples(data: Pairs, columns: int = 1) -> ClientData:
    """Return the clients' rows, features as real numbers and targets (N,), or (N, columns); other forms are refused."""
    given = ClientData.of(data)
    x, y = given.x, given.y
    if x.ndim < 2:
        raise InputError(f"x has shape {tuple(x.shape)}; give one row of features per sample, shape (N, features)")
    if y.shape[1:] == (1,):
        y = y.squeeze(1)
    if y.shape[1:] != ((columns,) if columns > 1 else ()):
        wanted = "one target per sample, shape (N,)" if columns == 1 else f"{columns} columns"
        raise InputError(f"y has shape {tuple(y.shape)}; give {wanted}")
    if not x.is_floating_point():
        x = x.to(torch.get_default_dtype())
    return given if x is given.x and y is given.y else ClientData(x, y, given.sizes)


def _family(name: str, y: Tensor) -> Family:
    kind = choose("family", name, FAMILIES)
    return kind(int(labels(y).max()) + 1) if kind in (Multinomial, Ordinal) else kind()


def _per_row(weight: Tensor, values: Tensor) -> Tensor:
    return weight.reshape(-1, *[1] * (values.ndim - 1)) * values


def _times(curve: Tensor | None, bound: float | None, eta: Tensor) -> Tensor:
    """Curvature times a direction in the outputs."""
    if curve is None:
        return (bound or 0.0) * eta
    return curve * eta if curve.shape == eta.shape else torch.matmul(curve, eta.unsqueeze(-1)).squeeze(-1)


class LeastSquares(GLM):
    """Least squares $f_i(x) = |A_i x - b_i|^2 / (2 m_i)$, for clients with $m_i$ samples $(A_i, b_i)$.

    `GLM` with the family `Gaussian`; intercept and weights as there. Options: batch_size (None: exact gradients), seed,
    weights, sample_weights, minibatches, local_steps, see `FiniteSum`.

    >>> A, b = torch.eye(2), torch.tensor([1.0, -1.0])
    >>> problem = LeastSquares([(A, b), (2 * A, b)])
    >>> problem.gradient(torch.zeros(2))
    tensor([-0.7500,  0.7500])
    """

    def __init__(self, data: Pairs, *, intercept: bool = False, **options: Unpack[Options]) -> None:
        given = ClientData.of(data)
        if not given.y.is_floating_point():
            warnings.warn(
                f"LeastSquares takes {given.y.dtype} labels for real numbers; to classify use Logistic, "
                "for a regression give targets as floats",
                UserWarning,
                stacklevel=2,
            )
        super().__init__(given, Gaussian(), intercept=intercept, **options)


class Logistic(GLM):
    r"""Logistic regression, binary or multinomial.

    Binary, with labels $s_j$ in {0, 1} or {-1, 1}: $f_i(x) = \mean_j \log(1 + \exp(-s_j \langle a_j, x \rangle))$,
    where 0 counts as -1. Multinomial, with labels $y_j$ in {0, ..., K - 1} and the matrix X of K vectors, flattened:
    $f_i(X) = \mean_j (\text{logsumexp}(X a_j) - (X a_j)_{y_j})$.

    classes: K; None where the clients together hold every label. A client may lack some.

    `GLM` with the family `Bernoulli` or `Multinomial`; intercept and weights as there. Options: batch_size (None: exact
    gradients), seed, weights, sample_weights, minibatches, local_steps, see `FiniteSum`.

    >>> samples, labels = torch.tensor([[1.0], [-1.0]]), torch.tensor([1, 0])
    >>> Logistic([(samples, labels)]).gradient(torch.zeros(1))
    tensor([-0.5000])
    """

    def __init__(
        self, data: Pairs, *, classes: int | None = None, intercept: bool = False, **options: Unpack[Options]
    ) -> None:
        given = samples(data)
        self.classes = number_of_classes(labels(given.y)) if classes is None else classes
        if self.classes < 2:
            raise InputError(f"classes is {classes}; a classification needs data with at least 2 different labels")
        family = Bernoulli() if self.classes == 2 else Multinomial(self.classes)
        super().__init__(given, family, intercept=intercept, **options)


def number_of_classes(y: Tensor) -> int:
    """Return how many classes there are, where every label from 0 on occurs; else nobody knows what was meant."""
    found = y.unique().tolist()
    if len(found) < 2:
        raise InputError(
            f"all labels are {found[0]}; give data with two classes, or classes=K where others hold the rest"
        )
    if found != list(range(len(found))):
        raise InputError(
            f"labels are {found[0]} to {found[-1]}, {len(found)} different ones; number them 0 to {len(found) - 1}, "
            "or give classes=K where some do not occur"
        )
    return len(found)
