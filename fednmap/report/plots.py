"""Pictures of runs, as PNG or PDF."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fednmap.measure import Quantity
from fednmap.measure import quantity as quantity_of
from fednmap.names import InputError
from fednmap.report.closing import about_line, gamma_line
from fednmap.report.series import Series, collect, drawn, positive
from fednmap.runs.folder import RunFolder
from fednmap.simulation import Result
from fednmap.theory.scaling import LINEAR, Speedup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Run = str | Path | RunFolder | Result
"""What can be drawn: a run folder, or what `fednmap.run` returned."""

ALONG = ("round", "bytes_up")
STYLES = ("-", "--", "-.", ":")
LONGEST = 300  # characters of a title
DRAWABLE = 1e100  # beyond it a method is lost, and the axes' arithmetic overflows


def comparison(folder: RunFolder, path: Path) -> None:
    """Draw each quantity against rounds, if methods send unequally also against megabytes, and virtual time if any.

    Mean line, and band from least to most over trials.
    """
    series, said = collect([folder]), folder.about()
    panels = drawn(series)
    if not panels:
        return
    rows = ALONG[:1] if _send_alike(series) else ALONG
    if all(one.has("virtual_time") for one in series):
        rows = (*rows, "virtual_time")
    size = (3.6 * len(panels), 3.1 * len(rows) + 0.4)
    with picture(path, len(rows), len(panels), size) as (figure, axes):
        for row, along in zip(axes, rows, strict=True):
            for axis, shown in zip(row, panels, strict=True):
                _panel(axis, series, shown, quantity_of(along))
        lines = {line.get_gid(): line for axis in axes[0] for line in axis.get_lines()}
        legend(figure, list(lines.items()), loc="outside lower center", ncols=min(len(lines), 8))
        words = about_line(said), gamma_line(folder.results(), said.measure_gamma)
        figure.suptitle("; ".join(filter(None, words))[:LONGEST], fontsize="medium", parse_math=False)


def plot(
    runs: Run | Sequence[Run] | Mapping[str, Run],
    quantity: str = "objective",
    *,
    along: str = "round",
    labels: Mapping[str, str] | None = None,
    file: str | Path | None = None,
) -> Figure:
    """Draw one measured quantity of runs as curves; the mean over trials, with a band from least to most.

    runs:     a run folder or a `Result`, a list of them, or a dict label -> run.
    quantity: what is drawn: objective, stationarity, zeros, hoyer, test_accuracy, or a metric of yours.
    along:    the horizontal axis: round, bytes_up, train_seconds.
    labels:   other names for the curves, by method or by the label of a dict.
    file:     where the picture is saved; the suffix decides the format (.png, .pdf, .svg).

    Returns the matplotlib figure. Raises `InputError` if no run has measured the quantity.

    >>> from fednmap import run
    >>> from fednmap.algorithms import FedNMap
    >>> from fednmap.regularizers import L1
    >>> from fednmap.testing import heterogeneous
    >>> result = run(FedNMap(L1(0.2), eta_a=0.02, Q=5), heterogeneous(), rounds=100)
    >>> figure = plot({"FedNMap": result}, "stationarity")
    >>> figure.axes[0].get_xlabel()
    'communication rounds'
    """
    series = [one for name, run in _named(runs) for one in _series(name, run)]
    known = sorted({key for one in series for curves in one.trials for key in curves})
    for key in (quantity, along):
        if key not in known:
            raise InputError(
                f"expected a measured quantity, one of {', '.join(known) or 'none'}, got {key!r}; choose one"
            )
    series = [one._replace(label=(labels or {}).get(one.label, one.label)) for one in series if one.has(quantity)]
    with picture(file, size=(6.0, 4.0)) as (figure, ((axis,),)):
        _panel(axis, series, quantity_of(quantity), quantity_of(along))
        legend(axis, [(line.get_gid(), line) for line in axis.get_lines()])
        drawn_figure: Figure = figure
    return drawn_figure


def speedup(found: Speedup, path: Path) -> None:
    """Draw a sweep in log-log axes, with the fitted slope and the linear one."""
    x, y = np.array(found.values, dtype=float), np.exp(np.log(found.reached).mean(1))
    middle_x, middle_y = np.exp(np.log(x).mean()), np.exp(np.log(y).mean())
    with picture(path, size=(4.5, 3.6)) as (_, ((axis,),)):
        # trials that agree have bars of length 0, which rounding must not make negative
        bars = np.maximum(0, (y - found.reached.min(1), found.reached.max(1) - y))
        axis.errorbar(x, y, bars, fmt="o", capsize=3, label="runs")
        for slope, style, name in ((found.slope, "-", "fit"), (LINEAR, ":", "linear speedup")):
            axis.plot(x, middle_y * (x / middle_x) ** slope, style, label=f"{name}, slope {slope:.2f}")
        axis.set(xscale="log", yscale="log", ylabel=r"$\|F_{nat}(x_T)\|^2$")
        axis.set_xlabel("clients n" if found.over == "n" else "local steps Q")
        axis.set_xticks(x, [str(v) for v in found.values])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")


@contextmanager
def picture(
    path: str | Path | None, rows: int = 1, columns: int = 1, size: tuple[float, float] = (7.5, 4.5)
) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes (rows, columns), and save it as `path`, if one is given, afterwards."""
    from matplotlib import pyplot as plt  # the import waits for another thread that is importing it

    plt.switch_backend("Agg")
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    try:
        yield figure, axes
        if path is not None:
            figure.savefig(path, dpi=130)
    finally:
        plt.close(figure)


def legend(on: Any, lines: Sequence[tuple[str, Any]], **options: Any) -> None:
    """Draw a legend of a figure or axis with the names as they are: no $...$ in one is a formula, no _ hides it."""
    texts = on.legend([line for _, line in lines], [str(k) for k in range(len(lines))], **options).get_texts()
    for text, (name, _) in zip(texts, lines, strict=True):
        text.set(text=name, parse_math=False)


def _named(runs: Run | Sequence[Run] | Mapping[str, Run]) -> list[tuple[str, Run]]:
    """Return the runs with their labels; those of a list have the names of their folders, a single run has none."""
    if isinstance(runs, Mapping):
        return list(runs.items())
    if isinstance(runs, str | Path | RunFolder | Result):
        return [("", runs)]
    paths = [
        f"run {k + 1}" if isinstance(run, Result) else _folder(run).path.resolve().name for k, run in enumerate(runs)
    ]
    return list(zip(paths, runs, strict=True))


def _folder(run: str | Path | RunFolder) -> RunFolder:
    return run if isinstance(run, RunFolder) else RunFolder.open(Path(run))


def _series(label: str, run: Run) -> list[Series]:
    """Return what was measured in a run, a series per method, each called `label` if one is given."""
    if isinstance(run, Result):
        curves = {key: array("d", run.column(key)) for key in run.final}
        return [Series(label or "run", [curves], [])]
    found = collect([_folder(run)])
    if not label:
        return found
    return [one._replace(label=label if len(found) == 1 else f"{label}: {one.label}") for one in found]


def _send_alike(series: Sequence[Series]) -> bool:
    """Whether all methods have sent the same by every round: both axes then say the same."""
    per_round = [
        one.values("bytes_up").mean(0)[-1] / max(1.0, one.values("round")[0][-1])
        for one in series
        if one.has("bytes_up") and one.values("round").size
    ]
    return len(per_round) == len(series) and max(per_round) <= 1.01 * min(per_round)


def _panel(axis: Axes, series: Sequence[Series], shown: Quantity, along: Quantity) -> None:
    for k, one in enumerate(series):
        if not one.has(shown.key):
            continue
        trials = one.having(shown.key)
        x = along.scale * trials.values(along.key).mean(0)
        y = shown.scale * trials.values(shown.key)
        y = np.where(np.abs(y) < DRAWABLE, y, np.nan)
        axis.plot(x, y.mean(0), STYLES[k % 4], color=f"C{k}", gid=one.label, linewidth=1.6)
        if len(y) > 1:
            axis.fill_between(x, y.min(0), y.max(0), color=f"C{k}", alpha=0.2, linewidth=0)
    axis.set_xlabel(along.axis)
    axis.set_ylabel(shown.tex or shown.axis, parse_math=bool(shown.tex))
    axis.grid(alpha=0.3)
    values = np.concatenate([line.get_ydata() for line in axis.get_lines()])
    values = values[np.isfinite(values)]
    if shown.log and positive(series, shown.key) and len(values) and values.max() > 10 * values.min():
        axis.set_yscale("log")
