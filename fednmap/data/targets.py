"""What files of rows have in common: where they are, and what their last word on a row means."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fednmap.names import InputError

MOST_LABELS = 10_000
LABELS = ("label", "target", "y")
"""Names of the column to predict, if none is given."""


def located(path: str) -> Path:
    """Return the file at `path`, else at that path inside the folder of FEDNMAP_DATA."""
    if not path:
        raise InputError("no file given; write the path after the colon, for example csv:table.csv")
    places = [Path(path).expanduser()]
    if root := os.environ.get("FEDNMAP_DATA"):
        places.append(Path(root) / path)
    for place in places:
        if place.is_file():
            return place
    raise InputError(f"there is no file {' or '.join(map(str, places))}; give the path of an existing file")


def targets(paths: Sequence[Path], values: Sequence[npt.NDArray[np.generic]], regression: bool | None) -> list[Tensor]:
    """Labels 0..K-1 in the order of the training values where these are whole or words, else real targets.

    The first of `values` is the training part; labels that occur only in another part are refused.
    """
    numbers = all(np.issubdtype(value.dtype, np.number) for value in values)
    if regression is None:
        regression = numbers and any(bool((value != np.rint(value)).any()) for value in values)
    if regression:
        if not numbers:
            raise InputError(f"{paths[0]} has words for targets; a regression needs numbers")
        return [torch.from_numpy(value.astype(np.float32)) for value in values]
    names = np.unique(values[0])
    if len(names) > MOST_LABELS:
        raise InputError(
            f"{paths[0]}: expected at most {MOST_LABELS:,} different labels, got {len(names):,}; for numbers to "
            "predict use regression=true"
        )
    for path, value in zip(paths, values, strict=True):
        strange = np.setdiff1d(value, names)
        if len(strange):
            raise InputError(
                f"{path} has the label {strange[0]}, which the training file has not; give files that match"
            )
    return [torch.from_numpy(np.searchsorted(names, value)) for value in values]


def label_names(values: npt.NDArray[np.generic], y: Tensor) -> tuple[str, ...]:
    """Return what labels 0, 1, ... stand for in a file; () where y holds numbers."""
    if y.is_floating_point():
        return ()
    from fednmap.tables.table import as_word

    return tuple(as_word(name) for name in np.unique(values).tolist())
