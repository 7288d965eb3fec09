"""Linear and logistic regression: `GLM` with its usual families."""

from __future__ import annotations

import warnings
from typing import Unpack

from torch import Tensor

from fednmap.data.clients import ClientData, Pairs
from fednmap.names import InputError
from fednmap.problems.families import Bernoulli, Gaussian, Multinomial, labels
from fednmap.problems.finite_sum import Options
from fednmap.problems.glm import GLM, samples


class LeastSquares(GLM):
    """f_i(x) = |A_i x - b_i|^2 / (2 m_i), for clients with m_i samples (A_i, b_i).

    `GLM` with the family `Gaussian`; intercept and weights as there. Options: batch_size (None: exact gradients), seed,
    weights, sample_weights, minibatches, local_steps, see `FiniteSum`.

    >>> import torch
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
    """Binary, labels in {0, 1} or {-1, 1}: f_i(x) = mean_j log(1 + exp(-s_j <a_j, x>)), s_j = +-1, x in R^d.

    Multinomial, labels in {0, .., K-1}: f_i(X) = mean_j [logsumexp(X a_j) - (X a_j)_{y_j}], X in R^{K x d} flattened.

    classes: K; None where the clients together hold every label. A client may lack some.

    `GLM` with the family `Bernoulli` or `Multinomial`; intercept and weights as there. Options: batch_size (None: exact
    gradients), seed, weights, sample_weights, minibatches, local_steps, see `FiniteSum`.

    >>> import torch
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
    """How many classes there are, where every label from 0 on occurs; else nobody knows what was meant."""
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
