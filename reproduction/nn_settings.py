"""Under which settings does figure nn come out? A map over what the paper leaves open, declared before it was run.

What is varied: samples per local step, hidden width, rounds T, sampling with replacement or reshuffled. |F_nat|^2 is
measured with gamma = 4, with gamma = 1, and with each method's own prox parameter (FedNMap: gamma, others: eta_hat).
The whole grid has 60 settings. A part of it is run, declared below as MAP and CALIBRATED: what decides most for an
hour or so of one core. Three effects are separated: noise (batch) at each width, T at widths 32 and 64, reshuffling
at width 32.

1. Calibration, on numbers that are not the claim: the slopes of FedNMap's final |F_nat|^2 in n and in Q, T = 300, seeds
   100 to 102, in the settings of CALIBRATED. A setting is kept if the lower end of the slope's 95 % interval is at most
   the paper's slope, for n and for Q, on one of the grids below. Its distance is |slope - the paper's|, on the nearest
   grid, added for n and Q.
2. The claim: the kept setting with the smallest distance, in all six panels, T = 300, seeds 0 to 9, trial after trial
   of all panels; then the next one, while time is left. If no setting is kept, the setting with the smallest distance
   is judged, and the page says that it was not kept. FedNMap is lower in a panel if the paired 95 % interval of the
   ratio of geometric means is below 1 and Holm's correction over the panels and both other methods keeps it there.
3. The map: FedNMap, Zhang and FedCanon in the panel n = 20, Q = 10, in the settings of MAP, seeds 100 to 102. Steps
   are constant, so that the first 300 rounds of a trial of 1,000 are the trial of 300.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from fednmap.core import info_of
from fednmap.measure import hoyer, residual, zeros
from fednmap.runs.configuration import Config
from fednmap.runs.experiment import prepare
from fednmap.simulation import Record, simulate
from fednmap.theory.scaling import slope_with_interval
from reproduction import shallow
from reproduction.figure import Figure, panels
from reproduction.nn import METHODS, PANELS
from reproduction.runs import of_config
from reproduction.trials import Curve, Setting, Trial, select
from reproduction.verdict import (
    RULE,
    Claim,
    Ratio,
    Values,
    Verdict,
    compare,
    finals,
    judged,
    span,
)

BATCHES, WIDTHS, SAMPLING = (1, 2, 4, 8, 32), (32, 64, 128), ("replacement", "reshuffle")
LENGTHS = (300, 1000)
PANEL = (20, 10)
SEEDS = range(100, 103)
CLIENTS, STEPS = (5, 10, 20, 50, 100), (2, 5, 10, 20)
GRIDS = {"n": (CLIENTS, CLIENTS[1:], CLIENTS[:-1]), "Q": (STEPS, STEPS[1:], STEPS[:-1])}
PAPER = {"n": -1.436, "Q": -1.181}
MEASURES = {"gamma 4": "gamma = 4", "gamma 1": "gamma = 1", "own": "each method's own prox parameter"}
"""What a trial records of |F_nat|^2, and how it is measured."""


class Choice(NamedTuple):
    """What the paper leaves open."""

    batch: int
    width: int
    minibatches: str

    def __str__(self) -> str:
        return f"batch {self.batch}, width {self.width}, {self.minibatches}"


MAP: tuple[tuple[Choice, int], ...] = (
    *((Choice(batch, 32, "replacement"), 1000) for batch in BATCHES),
    *((Choice(batch, 64, "replacement"), 1000 if batch == 2 else 300) for batch in (1, 2, 4)),
    *((Choice(batch, 32, "reshuffle"), 300) for batch in (2, 8, 32)),
    *((Choice(batch, 128, "replacement"), 300) for batch in (2, 8, 32)),
    *((Choice(batch, 64, "replacement"), 1000) for batch in (8, 32)),
)
"""The settings of the map that are run, each with its rounds."""
CHOICES = list(dict.fromkeys(choice for choice, _ in MAP))
CALIBRATED = (
    *(Choice(batch, 32, "replacement") for batch in (2, 8, 1, 4)),
    *(Choice(batch, 64, "replacement") for batch in (2, 8)),
    Choice(2, 32, "reshuffle"),
    Choice(32, 32, "replacement"),
)
"""The settings that are calibrated."""
DECLARED = len(BATCHES) * len(WIDTHS) * len(SAMPLING) * len(LENGTHS)
JUDGED: tuple[Choice, ...] = (Choice(2, 32, "replacement"),)
"""The settings that the calibration has chosen, with T = 300."""


def jobs(scale: str, trials: int) -> list[Trial]:
    """quick: two settings; middle: calibration and map; paper: the chosen settings' panels too."""
    seeds = SEEDS[:trials]
    if scale == "quick":
        few = [Choice(2, 32, "replacement"), Choice(8, 32, "replacement")]
        return [_job("map", m, *PANEL, choice, 300, seed) for seed in seeds for choice in few for m in METHODS]
    found = []
    for choice, seed in product(CALIBRATED, seeds):
        found += [_job("n", "FedNMap", n, 10, choice, 300, seed) for n in CLIENTS]
        found += [_job("Q", "FedNMap", 30, Q, choice, 300, seed) for Q in STEPS]
    if scale == "paper":
        found += [
            _job("claim", method, *panel, choice, 300, trial)
            for choice in JUDGED
            for trial in range(trials)
            for panel in PANELS["paper"]
            for method in METHODS
        ]
    found += [_job("map", m, *PANEL, choice, rounds, seed) for choice, rounds in MAP for seed in seeds for m in METHODS]
    return found


def _job(part: str, method: str, n: int, Q: int, choice: Choice, rounds: int, seed: int) -> Trial:
    setting: Setting = {"part": part, "method": method, "n": n, "Q": Q, **choice._asdict(), "rounds": rounds}
    config = Config.make(
        algorithms=(method.lower(),),
        data="mnist",
        model=f"mlp:{choice.width}:sigmoid",
        partition="sorted",
        penalty="elastic-net:0.001,0.01",
        gamma=shallow.GAMMA,
        measure_gamma=shallow.GAMMA,
        clients=n,
        local_steps=Q,
        eta_a=1 / Q,
        batch_size=choice.batch,
        minibatches=choice.minibatches,
        rounds=rounds,
        seed=seed,
    )
    return of_config({**setting, "trial": seed}, config, measure, measures=list(MEASURES))


def measured_after(t: int) -> bool:
    """Whether round t is measured: every tenth round in the last tenth of each length."""
    return t % 10 == 0 and any(0.9 * length < t <= length for length in LENGTHS)


@torch.no_grad()
def measure(config: Config, _: Path) -> list[Record]:
    """Run the trial; |F_nat|^2 with gamma = 4 and 1 from one gradient on all pictures."""
    experiment = prepare(config)
    algorithm = experiment.algorithm(config.algorithms[0])
    problem, phi = experiment.problem_for(algorithm), experiment.phi
    both = info_of(problem).value_and_gradient
    assert both is not None
    records = []
    for round_ in simulate(algorithm, problem, rounds=config.rounds, start=experiment.start(algorithm)):
        if measured_after(round_.t + 1):
            x = algorithm.model(round_.server)
            loss, gradient = both(x)
            size = {g: float(residual(x, gradient, phi, g).square().sum()) for g in (shallow.GAMMA, 1.0)}
            records.append(
                {
                    "round": round_.t + 1,
                    "gamma 4": size[shallow.GAMMA],
                    "gamma 1": size[1.0],
                    "own": size[algorithm.prox_parameter or 1.0],
                    "objective": float(loss + phi.value(x)),
                    "zeros": float(zeros(x)),
                    "hoyer": float(hoyer(x)),
                }
            )
    return records


def _ends(curves: Iterable[Curve], measure: str, rounds: int, **setting: Any) -> Values:
    return finals(select(curves, **setting), measure, rounds)


def slopes(curves: list[Curve], choice: Choice) -> dict[str, list[tuple[float, float, float]]]:
    """The slope with its interval on each grid, of n and of Q; without grids of which trials are missing."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for factor, grids in GRIDS.items():
        part = select(curves, part=factor, **choice._asdict())
        for grid in grids:
            each = [_ends(part, "gamma 4", 300, **{factor: v}) for v in grid]
            common = sorted(set.intersection(*(set(v) for v in each)))
            if len(common) > 1:
                reached = np.array([[v[k] for k in common] for v in each])
                found.setdefault(factor, []).append(slope_with_interval(grid, reached))
    return found


def is_kept(found: Mapping[str, Sequence[tuple[float, float, float]]]) -> bool | None:
    """Whether the slopes reach the paper's, by the rule of step 1; None while trials are missing."""
    if any(len(found.get(factor, ())) < len(grids) for factor, grids in GRIDS.items()):
        return None
    return all(any(low <= PAPER[factor] for _, low, _ in found[factor]) for factor in GRIDS)


def distance(found: Mapping[str, Sequence[tuple[float, float, float]]]) -> float:
    """How far the slopes are from the paper's: on the nearest grid, added for n and Q."""
    return sum(min(abs(s - PAPER[factor]) for s, _, _ in found[factor]) for factor in GRIDS)


def chosen(curves: list[Curve]) -> list[Choice]:
    """The settings to judge, the first one first: those that are kept, else the nearest one."""
    found = {choice: slopes(curves, choice) for choice in CALIBRATED}
    complete = {choice: f for choice, f in found.items() if is_kept(f) is not None}
    order = sorted(complete, key=lambda choice: distance(complete[choice]))
    return [choice for choice in order if is_kept(complete[choice])] or order[:1]


def _on_map(curves: list[Curve], name: str, choice: Choice, rounds: int) -> list[Ratio]:
    """FedNMap's ratio to the other methods in a setting of the map; empty where a method has not been run so long."""
    run = [c for c in select(curves, part="map", **choice._asdict()) if c["round"][-1] >= rounds]
    ends = [_ends(run, name, rounds, method=method) for method in METHODS]
    return [compare(ends[0], other) for other in ends[1:]] if all(ends) else []


def _lengths(curves: list[Curve]) -> list[int]:
    return [length for length in LENGTHS if any(c["round"][-1] >= length for c in curves)]


def judge(curves: list[Curve]) -> Verdict:
    heads = [f"{name}, of {other}'s" for name, other in product(MEASURES, METHODS[1:])]
    the_map, below = [["batch", "width", "sampling", "T", *heads]], 0
    for rounds, choice in product(_lengths(curves), CHOICES):
        if ratios := [r for name in MEASURES for r in _on_map(curves, name, choice, rounds)]:
            the_map.append([*map(str, choice), str(rounds), *map(str, ratios)])
            below += ratios[0].high < 1
    calibration = [["setting", "slope in n", "slope in Q", "distance", "kept"]]
    for choice in CALIBRATED:
        if found := slopes(curves, choice):
            keep = is_kept(found)
            words = ["; ".join(f"{s:.2f} [{a:.2f}, {b:.2f}]" for s, a, b in found.get(f, ())) for f in GRIDS]
            far = "-" if keep is None else f"{distance(found):.2f}"
            calibration.append([str(choice), *words, far, {True: "yes", False: "no", None: "not all run"}[keep]])
    kept, settings, run = [row[0] for row in calibration if row[-1] == "yes"], len(calibration) - 1, len(the_map) - 1
    text = f"{len(kept)} of {settings} settings kept"
    order = chosen(curves)
    claims = [
        Claim(
            "settings whose slopes in n and Q can reach the paper's",
            "-1.436 and -1.181",
            f"{text}; to judge in this order: {'; '.join(map(str, order))}",
            None,
            text,
            reason="this chooses the settings that are judged; it is no claim",
        ),
        Claim(
            "settings of the map in which FedNMap is below Zhang, gamma = 4 (n = 20, Q = 10)",
            "lowest",
            f"the 95 % interval of the ratio is below 1 in {below} of {run} settings; {DECLARED} are in the whole grid",
            None,
            f"{below} of the {run} settings that were run, of {DECLARED} in the whole grid",
            reason="the map shows one panel; the claim is about six",
        ),
    ]
    for choice, name in product(JUDGED, MEASURES):
        claims += _claims(curves, name, choice, str(choice) in kept)
    tables = {"The map": the_map, "Calibration": calibration, "The chosen settings": _panel_table(curves)}
    tables = {k: t for k, t in tables.items() if len(t) > 1}
    return Verdict(claims, tables, f"{__doc__.split(chr(10), 2)[2]}\n{RULE}", _reading(curves, run, order))


def _reading(curves: list[Curve], run: int, order: list[Choice]) -> str:
    """What the map says along the batches, and what was not run."""
    rows, rising = [], []
    for rounds, sampling, width in product(_lengths(curves), SAMPLING, WIDTHS):
        found = {b: r[0] for b in BATCHES if (r := _on_map(curves, "gamma 4", Choice(b, width, sampling), rounds))}
        means = [r.mean for r in found.values()]
        if len(found) > 2:
            values = ", ".join(f"{mean:.2f}" for mean in means)
            rows.append(f"{values} for batch {', '.join(map(str, found))} (T = {rounds}, width {width}, {sampling})")
            rising.append(means == sorted(means))
    if not rows:
        return ""
    left = [str(choice) for choice in order if choice not in JUDGED]
    text = (
        f"In the map FedNMap's |F_nat|^2, measured with gamma = 4, is this part of Zhang's: {'; '.join(rows)}. "
        f"The larger the batch, the smaller FedNMap's advantage, in {sum(rising)} of {len(rising)} rows. "
        f"Left: {DECLARED - run} of the {DECLARED} settings of the whole grid were not run, and of the settings that "
        f"the calibration kept these were not judged: {'; '.join(left) or 'none'}."
    )
    return fill(text, 118, break_long_words=False, break_on_hyphens=False)


def _in_panels(curves: list[Curve], name: str, choice: Choice) -> dict[tuple[int, int], list[Ratio]]:
    """FedNMap's ratios to the other methods, in the panels of a chosen setting that were run."""
    found = {}
    for n, Q in PANELS["paper"]:
        run = select(curves, part="claim", n=n, Q=Q, **choice._asdict())
        ends = [_ends(run, name, 300, method=method) for method in METHODS]
        if all(ends):
            found[n, Q] = [compare(ends[0], other) for other in ends[1:]]
    return found


def _panel_table(curves: list[Curve]) -> list[list[str]]:
    table = [["setting", "n", "Q", "trials", *(f"{name}, of {m}'s" for name, m in product(MEASURES, METHODS[1:]))]]
    for choice in JUDGED:
        by_measure = [_in_panels(curves, name, choice) for name in MEASURES]
        for (n, Q), first in by_measure[0].items():
            each = [str(r) for found in by_measure for r in found[n, Q]]
            table.append([str(choice), str(n), str(Q), str(min(r.log.trials for r in first)), *each])
    return table


def _claims(curves: list[Curve], name: str, choice: Choice, kept: bool) -> list[Claim]:
    """FedNMap lowest in all panels of a chosen setting, against both other methods; and against Zhang alone."""
    panels = _in_panels(curves, name, choice)
    how = f"{choice}, T = 300{'' if kept else ' (not kept)'}, measured with {MEASURES[name]}"
    claims = []
    for first, ratios in (
        ("FedNMap lowest in all panels", [r for each in panels.values() for r in each]),
        ("FedNMap below Zhang in all panels", [each[0] for each in panels.values()]),
    ):
        if not ratios:
            continue
        lower: list[bool | None] = judged(ratios)
        missing: dict[str, Any] = {}
        if len(panels) < len(PANELS["paper"]):
            missing = {"holds": None, "reason": "not all panels were run"}
        claims.append(
            Claim.of_ratios(
                f"{first}, {how}",
                "lowest",
                f"lower in {lower.count(True)} of {len(ratios)} comparisons, not lower in {lower.count(False)}",
                ratios,
                f"{span(ratios)} of the others'",
                trials=min(r.log.trials for r in ratios),
                settings=how,
                **missing,
            )
        )
    return claims


def draw(curves: list[Curve]) -> Picture:
    """The ratio FedNMap / Zhang with its interval: the map, a row for each T; below it the chosen settings' panels."""
    lengths, claim = _lengths(select(curves, part="map")), select(curves, part="claim")
    rows = len(lengths) + bool(claim)
    picture, axes = panels(rows, len(MEASURES), sharey=True)
    styles = dict(zip(product(SAMPLING, WIDTHS), [(m, f"C{k}") for m in "os" for k in range(3)], strict=True))
    for axis, (rounds, name) in zip(axes, product(lengths, MEASURES), strict=False):
        for (sampling, width), (marker, colour) in styles.items():
            shift = 2 ** (0.12 * (list(styles).index((sampling, width)) - 1.5))
            there = [(b, _on_map(curves, name, Choice(b, width, sampling), rounds)) for b in BATCHES]
            ratios = {b * shift: found[0] for b, found in there if found}
            _ratios(axis, ratios, marker, colour, f"width {width}, {sampling}")
        axis.set_xscale("log", base=2)
        axis.set_xticks(BATCHES, [str(b) for b in BATCHES])
        axis.set_xlim(0.7, 45)
        axis.minorticks_off()
        axis.set_title(f"T = {rounds}, {MEASURES[name]}", fontsize="medium")
        axis.set_xlabel("samples per local step")
    for axis, name in zip(axes[len(lengths) * len(MEASURES) :], MEASURES, strict=False):
        for k, choice in enumerate(JUDGED):
            found = _in_panels(claim, name, choice)
            ratios = {i + 0.15 * k: found[p][0] for i, p in enumerate(PANELS["paper"]) if p in found}
            _ratios(axis, ratios, "D", f"C{4 + k}", f"chosen: {choice}")
        axis.set_xticks(range(len(PANELS["paper"])), [f"{n}, {Q}" for n, Q in PANELS["paper"]])
        axis.set_title(f"chosen, T = 300, {MEASURES[name]}", fontsize="small")
        axis.set_xlabel("n, Q")
    for axis in axes:
        axis.axhline(1, color="0.5", linewidth=1)
        axis.set_yscale("log")
        axis.set_ylim(0.3, 1.7)
        axis.set_yticks((0.3, 0.5, 0.7, 1, 1.4), ("0.3", "0.5", "0.7", "1", "1.4"))
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    for axis in axes[:: len(MEASURES)]:
        axis.set_ylabel(r"$\|F_{nat}\|^2$, FedNMap / Zhang")
    labelled = dict(pair[::-1] for axis in axes for pair in zip(*axis.get_legend_handles_labels(), strict=True))
    picture.legend(labelled.values(), labelled.keys(), loc="outside upper center", ncols=4, fontsize="small")
    return picture


def _ratios(axis: Axes, ratios: Mapping[float, Ratio], marker: str, colour: str, label: str) -> None:
    """Geometric means with their 95 % intervals."""
    for k, (x, r) in enumerate(ratios.items()):
        axis.plot([x] * 2, [r.low, r.high], "-", color=colour, linewidth=1)
        axis.plot([x], [r.mean], marker, color=colour, markersize=4, label=None if k else label)


FIGURE = Figure(
    name="nn-settings",
    title="Under which settings figure nn comes out",
    jobs=jobs,
    judge=judge,
    draw=draw,
    choices=f"""{shallow.CHOICES}

Varied: batch {", ".join(map(str, BATCHES))}; width {", ".join(map(str, WIDTHS))}; T {LENGTHS[0]} and {LENGTHS[1]};
minibatches with replacement or reshuffled. eta_a = 1/Q for all. Not run: width 128 and reshuffled minibatches with
T = {LENGTHS[1]}, their combination, and their batches 1 and 4.""",
    trials={"quick": 2, "middle": 3, "paper": 10},
)
