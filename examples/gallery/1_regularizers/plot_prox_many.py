"""
Penalties of several coordinates, and their prox
================================================

What needs more than one coordinate to be seen. In the plane every dot of a regular grid (grey) is moved by the prox to
where its line ends (blue): norms pull towards their corners and towards 0, constraints project onto their set. Groups,
signals and matrices are shown before and after.
"""

from __future__ import annotations

import sys
import warnings

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from fednmap.core import Regularizer
from fednmap.regularizers import (
    L2,
    Affine,
    GroupLasso,
    Halfspace,
    L1Ball,
    L2Ball,
    LInf,
    LInfBall,
    Nuclear,
    Simplex,
    Slope,
    SparseGroupLasso,
    TopK,
    TotalVariation,
)

BEFORE, AFTER, WAY = "#bbbbbb", "#2166ac", "#92c5de"


def vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def plane() -> dict[str, Regularizer]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hard = TopK(1, allow_nonconvex=True)
    return {
        "L2, weight 0.8": L2(0.8),
        "LInf, weight 0.8": LInf(0.8),
        "Slope, weights 1.2 and 0.4": Slope(vector(1.2, 0.4)),
        "SparseGroupLasso, 0.4 and 0.4": SparseGroupLasso(0.4, 0.4, [[0, 1]]),
        "L1Ball, radius 1": L1Ball(1.0),
        "L2Ball, radius 1": L2Ball(1.0),
        "LInfBall, radius 1": LInfBall(1.0),
        "Simplex, total 1": Simplex(1.0),
        "Halfspace, x + 2 y at most 1": Halfspace(vector(1.0, 2.0), 1.0),
        "Affine, x - y = 0.5": Affine(vector(1.0, -1.0)[None], vector(0.5)),
        "TopK, k = 1 (not weakly convex)": hard,
    }


def draw_plane(axes: plt.Axes, phi: Regularizer) -> None:
    side = torch.linspace(-2, 2, 10, dtype=torch.float64)
    v = torch.cartesian_prod(side, side)
    x = phi.prox(v, 1.0)
    axes.plot(torch.stack([v[:, 0], x[:, 0]]), torch.stack([v[:, 1], x[:, 1]]), color=WAY, linewidth=0.7)
    axes.plot(*v.T, ".", color=BEFORE, markersize=3)
    axes.plot(*x.T, ".", color=AFTER, markersize=4)
    axes.axhline(0, color="#dddddd", linewidth=0.6, zorder=0)
    axes.axvline(0, color="#dddddd", linewidth=0.6, zorder=0)
    axes.set(xlim=(-2.3, 2.3), ylim=(-2.3, 2.3), aspect="equal", xticks=[-2, 0, 2], yticks=[-2, 0, 2])


def draw_groups(axes: plt.Axes) -> None:
    """Four groups of three: two of them go as a whole."""
    v = vector(1.4, -0.9, 1.1, 0.5, -0.3, 0.4, 0.9, 1.6, -0.2, -0.4, 0.2, 0.6)
    groups = [[3 * g, 3 * g + 1, 3 * g + 2] for g in range(4)]
    bars(axes, v, GroupLasso(0.9, groups).prox(v, 1.0))
    for edge in (2.5, 5.5, 8.5):
        axes.axvline(edge, color="#888888", linewidth=0.8, linestyle=":")


def draw_rank(axes: plt.Axes) -> None:
    """The singular values of a 6 x 6 matrix of rank 2 and noise: the small ones become 0."""
    generator = torch.Generator().manual_seed(0)
    a, b, noise = (torch.randn(6, k, generator=generator, dtype=torch.float64) for k in (2, 2, 6))
    v = a @ b.T + 0.3 * noise
    x = Nuclear(1.2, (6, 6)).prox(v.flatten(), 1.0).reshape(6, 6)
    bars(axes, torch.linalg.svdvals(v), torch.linalg.svdvals(x))


def draw_signal(axes: plt.Axes) -> None:
    """Three levels and noise: the levels come back."""
    generator = torch.Generator().manual_seed(0)
    level = torch.repeat_interleave(vector(0.0, 1.5, 0.5), 30)
    v = level + 0.25 * torch.randn(90, generator=generator, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without numba the same result comes slower
        x = TotalVariation(1.0).prox(v, 1.0)
    axes.plot(v, ".", color=BEFORE, markersize=4)
    axes.step(range(90), x, color=AFTER, linewidth=2, where="mid")


def bars(axes: plt.Axes, v: Tensor, x: Tensor) -> None:
    axes.bar(range(len(v)), v, color=BEFORE, width=0.8)
    axes.bar(range(len(x)), x, color=AFTER, width=0.45)
    axes.axhline(0, color="#888888", linewidth=0.6)
    axes.set_xticks([])


figure, grid = plt.subplots(4, 4, figsize=(11, 10.5), layout="constrained")
places = iter(grid.flat)
for title, phi in plane().items():
    axes = next(places)
    draw_plane(axes, phi)
    axes.set_title(title, fontsize=9)
for title, draw in (
    ("GroupLasso, weight 0.9, four groups", draw_groups),
    ("Nuclear, weight 1.2: singular values", draw_rank),
    ("TotalVariation, weight 1", draw_signal),
):
    axes = next(places)
    draw(axes)
    axes.set_title(title, fontsize=9)
legend = next(places)
for axes in (legend, *places):
    axes.axis("off")
legend.plot([], [], ".", color=BEFORE, markersize=8, label="v")
legend.plot([], [], ".-", color=AFTER, markersize=8, label="prox(v, step = 1)")
legend.legend(loc="center", frameon=False, fontsize=10)
if len(sys.argv) > 1:  # python examples/gallery/1_regularizers/plot_prox_many.py docs/images/prox-many.png
    figure.savefig(sys.argv[1], dpi=110)
