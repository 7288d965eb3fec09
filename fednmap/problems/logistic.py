"""Logistic regression, binary and multinomial."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, one_hot, softplus

from fednmap.data.clients import ClientData
from fednmap.names import InputError
from fednmap.problems.finite_sum import FiniteSum, Weight


class Logistic(FiniteSum):
    """Binary, labels in {0, 1} or {-1, 1}: f_i(x) = mean_j log(1 + exp(-s_j <a_j, x>)), s_j = +-1, x in R^d.

    Multinomial, labels in {0, .., K-1}: f_i(X) = mean_j [logsumexp(X a_j) - (X a_j)_{y_j}], X in R^{K x d} flattened.

    No intercept: append a column of ones to the samples for one.

    >>> samples, labels = torch.tensor([[1.0], [-1.0]]), torch.tensor([1, 0])
    >>> Logistic([(samples, labels)]).gradient(torch.zeros(1))
    tensor([-0.5000])
    """

    def __init__(
        self,
        data: Sequence[tuple[Tensor, Tensor]],
        *,
        classes: int | None = None,
        batch_size: int | None = None,
        seed: int = 0,
        weights: Sequence[float] | Tensor | None = None,
    ) -> None:
        pooled = ClientData.of(data)
        labels = pooled.y.to(torch.int64)
        if not torch.equal(labels.to(pooled.y.dtype), pooled.y):
            raise InputError("Logistic needs whole-number labels; for real targets use LeastSquares")
        if labels.min() == -1 and labels.max() <= 1 and not bool((labels == 0).any()):
            labels = labels.clamp(min=0)
        self.classes = max(2, int(labels.max()) + 1) if classes is None else classes
        if labels.min() < 0 or labels.max() >= self.classes:
            raise InputError(
                f"labels are {labels.min()} to {labels.max()}; with {self.classes} classes use 0 to {self.classes - 1}"
            )
        super().__init__(ClientData(pooled.x, labels, pooled.sizes), batch_size=batch_size, seed=seed, weights=weights)
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
