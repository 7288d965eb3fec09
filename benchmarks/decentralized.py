"""How long until a graph is as good as a server: transient times of norM-DSGT and norM-ED, by spectral gap and by n.

    python benchmarks/decentralized.py [docs/images/decentralized.png]

The statement that is tested is in the abstract of Huang, Pu and Nedic (arXiv:2412.13054): the rounds until the error is
that of the central method are O(n^3/(1 - lambda)^2) for norM-ED and O(max(n^3/(1 - lambda)^2, n/(1 - lambda)^4)) for
norM-DSGT. These are upper bounds.

Heterogeneous lasso in 10 dimensions, Gaussian noise on every gradient, T = 2^6 ... 2^15 rounds each with its own step
eta_a = min(1/2, sqrt(n/T)/4)/L. Error: |F_nat|^2 at the mean model, averaged over the second half of the rounds and 8
trials. Transient time: the first T from which on the error is at most twice that on the complete graph, where all nodes
agree after every round, as with a server. First n = 16 and W = (1 - theta) I + theta W_ring, which changes the gap
alone; then rings, grids and exponential graphs of 8, 16 and 32 nodes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor

from fednmap.decentralized import Complete, DecentralizedAlgorithm, Grid, NormDSGT, NormED, Ring, spectral_gap
from fednmap.decentralized import UndirectedExponential as Exponential
from fednmap.regularizers import L1
from fednmap.testing import heterogeneous, smoothness

TRIALS, NOISE, TWICE = 8, 3.0, 2.0
LENGTHS = [2**k for k in range(6, 16)]
PHI = L1(0.2)
METHODS = {"norM-DSGT": NormDSGT, "norM-ED": NormED}


def error(kind: type, n: int, W: Tensor, T: int) -> float:
    """The mean |F_nat|^2 over the second half of T rounds with the step that suits T."""
    problem = heterogeneous(n, 20, 10)
    L, rng = smoothness(problem), torch.Generator().manual_seed(T)
    a = torch.stack([x.T @ x / len(x) for x, _ in problem.data])
    b = torch.stack([x.T @ y / len(x) for x, y in problem.data])
    mean_a, mean_b = a.mean(0), b.mean(0)
    method: DecentralizedAlgorithm = kind(PHI, eta_a=min(0.5, 0.25 * (n / T) ** 0.5) / L, gamma=1 / L)
    state = method.init(torch.zeros(TRIALS, n, 10, dtype=torch.float64))

    def g(x: Tensor, q: int) -> Tensor:
        noise = torch.randn(x.shape, generator=rng, dtype=torch.float64)
        return torch.einsum("ijk,tik->tij", a, x) - b + NOISE * noise

    total = 0.0
    for t in range(T):
        message, kept = method.message(state, g)
        state = method.update(kept, type(message)(*(W @ v for v in message)))
        if t >= T // 2:
            x = method.model(method.iterate(state).mean(1))
            residual = (x - PHI.prox(x - (x @ mean_a - mean_b) / L, 1 / L)) * L
            total += float(residual.square().sum(-1).mean())
    return total / (T - T // 2)


def positive(W: Tensor) -> Tensor:
    """(I + W)/2, for both methods alike, so that the gap is what is compared."""
    return (torch.eye(len(W), dtype=W.dtype) + W) / 2


def transient(kind: type, n: int, W: Tensor, central: Callable[[int], float]) -> float:
    """The first length from which on the error stays within twice that of the central method."""
    good = [error(kind, n, W, T) <= TWICE * central(T) for T in LENGTHS]
    for k, T in enumerate(LENGTHS):
        if all(good[k:]):
            return float(T)
    return float("nan")


def slope(x: list[float], y: list[float]) -> float:
    """Of log y over log x, without what was not reached and what was reached at once."""
    pairs = [(u, v) for u, v in zip(x, y, strict=True) if LENGTHS[0] < v < float("inf")]
    return float(np.polyfit(*np.log(pairs).T, 1)[0]) if len(pairs) > 1 else float("nan")


def main(path: str) -> None:
    torch.set_num_threads(1)
    began, known = time.perf_counter(), {}

    def central(kind: type, n: int) -> Callable[[int], float]:
        W = Complete(n).weights(0)

        def at(T: int) -> float:
            if (kind, n, T) not in known:
                known[kind, n, T] = error(kind, n, W, T)
            return known[kind, n, T]

        return at

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    marks = {"norM-DSGT": ("o", "#b35806"), "norM-ED": ("s", "#2166ac")}
    for name, kind in METHODS.items():
        gaps, times = [], []
        for theta in (1.0, 0.5, 0.25, 0.125, 0.0625):
            W = (1 - theta) * torch.eye(16, dtype=torch.float64) + theta * positive(Ring(16).weights(0))
            gaps.append(1 / spectral_gap(W))
            times.append(transient(kind, 16, W, central(kind, 16)))
            print(
                f"{name:10} n 16  theta {theta:<7g} 1/(1-lambda) {gaps[-1]:8.1f}  transient {times[-1]:g}", flush=True
            )
        fitted = slope(gaps, times)
        print(f"{name:10} transient time grows as (1/(1-lambda))^{fitted:.2f}", flush=True)
        left.loglog(gaps, times, marks[name][0] + "-", color=marks[name][1], label=f"{name}, slope {fitted:.2f}")
        for graph, line in ((Ring, "-"), (Grid, "--"), (Exponential, ":")):
            sizes, times = [8, 16, 32], []
            for n in sizes:
                W = positive(graph(n).weights(0))
                times.append(transient(kind, n, W, central(kind, n)))
                gap = 1 / spectral_gap(W)
                print(
                    f"{name:10} {graph.__name__:22} n {n:<3} 1/(1-lambda) {gap:8.1f}  transient {times[-1]:g}",
                    flush=True,
                )
            shown = graph.__name__.lower().removeprefix("undirected")
            right.loglog(sizes, times, marks[name][0] + line, color=marks[name][1], label=f"{name}, {shown}")
    left.set(xlabel="1 / (1 - λ), 16 nodes", ylabel="transient time (rounds)", title="by spectral gap alone")
    right.set(xlabel="nodes n", title="by number of nodes", xticks=[8, 16, 32], xticklabels=["8", "16", "32"])
    right.minorticks_off()
    for axes in (left, right):
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"{path}, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "docs/images/decentralized.png")
