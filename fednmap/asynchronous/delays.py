"""How long a job takes, in virtual time: distributions, a factor per client, or a trace. By seed, client and job."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fednmap.names import InputError, choose

Values = NDArray[np.float64]
Whole = NDArray[np.int64]
Delays = Callable[[Whole, Whole], Any]
"""delays(clients, jobs): how long job 1, 2, ... of each of these clients takes, numbers above 0."""

PARETO_SCALE, LONGEST = 0.5, 100.0  # of the Pareto distribution: its shortest delay, and where its tail is cut
LOWEST, WIDEST, LARGEST = 0.1, 10.0, 1e100  # exponent, sigma, any number: beyond, delays are not finite


def uniform(seed: int, stream: int, clients: Whole, jobs: Whole) -> Values:
    """Return numbers in (0, 1), a pure function of the arguments: a splitmix64 hash of the four.

    >>> u = uniform(0, 1, np.arange(10_000), np.full(10_000, 3))
    >>> bool(abs(u.mean() - 0.5) < 0.01), bool(0 < u.min() < u.max() < 1)
    (True, True)
    """
    value = np.full(np.broadcast(clients, jobs).shape, seed, dtype=np.uint64)
    for word in (np.uint64(stream), clients.astype(np.uint64), jobs.astype(np.uint64)):
        value = (value ^ word) + np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        value ^= value >> np.uint64(31)
    return (np.asarray(value >> np.uint64(11), dtype=np.float64) + 0.5) / 2.0**53


def _normal(u: Callable[[int], Values], stream: int) -> Values:
    """Return standard normal numbers by the Box-Muller transform."""
    return np.asarray(np.sqrt(-2 * np.log(u(stream))) * np.cos(2 * math.pi * u(stream + 1)))


DISTRIBUTIONS: dict[str, tuple[int, tuple[float, ...], Callable[..., Any]]] = {
    "constant": (0, (1.0,), lambda u, time: np.full(u(1).shape, time)),
    "uniform": (2, (0.8, 1.2), lambda u, low, high: low + (high - low) * u(1)),
    "exponential": (0, (1.0,), lambda u, mean: -mean * np.log(u(1))),
    "pareto": (0, (1.2,), lambda u, exponent: np.minimum(PARETO_SCALE * u(1) ** (-1 / exponent), LONGEST)),
    "lognormal": (0, (1.0,), lambda u, sigma: np.exp(sigma * _normal(u, 2))),
}
"""How many numbers must be given, the default numbers, and the delays from uniform numbers u(stream)."""

KNOWN = (
    "constant[:TIME], uniform:LOW,HIGH, exponential[:MEAN], pareto[:EXPONENT] (above 0.1), lognormal[:SIGMA] (up to "
    "10), trace:FILE"
)


def delays_of(spec: str, slowdown: str | None, n: int | None, seed: int) -> Delays:
    """Return the delays of n clients by name; without n only the names and numbers are checked.

    spec:     `constant[:TIME]`, `uniform:LOW,HIGH`, `exponential[:MEAN]`, `pareto[:EXPONENT]` (delays from 0.5 to 100),
              `lognormal[:SIGMA]` (median 1), or `trace:FILE` (a line per client, or one for all, with the delays of its
              jobs; repeated when it ends).
    slowdown: a factor per client on its delays: `lognormal:SIGMA` draws them with median 1, `1,1,20` gives them.

    Raises InputError for anything else.

    >>> delays_of("constant:2", "1,1,20", 3, seed=0)(np.arange(3), np.ones(3, dtype=np.int64)).tolist()
    [2.0, 2.0, 40.0]
    """
    factor = factors(slowdown, n, seed)
    name, _, text = spec.strip().partition(":")
    if name == "trace":
        rows = trace(Path(text), n)
        of = [rows[i % len(rows)] for i in range(n or 1)]
        return lambda clients, jobs: (
            factor[clients] * [of[i][(k - 1) % len(of[i])] for i, k in zip(clients, jobs, strict=True)]
        )
    values, distribution = _numbers(spec, name, text), DISTRIBUTIONS[name][2]
    return lambda clients, jobs: np.asarray(
        factor[clients] * distribution(lambda stream: uniform(seed, stream, clients, jobs), *values)
    )


def factors(spec: str | None, n: int | None, seed: int = 0) -> Values:
    """Return the factor of each client from `lognormal:SIGMA`, n numbers, or nothing (ones); else raise InputError.

    >>> factors("1,1,20", 3)
    array([ 1.,  1., 20.])
    """
    if spec is None:
        return np.ones(n or 1)
    name, _, text = spec.strip().partition(":")
    expected = f"lognormal:SIGMA or {n or 'n'} numbers above 0, such as 1,1,20"
    try:
        values = np.array([float(word) for word in (text if name == "lognormal" else spec).split(",")])
    except ValueError:
        values = np.array([math.nan])
    most = WIDEST if name == "lognormal" else LARGEST
    if not bool(((values > 0) & (values <= most)).all()) or (name == "lognormal" and len(values) != 1):
        raise InputError(f"expected a slowdown such as {expected}, got {spec!r}")
    if name == "lognormal":
        clients = np.arange(n or 1)
        drawn = np.exp(values[0] * _normal(lambda stream: uniform(seed, stream, clients, np.zeros_like(clients)), 4))
        return np.asarray(drawn / np.median(drawn))
    if n is not None and len(values) != n:
        raise InputError(f"expected a slowdown for each of {n} clients, got {len(values)} numbers; give {expected}")
    return values


def _numbers(spec: str, name: str, text: str) -> tuple[float, ...]:
    choose("delays", name, dict.fromkeys([*DISTRIBUTIONS, "trace"]))
    least, default, _ = DISTRIBUTIONS[name]
    try:
        values = tuple(float(word) for word in text.split(",")) if text else ()
    except ValueError:
        values = (math.nan,)
    above, most = {"pareto": (LOWEST, LARGEST), "lognormal": (0.0, WIDEST)}.get(name, (0.0, LARGEST))
    right = least <= len(values) <= len(default) and all(above < v <= most for v in values)
    if not right or (name == "uniform" and values[0] > values[1]):
        raise InputError(f"expected delays such as {KNOWN}, with numbers above 0, got {spec!r}")
    return values or default


def trace(path: Path, n: int | None = None) -> list[list[float]]:
    """Read delays from a file: a line per client, or one for all n; other files raise InputError.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     file = Path(folder, "delays.txt")
    ...     _ = file.write_text("1 2.5\\n3\\n")
    ...     trace(file, n=2)
    [[1.0, 2.5], [3.0]]
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        rows = [[float(word) for word in line.replace(",", " ").split()] for line in lines]
    except OSError as error:
        raise InputError(f"cannot read the trace {path}: {error.strerror}") from None
    except ValueError:
        rows = []
    if not rows or not all(0 < v <= LARGEST for row in rows for v in row):
        raise InputError(f"expected {path} to have a line per client with delays above 0, separated by spaces")
    if n is not None and len(rows) not in (1, n):
        raise InputError(f"expected {path} to have a line for each of {n} clients, or one for all, got {len(rows)}")
    return rows
