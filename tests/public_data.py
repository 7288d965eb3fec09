"""Public data sets in tests: used where they are at hand, never downloaded."""

import pytest

from fednmap.data import cache


def needs(name, *files):
    """Skips the test unless one of `files` of the data set `name` is at hand; returns its path."""
    path = cache.find(name, files)
    if path is None:
        pytest.skip(f"{files[0]} of {name} is neither in the folder of FEDNMAP_DATA nor in the user's cache")
    return path


def needs_cifar10():
    return needs("cifar10", "data_batch_1.bin", "cifar-10-batches-bin/data_batch_1.bin", "cifar-10-binary.tar.gz")
