"""The examples in the docstrings run."""

import doctest
import importlib
import pkgutil

import pytest

import fednmap

ROOMS = (
    "algorithms asynchronous data decentralized estimators models privacy problems regularizers simulation tables "
    "testing theory"
)
MODULES = ["fednmap.core", "fednmap.measure", "fednmap.names"] + [
    name
    for room in (f"fednmap.{room}" for room in ROOMS.split())
    for name in (room, *(m.name for m in pkgutil.iter_modules(importlib.import_module(room).__path__, f"{room}.")))
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    assert doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS).failed == 0


def test_every_method_and_every_regularizer_has_an_example():
    finder = doctest.DocTestFinder(recurse=False)
    for package in (fednmap.algorithms, fednmap.regularizers):
        for name in package.__all__:
            if isinstance(getattr(package, name), type):
                assert any(test.examples for test in finder.find(getattr(package, name))), name
