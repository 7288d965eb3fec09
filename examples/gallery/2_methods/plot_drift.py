"""
Heterogeneity and drift in two dimensions
=========================================

Three clients with different losses and an l1 penalty, on a plane where everything can be seen. Between two meetings
every client takes ten steps on its own loss. FedAvg does not know the penalty; FedMiD knows it, and counts it twice;
both end where the clients' drift balances. Zhang's method and FedNMap correct the drift and end at the minimum of f +
phi, which lies on an axis: one coordinate is exactly zero.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.animation import FuncAnimation

from fednmap import simulate
from fednmap.algorithms import FedAvg, FedMiD, FedNMap, Zhang
from fednmap.problems import LeastSquares
from fednmap.regularizers import L1

# %%
# Least squares with two rows per client is a quadratic with a minimum of its own, and a shape of its own.

minima = torch.tensor([[3.0, 1.4], [-0.8, 1.2], [2.6, -2.2]]).double()
shapes = torch.tensor([[[1.6, 0.5], [0.0, 0.5]], [[0.7, -0.4], [0.3, 1.3]], [[0.5, 0.0], [0.6, 1.1]]]).double()
problem = LeastSquares([(a, a @ m) for a, m in zip(shapes, minima, strict=True)])
phi, start = L1(0.45), torch.tensor([-1.5, -2.6]).double()
methods = {
    "FedAvg": (FedAvg(eta_a=0.08, Q=10), "#E69F00"),
    "FedMiD": (FedMiD(phi, eta_a=0.08, Q=10), "#D55E00"),
    "Zhang": (Zhang(phi, eta_a=0.08, Q=10), "#009E73"),
    "FedNMap": (FedNMap(phi, eta_a=0.08, Q=10, gamma=1.0), "#0072B2"),
}

# %%
# All take the same steps and begin at the same model. FedNMap's z begins where its prox is that point.

ROUNDS = 60
paths = {}
for name, (method, _) in methods.items():
    begin = start + phi.weight * method.gamma * start.sign() if name == "FedNMap" else start
    rounds = simulate(method, problem, rounds=ROUNDS, start=begin)
    paths[name] = np.array([start.tolist(), *(method.model(r.server).tolist() for r in rounds)])

*_, last = simulate(FedNMap(phi, eta_a=0.1, Q=1), problem, rounds=5000)
best = FedNMap(phi, eta_a=0.1, Q=1).model(last.server)
print("minimum of f + phi:", best.tolist())

# %%
# The rounds
# ----------
# Contours are those of f + phi, with its kinks at the axes. Small stars are the clients' own minima, which no method
# is looking for; the cross is the minimum of f + phi.

a, b = np.meshgrid(np.linspace(-2.2, 3.8, 121), np.linspace(-3.2, 2.4, 113))
points = torch.tensor(np.stack([a, b], -1).reshape(-1, 2))
psi = np.array([float(problem.loss(x) + phi.value(x)) for x in points]).reshape(a.shape)
levels = float(problem.loss(best) + phi.value(best)) + 0.02 * 1.9 ** np.arange(10)

figure, grid = plt.subplots(2, 2, figsize=(7.4, 7), dpi=65, layout="constrained", sharex=True, sharey=True)
lines = {}
for axes, (name, (_, color)) in zip(grid.flat, methods.items(), strict=True):
    axes.contour(a, b, psi, levels, colors="#c4c4c4", linewidths=0.8)
    axes.axhline(0, color="#e3e3e3", linewidth=0.8, zorder=0)
    axes.axvline(0, color="#e3e3e3", linewidth=0.8, zorder=0)
    axes.plot(*minima.T, "*", color="#777777", markersize=8)
    axes.plot(*best, "+", color="black", markersize=15, markeredgewidth=2)
    axes.plot(*start, "o", color="white", markeredgecolor="black", markersize=6)
    lines[name] = (
        axes.plot([], [], ".-", color=color, linewidth=1.8, markersize=5)[0],
        axes.set_title(name, fontsize=10),
    )
grid[1, 0].set(xlabel="first coefficient", ylabel="second coefficient")
grid[1, 1].set(xlabel="first coefficient")
grid[0, 0].set(ylabel="second coefficient")


def draw(k):
    for name, (line, title) in lines.items():
        here = paths[name][: k + 1]
        line.set_data(*here.T)
        title.set_text(f"{name}, round {k}: {np.linalg.norm(here[-1] - best.numpy()):.1e} away")
    return [line for line, _ in lines.values()]


frames = [*range(12), *range(12, ROUNDS + 1, 8)]
animation = FuncAnimation(figure, draw, frames=frames, interval=250)

# %%
# Where they end
# --------------
# The distance to the minimum, round by round. A smaller step would bring FedAvg nearer to the minimum of f, and
# FedMiD nearer to that of f + 2 phi: neither is what was asked for.

figure, axes = plt.subplots(figsize=(7, 3.8), layout="constrained")
for name, style, width in (("FedAvg", "-.", 2), ("FedMiD", "--", 2), ("FedNMap", "-", 5), ("Zhang", "--", 1.5)):
    away = np.linalg.norm(paths[name] - best.numpy(), axis=1)
    color = "black" if name == "Zhang" else methods[name][1]  # it lies on FedNMap's
    a, b = paths[name][-1]
    axes.semilogy(away, style, color=color, linewidth=width, label=f"{name}: ends at ({a:.2f}, {b:.2f})")
axes.set(xlabel="round", ylabel="distance to the minimum of f + phi", ylim=(1e-15, 30))
axes.grid(alpha=0.3)
axes.legend(frameon=False, fontsize=9)
plt.show()
