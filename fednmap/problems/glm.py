"""Generalised linear models: scores that are linear in the features, and a family that says what they cost."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from fednmap.core import Oracle
from fednmap.data.clients import ClientData, Pairs
from fednmap.names import choose
from fednmap.problems.families import FAMILIES, Family, Multinomial, labels
from fednmap.problems.finite_sum import FiniteSum, Weight, like
from fednmap.problems.spectrum import largest_eigenvalue
from fednmap.problems.table import table
from fednmap.problems.weighting import RowWeights, Weights

SMALL_BYTES = 64 << 10  # clients with less data than this on average are computed side by side, padded to one length
KEPT_BYTES = 16 << 20  # of padded copies of small clients that a problem keeps between rounds


class GLM(FiniteSum):
    """f_i(x) = mean_j loss(eta_j, y_j), eta_j = <a_j, w> + c: x holds the coefficients w, then the intercept c.

    family:    what a row costs: a `Family`, or its name: gaussian, logistic, multinomial, poisson, huber, scaled-huber.
               With K scores per row (multinomial) w is K vectors one after another, and c is K numbers.
    intercept: whether there is c; it comes after the coefficients: a regularizer on `coefficients` leaves it alone.
    weights:   of the clients in f; "samples" makes f the mean over all rows of all clients.
    sample_weights: what each row counts in its client's mean (by "samples": in f).

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
        batch_size: int | None = None,
        seed: int = 0,
        weights: Weights = None,
        sample_weights: RowWeights = None,
    ) -> None:
        rows = table(data)
        self.family = _family(family, rows.y) if isinstance(family, str) else family
        y = self.family.targets(rows.y, rows.x.dtype)
        super().__init__(
            rows if y is rows.y else ClientData(rows.x, y, rows.sizes),
            batch_size=batch_size,
            seed=seed,
            weights=weights,
            sample_weights=sample_weights,
        )
        self.features = self.data.x[0].numel()
        self.intercept = intercept
        ends = _Ends.of(self.family, self.features, intercept)
        self.coefficients = slice(0, ends.coefficients)
        self.intercepts = slice(ends.coefficients, ends.intercepts)
        self.constants = slice(ends.intercepts, ends.constants)
        self.dim = ends.constants
        zeros = self.data.x.new_zeros(ends.intercepts)
        self.start = torch.cat([zeros, self.family.start(zeros)])
        self._scores = self.family.outputs - self.family.constants
        self._offsets_of = self.dim - ends.coefficients  # the last outputs, to which a number of x is added
        self._padded: dict[tuple[int, ...], tuple[Tensor, Tensor, Tensor]] = {}

    def made_of(self) -> dict[str, Any]:
        return super().made_of() | {"family": self.family, "intercept": self.intercept}

    def scores(self, x: Tensor, inputs: Tensor) -> Tensor:
        """eta of each input, and the family's constants beside it where it has any."""
        return self._outputs(x, like(inputs.flatten(1), x))

    def mean(self, x: Tensor, inputs: Tensor) -> Tensor:
        """The expected target of each input; for labels their probabilities."""
        return self.family.mean(self.scores(x, inputs))

    def predict(self, x: Tensor, inputs: Tensor) -> Tensor:
        return self.family.predict(self.scores(x, inputs))

    def batch_loss(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> Tensor:
        return (weight * self.family.loss(self._outputs(x, a.flatten(b.ndim)), b)).sum(-1)

    def batch_gradient(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> Tensor:
        a = a.flatten(b.ndim)
        return self._back(self._weighted(weight, self.family.slope(self._outputs(x, a), b)), a)

    def batch_value_and_gradient(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
        a = a.flatten(b.ndim)
        loss, slope = self.family.loss_and_slope(self._outputs(x, a), b)
        return (weight * loss).sum(-1), self._back(self._weighted(weight, slope), a)

    def smoothness(self, x: Tensor | None = None) -> float:
        """L of f: the largest eigenvalue of its Hessian, everywhere if the family's curvature is bounded, else at x.

        By products with the features alone, a few dozen passes over the data; within a thousandth. x: default the
        start.
        """
        x = self.start if x is None else x
        bound = self.family.bound
        batches = []
        for a, b, weight in self._everything(x):
            a = a.flatten(1)
            curve = None if bound is not None else self.family.curvature(self._outputs(x, a), b)
            batches.append((a, weight, curve))

        def product(v: Tensor) -> Tensor:
            total = torch.zeros_like(v)
            for a, weight, curve in batches:
                total += self._back(self._weighted(weight, _times(curve, bound, self._outputs(v, a))), a)
            return total

        generator = torch.Generator("cpu").manual_seed(0)
        first = torch.randn(self.dim, generator=generator, dtype=torch.float64, device="cpu")
        return largest_eigenvalue(product, first.to(x))

    def hessian(self, x: Tensor) -> Tensor:
        """The Hessian of f at x, (p, p): a sum over clients, as the gradient is."""
        outputs, width = self.family.outputs, self.features + 1
        total = x.new_zeros(outputs, width, outputs, width)
        for a, b, weight in self._everything(x):
            a = a.flatten(1)
            curve = self.family.curvature(self._outputs(x, a), b).reshape(len(a), outputs, outputs)
            wide = torch.cat([a, a.new_ones(len(a), 1)], 1)
            for i in range(outputs):
                for j in range(outputs):
                    total[i, :, j] += wide.mT @ ((weight * curve[:, i, j]).unsqueeze(-1) * wide)
        return total.reshape(outputs * width, -1)[self._places()[:, None], self._places()]

    def _places(self) -> Tensor:
        """Where the coordinates of x are among (output, feature or constant 1)."""
        every = torch.arange(self.family.outputs * (self.features + 1), device=self.data.x.device)
        table = every.reshape(self.family.outputs, -1)
        return torch.cat([table[: self._scores, :-1].flatten(), table[self.family.outputs - self._offsets_of :, -1]])

    def _outputs(self, x: Tensor, a: Tensor) -> Tensor:
        """The outputs for rows a (..., B, d), linear in x: (..., B), with K of them (..., B, K)."""
        w, offset = x[..., self.coefficients], x[..., self.coefficients.stop :]
        if self.family.outputs == 1:
            eta = torch.matmul(a, w.unsqueeze(-1)).squeeze(-1)
            return eta + offset if self.intercept else eta
        eta = torch.matmul(a, w.unflatten(-1, (self._scores, -1)).mT)
        if not self._offsets_of:
            return eta
        eta = pad(eta, (0, self.family.constants))
        return eta + pad(offset, (self.family.outputs - self._offsets_of, 0)).unsqueeze(-2)

    def _back(self, r: Tensor, a: Tensor) -> Tensor:
        """The transpose of `_outputs`: sum_j of r_j times what output j has by coordinate of x."""
        if self.family.outputs == 1:
            w, sums = torch.matmul(r.unsqueeze(-2), a).squeeze(-2), r.unsqueeze(-1)
        else:
            w, sums = torch.matmul(r[..., : self._scores].mT, a).flatten(-2), r
        if not self._offsets_of:
            return w
        return torch.cat([w, sums.sum(-2)[..., self.family.outputs - self._offsets_of :]], -1)

    def _weighted(self, weight: Weight, r: Tensor) -> Tensor:
        return (weight.unsqueeze(-1) if isinstance(weight, Tensor) and self.family.outputs > 1 else weight) * r

    def _exact(self, clients: Tensor) -> Oracle:
        """Full local gradients: large clients one after another on their own rows, small ones side by side."""
        ids = clients.reshape(-1).tolist()
        sizes = self._sizes[clients.reshape(-1).cpu()]
        one = self.features * self.data.x.element_size()
        even = len(ids) * int(sizes.max()) <= 2 * int(sizes.sum())
        if clients.ndim and even and one * int(sizes.sum()) <= SMALL_BYTES * len(ids):
            return self._side_by_side(tuple(ids))
        parts = [self._client(i) for i in ids]

        def g(x: Tensor, q: int) -> Tensor:
            if not clients.ndim:
                return self.batch_gradient(x, *_like(parts[0], x))
            points = x.expand(len(parts), -1)
            return torch.stack(
                [self.batch_gradient(x_i, *_like(part, x)) for x_i, part in zip(points, parts, strict=True)]
            )

        return g

    def _side_by_side(self, ids: tuple[int, ...]) -> Oracle:
        """Rows padded with weight 0, kept for the next round while there is room."""
        names = tuple(self.first + i for i in ids)  # in the whole federation: a client by itself shares what is kept
        if names not in self._padded:
            each = [self._client(i) for i in ids]
            a, b, weight = (pad_sequence(list(v), batch_first=True) for v in zip(*each, strict=True))
            held = sum(_nbytes(*batch) for batch in self._padded.values())
            if held + _nbytes(a, b, weight) > KEPT_BYTES:
                self._padded.clear()
            self._padded[names] = a, b, weight
        kept = self._padded[names]
        return lambda x, q: self.batch_gradient(x, *_like(kept, x))

    def _client(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        rows = slice(int(self._offsets[i]), int(self._offsets[i] + self._sizes[i]))
        a = self.data.x[rows].flatten(1)
        return a, self.data.y[rows], self._shares[rows].to(a)


class _Ends(NamedTuple):
    """Where coefficients, intercepts and constants end in x."""

    coefficients: int
    intercepts: int
    constants: int

    @classmethod
    def of(cls, family: Family, features: int, intercept: bool) -> _Ends:
        scores = family.outputs - family.constants
        end = scores * features
        after = end + (scores if intercept else 0)
        return cls(end, after, after + family.constants)


def _family(name: str, y: Tensor) -> Family:
    kind = choose("family", name, FAMILIES)
    return Multinomial(int(labels(y).max()) + 1) if kind is Multinomial else kind()


def _like(batch: tuple[Tensor, ...], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    a, b, weight = (like(v, x) for v in batch)
    return a, b, weight


def _nbytes(*tensors: Tensor) -> int:
    return sum(v.numel() * v.element_size() for v in tensors)


def _times(curve: Tensor | None, bound: float | None, eta: Tensor) -> Tensor:
    """Curvature times a direction in the outputs."""
    if curve is None:
        return (bound or 0.0) * eta
    return curve * eta if curve.shape == eta.shape else torch.matmul(curve, eta.unsqueeze(-1)).squeeze(-1)
