"""Curves of trials, made up: verdicts must follow from the numbers alone."""

import numpy as np

from reproduction import nn, table1, table1_trials
from reproduction.trials import Curve

ROUNDS = np.arange(0.0, 310.0, 10.0)


def curve(level: float, trial: int = 0, start: float = 1.0, wobble: float = 0.0, **setting: object) -> Curve:
    """Falls from `start` to `level` within a few measurements; trials differ by a factor of up to 1 + wobble."""
    y = level * (1 + wobble * np.cos(3 * trial)) + start * np.exp(-ROUNDS / 10)
    return Curve({**setting, "trial": trial}, {"round": ROUNDS, "stationarity": y})


def nn_curves(zhang: float, trials: int = 3, wobble: float = 0.0) -> list[Curve]:
    """FedNMap ends at 1 / (n Q), Zhang at `zhang` times that, FedCanon at three times."""
    levels = {"FedNMap": 1.0, "Zhang": zhang, "FedCanon": 3.0}
    return [
        curve(levels[m] / (n * Q), k, wobble=wobble * (m == "Zhang"), method=m, n=n, Q=Q, batch=b, rounds=rounds)
        for n, Q in nn.PANELS["paper"]
        for b, rounds in nn._variants((n, Q))
        for m in nn.METHODS
        for k in range(trials)
    ]


def mobilenet_curves(loss: float, l1: float = 1e-3) -> list[Curve]:
    ends = {"FedNMap": (loss, 0.6), "Zhang": (1.1 * loss, 0.5), "FedCanon": (1.2 * loss, 0.4)}
    return [
        Curve(
            {"method": m, "n": 5, "Q": 10, "l1": l1, "rounds": 400, "trial": k},
            {"round": ROUNDS, "hoyer": np.full(len(ROUNDS), s), "loss": np.full(len(ROUNDS), f)},
        )
        for m, (f, s) in ends.items()
        for k in range(2)
    ]


def table_curves(power: float, wobble: float = 0.0) -> list[Curve]:
    """Errors (n Q T)^power at the best step, in the two trials `wobble` more and less; limits that are all reached."""
    curves = []
    for row in table1.ROWS:
        points = [(n, Q, T, s) for n, Q, T in table1_trials.cross(row.method) for s in table1_trials.STEPS]
        n, Q, T, step = (np.array(v, dtype=float) for v in zip(*points, strict=True))
        for trial, more in enumerate((wobble, -wobble)):
            value = (n * Q * T) ** (power + more) * np.where(step == 0.25, 1.0, 2.0)
            setting = table1._setting("rate", row.method, row.problem, trial)
            curves.append(Curve(setting, {"round": T, "n": n, "Q": Q, "step": step, "value": value}))
    for problem in table1_trials.PROBLEMS:
        for method in table1.METHODS:
            setting = table1._setting("limit", method, problem, 0)
            curves.append(Curve(setting, {"round": ROUNDS, "value": 10 ** (-ROUNDS / 10)}))
    return curves
