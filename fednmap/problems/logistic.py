"""Logistic regression, binary and multinomial."""

from __future__ import annotations

from torch import Tensor

from fednmap.data.clients import Pairs
from fednmap.names import InputError
from fednmap.problems.families import Bernoulli, Multinomial, labels
from fednmap.problems.glm import GLM
from fednmap.problems.samples import samples
from fednmap.problems.weighting import RowWeights, Weights


class Logistic(GLM):
    """Binary, labels in {0, 1} or {-1, 1}: f_i(x) = mean_j log(1 + exp(-s_j <a_j, x>)), s_j = +-1, x in R^d.

    Multinomial, labels in {0, .., K-1}: f_i(X) = mean_j [logsumexp(X a_j) - (X a_j)_{y_j}], X in R^{K x d} flattened.

    classes: K; None where the clients together hold every label. A client may lack some.

    `GLM` with the family `Bernoulli` or `Multinomial`; intercept and weights as there.

    >>> import torch
    >>> samples, labels = torch.tensor([[1.0], [-1.0]]), torch.tensor([1, 0])
    >>> Logistic([(samples, labels)]).gradient(torch.zeros(1))
    tensor([-0.5000])
    """

    def __init__(
        self,
        data: Pairs,
        *,
        classes: int | None = None,
        intercept: bool = False,
        batch_size: int | None = None,
        seed: int = 0,
        weights: Weights = None,
        sample_weights: RowWeights = None,
        minibatches: str = "replacement",
        local_steps: int | None = None,
    ) -> None:
        given = samples(data)
        self.classes = number_of_classes(labels(given.y)) if classes is None else classes
        if self.classes < 2:
            raise InputError(f"classes is {classes}; a classification needs data with at least 2 different labels")
        super().__init__(
            given,
            Bernoulli() if self.classes == 2 else Multinomial(self.classes),
            intercept=intercept,
            batch_size=batch_size,
            seed=seed,
            weights=weights,
            sample_weights=sample_weights,
            minibatches=minibatches,
            local_steps=local_steps,
        )


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
