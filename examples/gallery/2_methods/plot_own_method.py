"""
Your own method in 30 lines
===========================

A method is a frozen dataclass with its hyper-parameters, NamedTuples for what is kept and sent, and a few pure
functions that read like the box in a paper. Here: FISTA, proximal gradient steps with momentum, on the mean of the
clients' gradients. One call checks it against the contract, and then it runs beside the others.
"""

from dataclasses import dataclass
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch

from fednmap import run
from fednmap.algorithms import FedNMapMemory, Zhang
from fednmap.core import Algorithm, FixedPoint, Regularizer, Traits
from fednmap.problems import LeastSquares
from fednmap.regularizers import L1
from fednmap.testing import check_algorithm

# %%
# The method
# ----------


@dataclass(frozen=True)
class FederatedFISTA(Algorithm):
    """client i: send g_i(v);  server: x+ = prox(v - eta mean g_i), v = x+ + (k - 1)/(k + 2) (x+ - x)."""

    phi: Regularizer
    eta_a: float = 0.1
    traits = Traits(True, 1, 1, "0 + 1", FixedPoint.EXACT, "f convex: O(1/T^2)", full_participation=True)

    class Server(NamedTuple):
        v: torch.Tensor
        x: torch.Tensor
        k: torch.Tensor

    class Client(NamedTuple):
        pass

    class Down(NamedTuple):
        v: torch.Tensor

    class Up(NamedTuple):
        gradient: torch.Tensor

    def init(self, start):
        return self.Server(start, start, torch.ones((), dtype=start.dtype)), self.Client()

    def broadcast(self, server):
        return self.Down(server.v)

    def local(self, down, client, g):
        return self.Up(g(down.v, 0)), client

    def aggregate(self, server, up, share):
        x = self.phi.prox(server.v - self.eta_a * up.gradient, self.eta_a)
        return self.Server(x + (server.k - 1) / (server.k + 2) * (x - server.x), x, server.k + 1)

    def model(self, server):
        return server.x


# %%
# The contract
# ------------
# `local` never looks at the shape, so the same lines run one client or a stack of them. The check compares both,
# looks for impurity, permutes the clients, counts the bytes that the traits promise, and runs to the optimum of a
# heterogeneous lasso.

print(check_algorithm(lambda phi, L, Q: FederatedFISTA(phi, eta_a=1 / L)))

# %%
# Beside the others
# -----------------
# On a lasso with features of very different sizes momentum pays, and FedNMap's memory pays more.

rng = torch.Generator().manual_seed(0)
sizes = torch.logspace(0, -1.3, 40).double()
data = []
for _ in range(8):
    a = torch.randn(60, 40, generator=rng, dtype=torch.float64) * sizes
    target = torch.randn(40, generator=rng, dtype=torch.float64) * (torch.arange(40) % 4 == 0) / sizes
    data.append((a, a @ target))
problem, phi = LeastSquares(data), L1(0.01)
L = problem.smoothness()
methods = {
    "Zhang, one step": (Zhang(phi, eta_a=1 / L, Q=1), "#009E73", "--"),
    "your FederatedFISTA": (FederatedFISTA(phi, eta_a=1 / L), "#D55E00", "-"),
    "FedNMap, memory 20": (FedNMapMemory(phi, eta_a=1 / L, Q=1, gamma=1 / L, memory=20), "#0072B2", "-."),
}
figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
for name, (method, color, style) in methods.items():
    values = run(method, problem, rounds=600, every=2).column("stationarity")
    axes.semilogy(2 * np.arange(len(values)), np.maximum(values, 1e-20), style, color=color, linewidth=2, label=name)
axes.set(xlabel="round", ylabel="|F_nat|²", ylim=(1e-20, None))
axes.grid(alpha=0.3)
axes.legend(frameon=False)
plt.show()
