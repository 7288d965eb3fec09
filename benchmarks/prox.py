"""The time of every prox as a multiple of one softshrink on the same tensor.

    python benchmarks/prox.py [name ...]

One core, in the thread's own processor time, which is the wall time of a calm machine and does not count what others
run meanwhile. The two are timed in turn; the figure is the ratio of the fastest runs.
Limits are printed where there is one, and the exit code says whether all hold.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softshrink

from fednmap import regularizers as R
from fednmap.core import Regularizer

GROUPS = 10_000
LIMITS = {"L1": 2.5, "ElasticNet": 2.5, "Box": 2.5, "MCP": 6.0, "SCAD": 6.0}
LIMITS |= {"GroupLasso, equal sizes": 10.0, "GroupLasso, any groups": 40.0}


def regularizers(p: int) -> dict[str, Regularizer]:
    rng = torch.Generator().manual_seed(0)
    labels = torch.randint(GROUPS, (p,), generator=rng)
    vector = torch.randn(p, generator=rng)
    layers = (torch.arange(p) * 20 // p) % 2 == 0
    return {
        "Zero": R.Zero(),
        "L1": R.L1(0.5),
        "L1, a weight each": R.L1(vector.abs()),
        "SquaredL2": R.SquaredL2(0.5),
        "ElasticNet": R.ElasticNet(0.5, 0.5),
        "L2": R.L2(0.5),
        "LInf": R.LInf(0.5),
        "GroupLasso, equal sizes": R.GroupLasso(0.5, p // GROUPS),
        "GroupLasso, any groups": R.GroupLasso(0.5, labels),
        "SparseGroupLasso, equal sizes": R.SparseGroupLasso(0.2, 0.5, p // GROUPS),
        "SparseGroupLasso, any groups": R.SparseGroupLasso(0.2, 0.5, labels),
        "Slope": R.Slope(0.5),
        "TotalVariation": R.TotalVariation(0.5),
        "Nuclear, 100 rows": R.Nuclear(0.5, (100, p // 100)),
        "Box": R.Box(-0.5, 0.5),
        "NonNegative": R.NonNegative(),
        "LInfBall": R.LInfBall(0.5),
        "L2Ball": R.L2Ball(1.0),
        "L1Ball": R.L1Ball(10.0),
        "Simplex": R.Simplex(1.0),
        "Halfspace": R.Halfspace(vector, -1.0),
        "Affine, 3 rows": R.Affine(torch.randn(3, p, generator=rng), torch.ones(3)),
        "MCP": R.MCP(0.5, 3.0),
        "SCAD": R.SCAD(0.5, 3.7),
        "LogSum": R.LogSum(0.5, 1.0),
        "TransformedL1": R.TransformedL1(0.5, 2.0),
        "L0": R.L0(0.5, allow_nonconvex=True),
        "TopK, 1%": R.TopK(p // 100, allow_nonconvex=True),
        "Scaled L1": R.Scaled(R.L1(0.5), 2.0),
        "Masked L1, 10 layers of 20": R.Masked(R.L1(0.5), layers),
        "Masked L1, every other": R.Masked(R.L1(0.5), torch.arange(p) % 2 == 0),
        "Separable L1, 20 layers": R.Separable([(slice(i, i + p // 20), R.L1(0.5)) for i in range(0, p, p // 20)]),
    }


def seconds(run: Callable[[], Any]) -> float:
    start = time.thread_time()
    run()
    return time.thread_time() - start


def ratio(phi: Regularizer, v: Tensor, budget: float = 0.3) -> float:
    """The fastest phi.prox over the fastest softshrink, run one after the other, for `budget` seconds or 5 times."""
    phi.prox(v, 1.0)
    ours, reference = [], []
    end = time.thread_time() + budget
    while len(ours) < 5 or (time.thread_time() < end and len(ours) < 100):
        reference.append(seconds(lambda: softshrink(v, 0.5)))
        ours.append(seconds(lambda: phi.prox(v, 1.0)))
    return min(ours) / min(reference)


def main(only: list[str]) -> int:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    warnings.simplefilter("ignore")
    shapes: list[tuple[int, ...]] = [(1_000_000,), (50, 50_000)]
    vectors = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in shapes]
    table = [regularizers(shape[-1]) for shape in shapes]
    for v in vectors:
        print(
            f"softshrink on {tuple(v.shape)}: {min(seconds(lambda v=v: softshrink(v, 0.5)) for _ in range(50)):.2e} s"
        )
    print(f"{'prox / softshrink':32}{'(1000000,)':>14}{'(50, 50000)':>14}{'limit':>10}")
    missed = []
    for name in table[0]:
        if only and not any(word in name for word in only):
            continue
        ratios = [ratio(phis[name], v) for phis, v in zip(table, vectors, strict=True)]
        limit = LIMITS.get(name)
        if limit and max(ratios) > limit:
            missed.append(name)
        cells = "".join(f"{r:>14.2f}" for r in ratios)
        print(f"{name:32}{cells}{limit or '':>10}{'  over' if name in missed else ''}", flush=True)
    print(f"over the limit: {', '.join(missed)}" if missed else "all limits hold")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
