"""Quasi-Newton memory and weakly convex penalties on a network, with exact gradients; declared before it was run.

1. Tuning, seeds 100 to 102: FedNMap and Zhang over eta_hat, for each penalty. The best step has the smallest geometric
   mean of the final psi; a run that diverged has an infinite psi. FedNMap with memory has one setting, which a pilot
   with seed 99 chose: eta_hat = gamma = 0.5, 20 secants.
2. The claim, seeds 0 to 9: the final psi, and the bytes, up and down, of all clients until the test accuracy first
   reaches 90 % and 95 %. A run that does not reach it sends infinitely many. All are compared trial by trial.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from math import inf, isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure as Picture

from fednmap.measure import zeros
from fednmap.runs.configuration import Config
from fednmap.runs.experiment import prepare
from fednmap.simulation import Diverged, Record, simulate
from reproduction.figure import Figure, caption, lines, panels
from reproduction.runs import of_config
from reproduction.trials import Curve, Setting, Trial, select
from reproduction.tuned_steps import level
from reproduction.verdict import RULE, Claim, Ratio, Values, Verdict, compare, finals, number

ROUNDS, MEMORY = 400, 20
PENALTIES = {"L1": "l1:0.001", "MCP": "mcp:0.003,100", "SCAD": "scad:0.003,100"}
STEPS = (0.125, 0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0)
SEEDS = range(100, 103)
ACCURACIES = (0.9, 0.95)


class Method(NamedTuple):
    """A method with its step; gamma is 4 eta_hat, with memory eta_hat, as with `--gamma auto`."""

    name: str
    step: float

    @property
    def memory(self) -> int:
        return MEMORY if self.name == "memory" else 0

    def __str__(self) -> str:
        return f"{LABELS[self.name]}, eta_hat {self.step:g}"


LABELS = {"memory": "FedNMap with memory", "FedNMap": "FedNMap", "Zhang": "Zhang"}
QUASI_NEWTON = Method("memory", 0.5)
BEST = {penalty: (Method("FedNMap", 1.0), Method("Zhang", 1.0)) for penalty in PENALTIES}
"""What the tuning has chosen for each penalty: FedNMap, Zhang."""


def jobs(scale: str, trials: int) -> list[Trial]:
    """The tuning, then the claim; quick: one penalty, few steps."""
    penalties, steps = (("L1",), (0.25, 0.5)) if scale == "quick" else (tuple(PENALTIES), STEPS)
    grid = [Method(name, step) for name in ("FedNMap", "Zhang") for step in steps]
    tuning = [_job("tune", p, m, seed) for seed in SEEDS for p in penalties for m in grid]
    chosen = {p: (QUASI_NEWTON, *BEST[p]) for p in penalties if p in BEST}
    return tuning + [_job("claim", p, m, k) for k in range(trials) for p, methods in chosen.items() for m in methods]


def config_of(penalty: str, method: Method, seed: int) -> Config:
    return Config.make(
        algorithms=("zhang" if method.name == "Zhang" else "fednmap",),
        data="digits",
        model="mlp:64:relu",
        penalty=PENALTIES[penalty],
        batch_size=0,
        local_steps=1,
        eta_a=method.step,
        gamma=method.step * (1 if method.memory else 4),
        memory=method.memory,
        rounds=ROUNDS,
        seed=seed,
    )


def _job(part: str, penalty: str, method: Method, seed: int) -> Trial:
    setting: Setting = {"figure": "network", "part": part, "penalty": penalty, "method": method.name}
    setting |= {"step": method.step, "trial": seed}
    config = config_of(penalty, method, seed)
    return of_config(setting, config, measure)


def measured_after(t: int) -> bool:
    """Whether round t is measured: every fifth of the first hundred, then every tenth."""
    return t % (5 if t <= 100 else 10) == 0


@torch.no_grad()
def measure(config: Config, _: Path) -> list[Record]:
    """psi, test accuracy, share of exact zeros and megabytes so far; an infinite psi after a divergence."""
    experiment = prepare(config)
    algorithm = experiment.algorithm(config.algorithms[0])
    problem, phi = experiment.problem_for(algorithm), experiment.phi
    accuracy, records, sent = experiment.metrics()["test_accuracy"], [], 0
    try:
        for r in simulate(algorithm, problem, rounds=config.rounds, start=experiment.start(algorithm)):
            sent += r.bytes_up + r.bytes_down
            if measured_after(r.t + 1):
                x = algorithm.model(r.server)
                psi, share = float(problem.loss(x) + phi.value(x)), float(zeros(x))
                records.append(_record(r.t + 1, psi, accuracy(x), share, sent / 1e6))
    except Diverged:
        pass
    done = records[-1]["round"] if records else 0
    later = [t for t in range(1, config.rounds + 1) if t > done and measured_after(t)]
    return records + [_record(t, inf, 0.0, 0.0, sent / 1e6) for t in later]


def _record(t: int, psi: float, accuracy: float, share: float, megabytes: float) -> Record:
    return {"round": t, "objective": psi, "accuracy": accuracy, "zeros": share, "megabytes": megabytes}


def _of(curves: Iterable[Curve], part: str, penalty: str, method: Method) -> list[Curve]:
    return select(curves, part=part, penalty=penalty, method=method.name, step=method.step)


def best(curves: list[Curve], penalty: str) -> tuple[Method, ...]:
    """What the tuning says: as in BEST; empty while trials of the grid are missing."""
    chosen = []
    for name in ("FedNMap", "Zhang"):
        found = [(_of(curves, "tune", penalty, m), m) for m in (Method(name, s) for s in STEPS)]
        if not all(at for at, _ in found):
            return ()
        chosen.append(min((level(at), m) for at, m in found)[1])
    return tuple(chosen)


def until(curve: Curve, accuracy: float, column: str) -> float:
    """The column's value when the test accuracy first reaches this; infinite if it does not."""
    reached = np.flatnonzero(curve["accuracy"] >= accuracy)
    return float(curve[column][reached[0]]) if len(reached) else inf


def _costs(curves: list[Curve], accuracy: float, column: str = "megabytes") -> Values:
    return {int(c.setting["trial"]): until(c, accuracy, column) for c in curves}


def judge(curves: list[Curve]) -> Verdict:
    claims: list[Claim] = []
    for penalty in PENALTIES:
        if penalty not in BEST or not all(_of(curves, "claim", penalty, m) for m in (QUASI_NEWTON, *BEST[penalty])):
            continue
        ours = _of(curves, "claim", penalty, QUASI_NEWTON)
        others = {m: _of(curves, "claim", penalty, m) for m in BEST[penalty]}
        ends = {m: compare(finals(ours, "objective"), finals(c, "objective")) for m, c in others.items()}
        claims.append(_claim(f"{penalty}: memory ends with the lowest psi", ends, penalty))
        for a in ACCURACIES:
            sent = {m: compare(_costs(ours, a), _costs(c, a)) for m, c in others.items()}
            claims.append(_claim(f"{penalty}: memory sends the fewest bytes to {100 * a:g} % accuracy", sent, penalty))
    if all(_of(curves, "claim", p, QUASI_NEWTON) for p in PENALTIES):
        claims += _against_l1(curves)
    claims = claims or [Claim("memory ends with the lowest psi", "-", "tuning only", None, reason="not yet run")]
    tables = {"At the best steps, seeds 0 to 9": _table(curves), "Tuning: psi after 400 rounds": _tuning_table(curves)}
    return Verdict(claims, {k: v for k, v in tables.items() if len(v) > 1}, f"{__doc__.split(chr(10), 2)[2]}\n{RULE}")


def _claim(claim: str, ratios: dict[Method, Ratio], penalty: str) -> Claim:
    edge = [m for m in ratios if m.step in (STEPS[0], STEPS[-1])]
    told = "; ".join(f"{ratio} of {LABELS[m.name]}'s" for m, ratio in ratios.items())
    end: dict[str, Any] = {}
    if edge:
        end = {"holds": None, "reason": f"the best step of {LABELS[edge[0].name]} is at the end of its grid"}
    return Claim.of_ratios(claim, "-", told, list(ratios.values()), told if penalty in ("L1", "MCP") else "", **end)


def _against_l1(curves: list[Curve]) -> list[Claim]:
    """Whether a weakly convex penalty needs fewer bytes than the l1 norm, with memory in both."""
    claims = []
    for a in ACCURACIES:
        costs = {p: _costs(_of(curves, "claim", p, QUASI_NEWTON), a) for p in PENALTIES}
        found = {p: compare(costs[p], costs["L1"]) for p in ("MCP", "SCAD")}
        claims.append(
            Claim.of_ratios(
                f"with memory, MCP and SCAD need fewer bytes than L1 to {100 * a:g} % accuracy",
                "-",
                "; ".join(f"{p}: {ratio} of L1's" for p, ratio in found.items()),
                list(found.values()),
            )
        )
    return claims


def _table(curves: list[Curve]) -> list[list[str]]:
    heads = [f"{what} to {100 * a:g} %" for a, what in product(ACCURACIES, ("rounds", "MB"))]
    rows = [["penalty", "method", "psi", "accuracy, %", "exact zeros, %", *heads, "trials"]]
    for penalty, chosen in BEST.items():
        for method in (QUASI_NEWTON, *chosen):
            found = _of(curves, "claim", penalty, method)
            if found:
                ends = [100 * np.mean([c.final(m) for c in found]) for m in ("accuracy", "zeros")]
                costs = [_middle(_costs(found, a, c)) for a, c in product(ACCURACIES, ("round", "megabytes"))]
                psi = number(finals(found, "objective"))
                rows.append([penalty, str(method), psi, *(f"{v:.1f}" for v in ends), *costs, str(len(found))])
    return rows


def _middle(costs: Values) -> str:
    """The median over the trials, and how many did not get there."""
    values, lost = list(costs.values()), sum(not isfinite(v) for v in costs.values())
    middle = float(np.median(values))
    return (f"{middle:.3g}" if isfinite(middle) else "-") + (f" ({lost} not)" if lost else "")


def _tuning_table(curves: list[Curve]) -> list[list[str]]:
    rows = [["penalty", "method", *(f"eta_hat {s:g}" for s in STEPS)]]
    for penalty, name in product(PENALTIES, ("FedNMap", "Zhang")):
        values = [level(_of(curves, "tune", penalty, Method(name, s))) for s in STEPS]
        if isfinite(min(values)):
            cells = [f"{v:.3g}" if isfinite(v) else "-" for v in values]
            cells[int(np.argmin(values))] = f"**{cells[int(np.argmin(values))]}**"
            rows.append([penalty, name, *cells])
    return rows


def draw(curves: list[Curve]) -> Picture:
    """psi and test accuracy along the rounds, for each penalty."""
    shown = [p for p in PENALTIES if p in BEST and _of(curves, "claim", p, QUASI_NEWTON)]
    picture, axes = panels(2, max(1, len(shown)))
    for k, penalty in enumerate(shown):
        groups = {LABELS[m.name]: _of(curves, "claim", penalty, m) for m in (QUASI_NEWTON, *BEST[penalty])}
        lines(axes[k], groups, "objective")
        caption(axes[k], k, penalty, y="psi")
        lines(axes[len(shown) + k], groups, "accuracy", log=False)
        axes[len(shown) + k].set_ylim(0.8, 1.0)
        caption(axes[len(shown) + k], len(shown) + k, penalty, y="test accuracy")
    return picture


FIGURE = Figure(
    name="network-memory",
    title="Quasi-Newton memory and weakly convex penalties on a network",
    jobs=jobs,
    judge=judge,
    draw=draw,
    choices=f"""\
Digits, 20 clients sorted by label, a network with 64 hidden units (relu), exact gradients, Q = 1, all clients,
{ROUNDS} rounds. Penalties: L1 = {PENALTIES["L1"]}; MCP = {PENALTIES["MCP"]} (weight, theta); SCAD = {PENALTIES["SCAD"]}
(weight, a). The weights were chosen by a pilot (seed 99, FedNMap with and without memory): with them about nine of ten
weights are zero, as with the l1 norm. eta_hat in {", ".join(f"{s:g}" for s in STEPS)}; gamma = 4 eta_hat for FedNMap.
Accuracy is that of the test samples, every 5 rounds up to 100 and every 10 after. Memory
sends three vectors per client and round, up and down, the others two.""",
    trials={"quick": 1, "paper": 10},
)
