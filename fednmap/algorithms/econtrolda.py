"""EControlDA: dual averaging with compressed messages and error control.

Gao et al., Composite Optimization with Error Feedback: the Dual Averaging Approach, 2025.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fednmap.algorithms.compressors import ContractiveCompressor, compressor
from fednmap.algorithms.hyperparameters import check, convex, default
from fednmap.core import Algorithm, FixedPoint, Oracle, Regularizer, Traits
from fednmap.names import InputError
from fednmap.regularizers.parameters import integer


@dataclass(frozen=True)
class EControlDA(Algorithm):
    r"""EControlDA solves $\min f(x) + \phi(x)$ for convex f and $\phi$, one gradient per round.

    Uplinks are compressed: C keeps K of p coordinates. With $\delta = K/p$ and
    $\eta = \delta / (3 \sqrt{1 - \delta} (1 + \sqrt{1 - \delta}))$, at most 1; 0 if K = p:

    $$
    \text{client } i:\quad & D_i = C(g_i(x) - \hat g_i - \eta e_i) \text{ is sent};
        \quad \hat g_i = \hat g_i + D_i, \quad e_i = e_i + \hat g_i - g_i(x) \\
    \text{server}:\quad & \hat g = \hat g + \mean D_i, \quad S = S + \hat g, \quad A = A + 1,
        \quad x = \prox_{(A/\gamma) \phi}(x_0 - S/\gamma)
    $$

    The server keeps $z = x_0 - S/\gamma$.

    K:          coordinates kept: an integer, or a fraction of p below 1.
    compressor: "top" keeps the K largest in magnitude; "random" K coordinates drawn again each round from `seed`,
                the same for all clients; "quantised" rounds every entry to `bits` bits, 4 or 8.
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
    bits: int = 8

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

    def __post_init__(self) -> None:
        check(self, "eta_a", "Q", "K")
        if self.Q != 1:
            raise InputError(f"EControlDA takes one gradient a round: use Q = 1, given {self.Q}")
        default(self, "gamma", 1 / self.eta_a)
        integer(self, "seed", 0)
        integer(self, "bits", 1)
        convex(self)
        self.compression()

    def init(self, start: Tensor) -> tuple[Server, Client]:
        zero = torch.zeros_like(start)
        return self.Server(start, zero, start.new_zeros(())), self.Client(zero, zero)

    def broadcast(self, server: Server) -> Down:
        return self.Down(self.model(server), server.A)

    def local(self, down: Down, client: Client, g: Oracle) -> tuple[Up, Client]:
        (e, ghat), compress = client, self.compression()
        gradient = g(down.x, 0)
        D = compress(gradient - ghat - compress.control(e.shape[-1]) * e, down.A)
        ghat = ghat + D
        return self.Up(D), self.Client(e + ghat - gradient, ghat)

    def aggregate(self, server: Server, up: Up, share: float) -> Server:
        ghat = server.ghat + up.D
        return self.Server(server.z - ghat / self.gamma, ghat, server.A + 1)

    def model(self, server: Server) -> Tensor:
        return self.phi.prox(server.z, server.A / self.gamma)

    def compression(self) -> ContractiveCompressor:
        return compressor(self.compressor, self.K, self.bits, self.seed)
