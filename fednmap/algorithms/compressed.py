"""CompressedFedNMap and EControlDA: compressed uplinks with error control.

FedNMap: Huang, Pu and Johansson, Achieving Linear Speedup for Composite Federated Learning, 2026. EControlDA: Gao et
al., Composite Optimization with Error Feedback: the Dual Averaging Approach, 2025. Error control: Gao, Islamov and
Stich, EControl: Fast Distributed Optimization with Compression and Error Control, ICLR 2024; without it: Richtarik,
Sokolov and Fatkhullin, EF21, NeurIPS 2021. Its combination with FedNMap is new here, see `docs/family.md`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fednmap.algorithms.compressors import ContractiveCompressor, compressor
from fednmap.algorithms.fednmap import FedNMap
from fednmap.algorithms.hyperparameters import check, convex, default, prox_step
from fednmap.core import Algorithm, FixedPoint, Oracle, Regularizer, Traits
from fednmap.names import InputError
from fednmap.regularizers.parameters import fraction, integer, nonnegative, positive


@dataclass(frozen=True)
class CompressedFedNMap(Algorithm):
    r"""CompressedFedNMap is FedNMap with compressed uplinks: the same fixed points, a share of the bytes up.

    With $x = \prox(z) = \prox_{\gamma \phi}(z)$, $c_i = h - h_i$, and C one of top, random, quantised:

    $$
    \text{client } i:\quad & z_i = z, \text{ then } Q \text{ times }
        z_i = z_i - \eta_a (g_i(\prox(z_i)) + (z - x)/\gamma + c_i) \\
    & G_i = (z - z_i)/(\eta_a Q) - (z - x)/\gamma - c_i, \text{ its mean local gradient} \\
    & D_i = C(G_i - h_i - \eta e_i) \text{ is sent}; \quad h_i = h_i + D_i, \quad e_i = e_i + h_i - G_i \\
    \text{server}:\quad & z = z - \text{pace } Q \eta_s \eta_a ((z - x)/\gamma + h + \mean D_i), \qquad h = \mean h_i
    $$

    FedNMap's own uplink is $y_i = (z - x)/\gamma + h + (G_i - h_i)$, of which only the last part is news to the server:
    that is compressed. $h_i$ is what the server knows of $G_i$, so that h stays the mean of all $h_i$ for every C, and
    $e_i$ sums up what was not sent; $\eta e_i$ of it is sent on. Where C is the identity this is FedNMap.

    K:          entries that top and random keep: an integer, or a fraction of p below 1.
    compressor: "top" keeps the K largest; "random" K entries drawn again in each round from `seed`, the same for all
                clients; "quantised" rounds every entry to `bits` bits, 4 or 8.
    control:    $\eta$, the share of $e_i$ that is sent on. Default, with $\delta = K/p$: EControl's
                $\delta / (3 \sqrt{1 - \delta} (1 + \sqrt{1 - \delta}))$, at most 1. With exact gradients 0
                needs fewer rounds and is exact too: $e_i$ is then not used, as in EF21. Noise is averaged out only
                where $\eta > 0$.
    pace:       the share of FedNMap's step that the server takes, in (0, 1]. Default: what suits C, so that steps that
                suit FedNMap do here: $1 - \sqrt{1 - \delta}$, about $\delta/2$, for random; 20 times that, at most 1,
                for top; 1 for quantised. With few clients per round random may need less.
    gamma:      prox parameter, $\gamma \rho < 1$. Default: 4 eta_a eta_s Q, at most 0.5 / rho.

    >>> from fednmap.regularizers import L1
    >>> algorithm = CompressedFedNMap(L1(0.1), eta_a=0.05, Q=10, K=0.01)
    >>> algorithm.compression().pack(torch.ones(1000)).values.shape
    torch.Size([10])
    """

    phi: Regularizer
    eta_a: float = 0.1
    eta_s: float = 1.0
    Q: int = 10
    gamma: float = None  # type: ignore[assignment]  # given, or set below
    K: float = 0.1
    compressor: str = "top"
    bits: int = 8
    control: float | None = None
    pace: float | None = None
    seed: int = 0

    traits = replace(FedNMap.traits, rate="-")

    class Server(NamedTuple):
        z: Tensor
        h: Tensor
        t: Tensor

    class Client(NamedTuple):
        h: Tensor
        e: Tensor

    class Up(NamedTuple):
        D: Tensor

    def __post_init__(self) -> None:
        check(self, "eta_a", "eta_s", "Q", "K")
        prox_step(self, "gamma", 4 * self.eta_a * self.eta_s * self.Q)
        integer(self, "bits", 1)
        integer(self, "seed", 0)
        if self.control is not None:
            nonnegative(self, "control")
        if self.pace is not None:
            positive(self, "pace")
            fraction(self, "pace")
        self.compression()

    @cached_property
    def _fednmap(self) -> FedNMap:
        return FedNMap(self.phi, self.eta_a, self.eta_s, self.Q, self.gamma)

    def init(self, start: Tensor) -> tuple[Server, Client]:
        zero = torch.zeros_like(start)
        return self.Server(start, zero, start.new_zeros(())), self.Client(zero, zero)

    def local(self, down: Server, client: Client, g: Oracle) -> tuple[Up, Client]:
        (h, e), compress = client, self.compression()
        G = self._fednmap.local(FedNMap.Server(down.z, down.h), FedNMap.Client(h), g)[1].h
        eta = compress.control(h.shape[-1]) if self.control is None else self.control
        D = compress(G - h - eta * e, down.t)
        h = h + D
        return self.Up(D), self.Client(h, e + h - G)

    def aggregate(self, server: Server, up: Up, share: float) -> Server:
        z, h, t = server
        pace = self.compression().pace(z.shape[-1]) if self.pace is None else self.pace
        pull = (z - self.phi.prox(z, self.gamma)) / self.gamma
        z = z - pace * self.Q * self.eta_s * self.eta_a * (pull + h + up.D)
        return self.Server(z, h + share * up.D, t + 1)

    def compression(self) -> ContractiveCompressor:
        return compressor(self.compressor, self.K, self.bits, self.seed)


@dataclass(frozen=True)
class EControlDA(Algorithm):
    r"""EControlDA solves $\min f(x) + \phi(x)$ for convex f and $\phi$, one gradient per round.

    Uplinks are compressed: C keeps K of p coordinates. With $\delta = K/p$ and
    $\eta = \delta / (3 \sqrt{1 - \delta} (1 + \sqrt{1 - \delta}))$, at most 1; 0 if $K = p$:

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
