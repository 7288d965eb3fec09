"""Which rows belong to which site."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fednmap.names import InputError

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Sites:
    """The sites' names and, for each of them, the rows that it holds."""

    names: tuple[str, ...]
    of_row: Rows
    """The number of the site of every row."""

    @property
    def sizes(self) -> Rows:
        return np.bincount(self.of_row, minlength=len(self.names))

    @property
    def order(self) -> Rows | None:
        """The rows site by site; None where they lie so already."""
        if bool((np.diff(self.of_row) >= 0).all()):
            return None
        return np.argsort(self.of_row, kind="stable")

    def __len__(self) -> int:
        return len(self.names)

    def at(self, row: int) -> str:
        """Where a row is, for a message; empty where there is one site only."""
        return f" at site {self.names[self.of_row[row]]!r}" if len(self) > 1 else ""

    def some(self, keep: Rows | npt.NDArray[np.bool_]) -> Sites:
        """The sites of these rows only; a site that keeps none is left out."""
        found, numbers = np.unique(self.of_row[keep], return_inverse=True)
        return Sites(tuple(self.names[k] for k in found), numbers)


def divide(sites: Any, rows: int) -> Sites:
    """The sites from one label per row; without labels one site holds everything."""
    if sites is None:
        return Sites(("all",), np.zeros(rows, np.intp))
    labels = np.asarray(sites)
    if labels.shape != (rows,):
        raise InputError(f"sites has shape {labels.shape}; give one site per row, {rows} in all")
    missing = np.flatnonzero([_is_missing(label) for label in labels] if labels.dtype.kind in "fO" else [])
    if len(missing):
        raise InputError(f"row {missing[0]} has no site; every row needs one")
    try:
        found, numbers = np.unique(labels, return_inverse=True)
    except TypeError:
        raise InputError("sites mixes kinds of labels, such as words and numbers; use one kind") from None
    return Sites(tuple(str(name) for name in found), numbers)


def _is_missing(label: Any) -> bool:
    """None, NaN, and pandas' NA, whose comparison is neither true nor false."""
    try:
        return label is None or not bool(label == label)
    except TypeError:
        return True


def no_site_of_one(sites: Sites) -> None:
    """The sums of a site with one row are that row."""
    alone = np.flatnonzero(sites.sizes == 1)
    if len(alone):
        who = f"site {sites.names[alone[0]]!r}" if len(sites) > 1 else "the data"
        raise InputError(
            f"{who} has one sample, and its sums would be that sample; merge it with another site, or leave it out"
        )


def are_cases(sample_weight: Floats) -> bool:
    """Whether weights count equal rows: whole numbers; others are relative, and their unit means nothing."""
    return bool((sample_weight == np.rint(sample_weight)).all())


def cases(sample_weight: Floats) -> float:
    """N: the sum of weights that count equal rows, else the number of rows."""
    return float(sample_weight.sum()) if are_cases(sample_weight) else float(len(sample_weight))


def row_weights(sites: Sites, sample_weight: Floats, weights: str) -> Floats:
    """What each row counts, summing to 1: its own weight, or its share of a site that counts as much as any other."""
    if weights == "samples":
        return sample_weight / float(sample_weight.sum())
    totals: Floats = np.bincount(sites.of_row, sample_weight, len(sites)).astype(float)
    return sample_weight / totals[sites.of_row] / len(sites)
