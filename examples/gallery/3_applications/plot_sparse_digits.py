"""
Sparse digits
=============

Twenty clients hold one or two digits each and train one network together. An l1 penalty asks for weights that are
exactly zero; the larger its weight lam, the more of them. FedNMap solves that problem. What people do instead is to
train a dense model by FedAvg and to set its smallest weights to zero afterwards: beyond some sparsity that costs
accuracy.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

from fednmap import run
from fednmap.algorithms import FedNMap, PrunedFedAvg
from fednmap.data import ClientData, load, partition
from fednmap.measure import zeros
from fednmap.models import mlp
from fednmap.problems import Network
from fednmap.regularizers import L1

digits = load("digits")
parts = partition("sorted", digits.y_train, 20)
torch.manual_seed(0)
module = mlp(64, 10, hidden=(64,), activation="relu")
data = ClientData.split(digits.x_train, digits.y_train, parts)
problem = Network(module, torch.nn.functional.cross_entropy, data, batch_size=32)


def accuracy(x):
    with torch.no_grad():
        return 100 * float((problem.module(x)(digits.x_test).argmax(1) == digits.y_test).float().mean())


# %%
# A path of models
# ----------------
# From a small lam to larger ones, each run begins where the one before ended. For a network that is the good
# direction: it first learns, then gives weights back. FedNMap is started at its z, the point in front of the prox.

lambdas = [1e-4, 3e-4, 6e-4, 1e-3, 1.5e-3, 2.2e-3, 3.2e-3, 4.5e-3, 6e-3]
path, z = [], problem.start
for k, lam in enumerate(lambdas):
    result = run(FedNMap(L1(lam), eta_a=0.2, Q=10), problem, rounds=40 if k else 100, start=z, every=1000)
    path.append(result.x)
    z = result.last.server.z

# %%
# FedAvg for as many rounds as the whole path had, then pruned to one sparsity after the other.

fedavg = run(PrunedFedAvg(eta_a=0.2, Q=10, zeros=0), problem, rounds=100 + 40 * (len(lambdas) - 1), every=1000)
shares = np.array([0, 0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.93, 0.95])
pruned = [PrunedFedAvg(zeros=float(share)).model(fedavg.last.server) for share in shares]

figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
found = [100 * zeros(x) for x in path]
axes.plot(
    found, [accuracy(x) for x in path], "o-", color="#0072B2", linewidth=2, label="FedNMap with l1, nine values of lam"
)
axes.plot(
    100 * shares,
    [accuracy(x) for x in pruned],
    "s--",
    color="#D55E00",
    linewidth=2,
    label="FedAvg, smallest weights set to 0",
)
for x, lam, share in zip(path, lambdas, found, strict=True):
    if lam in (1e-4, 3e-4, 1e-3, 3.2e-3):
        axes.annotate(f"lam {lam:g}", (share, accuracy(x)), (0, 8), textcoords="offset points", ha="center", fontsize=8)
axes.set(xlabel="weights that are exactly zero (%)", ylabel="test accuracy (%)", ylim=(55, 101))
axes.grid(alpha=0.3)
axes.legend(loc="lower left", frameon=False)

# %%
# What survives
# -------------
# Each small picture is what one of the 64 hidden units reads of the 8 x 8 pixels, the largest units first; white is
# exactly zero. The penalty switches whole units off, leaves a few pixels to the others, and nothing at the blank
# margin.

chosen = lambdas.index(3.2e-3)


def pictures(x):
    weights = problem.module(x)[1].weight.detach()
    order = weights.norm(dim=1).argsort(descending=True)
    tiles = torch.nn.functional.pad(weights[order].view(8, 8, 8, 8), (1, 1, 1, 1), value=float("nan"))
    return tiles.permute(0, 2, 1, 3).reshape(80, 80)


figure, both = plt.subplots(1, 2, figsize=(9, 5), layout="constrained")
titles = f"FedNMap, lam = {lambdas[chosen]:g}", "FedAvg"
for axes, title, x in zip(both, titles, (path[chosen], fedavg.x), strict=True):
    shades = plt.get_cmap("RdBu_r").with_extremes(bad="#dddddd")
    picture = axes.imshow(pictures(x), cmap=shades, vmin=-1, vmax=1)
    axes.set_title(f"{title}\n{100 * zeros(x):.0f} % zeros, accuracy {accuracy(x):.1f} %", fontsize=10)
    axes.set(xticks=[], yticks=[])
figure.colorbar(picture, ax=both, shrink=0.7, label="weight", extend="both")
plt.show()
