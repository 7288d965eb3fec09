"""What a page or a summary shows: each method of each run, with its curves, closing numbers and models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fednmap.runs.folder import Curves, Model, RunFolder

Values = NDArray[np.float64]


class Series(NamedTuple):
    """One method of one run."""

    label: str
    trials: list[Curves]
    results: list[dict[str, Any]]
    model: Model | None
    """Of the first trial."""

    def has(self, name: str) -> bool:
        return bool(self.trials) and all(name in curves for curves in self.trials)

    def values(self, name: str, points: int | None = None) -> Values:
        """One column along the run, a row a trial; at most `points` of its values, first and last among them."""
        length = min(len(curves["round"]) for curves in self.trials)
        column = np.array([curves[name][:length] for curves in self.trials])
        if points is None or length <= points:
            return column
        return column[:, np.linspace(0, length - 1, points).round().astype(int)]


def collect(folders: Sequence[RunFolder]) -> list[Series]:
    """Every method of every run that has measured something, labelled with its run where there are several."""
    found = []
    for folder, name in zip(folders, _names(folders), strict=True):
        curves, results, config = folder.curves(), folder.results(), folder.config()
        for method in config.algorithms:
            jobs = [job for job in curves if job.method == method and job.trial < config.trials]
            if jobs:
                label = method if len(folders) == 1 else f"{name}: {method}"
                own = [r for r in results if r["method"] == method]
                found.append(Series(label, [curves[job] for job in jobs], own, folder.model(jobs[0])))
    return found


def _names(folders: Sequence[RunFolder]) -> list[str]:
    """The folders' names, with those above them where the names alone are not different."""
    paths = [folder.path.resolve() for folder in folders]
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(set(paths)):
        depth += 1
    return ["/".join(path.parts[-depth:]) for path in paths]
