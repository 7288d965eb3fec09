"""FedNMap, Zhang and FedCanon train a one-hidden-layer network with an elastic net on MNIST (the paper's Fig. 1).

Step sizes eta_a = 1/Q and eta_s = 1 for all methods, gamma = 4; six panels, n in {20, 50, 100}, Q in {10, 20}.
"""

from __future__ import annotations

from math import prod

from matplotlib.figure import Figure as Picture

from fednmap.paper import shallow
from fednmap.paper.figure import Figure, caption, lines, panels
from fednmap.paper.trials import Curve, Job, select
from fednmap.paper.verdict import Claim, Verdict, compare, finals, number, ratio

METHODS = ("FedNMap", "Zhang", "FedCanon")
PANELS = {
    "quick": ((20, 10), (50, 10)),
    "paper": ((20, 10), (50, 10), (100, 10), (20, 20), (50, 20), (100, 20)),
}
ROUNDS = 300
BATCHES = {(20, 10): (shallow.BATCH, 32)}  # one panel also with larger minibatches


def jobs(scale: str, trials: int) -> list[Job]:
    """Trial after trial, small panels first: an interrupted run has something of every panel."""
    return [
        shallow.job(method=method, n=n, Q=Q, eta_a=1 / Q, batch=batch, rounds=ROUNDS, trial=trial)
        for trial in range(trials)
        for n, Q in sorted(PANELS[scale], key=prod)
        for batch in BATCHES.get((n, Q), (shallow.BATCH,))
        for method in METHODS
    ]


def _shown(curves: list[Curve]) -> list[tuple[int, int]]:
    return [panel for panel in PANELS["paper"] if all(_of(curves, method, panel) for method in METHODS)]


def _of(curves: list[Curve], method: str, panel: tuple[int, int], batch: int = shallow.BATCH) -> list[Curve]:
    return select(curves, method=method, n=panel[0], Q=panel[1], batch=batch)


def judge(curves: list[Curve]) -> Verdict:
    shown = _shown(curves)
    claims = [_lowest(curves, panel) for panel in shown]
    every = all(claim.holds for claim in claims)
    claims.append(
        Claim(
            "FedNMap has the lowest |F_nat|^2 in all panels",
            "in all six panels",
            f"in {sum(bool(c.holds) for c in claims)} of {len(claims)} panels",
            every if len(shown) == 6 else None if every else False,
        )
    )
    for n in (20, 50, 100):
        if {(n, 10), (n, 20)} <= set(shown):
            claims.append(_falls(curves, (n, 10), (n, 20), f"Q = 20 ends lower than Q = 10 at n = {n}"))
    for Q in (10, 20):
        for few, many in ((20, 50), (50, 100)):
            if {(few, Q), (many, Q)} <= set(shown):
                claims.append(_falls(curves, (few, Q), (many, Q), f"n = {many} ends lower than n = {few} at Q = {Q}"))
    return Verdict(claims, {"After fewer rounds": _by_rounds(curves), "With larger minibatches": _by_batch(curves)})


def _lowest(curves: list[Curve], panel: tuple[int, int]) -> Claim:
    ours = finals(_of(curves, "FedNMap", panel))
    others = {method: finals(_of(curves, method, panel)) for method in METHODS[1:]}
    measured = f"FedNMap {number(ours)}" + "".join(
        f"; {name} {number(v)} (FedNMap {compare(ours, v)}, ratio {ratio(ours, v):.2f})" for name, v in others.items()
    )
    holds = all(compare(ours, v) == "lower" for v in others.values())
    return Claim(f"FedNMap lowest, n = {panel[0]}, Q = {panel[1]}", "lowest of the three", measured, holds)


def _falls(curves: list[Curve], from_: tuple[int, int], to: tuple[int, int], claim: str) -> Claim:
    a, b = (finals(_of(curves, "FedNMap", panel)) for panel in (to, from_))
    measured = f"{number(b)} to {number(a)}: {compare(a, b)}, ratio {ratio(a, b):.2f}"
    return Claim(claim, "improves convergence", measured, compare(a, b) == "lower")


def _against(curves: list[Curve], panel: tuple[int, int], batch: int, rounds: float) -> list[str]:
    ours = finals(_of(curves, "FedNMap", panel, batch), rounds=rounds)
    others = [finals(_of(curves, method, panel, batch), rounds=rounds) for method in METHODS[1:]]
    return [f"{compare(ours, v)}, {ratio(ours, v):.2f}" for v in others]


def _by_rounds(curves: list[Curve]) -> list[list[str]]:
    last = max(c["round"][-1] for c in curves)
    table = [["n, Q", "rounds", "FedNMap against Zhang", "FedNMap against FedCanon"]]
    for panel in _shown(curves):
        for rounds in (last / 3, 2 * last / 3, last):
            table.append([f"{panel[0]}, {panel[1]}", f"{rounds:g}", *_against(curves, panel, shallow.BATCH, rounds)])
    return table


def _by_batch(curves: list[Curve]) -> list[list[str]]:
    table = [["n, Q", "batch", "FedNMap", "Zhang", "FedCanon", "against Zhang", "against FedCanon"]]
    for panel, batches in BATCHES.items():
        for batch in batches:
            if not all(_of(curves, method, panel, batch) for method in METHODS):
                continue
            values = [number(finals(_of(curves, method, panel, batch))) for method in METHODS]
            last = _of(curves, "FedNMap", panel, batch)[0]["round"][-1]
            table.append([f"{panel[0]}, {panel[1]}", f"{batch}", *values, *_against(curves, panel, batch, last)])
    return table


def draw(curves: list[Curve]) -> Picture:
    shown = _shown(curves)
    columns = min(3, len(shown))
    picture, axes = panels(-(-len(shown) // columns), columns, sharey=True)
    for k, (axis, panel) in enumerate(zip(axes, shown, strict=False)):
        lines(axis, {method: _of(curves, method, panel) for method in METHODS}, "stationarity")
        caption(axis, k, f"$n={panel[0]}$, $Q={panel[1]}$")
    return picture


FIGURE = Figure(
    name="nn",
    title="FedNMap against Zhang and FedCanon on a shallow network",
    jobs=jobs,
    judge=judge,
    draw=draw,
    choices=f"{shallow.CHOICES}\n\neta_a = 1/Q, {ROUNDS} rounds.",
    trials={"quick": 2, "paper": 3},
)
