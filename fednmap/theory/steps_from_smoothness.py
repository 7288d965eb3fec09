"""Step sizes without pilots, where the smoothness of f is known: convex losses with exact gradients."""

from __future__ import annotations

import math
from typing import NamedTuple

from fednmap.algorithms.hyperparameters import safe_step
from fednmap.core import Problem, Regularizer, info_of
from fednmap.simulation.loop import first_point
from fednmap.theory.constants import estimate_smoothness


class StepsFromSmoothness(NamedTuple):
    """eta_a and gamma, with the L of f they come from."""

    eta_a: float
    gamma: float
    L: float

    def line(self) -> str:
        steps = f"eta_a = {self.eta_a:.4g}, gamma = {self.gamma:.4g}"
        return f"{steps} from the smoothness of f, L = {self.L:.4g}, no pilots"


def steps_from_smoothness(
    problem: Problem,
    phi: Regularizer,
    *,
    everybody: bool = True,
    memory: int = 0,
    Q: int = 1,
    eta_s: float = 1.0,
    eta_a: float | None = None,
    gamma: float | None = None,
) -> StepsFromSmoothness | None:
    """Return the steps for `problem`; None where they must be searched for: noisy gradients, or no smoothness declared.

    everybody: all clients are counted in every round: eta_hat = eta_a eta_s Q = 1 / L of f. Otherwise old gradients of
               others are in the mean, and eta_hat = 1 / (3 max_i L_i), as in SAGA (Defazio, Bach and Lacoste-Julien,
               2014). With several local steps eta_a is at most 1 / max_i L_i, the limit of each client.
    memory:    of FedNMap. With it gamma = eta_hat, where its first step is a proximal gradient step; without 4 eta_hat.
    eta_a, gamma: a value given is kept; eta_hat is at most gamma.

    >>> import torch
    >>> from fednmap.problems import LeastSquares
    >>> from fednmap.regularizers import L1
    >>> steps_from_smoothness(LeastSquares([(2 * torch.eye(2), torch.ones(2))]), L1(0.1), memory=10).eta_a
    0.5
    """
    said = info_of(problem)
    if said.smoothness is None or not said.exact_gradients:
        return None
    L = float(f"{said.smoothness():.3g}")
    if not 0 < L < math.inf:
        return None
    one = eta_s * Q
    largest = L if everybody and Q == 1 else estimate_smoothness(problem, first_point(problem), iterations=15).largest
    step = 1 / (one * L) if everybody else 1 / (3 * one * largest)
    step = eta_a or (step if Q == 1 else min(step, 1 / largest))
    pull = gamma or safe_step(phi, one * step * (1 if memory else 4))
    return StepsFromSmoothness(eta_a or min(step, pull / one), pull, L)
