"""What loading returns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fednmap.data.sparse import digest, take


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test samples, features as float32: pictures (N, channels, height, width), tables (N, p).

    A table may be sparse, in rows (see `fednmap.data.sparse`). Labels are int64 from 0, targets of a regression
    float32. `clients` holds the client id of each training row where the split is natural (`test_clients` of each test
    row); `truth` is the vector that made the targets, where it is known. `features` and `labels` are the names of the
    columns and of the labels 0, 1, ..., and `sites` those of the clients; () where there are none. `scaling` is what
    `standardized` subtracted from the columns and divided them by. `as_given`: the columns are those of a file of the
    user's own; a run warns if they are badly scaled. `of_sites`: a table per client; a run standardises it by default.

    >>> Dataset(torch.zeros(4, 2), torch.tensor([0, 1, 2, 1]), torch.zeros(1, 2), torch.tensor([0])).classes
    3
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    clients: Tensor | None = None
    test_clients: Tensor | None = None
    truth: Tensor | None = None
    features: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    sites: tuple[str, ...] = ()
    scaling: tuple[Tensor, Tensor] | None = None
    as_given: bool = False
    of_sites: bool = False

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all numbers: the same for the same data."""
        named = ((name, getattr(self, name)) for name in ("x_train", "y_train", "x_test", "y_test", "clients"))
        return digest((f"{name} ", values) for name, values in named if values is not None)

    @property
    def classes(self) -> int | None:
        """How many labels there are, also those that only test rows have; None for regression."""
        return None if self.y_train.is_floating_point() else max(int(self.y_train.max()) + 1, len(self.labels))


def standardized(data: Dataset, centre: bool) -> Dataset:
    """Return columns divided by their deviation over training rows, and with `centre` with mean 0 there; both are sums
    over rows, so over clients. A column that does not vary is left as it is."""
    from fednmap.tables.statistics import scales  # which loads scikit-learn

    x = data.x_train.double()
    mean, deviation = x.mean(0), x.std(0, correction=0)
    scale = torch.from_numpy(scales(mean.cpu().numpy(), deviation.cpu().numpy())[1]).to(deviation)
    shift = mean if centre else torch.zeros_like(mean)
    named = {"x_train": data.x_train, "x_test": data.x_test}
    parts: dict[str, Any] = {k: ((v.double() - shift) / scale).to(v) for k, v in named.items()}
    return replace(data, **parts, scaling=(shift, scale))


def hold_out(x: Tensor, y: Tensor, clients: Tensor | None = None, truth: Tensor | None = None) -> Dataset:
    """Return every fifth row (of every client) for the test: for sets that come without a test part."""
    rank = torch.arange(len(x), device="cpu")
    if clients is not None:
        for i in torch.unique(clients):
            mine = clients == i
            rank[mine] = torch.arange(int(mine.sum()), device="cpu")
    test = rank % 5 == 4
    if clients is None:
        return Dataset(take(x, ~test), y[~test], take(x, test), y[test], truth=truth)
    return Dataset(take(x, ~test), y[~test], take(x, test), y[test], clients[~test], clients[test], truth)
