"""Full-gradient rounds on sparse tables: against the same numbers written out, and how much memory they take.

    python benchmarks/sparse.py [--json FILE]

w8a-like: 50,000 rows, 300 features, 4 % of them not zero, 10 clients. `gathered` is the dense table as it was computed
before linear models had products of their own: rows copied side by side in every step. Processor time of one thread,
the fastest of the repeats. Wide: 20,000 rows, 50,000 features, 0.1 %, read from a LIBSVM file by a process of its own;
its memory is what the process grows by from reading the file to the last round. The exit code says whether the limits
hold.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from measuring import arguments, in_turn, table, write
from scipy.sparse import random_array
from sklearn.datasets import dump_svmlight_file

from fednmap import data, simulate
from fednmap.algorithms import FedNMap
from fednmap.core import Oracle
from fednmap.data import ClientData
from fednmap.problems import FiniteSum, Logistic
from fednmap.regularizers import L1

CLIENTS = 10
LIMITS = {"round, sparse / gathered": 0.3, "memory / file": 3.0}


class Gathered(Logistic):
    def _exact(self, clients: torch.Tensor) -> Oracle:
        return FiniteSum._exact(self, clients)


def labelled(rows: int, columns: int, density: float) -> tuple[object, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    features = random_array((rows, columns), density=density, format="csr", dtype="float32", rng=0)
    truth = torch.randn(columns, generator=generator).numpy()
    return features, torch.from_numpy((features @ truth > 0).astype("int64"))


def rounds(problem: Logistic) -> Callable[[], object]:
    method = FedNMap(L1(1e-3), eta_a=1.0, Q=1)
    running = simulate(method, problem, rounds=10**6, threads=1)
    return lambda: next(running)


def narrow() -> list[dict[str, float | str]]:
    features, y = labelled(50_000, 300, 0.04)
    parts = data.partition("sorted", y, CLIENTS)
    sparse = Logistic(ClientData.split(features, y, parts))
    written = ClientData.split(torch.from_numpy(features.toarray()), y, parts)  # type: ignore[attr-defined]
    problems = {"sparse": sparse, "dense": Logistic(written), "gathered": Gathered(written)}
    x = 0.1 * torch.randn(sparse.dim, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(sparse.gradient(x), problems["dense"].gradient(x), rtol=1e-3, atol=1e-6)
    one = in_turn({name: rounds(problem) for name, problem in problems.items()}, repeats=15)
    both = in_turn({name: lambda p=p: p.value_and_gradient(x) for name, p in problems.items()}, repeats=15)  # type: ignore[misc]
    return [
        {"table": name, "round ms": 1e3 * one[name], "of gathered": one[name] / one["gathered"],
         "loss and gradient ms": 1e3 * both[name]}
        for name in problems
    ]  # fmt: skip


def wide() -> dict[str, float]:
    features, y = labelled(20_000, 50_000, 0.001)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "wide.svm"
        dump_svmlight_file(features, y.numpy(), str(file), zero_based=False)
        size = file.stat().st_size
        done = subprocess.run(
            [sys.executable, __file__, "--wide", str(file)], capture_output=True, text=True, check=True
        )
    grown, milliseconds = map(float, done.stdout.split())
    return {"file MB": size / 1e6, "memory MB": grown / 1e6, "memory / file": grown / size, "round ms": milliseconds}


def wide_here(file: str) -> None:
    """In a process of its own: bytes grown, milliseconds per round."""
    small = Logistic([(random_array((50, 20), density=0.2, format="csr", dtype="float32", rng=0), [0, 1] * 25)])
    next(iter(simulate(FedNMap(L1(1e-3), eta_a=1.0), small, rounds=1)))  # all that is imported is imported
    import sklearn.datasets  # noqa: F401

    before = peak()
    dataset = data.load(f"svm:{file}")
    parts = data.partition("sorted", dataset.y_train, CLIENTS)
    problem = Logistic(ClientData.split(dataset.x_train, dataset.y_train, parts))
    seconds = in_turn({"round": rounds(problem)}, repeats=5)["round"]
    print(peak() - before, 1e3 * seconds)


def peak() -> int:
    """The most memory that this process has held, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def main() -> None:
    given = arguments(__doc__, wide="")
    if given.wide:
        wide_here(given.wide)
        return
    rows, large = narrow(), wide()
    table("full gradients, 50,000 x 300, 4 %", rows)
    table("20,000 x 50,000, 0.1 %", [large])
    found = {"round, sparse / gathered": rows[0]["of gathered"], "memory / file": large["memory / file"]}
    for name, limit in LIMITS.items():
        print(f"{name}: {found[name]:.3g}, limit {limit}")
    write(given.json, narrow=rows, wide=large)
    sys.exit(any(float(found[name]) > limit for name, limit in LIMITS.items()))


if __name__ == "__main__":
    main()
