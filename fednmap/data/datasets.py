"""Data sets by name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fednmap.data.dataset import Dataset, hold_out
from fednmap.data.heart_disease import heart_disease
from fednmap.data.pictures import cifar10, fashion_mnist, mnist
from fednmap.data.synthetic import sparse_regression, synthetic
from fednmap.data.table_files import csv, svm
from fednmap.data.tcga_brca import tcga_brca
from fednmap.names import InputError, called, choose, current, imported, is_code, parted

__all__ = ["DATASETS", "Dataset", "digits", "load"]


def digits() -> Dataset:
    """Handwritten digits, part of scikit-learn: 1,438 + 359 pictures of 8 x 8, values in [0, 1], 10 labels."""
    pictures, labels = _digits()
    return hold_out(torch.from_numpy(pictures).float().view(-1, 1, 8, 8) / 16, torch.from_numpy(labels))


def _digits() -> tuple[Any, Any]:
    """What scikit-learn's `load_digits` reads, from its file: importing the whole package takes a second."""
    package = find_spec("sklearn")
    places = package.submodule_search_locations if package is not None else None
    path = Path(places[0]) / "datasets" / "data" / "digits.csv.gz" if places else None
    if path is None or not path.exists():
        from sklearn.datasets import load_digits

        return load_digits(return_X_y=True)  # type: ignore[no-any-return]
    table = np.loadtxt(path, delimiter=",")
    return table[:, :-1], table[:, -1].astype(int)


def stays_with_clients() -> Dataset:
    """Data that stays with the clients of a federation; `fednmap flower new` shows how they load it."""
    raise InputError("the data of this run stays with its clients; run it with Flower, see `fednmap flower new --help`")


# What follows a colon are the positional-only parameters of a function; other parameters are options.
DATASETS: dict[str, Callable[..., Dataset]] = {
    "digits": digits,
    "mnist": mnist,
    "fashion-mnist": fashion_mnist,
    "cifar10": cifar10,
    "heart-disease": heart_disease,
    "tcga-brca": tcga_brca,
    "svm": svm,
    "csv": csv,
    "synthetic": synthetic,
    "sparse-regression": sparse_regression,
    "own": stays_with_clients,
}


RENAMED = {"label": "target", "drop": "exclude"}
"""Former names of the options of a table."""


def load(name: str, **options: Any) -> Dataset:
    """Return the data set called `name`, with `options` of the function that makes it.

    After a colon: the path of a file (svm:PATH, csv:PATH), numbers (synthetic:ALPHA,BETA, cifar10:N), or a word
    (heart-disease:flamby). Options may follow a path: csv:table.csv,target=outcome,client=hospital. One of the user's
    own is package.module:Name:word,..., a function of the words that gives a Dataset. An unknown name or option raises
    InputError.

    >>> len(load("digits").x_train), len(load("digits").x_test)
    (1438, 359)
    """
    if is_code(name, DATASETS):
        return _own(name, options)
    name, colon, argument = name.partition(":")
    make = choose("data set", name, DATASETS)
    parameters = inspect.signature(make).parameters.values()
    first = {p.name: p.annotation for p in parameters if p.kind is p.POSITIONAL_ONLY}
    arguments: list[Any] = []
    if "path" in first:
        path, more = path_of(argument)
        arguments, options = [path], current(more | options, RENAMED)
    elif colon:
        arguments = _after_colon(name, first, argument)
    allowed = [p.name for p in parameters if p.name not in first]
    for option in options:
        if option not in allowed:
            raise InputError(f"data set {name!r} has no option {option!r}; it has {', '.join(allowed) or 'none'}")
    return make(*arguments, **options)


def _own(spec: str, options: dict[str, Any]) -> Dataset:
    if options:
        raise InputError(f"data set {spec!r} takes no options, given {', '.join(options)}; write words after a colon")
    name, argument = parted(spec, DATASETS)
    found = called(spec, imported("data set", name, DATASETS), (), argument)
    if not isinstance(found, Dataset):
        raise InputError(f"data set {spec!r} gave {type(found).__name__}; it must give a fednmap.data.Dataset")
    return found


def path_of(argument: str) -> tuple[str, dict[str, Any]]:
    """PATH,option=value,... taken apart from the right; other commas belong to the path."""
    options: dict[str, Any] = {}
    while match := re.fullmatch(r"(.*),(\w+)=([^,]*)", argument):
        argument, option, value = match.groups()
        options[option] = {"true": True, "false": False}.get(value, value)
    return argument, options


def _after_colon(name: str, first: dict[str, Any], argument: str) -> list[Any]:
    """What follows the name of a data set, as the arguments `first`, name -> type, of its function."""
    if not first:
        raise InputError(f"data set {name!r} takes nothing after a colon, given {argument!r}")
    try:
        words = zip(first.values(), argument.split(","), strict=True)
        return [{"int": int, "float": float}.get(getattr(kind, "__name__", kind), str)(word) for kind, word in words]
    except ValueError:
        usual = "a number" if len(first) == 1 else "two numbers"
        raise InputError(f"{name} takes {usual}, {name}:{','.join(first).upper()}, given {argument!r}") from None
