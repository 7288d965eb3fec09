"""Four hospitals train one sparse model: which risk factors survive, and is it worth taking part?"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from fednmap import simulate
from fednmap.measure import accuracy
from fednmap.problems import Logistic
from fednmap.runs.configuration import Config
from fednmap.runs.experiment import prepare
from fednmap.runs.folder import Job, RunFolder

HOSPITALS = ("Cleveland", "Hungary", "Switzerland", "Long Beach")
FACTORS = (
    "age",
    "male",
    "blood pressure at rest",
    "cholesterol",
    "blood sugar above 120 mg/dl",
    "highest heart rate",
    "pain under exercise",
    "ST depression under exercise",
    "chest pain: atypical angina",
    "chest pain: not anginal",
    "chest pain: none",
    "ECG at rest: ST-T abnormal",
    "ECG at rest: thick left ventricle",
)
REGULARIZERS = {"elastic net": "elastic-net:0.02,0.01", "MCP": "mcp:0.03,3"}
COMMON = {"data": "heart-disease", "model": "logistic", "batch_size": 0, "eta_a": 0.2, "local_steps": 5, "gamma": 1.0}


def federated(reg, rounds, folder):
    """Trained by four nodes; each reads the public files and trains on the rows of its own hospital alone."""
    options = COMMON | {"reg": reg, "rounds": rounds, "eval_every": rounds, "out": folder}
    words = [word for k, v in options.items() for word in (f"--{k.replace('_', '-')}", str(v))]
    command = [sys.executable, "-m", "fednmap", "flower", "up", "--clients", "4", *words, "--json"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return RunFolder.open(folder).model(Job("fednmap", 0)).parameters["x"]


def trained(problem, experiment):
    """The same method on other data, in this process, until it no longer moves."""
    algorithm = experiment.algorithm("fednmap")
    *_, last = simulate(algorithm, problem, rounds=2000, start=experiment.start(algorithm))
    return algorithm.model(last.server)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=None, help="where the run folders go")
    given = parser.parse_args()
    out = given.out or Path(tempfile.mkdtemp(prefix="hospitals-"))
    console, summary = Console(), {}
    for name, reg in REGULARIZERS.items():
        experiment = prepare(Config.make(**COMMON, reg=reg, clients=4))
        data, problem = experiment.dataset, experiment.problem
        pooled = Logistic([(data.x_train, data.y_train)], classes=2)
        models = {
            "federated": federated(reg, given.rounds, out / name.replace(" ", "-")),
            "pooled data": trained(pooled, experiment),
        }
        alone = [trained(problem.alone(i), experiment) for i in range(4)]
        console.print(factors(name, models))
        table, numbers = accuracies(name, data, problem, models, alone)
        console.print(table)
        survivors = [f for f, v in zip(FACTORS, models["federated"], strict=True) if v != 0]
        summary[name] = {"survive": survivors, "accuracy": numbers}
    (out / "summary.json").write_text(json.dumps(summary, indent=1))
    console.print(f"run folders: {out}", highlight=False, soft_wrap=True)


def factors(name, models):
    """Coefficients on standardised features; zero ones have not survived."""
    table = Table("risk factor", *models, title=f"{name}: risk factors that survive")
    order = models["federated"].abs().argsort(descending=True)
    for j in order.tolist():
        if any(float(x[j]) for x in models.values()):
            table.add_row(FACTORS[j], *(f"{float(x[j]):+.2f}" if x[j] else "-" for x in models.values()))
    return table


def accuracies(name, data, problem, models, alone):
    """On patients kept back, for each hospital and for all of them."""
    numbers = {}
    for i, hospital in enumerate([*HOSPITALS, "all patients"]):
        mine = data.test_clients == i if i < 4 else torch.ones(len(data.y_test), dtype=torch.bool)
        samples, labels = data.x_test[mine], data.y_test[mine]
        row = {label: accuracy(problem.predict(x, samples), labels) for label, x in models.items()}
        if i < 4:
            row["alone"] = accuracy(problem.predict(alone[i], samples), labels)
        else:  # every hospital uses its own model
            said = [problem.predict(x, data.x_test) for x in alone]
            own = torch.stack(said).gather(0, data.test_clients.long().unsqueeze(0)).squeeze(0)
            row["alone"] = accuracy(own, labels)
        numbers[hospital] = row | {"patients": int(mine.sum())}
    table = Table("hospital", "patients", *models, "alone", title=f"{name}: accuracy on patients kept back")
    for hospital, row in numbers.items():
        table.add_row(hospital, str(row["patients"]), *(f"{100 * row[k]:.0f} %" for k in [*models, "alone"]))
    return table, numbers


if __name__ == "__main__":
    main()
