"""What is run for Table 1: methods and problems, their limits without noise and their errors with it."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np

from fednmap.algorithms import EControlDA, FastFedDA, FedCanon, FedDA, FedNMap, Zhang
from fednmap.core import Algorithm, Regularizer
from fednmap.measure import objective, stationarity
from fednmap.regularizers import L1, MCP, L1Ball
from fednmap.simulation import Diverged, Record, simulate
from reproduction.quadratics import DIM, Quadratics
from reproduction.runs import hyperparameters

MU = 0.2
NOISE = 4.0

PHI: dict[str, Regularizer] = {
    "convex": L1(0.1),
    "strongly convex": L1(0.1),
    "PL": L1(0.1),
    "nonconvex": MCP(0.1, 8.0),
    "constrained": L1Ball(3.0),
}
PROBLEMS: dict[str, partial[Quadratics]] = {
    "convex": partial(Quadratics, smallest=0.0, spread=0.0),
    "strongly convex": partial(Quadratics, smallest=MU, spread=0.0),
    "PL": partial(Quadratics, smallest=0.0, spread=0.8),
    "nonconvex": partial(Quadratics, smallest=MU, spread=0.8, bumps=0.5),
    "constrained": partial(Quadratics, smallest=0.0, spread=0.8),
}

MEASURE_GAMMA = 1.0
LIMIT = (8, 10, 0.5)
"""n, Q and the effective step of the limits."""
CENTRE = {"n": 8, "Q": 4, "T": 128}
FACTORS: dict[str, tuple[int, ...]] = {"n": (2, 8, 32), "Q": (1, 4, 16), "T": (32, 128, 512)}
STEPS = (1.0, 0.5, 0.25, 0.12, 0.06, 0.03)


def algorithm(method: str, phi: Regularizer, step: float, Q: int) -> Algorithm:
    """The method with effective step eta_a eta_s Q = step, eta_s = 1."""
    if method == "FedNMap":  # as in the theorems, gamma does not move with the step
        return FedNMap(phi, eta_a=step / Q, Q=Q, gamma=1.0)
    if method == "FedNMap-4":
        return FedNMap(phi, eta_a=step / Q, Q=Q, gamma=4 * step)
    if method == "EControlDA":
        return EControlDA(phi, eta_a=step, K=5)
    if method == "Fast-FedDA":
        return FastFedDA(phi, eta_a=step / Q, Q=Q, mu=MU)
    others: dict[str, type[FedDA | Zhang | FedCanon]] = {"FedDA": FedDA, "Zhang": Zhang, "FedCanon": FedCanon}
    return others[method](phi, eta_a=step / Q, Q=Q)


def made_from(part: str, method: str, problem: str, number: int) -> dict[str, Any]:
    """What the numbers of `part(method, problem, number)` follow from, as JSON has it."""
    Q = 1 if method == "EControlDA" else CENTRE["Q"]
    chosen = hyperparameters(algorithm(method, PHI[problem], 1.0, Q))
    hyper = {f"{method}.{name}": value for name, value in chosen.items()}
    given = {f"problem.{name}": value for name, value in PROBLEMS[problem].keywords.items()}
    constants = {"dim": DIM, "noise": NOISE, "measure_gamma": MEASURE_GAMMA, "limit": list(LIMIT), "steps": list(STEPS)}
    return {"part": part, "number": number, **hyper, **given, **constants, "cross": [list(p) for p in cross(method)]}


def limit(method: str, problem: str, rounds: int) -> list[Record]:
    """|F_nat(x_t)|^2 with exact gradients."""
    n, Q, step = LIMIT
    Q = 1 if method == "EControlDA" else Q
    phi, f = PHI[problem], PROBLEMS[problem](n)
    kind = algorithm(method, phi, step, Q)
    common = {"n": float(n), "Q": float(Q), "step": step}
    x = kind.model(kind.init(f.start)[0])
    records = [{"round": 0.0, **common, "value": float(stationarity(f, phi, x, MEASURE_GAMMA))}]
    try:
        for r in simulate(kind, f, rounds=rounds):
            if (r.t + 1) % (rounds // 50) == 0:
                value = float(stationarity(f, phi, kind.model(r.server), MEASURE_GAMMA))
                records.append({"round": r.t + 1.0, **common, "value": value})
    except Diverged as error:
        records.append({"round": error.t + 1.0, **common, "value": float("inf")})
    return records


def rate(method: str, problem: str, trial: int) -> list[Record]:
    """The error for every (n, Q, T) of the cross through the centre and every step; T is in the column `round`."""
    records = []
    for n, Q, T in cross(method):
        for step in STEPS:
            value = error(method, problem, n, Q, T, step, trial)
            records.append({"round": float(T), "n": float(n), "Q": float(Q), "step": step, "value": value})
    return records


def cross(method: str) -> list[tuple[int, int, int]]:
    """The settings (n, Q, T): one factor moves, the others stay; without local steps there are as many more rounds."""
    only_one = method == "EControlDA"
    points = []
    for factor, values in FACTORS.items():
        for value in values:
            at = CENTRE | {factor: value}
            if only_one:
                at |= {"T": at["T"] * CENTRE["Q"], "Q": 1}
            points.append((at["n"], at["Q"], at["T"]))
    return list(dict.fromkeys(points))


def error(method: str, problem: str, n: int, Q: int, T: int, step: float, trial: int) -> float:
    """psi(x) - psi* over the last tenth of T rounds; where f is not convex, |F_nat|^2 over all of them."""
    phi, f = PHI[problem], PROBLEMS[problem](n, noise=NOISE, seed=trial)
    kind = algorithm(method, phi, step, Q)
    found = []
    try:
        for r in simulate(kind, f, rounds=T):
            if problem == "nonconvex":
                found.append(float(stationarity(f, phi, kind.model(r.server), MEASURE_GAMMA)))
            elif r.t >= 0.9 * T:
                found.append(float(objective(f, phi, kind.model(r.server))) - optimum(phi, PROBLEMS[problem]))
    except Diverged:
        return float("inf")
    return float(np.mean(found))


@cache
def optimum(phi: Regularizer, problem: partial[Quadratics]) -> float:
    """psi*, by proximal gradient steps from the start until nothing moves."""
    f = problem(2)
    x = f.start
    for _ in range(5000):
        x = phi.prox(x - f.gradient(x), 1.0)
    return float(objective(f, phi, x))
