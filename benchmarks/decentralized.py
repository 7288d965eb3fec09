"""How long until a graph is as good as a server: transient times of norM-DSGT and norM-ED, by spectral gap and by n.

    python benchmarks/decentralized.py [docs/images/decentralized.png]

The statement that is tested is in the abstract of Huang, Pu and Nedic (arXiv:2412.13054): the rounds until the error is
that of the central method are O(n^3/(1 - lambda)^2) for norM-ED and O(max(n^3/(1 - lambda)^2, n/(1 - lambda)^4)) for
norM-DSGT. These are upper bounds.

Heterogeneous lasso in 10 dimensions, Gaussian noise on every gradient, runs of T = 1024 and 4096 rounds, each with
its own step eta_a = min(1, sqrt(n/T))/(2 L). Error: |F_nat|^2 at a node's own model, averaged over the nodes, the
second half of the rounds and 4 trials. Excess: by how much it is larger than on the complete graph, where all agree
after every round, as with a server. As it falls like sqrt(1/T), the transient time, until it is 10 %, is T (excess /
10 %)^2 from the longer run; the shorter one tells whether it does fall like that. The mixing matrix is (1 - g) I + g
1 1'/n, whose gap is g for every n: so n and the gap can be told apart.
"""

from __future__ import annotations

import math
import sys
import time
from functools import cache

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor

from fednmap.decentralized import Complete, DecentralizedAlgorithm, NormDSGT, NormED, spectral_gap
from fednmap.regularizers import L1
from fednmap.testing import heterogeneous, smoothness

TRIALS, NOISE, NEAR = 4, 3.0, 0.1
SHORT, LONG = 1024, 4096
GAPS, AT_N = (0.4, 0.2, 0.1, 0.05), 4
SIZES, AT_GAP = (4, 6, 8, 12, 16), 0.4
PHI = L1(0.2)
METHODS = {"norM-DSGT": (NormDSGT, "o", "#b35806"), "norM-ED": (NormED, "s", "#2166ac")}


@cache
def central(kind: type, n: int, T: int) -> float:
    """The error where all agree after every round."""
    return error(kind, n, Complete(n).weights(0), T)


def error(kind: type, n: int, W: Tensor, T: int) -> float:
    """The mean |F_nat|^2 of the nodes over the second half of T rounds with the step that suits T."""
    problem = heterogeneous(n, 20, 10)
    L, rng = smoothness(problem), torch.Generator().manual_seed(T)
    a = torch.stack([x.T @ x / len(x) for x, _ in problem.data])
    b = torch.stack([x.T @ y / len(x) for x, y in problem.data])
    mean_a, mean_b = a.mean(0), b.mean(0)
    method: DecentralizedAlgorithm = kind(PHI, eta_a=min(0.5, 0.5 * (n / T) ** 0.5) / L, gamma=1 / L)
    state = method.init(torch.zeros(TRIALS, n, 10, dtype=torch.float64))

    def g(x: Tensor, q: int) -> Tensor:
        noise = torch.randn(x.shape, generator=rng, dtype=torch.float64)
        return torch.matmul(a, x[..., None])[..., 0] - b + NOISE * noise

    total, counted = 0.0, range(T // 2, T, max(1, T // 256))
    for t in range(T):
        message, kept = method.message(state, g)
        state = method.update(kept, type(message)(*(W @ v for v in message)))
        if t in counted:
            x = method.model(method.iterate(state))
            residual = (x - PHI.prox(x - (x @ mean_a - mean_b) / L, 1 / L)) * L
            total += float(residual.square().sum(-1).mean())
    return total / len(counted)


def transient(kind: type, n: int, gap: float) -> float:
    """The rounds until the error is 10 % above that of the central method."""
    W = (1 - gap) * torch.eye(n, dtype=torch.float64) + gap * Complete(n).weights(0)
    assert abs(spectral_gap(W) - gap) < 1e-9
    short, long = (error(kind, n, W, T) / central(kind, n, T) - 1 for T in (SHORT, LONG))
    found, power = LONG * (long / NEAR) ** 2, math.log(long / short) / math.log(LONG / SHORT)
    told = f"excess {short:.3f} and {long:.3f}, as T^{power:.2f}"
    print(f"{kind.__name__:8}  n {n:<3} gap {gap:<5} {told}, transient {found:8.0f}", flush=True)
    return found


def slope(x: list[float], y: list[float]) -> float:
    """Of log y over log x."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def main(path: str) -> None:
    torch.set_num_threads(1)
    began = time.perf_counter()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True)
    for name, (kind, mark, colour) in METHODS.items():
        for axes, x, y in (
            (left, [1 / gap for gap in GAPS], [transient(kind, AT_N, gap) for gap in GAPS]),
            (right, [float(n) for n in SIZES], [transient(kind, n, AT_GAP) for n in SIZES]),
        ):
            fitted = slope(x, y)
            of = "1/(1 - lambda)" if axes is left else "n"
            print(f"{name}: the transient time grows as ({of})^{fitted:.2f}", flush=True)
            axes.loglog(x, y, mark + "-", color=colour, label=f"{name}, slope {fitted:.2f}")
    left.set(xlabel=f"1 / (1 - λ), {AT_N} nodes", ylabel="transient time (rounds)", title="by spectral gap")
    right.set(xlabel=f"nodes n, 1 - λ = {AT_GAP}", title="by number of nodes")
    for axes, ticks in ((left, [1 / gap for gap in GAPS]), (right, SIZES)):
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"{path}, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "docs/images/decentralized.png")
