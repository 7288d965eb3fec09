"""`fednmap list`: what there is to choose from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

from fednmap.algorithms import ALGORITHMS
from fednmap.data import DATASETS, PARTITIONS
from fednmap.models.build import MODELS
from fednmap.names import choose
from fednmap.regularizers.parse import REGULARIZERS, signature


def _algorithms() -> Group:
    needs = Table("name", "solves", "up", "down", "prox", "everybody", "ends with exact gradients at")
    rates = Table("name", "convergence rate as published, s2 = gradient variance")
    for name, kind in ALGORITHMS.items():
        t = kind.traits
        solves = ("f + phi" if t.composite else "f") + (", central" if t.central else "")
        down = str(t.down) if t.following is None else f"{t.down}, {t.following}"
        everybody = "required" if t.full_participation else "-"
        needs.add_row(name, solves, str(t.up), down, t.prox, everybody, t.fixed_point.value)
        if t.rate != "-":
            rates.add_row(name, t.rate)
    key = (
        "up, down: vectors a client sends and receives in a round, less down if it was counted in the round before; "
        "prox: evaluations on a client + on the server"
    )
    return Group(needs, key, rates)


def _regularizers() -> Table:
    return _described({signature(name): _first_line(kind) for name, kind in REGULARIZERS.items()})


def _datasets() -> Table:
    return _described({name: _first_line(make) for name, make in DATASETS.items()})


def _partitions() -> Table:
    described = {name: _first_line(make) for name, make in PARTITIONS.items()}
    return _described(described | {"natural": "The clients that the data itself names."})


def _models() -> Table:
    described = {name: _first_line(make) for name, make in MODELS.items()}
    own = {"logistic": "Logistic regression, no intercept.", "least-squares": "Linear regression, no intercept."}
    return _described(described | own)


LISTS: dict[str, Callable[[], RenderableType]] = {
    "algorithms": _algorithms,
    "regularizers": _regularizers,
    "datasets": _datasets,
    "partitions": _partitions,
    "models": _models,
}


OWN = {
    "algorithms": "my_module:MyMethod, a fednmap.core.Algorithm",
    "regularizers": "my_module:MyPenalty:0.1, a fednmap.core.Regularizer",
    "datasets": "my_module:my_data, a function that gives a fednmap.data.Dataset",
    "models": "my_module:my_network, a function of a sample's shape and the number of outputs",
}


def listing(what: Annotated[str, typer.Argument(help=", ".join(LISTS))]) -> None:
    """List algorithms, regularizers, datasets, partitions or models."""
    console = Console()
    console.print(choose("list", what, LISTS)())
    if what in OWN:
        console.print(f"or one of your own: {OWN[what]}, in a module that Python finds from here", highlight=False)


def _described(rows: dict[str, str]) -> Table:
    table = Table("name", "what it is")
    for name, text in rows.items():
        table.add_row(escape(name), escape(text))
    return table


def _first_line(thing: object) -> str:
    return (thing.__doc__ or "").strip().splitlines()[0]
