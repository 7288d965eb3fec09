"""A figure of the paper: which trials it needs, what it claims, how it is drawn; and the curves of one panel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from reproduction.store import Store
from reproduction.trials import Curve, Trial, final_values, summary
from reproduction.verdict import Verdict

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

ROUNDS = "communication rounds"
STATIONARITY = r"$\|F_{nat}(x_t)\|^2$"


@dataclass(frozen=True)
class Figure:
    name: str
    title: str
    jobs: Callable[[str, int], list[Trial]]
    """The trials, from the scale (quick, paper, for some middle) and their number; those wanted first come first."""
    judge: Callable[[list[Curve]], Verdict]
    draw: Callable[[list[Curve]], Picture]
    choices: str
    """What the paper gives and what is chosen here."""
    trials: Mapping[str, int]
    """How many trials, by scale."""
    summary: Callable[[list[Curve]], str] = summary
    """The closing numbers as a small table in CSV."""
    histories: bool = True
    """Whether it needs what trials measured along the rounds, or only after the last one."""
    final: Callable[[Curve], Mapping[str, float]] = final_values
    """A trial's final numbers, for the table of trials."""
    number: str = ""
    """Its number in the paper; empty if it is not there."""

    def store(self, out: Path) -> Store:
        """The tables of its trials in OUT."""
        return Store(out / self.name, self.histories, self.final)


def panels(rows: int, columns: int, **options: Any) -> tuple[Picture, list[Axes]]:
    picture, axes = plt.subplots(
        rows, columns, figsize=(3.5 * columns, 2.9 * rows), squeeze=False, layout="constrained", **options
    )
    return picture, list(axes.flat)


def lines(
    axis: Axes, groups: Mapping[str, Sequence[Curve]], metric: str, *, log: bool = True, order: Sequence[str] = ()
) -> None:
    """Mean line and band from least to most over the trials, for each label; its place in `order` is its colour."""
    places = list(order or groups)
    for label, curves in groups.items():
        k = places.index(label)
        t, y = curves[0]["round"], np.array([curve[metric] for curve in curves])
        axis.plot(t, y.mean(0), ("-", "--", "-.", ":")[k % 4], color=f"C{k}", label=label, linewidth=1.6)
        if len(curves) > 1:
            axis.fill_between(t, y.min(0), y.max(0), color=f"C{k}", alpha=0.2, linewidth=0)
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    if log:
        axis.set_yscale("log")


def caption(axis: Axes, number: int, text: str, x: str = ROUNDS, y: str = STATIONARITY) -> None:
    """The paper's subcaption, under the panel."""
    axis.set_xlabel(f"{x}\n({'abcdefghi'[number]}) {text}")
    axis.set_ylabel(y)


def save(picture: Picture, folder: Path, name: str) -> None:
    picture.savefig(folder / f"{name}.png", dpi=130)
    picture.savefig(folder / f"{name}.pdf", metadata={"CreationDate": None})  # same numbers, same file
    plt.close(picture)
