"""Pictures of a path and of the choice on it."""

from __future__ import annotations

from pathlib import Path as File
from typing import Any

import numpy as np

from fednmap.estimators.path import RegularizationPath
from fednmap.report.plots import legend, picture

NAMED = 12
"""Columns whose names are written beside their curves: those with the largest coefficients."""


def plot_path(path: RegularizationPath, file: str | File, chosen: float | None = None, scale: Any = None) -> None:
    """Coefficients against lam, the largest with their names; `chosen` marks a lam.

    scale: factors for the columns, such as their deviations, so that coefficients are comparable.
    """
    factor = np.ones(path.coefs.shape[2]) if scale is None else np.asarray(scale, float)
    lambdas = np.clip(path.lambdas, 1e-300, None)
    ends: list[tuple[float, str, Any]] = []
    with picture(file) as (_, axes):
        axis = axes[0, 0]
        for k in range(path.coefs.shape[1]):
            curves = path.coefs[:, k] * factor
            order = np.argsort(-np.abs(curves[-1]))
            prefix = f"{path.classes[k]}: " if path.classes else ""
            for place, j in enumerate(order):
                if not curves[:, j].any():
                    continue
                (line,) = axis.plot(lambdas, curves[:, j], linewidth=1.2)
                if place < max(2, NAMED // path.coefs.shape[1]):
                    ends.append((float(curves[-1, j]), f"{prefix}{path.names[j]}", line.get_color()))
        _write_apart(axis, float(lambdas[-1]), ends)
        _along_lambda(axis, chosen, None)
        axis.set_ylabel("coefficient" if scale is None else "coefficient per standard deviation")


def plot_cv(fitted: Any, file: str | File) -> None:
    """The held-out loss against lam with one standard error, or the criterion; the choices are marked."""
    lambdas = np.clip(fitted.lambdas_, 1e-300, None)
    with picture(file) as (_, axes):
        axis = axes[0, 0]
        if fitted.select in ("bic", "ebic"):
            axis.plot(lambdas, fitted.criterion_, "o-", markersize=3)
            axis.set_ylabel(fitted.select.upper())
            _along_lambda(axis, fitted.lam_, None)
            return
        folds = zip(fitted.cv_losses_, fitted.folds_, strict=True)
        lines = [(name, axis.plot(lambdas, losses, linewidth=0.7, alpha=0.6)[0]) for losses, name in folds]
        mean = axis.errorbar(lambdas, fitted.cv_mean_, fitted.cv_se_, fmt="o-", color="black", markersize=3)
        axis.set_ylabel("held-out loss")
        legend(axis, [*lines, ("mean", mean)], fontsize="x-small")
        _along_lambda(axis, fitted.lam_min_, fitted.lam_1se_)


def _write_apart(axis: Any, x: float, ends: list[tuple[float, str, Any]]) -> None:
    """Names at the ends of their curves, in the curves' colours, moved apart where they would lie on each other."""
    low, high = axis.get_ylim()
    gap, last = (high - low) / 24, -np.inf
    places = []
    for y, *_ in sorted(ends):
        last = max(y, last + gap)
        places.append(last)
    over = max(0.0, places[-1] - high) if places else 0.0
    for place, (y, name, colour) in zip(places, sorted(ends), strict=True):
        at = place - over * (place - low) / (places[-1] - low) if over else place
        style = {"arrowstyle": "-", "color": colour, "linewidth": 0.5}
        axis.annotate(
            name,
            (x, y),
            xytext=(1.03, (at - low) / (high - low)),
            textcoords="axes fraction",
            fontsize="x-small",
            va="center",
            color=colour,
            arrowprops=style,
            parse_math=False,
        )


def _along_lambda(axis: Any, chosen: float | None, other: float | None) -> None:
    axis.set_xscale("log")
    axis.invert_xaxis()
    axis.set_xlabel("lam")
    axis.grid(alpha=0.3)
    for lam, style in ((chosen, "--"), (other, ":")):
        if lam:
            axis.axvline(lam, color="grey", linestyle=style, linewidth=1)
