"""
Four files, six commands
========================

Four hospitals have a file each: words and numbers, gaps, dates, columns in another order, a level that one of them does
not have. Six commands fit a lasso logistic and a Cox model, choose lam, write tables with intervals and forest plots,
and predict new patients. All of it is simulated in one process.

The patients are those of four regions of TCGA-BRCA, breast cancer, where its files are at hand (``fednmap list
datasets`` says where they belong), else they are drawn at random. Dates, gaps and identifiers are made up.
"""

# %%
# The files
# ---------

import csv
import os
import shlex
import subprocess
import sys
import tempfile
from datetime import date, timedelta
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from fednmap.data import cache

FILE, SPLIT = "brca.csv", "train_test_split.csv"
PARTS = {"stage": "tumor_stage_stage ", "size": "ajcc_pathologic_t_", "nodes": "ajcc_pathologic_n_"}


def real_patients(folder):
    """Indicators of TCGA-BRCA as words again; age, days and whether the patient died, by region."""
    regions = {row["pid"]: row["fold2"][-1] for row in csv.DictReader((folder / SPLIT).open())}
    for row in (row for row in csv.DictReader((folder / FILE).open()) if row["pid"] in regions):
        words = {}
        for name, prefix in PARTS.items():
            levels = [key.removeprefix(prefix) for key in row if key.startswith(prefix) and float(row[key])]
            words[name] = levels[0] if levels else "other"
        kind = [key for key in row if key.startswith("primary_diagnosis") and float(row[key])]
        words["kind"] = "lobular" if "Lobular" in str(kind) else "ductal" if kind else "other"
        numbers = {"age": row["age_at_index"], "days": float(row["T"]) + 1, "died": "yes" if float(row["E"]) else "no"}
        yield "ABCDEF"[int(regions[row["pid"]])], numbers | words


def drawn_patients():
    """The same columns, drawn at random."""
    random = np.random.default_rng(0)
    for k in range(900):
        stage, age = int(random.integers(0, 3)), random.integers(30, 90)
        days = random.exponential(6000 * np.exp(-0.6 * stage - 0.03 * (age - 60)))
        numbers = {"age": age, "days": round(min(days, 2500)) + 1, "died": "yes" if days < 2500 else "no"}
        words = {"size": f"T{random.integers(1, 4)}", "nodes": f"N{random.integers(0, 3)}"}
        words |= {"stage": ["i", "iia", "iiia"][stage], "kind": ["ductal", "lobular"][int(random.integers(0, 2))]}
        yield "ABCD"[k % 4], numbers | words


place = Path(tempfile.mkdtemp())
(place / "files").mkdir()
found = cache.find("tcga_brca", [FILE])
patients = real_patients(found.parent) if found else drawn_patients()
sites = {}
for site, patient in patients:
    sites.setdefault(site, []).append(patient)
new = []
for number, site in enumerate(sorted(sites, key=lambda name: -len(sites[name]))[:4]):
    rows = []
    for k, patient in enumerate(sites[site]):
        patient = {"patient": f"{site}{k:03d}", "diagnosed": str(date(2010, 1, 1) + timedelta(7 * k)), **patient}
        if k % 17 == 5:
            patient["age"] = ("NA", "", "?")[k % 3]
        if number == 3 and patient["size"] == "T3":
            continue  # a level that this hospital does not have
        rows.append(patient)
    names = list(rows[0])[:: -1 if number == 1 else 1]  # columns in another order
    new += rows[::40]
    with (place / "files" / f"hospital-{site.lower()}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
new = [{name: v for name, v in row.items() if name not in ("days", "died")} for row in new]
with (place / "new.csv").open("w", newline="") as file:
    writer = csv.DictWriter(file, list(new[0]))
    writer.writeheader()
    writer.writerows(new)
for path in sorted((place / "files").iterdir()):
    print(path.name, *path.read_text().splitlines()[:2], sep="\n  ")


def run(line, lines=60):
    """Run a command in the folder of the files, and print what it prints."""
    command = [sys.executable, "-m", *shlex.split(line)]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, env={**os.environ, "COLUMNS": "110"})
    print(f"$ {line}", *(done.stdout or done.stderr).splitlines()[:lines], sep="\n")
    assert done.returncode == 0, done.stderr


# %%
# 1. A lasso logistic model
# -------------------------
# Identifiers and dates are refused by name unless they are left out. ``--evaluate 5`` predicts every patient by a model
# that has not seen the patient.

run("fednmap fit --data csv:files/ --target died --exclude patient,diagnosed,days --cv 5 --evaluate 5 --out LASSO")

# %%
# 2. Its table with intervals
# ---------------------------
# The unpenalised model has standard errors; ``--heterogeneity`` compares the hospitals, with a forest plot.

run(
    "fednmap fit --data csv:files/ --target died --exclude patient,diagnosed,days --penalty none --heterogeneity "
    "--out TABLE"
)
plt.figure(figsize=(9, 7), layout="constrained")
plt.imshow(plt.imread(place / "TABLE" / "forest.png"))
plt.axis("off")
plt.show()

# %%
# 3. New patients
# ---------------
# The new file may have columns that the model does not know. ``--id`` copies one of them.

run("fednmap predict LASSO new.csv --id patient", 6)

# %%
# 4. A lasso Cox model
# --------------------
# Every hospital has a baseline hazard of its own.

run(
    "fednmap fit --data csv:files/ --time days --event died --exclude patient,diagnosed --penalty l1 --cv 5 "
    "--evaluate 5 --out COX"
)

# %%
# 5. Hazard ratios with intervals
# -------------------------------

run("fednmap fit --data csv:files/ --time days --event died --exclude patient,diagnosed --penalty none --out HAZARDS")

# %%
# 6. Hazard ratios of new patients
# --------------------------------
# They are relative to the mean patient of the fit.

run("fednmap predict COX new.csv --id patient", 6)

# %%
# Every folder has the model, its tables as CSV, a page and a model card:

print(*sorted(path.name for path in (place / "LASSO").iterdir()), sep="  ")
print((place / "COX" / "model_card.md").read_text())
