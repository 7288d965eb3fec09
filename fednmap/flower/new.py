"""`fednmap flower new`: the files of a new Flower app."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from pydantic import BaseModel

from fednmap.flower.settings import FederationSettings
from fednmap.names import InputError, choose
from fednmap.runs.configuration import Config

FIRST: dict[str, Any] = {
    "names": "client-0,client-1,client-2",
    "data": "own",
    "model": "logistic",
    "penalty": "l1:0.01",
    "rounds": 20,
    "eval_every": 5,
    "deadline": 600.0,
    "set": "",
}
METHOD = '# Method; see `fednmap list algorithms`.\nalgorithm = "fednmap"\n'
MEANING = {"measure_gamma": "gamma of |F_nat|^2; default 1, the server has no data to estimate a better one from."}
ELSEWHERE = (
    *("algorithms", "clients", "partition", "test", "trials", "drop", "chunk", "checkpoint_every", "device"),
    *("topology", "delays", "slowdown"),  # for simulations
    *("intercept", "standardize", "weights"),  # for `load` to decide
)


FIRST_TABLE = {"names": FIRST["names"], "target": "outcome", "lam": 0.01, "deadline": 600.0}
ALWAYS = ("min_clients", "measure_stationarity", "norm_bound")
"""What a fit of tables does not leave open: every site answers every question."""
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
    run = {"run_folder": f"runs/{name}"}
    package, readme, ignored = name.replace("-", "_"), _template("README.md.in"), "runs/\nstates/\n.flwr/\nkeys/\n"
    if template == "tables":
        # how real machines are set up is the same, but for the file
        real = readme.partition(REAL)[2].replace(NODE, NODE + FILE)
        readme, ignored = _template("tables/README.md.in") + REAL + real, ignored + "data/\n"
        from fednmap.estimators.fit_config import LOCAL
        from fednmap.estimators.handshake import RemoteFitConfig

        known = RemoteFitConfig, FederationSettings
        settings, place = _settings(known, FIRST_TABLE | run, (*ALWAYS, *LOCAL)), "tables/"
        _made_up_tables(folder / "data", FIRST["names"].split(","))
    else:
        settings, place = METHOD + _settings((FederationSettings, Config), FIRST | run, ELSEWHERE), ""
    write_project(folder, name, {f: _template(f"{place}{f}.in") for f in ("client_app.py", "server_app.py")}, settings)
    clients = FIRST["names"].split(",")
    nodes = "".join(_template("compose_node.yaml.in").replace("@CLIENT@", client) for client in clients)
    states = "\n".join(f"  {client}:" for client in clients)
    compose = _template("compose.yaml.in").replace("@NODES@\n", nodes + "\n").replace("@STATES@", states)
    texts = {"README.md": readme, "compose.yaml": compose}
    texts |= {file: _template(f"{file}.in") for file in ("Dockerfile", "kubernetes.yaml", "grafana.json")}
    for file, text in texts.items():
        if template == "tables":
            text = re.sub(r"client='(\S+)' state-dir='/state'", r"\g<0> file='/data/\1.csv'", text)
        (folder / file).write_text(text.replace("@NAME@", name).replace("@PACKAGE@", package), encoding="utf-8")
    (folder / ".gitignore").write_text(ignored)


def write_project(folder: Path, name: str, modules: Mapping[str, str], settings: str) -> None:
    """The app `name`: its package with these modules, and a pyproject.toml with these settings, as TOML."""
    package = name.replace("-", "_")
    (folder / package).mkdir(parents=True, exist_ok=True)
    for module, text in {"__init__.py": f'"""{name}: a federation."""\n', **modules}.items():
        (folder / package / module).write_text(text, encoding="utf-8")
    text = _template("pyproject.toml.in").replace("@NAME@", name).replace("@PACKAGE@", package)
    (folder / "pyproject.toml").write_text(text.replace("@SETTINGS@", settings), encoding="utf-8")


def _template(source: str) -> str:
    return files("fednmap.flower").joinpath("template", source).read_text(encoding="utf-8")


def _made_up_tables(folder: Path, names: list[str]) -> None:
    """Patients of three sites: age and smoking matter, the rest does not; some pressures were not taken."""
    folder.mkdir(parents=True)
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


def _settings(kinds: tuple[type[BaseModel], ...], first: dict[str, Any], left_out: tuple[str, ...]) -> str:
    """Every setting with its description, as TOML."""
    lines = []
    for key, field in {key: field for kind in kinds for key, field in kind.model_fields.items()}.items():
        value = first.get(key, None if field.is_required() else field.default)
        setting = tomli_w.dumps({key.replace("_", "-"): "" if value in (None, ()) else value}).strip()
        lines += [] if key in left_out else [f"# {MEANING.get(key, field.description or '')}\n{setting}"]
    return "\n".join(lines)
