"""Predictions of patients of a hospital that no fit has seen: joint, with the sites' own coefficients, or separate.

    FEDNMAP_DATA=... python benchmarks/out_of_site.py

Prints the table of docs/sites.md. Each of the four hospitals of UCI's heart disease data is left out in turn. The
others fit an l1-penalised logistic regression, lam by 5 folds within sites: one joint model; one with
`site_effects="sparse"`, mu chosen too, of which a new hospital has the shared coefficients; and one model each. Gaps in
numbers are filled by the means of the hospitals that are fitted. `separate`: the mean of the three hospitals' own
models, and the worst of them.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

import tempfile
import warnings
from pathlib import Path

import numpy as np

from fednmap.data.heart_disease import hospital_files
from fednmap.estimators import FederatedLogisticRegressionCV, evaluate
from fednmap.report.data_table import DataTable
from fednmap.tables import FederatedPreprocessor, read_sites

MUS = [0.005, 0.015]


def measured(X, y, names, out, **options):
    """AUC and Brier's score at hospital `out` of a fit to the hospitals `names`."""
    rows, labels = (np.concatenate([part[name] for name in names]) for part in (X, y))
    where = np.repeat(names, [len(y[name]) for name in names])
    model = FederatedLogisticRegressionCV(cv=5, lambdas=np.geomspace(0.2, 0.0005, 15), **options).fit(
        rows, labels, where
    )
    found = evaluate(model, X[out], y[out])
    return found.auc, found.squared_error


def main():
    with tempfile.TemporaryDirectory() as place:
        hospital_files(Path(place) / "files")
        sites = read_sites(f"csv:{place}/files")
    features = {name: t.without(["outcome"]) for name, t in sites.items()}
    known = FederatedPreprocessor().fit(features)
    rows = []
    for out in sites:
        kept = [name for name in sites if name != out]
        filled = known.refilled([features[name] for name in kept])
        X = {name: filled.transform(t) for name, t in features.items()}
        y = {name: t["outcome"].astype(str) for name, t in sites.items()}
        joint, sparse = measured(X, y, kept, out), measured(X, y, kept, out, site_effects="sparse", mu=MUS)
        own = [measured(X, y, [name], out) for name in kept]
        each = [auc.value for auc, _ in own]
        row = [out, len(y[out])]
        for auc, brier in (joint, sparse):
            row += [f"{auc.value:.3f} ({auc.low:.3f} to {auc.high:.3f})", f"{brier:.3f}"]
        briers = [brier for _, brier in own]
        row += [f"{np.mean(each):.3f}, {min(each):.3f}", f"{np.mean(briers):.3f}, {max(briers):.3f}"]
        rows.append(row)
        print(*row, sep="  ", file=sys.stderr, flush=True)
    head = ["left out", "patients", "AUC, joint", "Brier", "AUC, sparse", "Brier"]
    print(DataTable([*head, "AUC, separate: mean, worst", "Brier: mean, worst"], rows).markdown())


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of lam at the end of a grid
        main()
