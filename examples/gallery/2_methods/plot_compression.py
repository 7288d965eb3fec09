"""
Fewer bytes: compressed uplinks
===============================

``CompressedFedNMap`` sends a part of what FedNMap sends: the largest entries, entries drawn at random, or all of them
in a few bits. What was not sent is remembered, so that the method ends at the same point, the exact one.
"""

# %%
# A sparse regression whose ten clients disagree.

import matplotlib.pyplot as plt
import torch

from fednmap import simulate
from fednmap.algorithms import CompressedFedNMap, FedNMap
from fednmap.measure import stationarity
from fednmap.problems import LeastSquares
from fednmap.regularizers import L1

rng = torch.Generator().manual_seed(0)
truth = torch.randn(100, generator=rng, dtype=torch.float64) * (torch.arange(100) < 10)
data = []
for _ in range(10):
    rows = torch.randn(400, 100, generator=rng, dtype=torch.float64)
    own = truth + 0.3 * torch.randn(100, generator=rng, dtype=torch.float64)
    data.append((rows, rows @ own))
problem, phi = LeastSquares(data), L1(0.05)
L = problem.smoothness()

# %%
# Bytes are those of the packed messages. Gradients are exact here, so that error control, which averages noise out, is
# switched off by ``control=0``. All have the same steps: how much of one the server takes (``pace``) follows from what
# gets through, all of it with a few bits, and 5 % of it with a tenth of the entries drawn at random.

steps = {"eta_a": 0.4 / L, "Q": 2, "gamma": 1 / L}
methods = {
    "FedNMap": FedNMap(phi, **steps),
    "8 bits": CompressedFedNMap(phi, compressor="quantised", bits=8, control=0, **steps),
    "4 bits": CompressedFedNMap(phi, compressor="quantised", bits=4, control=0, **steps),
    "top 10 %": CompressedFedNMap(phi, K=0.1, control=0, **steps),
    "top 1 %": CompressedFedNMap(phi, K=0.01, control=0, **steps),
    "random 10 %": CompressedFedNMap(phi, K=0.1, compressor="random", control=0, **steps),
}
curves = {}
for name, method in methods.items():
    up, found = 0.0, []
    for r in simulate(method, problem, rounds=2000):
        up += r.bytes_up / 1e6
        found.append((up, float(stationarity(problem, phi, method.model(r.server), 1 / L))))
        if found[-1][1] < 1e-18:
            break
    curves[name] = found
    print(f"{name:12} {len(found):4d} rounds, {up:.2f} MB up, |F_nat|^2 = {found[-1][1]:.0e}")

# %%
# To the left is better: 4 bits per entry cost as many rounds as 64.

figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
for name, found in curves.items():
    axes.loglog(*zip(*found, strict=True), label=name)
axes.set(xlabel="megabytes sent by all clients", ylabel="$|F_{nat}(x)|^2$", title="Lasso with ten clients")
axes.legend(frameon=False)
plt.show()
