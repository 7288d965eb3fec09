"""What a path of l1 models, or a cross-validation, costs over R's glmnet.

    python benchmarks/estimators_wide.py                # 1,000 x 5,000
    python benchmarks/estimators_wide.py 10000x100 100000x50 cox mcp

100 values of lam, standardised columns, ten sites. Times are of the processor, one thread, the least of three calls;
glmnet's is that of R's system.time, with its default tolerance. "KKT" is the largest violation of the optimality
conditions of the whole problem over lam, at any lam; of glmnet's models too. Bytes are those of all sites together.
cox: 5,000 x 50, sites are strata. mcp: ten folds of R's Boston table with mcp, over the same with l1 and over
cv.glmnet with l1 and the same folds. Needs Rscript with glmnet, survival and MASS.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from estimators import table

from fednmap.estimators import FederatedCoxRegression, FederatedGLMCV, FederatedLasso, FederatedLogisticRegression

torch.set_num_threads(1)
TIMES = 3
R = """
suppressMessages({library(glmnet); library(survival)})
numbers <- function(name) readBin(name, "double", file.size(name) / 8)
kind <- commandArgs(TRUE)[1]; l <- numbers("l"); y <- numbers("y")
X <- matrix(numbers("X"), ncol = as.integer(commandArgs(TRUE)[2]))
if (kind == "cox") y <- stratifySurv(Surv(y, numbers("event")), numbers("site"))
call <- switch(kind, mcp = function() cv.glmnet(X, y, lambda = l, foldid = numbers("fold") + 1),
               function() glmnet(X, y, family = kind, lambda = l))
cat(min(sapply(1:3, function(i) sum(system.time(m <<- call())[1:2]))), "\\n")
if (kind != "mcp") writeBin(as.vector(as.matrix(m$beta)), "beta")
if (!kind %in% c("mcp", "cox")) writeBin(as.vector(m$a0), "a0")
"""


def seconds(call):
    """The least processor time of some calls, and what the last returns."""
    took = []
    for _ in range(TIMES):
        begin = time.process_time()
        found = call()
        took.append(time.process_time() - begin)
    return min(took), found


def in_r(kind: str, **given):
    """The time that R takes, and the coefficients (columns, lambdas) and intercepts that it finds."""
    with tempfile.TemporaryDirectory() as folder:
        for name, values in given.items():
            (Path(folder) / name).write_bytes(np.asarray(values, float).tobytes(order="F"))
        (Path(folder) / "run.R").write_text(R)
        words = ["Rscript", "run.R", kind, str(given["X"].shape[1])]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
        files = (Path(folder) / name for name in ("beta", "a0"))
        return float(done.stdout), *(np.fromfile(file) if file.exists() else None for file in files)


def violation(X, y, kind: str, coefs, intercepts, lambdas) -> float:
    """The largest violation of the conditions at any lam, over lam; columns of deviation 1."""
    Z, worst = (X - X.mean(0)) / X.std(0), 0.0
    for coef, intercept, lam in zip(coefs, intercepts, lambdas, strict=True):
        score = X @ coef + intercept
        g = Z.T @ ((score if kind == "gaussian" else 1 / (1 + np.exp(-score))) - y) / len(y)
        wrong = np.where(coef != 0, np.abs(g + lam * np.sign(coef)), np.maximum(np.abs(g) - lam, 0))
        worst = max(worst, float(wrong.max()) / lam)
    return worst


def print_row(cells) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def paths(rows: int, columns: int) -> None:
    X, y, label, sites = table(rows, columns)
    head = ("table", "model", "s", "glmnet s", "ratio", "rounds", "nonzero", "MB", "KKT", "glmnet's KKT")
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for make, target, kind in ((FederatedLasso, y, "gaussian"), (FederatedLogisticRegression, label, "binomial")):
        took, path = seconds(lambda make=make, target=target: make().path(X, target, sites, lambdas=100))
        theirs, beta, a0 = in_r(kind, X=X, y=target, l=path.lambdas)
        beta = beta.reshape(len(path.lambdas), -1)
        sent = sum(fit.bytes for fit in path.fits) / 1e6
        ours = violation(X, target, kind, path.coefs[:, 0], path.intercepts[:, 0], path.lambdas)
        cells = [f"{rows} x {columns}", kind, f"{took:.2f}", f"{theirs:.2f}", f"{took / theirs:.1f}", path.total_rounds]
        cells += [path.nonzero[-1], f"{sent:.0f}", f"{ours:.0e}"]
        print_row([*cells, f"{violation(X, target, kind, beta, a0, path.lambdas):.0e}"])


def cox() -> None:
    X, score, _, sites = table(5_000, 50)
    rng = np.random.default_rng(1)
    time_, censored = rng.exponential(np.exp(-score / score.std())), rng.exponential(2.0, len(X))
    y = np.column_stack([np.minimum(time_, censored), time_ <= censored])
    took, path = seconds(lambda: FederatedCoxRegression("l1", ties="breslow").path(X, y, sites, lambdas=100))
    theirs, beta, _ = in_r("cox", X=X, y=y[:, 0], event=y[:, 1], site=sites, l=path.lambdas)
    apart = np.abs(beta.reshape(len(path.lambdas), -1) - path.coefs[:, 0]).max()
    print("| table | model | s | glmnet s | ratio | rounds | difference |\n|---|---|---|---|---|---|---|")
    print_row(
        ["5000 x 50", "cox", f"{took:.2f}", f"{theirs:.2f}", f"{took / theirs:.2f}", path.total_rounds, f"{apart:.0e}"]
    )


def mcp() -> None:
    script = "write.table(MASS::Boston, row.names = FALSE, col.names = FALSE)"
    text = subprocess.run(["Rscript", "-e", script], capture_output=True, text=True, check=True).stdout
    boston = np.array([line.split() for line in text.splitlines()], float)
    X, y, fold = boston[:, :-1], boston[:, -1], np.random.default_rng(0).permutation(np.arange(len(boston)) % 10)
    pairs = [(np.flatnonzero(fold != k), np.flatnonzero(fold == k)) for k in range(10)]
    print("| table | penalty | s | rounds | over l1 | over cv.glmnet |\n|---|---|---|---|---|---|")
    kept = {}
    for penalty in ("l1", "mcp"):
        make = FederatedGLMCV("gaussian", penalty, cv=pairs, lambdas=100)
        kept[penalty], fitted = seconds(lambda make=make: make.fit(X, y))
        theirs = in_r("mcp", X=X, y=y, fold=fold, l=fitted.lambdas_)[0]
        ratios = [f"{kept[penalty] / other:.1f}" for other in (kept["l1"], theirs)]
        print_row(["506 x 13", penalty, f"{kept[penalty]:.2f}", fitted.n_iter_, *ratios])


def main() -> None:
    warnings.simplefilter("ignore")
    for word in sys.argv[1:] or ["1000x5000"]:
        {"cox": cox, "mcp": mcp}.get(word, lambda word=word: paths(*map(int, word.split("x"))))()


if __name__ == "__main__":
    main()
