"""
Linear speedup: twice the clients, half the error
=================================================

With noisy gradients a run comes as near to a solution as the noise allows. FedNMap averages the noise of all clients: with n of them the squared residual at
the end is proportional to 1/n, a slope of -1 on logarithmic axes, also when the clients' data differ.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

from fednmap import run
from fednmap.algorithms import FedNMap
from fednmap.problems import LeastSquares
from fednmap.regularizers import L1

# %%
# The same 4,096 rows are cut into 2, 4, ..., 128 clients of equal size, sorted by their target: f is the same function each time, and the clients are as unlike
# as can be. Minibatches are of 4 rows, steps are the same for every n; only the noise differs. What is measured is the mean of the squared natural residual
# over the second half of 300 rounds, in three runs with different minibatches.

rng = torch.Generator().manual_seed(0)
features = torch.randn(4096, 20, generator=rng)
target = features[:, :5].sum(1) + torch.randn(4096, generator=rng)
order = target.argsort()

clients, seeds = [2, 4, 8, 16, 32, 64, 128], range(3)
curves, ends = {}, []
for n in clients:
    data = [(features[rows], target[rows]) for rows in order.chunk(n)]
    for seed in seeds:
        problem = LeastSquares(data, batch_size=4, seed=seed)
        method = FedNMap(L1(0.05), eta_a=0.02, Q=5)
        result = run(method, problem, rounds=300, every=5, measure_gamma=1.0)
        curves.setdefault(n, []).append(result.column("stationarity"))
    ends.append(np.mean(np.array(curves[n])[:, -30:]))
rounds = result.column("round")
slope, level = np.polyfit(np.log(clients), np.log(ends), 1)

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
shades = plt.get_cmap("cividis")(np.linspace(0, 0.9, len(clients)))
for n, shade in zip(clients, shades, strict=True):
    left.semilogy(rounds, np.mean(curves[n], 0), color=shade, linewidth=1.8)
    left.text(306, np.mean(curves[n], 0)[-20:].mean(), f"n = {n}", color=shade, fontsize=9, va="center")
left.set(xlabel="round", ylabel="|F_nat|², mean of three runs", xlim=(0, 345))
right.loglog(clients, ends, "o", color="#0072B2", markersize=7, label="mean of the last 150 rounds")
right.loglog(
    clients, np.exp(level) * np.array(clients) ** slope, "-", color="#0072B2", label=f"fitted slope {slope:.2f}"
)
right.loglog(clients, ends[0] * clients[0] / np.array(clients), "--", color="#D55E00", label="slope -1: linear speedup")
right.set(xlabel="clients n", ylabel="|F_nat|² at the end")
right.set_xticks(clients, clients)
right.minorticks_off()
right.legend(frameon=False)
for axes in (left, right):
    axes.grid(alpha=0.3)
plt.show()
