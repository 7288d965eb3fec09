"""
Privacy against accuracy
========================

Differential privacy hides whether a client took part at all. Each client clips what it sends, noise is added to the
sum, and an accountant says what the whole run has told: epsilon, small where little can be learnt about anybody. The
price is accuracy, and it falls with the number of clients: the same noise is shared by more of them.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

from fednmap import run
from fednmap.algorithms import FedNMap
from fednmap.data import ClientData
from fednmap.privacy import Privacy, noise_for
from fednmap.problems import Logistic
from fednmap.regularizers import L1
from fednmap.simulation.participation import PoissonSampler

ROUNDS, SHARE, DELTA = 60, 0.2, 1e-4
rng = torch.Generator().manual_seed(0)
truth = torch.zeros(20).double()
truth[:5] = torch.tensor([2.0, -1.5, 1.0, -1.0, 0.5])


def rows(count):
    x = torch.randn(count, 20, generator=rng, dtype=torch.float64)
    return x, (torch.rand(count, generator=rng, dtype=torch.float64) < torch.sigmoid(x @ truth)).long()


x_test, y_test = rows(5000)

# %%
# Clients of ten rows each, sorted by label so that they are unlike. A round draws every client by a coin of its own,
# which is what amplification by sampling needs; the noise for a wanted epsilon is solved for.

epsilons, sizes = (0.5, 1.0, 2.0, 4.0, 8.0), (300, 1000, 3000)
accuracy = np.empty((len(sizes), len(epsilons)))
without = np.empty(len(sizes))
for i, n in enumerate(sizes):
    x, y = rows(10 * n)
    order = y.argsort()
    problem = Logistic(ClientData.split(x, y, order.split(10)), classes=2)
    method = FedNMap(L1(0.001), eta_a=0.4, Q=5)

    def correct(uplink, problem=problem, method=method):
        result = run(method, problem, rounds=ROUNDS, every=ROUNDS, sampler=PoissonSampler(SHARE), uplink=uplink)
        return float(((x_test @ result.x > 0).long() == y_test).double().mean())

    without[i] = correct(None)
    for j, epsilon in enumerate(epsilons):
        noise = noise_for(epsilon, SHARE, ROUNDS, DELTA)
        accuracy[i, j] = correct(Privacy(clip=0.5, noise_multiplier=noise, delta=DELTA))

# %%
figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
styles = (("#D55E00", ":", "o"), ("#0072B2", "--", "s"), ("#000000", "-", "^"))
for n, values, (color, line, marker) in zip(sizes, accuracy, styles, strict=True):
    axes.plot(epsilons, 100 * values, color=color, linestyle=line, marker=marker, label=f"{n} clients")
axes.axhline(100 * without.max(), color="#888888", linewidth=1)
axes.text(epsilons[0], 100 * without.max() - 0.05, "without noise", color="#666666", fontsize=9, va="top")
axes.set(xscale="log", xlabel="epsilon of the whole run (delta = 1e-4)", ylabel="test accuracy (%)")
axes.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
axes.minorticks_off()
axes.grid(alpha=0.3)
axes.legend(frameon=False, loc="lower right")
plt.show()
