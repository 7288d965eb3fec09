"""What is run on FLamby's sets: the published step sizes first, then all methods with step sizes chosen alike."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import product
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from fednmap.algorithms import (
    SCAFFOLD,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedCanon,
    FedDA,
    FedNMap,
    FedProx,
    FedYogi,
    Zhang,
)
from fednmap.core import Algorithm, Regularizer
from fednmap.regularizers import L1, Separable, Zero
from fednmap.runs.atomic_files import clear_errors, digest, to_json, write_atomically
from fednmap.simulation import Diverged, Record, simulate
from reproduction.flamby_problem import CUT_SEED, KEPT_BACK, TASKS, UPDATES, Loaded
from reproduction.flamby_published import PUBLISHED, SEEDS
from reproduction.runs import hyperparameters
from reproduction.trials import Setting, Trial

LOCAL = tuple(10 ** (-3 + k / 2) for k in range(6))
SERVER = tuple(10 ** (-3 + k / 2) for k in range(8))
WEIGHTS = tuple(10.0 ** (-3 + k) for k in range(4))
"""The grids of owkin/benchmark_flamby: local steps, server steps, mu of FedProx; here also weights of phi."""

Made = Callable[[float, float, int], Algorithm]
"""The method from its local step, its second parameter, and how many coefficients phi acts on."""


class Kind(NamedTuple):
    """A method, and what its second parameter is chosen from."""

    make: Made
    second: str = ""
    grid: tuple[float, ...] = (1.0,)


def _adaptive(kind: type[FedAdam | FedYogi | FedAdagrad]) -> Kind:
    return Kind(
        lambda a, s, _: kind(eta_a=a, eta=s, Q=UPDATES, beta1=0.9, beta2=0.999, tau=1e-8), "server step", SERVER
    )


def _composite(kind: type[FedNMap | Zhang | FedDA | FedCanon]) -> Kind:
    return Kind(lambda a, s, w: kind(_l1(s, w), eta_a=a, Q=UPDATES), "l1 weight", WEIGHTS)


def _l1(weight: float, features: int) -> Regularizer:
    return Separable([(slice(0, features), L1(weight))])


KINDS: dict[str, Kind] = {
    "FedAvg": Kind(lambda a, s, _: FedAvg(eta_a=a, Q=UPDATES)),
    "FedProx": Kind(lambda a, s, _: FedProx(eta_a=a, Q=UPDATES, mu=s), "mu", WEIGHTS),
    "SCAFFOLD": Kind(lambda a, s, _: SCAFFOLD(eta_a=a, eta_s=s, Q=UPDATES), "server step", SERVER),
    "FedAdagrad": _adaptive(FedAdagrad),
    "FedYogi": _adaptive(FedYogi),
    "FedAdam": _adaptive(FedAdam),
    "FedAvgM": Kind(lambda a, s, _: FedAvgM(eta_a=a, eta_s=s, Q=UPDATES), "server step", SERVER),
    "FedNMap": Kind(lambda a, s, _: FedNMap(Zero(), eta_a=a, eta_s=s, Q=UPDATES), "server step", SERVER),
    "FedNMap-l1": _composite(FedNMap),
    "Zhang-l1": _composite(Zhang),
    "FedCanon-l1": _composite(FedCanon),
    "FedDA-l1": _composite(FedDA),
}
AS_PUBLISHED = ("FedAvg", "FedProx", "SCAFFOLD", "FedAdagrad", "FedYogi", "FedAdam")
QUICK = ("FedAvg", "SCAFFOLD", "FedNMap", "FedNMap-l1", "Zhang-l1")


CRITERIA = ("loss", "metric")
"""What a choice is made by on the rows kept back: the program of owkin/benchmark_flamby takes the least loss, its aim
in words is the largest metric."""


def jobs(task: str, scale: str, trials: int) -> list[Trial]:
    """Trial k has seed 42 + k."""
    methods = KINDS if scale == "paper" else QUICK
    parts = [f"by-{criterion}" + ("" if scale == "paper" else "-quick") for criterion in CRITERIA]
    wanted = [("published", m) for m in AS_PUBLISHED] + [(part, m) for m in methods for part in parts]
    return [_job(task, part, m, k) for k in range(trials) for part, m in wanted]


def _job(task: str, part: str, method: str, trial: int) -> Trial:
    setting: Setting = {"set": f"flamby-{task}", "part": part, "method": method, "trial": trial}
    run = partial(published if part == "published" else tuned, task, part, method, trial)
    configuration = made_from(task, part, method) | {"seed": SEEDS[0] + trial}
    return Trial(setting, run, configuration, partial(_digest, task))


def made_from(task: str, part: str, method: str) -> dict[str, Any]:
    """What the numbers of a part follow from besides the seed, as JSON has it.

    The method's parameters stand beside the rest, one by one, so that a trial from before it had one of them counts.
    """
    about, chosen_alike = TASKS[task], part != "published"
    algorithm = _algorithm(task, method, 1.0, 1.0)
    parameters = {f"{method}.{name}": value for name, value in hyperparameters(algorithm).items()}
    return {
        "data": about.data,
        "part": part,
        "method": method,
        "steps": [list(g) for g in grid(part, method)] if chosen_alike else list(PUBLISHED[task][method][2:]),
        "batch": about.batch,
        "rounds": about.rounds,
        "updates": UPDATES,
        "kept_back": [KEPT_BACK, CUT_SEED] if chosen_alike else None,
        **parameters,
    }


def grid(part: str, method: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Local steps and second parameters that are tried: all of them, or for a quick look some."""
    kind = KINDS[method]
    some = slice(None, None, max(1, len(kind.grid) // 3))
    return (LOCAL[::2], kind.grid[some]) if part.endswith("quick") else (LOCAL, kind.grid)


def published(task: str, part: str, method: str, trial: int, path: Path) -> list[Record]:
    """The trial with the published step sizes."""
    _, _, eta_a, second = PUBLISHED[task][method]
    return trained(task, method, trial, eta_a, 1.0 if second is None else second)


def tuned(task: str, part: str, method: str, trial: int, path: Path) -> list[Record]:
    """The trial with the step sizes that the rows kept back chose; all seeds share that choice."""
    criterion = part.split("-")[1]
    best = min(searched(task, part, method, path.parent), key=lambda tried: _rank(tried, criterion))
    if best["loss"] is None:
        raise ArithmeticError(f"{method} diverges with every step size of its grid on {TASKS[task].data}")
    found = trained(task, method, trial, best["eta_a"], best["second"])
    return [record | {"validation_loss": best["loss"], "validation_metric": best["metric"]} for record in found]


def _rank(tried: Mapping[str, Any], criterion: str) -> tuple[float, float]:
    """Smaller is better; of equal metrics the smaller loss decides, and what diverged comes last."""
    if tried["loss"] is None:
        return inf, inf
    return (tried["loss"], 0.0) if criterion == "loss" else (-tried["metric"], tried["loss"])


def searched(task: str, part: str, method: str, folder: Path) -> list[dict[str, Any]]:
    """What `search` finds, kept in a file for the trials of other seeds."""
    wanted = made_from(task, "search-quick" if part.endswith("quick") else "search", method)
    file = folder / f"flamby-{task}_search_{method}_{digest(wanted | {'digest': _digest(task)})[:12]}.json"
    if not file.is_file():
        with clear_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(file, to_json(search(task, part, method)))
    return list(json.loads(file.read_text()))


def search(task: str, part: str, method: str) -> list[dict[str, Any]]:
    """Loss and metric of the last model on the rows kept back, for all step sizes; each centre counts the same."""
    about, back = TASKS[task], TASKS[task].kept_back()
    problem, held = Loaded(about, CUT_SEED, ~back), about.whole(about.clients(back), False)
    found: list[dict[str, Any]] = []
    for eta_a, second in product(*grid(part, method)):
        algorithm = _algorithm(task, method, eta_a, second)
        found.append({"eta_a": eta_a, "second": second, "loss": None, "metric": None})
        with suppress(Diverged):
            *_, last = simulate(algorithm, problem, rounds=about.rounds, threads=1)
            x = algorithm.model(last.server)
            found[-1] |= {"loss": float(held.loss(x)), "metric": about.mean_metric(x, held.data)}
    return found


def trained(task: str, method: str, trial: int, eta_a: float, second: float) -> list[Record]:
    """The metrics on the test rows after every round."""
    about, algorithm = TASKS[task], _algorithm(task, method, eta_a, second)
    problem = Loaded(about, SEEDS[0] + trial)
    common = {"eta_a": eta_a, "second": second}
    x, sent = algorithm.model(algorithm.init(problem.start)[0]), 0
    records = [{"round": 0.0, **about.measure(x), "loss": float(problem.loss(x)), "bytes_up": 0.0, **common}]
    for r in simulate(algorithm, problem, rounds=about.rounds, threads=1):
        x, sent = algorithm.model(r.server), sent + r.bytes_up
        measured = {"loss": float(problem.loss(x)), "bytes_up": float(sent)}
        records.append({"round": r.t + 1.0, **about.measure(x), **measured, **common})
    return records


def _algorithm(task: str, method: str, eta_a: float, second: float) -> Algorithm:
    return KINDS[method].make(eta_a, second, TASKS[task].features)


def _digest(task: str) -> str:
    return TASKS[task].loaded.digest
