"""EControlDA: dual averaging with compressed messages and error control.

Gao et al., Composite Optimization with Error Feedback: the Dual Averaging Approach, 2025.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from fednmap.algorithms.hyperparameters import check, convex
from fednmap.core import Algorithm, FixedPoint, Oracle, Regularizer, Traits
from fednmap.names import InputError
from fednmap.regularizers.parameters import integer, positive


@dataclass(frozen=True)
class EControlDA(Algorithm):
    """EControlDA solves min f(x) + phi(x) for convex f and phi with compressed uplinks, one gradient per round.

    C keeps K coordinates, delta = K/p, eta = delta / (3 sqrt(1 - delta) (1 + sqrt(1 - delta))), 0 when K = p::

        client i:  D_i = C(g_i(x) - ghat_i - eta e_i);  ghat_i = ghat_i + D_i;  e_i = e_i + ghat_i - g_i(x);  send D_i
        server:    ghat = ghat + mean D_i;  S = S + ghat;  A = A + 1;  x = prox_{(A/gamma) phi}(x_0 - S/gamma)

    The server keeps z = x_0 - S/gamma.

    K:          coordinates kept: an integer, or a fraction of p below 1.
    compressor: "top" keeps the K largest in magnitude; "random" K coordinates drawn anew in each round from `seed`,
                the same for all clients.
    gamma:      1 / gamma is the step. Default: 1 / eta_a.

    >>> from fednmap.regularizers import L1
    >>> EControlDA(L1(0.1), K=0.05, eta_a=0.1).gamma
    10.0
    """

    phi: Regularizer
    eta_a: float = 0.1
    Q: int = 1
    K: float = 0.1
    gamma: float = None  # type: ignore[assignment]  # given, or set below
    compressor: str = "top"
    seed: int = 0

    traits = Traits(
        composite=True,
        up=1,
        down=1,
        prox="0 + 1",
        fixed_point=FixedPoint.EXACT,
        rate="f convex, Q = 1: O(sqrt(s2/(nT)) + s^(2/3)/T^(2/3) + 1/T)",
        full_participation=True,
        steps_may_change=False,
    )

    class Server(NamedTuple):
        z: Tensor
        ghat: Tensor
        A: Tensor

    class Client(NamedTuple):
        e: Tensor
        ghat: Tensor

    class Down(NamedTuple):
        x: Tensor
        A: Tensor

    class Up(NamedTuple):
        D: Tensor

    class Packed(NamedTuple):
        values: Tensor
        indices: Tensor
        size: Tensor

    def __post_init__(self) -> None:
        check(self, "eta_a", "Q", "K")
        if self.Q != 1:
            raise InputError(f"EControlDA takes one gradient a round: use Q = 1, given {self.Q}")
        if self.K >= 1 and int(self.K) != self.K:
            raise InputError(f"EControlDA: K is {self.K}; use a whole number of coordinates, or a fraction below 1")
        if self.compressor not in ("top", "random"):
            raise InputError(f"EControlDA: compressor is {self.compressor!r}; choose from top, random")
        if self.gamma is None:
            object.__setattr__(self, "gamma", 1 / self.eta_a)
        positive(self, "gamma")
        integer(self, "seed", 0)
        convex(self, self.phi)

    def seeded(self, seed: int) -> Self:
        return replace(self, seed=seed)

    def init(self, start: Tensor) -> tuple[Server, Client]:
        zero = torch.zeros_like(start)
        return self.Server(start, zero, start.new_zeros(())), self.Client(zero, zero)

    def broadcast(self, server: Server) -> Down:
        return self.Down(self.model(server), server.A)

    def local(self, down: Down, client: Client, g: Oracle) -> tuple[Up, Client]:
        e, ghat = client
        gradient = g(down.x, 0)
        D = self._compress(gradient - ghat - self._eta(e.shape[-1]) * e, down.A)
        ghat = ghat + D
        return self.Up(D), self.Client(e + ghat - gradient, ghat)

    def aggregate(self, server: Server, up: Up, share: float) -> Server:
        ghat = server.ghat + up.D
        return self.Server(server.z - ghat / self.gamma, ghat, server.A + 1)

    def model(self, server: Server) -> Tensor:
        return self.phi.prox(server.z, server.A / self.gamma)

    def pack(self, up: Up) -> Packed:
        size = up.D.shape[-1]
        indices = up.D.abs().topk(self._kept(size)).indices
        return self.Packed(up.D.gather(-1, indices), indices.to(torch.int32), indices.new_tensor(size))

    def unpack(self, packed: Packed) -> Up:
        D = packed.values.new_zeros(*packed.values.shape[:-1], int(packed.size))
        return self.Up(D.scatter(-1, packed.indices.long(), packed.values))

    def _kept(self, p: int) -> int:
        return min(p, int(self.K) if self.K >= 1 else max(1, round(self.K * p)))

    def _eta(self, p: int) -> float:
        delta = self._kept(p) / p
        rest = (1 - delta) ** 0.5
        return delta / (3 * rest * (1 + rest)) if delta < 1 else 0.0

    def _compress(self, v: Tensor, A: Tensor) -> Tensor:
        p = v.shape[-1]
        if self.compressor == "top":
            indices = v.abs().topk(self._kept(p)).indices
            return torch.zeros_like(v).scatter(-1, indices, v.gather(-1, indices))
        chosen = np.random.default_rng([self.seed, int(A)]).choice(p, self._kept(p), replace=False)
        mask = torch.zeros(p, dtype=v.dtype, device=v.device).index_fill(0, torch.from_numpy(chosen).to(v.device), 1)
        return v * mask
