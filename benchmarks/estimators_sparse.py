"""How much memory estimators take for sparse rows.

    python benchmarks/estimators_sparse.py [fit predict path cv]

w8a-like: 50,000 rows, 300 columns, 4 % of them not zero; wide: 20,000 rows, 50,000 columns, 0.1 %. Ten sites, logistic
regression, l1. Each is done by a process of its own; memory is the table (CSR, float64) and what the process grows by
at most when it is there. "vectors" are those of the server that grow with the model and
not with the table: what FedNMap remembers, and the coefficients of a path. The wide table is fitted only. The exit code
says whether the w8a-like ones stay below 3 tables.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
from scipy.sparse import csr_array

from fednmap.estimators import FederatedLogisticRegression, FederatedLogisticRegressionCV, engine

TABLES = {"w8a-like": (50_000, 300, 0.04), "wide": (20_000, 50_000, 0.001)}
SITES = 10
LIMIT = 3.0
LAM = 0.002


def made(rows: int, columns: int, density: float):
    """A CSR table, labels and sites."""
    rng = np.random.default_rng(0)
    ends = np.arange(rows + 1, dtype=np.int32) * round(columns * density)
    places = rng.integers(0, columns, ends[-1], dtype=np.int32)
    X = csr_array((rng.random(ends[-1]), places, ends), shape=(rows, columns))
    X.sum_duplicates()
    score = X @ rng.normal(size=columns)
    return X, (score + rng.logistic(size=rows) > np.median(score)).astype(int), np.arange(rows) * SITES // rows


def peak() -> int:
    """The most memory that this process has held, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def act(what: str, X, y, sites) -> int:
    """Do it; rounds."""
    if what in ("fit", "predict"):
        fitted = FederatedLogisticRegression(lam=LAM).fit(X, y, sites)
        if what == "predict":
            fitted.predict_proba(X)
        return fitted.n_iter_
    if what == "path":
        return FederatedLogisticRegression().path(X, y, sites).total_rounds
    chosen = FederatedLogisticRegressionCV(cv=3, lambdas=5, select="1se")
    return chosen.fit(X, y, sites).n_iter_


def here(name: str, what: str) -> None:
    """In a process of its own."""
    warnings.simplefilter("ignore")
    act(what, *made(400, 20, 0.2))  # all that is imported is imported
    X, y, sites = made(*TABLES[name])
    size = X.data.nbytes + X.indices.nbytes + X.indptr.nbytes
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before, begin = peak(), time.process_time()
    rounds = act(what, X, y, sites)
    print(size, size + peak() - before, rounds, time.process_time() - begin)


def main() -> None:
    chosen = [word for word in sys.argv[1:] if not word.startswith("--")] or ["fit", "predict", "path", "cv"]
    head = ("table", "what", "table MB", "memory MB", "memory / table", "vectors MB", "rounds", "processor s")
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    worst = 0.0
    for name in TABLES:
        for what in chosen if name == "w8a-like" else [what for what in chosen if what == "fit"]:
            words = [sys.executable, __file__, "--here", name, what]
            done = subprocess.run(words, capture_output=True, text=True, check=True)
            size, grown, rounds, seconds = map(float, done.stdout.split())
            columns = TABLES[name][1]
            kept = min(engine.MEMORY, max(engine.FEWEST, engine.REMEMBERED // (2 * columns)))
            remembered = 2 * kept * 8 * columns if columns > 600 else 8 * columns**2
            vectors = remembered + 8 * columns * {"path": 50, "cv": 5}.get(what, 1)
            cells = [f"{v / 1e6:.1f}" for v in (size, grown)]
            cells += [f"{grown / size:.2f}", f"{vectors / 1e6:.1f}", int(rounds), f"{seconds:.1f}"]
            print(f"| {' | '.join(map(str, (name, what, *cells)))} |", flush=True)
            worst = max(worst, grown / size) if name == "w8a-like" else worst
    print(f"w8a-like: {worst:.2f} tables at most, limit {LIMIT}")
    sys.exit(worst > LIMIT)


if __name__ == "__main__":
    if "--here" in sys.argv:
        here(*sys.argv[-2:])
    else:
        main()
