"""The examples in the docstrings run."""

import doctest
import importlib
import pkgutil

import pytest

import fednmap

MODULES = [
    module.name
    for package in ("algorithms", "asynchronous", "decentralized", "estimators", "problems", "regularizers", "tables")
    for module in pkgutil.iter_modules(getattr(fednmap, package).__path__, f"fednmap.{package}.")
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
