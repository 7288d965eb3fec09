"""Step sizes for FedNMap from measured constants and short pilot runs."""

from __future__ import annotations

import math
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from fednmap.algorithms import FedNMap
from fednmap.core import Problem, Regularizer
from fednmap.measure import objective, stationarity
from fednmap.names import InputError
from fednmap.simulation import Diverged, Round, simulate
from fednmap.simulation.loop import first_point
from fednmap.simulation.participation import Sampler
from fednmap.simulation.states import Clients
from fednmap.simulation.uplink import UplinkParts
from fednmap.theory import Steps, estimate_gap, estimate_smoothness, estimate_variance, nonconvex
from fednmap.theory.steps import at_least_one

PILOTS = 16  # the budget, in pilots of full length
LONGEST = 100  # rounds of a pilot, however long the run that it is for
SCALES = (0.25, 1.0, 4.0, 16.0)  # eta_hat of the first pilots, in units of 1 over the smoothness of f
RATIOS = (1.0, 4.0, 16.0, 64.0)  # gamma / eta_hat of the first pilots; the paper uses 4
FEWEST = 4  # pilots, where the budget is small: one for each scale, at the paper's ratio
SHORTEST = 10  # rounds of a pilot that can be judged: before that, steps which diverge can still look good
LAST = 3  # rounds over which a residual is averaged: a single one can be lucky
RISE = 0.01  # psi that rises by RISE psi(x_0) counts as unstable: less can be minibatch noise

Pair = tuple[float, float]
"""eta_a, gamma."""


@dataclass(frozen=True)
class Pilot:
    """A short run with one pair: what it reached, and whether it was stable on the way."""

    eta_a: float
    gamma: float
    rounds: int = 0
    score: float = math.inf
    """Squared natural residual at `measure_gamma` after `rounds` rounds, the mean of the last 3."""
    first: float = math.inf
    """psi(x_0), which depends on gamma: x_0 = prox(start, gamma)."""
    psi: float = math.inf
    """psi after `rounds` rounds."""
    unstable: str = ""
    """Why the pair must not be used; empty for a stable pilot."""


@dataclass(frozen=True, eq=False)
class Tuned:
    """The pair to use, the pair with a proof, and how they were found."""

    eta_a: float
    gamma: float
    pilot: Pilot | None
    """The pilot of the pair; None where every pilot was unstable and the guaranteed pair stands in."""
    guaranteed_eta_a: float
    guaranteed_gamma: float
    steps: Steps
    """Theorem 1 at the measured constants, where the guaranteed pair comes from."""
    L: float
    rho: float
    sigma2: float
    measure_gamma: float
    pilots: tuple[Pilot, ...]
    budget: int
    largest_gamma: float
    """Up to where gamma was searched."""
    spared: bool
    """Whether that limit is the one beyond which the first model loses half its norm."""

    @property
    def rounds_used(self) -> int:
        return sum(pilot.rounds for pilot in self.pilots)

    def lines(self) -> list[str]:
        """Return both pairs, each with one line of explanation."""
        measured = f"L = {self.L:.3g}, rho = {self.rho:.3g}, sigma^2 = {self.sigma2:.3g}"
        unstable = sum(bool(pilot.unstable) for pilot in self.pilots)
        cost = f"{len(self.pilots)} pilots ({unstable} unstable, {self.rounds_used} rounds of at most {self.budget})"
        found = self.pilot
        why = f"the guaranteed pair, because none of {cost} was stable"
        if found is not None:
            reached = f"psi {found.psi:.4g}, squared residual {found.score:.3g}"
            why = f"best of {cost}: {reached} after {found.rounds} rounds"
        half = "where the first model prox(start, gamma) keeps half its norm"
        lines = [
            f"guaranteed  eta_a = {self.guaranteed_eta_a:<9.3g} gamma = {self.guaranteed_gamma:<9.3g} "
            f"Theorem 1 at the measured {measured}; safe, and far too careful in practice",
            f"chosen      eta_a = {self.eta_a:<9.3g} gamma = {self.gamma:<9.3g} {why}",
            f"searched    gamma <= {self.largest_gamma:.3g}, {half}; beyond it a network may end with all weights 0, "
            "a small residual and nothing learnt",
        ]
        return lines if self.spared else lines[:2]


def tune(
    problem: Problem,
    phi: Regularizer,
    *,
    Q: int = 10,
    eta_s: float = 1.0,
    rounds: int = LONGEST,
    eta_a: float | None = None,
    gamma: float | None = None,
    budget: int | None = None,
    measure_gamma: float | None = None,
    residual_only: bool = False,
    start: Tensor | None = None,
    participation: float = 1.0,
    drop: float = 0.0,
    seed: int = 0,
    sampler: Sampler | None = None,
    uplink: UplinkParts | None = None,
    parallel_map: Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]] = map,
) -> Tuned:
    r"""Return eta_a and gamma for FedNMap: from the measured L and rho upward, by pilots with successive halving.

    1. L (power iteration) and sigma^2 are measured at the start; Theorem 1 makes the guaranteed pair of them.
    2. Pilots at eta_hat = eta_a eta_s Q in {1/4, 1, 4, 16} / L and gamma in {1, 4, 16, 64} eta_hat, gamma <= 1/(2 rho);
       here L is that of f, which a whole round feels, and in Theorem 1 the largest of the clients'.
       After a quarter of their length the better half continues, after a half the better half of those.
       Never eta_hat > gamma: where x stays at 0, z shrinks by 1 - eta_hat / gamma per round, which must not swing.
    3. Around the best, pilots of full length with steps and gamma, or gamma alone, doubled and halved, then the
       same by sqrt 2, for as long as the budget lasts.

    Better is a smaller squared natural residual, at one `measure_gamma` for all. Few pilots are short, and better is
    then a smaller psi: in the first rounds the residual of a network rises while it learns. A pilot is unstable if the
    iterate is not finite, or psi is higher than it was at the last look; such a pair is never chosen. If no pilot is
    stable, the guaranteed pair is the answer.

    The residual alone would be fooled by a network whose weights are all 0: a saddle, with a tiny residual and
    nothing learnt. A large gamma starts there, because x_0 = prox(start, gamma), and a large step can fall there. So
    gamma is searched only up to where x_0 keeps half the norm of the start, and a pair is set aside if its psi came
    less than half as far below psi(0) and psi(start) as the lowest psi of a pilot. `residual_only` switches both off.

    rounds:        of the run this is for; a pilot is as long, but at most 100 rounds.
    budget:        rounds that all pilots may take together, a pilot then being budget / 16 long, at most `rounds`.
                   Default: 16 pilots. Below 640 rounds 4 pilots, at gamma = 4 eta_hat, of a quarter of it.
    eta_a, gamma:  a value given is kept, and only the other is searched for.
    measure_gamma: default 1/L, of f.
    start, participation, drop, seed, sampler, uplink: as in `simulate`.
    parallel_map:  how the pilots of step 2 run, as parallel_map(function, arguments), such as
                   `fednmap.runs.process_pool.parallel_map` with a number of processes. The pair found is the same.

    >>> import torch
    >>> from fednmap.problems import LeastSquares
    >>> from fednmap.regularizers import L1
    >>> A, b = torch.eye(3), torch.tensor([3.0, -2.0, 0.1])
    >>> found = tune(LeastSquares([(A, b), (2 * A, b)]), L1(0.1), Q=2, rounds=20)
    >>> found.pilot.score < 1e-6, found.rounds_used <= found.budget
    (True, True)
    """
    at_least_one(rounds=rounds)
    if not phi.rho < math.inf:
        raise InputError(f"{type(phi).__name__} has rho = inf, which no theorem covers: give eta_a and gamma")
    if budget is not None and budget < FEWEST:
        raise InputError(f"the budget is {budget} rounds; {FEWEST} pilots need at least one round each")
    many = budget is None or budget >= PILOTS * 4 * SHORTEST  # they are first judged after a quarter of their length
    count, ratios = (PILOTS, RATIOS) if many else (FEWEST, (RATIOS[1],))
    length = min(rounds, LONGEST if budget is None else budget // count)
    budget = budget or count * length
    z = first_point(problem, start)
    x = phi.prox(z, 0.0)
    smoothness = estimate_smoothness(problem, x, iterations=15)
    L, overall = smoothness.largest, smoothness.overall
    if not 0 < overall < math.inf:
        raise InputError(f"the smoothness measured at the start is {overall:g}; start where gradients vary")
    unit = 1 / overall
    sigma2 = estimate_variance(problem, x, draws=8).largest
    psi = float(objective(problem, phi, x))
    delta = psi if psi > 0 else max(estimate_gap(problem, phi, x, L=L).found, 1e-12)
    steps = nonconvex(L, phi.rho, sigma2, delta, problem.n, Q, rounds)
    safe = min(steps.safe_eta_a, steps.safe_eta_hat / (eta_s * Q)), steps.gamma
    measure_gamma = measure_gamma or unit

    largest = 0.5 / phi.rho if phi.rho > 0 else math.inf
    reference, spared = -math.inf, False
    if not residual_only:
        searched = min(largest, SCALES[-1] * RATIOS[-1] * unit)
        largest = _largest_gamma(phi, z, searched)
        spared = largest < searched and gamma is None
        reference = min(psi, float(objective(problem, phi, torch.zeros_like(z))))
    options: dict[str, Any] = {"rounds": length, "start": z, "participation": participation, "drop": drop, "seed": seed}
    options |= {"sampler": sampler, "uplink": uplink}

    def pair(step: float, pull: float) -> Pair:
        """The pair, with what was given kept, gamma in its range, and eta_hat <= gamma."""
        pull = gamma or min(max(pull, (eta_a or step) * eta_s * Q), largest)
        return eta_a or min(step, pull / (eta_s * Q)), pull

    def rank(pilots: Iterable[Pilot]) -> list[Pilot]:
        """The stable pilots, the best first."""
        ranked = _ranked(pilots, reference)
        return ranked if many or residual_only else sorted(ranked, key=lambda p: p.psi)

    def begin(p: Pair) -> _Run:
        algorithm = FedNMap(phi, eta_a=p[0], eta_s=eta_s, Q=Q, gamma=p[1])
        psi = float(objective(problem, phi, algorithm.model(algorithm.init(z)[0])))
        return _Run(algorithm, problem, measure_gamma, options, Pilot(*p, first=psi))

    # step 2: all to a quarter of the length, the better half of them to a half, the better half of those to the end
    grid = [
        pair(scale * unit / (eta_s * Q), ratio * (eta_a * eta_s * Q if eta_a else scale * unit))
        for scale in SCALES
        for ratio in ratios
    ]
    runs = [begin(p) for p in dict.fromkeys(grid)]
    alive = list(range(len(runs)))

    def advance(end: int, k: int) -> tuple[Pilot, bytes | None]:
        return runs[k].to(end)

    for part, keep in ((length / 4, len(runs) / 2), (length / 2, len(runs) / 4), (length, 0)):
        for k, reached in zip(alive, parallel_map(partial(advance, math.ceil(part)), alive), strict=True):
            runs[k].pilot, runs[k].state = reached
        kept = rank(runs[k].pilot for k in alive)[: math.ceil(keep)]
        alive = [k for k in alive if runs[k].pilot in kept]
    pilots = [run.pilot for run in runs]

    # step 3: pattern search from the best by steps of 2, then of sqrt 2, continuing in a direction that paid
    full = [p for p in pilots if p.rounds == length]
    tried = {f"{p.eta_a:.6g} {p.gamma:.6g}" for p in pilots}  # pairs that differ by rounding alone are the same
    moves = [(f, f) for f in (2.0, 0.5) if eta_a is None] + [(1.0, f) for f in (2.0, 0.5) if gamma is None]
    for power in (1.0, 0.5):
        queue = list(moves) if rank(full) else []
        while queue and sum(p.rounds for p in pilots) + length <= budget:
            move, best = queue.pop(0), rank(full)[0]
            candidate = pair(best.eta_a * move[0] ** power, best.gamma * move[1] ** power)
            if (name := f"{candidate[0]:.6g} {candidate[1]:.6g}") in tried:
                continue
            tried.add(name)
            pilot, _ = begin(candidate).to(length)
            pilots.append(pilot)
            full.append(pilot)
            if rank(full)[0] is pilot:
                queue = [move, *(m for m in moves if m != move)]
    found = next(iter(rank(p for p in pilots if p.rounds == length)), None)
    chosen = safe if found is None else (found.eta_a, found.gamma)
    limit = (largest, spared)
    return Tuned(*chosen, found, *safe, steps, L, phi.rho, sigma2, measure_gamma, tuple(pilots), budget, *limit)


def _largest_gamma(phi: Regularizer, start: Tensor, gamma: float) -> float:
    """`gamma`, lowered until prox(start, gamma) keeps half the norm of the start."""
    half = float(phi.prox(start, 0.0).norm()) / 2
    smallest = gamma * 2.0**-40
    while gamma > smallest and float(phi.prox(start, gamma).norm()) < half:
        gamma /= math.sqrt(2)
    return gamma


def _ranked(pilots: Iterable[Pilot], reference: float) -> list[Pilot]:
    """By residual, but those whose psi came less than half as far below `reference` as the lowest come last."""
    stable = sorted((p for p in pilots if not p.unstable), key=lambda p: p.score)
    lowest = min((p.psi for p in stable), default=reference)
    limit = (lowest + reference) / 2 if lowest < reference else math.inf
    return sorted(stable, key=lambda p: p.psi > limit)


@dataclass(eq=False)
class _Run:
    """A pilot, and the state to continue it from."""

    algorithm: FedNMap
    problem: Problem
    measure_gamma: float
    options: dict[str, Any]
    """Those of `simulate`."""
    pilot: Pilot
    state: bytes | None = None
    """Pickled, for the way between processes."""

    def to(self, end: int) -> tuple[Pilot, bytes | None]:
        """Run until `end` rounds are done, and judge; also after the very first round, where explosions show."""
        pilot, algorithm, last = self.pilot, self.algorithm, None
        if pilot.rounds >= end or pilot.unstable:
            return pilot, self.state
        if self.state is not None:
            t, values, tensors = pickle.loads(self.state)
            server, client = algorithm.init(self.options["start"])
            clients, nobody = Clients(self.problem.n, client), torch.arange(0)
            clients.restore(tensors)
            last = Round(t, type(server)(*values), clients.snapshot(), nobody, nobody, 0, 0)
        rounds = simulate(algorithm, self.problem, after=last, **self.options)
        for stop in (1, end):
            if stop <= pilot.rounds or pilot.unstable:
                continue
            try:
                closing = deque(islice(rounds, stop - pilot.rounds), maxlen=LAST)
            except Diverged as error:
                return replace(pilot, rounds=error.t + 1, score=math.inf, unstable=str(error)), None
            last, models = closing[-1], [algorithm.model(r.server) for r in closing]
            psi, lowest = float(objective(self.problem, algorithm.phi, models[-1])), min(pilot.first, pilot.psi)
            score = fmean(float(stationarity(self.problem, algorithm.phi, x, self.measure_gamma)) for x in models)
            rose = not (math.isfinite(score) and psi <= lowest + RISE * abs(pilot.first))
            why = f"psi is {psi:.4g} after {stop} rounds and was {lowest:.4g}" if rose else ""
            pilot = replace(pilot, rounds=stop, score=score, psi=psi, unstable=why)
        assert last is not None
        return pilot, pickle.dumps((last.t, tuple(last.server), last.clients.tensors()))
