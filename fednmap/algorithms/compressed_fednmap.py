"""Compressed FedNMap: FedNMap whose clients send a part of their uplink, with error control.

The method: Huang, Pu and Johansson, Achieving Linear Speedup for Composite Federated Learning, 2026.
The error control: Gao, Islamov and Stich, EControl: Fast Distributed Optimization with Compression and Error Control,
ICLR 2024; without it: Richtarik, Sokolov and Fatkhullin, EF21, NeurIPS 2021. Their combination with FedNMap is this
library's own, see `docs/family.md`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fednmap.algorithms.compressors import ContractiveCompressor, compressor
from fednmap.algorithms.fednmap import FedNMap
from fednmap.algorithms.hyperparameters import check, prox_step
from fednmap.core import Algorithm, Oracle, Regularizer
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
    that is compressed. h_i is what the server knows of G_i, so that h stays the mean of all h_i whatever C does, and
    e_i sums up what the server was not told; $\eta e_i$ of it is sent on. Where C is the identity this is FedNMap.

    K:          entries that top and random keep: an integer, or a fraction of p below 1.
    compressor: "top" keeps the K largest; "random" K entries drawn again in each round from `seed`, the same for all
                clients; "quantised" rounds every entry to `bits` bits, 4 or 8.
    control:    eta, the share of e_i that is sent on. Default, with delta = K/p: EControl's
                $\delta / (3 \sqrt{1 - \delta} (1 + \sqrt{1 - \delta}))$, at most 1. With exact gradients 0
                needs fewer rounds and is exact too: e_i then plays no part, as in EF21. Noise is averaged out only
                where eta > 0.
    pace:       the share of FedNMap's step that the server takes, in (0, 1]. Default: what suits C, so that steps that
                suit FedNMap do here: 1 - sqrt(1 - delta), about delta/2, for random; 20 times that, at most 1, for
                top; 1 for quantised. With few clients per round random may need less.
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
