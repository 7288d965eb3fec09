"""Data made by a program: heterogeneous clients on demand, and a regression whose answer is known."""

from __future__ import annotations

import numpy as np
import torch

from fednmap.data.dataset import Dataset, hold_out
from fednmap.names import InputError


def synthetic(alpha: float = 1.0, beta: float = 1.0, /, clients: int = 30, seed: int = 0) -> Dataset:
    """Classification with clients as unlike as wished, synthetic:ALPHA,BETA: 60 features, 10 labels.

    Client k has its own model, y = argmax(x W + b), all entries of W and b from N(u, 1) with one
    u ~ N(0, alpha^2), and its own features, x ~ N(v, Sigma), v_j ~ N(B, 1), B ~ N(0, beta^2),
    Sigma = diag(j^-1.2): alpha is how much models differ, beta how much features do. It has 50 samples
    and a lognormal(4, 2) number more. Every fifth row of every client is for the test.

    >>> synthetic(0.5, 0.5, clients=3).x_train.shape[1]
    60

    Reference: Li et al., Federated optimization in heterogeneous networks, MLSys 2020; deviations alpha
    and beta as in the authors' program.
    """
    if not (0 <= alpha < float("inf") and 0 <= beta < float("inf")):
        raise InputError(f"synthetic takes alpha and beta of at least 0, given {alpha} and {beta}")
    _at_least_one("clients", clients)
    features, labels = 60, 10
    rng = np.random.default_rng(seed)
    sizes = 50 + rng.lognormal(4, 2, clients).astype(int)
    scale = np.arange(1, features + 1) ** -0.6
    x, y = [], []
    for size in sizes:
        u, centre = rng.normal(0, alpha), rng.normal(0, beta)
        weights, bias = rng.normal(u, 1, (features, labels)), rng.normal(u, 1, labels)
        rows = rng.normal(centre, 1, features) + scale * rng.standard_normal((size, features))
        x.append(rows)
        y.append((rows @ weights + bias).argmax(1))
    ids = torch.repeat_interleave(torch.arange(clients, device="cpu"), torch.from_numpy(sizes))
    return hold_out(torch.from_numpy(np.concatenate(x)).float(), torch.from_numpy(np.concatenate(y)), ids)


def sparse_regression(
    clients: int = 10,
    samples: int = 125,
    features: int = 200,
    support: int = 10,
    noise: float = 1.0,
    spread: float = 1.0,
    seed: int = 0,
) -> Dataset:
    """Regression with a known sparse answer: y = <x, w> + noise, w = (1, ..., 1, 0, ..., 0), `support` ones.

    Client i has features x ~ N(mu_i, Sigma), Sigma_jk = 0.5^|j - k|, its own mean mu_i ~ N(0, spread^2 I)
    and `samples` rows, every fifth for the test. `truth` of the result is w.

    >>> int(sparse_regression(support=3).truth.sum())
    3

    Reference: Yuan, Zaheer and Reddi, Federated composite optimization, ICML 2021, section 5.
    """
    for name, value in (("clients", clients), ("samples", samples), ("features", features)):
        _at_least_one(name, value)
    if not 0 <= support <= features:
        raise InputError(f"support is {support}; it must be between 0 and the number of features, {features}")
    rng = np.random.default_rng(seed)
    distance = np.abs(np.subtract.outer(np.arange(features), np.arange(features)))
    root = np.linalg.cholesky(0.5**distance)
    truth = (np.arange(features) < support).astype(float)
    x = np.concatenate(
        [rng.normal(0, spread, features) + rng.standard_normal((samples, features)) @ root.T for _ in range(clients)]
    )
    y = x @ truth + noise * rng.standard_normal(len(x))
    ids = torch.arange(clients, device="cpu").repeat_interleave(samples)
    tensors = [torch.from_numpy(values).float() for values in (x, y, truth)]
    return hold_out(tensors[0], tensors[1], ids, truth=tensors[2])


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise InputError(f"{name} is {value}; it must be at least 1")
