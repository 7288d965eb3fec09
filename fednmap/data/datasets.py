"""Data sets by name."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fednmap.names import choose


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test samples; `clients` holds the client id of each training row where the split is natural."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    clients: Tensor | None = None

    @property
    def classes(self) -> int | None:
        """How many labels there are; None for regression."""
        return None if self.y_train.is_floating_point() else int(self.y_train.max()) + 1


def digits() -> Dataset:
    """scikit-learn's handwritten digits: 1,797 images of 8 x 8, values in [0, 1], every fifth one for the test."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    test = torch.arange(len(x)) % 5 == 4
    return Dataset(x[~test], y[~test], x[test], y[test])


DATASETS = {"digits": digits}


def load(name: str) -> Dataset:
    """The data set called `name`."""
    return choose("data set", name, DATASETS)()
