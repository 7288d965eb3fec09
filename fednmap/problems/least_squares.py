"""Linear regression."""

from __future__ import annotations

import warnings

from fednmap.data.clients import ClientData, Pairs
from fednmap.problems.families import Gaussian
from fednmap.problems.glm import GLM
from fednmap.problems.weighting import RowWeights, Weights


class LeastSquares(GLM):
    """f_i(x) = |A_i x - b_i|^2 / (2 m_i), for clients with m_i samples (A_i, b_i).

    `GLM` with the family `Gaussian`; intercept and weights as there.

    >>> import torch
    >>> A, b = torch.eye(2), torch.tensor([1.0, -1.0])
    >>> problem = LeastSquares([(A, b), (2 * A, b)])
    >>> problem.gradient(torch.zeros(2))
    tensor([-0.7500,  0.7500])
    """

    def __init__(
        self,
        data: Pairs,
        *,
        intercept: bool = False,
        batch_size: int | None = None,
        seed: int = 0,
        weights: Weights = None,
        sample_weights: RowWeights = None,
        minibatches: str = "replacement",
        local_steps: int | None = None,
    ) -> None:
        given = ClientData.of(data)
        if not given.y.is_floating_point():
            warnings.warn(
                f"LeastSquares takes {given.y.dtype} labels for real numbers; to classify use Logistic, "
                "for a regression give targets as floats",
                UserWarning,
                stacklevel=2,
            )
        super().__init__(
            given,
            Gaussian(),
            intercept=intercept,
            batch_size=batch_size,
            seed=seed,
            weights=weights,
            sample_weights=sample_weights,
            minibatches=minibatches,
            local_steps=local_steps,
        )
