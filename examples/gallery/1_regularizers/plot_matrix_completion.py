"""
Low rank across clients: a matrix that nobody sees
==================================================

Ratings, sensors, shops by products: a table of low rank of which every client knows some entries of its own rows. The
nuclear norm fills the gaps, and no entry leaves its client. The problem is a small class of one's own: five members
are all that the library asks for.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

from fednmap import Tolerance, run
from fednmap.algorithms import FedNMapMemory
from fednmap.regularizers import Nuclear

ROWS, COLUMNS, RANK, CLIENTS, LAM = 40, 30, 3, 5, 0.7

# %%
# A problem of one's own
# ----------------------
# Client i holds a mask of the entries it knows. Its loss is the squared error on these; x is the whole matrix, row by
# row. `oracle` is written for any number of clients at once.


class Completion:
    """f_i(x) = n / (2 N) |mask_i (x - seen)|^2, where N entries are known by the n clients together."""

    def __init__(self, seen, masks):
        self.seen, self.masks = seen, masks
        self.n, self.dim = masks.shape
        self.scale = self.n / masks.sum()

    def oracle(self, clients, t):
        mine = self.masks[clients]
        return lambda x, q: self.scale * mine * (x - self.seen)

    def gradient(self, x):
        return (self.scale * self.masks * (x - self.seen)).mean(0)

    def loss(self, x):
        return self.scale * (self.masks * (x - self.seen).square()).sum(1).mean() / 2


rng = torch.Generator().manual_seed(1)
left, right = torch.randn(ROWS, RANK, generator=rng), torch.randn(RANK, COLUMNS, generator=rng)
truth = left @ right
noisy = truth + 0.1 * torch.randn(ROWS, COLUMNS, generator=rng)
known = torch.rand(ROWS, COLUMNS, generator=rng) < 0.45
owner = torch.arange(ROWS) * CLIENTS // ROWS
masks = torch.stack([(known & (owner == i)[:, None]).flatten() for i in range(CLIENTS)]).float()

# %%
# One fit together, and one by each client alone, which knows its own rows only. Gradients are exact, so one local
# step per round is best, and `memory` makes few rounds of many. f has curvature L = scale / n in the entries that are
# known.


def complete(masks, lam):
    problem = Completion(noisy.flatten(), masks)
    L = float(problem.scale) / problem.n
    method = FedNMapMemory(Nuclear(lam * L, (ROWS, COLUMNS)), eta_a=1 / L, Q=1, memory=10)
    return run(method, problem, rounds=400, stop=Tolerance(1e-4)).x.view(ROWS, COLUMNS)


together = complete(masks, LAM)
alone = torch.zeros_like(truth)
for i in range(CLIENTS):
    alone[owner == i] = complete(masks[i : i + 1], LAM)[owner == i]


def error(x):
    return float((x - truth)[~known].norm() / truth[~known].norm())


# %%
figure, grid = plt.subplots(1, 4, figsize=(11, 4), layout="constrained", sharey=True)
shown = torch.where(known, noisy, torch.nan)
titles = [
    f"what the {CLIENTS} clients know\n({100 * float(known.float().mean()):.0f} % of the entries)",
    f"each client alone\nerror in the gaps {100 * error(alone):.0f} %",
    f"together\nerror in the gaps {100 * error(together):.0f} %",
    "truth",
]
for axes, values, title in zip(grid, (shown, alone, together, truth), titles, strict=True):
    shades = plt.get_cmap("PuOr").with_extremes(bad="#e6e6e6")
    picture = axes.imshow(values, cmap=shades, vmin=-5, vmax=5, aspect="auto")
    axes.set_title(title, fontsize=10)
    axes.set(xlabel="column")
    for k in range(1, CLIENTS):
        axes.axhline(k * ROWS / CLIENTS - 0.5, color="black", linewidth=0.8)
grid[0].set_ylabel("row; lines separate the clients")
figure.colorbar(picture, ax=grid, shrink=0.8, extend="both")

# %%
# The rank is found, not given: the prox sets small singular values to exactly zero.

figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
for values, style, color, label in (
    (truth, "o-", "#0072B2", "truth: rank 3"),
    (together, "s--", "#D55E00", "together"),
    (torch.where(known, noisy, 0.0), "^:", "#009E73", "known entries, gaps filled with 0"),
):
    s = torch.linalg.svdvals(values.double())
    axes.plot(np.arange(1, 13), s[:12].clamp_min(0), style, color=color, label=label)
rank = int((torch.linalg.svdvals(together.double()) > 1e-4).sum())
axes.set(xlabel="singular value, in order", ylabel="size", title=f"The joint model has rank {rank}")
axes.grid(alpha=0.3)
axes.legend(frameon=False)
plt.show()
