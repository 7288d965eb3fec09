"""The paper's Table 1 as numbers.

Orders of magnitude: the constants (and, where the paper writes a tilde, the logarithms) are 1, as in the paper.
Reference: Huang, Pu and Johansson, Achieving linear speedup for composite federated learning, 2026.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fednmap.theory.steps import at_least_one, nonnegative


class Rate(NamedTuple):
    """A row of Table 1. `value` is None where the paper or the constants given leave it open; `note` says why."""

    method: str
    objective: str
    regularizer: str
    assumptions: str
    value: float | None
    note: str


def complexity_table(
    sigma2: float,
    n: int,
    Q: int,
    T: int,
    *,
    zeta: float | None = None,
    bound: float | None = None,
    subgradient: float | None = None,
) -> tuple[Rate, ...]:
    r"""Table 1 as numbers: the rates after T rounds for given constants.

    FedDA          f convex              sqrt(sigma^2/(n Q T)) + (zeta^(2/3) + sigma^(2/3)/Q^(1/3)) / T^(2/3)
    EControlDA     f convex, Q = 1       sqrt(sigma^2/(n T)) + sigma^(2/3)/T^(2/3) + 1/T
    Fast-FedDA     f strongly convex     sigma^2/T + Q^2 (zeta^2 + B^2) / T^2
    Zhang 2024     f strongly convex     (sigma^2 + B_psi^2) / (n T)
    Zhang 2026     psi PL                not established
    FedCanon       psi PL                not established
    FedNMap        f nonconvex           sqrt(sigma^2/(n Q T)) + 1/T
    FedNMap        psi PL                sigma^2/(n Q T) + sigma^2/T^2

    The rates bound different quantities (objective gap, or squared stationarity for nonconvex f), so compare how
    they scale, not one row with another.

    Args:
        sigma2, n, Q, T: gradient variance, clients, local steps, rounds.
        zeta: heterogeneity, |grad f_i - grad f| <= zeta; see `estimate_heterogeneity`.
        bound: B, the bound on the iterates that Fast-FedDA assumes.
        subgradient: B_psi, the bound on the subgradients of psi that Zhang's method assumes.

    >>> [row.method for row in complexity_table(1.0, 10, 10, 100) if row.value is not None]
    ['FedNMap', 'FedNMap']
    """
    nonnegative(sigma2=sigma2)
    at_least_one(n=n, Q=Q, T=T)
    s = math.sqrt(sigma2)
    fedda = fast = zhang = econtrol = None
    if zeta is not None:
        nonnegative(zeta=zeta)
        fedda = math.sqrt(sigma2 / (n * Q * T)) + (zeta ** (2 / 3) + s ** (2 / 3) / Q ** (1 / 3)) / T ** (2 / 3)
    if zeta is not None and bound is not None:
        nonnegative(bound=bound)
        fast = sigma2 / T + Q**2 * (zeta**2 + bound**2) / T**2
    if subgradient is not None:
        nonnegative(subgradient=subgradient)
        zhang = (sigma2 + subgradient**2) / (n * T)
    if Q == 1:
        econtrol = math.sqrt(sigma2 / (n * T)) + s ** (2 / 3) / T ** (2 / 3) + 1 / T
    fednmap, under_pl = math.sqrt(sigma2 / (n * Q * T)) + 1 / T, sigma2 / (n * Q * T) + sigma2 / T**2
    return (
        _row("FedDA", "f convex", "convex", "zeta, quadratic", fedda, "needs zeta"),
        _row("EControlDA", "f convex", "convex", "Q = 1", econtrol, f"has no local steps, Q = {Q}"),
        _row("Fast-FedDA", "f strongly convex", "convex", "zeta, bounded iterates", fast, "needs zeta and bound"),
        _row("Zhang 2024", "f strongly convex", "convex", "B_psi", zhang, "needs subgradient"),
        _row("Zhang 2026", "psi PL", "convex", "B_psi", None, "not established"),
        _row("FedCanon", "psi PL", "weakly convex", "B_psi", None, "not established"),
        _row("FedNMap", "f nonconvex", "weakly convex", "-", fednmap, ""),
        _row("FedNMap", "psi PL", "weakly convex", "-", under_pl, ""),
    )


def _row(method: str, objective: str, regularizer: str, assumptions: str, value: float | None, if_open: str) -> Rate:
    return Rate(method, objective, regularizer, assumptions, value, if_open if value is None else "")
