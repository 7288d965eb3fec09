"""LIBSVM files: one sample per line, `label index:value index:value ...`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fednmap.data.dataset import Dataset, hold_out
from fednmap.data.sparse import from_scipy
from fednmap.data.targets import label_names, located, targets
from fednmap.names import InputError

LARGEST = 8 * 2**30  # bytes of a dense table


def svm(path: str, /, test: str | None = None, regression: bool | None = None, dense: bool = False) -> Dataset:
    """Return a LIBSVM file, svm:PATH, with its test file as `test`; without one every fifth row is for the test.

    Whole numbers are labels (-1, +1 become 0, 1), fractions are targets; `regression` decides otherwise. The table
    stays sparse, for linear models; `dense` writes out its zeros, for networks.
    """
    from sklearn.datasets import load_svmlight_file

    paths = [located(p) for p in (path, test) if p is not None]
    tables, values, from_zero = [], [], any(map(_names_zero, paths))
    for file in paths:
        try:
            table, value = load_svmlight_file(str(file), dtype=np.float64, zero_based=from_zero)
            table.data = table.data.astype(np.float32)
        except OSError as error:
            raise InputError(f"cannot read {file}: {error.strerror}") from None
        except (ValueError, OverflowError, UnicodeDecodeError) as error:
            raise InputError(f"{file} is truncated or not a LIBSVM file ({str(error).splitlines()[0]})") from None
        if not len(value):
            raise InputError(f"{file} is empty; give a LIBSVM file")
        tables.append(table)
        values.append(value)
    width = max(table.shape[1] for table in tables)
    needed = 4 * width * sum(table.shape[0] for table in tables)
    if dense and needed > LARGEST:
        raise InputError(f"{paths[0]} would need {needed / 2**30:.0f} GB as a dense table; leave dense=true out")
    for table in tables:
        table.resize(table.shape[0], width)  # a feature may occur in one of the two files only
    x = [torch.from_numpy(table.toarray()) if dense else from_scipy(path, table) for table in tables]
    y = targets(paths, values, regression)
    data = hold_out(x[0], y[0]) if test is None else Dataset(x[0], y[0], x[1], y[1])
    return replace(data, labels=label_names(values[0], y[0]), as_given=True)


def _names_zero(file: Path) -> bool:
    """Return whether a file names feature 0: it then counts from 0 and not from 1, as do the data set's others."""
    with file.open("rb") as lines:
        return any(b" 0:" in line for line in lines)
