"""
Linear speedup: twice the clients, half the error
=================================================

With noisy gradients a run comes as near to a solution as the noise allows. FedNMap averages the noise of all clients:
with n of them the squared residual at the end is proportional to 1/n, a slope of -1 on logarithmic axes, also when
the clients' data differ.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

from fednmap import run
from fednmap.algorithms import FedNMap
from fednmap.problems import LeastSquares
from fednmap.regularizers import L1

# %%
# The same 4,096 rows are cut into 2, 4, ..., 128 clients of equal size, so that f is the same function each time: once
# dealt out at random, once sorted by target, which makes the clients as unlike as can be. Minibatches are of 4 rows,
# and steps are the same for every n; only the noise differs. The problem is well conditioned on purpose: where 200
# rounds do not reach the noise, as with logistic regression on digits, more clients cannot show. What is measured is
# the mean of the squared natural residual over the last 150 of 200 rounds, in two runs with different minibatches.

rng = torch.Generator().manual_seed(0)
features = torch.randn(4096, 20, generator=rng)
target = features[:, :5].sum(1) + torch.randn(4096, generator=rng)
orders = {"alike": torch.randperm(4096, generator=rng), "sorted": target.argsort()}
clients = np.array([2, 4, 8, 16, 32, 64, 128])


def residuals(order, n):
    """|F_nat|^2 every five rounds, mean of two runs."""
    data = [(features[rows], target[rows]) for rows in order.chunk(n)]
    problems = [LeastSquares(data, batch_size=4, seed=seed) for seed in (0, 1)]
    method = FedNMap(L1(0.05), eta_a=0.02, Q=5)
    found = [run(method, p, rounds=200, every=5, measure_gamma=1.0).column("stationarity") for p in problems]
    return np.mean(found, 0)


curves = {name: [residuals(order, n) for n in clients] for name, order in orders.items()}

# %%
# Clients that differ are as good as clients that are alike: heterogeneity does not cost the speedup. Both fitted slopes
# are a little steeper than -1.

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
shades = plt.get_cmap("cividis")(np.linspace(0, 0.9, len(clients)))
for n, curve, shade in zip(clients, curves["sorted"], shades, strict=True):
    left.semilogy(5 * np.arange(len(curve)), curve, color=shade, linewidth=1.8)
    left.text(204, curve[-20:].mean(), f"n = {n}", color=shade, fontsize=9, va="center")
left.set(xlabel="round", ylabel="|F_nat|²", xlim=(0, 240), title="sorted clients")
for name, color, style in (("alike", "#D55E00", "s--"), ("sorted", "#0072B2", "o-")):
    ends = np.array([curve[-30:].mean() for curve in curves[name]])
    slope, _ = np.polyfit(np.log(clients), np.log(ends), 1)
    right.loglog(clients, ends, style, color=color, label=f"clients {name}: slope {slope:.2f}")
right.loglog(clients, 2 * ends[0] * clients[0] / clients, ":", color="black", label="slope -1")
right.set(xlabel="clients n", ylabel="|F_nat|², mean of the last 150 rounds")
right.set_xticks(clients, clients)
right.minorticks_off()
right.legend(frameon=False)
for axes in (left, right):
    axes.grid(alpha=0.3)
    axes.title.set_fontsize(10)
plt.show()
