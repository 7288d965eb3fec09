"""
Acceleration: fewer rounds with memory
======================================

Where gradients are exact, as in statistics, rounds are what a fit costs. FedNMap with `memory` builds a quasi-Newton
model of the normal map from the uplinks that it receives anyway: same messages, same solution, far fewer rounds than
plain steps and than momentum.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_breast_cancer

from fednmap import run
from fednmap.algorithms import FedNMap, FedNMapMemory
from fednmap.measure import stationarity
from fednmap.problems import Logistic
from fednmap.regularizers import L1

# %%
# Thirty correlated features of 569 tumours, at four sites cut along the first feature; sparse logistic regression.

table = load_breast_cancer()
a = torch.tensor((table.data - table.data.mean(0)) / table.data.std(0))
y = torch.tensor(table.target)
sites = a[:, 0].argsort().chunk(4)
problem, phi = Logistic([(a[s], y[s]) for s in sites], classes=2), L1(1e-3)
L = problem.smoothness()
ROUNDS = 1500

# %%
# FISTA, as a federation would run it: every client sends its gradient, the server takes a proximal step with
# momentum, and forgets the momentum when it points uphill.


def fista():
    x = v = torch.zeros(problem.dim).double()
    momentum, found = 1.0, [float(stationarity(problem, phi, x, 1 / L))]
    for _ in range(ROUNDS):
        new = phi.prox(v - problem.gradient(v) / L, 1 / L)
        if float((v - new) @ (new - x)) > 0:
            momentum = 1.0
        following = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        x, v, momentum = new, new + (momentum - 1) / following * (new - x), following
        found.append(float(stationarity(problem, phi, x, 1 / L)))
    return found


def residuals(memory):
    steps = {"eta_a": 1 / L, "Q": 1, "gamma": 1 / L}
    method = FedNMapMemory(phi, memory=memory, **steps) if memory else FedNMap(phi, **steps)
    result = run(method, problem, rounds=ROUNDS if not memory else 300, every=1, measure_gamma=1 / L)
    return result.column("stationarity")


curves = {
    "FedNMap, plain": (residuals(0), "#E69F00", "--"),
    "FISTA with restarts": (fista(), "#D55E00", "-."),
    "FedNMap, memory 5": (residuals(5), "#56B4E9", (0, (4, 1))),
    "FedNMap, memory 20": (residuals(20), "#0072B2", "-"),
}

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained", width_ratios=(1.5, 1))
needed = {}
for name, (values, color, style) in curves.items():
    relative = np.sqrt(np.minimum.accumulate(values) / values[0])
    done = np.flatnonzero(relative < 1e-6)
    needed[name] = int(done[0]) if len(done) else None
    left.semilogy(np.maximum(relative, 1e-11), color=color, linestyle=style, linewidth=2, label=name)
left.axhline(1e-6, color="#999999", linewidth=0.8, linestyle=":")
left.set(
    xlabel="round", ylabel="least |F_nat| so far, relative to the start", xlim=(1, ROUNDS), ylim=(1e-9, 2), xscale="log"
)
left.legend(frameon=False, loc="lower left")
left.grid(alpha=0.3)
for k, (name, (_, color, _style)) in enumerate(curves.items()):
    rounds = needed[name] or ROUNDS
    right.barh(-k, rounds, color=color, alpha=1 if needed[name] else 0.35, hatch=None if needed[name] else "//")
    right.text(rounds * 1.1, -k, str(rounds) if needed[name] else f"more than {ROUNDS}", va="center")
right.set_yticks([-k for k in range(len(curves))], curves)
right.set(xscale="log", xlabel="rounds to 1e-6", xlim=(1, 3e4))
right.spines[["top", "right"]].set_visible(False)
plt.show()
