"""Trials and what they measured: one method in one setting from one seed."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fednmap.simulation import Record

Setting = dict[str, Any]
"""What tells a trial from the others, such as {"method": "FedNMap", "n": 20, "Q": 10, "trial": 0}."""

Array = npt.NDArray[np.float64]


class Trial(NamedTuple):
    """A trial to run: `measure` gives its records, and can be sent to another process."""

    setting: Setting
    measure: Callable[[Path], list[Record]]
    """Takes the folder in which the trial keeps what it needs to continue; see `reproduction.runs`."""
    configuration: Mapping[str, Any]
    """All that its numbers depend on, in values that JSON has; `data` names the data set, if there is one."""
    data: Callable[[], str] | None = None
    """The SHA-256 of the data as they are now, where there are any."""

    @property
    def name(self) -> str:
        """The setting as a name; a trial of another setting, such as more rounds, has another one."""
        return "_".join(v if isinstance(v, str) else f"{k}{v:g}" for k, v in self.setting.items())


@dataclass(frozen=True)
class Curve:
    """What a trial measured, by column; the column `round` says after how many rounds."""

    setting: Setting
    columns: dict[str, Array]
    code: str = ""
    """The digest of the code that it was run with."""

    def __getitem__(self, column: str) -> Array:
        return self.columns[column]

    def final(self, metric: str, rounds: float | None = None, share: float = 0.1) -> float:
        """The mean over the last tenth (`share`) of the first `rounds` rounds (default: all), at least of one value."""
        t, y = self["round"], self[metric]
        last = t[t <= (t[-1] if rounds is None else rounds)][-1]
        return float(y[((t > (1 - share) * last) & (t <= last)) | (t == last)].mean())


def final_values(curve: Curve) -> dict[str, float]:
    """The final value of every metric."""
    return {name: curve.final(name) for name in curve.columns if name != "round"}


def select(curves: Iterable[Curve], **setting: Any) -> list[Curve]:
    """The trials of a setting, in the order of their number."""
    chosen = [c for c in curves if all(c.setting[k] == v for k, v in setting.items())]
    return sorted(chosen, key=lambda c: int(c.setting["trial"]))


def kind(setting: Setting) -> tuple[Any, ...]:
    """The setting without the number of the trial."""
    return tuple(v for k, v in setting.items() if k != "trial")


def by_setting(curves: Iterable[Curve]) -> dict[tuple[Any, ...], list[Curve]]:
    """The trials that differ in nothing but their number."""
    groups: dict[tuple[Any, ...], list[Curve]] = {}
    for curve in curves:
        groups.setdefault(kind(curve.setting), []).append(curve)
    return groups


def summary(curves: Sequence[Curve]) -> str:
    """One row per setting: mean and standard deviation over the trials of every metric's final value."""
    groups = by_setting(curves)
    metrics = [m for m in curves[0].columns if m != "round" and all(m in c.columns for c in curves)]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    names = [k for k in curves[0].setting if k != "trial"]
    writer.writerow([*names, "trials", *(f"{m}_{what}" for m in metrics for what in ("mean", "std"))])
    for key, members in groups.items():
        finals = [[c.final(m) for c in members] for m in metrics]
        cells = (f"{s:.6g}" for v in finals for s in (np.mean(v), np.std(v, ddof=1) if len(v) > 1 else 0.0))
        writer.writerow([*key, len(members), *cells])
    return file.getvalue()
