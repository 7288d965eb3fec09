"""FLamby's two tabular sets: does what is published come out here, and who does better under the same budget?"""

from __future__ import annotations

from functools import partial
from math import inf, nan, sqrt
from statistics import mean, stdev
from typing import NamedTuple

from matplotlib.figure import Figure as Picture

from reproduction.figure import Figure, panels
from reproduction.flamby_problem import KEPT_BACK, TASKS, UPDATES
from reproduction.flamby_published import CENTRAL, PUBLISHED
from reproduction.flamby_trials import AS_PUBLISHED, CRITERIA, KINDS, LOCAL, SERVER, WEIGHTS, jobs
from reproduction.trials import Curve, by_setting, select
from reproduction.verdict import Claim, Difference, Verdict, together

METRICS = {"pooled": "pooled test", "mean": "mean of centres"}
OURS = ("FedNMap", "FedNMap-l1", "Zhang-l1")
PARTS = {"published": ("published",)} | {c: (f"by-{c}", f"by-{c}-quick") for c in CRITERIA}
COLUMNS = {"published": "same steps, here", "loss": "tuned by loss", "metric": "tuned by metric"}
LANDS = 2.0
"""Standard errors of the difference of two means within which they are taken for the same."""
WIDE = 5.0
"""Points: where so much, or more, would be taken for the same, nothing is judged."""
SMALLEST = 1.0
"""Points: the smallest difference that counts."""

RULE = f"""\
Numbers are per cent after the last round, with the standard deviation over the seeds.

A method lands on its published numbers if on both tests the means over the seeds differ by at most {LANDS:g} standard
errors of their difference, sqrt(sd^2/k + sd'^2/k') for k and k' seeds; how many values are the published ones to their
two digits, seed by seed, is said beside it. Where that allows {WIDE:g} points or more, landing says little, and is not
judged.

A and B are compared on a test by the difference of their means with its 95 % interval. Its standard error has two
parts, sqrt(sd_A^2/k + sd_B^2/k') over the seeds and that which the size of the test set leaves: of a share for the
accuracy, sqrt(p (1 - p) / N), of a jackknife over patients for the concordance, of A and B the larger; for the mean of
the centres the root of the sum of their squares over the number of centres. Degrees of freedom: Welch's, for the part
over the seeds. A is better if the interval is above 0; it is not if the interval excludes that A is better by
{SMALLEST:g} point. A claim is reproduced if A is better on both tests, not reproduced if it is not on one."""


class Number(NamedTuple):
    """A metric over the seeds, per cent, and the standard error of its test set."""

    values: tuple[float, ...]
    error: float = 0.0

    @property
    def mean(self) -> float:
        return mean(self.values)

    @property
    def spread(self) -> float:
        return stdev(self.values) if len(self.values) > 1 else 0.0

    def __str__(self) -> str:
        return f"{self.mean:.1f} ± {self.spread:.1f}"


def cited(task: str, method: str, metric: str) -> Number:
    return Number(getattr(PUBLISHED[task][method], metric))


def measured(curves: list[Curve], metric: str) -> Number:
    """The last value of each trial."""
    error = mean(100 * c.final(f"{metric}_error", share=0) for c in curves)
    return Number(tuple(100 * c.final(metric, share=0) for c in curves), error)


def difference(a: Number, b: Number) -> Difference:
    """How much better a is than b, per cent; the error is that of the seeds and that of the test set."""
    parts = [n.spread**2 / len(n.values) for n in (a, b)]
    seeds = sum(parts)
    freedom = (
        seeds**2 / sum(p**2 / max(len(n.values) - 1, 1) for p, n in zip(parts, (a, b), strict=True)) if seeds else inf
    )
    error = sqrt(seeds + max(a.error, b.error) ** 2)
    return Difference.of(a.mean - b.mean, error, min(freedom, 1e6), min(len(a.values), len(b.values)))


def is_better(found: Difference) -> bool | None:
    return True if found.low > 0 else False if found.high < SMALLEST else None


def judge(curves: list[Curve], task: str) -> Verdict:
    landed = [_lands(task, m, c) for m in AS_PUBLISHED if (c := select(curves, part="published", method=m))]
    claims = [claim for criterion in CRITERIA for claim in _tuned_claims(curves, task, criterion)]
    tables = {
        "All numbers": _table(curves, task),
        "Against the best published": _against_best(curves, task),
        "What was chosen": _choices(curves),
    }
    return Verdict([*landed, *claims], tables, RULE)


def _tuned_claims(curves: list[Curve], task: str, criterion: str) -> list[Claim]:
    tuned = {m: c for m in KINDS if (c := _tuned(curves, m, criterion))}
    how, best = f"tuned by {criterion}", {metric: best_published(task, metric) for metric in METRICS}
    own = [
        _beats(
            f"{m}, {how}, is better than the published {m}",
            tuned[m],
            {k: cited(task, m, k) for k in METRICS},
            first=m == "FedAvg",
        )
        for m in ("FedAvg", "FedProx", "SCAFFOLD")
        if m in tuned
    ]
    whose = ", ".join(f"{best[k]} on the {METRICS[k]}" for k in METRICS)
    top = [
        _beats(
            f"{m}, {how}, is better than the best published federated method",
            tuned[m],
            {k: cited(task, best[k], k) for k in METRICS},
            f"{whose}: ",
            first=m == "FedNMap-l1",
        )
        for m in ("FedAvg", *OURS)
        if m in tuned
    ]
    level = [
        _beats(f"{m} is better than FedAvg, both {how}", tuned[m], {k: measured(tuned["FedAvg"], k) for k in METRICS})
        for m in OURS
        if m in tuned and "FedAvg" in tuned
    ]
    return [*own, *top, *level]


def _against_best(curves: list[Curve], task: str) -> list[list[str]]:
    best = {metric: best_published(task, metric) for metric in METRICS}
    rows = [["method", "tuned by", *(f"{METRICS[k]}, against {m}" for k, m in best.items())]]
    for method in KINDS:
        for criterion in CRITERIA:
            if found := _tuned(curves, method, criterion):
                cells = [difference(measured(found, k), cited(task, m, k)).in_points() for k, m in best.items()]
                rows.append([method, criterion, *cells])
    return rows


def best_published(task: str, metric: str) -> str:
    federated = [m for m in PUBLISHED[task] if m not in CENTRAL]
    return max(federated, key=lambda m: cited(task, m, metric).mean)


def _tuned(curves: list[Curve], method: str, criterion: str) -> list[Curve]:
    return [c for part in PARTS[criterion] for c in select(curves, part=part, method=method)]


def _lands(task: str, method: str, curves: list[Curve]) -> Claim:
    told, lands, digits, most, widest = [], True, 0, 0.0, 0.0
    for metric, name in METRICS.items():
        a, b = measured(curves, metric), cited(task, method, metric)
        apart = abs(a.mean - b.mean)
        error = sqrt(a.spread**2 / len(a.values) + b.spread**2 / len(b.values))
        seeds = [int(c.setting["trial"]) for c in curves]
        theirs = dict(enumerate(b.values))
        same = sum(f"{x:.2f}" == f"{theirs.get(k, nan):.2f}" for k, x in zip(seeds, a.values, strict=True))
        lands, digits, most = lands and apart <= LANDS * error, digits + same, max(most, apart)
        widest = max(widest, LANDS * error)
        off = f"{apart / error:.1f} standard errors off" if error else f"{apart:.2f} points off"
        told.append(f"{name} {a}, {off}, {same} of {len(a.values)} seeds to the digit")
    holds = None if lands and widest >= WIDE else lands
    reason = f"{widest:.0f} points off would still count as landing"
    paper = "; ".join(f"{METRICS[k]} {cited(task, method, k)}" for k in METRICS)
    claim = f"{method} with the published steps lands on the published numbers"
    many = len(METRICS) * len(curves)
    allowed = f", {widest:.0f} allowed" if holds is None else ""
    effect = f"{digits} of {many} numbers to the digit, means up to {most:.1f} points apart{allowed}"
    effect = effect if method == "FedAvg" else ""
    return Claim(claim, paper, "; ".join(told), holds, effect, reason=reason, power=f"{widest:.2g} points")


def _beats(claim: str, curves: list[Curve], other: dict[str, Number], whose: str = "", first: bool = False) -> Claim:
    found = {k: difference(measured(curves, k), other[k]) for k in METRICS}
    paper = whose + "; ".join(f"{METRICS[k]} {v}" for k, v in other.items())
    said = "; ".join(f"{METRICS[k]} {measured(curves, k)}, {d.in_points()}" for k, d in found.items())
    effect = ", ".join(f"{METRICS[k]} {d.in_points()}" for k, d in found.items()) if first else ""
    weakest = max(d.power for d in found.values())
    return Claim(
        claim,
        paper,
        said,
        together(is_better(d) for d in found.values()),
        effect,
        reason="an interval includes both answers",
        power=f"{weakest:.2g} points",
    )


def _table(curves: list[Curve], task: str) -> list[list[str]]:
    rows = [["method", *(f"{name}, {what}" for name in METRICS.values() for what in ("published", *COLUMNS.values()))]]
    for method in dict.fromkeys([*PUBLISHED[task], *KINDS]):
        row = [method]
        for metric in METRICS:
            row.append(str(cited(task, method, metric)) if method in PUBLISHED[task] else "-")
            for how in COLUMNS:
                found = _tuned(curves, method, how)
                row.append(str(measured(found, metric)) if found else "-")
        if any(cell != "-" for cell in row[1:]):
            rows.append(row)
    return rows


def _choices(curves: list[Curve]) -> list[list[str]]:
    head = ["method", "chosen by", "local step", "second parameter", "loss kept back", "metric kept back, %"]
    rows = [[*head, "bytes up, all rounds"]]
    for method, kind in KINDS.items():
        for criterion in CRITERIA:
            if found := _tuned(curves, method, criterion):
                c = found[0]
                second = f"{kind.second} {c['second'][-1]:.3g}" if kind.second else "-"
                loss, metric = c["validation_loss"][-1], 100 * c["validation_metric"][-1]
                row = [method, criterion, f"{c['eta_a'][-1]:.3g}", second, f"{loss:.4f}"]
                rows.append([*row, f"{metric:.1f}", f"{c['bytes_up'][-1]:g}"])
    return rows


def draw(curves: list[Curve], task: str) -> Picture:
    """A row per method: what is published, the same run here, and with steps chosen on the rows kept back."""
    picture, axes = panels(1, 2, sharey=True)
    picture.set_size_inches(9.5, 5.2)
    names = [m for m in dict.fromkeys([*PUBLISHED[task], *KINDS]) if m in PUBLISHED[task] or _tuned(curves, m, "loss")]
    looks = {"published": ("x", "C1", 0.1), "loss": ("o", "C0", -0.1), "metric": ("D", "C2", -0.3)}
    for axis, (metric, title) in zip(axes, METRICS.items(), strict=True):
        best = cited(task, best_published(task, metric), metric).mean
        error = mean(measured([c], metric).error for c in curves)
        axis.axvspan(best - error, best + error, color="0.9", label="best published ± error of the test set")
        for k, m in enumerate(names):
            if m in PUBLISHED[task]:
                n = cited(task, m, metric)
                label = "published" if k == 0 else None
                axis.errorbar(n.mean, -k + 0.3, xerr=n.spread, fmt="s", color="0.4", markersize=4, label=label)
            for how, (marker, colour, shift) in looks.items():
                if found := _tuned(curves, m, how):
                    n, new = measured(found, metric), COLUMNS[how] not in axis.get_legend_handles_labels()[1]
                    axis.errorbar(
                        *(n.mean, -k + shift),
                        xerr=n.spread,
                        fmt=marker,
                        color=colour,
                        markersize=4,
                        label=COLUMNS[how] if new else None,
                    )
        axis.set_yticks([-k for k in range(len(names))], names)
        axis.set_xlabel(f"{TASKS[task].metric}, %: {title}")
        axis.grid(alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside upper center", ncols=3, fontsize="small")
    return picture


def closing(curves: list[Curve]) -> str:
    """One line per part and method: the last values over the seeds."""
    lines = ["part,method,seeds,eta_a,second," + ",".join(f"{k}_{w}" for k in METRICS for w in ("mean", "sd", "error"))]
    for (_, part, method), members in by_setting(curves).items():
        cells = [f"{n.mean:.2f},{n.spread:.2f},{n.error:.2f}" for n in (measured(members, k) for k in METRICS)]
        steps = ",".join(f"{members[0][name][-1]:.4g}" for name in ("eta_a", "second"))
        lines.append(f"{part},{method},{len(members)},{steps},{','.join(cells)}")
    return "\n".join(lines) + "\n"


def _choices_text(task: str, events: str) -> str:
    about = TASKS[task]
    return f"""\
du Terrail et al., FLamby, NeurIPS 2022: data `{about.data}`, batch {about.batch}, {UPDATES} updates x {about.rounds}
rounds, clients weighted by their samples, seeds 42 to 46; start and minibatches are those that the seed gives in its
program (torch's DataLoader, client after client). Published numbers are cited from its result files, seed by seed.

{events}

Step sizes are chosen as in owkin/benchmark_flamby, on {100 * KEPT_BACK:g} % of each centre's training rows (seed 42;
label by label where each has more than two rows), by the last model: the one with the least loss, as its program does,
and apart from that the one with the largest metric, which is its aim in words; centres count the same. The grids are
those there: {len(LOCAL)} local steps from {LOCAL[0]:g} to {LOCAL[-1]:.3g}, and {len(SERVER)} server steps from
{SERVER[0]:g} to {SERVER[-1]:.3g} or {len(WEIGHTS)} weights from {WEIGHTS[0]:g} to {WEIGHTS[-1]:g} of mu (FedProx) or of
an l1 norm without the intercept (-l1, with server step 1). Every method has the same budget of {about.rounds} rounds
also while it is chosen; the test is never used. The benchmark's own files for these two sets keep back 25 %, use batch
32, 120 rounds, and minibatches in the order of the rows; here they are shuffled, as in FLamby.

FedNMap has phi = 0 and is then SCAFFOLD with one vector up in place of two: its numbers must be SCAFFOLD's."""


def _figure(task: str, title: str, events: str) -> Figure:
    return Figure(
        name=f"flamby-{task}",
        title=title,
        jobs=partial(jobs, task),
        judge=partial(judge, task=task),
        draw=partial(draw, task=task),
        choices=_choices_text(task, events),
        trials={"quick": 2, "paper": 5},
        summary=closing,
        histories=False,
    )


HEART = _figure(
    "heart",
    "FLamby's Fed-Heart-Disease: four hospitals, logistic regression",
    """\
Test patients: 104, 89, 16 and 45; the pooled test is normalised by the pooled training rows. Kept back to choose by:
40, 35, 6 and 17, so that a metric of 0.7 there, in the mean of the centres, has a standard error of 6 points: the
choice is mostly noise, and so is what follows from it.""",
)
TCGA = _figure(
    "tcga",
    "FLamby's Fed-TCGA-BRCA: six regions, Cox regression",
    """\
Risk sets stay within a minibatch. Age is in years beside indicators of 0 and 1, so that steps of 0.1 overshoot far:
FedAvg falls below 50 % for one seed in five, published as here. Deaths among the test patients: 14, 4, 8, 3, 2 and 1; a
jackknife says little of a centre with one death (no error at all if every pair is right), so that the error of the mean
of the centres is too small. Deaths among those kept back: 9, 7, 3, 3, 1 and 1, the last of them after everybody else's
time: that centre has no metric, the mean there is over the other five. The published runs are older than the present
form of that program, and the order of their minibatches cannot be had from a seed any more: means over the seeds are
compared, not seeds.""",
)
