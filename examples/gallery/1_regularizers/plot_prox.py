"""
Every penalty of one coordinate, and its prox
=============================================

Each panel shows phi on the right axis and prox(v, step) on the left, with the identity for comparison. Convex
penalties shrink every entry; the weakly convex ones leave large entries alone; L0 jumps, which is why the theory
stops there. On one coordinate L2, LInf, GroupLasso, Slope and Nuclear are L1, and every ball is a Box.
"""

from __future__ import annotations

import sys
import warnings

import matplotlib.pyplot as plt
import torch

from fednmap.core import Regularizer
from fednmap.regularizers import L0, L1, MCP, SCAD, Box, ElasticNet, L1Ball, LogSum, NonNegative, SquaredL2
from fednmap.regularizers import TransformedL1 as TL1

STEP = 1.0
PENALTY, PROX, IDENTITY = "#b35806", "#2166ac", "#bbbbbb"


def panels() -> list[Regularizer]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hard = L0(0.5, allow_nonconvex=True)
    convex: list[Regularizer] = [L1(1.0), SquaredL2(0.5), ElasticNet(0.7, 0.25)]
    constraints: list[Regularizer] = [Box(-1, 1.5), NonNegative(), L1Ball(1.0)]
    weakly: list[Regularizer] = [MCP(1.0, 2.0), SCAD(0.8, 2.8), LogSum(1.5, 1.5), TL1(0.6, 2.0)]
    return [*convex, *constraints, *weakly, hard]


def draw(axes: plt.Axes, phi: Regularizer) -> None:
    v = torch.linspace(-4, 4, 2001, dtype=torch.float64)
    value = phi.value(v[:, None])
    value[value.isinf()] = torch.nan
    x = phi.prox(v[:, None], STEP)[:, 0]
    # a jump is a gap, not a steep line
    x[1:][x.diff() > 0.5] = torch.nan
    axes.plot(v, v, color=IDENTITY, linewidth=1, linestyle="--")
    axes.plot(v, x, color=PROX, linewidth=2)
    axes.set(xlim=(-4, 4), ylim=(-4, 4), xticks=[-4, -2, 0, 2, 4], yticks=[-4, -2, 0, 2, 4])
    axes.tick_params(labelsize=8)
    right = axes.twinx()
    right.plot(v, value, color=PENALTY, linewidth=1.5)
    if phi.rho == float("inf"):
        right.plot([0], phi.value(torch.zeros(1, 1)), "o", color=PENALTY, markersize=4)
    right.set(ylim=(-4, 4), yticks=[0, 2, 4])
    right.tick_params(labelsize=8, colors=PENALTY)
    numbers = ", ".join(f"{name} = {number:g}" for name, number in vars(phi).items() if isinstance(number, float | int))
    title = ", ".join(part for part in numbers.split(", ") if not part.startswith(("rho", "allow")))
    axes.set_title(f"{type(phi).__name__}\n{title or ' '}", fontsize=9)
    note = "not weakly convex" if phi.rho == float("inf") else f"rho = {phi.rho:.3g}"
    axes.text(3.8, -3.7, note, fontsize=8, ha="right", color="#444444")


figure, grid = plt.subplots(3, 4, figsize=(11, 8), layout="constrained")
for axes, phi in zip(grid.flat, panels(), strict=False):
    draw(axes, phi)
legend = grid.flat[-1]
legend.axis("off")
for color, style, label in (
    (PROX, "-", f"prox(v, step = {STEP:g}), left axis"),
    (PENALTY, "-", "phi(x), right axis; none = +inf"),
    (IDENTITY, "--", "the identity"),
):
    legend.plot([], [], color=color, linestyle=style, linewidth=2, label=label)
legend.legend(loc="center", frameon=False, fontsize=9)
if len(sys.argv) > 1:  # python examples/gallery/1_regularizers/plot_prox.py docs/images/prox.png
    figure.savefig(sys.argv[1], dpi=110)
