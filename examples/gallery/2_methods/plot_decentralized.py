"""
Training without a server
=========================

Twelve nodes hold different data and hear their neighbours alone. Together they minimise ``f(x) + phi(x)``, a lasso
whose solution none of them could find by itself. **norM-ED** and **norM-DSGT** reach it exactly, with every node at the
same model; **prox-DSGD**, a proximal gradient step of what the neighbours agree on, stops short of it.
"""

# %%
# A problem that the nodes disagree about
# ---------------------------------------
# Each node has features and a solution of its own. The clients of any problem become the nodes of a graph.

import matplotlib.pyplot as plt

import fednmap
from fednmap.decentralized import (
    Complete,
    Decentralized,
    NormDSGT,
    NormED,
    PGExtra,
    ProxDSGD,
    Ring,
    Torus,
    spectral_gap,
)
from fednmap.regularizers import L1
from fednmap.testing import heterogeneous, smoothness

n = 12
problem, phi = heterogeneous(n), L1(0.2)
L = smoothness(problem)

# %%
# Four methods on a ring
# ----------------------
# A method is what one node does; ``Decentralized`` puts it on a topology, and ``fednmap.run`` takes it from there.
# Every record has the ``consensus`` error beside the usual numbers: the mean over the nodes of ``|x_i - x|^2``.

methods = {
    "norM-ED": NormED(phi, eta_a=0.5 / L, gamma=1 / L),
    "norM-DSGT": NormDSGT(phi, eta_a=0.15 / L, gamma=1 / L),
    "PG-EXTRA": PGExtra(phi, eta_a=0.5 / L),
    "prox-DSGD": ProxDSGD(phi, eta_a=0.5 / L),
}
results = {name: fednmap.run(Decentralized(m, Ring(n)), problem, rounds=400) for name, m in methods.items()}

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
for name, result in results.items():
    rounds = result.column("round")
    left.semilogy(rounds, result.column("stationarity"), label=name)
    right.semilogy(rounds[1:], result.column("consensus")[1:], label=name)
left.set(xlabel="rounds", ylabel="$|F_{nat}(x)|^2$ at the mean model", title="to the optimum", ylim=(1e-26, None))
right.set(xlabel="rounds", ylabel="mean $|x_i - x|^2$", title="to each other", ylim=(1e-30, None))
left.legend()
figure.tight_layout()

for name, result in results.items():
    now = result.final
    print(
        f"{name:10} |F_nat|^2 {now['stationarity']:.1e}  consensus {now['consensus']:.1e}  {now['bytes_up']:.0f} bytes"
    )

# %%
# More links, fewer rounds
# ------------------------
# What counts of a graph is the spectral gap of its mixing matrix: near 0 news travels slowly, at 1 a round makes all
# agree. More links cost more bytes per round.

figure, axes = plt.subplots(figsize=(5.5, 3.6))
for graph in (Ring(n), Torus(n), Complete(n)):
    result = fednmap.run(Decentralized(ProxDSGD(phi, eta_a=0.5 / L), graph), problem, rounds=150)
    gap, name = spectral_gap(graph.weights(0)), type(graph).__name__
    axes.semilogy(result.column("round"), result.column("stationarity"), label=f"{name}, gap {gap:.2f}")
    print(f"{name:9} gap {gap:.2f}  |F_nat|^2 {result.final['stationarity']:.1e}  {result.final['bytes_up']:.0f} bytes")
axes.set(xlabel="rounds", ylabel="$|F_{nat}(x)|^2$", title="prox-DSGD: larger gap, smaller bias", ylim=(1e-26, None))
axes.legend()
figure.tight_layout()

# %%
# From the command line
# ---------------------
# ``fednmap compare --topology ring --algorithms norm-dsgt,norm-ed,prox-dsgd,pg-extra`` does the same with any data set;
# ``fednmap list topologies`` names the graphs.

plt.show()
