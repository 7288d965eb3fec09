"""Table 1, measured: who reaches a stationary point on unlike clients, and how the error falls in n, Q and T.

Limits: exact gradients, constant steps; rates: noisy gradients, for each (n, Q, T) the best step of a grid.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from math import log
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure as Picture

from fednmap.algorithms import EControlDA, FastFedDA, FedCanon, FedDA, FedNMap, Zhang
from fednmap.core import Algorithm, Regularizer
from fednmap.measure import objective, stationarity
from fednmap.paper.figure import Figure, caption, lines, panels
from fednmap.paper.quadratics import Quadratics
from fednmap.paper.trials import Curve, Job, select
from fednmap.paper.verdict import Claim, Verdict, slope
from fednmap.regularizers import L1, MCP, L1Ball
from fednmap.simulation import Diverged, Record, simulate

MU = 0.2
NOISE = 4.0

PHI: dict[str, Regularizer] = {
    "convex": L1(0.1),
    "strongly convex": L1(0.1),
    "PL": L1(0.1),
    "nonconvex": MCP(0.1, 8.0),
    "constrained": L1Ball(3.0),
}
PROBLEMS: dict[str, Callable[..., Quadratics]] = {
    "convex": partial(Quadratics, smallest=0.0, spread=0.0),
    "strongly convex": partial(Quadratics, smallest=MU, spread=0.0),
    "PL": partial(Quadratics, smallest=0.0, spread=0.8),
    "nonconvex": partial(Quadratics, smallest=MU, spread=0.8, bumps=0.5),
    "constrained": partial(Quadratics, smallest=0.0, spread=0.8),
}


def algorithm(method: str, phi: Regularizer, step: float, Q: int) -> Algorithm:
    """The method with effective step eta_a eta_s Q = step, eta_s = 1."""
    if method == "FedNMap":  # as in the theorems, gamma does not move with the step
        return FedNMap(phi, eta_a=step / Q, Q=Q, gamma=1.0)
    if method == "FedNMap-4":
        return FedNMap(phi, eta_a=step / Q, Q=Q, gamma=4 * step)
    if method == "EControlDA":
        return EControlDA(phi, eta_a=step, K=5)
    if method == "Fast-FedDA":
        return FastFedDA(phi, eta_a=step / Q, Q=Q, mu=MU)
    return {"FedDA": FedDA, "Zhang": Zhang, "FedCanon": FedCanon}[method](phi, eta_a=step / Q, Q=Q)


class Row(NamedTuple):
    """A row of Table 1: what it assumes, and the exponents of n, Q and T in its leading term; None: no statement."""

    method: str
    problem: str
    rate: str
    n: float | None = None
    Q: float | None = None
    T: float | None = None

    def stated(self, factor: str) -> float | None:
        """The exponent; where O~ hides a logarithm, that of log(T)/T over the values tested."""
        exponent: float | None = getattr(self, factor)
        if factor == "T" and self.rate.startswith("O~"):
            return slope(FACTORS["T"], [log(T) / T for T in FACTORS["T"]])
        return exponent


ROWS = (
    Row("FedDA", "convex", "O(sqrt(s2/(nQT)) + ...)", -0.5, -0.5, -0.5),
    Row("EControlDA", "convex", "O(sqrt(s2/(nT)) + ...), Q = 1", -0.5, None, -0.5),
    Row("Fast-FedDA", "strongly convex", "O~(s2/T + ...)", 0.0, 0.0, -1.0),
    Row("Zhang", "strongly convex", "O~((s2 + B2)/(nT))", -1.0, 0.0, -1.0),
    Row("Zhang", "PL", "not established"),
    Row("FedCanon", "PL", "not established"),
    Row("FedNMap", "nonconvex", "O(sqrt(s2/(nQT)) + 1/T)", -0.5, -0.5, -0.5),
    Row("FedNMap", "PL", "O~(s2/(nQT) + s2/T^2)", -1.0, -1.0, -1.0),
    Row("FedNMap-4", "nonconvex", "outside the theorem"),
    Row("FedNMap-4", "PL", "outside the theorem"),
)
METHODS = ("FedDA", "EControlDA", "Fast-FedDA", "Zhang", "FedCanon", "FedNMap")
CENTRE = {"n": 8, "Q": 4, "T": 128}
FACTORS: dict[str, tuple[int, ...]] = {"n": (2, 8, 32), "Q": (1, 4, 16), "T": (32, 128, 512)}
STEPS = (1.0, 0.5, 0.25, 0.12, 0.06, 0.03)
LIMIT_ROUNDS = 1000
SLACK = 0.15
SETTLED = 1e-12

RULE = f"""\
Limits: a method reaches a stationary point if |F_nat|^2 falls to {SETTLED:g} of its first value; it is still falling if
its last value is below half of that at a quarter of the rounds, with the exponent of that fall; else it stalls.

Rates: for each (n, Q, T) and step the error is the geometric mean over the trials, and the best step of the grid
counts. The error is psi(x) - psi* averaged over the last tenth of the rounds; for nonconvex f the mean of |F_nat|^2
over all rounds, which Theorem 1 bounds. The exponent in n, Q or T is the slope of a least-squares line in logarithms,
the other two factors fixed at n = 8, Q = 4, T = 128 (EControlDA: Q = 1, 4 T rounds). A stated rate holds if every
measured exponent is at most the stated one plus {SLACK}: a rate is an upper bound, a faster fall agrees with it. Where
the paper writes O~, hiding a logarithm, the stated exponent of T is that of log(T)/T over the values tested; the claim
says so where the verdict depends on it."""

CHOICES = f"""\
Synthetic quadratics in 20 dimensions (`fednmap/paper/quadratics.py`); f is the same for every n.

- convex: a quarter of the eigenvalues of A are 0, the clients' gradients differ by constants, l1 norm 0.1
- strongly convex: the same with eigenvalues {MU:g} to 1
- PL: as convex, with curvatures that differ by up to 80 % among the clients, so that zeta is not bounded
- nonconvex: a term 0.5 sum x^2/(1 + x^2), differing curvatures, MCP(0.1, 8), which is weakly convex
- constrained: the PL loss on the l1 ball of radius 3; neither zeta nor the subgradients of psi are bounded, so of all
  methods' assumptions only FedNMap's hold

Limits: n = 8, Q = 10 (EControlDA Q = 1), effective step 0.5, no noise. Rates: sigma^2 = {NOISE**2:g}, effective steps
{", ".join(map(str, STEPS))}. EControlDA keeps 5 of 20 coordinates; Fast-FedDA knows mu = {MU:g}.
FedNMap has gamma = 1: in Theorems 1 and 2 gamma is a constant while the step shrinks. FedNMap-4 has gamma = 4 times the
effective step, the ratio of the paper's figures, and is outside the theorems when the step shrinks."""


def jobs(scale: str, trials: int) -> list[Job]:
    limits = [
        Job(_setting("limit", method, problem, 0), partial(limit, method, problem, LIMIT_ROUNDS))
        for problem in PROBLEMS
        for method in METHODS
        if method in ("Zhang", "FedCanon", "FedNMap") or not PHI[problem].rho  # the others need a convex phi
    ]
    rates = [
        Job(_setting("rate", row.method, row.problem, trial), partial(rate, row, trial))
        for trial in range(trials)
        for row in ROWS
    ]
    return limits + rates


def _setting(part: str, method: str, problem: str, trial: int) -> dict[str, str | int]:
    return {"part": part, "method": method, "problem": problem.replace(" ", "-"), "trial": trial}


def limit(method: str, problem: str, rounds: int) -> list[Record]:
    """|F_nat(x_t)|^2 with exact gradients."""
    phi, f = PHI[problem], PROBLEMS[problem](8)
    Q, step = (1, 0.5) if method == "EControlDA" else (10, 0.5)
    kind = algorithm(method, phi, step, Q)
    common = {"n": 8.0, "Q": float(Q), "step": step}
    x = kind.model(kind.init(f.start)[0])
    records = [{"round": 0.0, **common, "value": float(stationarity(f, phi, x, 1.0))}]
    try:
        for r in simulate(kind, f, rounds=rounds):
            if (r.t + 1) % (rounds // 50) == 0:
                value = float(stationarity(f, phi, kind.model(r.server), 1.0))
                records.append({"round": r.t + 1.0, **common, "value": value})
    except Diverged as error:
        records.append({"round": error.t + 1.0, **common, "value": float("inf")})
    return records


def rate(row: Row, trial: int) -> list[Record]:
    """The error for every (n, Q, T) of the cross through the centre and every step; T is in the column `round`."""
    records = []
    for n, Q, T in _cross(row):
        for step in STEPS:
            value = _error(row, n, Q, T, step, trial)
            records.append({"round": float(T), "n": float(n), "Q": float(Q), "step": step, "value": value})
    return records


def _cross(row: Row) -> list[tuple[int, int, int]]:
    """The settings (n, Q, T): one factor moves, the others stay; without local steps there are as many more rounds."""
    only_one = row.method == "EControlDA"
    points = []
    for factor, values in FACTORS.items():
        for value in values:
            at = CENTRE | {factor: value}
            if only_one:
                at |= {"T": at["T"] * CENTRE["Q"], "Q": 1}
            points.append((at["n"], at["Q"], at["T"]))
    return list(dict.fromkeys(points))


def _error(row: Row, n: int, Q: int, T: int, step: float, trial: int) -> float:
    phi, f = PHI[row.problem], PROBLEMS[row.problem](n, noise=NOISE, seed=trial)
    kind = algorithm(row.method, phi, step, Q)
    found = []
    try:
        for r in simulate(kind, f, rounds=T):
            if row.problem == "nonconvex":
                found.append(float(stationarity(f, phi, kind.model(r.server), 1.0)))
            elif r.t >= 0.9 * T:
                found.append(float(objective(f, phi, kind.model(r.server))) - optimum(row.problem))
    except Diverged:
        return float("inf")
    return float(np.mean(found))


@cache
def optimum(problem: str) -> float:
    """psi*, by proximal gradient steps from the start until nothing moves."""
    phi, f = PHI[problem], PROBLEMS[problem](2)
    x = f.start
    for _ in range(5000):
        x = phi.prox(x - f.gradient(x), 1.0)
    return float(objective(f, phi, x))


def judge(curves: list[Curve]) -> Verdict:
    claims = []
    for row in ROWS:
        found = {factor: exponent(curves, row, factor) for factor in FACTORS if _moves(row, factor)}
        stated = {factor: s for factor in found if (s := row.stated(factor)) is not None}
        measured = ", ".join(f"{factor}^{s:.2f}" for factor, s in found.items())
        holds = all(found[f] <= s + SLACK for f, s in stated.items()) if stated else None
        if holds and any(found[f] > getattr(row, f) + SLACK for f in stated):
            measured += "; it would not hold without the allowance for the logarithm"
        claims.append(Claim(f"{row.method}, {row.problem}: rate in n, Q, T", row.rate, measured, holds))
    reached = {(m, p): outcome(c[0]) for m in METHODS for p in PROBLEMS if (c := _limit(curves, m, p))}
    everywhere = [reached["FedNMap", p] for p in PROBLEMS]
    claims.append(
        Claim(
            "FedNMap needs no bound on heterogeneity or subgradients",
            "no additional assumptions",
            "; ".join(f"{p}: {text}" for p, text in zip(PROBLEMS, everywhere, strict=True)),
            all(text.startswith("reached") for text in everywhere),
        )
    )
    claims.append(
        Claim(
            "the other methods on the constrained problem, where their assumptions fail",
            "no guarantee",
            "; ".join(f"{m}: {reached[m, 'constrained']}" for m in METHODS if m != "FedNMap"),
            None,
        )
    )
    table = [["method", *PROBLEMS]]
    table += [[m, *(reached.get((m, p), "needs convex phi") for p in PROBLEMS)] for m in METHODS]
    errors = [["row of Table 1", "factor", "values", "errors at the best step", "best steps", "exponent"]]
    for row in ROWS:
        for factor in FACTORS:
            if _moves(row, factor):
                x, y, steps = best(curves, row, factor)
                errors.append(
                    [
                        f"{row.method}, {row.problem}",
                        factor,
                        ", ".join(f"{v:g}" for v in x),
                        ", ".join(f"{v:.2e}" for v in y),
                        ", ".join(f"{v:g}" for v in steps),
                        f"{slope(x, y):.2f}",
                    ]
                )
    return Verdict(claims, {"Limits with exact gradients": table, "Rates with noise": errors}, RULE)


def _moves(row: Row, factor: str) -> bool:
    return row.method != "EControlDA" or factor != "Q"


def _limit(curves: list[Curve], method: str, problem: str) -> list[Curve]:
    return select(curves, part="limit", method=method, problem=problem.replace(" ", "-"))


def outcome(curve: Curve) -> str:
    """Where a run with exact gradients ended."""
    t, y = curve["round"], curve["value"]
    if not np.isfinite(y[-1]):
        return "diverged"
    if y.min() <= SETTLED * y[0]:
        return f"reached {y[-1]:.0e} by round {t[np.argmax(y <= SETTLED * y[0])]:g}"
    quarter = int(np.searchsorted(t, t[-1] / 4))
    if y[-1] < y[quarter] / 2:
        return f"falling as T^{slope(t[[quarter, -1]].tolist(), y[[quarter, -1]].tolist()):.1f}, now {y[-1]:.0e}"
    return f"stalls at {y[-1]:.0e}"


def best(curves: list[Curve], row: Row, factor: str) -> tuple[list[float], list[float], list[float]]:
    """Along one factor: its values, the errors at the best step, and that step."""
    trials = select(curves, part="rate", method=row.method, problem=row.problem.replace(" ", "-"))
    column = {"n": "n", "Q": "Q", "T": "round"}[factor]
    error = np.exp(np.mean([np.log(np.maximum(c["value"], 1e-300)) for c in trials], axis=0))
    one = trials[0]
    centre = dict(zip("nQT", _cross(row)[1], strict=True))  # the middle value of n
    fixed = np.ones(len(error), dtype=bool)
    for other, name in (("n", "n"), ("Q", "Q"), ("T", "round")):
        if other != factor:
            fixed &= one[name] == centre[other]
    x = sorted(set(one[column][fixed].tolist()))
    y, steps = [], []
    for value in x:
        here = np.flatnonzero(fixed & (one[column] == value))
        k = here[np.argmin(error[here])]
        y.append(float(error[k]))
        steps.append(float(one["step"][k]))
    return x, y, steps


def exponent(curves: list[Curve], row: Row, factor: str) -> float:
    x, y, _ = best(curves, row, factor)
    return slope(x, y)


def draw(curves: list[Curve]) -> Picture:
    """First the limits on the five problems, then the error against n, Q and T."""
    picture, axes = panels(3, 3)
    for k, (axis, problem) in enumerate(zip(axes, PROBLEMS, strict=False)):
        lines(axis, {m: c for m in METHODS if (c := _limit(curves, m, problem))}, "value", order=METHODS)
        caption(axis, k, f"{problem}, exact gradients")
    for k, (axis, factor) in enumerate(zip(axes[5:], FACTORS, strict=False), start=5):
        ticks: set[float] = set()
        for j, row in enumerate(ROWS):
            if _moves(row, factor):
                x, y, _ = best(curves, row, factor)
                axis.plot(x, y, "o-", color=f"C{j}", label=f"{row.method}, {row.problem}")
                ticks |= set(x)
        axis.set(xscale="log", yscale="log")
        axis.set_xticks(sorted(ticks), [f"{v:g}" for v in sorted(ticks)])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        caption(axis, k, f"noisy gradients, error against {factor}", x=factor, y="error at the best step")
    axes[8].set_axis_off()
    axes[8].legend(*axes[5].get_legend_handles_labels(), loc="center", fontsize="small", title="panels (f) to (h)")
    return picture


def closing(curves: list[Curve]) -> str:
    """The measured exponents, one line a row of Table 1 and factor."""
    lines_ = ["method,problem,factor,value,error,step"]
    for row in ROWS:
        for factor in FACTORS:
            if _moves(row, factor):
                points = zip(*best(curves, row, factor), strict=True)
                lines_ += [f"{row.method},{row.problem},{factor},{x:g},{y:.6g},{s:g}" for x, y, s in points]
    return "\n".join(lines_) + "\n"


FIGURE = Figure(
    name="table",
    title="Table 1, measured",
    jobs=jobs,
    judge=judge,
    draw=draw,
    choices=CHOICES,
    trials={"quick": 2, "paper": 5},
    summary=closing,
)
