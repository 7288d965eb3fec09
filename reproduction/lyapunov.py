"""The Lyapunov functions of the analysis along a run of FedNMap, and the descent that Lemma 4 promises for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fednmap.algorithms import FedNMap
from fednmap.core import Oracle, Problem
from fednmap.measure import normal_map, objective
from fednmap.names import InputError
from fednmap.simulation import simulate
from fednmap.simulation.loop import first_point
from fednmap.theory.steps import c0


@dataclass(frozen=True, eq=False)
class Lyapunov:
    """H_t, L_t and their parts for t = 0 .. rounds - 1, with the run's parameters."""

    H: Tensor
    L: Tensor
    normal_map2: Tensor
    """|F_nor(z_t)|^2."""
    drift: Tensor
    """1/(n Q) sum_i sum_l |z_{i,t}^l - z_t|^2: how far the local iterates of round t move away."""
    algorithm: FedNMap
    smoothness: float
    n: int


def lyapunov(
    algorithm: FedNMap,
    problem: Problem,
    *,
    rounds: int,
    smoothness: float,
    start: Tensor | None = None,
    chunk: int | None = None,
) -> Lyapunov:
    r"""H_t and L_t along a run in which everybody takes part, equations (cH_can) and (lya_cL).

        H_t = psi(prox(z_t)) + gamma C_0 / 2 |F_nor(z_t)|^2
        L_t = H_t + 25 eta_hat L^2 / ((1 - gamma rho)^2) * 1/(n Q) sum_i sum_l |z_{i,t}^l - z_t|^2

    The local iterates are not in the messages. They are rebuilt from the gradients that went through the oracle:
    z_{i,t}^l = z_t - eta_a (g^0 + .. + g^(l-1) + l d_i), where d_i = (z_t - x_t)/gamma + (1 - forget)(h - h_i) and h_i
    is the mean of client i's gradients in the round before.

    smoothness: the L of the assumptions; see `fednmap.theory.estimate_smoothness`.
    """
    if getattr(problem, "weights", None) is not None:
        raise InputError("the analysis is for clients of equal weight; use a problem with weights=None")
    rho, gamma, Q = algorithm.phi.rho, algorithm.gamma, algorithm.Q
    recorder = _Recorder(problem, Q)
    server, client = algorithm.init(first_point(problem, start))
    h_i = client.h.expand(problem.n, -1)
    psi, normal, drift = [], [], []
    for round_ in simulate(algorithm, recorder, rounds=rounds, start=start, chunk=chunk):
        z = server.z
        psi.append(float(objective(problem, algorithm.phi, algorithm.model(server))))
        normal.append(float(normal_map(problem, algorithm.phi, z, gamma).square().sum()))
        g = torch.stack(recorder.gradients)
        d = (z - algorithm.model(server)) / gamma + (1 - algorithm.forget) * (server.h - h_i)
        moves = algorithm.eta_a * (g + d).cumsum(0)[:-1]  # z_t - z_{i,t}^l for l = 1 .. Q-1; for l = 0 it is 0
        drift.append(float(moves.square().sum()) / (problem.n * Q))
        h_i, server = g.mean(0), round_.server
    weight = 25 * algorithm.eta_a * algorithm.eta_s * Q * smoothness**2 / (1 - gamma * rho) ** 2
    psi_, normal_, drift_ = (torch.tensor(v, dtype=torch.float64, device="cpu") for v in (psi, normal, drift))
    H = psi_ + gamma * c0(gamma, rho, smoothness) / 2 * normal_
    return Lyapunov(H, H + weight * drift_, normal_, drift_, algorithm, smoothness, problem.n)


class _Recorder:
    """A problem that remembers the gradients of the current round: gradients[q] is (n, p)."""

    def __init__(self, problem: Problem, Q: int) -> None:
        self._problem, self._Q = problem, Q
        self.n, self.dim = problem.n, problem.dim
        self.start = getattr(problem, "start", None)
        self.loss, self.gradient = problem.loss, problem.gradient
        self.gradients: list[Tensor] = []

    def oracle(self, clients: Tensor, t: int) -> Oracle:
        g = self._problem.oracle(clients, t)

        def recorded(x: Tensor, q: int) -> Tensor:
            value = g(x, q)
            if not self.gradients:
                self.gradients = [value.new_empty(self.n, self.dim) for _ in range(self._Q)]
            self.gradients[q][clients] = value
            return value

        return recorded


@dataclass(frozen=True, eq=False)
class Descent:
    """Lemma 4 on measured runs: for each t_1, the means over the runs of both sides."""

    change: Tensor
    """Mean of L_{t_1 + m} - L_{t_1}."""
    allowed: Tensor
    """Mean of the right-hand side: the decrease, plus what noise may add."""
    error: Tensor
    """Standard error of change - allowed over the runs; 0 for one run."""
    violations: tuple[str, ...]
    """Conditions of Lemma 4 that the runs' parameters do not meet: then nothing is promised."""

    @property
    def holds(self) -> bool:
        """The descent averaged over t_1, and at no t_1 worse than sampling error (4 standard errors) explains."""
        # Rounding of psi: the two sides are differences of numbers of its size.
        excess = self.change - self.allowed
        return bool(excess.mean() <= 0) and bool((excess <= 4 * self.error + 1e-12).all())


def descent(runs: Sequence[Lyapunov], *, m: int = 1, sigma2: float = 0.0) -> Descent:
    r"""Lemma 4, equation (cL_descent), on runs that differ in their minibatches alone: for t_2 = t_1 + m

        E L_{t_2} <= E L_{t_1} - eta_hat m / 9 E|F_nor(z_{t_1})|^2 + 6 eta_hat sigma^2 / (n Q)
                     + (625 + 1375 m) eta_hat eta_a^2 Q L^2 sigma^2 / (1 - gamma rho)^2,

    if eta_hat <= (1 - gamma rho) / (70 m sqrt(L^2 + 1/gamma^2)), gamma <= 1 / (5 (L + rho)) and
    eta_a <= (1 - gamma rho) / (70 Q sqrt(m (L^2 + 1/gamma^2))). It is about the paper's method: forget = 0.
    """
    first = runs[0]
    a, L, n = first.algorithm, first.smoothness, first.n
    if not 1 <= m < len(first.L):
        raise InputError(f"m is {m}; with {len(first.L)} rounds it must be between 1 and {len(first.L) - 1}")
    c, root, eta_hat = 1 - a.gamma * a.phi.rho, math.hypot(L, 1 / a.gamma), a.eta_a * a.eta_s * a.Q
    noise = eta_hat * sigma2 * (6 / (n * a.Q) + (625 + 1375 * m) * a.eta_a**2 * a.Q * L**2 / c**2)
    change = torch.stack([run.L[m:] - run.L[:-m] for run in runs])
    allowed = torch.stack([noise - eta_hat * m / 9 * run.normal_map2[:-m] for run in runs])
    excess = change - allowed
    error = excess.std(0) / math.sqrt(len(runs)) if len(runs) > 1 else torch.zeros_like(excess[0])
    limits = {
        "gamma": (a.gamma, 1 / (5 * (L + a.phi.rho))),
        "eta_hat": (eta_hat, c / (70 * m * root)),
        "eta_a": (a.eta_a, c / (70 * a.Q * math.sqrt(m) * root)),
        "forget": (a.forget, 0.0),
    }
    violations = tuple(
        f"{name} = {value:g} exceeds {limit:g}"
        for name, (value, limit) in limits.items()
        if value > limit * (1 + 1e-12)
    )
    return Descent(change.mean(0), allowed.mean(0), error, violations)
