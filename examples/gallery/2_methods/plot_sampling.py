"""
Sampling and losses: who stays exact
====================================

One client in five takes part in a round, and three of ten replies are lost. Methods that keep the mean of **all**
clients' corrections do not notice in the end: the iterates still reach the solution to rounding. Methods without
corrections are moved about by whoever happened to be heard.
"""

import matplotlib.pyplot as plt
import numpy as np

from fednmap import run
from fednmap.algorithms import FedAvg, FedDA, FedMiD, FedNMap, Zhang
from fednmap.regularizers import L1
from fednmap.testing import heterogeneous

# %%
# Twenty clients with least-squares problems that disagree, exact gradients, five local steps.

problem, phi = heterogeneous(n=20), L1(0.2)
methods = {
    "FedNMap": (FedNMap(phi, eta_a=0.007, Q=5, gamma=0.2), "#56B4E9", "-"),
    "Zhang": (Zhang(phi, eta_a=0.007, Q=5), "#000000", "--"),
    "FedDA": (FedDA(phi, eta_a=0.007, Q=5), "#CC79A7", "-."),
    "FedMiD": (FedMiD(phi, eta_a=0.007, Q=5), "#D55E00", ":"),
    "FedAvg": (FedAvg(eta_a=0.007, Q=5), "#E69F00", (0, (5, 1, 1, 1, 1, 1))),
}
settings = {
    "everybody": {},
    "participation 0.2": {"participation": 0.2},
    "participation 0.2, 30 % of replies lost": {"participation": 0.2, "drop": 0.3},
}
found = {
    title: {
        name: run(method, problem, rounds=1000, every=25, phi=phi, **options).column("stationarity")
        for name, (method, *_) in methods.items()
    }
    for title, options in settings.items()
}

# %%
figure, all_axes = plt.subplots(1, 3, figsize=(11, 4.2), layout="constrained", sharey=True)
for axes, (title, curves) in zip(all_axes, found.items(), strict=True):
    for name, values in curves.items():  # FedNMap's line is wide, as Zhang's lies on it
        _, color, style = methods[name]
        axes.semilogy(
            25 * np.arange(len(values)),
            np.maximum(values, 1e-32),
            color=color,
            linestyle=style,
            linewidth=5 if name == "FedNMap" else 1.8,
            label=name,
        )
    axes.set(xlabel="round", title=title)
    axes.title.set_fontsize(10)
    axes.grid(alpha=0.3)
all_axes[0].set_ylabel("|F_nat|²")
figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
plt.show()
