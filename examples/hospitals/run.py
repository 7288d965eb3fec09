"""Four hospitals fit one sparse model: which risk factors survive, and is it worth taking part?"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
from files import write as write_files
from rich.console import Console
from rich.table import Table

from fednmap.estimators import FederatedLogisticRegression, fitted_model
from fednmap.flower.launch import Launcher
from fednmap.flower.new import write as write_app
from fednmap.tables import read

PENALTIES = {"lasso": {"penalty": "l1", "lam": 0.02}, "MCP": {"penalty": "mcp", "lam": 0.03}}
UNMEASURED = "cholesterol"  # in Switzerland; a column that a site lacks must be left out by all
TOL = 1e-10


def hospitals(out):
    """HOSPITAL.csv to fit to, and new/HOSPITAL.csv with every fifth patient, kept back; their names."""
    for folder in ("tables", "new"):
        (out / folder).mkdir(parents=True)
    names = []
    for path in write_files(out / "all"):
        head, *lines = path.read_text().splitlines()
        for folder, chosen in (("tables", lambda k: k % 5 != 4), ("new", lambda k: k % 5 == 4)):
            rows = [line for k, line in enumerate(lines) if chosen(k)]
            (out / folder / path.name).write_text("\n".join([head, *rows]) + "\n")
        names.append(path.stem)
    return names


def federated(names, out):
    """Fitted by four nodes, each with the file of its own hospital; the models by penalty."""
    write_app(out / "hospitals-app", "tables")
    models = {}
    with Launcher(out / "flower") as launcher:
        launcher.superlink()
        for name in names:
            launcher.supernode(name, out / "states", file=str((out / "tables" / f"{name}.csv").resolve()))
        for title, penalty in PENALTIES.items():
            run = (out / title).resolve()
            common = {"names": ",".join(names), "run_folder": str(run), "exclude": UNMEASURED, "tol_absolute": TOL}
            launcher.run(out / "hospitals-app", **common, **penalty).wait()
            if not (run / fitted_model.MODEL).exists():
                raise SystemExit(f"the run did not finish:\n{launcher.log('run')[-2000:]}")
            models[title] = fitted_model.load(run)
    return models


def rows(model, names, out, folder):
    """Columns and labels of every hospital, as the model takes them."""
    found = {}
    for name in names:
        table = read(out / folder / f"{name}.csv", [UNMEASURED])
        found[name] = model.preprocessor.transform(table.without(["outcome"])), np.array(list(table["outcome"]))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None, help="where tables and run folders go")
    given = parser.parse_args()
    out = given.out or Path(tempfile.mkdtemp(prefix="hospitals-")) / "out"
    console, summary = Console(), {}
    names = hospitals(out)
    for title, model in federated(names, out).items():
        train, new = (rows(model, names, out, folder) for folder in ("tables", "new"))
        X, y = (np.concatenate(parts) for parts in zip(*train.values(), strict=True))
        where = np.repeat(names, [len(labels) for _, labels in train.values()])
        fits = {"pooled": FederatedLogisticRegression(tol=TOL, **PENALTIES[title]).fit(X, y, where)}
        for name, (own, labels) in train.items():
            fits[name] = FederatedLogisticRegression(tol=1e-6, **PENALTIES[title]).fit(own, labels)
        gap = float(np.abs(model.coef - fits["pooled"].coef_).max())
        console.print(factors(title, model))
        console.print(f"largest difference to the fit of all rows in one place: {gap:.1e}", highlight=False)
        table, numbers = accuracies(title, model, fits, new)
        console.print(table)
        survivors = [name for name, value in zip(model.columns, model.coef[0], strict=True) if value]
        summary[title] = {"survive": survivors, "gap": gap, "accuracy": numbers}
    (out / "summary.json").write_text(json.dumps(summary, indent=1))
    console.print(f"tables and run folders: {out}", highlight=False, soft_wrap=True)
    console.print(f"predict new patients: fednmap predict {out}/MCP {out}/new/va.csv", highlight=False, soft_wrap=True)


def factors(title, model):
    """Odds ratios of what has survived, for the columns as they are in the tables."""
    table = Table("risk factor", "coefficient", "odds ratio", title=f"{title}: risk factors that survive")
    for name, value in zip(model.columns, model.coef[0].tolist(), strict=True):
        if value:
            table.add_row(name, f"{value:+.3f}", f"{np.exp(value):.2f}")
    return table


def accuracies(title, model, fits, new):
    """On patients kept back, for each hospital and for all of them."""
    numbers = {}
    for name, (X, labels) in new.items():
        said = np.array(model.classes)[(X @ model.coef[0] + model.intercept[0] > 0).astype(int)]
        numbers[name] = {
            "patients": len(labels),
            "together": float((said == labels).mean()),
            "alone": float((fits[name].predict(X) == labels).mean()),
        }
    total = sum(row["patients"] for row in numbers.values())
    means = {key: sum(row[key] * row["patients"] for row in numbers.values()) / total for key in ("together", "alone")}
    numbers["all patients"] = {"patients": total, **means}
    table = Table("hospital", "patients", "together", "alone", title=f"{title}: accuracy on patients kept back")
    for name, row in numbers.items():
        table.add_row(name, str(row["patients"]), *(f"{100 * row[key]:.0f} %" for key in ("together", "alone")))
    return table, numbers


if __name__ == "__main__":
    main()
