"""Virtual time to the optimum of a heterogeneous lasso: synchronous, deadline, buffer, window, FedBuff, FedAsync.

python benchmarks/asynchronous.py [--clients 100] [--seeds 10] [--methods window:2,fedbuff:10]

Delays of a job: heavy tails (Pareto, exponent 1.2), slow clients (uniform in [0.8, 1.2] times a log-normal factor per
client, sigma 1.2), and both. Every seed has its own data and delays. The step of each method is the best of one grid
for all, in units of 1 / the largest L_i, on one more seed: the one that is first at 1e-8, else the one that ends
nearest. The grid is searched from above, until two steps in succession are worse than the best. A cell has the mean and
its 95 % interval, or how many seeds reached the goal by the horizon; then the mean distance at the end.
"""

import argparse
import math
from functools import cache
from statistics import mean, stdev

import torch

from fednmap import Diverged, simulate
from fednmap.algorithms import FedMiD, FedNMap
from fednmap.asynchronous import Asynchronous, FedAsync, FedBuff, rule_of
from fednmap.problems import LeastSquares
from fednmap.regularizers import L1

PHI, Q = L1(0.5), 5
MODELS = {
    "heavy tails": {"delays": "pareto:1.2"},
    "slow clients": {"delays": "uniform:0.8,1.2", "slowdown": "lognormal:1.2"},
    "both": {"delays": "pareto:1.2", "slowdown": "lognormal:1.2"},
}
GOALS = (1e-2, 1e-4, 1e-8)
GRID = tuple(2.0**k for k in range(4, -6, -1))
TUNED = 1000  # the seed on which steps are chosen
HORIZON = {"all": 3000, "deadline": 200, "window": 1300, "buffer": 1300, "fedbuff": 100, "fedasync": 50}


def lasso(n=100, p=50, m=40, seed=0):
    """Clients with features of different scale and a solution of their own."""
    rng = torch.Generator().manual_seed(seed)

    def draw(f, *shape):
        return f(*shape, generator=rng, dtype=torch.float64)

    common = torch.zeros(p, dtype=torch.float64)
    common[:8] = 2 * draw(torch.randn, 8)
    data = []
    for _ in range(n):
        a = draw(torch.randn, m, p) * (1 + float(draw(torch.rand, 1)))
        own = common + draw(torch.randn, p) * (draw(torch.rand, p) < 0.3)
        data.append((a, a @ own + 0.3 * draw(torch.randn, m)))
    return LeastSquares(data)


def optimum(problem):
    """By accelerated proximal gradient steps."""
    hessian = sum(a.T @ a / len(a) for a, _ in problem.data) / problem.n
    right = sum(a.T @ b / len(a) for a, b in problem.data) / problem.n
    smooth = float(torch.linalg.matrix_norm(hessian, 2))
    x = y = torch.zeros_like(right)
    momentum = 1.0
    for _ in range(20_000):
        new, after = PHI.prox(y - (hessian @ y - right) / smooth, 1 / smooth), (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        y, x, momentum = new + (momentum - 1) / after * (new - x), new, after
    return x


def make(name, step, model):
    """The method with server step `step`, by name: fedbuff:K, fedasync, or a rule for FedNMap."""
    if name.startswith("fedbuff"):
        method = FedMiD(PHI, eta_a=step / Q, Q=Q)
        return FedBuff(method, buffer=int(name.partition(":")[2]), **model)
    if name == "fedasync":
        return FedAsync(FedMiD(PHI, eta_a=step / Q, Q=Q), **model)
    return Asynchronous(FedNMap(PHI, eta_a=step / Q, Q=Q), **rule_of(name), **model)


def curve(method, problem, best, horizon, seed):
    """(virtual time, relative distance to the optimum) after every step, until 1e-9, divergence or the horizon."""
    found = []
    try:
        for r in simulate(
            method, problem, rounds=10**6, start=torch.zeros(problem.dim, dtype=torch.float64), seed=seed
        ):
            error = float((method.model(r.server) - best).norm() / best.norm())
            found.append((float(r.server.virtual_time), error))
            if error > 1e3 or error < 1e-9 or found[-1][0] > horizon:
                break
    except Diverged:
        found.append((math.inf, math.inf))
    return found


def reached(found, goal):
    return next((t for t, e in found if e <= goal), math.inf)


@cache
def known(n, seed):
    """A seed's problem, its optimum and its largest L_i."""
    problem = lasso(n, seed=seed)
    return problem, optimum(problem), max(float(torch.linalg.matrix_norm(a, 2) ** 2 / len(a)) for a, _ in problem.data)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--horizon", type=float, help="default: by method")
    parser.add_argument("--methods", default="all,deadline:2,window:2,buffer:10,fedbuff:10,fedasync")
    parser.add_argument("--models", default=",".join(MODELS))
    given = parser.parse_args()

    def run(name, label, scaled, seed):
        problem, best, L = known(given.clients, seed)
        horizon = given.horizon or HORIZON[name.partition(":")[0]]
        return curve(make(name, scaled / L, MODELS[label]), problem, best, horizon, seed)

    for name in given.methods.split(","):
        for label in given.models.split(","):
            tried = {}
            for scaled in GRID:
                found = run(name, label, scaled, TUNED)
                end = found[-1][1]
                tried[scaled] = (reached(found, GOALS[-1]), end if end == end else math.inf)
                if min(tried.values())[1] < 10 and min(tried.values()) < min(list(tried.values())[-2:]):
                    break
            step = min(tried, key=tried.get)
            runs = [run(name, label, step, seed) for seed in range(given.seeds)]
            cells = []
            for goal in GOALS:
                times = [t for t in (reached(found, goal) for found in runs) if t < math.inf]
                wide = 2.262 * stdev(times) / math.sqrt(len(times)) if len(times) == given.seeds > 1 else math.nan
                whole = len(times) == given.seeds
                cells.append(f"{mean(times):.0f} ± {wide:.0f}" if whole else f"{len(times)} of {given.seeds}")
            end = mean(min(found[-1][1], 1e3) for found in runs)
            edge = ", edge of the grid" if step in (GRID[0], GRID[-1]) else ""
            print(f"| {name} | {label} | {' | '.join(cells)} | {end:.0e} | step {step:g}{edge} |", flush=True)


if __name__ == "__main__":
    main()
