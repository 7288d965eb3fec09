"""What a path of l1 models costs on a table with more columns than rows, over R's glmnet.

    python benchmarks/estimators_wide.py [1000x5000]

100 values of lam, ten sites, standardised columns. Times are of the processor, one thread, the least of three calls;
glmnet's is that of R's system.time, with its default tolerance. "KKT" is the largest violation of the optimality
conditions of the whole problem over lam, at any lam; of glmnet's models too. Bytes are those of all sites together.
Needs Rscript with glmnet.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from estimators import table

from fednmap.estimators import FederatedLasso, FederatedLogisticRegression

torch.set_num_threads(1)
TIMES = 3
R = """
suppressMessages(library(glmnet))
X <- as.matrix(read.csv("X.csv", header = FALSE)); y <- scan("y.csv", quiet = TRUE)
l <- scan("l.csv", quiet = TRUE); kind <- commandArgs(TRUE)[1]
took <- min(sapply(1:3, function(i) sum(system.time(m <<- glmnet(X, y, family = kind, lambda = l))[1:2])))
cat(took, "\\n"); write.table(as.matrix(m$beta), "beta.txt", row.names = FALSE, col.names = FALSE)
write.table(m$a0, "a0.txt", row.names = FALSE, col.names = FALSE)
"""


def violation(X, y, kind: str, coefs, intercepts, lambdas) -> float:
    """The largest violation of the conditions at any lam, over lam; columns of deviation 1."""
    Z, worst = (X - X.mean(0)) / X.std(0), 0.0
    for coef, intercept, lam in zip(coefs, intercepts, lambdas, strict=True):
        score = X @ coef + intercept
        g = Z.T @ ((score if kind == "gaussian" else 1 / (1 + np.exp(-score))) - y) / len(y)
        wrong = np.where(coef != 0, np.abs(g + lam * np.sign(coef)), np.maximum(np.abs(g) - lam, 0))
        worst = max(worst, float(wrong.max()) / lam)
    return worst


def main() -> None:
    rows, columns = map(int, (sys.argv[1] if len(sys.argv) > 1 else "1000x5000").split("x"))
    X, y, label, sites = table(rows, columns)
    head = ("model", "s", "glmnet s", "ratio", "rounds", "nonzero", "MB", "KKT", "glmnet's KKT")
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for make, target, kind in ((FederatedLasso, y, "gaussian"), (FederatedLogisticRegression, label, "binomial")):
        took = []
        for _ in range(TIMES):
            begin = time.process_time()
            path = make().path(X, target, sites, lambdas=100)
            took.append(time.process_time() - begin)
        with tempfile.TemporaryDirectory() as folder:
            for name, values in (("X", X), ("y", target), ("l", path.lambdas)):
                np.savetxt(Path(folder) / f"{name}.csv", values, delimiter=",", fmt="%.17g")
            (Path(folder) / "run.R").write_text(R)
            words = ["Rscript", "run.R", kind]
            theirs = float(subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True).stdout)
            beta, a0 = (np.loadtxt(Path(folder) / f"{name}.txt") for name in ("beta", "a0"))
        sent = sum(fit.bytes for fit in path.fits) / 1e6
        ours = violation(X, target, kind, path.coefs[:, 0], path.intercepts[:, 0], path.lambdas)
        cells = [kind, f"{min(took):.1f}", f"{theirs:.2f}", f"{min(took) / theirs:.1f}", path.total_rounds]
        cells += [path.nonzero[-1], f"{sent:.0f}", f"{ours:.0e}"]
        cells += [f"{violation(X, target, kind, beta.T, a0, path.lambdas):.0e}"]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
