"""What a page or a summary shows: each method of each run, with its curves and closing numbers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fednmap.measure import Quantity, quantities
from fednmap.names import InputError
from fednmap.runs.folder import Curves, Job, Model, RunFolder

Values = NDArray[np.float64]


class Series(NamedTuple):
    """One method of one run."""

    label: str
    trials: list[Curves]
    results: list[dict[str, Any]]
    folder: RunFolder | None = None
    """None for a `Result`, which has no folder."""
    first: Job = Job("", 0)
    """The first trial, whose model is shown."""

    def has(self, name: str) -> bool:
        return any(name in curves for curves in self.trials)

    def having(self, name: str) -> Series:
        """Only the trials in which this was measured."""
        return self._replace(trials=[curves for curves in self.trials if name in curves])

    def values(self, name: str, points: int | None = None) -> Values:
        """Return one column along the rounds that all trials have measured, a row per trial; NaN where it is missing.

        At most `points` of its values, first and last among them.
        """
        rounds: Values = reduce(np.intersect1d, (np.asarray(curves["round"]) for curves in self.trials))
        column = np.full((len(self.trials), len(rounds)), np.nan)
        for row, curves in zip(column, self.trials, strict=True):
            if name in curves:
                known, first = np.unique(curves["round"], return_index=True)
                row[:] = np.asarray(curves[name])[first[np.isin(known, rounds)]]
        if points is None or len(rounds) <= points:
            return column
        return column[:, np.linspace(0, len(rounds) - 1, points).round().astype(int)]


def collect(folders: Sequence[RunFolder]) -> list[Series]:
    """Return every method of every run that has measurements or ended, labelled with its run if there are several.

    Methods come in the order of run.toml, then those it does not name.
    """
    found = []
    for folder, name in zip(folders, _names(folders), strict=True):
        curves, results = folder.curves(), folder.results()
        known = sorted({*curves, *(Job(r["method"], r["trial"]) for r in results)})
        there = dict.fromkeys(job.method for job in (*curves, *known))
        said = folder.about()
        named = [method for method in said.algorithms if method in there]
        for method in dict.fromkeys([*named, *there]):
            jobs = [job for job in known if job.method == method]
            called = said.labels.get(method, method)
            label = called if len(folders) == 1 else f"{name}: {called}"
            ended = [r for r in results if r["method"] == method]
            found.append(Series(label, [curves[job] for job in jobs if job in curves], ended, folder, jobs[0]))
    return found


def models(series: Sequence[Series]) -> tuple[dict[str, Model], list[str]]:
    """Return what the first trials have trained, by label, and a line for each file that cannot be read."""
    found: dict[str, Model] = {}
    damaged = []
    for one in series:
        try:
            model = one.folder.model(one.first) if one.folder else None
        except InputError as error:
            damaged.append(str(error))
        else:
            found |= {one.label: model} if model is not None else {}
    return found, damaged


def expected(folder: RunFolder) -> int:
    """Return how many methods and trials a finished folder has results of."""
    said = folder.about()
    return (said.trials or 1) * max(1, len(said.algorithms))


def drawn(series: Sequence[Series]) -> list[Quantity]:
    """Return what has a curve: the quantities that describe a model."""
    return [q for q in quantities(name for s in series for curves in s.trials for name in curves) if not q.cost]


def positive(series: Sequence[Series], name: str) -> bool:
    """Return whether the quantity can stand on a logarithmic axis."""
    found = [s.having(name).values(name) for s in series if s.has(name)]
    return bool(found) and all((values[np.isfinite(values)] > 0).all() for values in found)


def _names(folders: Sequence[RunFolder]) -> list[str]:
    """The folders' names, with those above them where the names alone are not different."""
    paths = [folder.path.resolve() for folder in folders]
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(set(paths)):
        depth += 1
    return ["/".join(path.parts[-depth:]) for path in paths]
