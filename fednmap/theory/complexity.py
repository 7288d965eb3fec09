"""How many rounds an accuracy costs, and up to when more clients or more local steps still pay.

Orders of magnitude: the constants (and, where the paper writes a tilde, the logarithms) are 1, as in the paper.
Reference: Huang, Pu and Johansson, Achieving linear speedup for composite federated learning, 2026.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fednmap.names import InputError
from fednmap.theory.steps import at_least_one, nonnegative, positive


@dataclass(frozen=True)
class Rounds:
    """A communication complexity by its terms; the first is the one that falls as 1/(n Q)."""

    terms: dict[str, float]
    linear_until: float
    """The largest n Q for which the first term is still at least the sum of the others: speedup is linear up to it."""

    @property
    def total(self) -> float:
        return math.fsum(self.terms.values())


def rounds_to(
    eps: float,
    *,
    L: float,
    rho: float,
    sigma2: float,
    n: int,
    Q: int,
    delta_psi: float | None = None,
    mu: float | None = None,
    shift2: float = 0.0,
    gradients2: float = 0.0,
) -> Rounds:
    r"""Rounds to an eps-solution: for nonconvex f given `delta_psi`, under the PL condition given `mu`.

    Nonconvex, 1/T sum_t E|F_nat(x_t)|^2 <= eps^2 (Remark 1):

        (L + rho) delta_psi sigma^2 / (n Q eps^4)                           [noise]
        + (L + rho) delta_psi / eps^2                                       [gap]
        + (mean_i |grad f_i(x_0)|^2 + L^2 |x_0 - z_0|^2) / eps^2            [start]

    PL, E psi(x_T) - psi* <= eps, logarithms dropped (Remark 3):

        (L + rho) sigma^2 / (n Q eps mu^2)                                  [noise]
        + sqrt(L^2 sigma^2 / (eps mu (L + rho + mu)^2))                     [drift]

    The noise term is the only one that n and Q lower, so `linear_until` is the n Q at which it equals the rest.

    >>> need = rounds_to(0.1, L=1.0, rho=0.0, sigma2=1.0, n=5, Q=2, delta_psi=1.0)
    >>> {name: round(value) for name, value in need.terms.items()}, round(need.linear_until)
    ({'noise': 1000, 'gap': 100, 'start': 0}, 100)
    """
    positive(eps=eps, L=L)
    nonnegative(rho=rho, sigma2=sigma2, shift2=shift2, gradients2=gradients2)
    at_least_one(n=n, Q=Q)
    if (delta_psi is None) == (mu is None):
        raise InputError("give delta_psi for the nonconvex setting or mu for the PL setting, one of the two")
    if mu is not None:
        positive(mu=mu)
        one = (L + rho) * sigma2 / (eps * mu**2)
        rest = {"drift": math.sqrt(L**2 * sigma2 / (eps * mu)) / (L + rho + mu)}
    else:
        assert delta_psi is not None
        nonnegative(delta_psi=delta_psi)
        one = (L + rho) * delta_psi * sigma2 / eps**4
        rest = {"gap": (L + rho) * delta_psi / eps**2, "start": (gradients2 + L**2 * shift2) / eps**2}
    others = math.fsum(rest.values())
    until = one / others if others else 0.0
    return Rounds({"noise": one / (n * Q), **rest}, until)
