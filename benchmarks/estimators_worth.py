"""What a joint fit is worth: the pooled fit, the federated fit and each site's own, on rows that no fit has seen.

    FEDNMAP_DATA=... python benchmarks/estimators_worth.py

Prints the table of docs/estimators.md. Every fifth row (of every site) is for the test. A site's own model is tested on
the rows of all sites; the column says the mean over sites, and the worst. lam is the same for all.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import csv
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine
from sklearn.linear_model import Lasso, LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fednmap.data import load
from fednmap.estimators import FederatedCoxRegression, FederatedLasso, FederatedLogisticRegression
from fednmap.names import InputError

torch.set_num_threads(1)


def by_column(X, n=4):
    """Sites that differ: cut along the first column."""
    return np.argsort(np.argsort(X[:, 0], kind="stable")) * n // len(X)


def heart():
    data = load("heart-disease")
    X, y = torch.cat([data.x_train, data.x_test]).double().numpy(), torch.cat([data.y_train, data.y_test]).numpy()
    return X, y, torch.cat([data.clients, data.test_clients]).numpy()


def tcga_brca():
    """Breast cancer patients of six regions, survival times; the split by region is FLamby's."""
    folder = Path(os.environ["FEDNMAP_DATA"]) / "tcga_brca"
    region = {
        row["pid"]: row["fold2"].split("_")[1] for row in csv.DictReader((folder / "train_test_split.csv").open())
    }
    rows = [row for row in csv.DictReader((folder / "brca.csv").open()) if row["pid"] in region]
    names = [name for name in rows[0] if name not in ("pid", "E", "T")]
    X = np.array([[float(row[name]) for name in names] for row in rows])
    return X, np.array([[float(row["T"]), float(row["E"])] for row in rows]), np.array([region[r["pid"]] for r in rows])


def tables():
    for name, loaded in (("breast cancer", load_breast_cancer), ("wine", load_wine), ("diabetes", load_diabetes)):
        X, y = loaded(return_X_y=True)
        model = FederatedLasso(2.0) if name == "diabetes" else FederatedLogisticRegression(lam=0.01)
        yield name, X, y, by_column(X), model
    yield "heart disease", *heart(), FederatedLogisticRegression(lam=0.01)
    yield "TCGA-BRCA", *tcga_brca(), FederatedCoxRegression("ridge", 0.01)


def pooled(model, rows):
    """scikit-learn on all rows, standardised; it has no stratified Cox model."""
    if isinstance(model, FederatedCoxRegression):
        return None
    if isinstance(model, FederatedLasso):
        return make_pipeline(StandardScaler(), Lasso(alpha=model.lam, tol=1e-10, max_iter=100_000))
    C = 1 / (rows * model.lam)
    logistic = LogisticRegression(C=C, l1_ratio=1.0, solver="saga", tol=1e-8, max_iter=100_000)
    return make_pipeline(StandardScaler(), logistic)


def score(model, X, y, sites):
    return model.score(X, y, sites) if isinstance(model, FederatedCoxRegression) else model.score(X, y)


HEAD = (
    "data",
    "rows, p, sites",
    "model",
    "measure",
    "pooled",
    "federated",
    "difference",
    "alone (worst)",
    "rounds",
    "kB",
    "s",
)


def line(cells) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def alone(model, X, y, sites, test) -> str:
    """The models that each site fits by itself, on the test rows of all."""
    found = []
    for site in np.unique(sites):
        mine = ~test & (sites == site)
        try:
            found.append(score(clone(model).fit(X[mine], y[mine]), X[test], y[test], sites[test]))
        except InputError:  # one class only, or no event
            found.append(np.nan)
    cannot = f", {np.isnan(found).sum()} cannot" if np.isnan(found).any() else ""
    return f"{np.nanmean(found):.3f} ({np.nanmin(found):.3f}){cannot}"


def main() -> None:
    warnings.simplefilter("ignore")
    line(HEAD)
    print("|" + "---|" * len(HEAD))
    for name, X, y, sites, model in tables():
        rank = np.zeros(len(X), int)
        for site in np.unique(sites):
            rank[sites == site] = np.arange((sites == site).sum())
        test = rank % 5 == 4
        begin = time.perf_counter()
        fitted = clone(model).fit(X[~test], y[~test], sites[~test])
        took = time.perf_counter() - begin
        reference, difference, together = pooled(model, (~test).sum()), "-", "-"
        if reference is not None:
            reference.fit(X[~test], y[~test])
            mine = np.atleast_2d(fitted.coef_) * reference[0].scale_
            difference = f"{np.abs(mine - reference[-1].coef_).max():.0e}"
            together = f"{reference.score(X[test], y[test]):.3f}"
        kind = type(model).__name__.removeprefix("Federated")
        measure = {"Lasso": "R2", "CoxRegression": "concordance"}.get(kind, "accuracy")
        sizes = f"{len(X)}, {X.shape[1]}, {len(np.unique(sites))}"
        joint = f"{score(fitted, X[test], y[test], sites[test]):.3f}"
        cost = fitted.n_iter_, f"{fitted.bytes_sent_ / 1e3:.0f}", f"{took:.2f}"
        line([name, sizes, kind, measure, together, joint, difference, alone(model, X, y, sites, test), *cost])


if __name__ == "__main__":
    main()
