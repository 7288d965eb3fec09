"""Virtual time to the optimum of a heterogeneous lasso: synchronous, deadline, buffer, window, FedBuff, FedAsync.

python benchmarks/asynchronous.py [--clients 100] [--seeds 1] [--horizon 2000] [--methods window:2,fedbuff:10]

Delays of a job: heavy tails (Pareto, exponent 1.2), slow clients (uniform in [0.8, 1.2] times a log-normal factor per
client, sigma 1.2), and both. The step of each method is the best of a grid, in units of 1 / the largest L_i: the one
that is first at 1e-8, else the one that ends nearest.
"""

import argparse
import math

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
GRID = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--horizon", type=float, default=2000)
    parser.add_argument("--methods", default="all,deadline:2,buffer:10,window:2,fedbuff:10,fedasync")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--steps", default=",".join(map(str, GRID)))
    given = parser.parse_args()
    problem = lasso(given.clients)
    best = optimum(problem)
    L = max(float(torch.linalg.matrix_norm(a, 2) ** 2 / len(a)) for a, _ in problem.data)
    for name in given.methods.split(","):
        for label in given.models.split(","):
            model = MODELS[label]
            rows = []
            for scaled in map(float, given.steps.split(",")):
                runs = [
                    curve(make(name, scaled / L, model), problem, best, given.horizon, s) for s in range(given.seeds)
                ]
                times = [[reached(run, goal) for run in runs] for goal in GOALS]
                end = max(run[-1][1] for run in runs)
                rows.append((sum(times[-1]) / given.seeds, end if end == end else math.inf, scaled, times))
                if end > 10:
                    break
            _, end, scaled, times = min(rows)
            means = " / ".join(f"{sum(t) / len(t):.0f}" for t in times)
            stable = max([r[2] for r in rows if r[1] < 1], default=0)
            print(
                f"{name:12s} {label:13s} step {scaled:5.2f} (largest stable {stable:g})  {means}  end {end:.0e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
