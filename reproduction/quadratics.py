"""Problems small enough for many runs, with the optimum, the noise and the heterogeneity set by hand."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fednmap.core import Oracle
from fednmap.names import InputError

DIM = 20


class Quadratics:
    r"""f_i(x) = (x - b)' A_i (x - b) / 2 + <d_i, x - b> + bumps * sum_j x_j^2 / (1 + x_j^2), noise on each gradient.

    The A_i differ and come in pairs whose mean is A; the d_i too, with mean 0. So f does not depend on n, and
    neither does the optimum; only the averaging of noise does. Gradient noise: N(0, noise^2 / p) a coordinate,
    independent over (seed, client, round, step), so that sigma^2 = noise^2 exactly.

    smallest: the smallest eigenvalue of A (the largest is 1); 0: a quarter of them are 0 and the others at least
              0.2: convex, PL with an l1 norm, not strongly convex.
    spread:   how much curvatures differ, 0 to 1: A_i = R (I +- spread) R' for A = R R'. At 0 the gradients of the
              clients differ by d_i alone, |d_i| = 2 (bounded heterogeneity); above 0 without bound.
    bumps:    0 for a convex f.
    """

    def __init__(
        self, n: int, *, smallest: float, spread: float, noise: float = 0.0, bumps: float = 0.0, seed: int = 0
    ) -> None:
        if n % 2:
            raise InputError(f"n is {n}; the clients come in pairs, use an even number")
        rng = np.random.default_rng(7)
        rotation, _ = np.linalg.qr(rng.standard_normal((DIM, DIM)))
        centre = np.where(np.arange(DIM) < DIM // 2, rng.standard_normal(DIM) * 2, 0.0)
        values = np.geomspace(smallest or 0.2, 1.0, DIM)
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
        self.n, self.dim, self.noise, self.bumps, self.seed = n, DIM, noise, bumps, seed
        self.start = torch.zeros(DIM, dtype=torch.float64)

    def oracle(self, clients: Tensor, t: int) -> Oracle:
        A, d = self.A[clients], self.d[clients]

        def g(x: Tensor, q: int) -> Tensor:
            exact: Tensor = torch.matmul(A, (x - self.b).unsqueeze(-1)).squeeze(-1) + d + self._bump(x)
            if not self.noise:
                return exact
            drawn = np.random.default_rng([self.seed, t, q]).standard_normal((self.n, DIM))
            noisy: Tensor = exact + self.noise * DIM**-0.5 * torch.from_numpy(drawn)[clients]
            return noisy

        return g

    def loss(self, x: Tensor) -> Tensor:
        y = x - self.b
        return y @ self.mean @ y / 2 + self.bumps * (x.square() / (1 + x.square())).sum()

    def gradient(self, x: Tensor) -> Tensor:
        return self.mean @ (x - self.b) + self._bump(x)

    def _bump(self, x: Tensor) -> Tensor:
        return self.bumps * 2 * x / (1 + x.square()).square()
