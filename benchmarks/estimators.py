"""What a joint fit costs: a simulated federated fit over scikit-learn's fit of the pooled rows, at the same tolerance.

    python benchmarks/estimators.py            # about ten minutes
    python benchmarks/estimators.py --quick
    python benchmarks/estimators.py 1000x300 100000x30

Times are of the processor, of this process alone, one thread; each is the least of 20 calls, or of as many as begin
within two seconds. The tolerance is the same in this sense: scikit-learn's is lowered by tens until its objective is
within 1e-7 (relative) of the federated one's, which is within 1e-9 of the minimum.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import sys
import time
import warnings

import numpy as np
import torch
from sklearn.linear_model import Lasso, LogisticRegression

from fednmap.estimators import FederatedLasso, FederatedLogisticRegression

torch.set_num_threads(1)
SITES = 10
LONG = 2.0
"""Seconds after which a call is not repeated."""


def table(rows: int, columns: int, seed: int = 0):
    """Correlated columns, a sparse truth, ten sites that differ."""
    rng = np.random.default_rng(seed)
    sites = np.arange(rows) * SITES // rows
    common = rng.normal(size=(rows, 5)) @ rng.normal(size=(5, columns))
    X = 0.3 * common + rng.normal(size=(rows, columns)) + 0.2 * rng.normal(size=(SITES, columns))[sites]
    score = X[:, ::10] @ rng.normal(size=len(range(0, columns, 10))) / 3
    return X, score + rng.normal(size=rows), (score + rng.logistic(size=rows) > 0).astype(int), sites


def seconds(call, times: int = 20):
    found = []
    while len(found) < times and sum(found) < LONG:
        begin = time.process_time()
        result = call()
        found.append(time.process_time() - begin)
    return min(found), result


def pooled(make, X, y, objective: float, value):
    """scikit-learn's fit at the first tolerance at which its objective is as low."""
    for tol in 10.0 ** -np.arange(2, 12):
        took, fitted = seconds(lambda tol=tol: make(tol).fit(X, y))
        if value(fitted) <= objective * (1 + 1e-7):
            return took, tol
    return float("nan"), tol  # never as low: no ratio


QUICK = [(1_000, 30), (10_000, 100)]
SIZES = [*QUICK, (1_000, 300), (10_000, 300), (100_000, 30), (100_000, 100), (100_000, 300)]
HEAD = ("rows", "p", "model", "rounds", "federated s", "pooled s", "ratio", "path s", "path rounds", "path / last")


def objective(X, y, lam: float, linear: bool):
    """Mean loss + lam |b|_1 of a fitted model."""

    def value(model) -> float:
        score = X @ np.ravel(model.coef_) + model.intercept_
        loss = 0.5 * np.square(score - y) if linear else np.logaddexp(0, (1 - 2 * y) * score)
        return float(loss.mean() + lam * np.abs(model.coef_).sum())

    return value


def scikit(rows: int, lam: float, linear: bool):
    """scikit-learn's estimator at a tolerance: coordinate descent, and liblinear, by far faster than saga here."""
    if linear:
        return lambda tol: Lasso(alpha=lam, tol=tol, max_iter=100_000)
    same = {"C": 1 / (rows * lam), "l1_ratio": 1.0, "solver": "liblinear", "intercept_scaling": 100, "max_iter": 10_000}
    return lambda tol: LogisticRegression(tol=tol, **same)


def measured(X, y, sites, linear: bool):
    make = FederatedLasso if linear else FederatedLogisticRegression
    first = make(standardize=False).path(X, y, sites, lambdas=2).lambdas[0]
    lam = first / 30
    took, fitted = seconds(lambda: make(lam=lam, standardize=False).fit(X, y, sites))
    alone, _ = pooled(scikit(len(X), lam, linear), X, y, fitted.objective_, objective(X, y, lam, linear))
    walked, path = seconds(lambda: make(standardize=False).path(X, y, sites))
    last, _ = seconds(lambda: make(lam=path.lambdas[-1], standardize=False).fit(X, y, sites))
    yield from (fitted.n_iter_, f"{took:.3f}", f"{alone:.3f}", f"{took / alone:.1f}")
    yield from (f"{walked:.2f}", path.total_rounds, f"{walked / last:.1f}")


def main() -> None:
    warnings.simplefilter("ignore")
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    given = [tuple(map(int, word.split("x"))) for word in sys.argv[1:] if word[0].isdigit()]
    for rows, columns in given or (QUICK if "--quick" in sys.argv else SIZES):
        X, y, label, sites = table(rows, columns)
        X = (X - X.mean(0)) / X.std(0)
        for name, target in (("lasso", y), ("logistic", label)):
            cells = rows, columns, name, *measured(X, target, sites, name == "lasso")
            print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
