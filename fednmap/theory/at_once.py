"""Step sizes without pilots, where the smoothness of f is known: convex losses with exact gradients."""

from __future__ import annotations

from typing import NamedTuple

from fednmap.algorithms.hyperparameters import safe_step
from fednmap.core import Problem, Regularizer, declared
from fednmap.theory.constants import estimate_smoothness


class AtOnce(NamedTuple):
    """eta_hat = eta_a eta_s Q and gamma, with the L they come from."""

    eta_hat: float
    gamma: float
    L: float
    everybody: bool

    def line(self) -> str:
        why = "1 / L" if self.everybody else "1 / (3 max_i L_i), as not everybody is heard"
        return f"eta_a eta_s Q = {self.eta_hat:.4g} = {why}, gamma = {self.gamma:.4g}: L = {self.L:.4g}, no pilots"


def at_once(problem: Problem, phi: Regularizer, *, everybody: bool = True, memory: int = 0) -> AtOnce | None:
    """The steps for `problem`; None where they must be searched for: noisy gradients, or no smoothness declared.

    everybody: all clients are heard in every round: eta_hat = 1 / L of f. Otherwise old gradients of others are in the
               mean, and eta_hat = 1 / (3 max_i L_i), as in SAGA (Defazio, Bach and Lacoste-Julien, 2014).
    memory:    of FedNMap. With it gamma = eta_hat, where its first step is a proximal gradient step; without 4 eta_hat.

    >>> import torch
    >>> from fednmap.problems import LeastSquares
    >>> from fednmap.regularizers import L1
    >>> at_once(LeastSquares([(2 * torch.eye(2), torch.ones(2))]), L1(0.1), memory=10).eta_hat
    0.5
    """
    said = declared(problem)
    if said.smoothness is None or not said.exact_gradients:
        return None
    L = said.smoothness() if everybody or said.start is None else 0.0
    if not everybody and said.start is not None:
        L = estimate_smoothness(problem, said.start, iterations=15).largest
    if not L > 0:
        return None
    L = float(f"{L:.3g}")
    eta_hat = 1 / L if everybody else 1 / (3 * L)
    gamma = safe_step(phi, eta_hat if memory else 4 * eta_hat)
    return AtOnce(min(eta_hat, gamma), gamma, L, everybody)
