"""`fednmap list`: what there is to choose from; `fednmap example`: files to try the commands on."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Column, Table

from fednmap.algorithms import ALGORITHMS
from fednmap.data.datasets import DATASETS
from fednmap.data.heart_disease import hospital_files
from fednmap.data.partition import PARTITIONS
from fednmap.decentralized import DECENTRALIZED
from fednmap.decentralized.topologies import TOPOLOGIES
from fednmap.models.build import MODELS
from fednmap.names import InputError, choose
from fednmap.regularizers import REGULARIZERS, signature
from fednmap.report.data_table import DataTable
from fednmap.report.terminal import console
from fednmap.runs.presets import presets


def _algorithms() -> Group:
    first = Column("name", no_wrap=True)
    needs = Table(first, "solves", "up", "down", "prox", "all clients", "fixed point", box=SIMPLE_HEAD, padding=0)
    for name, kind in ALGORITHMS.items():
        t = kind.traits
        solves = ("f + phi" if t.composite else "f") + (", central" if t.central else "")
        down = f"{t.down}, {t.up}" if t.broadcast_follows else str(t.down)
        everybody = "needed" if t.full_participation else "-"
        up = f"{t.up} + H" if t.hessians else str(t.up)
        needs.add_row(name, solves, up, down, t.prox, everybody, t.fixed_point.value)
    key = (
        "up, down: vectors that a client sends and receives in a round (2, 1: only 1 after a round in which it was "
        "counted); prox: evaluations on a client + on the server; H: p (p + 1) / 2 numbers more; fixed point: where it "
        "ends with exact gradients on heterogeneous clients"
    )
    heads = ("without a server", "vectors", "prox", "one-way links", "changing links", "fixed point")
    graph = Table(*heads, box=SIMPLE_HEAD, padding=0)
    for name, method in DECENTRALIZED.items():
        said, fixed_point = method.traits, method.traits.fixed_point.value
        changing = ("exact" if fixed_point == "exact" else "runs") if said.changing else "may diverge"
        directed = "yes" if said.directed else "refused"
        graph.add_row(name, str(said.vectors), said.prox, directed, changing, fixed_point)
    where = "they run on a graph, --topology; vectors: along a link, each way, in a round; prox: evaluations on a node"
    rates = _rates(ALGORITHMS, "s2 = gradient variance"), _rates(DECENTRALIZED, "1 - lambda = spectral gap")
    return Group(needs, key, rates[0], graph, where, rates[1])


def _rates(methods: Mapping[str, Any], symbol: str) -> Table:
    table = Table(Column("name", no_wrap=True), f"convergence rate as published, {symbol}", box=SIMPLE_HEAD, padding=0)
    for name, kind in methods.items():
        if kind.traits.rate != "-":
            table.add_row(name, kind.traits.rate)
    return table


def _topology(name: str) -> str:
    """Return how a name is used, without the number of nodes, which is that of the clients."""
    words = [f"[{argument}]" for argument in inspect.signature(TOPOLOGIES[name]).parameters if argument != "n"]
    if name == "file":
        words = ["PATH"]
    return f"{name}:{','.join(words)}" if words else name


def _table(known: Mapping[str, Any], show: Callable[[str], str] = str, more: Mapping[str, str] | None = None) -> Table:
    """Return a table of names, as `show` prints them, and the first lines of docstrings; and `more` rows."""
    texts = {show(name): kind if isinstance(kind, str) else kind.__doc__.strip() for name, kind in known.items()}
    rows = [(name, first_line(text)) for name, text in (texts | dict(more or {})).items()]
    return DataTable(["name", "what it is"], rows).rich()


def first_line(text: str) -> str:
    """Return the first line of a docstring as plain text; of "Return a table." what is returned, "A table."."""
    line = re.sub(r"\$([^$]*)\$", _plain, text.splitlines()[0])
    what = line.removeprefix("Return ")
    return line if what == line else what[:1].upper() + what[1:]


SYMBOLS = {"le": "<=", "ge": ">=", "dots": "...", "infty": "inf", "bmod": "mod"}
"""LaTeX commands that a terminal shows as something other than their name."""


def _plain(formula: re.Match[str]) -> str:
    """Return a formula as it is typed in plain text."""
    text = re.sub(r"\\text\{([^}]*)\}", r"\1", formula[1])
    text = re.sub(r"\\([a-zA-Z]+)", lambda command: SYMBOLS.get(command[1], command[1]), text)
    text = re.sub(r"([_^])\{(\w+)\}", r"\1\2", text)
    return re.sub(r"([_^])\{\(?([^{}()]*)\)?\}", r"\1(\2)", text)


NATURAL = {"natural": "The clients that the data itself names."}
LINEAR = {"logistic": "Logistic regression, no intercept.", "least-squares": "Linear regression, no intercept."}

LISTS: dict[str, Callable[[], RenderableType]] = {
    "algorithms": _algorithms,
    "regularizers": lambda: _table(REGULARIZERS, signature),
    "datasets": lambda: _table(DATASETS),
    "partitions": lambda: _table(PARTITIONS, more=NATURAL),
    "models": lambda: _table(MODELS, more=LINEAR),
    "presets": lambda: _table(presets()),
    "topologies": lambda: _table(TOPOLOGIES, _topology),
}


OWN = {
    "algorithms": "my_module:MyMethod, a fednmap.core.Algorithm",
    "regularizers": "my_module:MyPenalty:0.1, a fednmap.core.Regularizer",
    "datasets": "my_module:my_data, a function that gives a fednmap.data.Dataset",
    "models": "my_module:my_network, a function of a sample's shape and the number of outputs",
    "topologies": "my_module:MyGraph, a fednmap.decentralized.Topology made from n",
}


def listing(what: Annotated[str, typer.Argument(help=", ".join(LISTS))]) -> None:
    """List algorithms, topologies, regularizers, datasets, partitions, models or presets.

    Example: fednmap list regularizers
    """
    screen = console()
    screen.print(choose("list", what, LISTS)())
    if what in OWN:
        screen.print(f"or your own: {OWN[what]}, in a module in this folder or on Python's path", highlight=False)


EXAMPLES = {"hospitals": hospital_files}


def example(
    name: Annotated[str, typer.Argument(help="hospitals: heart-disease patients, one CSV file per hospital.")],
    out: Annotated[Path | None, typer.Option(help="Where the files go; default a folder of that name.")] = None,
) -> None:
    """Write the files of an example, to try other commands on: hospitals.

    Example: fednmap example hospitals --out data
    """
    write = choose("example", name, EXAMPLES)
    folder = out or Path(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is there already and not empty; name another one by --out")
    try:
        made = write(folder)
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror}; name another folder by --out") from None
    for path in made:
        print(path)
