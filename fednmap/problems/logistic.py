"""Logistic regression, binary and multinomial."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, one_hot, softplus

from fednmap.data.clients import ClientData, Pairs
from fednmap.names import InputError
from fednmap.problems.finite_sum import FiniteSum, Weight
from fednmap.problems.table import table


class Logistic(FiniteSum):
    """Binary, labels in {0, 1} or {-1, 1}: f_i(x) = mean_j log(1 + exp(-s_j <a_j, x>)), s_j = +-1, x in R^d.

    Multinomial, labels in {0, .., K-1}: f_i(X) = mean_j [logsumexp(X a_j) - (X a_j)_{y_j}], X in R^{K x d} flattened.

    classes: K; None where the clients together hold every label. A client may lack some.

    No intercept: append a column of ones to the samples for one.

    >>> samples, labels = torch.tensor([[1.0], [-1.0]]), torch.tensor([1, 0])
    >>> Logistic([(samples, labels)]).gradient(torch.zeros(1))
    tensor([-0.5000])
    """

    def __init__(
        self,
        data: Pairs,
        *,
        classes: int | None = None,
        batch_size: int | None = None,
        seed: int = 0,
        weights: Sequence[float] | Tensor | None = None,
    ) -> None:
        rows = table(data)
        labels = _labels(rows.y)
        self.classes = _classes(labels) if classes is None else classes
        if self.classes < 2:
            raise InputError(f"classes is {classes}; a classification needs data with at least 2 different labels")
        if labels.min() < 0 or labels.max() >= self.classes:
            raise InputError(
                f"labels are {labels.min()} to {labels.max()}; with {self.classes} classes use 0 to {self.classes - 1}"
            )
        super().__init__(ClientData(rows.x, labels, rows.sizes), batch_size=batch_size, seed=seed, weights=weights)
        self.dim = self.data.x[0].numel() * (1 if self.classes == 2 else self.classes)
        self.start = self.data.x.new_zeros(self.dim)

    def predict(self, x: Tensor, inputs: Tensor) -> Tensor:
        scores = self._scores(x, inputs.flatten(1))
        return (scores > 0).to(torch.int64) if self.classes == 2 else scores.argmax(-1)

    def batch_loss(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> Tensor:
        scores = self._scores(x, a.flatten(b.ndim))
        if self.classes == 2:
            return (weight * softplus((1 - 2 * b) * scores)).sum(-1)
        return -(weight * log_softmax(scores, -1).gather(-1, b.unsqueeze(-1)).squeeze(-1)).sum(-1)

    def batch_gradient(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> Tensor:
        a = a.flatten(b.ndim)
        scores = self._scores(x, a)
        if self.classes == 2:
            r = weight * (torch.sigmoid(scores) - b)
            return torch.matmul(r.unsqueeze(-2), a).squeeze(-2)
        weight = weight.unsqueeze(-1) if isinstance(weight, Tensor) else weight
        r = weight * (torch.softmax(scores, -1) - one_hot(b, self.classes))
        return torch.matmul(r.mT, a).flatten(-2)

    def _scores(self, x: Tensor, a: Tensor) -> Tensor:
        if self.classes == 2:
            return torch.matmul(a, x.unsqueeze(-1)).squeeze(-1)
        return torch.matmul(a, x.unflatten(-1, (self.classes, -1)).mT)


def _labels(y: Tensor) -> Tensor:
    """Whole numbers of any type as int64, -1 and 1 as 0 and 1."""
    labels = y.to(torch.int64)
    if not torch.equal(labels.to(y.dtype), y):
        raise InputError("Logistic needs whole-number labels; for real targets use LeastSquares")
    if labels.min() == -1 and labels.max() <= 1 and not bool((labels == 0).any()):
        labels = labels.clamp(min=0)
    return labels


def _classes(labels: Tensor) -> int:
    """How many classes there are, where every label from 0 on occurs; else nobody knows what was meant."""
    found = torch.unique(labels).tolist()
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
