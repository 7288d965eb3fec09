"""
Few rounds: Newton's method across clients
==========================================

Between hospitals a round costs minutes, and a logistic regression has a dozen coefficients: a client can then send its
Hessian along with its gradient. ``FedNewton`` solves the lasso-penalised fit in a handful of rounds; FedNMap with a
server that remembers secants needs some tens, from gradients alone.
"""

# %%
# Four clients that disagree: each draws its features and labels from a distribution of its own.

import matplotlib.pyplot as plt
import torch

from fednmap import simulate
from fednmap.algorithms import FedNewton, FedNMap, FedNMapMemory
from fednmap.measure import stationarity
from fednmap.problems import Logistic
from fednmap.regularizers import L1

rng = torch.Generator().manual_seed(0)
truth = torch.tensor([1.5, -2.0, 1.0] + [0.0] * 9, dtype=torch.float64)
data = []
for shift in (-0.5, 0.0, 0.5, 1.0):
    rows = torch.randn(150, 12, generator=rng, dtype=torch.float64) * (1 + torch.arange(12) / 6) + shift
    chance = torch.sigmoid(rows @ truth + shift)
    data.append((rows, (torch.rand(150, generator=rng, dtype=torch.float64) < chance).long()))
problem, phi = Logistic(data), L1(0.01)
L = problem.smoothness()

# %%
# The same problem, the same start, the same measure ``|F_nat|^2`` after every round.

methods = {
    "FedNewton": FedNewton(phi, eta_a=1 / L),
    "FedNMap, memory 20": FedNMapMemory(phi, eta_a=1 / L, Q=1, gamma=1 / L, memory=20),
    "FedNMap": FedNMap(phi, eta_a=1 / L, Q=1, gamma=1 / L),
}
curves, sent = {}, {}
for name, method in methods.items():
    rounds = list(simulate(method, problem, rounds=60))
    curves[name] = [float(stationarity(problem, phi, method.model(r.server), 1 / L)) for r in rounds]
    reached = next((t for t, size in enumerate(curves[name]) if size < 1e-20), None)
    sent[name] = sum(r.bytes_up + r.bytes_down for r in rounds[: None if reached is None else reached + 1]) / 1e3
    print(f"{name:20} {'more than 60' if reached is None else reached + 1} rounds to 1e-20, {sent[name]:.0f} kB")

# %%
# Newton's method doubles the digits in every round once it is near.

figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
for name, style in zip(curves, ("o-", "s-", "-"), strict=True):
    axes.semilogy(range(1, 61), [max(size, 1e-33) for size in curves[name]], style, markersize=3, label=name)
axes.set(
    xlabel="communication rounds", ylabel="$|F_{nat}(x)|^2$", title="Logistic regression with l1 across four clients"
)
axes.legend(frameon=False)
plt.show()
