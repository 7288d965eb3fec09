"""`fednmap flower new`: the files of a new Flower app."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from pydantic import BaseModel

from fednmap.flower.settings import Federation
from fednmap.names import InputError, choose
from fednmap.runs.configuration import Config

FIRST: dict[str, Any] = {
    "names": "client-0,client-1,client-2",
    "algorithm": "fednmap",
    "data": "own",
    "model": "logistic",
    "reg": "l1:0.01",
    "rounds": 20,
    "eval_every": 5,
    "deadline": 600.0,
    "set": "",
}
MEANING = {"measure_gamma": "gamma of |F_nat|^2; default 1, the server has no data to estimate a better one from."}
ELSEWHERE = (
    *("algorithms", "clients", "partition", "test", "trials", "drop", "chunk", "checkpoint_every", "device"),
    *("intercept", "standardize", "weights"),  # for `load` to decide
)


FIRST_TABLE = {"names": FIRST["names"], "target": "outcome", "lam": 0.01, "deadline": 600.0}
ALWAYS = ("min_clients", "measure_stationarity", "secagg_threshold")
"""What a fit of tables does not leave open: every site, in every round, with its gradient, without masks."""
REAL = "## Real machines"
NODE = "--node-config \"client='client-0' "
FILE = "file='$PWD/client-0.csv' "

TEMPLATES = {"plain": "any problem: fill in `load`", "tables": "a linear model of tables, one file per site"}


def write(folder: Path, template: str = "plain") -> None:
    """A small app that runs as it is, on made-up data; nothing that exists is overwritten."""
    choose("template", template, TEMPLATES)
    name = folder.resolve().name
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise InputError(f"the folder is called {name!r}; use small letters, digits and '-', beginning with a letter")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and is not empty; choose another folder")
    package = name.replace("-", "_")
    of_tables = template == "tables"
    words = {"@NAME@": name, "@PACKAGE@": package, "@SETTINGS@": (_table_settings if of_tables else _settings)(name)}
    own = "tables/" if of_tables else ""
    for source, target in {
        "pyproject.toml.in": "pyproject.toml",
        f"{own}README.md.in": "README.md",
        f"{own}client_app.py.in": f"{package}/client_app.py",
        f"{own}server_app.py.in": f"{package}/server_app.py",
    }.items():
        text = _template(source)
        if of_tables and target == "README.md":  # how real machines are set up is the same, but for the file
            text += REAL + _template("README.md.in").partition(REAL)[2].replace(NODE, NODE + FILE)
        if of_tables:
            text = text.replace("rounds=50", "lam=0.05")
        for word, value in words.items():
            text = text.replace(word, value)
        path = folder / target
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (folder / package / "__init__.py").write_text(f'"""{name}: a federation."""\n')
    (folder / ".gitignore").write_text("runs/\nstates/\n.flwr/\nkeys/\n" + ("data/\n" if of_tables else ""))
    if of_tables:
        _made_up_tables(folder / "data", FIRST["names"].split(","))


def _template(source: str) -> str:
    return files("fednmap.flower").joinpath("template", source).read_text(encoding="utf-8")


def _made_up_tables(folder: Path, names: list[str]) -> None:
    """Patients of three sites: age and smoking matter, the rest does not; some pressures were not taken."""
    folder.mkdir()
    for number, name in enumerate(names):
        random, rows = np.random.default_rng(number), 120 - 30 * number
        age, pressure = random.normal(60 + 2 * number, 10, rows), random.normal(130, 15, rows)
        smokes, sex = random.choice(["yes", "no"], rows), random.choice(["f", "m"], rows)
        ill = random.random(rows) < 1 / (1 + np.exp(-0.08 * (age - 60) - (smokes == "yes") + 0.5))
        taken = [f"{v:.0f}" if k % 9 else "NA" for k, v in enumerate(pressure)]
        lines = [
            f"{a:.1f},{s},{m},{p},{'sick' if o else 'healthy'}"
            for a, s, m, p, o in zip(age, sex, smokes, taken, ill, strict=True)
        ]
        (folder / f"{name}.csv").write_text("\n".join(["age,sex,smokes,pressure,outcome", *lines]) + "\n")


def _settings(name: str) -> str:
    """Every setting with its description, as TOML."""
    first = FIRST | {"run_folder": f"runs/{name}"}
    lines = [_line("algorithm", "Method; see `fednmap list algorithms`.", first["algorithm"])]
    return "\n".join([*lines, *_lines((Federation, Config), first, ELSEWHERE)])


def _table_settings(name: str) -> str:
    from fednmap.estimators.fit_config import FitConfig

    return "\n".join(_lines((FitConfig, Federation), FIRST_TABLE | {"run_folder": f"runs/{name}"}, ALWAYS))


def _lines(kinds: tuple[type[BaseModel], ...], first: dict[str, Any], left_out: tuple[str, ...]) -> list[str]:
    lines = []
    for kind in kinds:
        for key, field in kind.model_fields.items():
            if key in left_out:
                continue
            default = None if field.is_required() else field.default
            lines.append(_line(key, MEANING.get(key, field.description or ""), first.get(key, default)))
    return lines


def _line(key: str, description: str, value: Any) -> str:
    setting = tomli_w.dumps({key.replace("_", "-"): "" if value is None else value}).strip()
    return f"# {description}\n{setting}"
