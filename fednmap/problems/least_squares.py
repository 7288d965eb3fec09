"""Linear regression."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from fednmap.data.clients import ClientData, Pairs
from fednmap.problems.finite_sum import FiniteSum, Weight
from fednmap.problems.table import table


class LeastSquares(FiniteSum):
    """f_i(x) = |A_i x - b_i|^2 / (2 m_i), for clients with m_i samples (A_i, b_i).

    >>> A, b = torch.eye(2), torch.tensor([1.0, -1.0])
    >>> problem = LeastSquares([(A, b), (2 * A, b)])
    >>> problem.gradient(torch.zeros(2))
    tensor([-0.7500,  0.7500])
    """

    def __init__(
        self,
        data: Pairs,
        *,
        batch_size: int | None = None,
        seed: int = 0,
        weights: Sequence[float] | Tensor | None = None,
    ) -> None:
        rows = table(data)
        if not rows.y.is_floating_point():
            warnings.warn(
                f"LeastSquares takes {rows.y.dtype} labels for real numbers; to classify use Logistic, "
                "for a regression give targets as floats",
                UserWarning,
                stacklevel=2,
            )
            rows = ClientData(rows.x, rows.y.to(rows.x.dtype), rows.sizes)
        super().__init__(rows, batch_size=batch_size, seed=seed, weights=weights)
        self.dim = self.data.x[0].numel()
        self.start = self.data.x.new_zeros(self.dim)

    def predict(self, x: Tensor, inputs: Tensor) -> Tensor:
        return inputs.flatten(1) @ x

    def batch_loss(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> Tensor:
        return 0.5 * (weight * _residual(x, a, b).square()).sum(-1)

    def batch_gradient(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> Tensor:
        r = weight * _residual(x, a, b)
        return torch.matmul(r.unsqueeze(-2), a.flatten(b.ndim)).squeeze(-2)


def _residual(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a.flatten(b.ndim), x.unsqueeze(-1)).squeeze(-1) - b
