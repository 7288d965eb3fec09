"""Samples of a linear model: rows of real features, one target per row."""

from __future__ import annotations

import torch

from fednmap.data.clients import ClientData, Pairs
from fednmap.names import InputError


def samples(data: Pairs) -> ClientData:
    """The clients' rows, features as real numbers and targets (N,); what has another form is refused."""
    given = ClientData.of(data)
    x, y = given.x, given.y
    if x.ndim < 2:
        raise InputError(f"x has shape {tuple(x.shape)}; give one row of features per sample, shape (N, features)")
    if y.shape[1:] == (1,):
        y = y.squeeze(1)
    if y.ndim != 1:
        raise InputError(f"y has shape {tuple(y.shape)}; give one target per sample, shape (N,)")
    if not x.is_floating_point():
        x = x.to(torch.get_default_dtype())
    return given if x is given.x and y is given.y else ClientData(x, y, given.sizes)
