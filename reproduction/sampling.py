"""Under sampling and lost replies: who still finds a stationary point, and what published programs do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, sqrt
from statistics import mean, stdev

import numpy as np
from matplotlib.figure import Figure as Picture

from reproduction.figure import Figure, caption, lines, panels
from reproduction.sampling_trials import CLIENTS, METHODS, MOMENTUM, PARTS, SETTINGS, jobs
from reproduction.trials import Curve, select
from reproduction.verdict import Claim, Difference, Verdict, compare, holm, number, span, together

NAMES = {"NIID-2021": "SCAFFOLD, NIID-Bench until 8/2022", "NIID-2023": "SCAFFOLD, NIID-Bench since 8/2022"}
SETTLED = 1e-8
STUCK = 1e-4
HALF = 1e-4
NOISY = ("noisy", "noisy-quarter")
NOISY_SETTINGS = PARTS["noisy"].settings
SMALLEST = 1.0
"""Per cent: a smaller difference of accuracies is none."""

RULE = f"""\
Exact gradients: what counts is the largest |grad psi(x)|^2 that is measured in the last tenth of the rounds, over the
first value. A method is exact in a setting if that is {SETTLED:g} or less in every trial; it is not if it is above
{STUCK:g} in every trial; else it is undecided. A claim about all settings holds if it is true of each of them, and is
not judged if one is undecided and none contradicts. Rounds were made more after a first look at which {SETTLED:g} was
not reached everywhere, the values still falling.

Noisy gradients: what counts is the mean of |grad psi(x)|^2 over the last tenth of the rounds, over the first value. Two
such values are compared by the 95 % interval of their ratio, trial by trial, with Holm's correction, as on the other
pages.

Accuracy, per cent, after the last round: a method is at chance if in no trial it is above that of always saying the
most frequent label by more than {SMALLEST:g} point; saying a rarer one gives less. A model whose numbers are no longer
finite counts as always saying the most frequent label. A and B are compared by the mean over the trials of their
differences, trial by trial, with its 95 % interval by Student's t. A is better if the interval is above 0 and the mean
at least {SMALLEST:g} point; it is not if the interval excludes that it is better by {SMALLEST:g} point. A is better or
level if the interval excludes that it is worse by {SMALLEST:g} point, and not if the whole interval is below that. A
claim about several settings is reproduced if it is in each, with Holm's correction for "better".

Bytes are kept with six digits: a method sends half of another if each ratio is 0.5 to within {HALF:g}."""

CHOICES = f"""\
NIID-Bench (Li, Diao, Chen and He, ICDE 2022) reports SCAFFOLD at 10.0 %, which is chance, on CIFAR-10 with 100 parties
of whom 10 % are sampled, in all three partitions, FedAvg at 45 to 66 %. Its program departs from the published method
in three ways (`reproduction/niid_bench.py`): controls begin as random weights w and not as zero; the server's control
moves by the mean over those sampled and not by their sum over all parties (so until commit 66095cc of 17 August 2022;
its README has the tables since January 2021); momentum acts on gradients and not on the correction. The first two
together leave the server's control off by a multiple of w for ever, and every local step moves along w. NIID-2021 has
all three, NIID-2023 is the program since then. In both a client keeps its new control also if its reply is lost; that
program has no losses.

{CLIENTS} clients, labels and numbers of rows unlike (Dirichlet 0.5; CIFAR-10: iid), each weighing what it holds.
psi = f + nu |x|^2; nu |x|^2 is in the prox of FedNMap and Zhang and in the loss of the others. The local step eta_a of
NIID-Bench is {1 - MOMENTUM:g} times that of the others, which momentum {MOMENTUM:g} makes up for. Trial k has its own
partition, start, minibatches and draws of who takes part.

- exact: logistic regression on a9a, exact gradients in float64, Q = {PARTS["exact"].Q}, eta_a = {PARTS["exact"].eta_a},
  nu = {PARTS["exact"].nu}
- noisy, noisy-quarter: as exact, with minibatches of {PARTS["noisy"].batch} rows and eta_a = {PARTS["noisy"].eta_a} or
  {PARTS["noisy-quarter"].eta_a}
- a9a: a network of 32, 16 and 8 units as in NIID-Bench, batch 64, Q = {PARTS["a9a"].Q} (ten epochs of a client of mean
  size), eta_a = {PARTS["a9a"].eta_a}, nu = {PARTS["a9a"].nu:g}
- mnist: a network of 32 units, Q = {PARTS["mnist"].Q} (five epochs), else as a9a
- cifar10: the small convolutional network of NIID-Bench, Q = {PARTS["cifar10"].Q} (ten epochs), few rounds and one
  trial: enough to see what its figure shows in the first ten rounds"""


def judge(curves: list[Curve]) -> Verdict:
    claims = [*_exactness(curves), *_noise(curves), *_accuracies(curves), *_bytes(curves)]
    tables = {"Exact gradients: largest |grad psi|^2 of the last tenth, over the first value": _relative_table(curves)}
    if noisy := _noise_table(curves):
        tables["Noisy gradients: |grad psi|^2, mean of the last tenth, over the first value"] = noisy
    for name in PARTS:
        if _settings(curves, name) and name not in NOISY:
            tables[f"Accuracy on {name}, %" if name != "exact" else "Accuracy with exact gradients, %"] = _table(
                curves, name
            )
    return Verdict(claims, tables, RULE)


def _settings(curves: list[Curve], part: str) -> list[tuple[float, float]]:
    """Those that FedNMap was run in, and every other method that has been run in the part at all."""
    methods = {"FedNMap", *_methods(curves, part)}
    return [s for s in SETTINGS if all(_of(curves, part, method, s) for method in methods)]


def _methods(curves: list[Curve], part: str) -> list[str]:
    return [method for method in METHODS if select(curves, part=part, method=method)]


def _of(curves: list[Curve], part: str, method: str, setting: tuple[float, float]) -> list[Curve]:
    return select(curves, part=part, method=method, share=setting[0], drop=setting[1])


def _words(setting: tuple[float, float]) -> str:
    return f"{100 * setting[0]:g} % sampled, {100 * setting[1]:g} % lost"


def relative(curve: Curve) -> float:
    """The largest value of the last tenth of the rounds, over the first of all."""
    t, y = curve["round"], curve["stationarity"]
    largest = float(y[t >= 0.9 * t[-1]].max())
    return largest / float(y[0]) if np.isfinite(largest) else inf


def exact(curves: Iterable[Curve]) -> bool | None:
    ends = [relative(c) for c in curves]
    if all(e <= SETTLED for e in ends):
        return True
    return False if all(e > STUCK for e in ends) else None


def _exactness(curves: list[Curve]) -> list[Claim]:
    claims, there = [], _settings(curves, "exact")
    for method in _methods(curves, "exact") if there else ():
        found = {s: exact(_of(curves, "exact", method, s)) for s in there}
        worst = {s: max(map(relative, _of(curves, "exact", method, s))) for s in there}
        expected = method in ("FedNMap", "Zhang", "SCAFFOLD")
        agree = [None if v is None else v is expected for v in found.values()]
        holds = False if False in agree else None if None in agree else True
        claims.append(
            Claim(
                f"{NAMES.get(method, method)} is {'' if expected else 'not '}exact under sampling and losses",
                "-",
                "; ".join(f"{_words(s)}: {worst[s]:.0e}" for s in there),
                holds,
                _range(worst.values()) if method in ("FedNMap", "NIID-2021", "NIID-2023") else "",
                min(len(_of(curves, "exact", method, s)) for s in there),
                f"a setting is between {SETTLED:g} and {STUCK:g}",
            )
        )
    return claims


def _floors(curves: list[Curve], part: str, method: str, setting: tuple[float, float]) -> dict[int, float]:
    """Where each trial settles: the mean of the last tenth of the rounds over the first value."""
    found = _of(curves, part, method, setting)
    return {int(c.setting["trial"]): c.final("stationarity") / float(c["stationarity"][0]) for c in found}


def _noise(curves: list[Curve]) -> list[Claim]:
    """With minibatches no method is exact: how the floor of FedNMap depends on the step, and FedAvg's beside it."""
    there = [s for s in NOISY_SETTINGS if all(_settings(curves, part).count(s) for part in NOISY)]
    if not there:
        return []
    floors = {(part, m, s): _floors(curves, part, m, s) for part in NOISY for m in ("FedNMap", "FedAvg") for s in there}
    large, small = NOISY
    steps = {s: compare(floors[small, "FedNMap", s], floors[large, "FedNMap", s]) for s in there}
    against = {
        (part, s): compare(floors[part, "FedNMap", s], floors[part, "FedAvg", s]) for part in NOISY for s in there
    }
    claims = []
    for claim, found, named in (
        (
            "noisy gradients: a quarter of the step lowers FedNMap's final |grad psi|^2",
            list(steps.values()),
            [f"{_words(s)}: {r}" for s, r in steps.items()],
        ),
        (
            "noisy gradients: FedNMap's final |grad psi|^2 is below FedAvg's",
            list(against.values()),
            [f"{_words(s)}, eta_a = {PARTS[part].eta_a:g}: {r}" for (part, s), r in against.items()],
        ),
    ):
        trials = min(r.log.trials for r in found)
        claims.append(Claim.of_ratios(claim, "-", "; ".join(named), found, f"ratios {span(found)}", trials=trials))
    return claims


def _noise_table(curves: list[Curve]) -> list[list[str]]:
    rows = [["method", "eta_a", *map(_words, NOISY_SETTINGS)]]
    for part in NOISY:
        for method in PARTS[part].methods:
            found = [_floors(curves, part, method, s) for s in NOISY_SETTINGS]
            if all(found):
                rows.append([method, f"{PARTS[part].eta_a:g}", *map(number, found)])
    return rows if len(rows) > 1 else []


def _range(values: Iterable[float]) -> str:
    low, high = min(values := list(values)), max(values)
    return f"{low:.0e} to {high:.0e} of the first |grad psi|^2"


def _count(answers: Sequence[bool | None]) -> str:
    """In how many settings it is so, not so, and undecided."""
    words = {True: "yes in", False: "no in", None: "undecided in"}
    found = [f"{word} {answers.count(answer)}" for answer, word in words.items() if answer in answers]
    return f"{', '.join(found)} of {len(answers)} settings"


def _last(curves: list[Curve]) -> dict[int, float]:
    return {int(c.setting["trial"]): 100 * float(c["accuracy"][-1]) for c in curves}


def points(a: dict[int, float], b: dict[int, float]) -> Difference:
    """The mean difference of accuracies, trial by trial."""
    apart = [a[k] - b[k] for k in sorted(a.keys() & b.keys())]
    if len(apart) < 2:
        return Difference(apart[0], -inf, inf, 1.0, inf, 1)
    return Difference.of(mean(apart), stdev(apart) / sqrt(len(apart)), len(apart) - 1, len(apart))


def is_better(found: Iterable[Difference]) -> list[bool | None]:
    found = list(found)
    each = [d.judged("higher", SMALLEST) for d in found]
    return [None if one and not sure else one for one, sure in zip(each, holm([d.p for d in found]), strict=True)]


def is_not_worse(found: Difference) -> bool | None:
    return True if found.low > -SMALLEST else False if found.high < -SMALLEST else None


def _accuracies(curves: list[Curve]) -> list[Claim]:
    claims = []
    for part in ("a9a", "mnist", "cifar10"):
        for setting in _settings(curves, part)[:1]:
            old, least = _last(_of(curves, part, "NIID-2021", setting)), 100 * PARTS[part].chance
            claims.append(
                Claim(
                    f"{NAMES['NIID-2021']}, is at chance on {part} with {_words(setting)}",
                    "10.0 % on CIFAR-10",
                    f"{_number(old)} %, chance is {least:.1f} %",
                    all(v <= least + SMALLEST for v in old.values()),
                    f"{_number(old)} %, chance {least:.1f} %",
                    len(old),
                )
            )
        there = _settings(curves, part)
        for other in ("NIID-2021", "NIID-2023", "FedAvg") if there else ():
            if not _of(curves, part, other, there[0]):
                continue
            ours = {s: _last(_of(curves, part, "FedNMap", s)) for s in there}
            theirs = {s: _last(_of(curves, part, other, s)) for s in there}
            apart = {s: points(ours[s], theirs[s]) for s in there}
            better = other.startswith("NIID")
            answers = is_better(apart.values()) if better else [is_not_worse(d) for d in apart.values()]
            told = [f"{_words(s)}: {_number(ours[s])} and {_number(theirs[s])}, {apart[s].in_points()}" for s in there]
            trials, weakest = min(d.trials for d in apart.values()), max(d.power for d in apart.values())
            claims.append(
                Claim(
                    f"FedNMap is better {'' if better else 'or level '}in accuracy on {part} than "
                    f"{NAMES.get(other, other)}",
                    "-",
                    "; ".join(told),
                    together(answers),
                    _count(answers) if other == "FedAvg" else "",
                    trials,
                    "one trial has no interval" if trials < 2 else "an interval includes both answers",
                    f"{weakest:.2g} points" if weakest < 100 else "none",
                )
            )
    return claims


def _bytes(curves: list[Curve]) -> list[Claim]:
    pairs = [
        (a["bytes_up"][-1], b["bytes_up"][-1])
        for part in PARTS
        for s in _settings(curves, part)
        for a, b in zip(_of(curves, part, "FedNMap", s), _of(curves, part, "SCAFFOLD", s), strict=False)
        if a["round"][-1] == b["round"][-1]
    ]
    if not pairs:
        return []
    ratios = [float(a / b) for a, b in pairs]
    half = all(abs(r - 0.5) <= HALF for r in ratios)
    low, high = f"{min(ratios):.4f}", f"{max(ratios):.4f}"
    said = low if low == high else f"{low} to {high}"
    return [Claim("FedNMap sends half of what SCAFFOLD as published sends", "one vector up", f"ratio {said}", half)]


def _number(values: dict[int, float]) -> str:
    return f"{mean(values.values()):.1f}" + (f" ± {stdev(values.values()):.1f}" if len(values) > 1 else "")


def _table(curves: list[Curve], part: str) -> list[list[str]]:
    rows = [["method", *map(_words, _settings(curves, part)), "MB up, first setting"]]
    for method in METHODS:
        found = [_of(curves, part, method, s) for s in _settings(curves, part)]
        if all(found):
            sent = f"{found[0][0]['bytes_up'][-1] / 1e6:.2f}"
            rows.append([NAMES.get(method, method), *(_number(_last(c)) for c in found), sent])
    return [*rows, ["chance", *(f"{100 * PARTS[part].chance:.1f}" for _ in rows[0][1:-1]), "-"]]


def _relative_table(curves: list[Curve]) -> list[list[str]]:
    rows = [["method", *map(_words, _settings(curves, "exact"))]]
    for method in _methods(curves, "exact"):
        found = [_of(curves, "exact", method, s) for s in _settings(curves, "exact")]
        rows.append([NAMES.get(method, method), *(", ".join(f"{relative(c):.0e}" for c in each) for each in found)])
    return rows


def draw(curves: list[Curve]) -> Picture:
    """Exact gradients and accuracies in the mildest and the hardest setting; noisy gradients in the mildest."""
    shown = [("exact", s, "stationarity") for s in _ends(_settings(curves, "exact"))]
    for part in ("a9a", "mnist"):
        shown += [(part, s, "accuracy") for s in _ends(_settings(curves, part))]
    shown += [("cifar10", s, "accuracy") for s in _settings(curves, "cifar10")]
    shown += [("noisy", s, "stationarity") for s in _settings(curves, "noisy")[:1]]
    columns = 4 if len(shown) > 4 else 2
    picture, axes = panels(-(-len(shown) // columns), columns)
    for axis in axes[len(shown) :]:
        axis.set_axis_off()
    for k, (axis, (part, setting, metric)) in enumerate(zip(axes, shown, strict=False)):
        groups = {m: c for m in METHODS if (c := _of(curves, part, m, setting))}
        lines(axis, groups, metric, log=metric == "stationarity", order=METHODS)
        if metric == "accuracy":
            axis.axhline(PARTS[part].chance, color="0.5", linewidth=0.8)
        y = r"$\|\nabla\psi(x_t)\|^2$" if metric == "stationarity" else "accuracy"
        caption(axis, k, f"{part}: {_words(setting)}", y=y)
        if (legend := axis.get_legend()) is not None:
            legend.remove()
    handles, labels = axes[0].get_legend_handles_labels()
    named = [NAMES.get(label, label) for label in labels]
    picture.legend(handles, named, loc="outside upper center", ncols=3, fontsize="small")
    return picture


def _ends(settings: list[tuple[float, float]]) -> list[tuple[float, float]]:
    return [settings[0], settings[-1]] if len(settings) > 1 else settings


FIGURE = Figure(
    name="sampling",
    title="Sampling and lost replies: exact where published programs are not?",
    jobs=jobs,
    judge=judge,
    draw=draw,
    choices=CHOICES,
    trials={"quick": 1, "paper": 3},
)
