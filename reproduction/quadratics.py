"""Problems small enough for many runs, with the optimum, the noise and the heterogeneity set by hand."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fednmap.core import Oracle
from fednmap.names import InputError

DIM = 20


class Quadratics:
    r"""f_i(x) = u' A_i u / 2 + <d_i, u> + bumps * sum_j x_j^2 / (1 + x_j^2) + waves * sum_j sin(u_j)^2 with u = x - b.

    The A_i differ and come in pairs whose mean is A; the d_i too, with mean 0. So f does not depend on n, and
    neither does the optimum; only the averaging of noise does. Gradient noise: N(0, noise^2 / 20) a coordinate,
    independent over (seed, client, round, step), so that sigma^2 = noise^2 exactly.

    smallest: the smallest eigenvalue of A; 0: a quarter of them are 0 and the others at least 0.2: convex, PL with an
              l1 norm, not strongly convex.
    largest:  the largest eigenvalue of A.
    spread:   how much curvatures differ, 0 to 1: A_i = R (I +- spread) R' for A = R R'. At 0 the gradients of the
              clients differ by d_i alone, |d_i| = 2 (bounded heterogeneity); above 0 without bound.
    bumps:    0 for a convex f.
    waves:    0 for a convex f; with smallest = largest = a, f is nonconvex for waves > a / 2.
    replicas: so many copies of f in 20 coordinates each, with noise of their own. A method that acts on coordinates
              one by one, with a phi that does, runs them independently.
    """

    def __init__(
        self,
        n: int,
        *,
        smallest: float,
        spread: float,
        largest: float = 1.0,
        noise: float = 0.0,
        bumps: float = 0.0,
        waves: float = 0.0,
        seed: int = 0,
        replicas: int = 1,
    ) -> None:
        if n % 2:
            raise InputError(f"n is {n}; the clients come in pairs, use an even number")
        rng = np.random.default_rng(7)
        rotation, _ = np.linalg.qr(rng.standard_normal((DIM, DIM)))
        centre = np.where(np.arange(DIM) < DIM // 2, rng.standard_normal(DIM) * 2, 0.0)
        values = np.geomspace(smallest or 0.2, largest, DIM)
        if smallest == 0:
            values[: DIM // 4] = 0
        root = rotation * np.sqrt(values)
        signs = rng.choice([-1.0, 1.0], (n // 2, DIM))
        scale = spread * np.concatenate([signs, -signs])
        pull = rng.standard_normal((n // 2, DIM))
        pull *= 2 / np.linalg.norm(pull, axis=1, keepdims=True)
        self.A = torch.from_numpy(np.einsum("jr,ir,kr->ijk", root, 1 + scale, root))
        self.d = torch.from_numpy(np.concatenate([pull, -pull]))
        self.b = torch.from_numpy(centre)
        self.mean = torch.from_numpy(root @ root.T)
        self.n, self.dim, self.noise, self.seed = n, DIM * replicas, noise, seed
        self.bumps, self.waves, self.replicas = bumps, waves, replicas
        self.start = torch.zeros(self.dim, dtype=torch.float64)

    def oracle(self, clients: Tensor, t: int) -> Oracle:
        A, d = self.A[clients], self.d[clients].unsqueeze(-2)

        def g(x: Tensor, q: int) -> Tensor:
            x = self.copies(x)
            exact: Tensor = ((x - self.b) @ A + d + self._bends(x)).flatten(-2)  # A is symmetric
            if not self.noise:
                return exact
            drawn = np.random.default_rng([self.seed, t, q]).standard_normal((self.n, self.dim))
            noisy: Tensor = exact + self.noise * DIM**-0.5 * torch.from_numpy(drawn)[clients]
            return noisy

        return g

    def copies(self, x: Tensor) -> Tensor:
        """The copies' coordinates, (..., replicas, 20)."""
        found: Tensor = x.unflatten(-1, (self.replicas, DIM))
        return found

    def losses(self, x: Tensor) -> Tensor:
        """f of each copy."""
        x = self.copies(x)
        y = x - self.b
        curved = self.bumps * x.square() / (1 + x.square()) + self.waves * y.sin().square()
        return ((y @ self.mean) * y / 2 + curved).sum(-1)

    def loss(self, x: Tensor) -> Tensor:
        return self.losses(x).sum()

    def gradient(self, x: Tensor) -> Tensor:
        x = self.copies(x)
        return ((x - self.b) @ self.mean + self._bends(x)).flatten(-2)

    def _bends(self, x: Tensor) -> Tensor:
        bent = self.bumps * 2 * x / (1 + x.square()).square() if self.bumps else torch.zeros_like(x)
        return bent + self.waves * (2 * (x - self.b)).sin() if self.waves else bent
