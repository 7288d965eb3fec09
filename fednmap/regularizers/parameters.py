"""What a regularizer's numbers must satisfy, checked where they enter."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fednmap.names import InputError


def nonnegative(owner: str, **values: float | Tensor) -> None:
    """Every value finite and >= 0, or a ValueError that names the one which is not."""
    for name, value in values.items():
        entries = torch.as_tensor(value)
        if not bool(((entries >= 0) & entries.isfinite()).all()):
            raise InputError(f"{owner} needs a finite {name} >= 0, given {name} = {value}")


def positive(owner: str, **values: float) -> None:
    """Every value finite and > 0, or a ValueError that names the one which is not."""
    for name, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise InputError(f"{owner} needs a finite {name} > 0, given {name} = {value}")
