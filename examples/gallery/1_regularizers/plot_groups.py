"""
Groups remove neurons and channels
==================================

A group lasso on the rows of a layer switches whole hidden units off; on the filters of a convolution, whole channels.
What is zero as a group can be taken out: the pruned network computes the same numbers and is smaller and faster in any
program, without sparse kernels. An l1 penalty may leave more zeros, but scattered: most units stay.
"""

from time import perf_counter

import matplotlib.pyplot as plt
import numpy as np
import torch

from fednmap import run
from fednmap.algorithms import FedNMap
from fednmap.data import ClientData, load, partition
from fednmap.models import cnn, mlp
from fednmap.models.prune import prune
from fednmap.problems import Network
from fednmap.regularizers import L1, PerLayer, Zero, rows

digits = load("digits")
parts = partition("dirichlet:1", digits.y_train, 5)
data = ClientData.split(digits.x_train, digits.y_train, parts)


def trained(module, rules, eta_a, rounds=60):
    """Forty rounds without a penalty, so that there is something to choose from, then `rounds` with it."""
    problem = Network(module, torch.nn.functional.cross_entropy, data, batch_size=32)
    first = run(FedNMap(Zero(), eta_a=eta_a, Q=10), problem, rounds=40, every=1000)
    phi = PerLayer(rules, module)
    return run(FedNMap(phi, eta_a=eta_a, Q=10), problem, rounds=rounds, start=first.x, every=1000).module()


def accuracy(module):
    with torch.no_grad():
        return 100 * float((module(digits.x_test).argmax(1) == digits.y_test).float().mean())


def size(module):
    return sum(p.numel() for p in module.parameters())


# %%
# Hidden units
# ------------
# A network with 256 hidden units, which is far too many. The group lasso is on what each unit reads.

torch.manual_seed(0)
dense = mlp(64, 10, hidden=(256,), activation="relu")
grouped = trained(dense, {"1.weight": rows(0.01)}, 0.2)
scattered = trained(dense, {"1.weight": L1(0.002)}, 0.2)

figure, both = plt.subplots(1, 2, figsize=(9, 4.4), layout="constrained")
for axes, module, title in zip(both, (grouped, scattered), ("group lasso on rows", "l1"), strict=True):
    weights = module[1].weight.detach().abs()
    order = weights.norm(dim=1).argsort(descending=True)
    axes.imshow(weights[order], cmap="magma_r", vmin=0, vmax=0.4, aspect="auto", interpolation="nearest")
    empty, all_zeros = int((weights == 0).all(1).sum()), float((weights == 0).float().mean())
    axes.set_title(
        f"{title}: {100 * all_zeros:.0f} % zeros, {empty} of 256 units off\naccuracy {accuracy(module):.1f} %",
        fontsize=10,
    )
    axes.set(xlabel="pixel", ylabel="hidden unit, largest first")

# %%
# Channels
# --------
# The same on the filters of a small convolutional network, and on its hidden units. The pruned copy gives the same
# outputs.

torch.manual_seed(0)
wide = cnn((1, 8, 8), 10, channels=(16, 32), hidden=64)
sparse = trained(wide, {"0.weight": rows(0.02), "3.weight": rows(0.02), "7.weight": rows(0.02)}, 0.1)
small = prune(sparse)
with torch.no_grad():
    torch.testing.assert_close(small(digits.x_test), sparse(digits.x_test), rtol=1e-3, atol=1e-4)
print(small)

# %%
# What it is worth
# ----------------
# Parameters and time as a share of those of the network that was trained; times are the fastest of several passes
# over 5,740 pictures.


@torch.no_grad()
def seconds(module):
    pictures, times = digits.x_train[:1435].repeat(4, 1, 1, 1), []
    for _ in range(15):
        began = perf_counter()
        module(pictures)
        times.append(perf_counter() - began)
    return min(times)


pairs = {"256 hidden units": (grouped, prune(grouped)), "16 and 32 channels": (sparse, small)}
figure, axes = plt.subplots(figsize=(7.5, 3.4), layout="constrained")
at = np.arange(len(pairs))
for shift, measured, color, hatch, label in (
    (0.2, size, "#0072B2", "", "parameters"),
    (-0.2, seconds, "#E69F00", "//", "time of a prediction"),
):
    shares = [100 * measured(after) / measured(before) for before, after in pairs.values()]
    bars = axes.barh(at + shift, shares, 0.36, color=color, hatch=hatch, edgecolor="white", label=label)
    axes.bar_label(bars, [f" {share:.0f} %: {100 / share:.1f} times less" for share in shares], fontsize=9)
axes.set_yticks(at, [f"{name}\naccuracy {accuracy(after):.1f} %" for name, (_, after) in pairs.items()])
axes.set(xlabel="left after pruning (%)", xlim=(0, 100))
axes.spines[["top", "right"]].set_visible(False)
axes.legend(loc="lower right", frameon=False)
plt.show()
