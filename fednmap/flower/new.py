"""`fednmap flower new`: the files of a new Flower app."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import tomli_w

from fednmap.flower.settings import Federation
from fednmap.names import InputError
from fednmap.runs.configuration import Config

FIRST = {
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
ELSEWHERE = ("algorithms", "clients", "partition", "test", "trials", "drop", "chunk", "checkpoint_every", "device")


def write(folder: Path) -> None:
    """A small app that runs as it is, on made-up data; nothing that exists is overwritten."""
    name = folder.resolve().name
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise InputError(f"the folder is called {name!r}; use small letters, digits and '-', beginning with a letter")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and is not empty; choose another folder")
    package = name.replace("-", "_")
    words = {"@NAME@": name, "@PACKAGE@": package, "@SETTINGS@": _settings(name)}
    for source, target in {
        "pyproject.toml.in": "pyproject.toml",
        "README.md.in": "README.md",
        "client_app.py.in": f"{package}/client_app.py",
        "server_app.py.in": f"{package}/server_app.py",
    }.items():
        text = files("fednmap.flower").joinpath("template", source).read_text(encoding="utf-8")
        for word, value in words.items():
            text = text.replace(word, value)
        path = folder / target
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (folder / package / "__init__.py").write_text(f'"""{name}: a federation."""\n')
    (folder / ".gitignore").write_text("runs/\nstates/\n.flwr/\nkeys/\n")


def _settings(name: str) -> str:
    """Every setting with its description, as TOML."""
    first = FIRST | {"run_folder": f"runs/{name}"}
    lines = [_line("algorithm", "Method; see `fednmap list algorithms`.", first["algorithm"])]
    for kind in (Federation, Config):
        for key, field in kind.model_fields.items():
            if key in ELSEWHERE:
                continue
            default = None if field.is_required() else field.default
            lines.append(_line(key, MEANING.get(key, field.description or ""), first.get(key, default)))
    return "\n".join(lines)


def _line(key: str, description: str, value: Any) -> str:
    setting = tomli_w.dumps({key.replace("_", "-"): "" if value is None else value}).strip()
    return f"# {description}\n{setting}"
