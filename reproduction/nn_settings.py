"""Under which settings does figure nn come out? A map over what the paper leaves open, declared before it was run.

What is varied: samples per local step, hidden width, rounds T, sampling with replacement or reshuffled. |F_nat|^2 is
measured with gamma = 4, with gamma = 1, and with each method's own prox parameter (FedNMap: gamma, others: eta_hat).

1. The map: FedNMap, Zhang and FedCanon in the panel n = 20, Q = 10, in every setting, seeds 100 to 102. Step sizes are
   constant, so that the first 300 rounds of a trial of 1,000 are the trial of 300.
2. Calibration, on numbers that are not the claim: the slopes of FedNMap's final |F_nat|^2 in n and in Q, seeds 100 to
   102. A setting is kept if the lower end of the slope's 95 % interval is at most the paper's slope, for n and for Q,
   on one of the grids below.
3. The claim: the kept settings once, in all six panels, seeds 0 to 9. FedNMap is lower in a panel if the paired 95 %
   interval of the ratio of geometric means is below 1 and Holm's correction over the panels keeps it there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure as Picture

from fednmap.core import info_of
from fednmap.measure import hoyer, residual, zeros
from fednmap.runs.configuration import Config
from fednmap.runs.experiment import dataset_of, prepare
from fednmap.simulation import Record, simulate
from fednmap.theory.scaling import slope_with_interval
from reproduction import shallow
from reproduction.figure import Figure, panels
from reproduction.nn import METHODS, PANELS
from reproduction.trials import Curve, Setting, Trial, select
from reproduction.verdict import Claim, Values, Verdict, compare, finals, judged, power, span, together, unsure

BATCHES, WIDTHS, SAMPLING = (1, 2, 4, 8, 32), (32, 64, 128), ("replacement", "reshuffle")
LENGTHS = (300, 1000)
PANEL = (20, 10)
SEEDS = range(100, 103)
CLIENTS, STEPS = (5, 10, 20, 50, 100), (2, 5, 10, 20)
GRIDS = {"n": (CLIENTS, CLIENTS[1:], CLIENTS[:-1]), "Q": (STEPS, STEPS[1:], STEPS[:-1])}
PAPER = {"n": -1.436, "Q": -1.181}
MEASURES = ("gamma 4", "gamma 1", "own")


class Choice(NamedTuple):
    """What the paper leaves open."""

    batch: int
    width: int
    minibatches: str

    def __str__(self) -> str:
        return f"batch {self.batch}, width {self.width}, {self.minibatches}"


CHOICES = [Choice(b, w, m) for m, w, b in product(SAMPLING, WIDTHS, BATCHES)]
KEPT: tuple[tuple[Choice, int], ...] = ()
"""The settings, with T, that the calibration has kept."""


def jobs(scale: str, trials: int) -> list[Trial]:
    """quick: two settings; middle: the map, then the calibration; paper: the kept settings."""
    seeds = SEEDS[:trials]
    if scale == "quick":
        few = [Choice(2, 32, "replacement"), Choice(8, 32, "replacement")]
        return [_job("map", m, *PANEL, choice, 300, seed) for seed in seeds for choice in few for m in METHODS]
    if scale == "middle":
        found = [_job("map", m, *PANEL, choice, 1000, seed) for choice in CHOICES for seed in seeds for m in METHODS]
        for choice, seed in product(CHOICES, seeds):
            found += [_job("n", "FedNMap", n, 10, choice, 300, seed) for n in CLIENTS]
            found += [_job("Q", "FedNMap", 30, Q, choice, 300, seed) for Q in STEPS]
        return found
    return [
        _job("claim", method, *panel, choice, rounds, trial)
        for trial in range(trials)
        for choice, rounds in KEPT
        for panel in PANELS["paper"]
        for method in METHODS
    ]


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
    configuration = config.model_dump(mode="json", exclude={"checkpoint_every"}) | {"measures": list(MEASURES)}
    return Trial({**setting, "trial": seed}, partial(measure, config), configuration, partial(_digest, config))


def _digest(config: Config) -> str:
    return dataset_of(config).digest


def measured_after(t: int) -> bool:
    """Whether round t is measured: every tenth of the last tenth of each length, else every fiftieth."""
    return t % 50 == 0 or (t % 10 == 0 and any(0.9 * length < t <= length for length in LENGTHS))


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
    """Whether the slopes reach the paper's, by the rule of step 2; None while trials are missing."""
    if any(len(found.get(factor, ())) < len(grids) for factor, grids in GRIDS.items()):
        return None
    return all(any(low <= PAPER[factor] for _, low, _ in found[factor]) for factor in GRIDS)


def _map_row(curves: list[Curve], choice: Choice, rounds: int) -> list[str] | None:
    setting = {"part": "map", **choice._asdict()}
    if not all(select(curves, method=method, **setting) for method in METHODS):
        return None
    row = [str(choice.batch), str(choice.width), choice.minibatches, str(rounds)]
    for name, other in product(MEASURES, METHODS[1:]):
        ends = [_ends(curves, name, rounds, method=method, **setting) for method in ("FedNMap", other)]
        row.append(str(compare(*ends)))
    return row


def judge(curves: list[Curve]) -> Verdict:
    heads = [f"{name}, of {other}'s" for name, other in product(MEASURES, METHODS[1:])]
    table = [["batch", "width", "sampling", "T", *heads]]
    lengths = [length for length in LENGTHS if any(c["round"][-1] >= length for c in curves)]
    rows = [row for rounds, choice in product(lengths, CHOICES) if (row := _map_row(curves, choice, rounds))]
    calibration, kept = [["setting", "slope in n", "slope in Q", "kept"]], []
    for choice in CHOICES:
        if found := slopes(curves, choice):
            keep = is_kept(found)
            words = ["; ".join(f"{s:.2f} [{a:.2f}, {b:.2f}]" for s, a, b in found.get(f, ())) for f in GRIDS]
            calibration.append([str(choice), *words, {True: "yes", False: "no", None: "not all run"}[keep]])
            kept += [choice] if keep else []
    judged = [_claim(curves, name, choice, rounds) for name in MEASURES for choice, rounds in KEPT]
    told = f"{len(kept)} of {len(calibration) - 1} settings kept: " + ("; ".join(map(str, kept)) or "none")
    below = sum(float(row[4].split("[")[1].split(",")[1].rstrip("]")) < 1 for row in rows)
    claims = [
        Claim(
            "settings whose slopes in n and Q can reach the paper's",
            "-1.436 and -1.181",
            told,
            None,
            told,
            reason="this chooses the settings that are judged; it is no claim",
        ),
        Claim(
            "settings of the map in which FedNMap is below Zhang, gamma = 4 (n = 20, Q = 10)",
            "lowest",
            f"the 95 % interval of the ratio is below 1 in {below} of {len(rows)} settings; "
            f"{len(LENGTHS) * len(CHOICES)} were declared",
            None,
            f"{below} of the {len(rows)} settings that were run, of {len(LENGTHS) * len(CHOICES)} declared",
            reason="the map shows one panel; the claim is about six",
        ),
        *[claim for claim in judged if claim],
    ]
    return Verdict(claims, {"The map": [table[0], *rows], "Calibration": calibration}, __doc__.split("\n\n", 2)[2])


def _claim(curves: list[Curve], name: str, choice: Choice, rounds: int) -> Claim | None:
    """FedNMap lowest in all panels of a kept setting."""
    found = []
    for panel, other in product(PANELS["paper"], METHODS[1:]):
        setting = {"part": "claim", "n": panel[0], "Q": panel[1], **choice._asdict(), "rounds": rounds}
        ends = [_ends(curves, name, rounds, method=method, **setting) for method in ("FedNMap", other)]
        if all(ends):
            found.append(compare(*ends))
    if not found:
        return None
    lower = judged(found)
    whole = len(found) == 2 * len(PANELS["paper"])
    return Claim(
        f"FedNMap lowest in all panels, {choice}, T = {rounds}, measured with {name}",
        "lowest",
        f"lower in {lower.count(True)} of {len(found)} comparisons: " + "; ".join(map(str, found)),
        together(lower) if whole else None,
        f"{span(found)} of the others'",
        reason=unsure(found) if whole else "not all panels were run",
        power=power(found),
    )


def draw(curves: list[Curve]) -> Picture:
    """The map: the ratio FedNMap / Zhang with its interval, a panel for each T and way of measuring."""
    lengths = [length for length in LENGTHS if any(c["round"][-1] >= length for c in curves)]
    picture, axes = panels(len(lengths), len(MEASURES), sharey=True, sharex=True)
    styles = dict(zip(product(SAMPLING, WIDTHS), [(m, f"C{k}") for m in "os" for k in range(3)], strict=True))
    for axis, (rounds, name) in zip(axes, product(lengths, MEASURES), strict=True):
        for (sampling, width), (marker, colour) in styles.items():
            shift = 2 ** (0.12 * (list(styles).index((sampling, width)) - 2.5))
            for batch in BATCHES:
                setting = {"part": "map", **Choice(batch, width, sampling)._asdict()}
                ends = [_ends(curves, name, rounds, method=m, **setting) for m in METHODS[:2]]
                if all(ends):
                    r = compare(*ends)
                    axis.plot([batch * shift] * 2, [r.low, r.high], "-", color=colour, linewidth=1)
                    axis.plot([batch * shift], [r.mean], marker, color=colour, markersize=4)
        axis.axhline(1, color="0.5", linewidth=1)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(BATCHES, [str(b) for b in BATCHES])
        axis.set_ylim(0.4, 1.6)
        axis.set_yticks((0.5, 0.7, 1, 1.4), ("0.5", "0.7", "1", "1.4"))
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.set_title(f"T = {rounds}, measured with {name}", fontsize="medium")
    for axis in axes[-len(MEASURES) :]:
        axis.set_xlabel("samples per local step")
    axes[0].set_ylabel(r"$\|F_{nat}\|^2$, FedNMap / Zhang")
    for (sampling, width), (marker, colour) in styles.items():
        axes[0].plot([], [], marker, color=colour, label=f"width {width}, {sampling}")
    axes[0].legend(fontsize="x-small")
    return picture


FIGURE = Figure(
    name="nn-settings",
    title="Under which settings figure nn comes out",
    jobs=jobs,
    judge=judge,
    draw=draw,
    choices=f"""{shallow.CHOICES}

Varied: batch {", ".join(map(str, BATCHES))}; width {", ".join(map(str, WIDTHS))}; T {LENGTHS[0]} and {LENGTHS[1]};
minibatches with replacement or reshuffled. eta_a = 1/Q for all.""",
    trials={"quick": 2, "middle": 3, "paper": 10},
)
