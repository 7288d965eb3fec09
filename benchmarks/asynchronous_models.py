"""psi against virtual time on real data: synchronous, deadline, window, buffer, FedBuff; ten seeds, 95 % intervals.

python benchmarks/asynchronous_models.py a9a|digits [--seeds 10] [--horizon 400]

Every seed has its own delays, partition and minibatches; all rules of a seed have the same ones. Pareto delays with
exponent 1.2, times a log-normal factor per client with sigma 1.2. The step of each method is the best of a grid, on
one more seed.
"""

import argparse
import math
import os
from pathlib import Path
from statistics import mean, stdev

from fednmap import Diverged, simulate
from fednmap.measure import objective
from fednmap.runs.configuration import Config
from fednmap.runs.experiment import prepare

RULES = {
    "synchronous": ("fednmap", "all"),
    "deadline 2": ("fednmap", "deadline:2"),
    "window 2": ("fednmap", "window:2"),
    "buffer 10": ("fednmap", "buffer:10"),
    "FedBuff 10": ("fedmid", "buffer:10"),
}
A9A = f"svm:{Path(os.environ.get('FEDNMAP_DATA', '.')) / 'libsvm' / 'a9a'}"
PROBLEMS = {
    "a9a": {
        "data": A9A,
        "model": "logistic",
        "penalty": "l1:0.001",
        "partition": "sorted",
        "eta_a": (0.1, 0.2, 0.4, 0.8),
    },
    "digits": {
        "data": "digits",
        "model": "mlp:64:relu",
        "penalty": "l1:0.001",
        "partition": "sorted",
        "eta_a": (0.05, 0.2),
    },
}
SHARED = {"clients": 50, "local_steps": 5, "batch_size": 32, "delays": "pareto:1.2", "slowdown": "lognormal:1.2"}
MARKS = (0.05, 0.25, 1.0)


def psi(settings, horizon):
    """psi at these shares of the horizon."""
    experiment = prepare(Config.make(**settings))
    (name,) = settings["algorithms"]
    method = experiment.algorithm(name)
    found, server = [], None
    try:
        for r in simulate(
            method, experiment.problem, rounds=10**6, start=experiment.start(method), seed=settings["seed"]
        ):
            now = float(r.server.virtual_time)
            while len(found) < len(MARKS) and now > MARKS[len(found)] * horizon:
                before = method.init(experiment.start(method))[0] if server is None else server
                found.append(float(objective(experiment.problem, experiment.phi, method.model(before))))
            if len(found) == len(MARKS):
                break
            server = r.server
    except Diverged:
        found += [math.inf] * (len(MARKS) - len(found))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problem", choices=PROBLEMS)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--horizon", type=float, default=400)
    given = parser.parse_args()
    settings = SHARED | PROBLEMS[given.problem]
    for label, (method, rule) in RULES.items():
        own = settings | {"algorithms": (method,), "asynchronous": rule}
        first = {step: psi(own | {"eta_a": step, "seed": 1000}, given.horizon)[-1] for step in settings["eta_a"]}
        step = min(first, key=first.get)
        runs = [psi(own | {"eta_a": step, "seed": seed}, given.horizon) for seed in range(given.seeds)]
        cells = [f"{mean(v):.4f} ± {2.262 * stdev(v) / math.sqrt(len(v)):.4f}" for v in zip(*runs, strict=True)]
        print(f"| {label}, eta_a {step} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
