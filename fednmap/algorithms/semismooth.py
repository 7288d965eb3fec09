"""Semismooth Newton steps on the normal map, where p is small enough for p x p matrices.

With x = prox(z) and a generalised Jacobian P of prox at z, the normal map F(z) = grad f(x) + (z - x)/gamma has the
generalised Jacobian H P + (I - P)/gamma.

Ouyang and Milzarek, A trust region-type normal map-based semismooth Newton method for nonsmooth nonconvex composite
optimization, 2021.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fednmap.algorithms.quasi_newton import minimised
from fednmap.core import Regularizer

INNER = 60  # steps on a model, at most
CLOSE = 1e-7  # the model's normal map is solved until it is so much smaller than it was
FINE = 1e-4  # differences of prox are so much shorter than what it moves
SHORTEST = 1 / 16  # of a semismooth step; if that does not help prox steps do


def prox_jacobian(phi: Regularizer, z: Tensor, gamma: float) -> Tensor:
    """P (p, p): central differences of prox at z, which every prox has, whatever it is computed by.

    Where prox has a kink within the difference, the mean of both sides' derivatives: a generalised Jacobian too.

    >>> from fednmap.regularizers import L1
    >>> prox_jacobian(L1(1.0), torch.tensor([3.0, 0.5]), 1.0)
    tensor([[1., 0.],
            [0., 0.]])
    """
    eps, scale = torch.finfo(z.dtype).eps, max(float(z.abs().max()), torch.finfo(z.dtype).tiny)
    moved = FINE * float((z - phi.prox(z, gamma)).abs().max())  # kinks are about as far apart as prox moves z
    e = min(max(moved, eps ** (2 / 3) * scale), eps ** (1 / 3) * scale) if moved else eps ** (1 / 3) * scale
    e = 2.0 ** math.floor(math.log2(e))  # z + e and z - e are then as far apart as they say
    steps = torch.eye(len(z), dtype=z.dtype, device=z.device) * e
    return ((phi.prox(z + steps, gamma) - phi.prox(z - steps, gamma)) / (2 * e)).mT


def newton_point(phi: Regularizer, gamma: float, z: Tensor, g: Tensor, H: Tensor, mu: float) -> Tensor:
    """Return z' with prox(z') = argmin_u <g, u> + <u - x, (H + mu I)(u - x)> / 2 + phi(u), x = prox(z).

    The normal map of that model is solved by semismooth Newton steps; where they do not help, by accelerated prox
    steps. Negative eigenvalues of H count as positive. Both use the prox at the step 1/(largest eigenvalue + mu), which
    is well scaled; a subgradient found there makes a z for any gamma.
    """
    values, vectors = torch.linalg.eigh(H)
    values = values.abs() + mu
    largest = max(float(values[-1]), float(values[0]), torch.finfo(z.dtype).tiny)
    floor = 10 * torch.finfo(z.dtype).eps * largest
    B: Tensor = (vectors * values.clamp_min(floor)) @ vectors.mT
    x = phi.prox(z, gamma)
    s = 1 / max(largest, 2 * phi.rho)

    def normal_map(w: Tensor) -> Tensor:
        u = phi.prox(w, s)
        return g + B @ (u - x) + (w - u) / s

    w = x + s / gamma * (z - x)
    F = normal_map(w)
    rounding = torch.finfo(z.dtype).eps * float(g.norm() + largest * x.norm())
    close = max(CLOSE * float(F.norm()), rounding)
    unit = torch.eye(len(z), dtype=z.dtype, device=z.device)
    for _ in range(INNER):
        if not float(F.norm()) > close:
            break
        P = prox_jacobian(phi, w, s)
        step, long = torch.linalg.solve_ex(B @ P + (unit - P) / s, -F).result, 1.0
        while long >= SHORTEST and not float(normal_map(w + long * step).norm()) < (1 - 0.1 * long) * float(F.norm()):
            long /= 2
        if long >= SHORTEST:
            w = w + long * step
        else:
            u = phi.prox(w, s)
            w = minimised(phi, s, u, g + B @ (u - x), B.mv, largest, close)
        F = normal_map(w)
    u = phi.prox(w, s)
    return u + gamma / s * (w - u)
