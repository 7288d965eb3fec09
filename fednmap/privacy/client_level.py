"""Differential privacy of whole clients: each clips what it sends, noise is added to the sum."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fednmap.core import Algorithm, State, with_fields
from fednmap.names import InputError
from fednmap.privacy import accounting
from fednmap.regularizers import Zero
from fednmap.regularizers.parameters import fraction, integer, nonnegative, positive
from fednmap.simulation.loop import dry_run
from fednmap.simulation.participation import PoissonSampler, Uniform
from fednmap.simulation.uplink import Aggregated, Aggregator, Federation, Received, Rounding, Stage, Uplinks

FORGET = 0.5
"""What corrections forget by default where there is noise, by measurement: see `docs/privacy.md`."""

COARSE = 0.1  # of the clip, that rounding for secure aggregation may take
FINE = 2.0  # steps of that rounding, which a client's own noise must exceed
SURE = 10.0  # deviations by which the length of noise is overestimated

SERVER = 1
CLIENT = 2
SITE = 3
ATTACK = 4
"""First number of the address, behind the seed: who draws. No two of them draw the same."""


@dataclass(frozen=True)
class Privacy(Stage, Aggregator):
    r"""Client-level differential privacy, as `uplink` of `simulate` and `run`.

    All that the clients see, and the model, hardly depend on whether client i took part at all. Each client sends
    $s_i$ and builds $h_i$ from it, so that clipping leaves no bias; the released sums are
    $(\varepsilon, \delta)$-private, and everything else is made of them:

    $$
    s_i &= y_i \min(1, C / |y_i|) \\
    \text{mean} &= (\textstyle\sum_i s_i + N(0, (\sigma C)^2 I)) / \text{expected number of clients}, \quad
        \sigma = \text{noise\_multiplier}
    $$

    The mean is NOT divided by the number that came: that would reveal whether i was among them, and with
    one client more the sum of the others would be scaled as well. It costs nothing at the optimum, where $y_i = 0$.

    clip:             C, the largest norm of an uplink; of all vectors of an uplink together, where there are several.
    noise_multiplier: of the noise on the sum, in units of C. 0: clipping alone, private in no sense; the plain mean.
    delta:            of the guarantee, below 1 / n.
    forget:           share of a client's correction that is forgotten per round that it takes part in, for FedNMap,
                      Zhang, FedCanon and SCAFFOLD: without, the noise adds up in h for ever. Default: 0.5 where there
                      is noise, else 0.
    among:            None: the server adds the noise, and is trusted with the clipped uplinks. A number: every client
                      adds its part, so that `among` of them add enough; a round with fewer is not opened.

    Sampling amplifies privacy only if the clients are drawn independently: with partial participation the sampler must
    be `PoissonSampler`. With `among` it does not at all: the server, from which clients hide too, knows which it drew,
    and every round is counted for every client.

    >>> Privacy(clip=1.0, noise_multiplier=1.5).forget
    0.5
    """

    alters_state: ClassVar[bool] = True
    clip: float
    noise_multiplier: float = 0.0
    delta: float = 1e-5
    forget: float = None  # type: ignore[assignment]  # given, or set below
    among: int | None = None

    def __post_init__(self) -> None:
        positive(self, "clip")
        nonnegative(self, "noise_multiplier")
        if self.forget is None:
            object.__setattr__(self, "forget", FORGET if self.noise_multiplier else 0.0)
        fraction(self, "forget")
        accounting.check_delta(self.delta, 1)
        if self.among is not None:
            integer(self, "among", 1)
            if not self.noise_multiplier:
                raise InputError("among says who adds the noise, and there is none; give a noise_multiplier above 0")

    def wrap(self, algorithm: Algorithm) -> Algorithm:
        return with_fields(algorithm, forget=self.forget) if self.forget else algorithm

    def check(self, algorithm: Algorithm, federation: Federation) -> None:
        if self.noise_multiplier:
            accounting.check_delta(self.delta, federation.n)
            coin(federation)
            accounting.accountants()
            if self.among is not None and self.among > federation.n:
                raise InputError(f"among is {self.among}, of {federation.n} clients; it must be at most their number")
            if self.among is not None and federation.weights is not None and not bool((federation.weights > 0).all()):
                raise InputError("among needs the noise of every client, and some have weight 0; use among=None")

    def check_rounding(self, rounding: Rounding, up: State) -> None:
        r"""Raise InputError where secure sums have no room for an uplink with its noise, or their grid is too coarse.

        Noise is longer than assumed here with a probability of at most $\exp(-\text{SURE}^2 / 2)$.
        """
        if rounding.slack > COARSE * self.clip:
            raise InputError(
                f"secagg rounds uplinks by up to {rounding.slack:.2g}, too much for a clip of {self.clip:g}; use 64 "
                "bits, or a smaller secagg_bound"
            )
        noise = 0.0 if self.among is None else self.noise_multiplier * self.clip / self.among**0.5
        if self.among is not None and noise < FINE * rounding.step:
            raise InputError(
                f"secagg rounds to multiples of {rounding.step:.2g}, and a client's own noise has a deviation of "
                f"{noise:.2g}, less than {FINE:g} of them; use 64 bits, or a smaller secagg_bound"
            )
        longest = self.clip + noise * (sum(v.shape[-1] for v in up) ** 0.5 + SURE)
        if longest > rounding.bound:
            raise InputError(
                f"secagg_bound is {rounding.bound:g}, and an uplink is up to {longest:.3g} long with its noise; use a "
                "larger one"
            )

    def apply(self, federation: Federation, uplinks: Uplinks, rounding: Rounding) -> Uplinks:
        sent = clipped(uplinks, self.clip - rounding.slack)  # rounded, it is no longer than clip
        if self.among is None or not self.noise_multiplier:
            return uplinks._replace(sent=sent, known=sent)
        # a state that contained its noise would take it back in the next round
        noised = type(sent)(*(v + self._shares(v, k, federation, uplinks) for k, v in enumerate(sent)))
        return uplinks._replace(sent=noised, known=sent)

    def accepts(self, federation: Federation, ids: Tensor, weight: float) -> bool:
        if not self.noise_multiplier:
            return super().accepts(federation, ids, weight)
        return self.among is None or len(ids) >= self.among  # a round with nobody is noise too

    def aggregate(self, federation: Federation, received: Received) -> Aggregated:
        if not self.noise_multiplier:
            return super().aggregate(federation, received)
        parts, share = received.parts, coin(federation) * (1 - federation.drop)
        if self.among is None:
            deviation = self.noise_multiplier * self.clip * largest_weight(federation)
            parts = [v + gaussian(v, deviation, federation.seed, SERVER, received.t, k) for k, v in enumerate(parts)]
        return Aggregated([v / (share * federation.total) for v in parts], share)

    def spent(self, federation: Federation, rounds: int) -> dict[str, float]:
        """Return epsilon after so many rounds, by privacy loss distributions and by Renyi divergences."""
        if not self.noise_multiplier:
            return {}
        share = coin(federation) if self.among is None else 1.0  # the server knows the sample
        found = accounting.epsilon(self.noise_multiplier, share, rounds, self.delta)
        return {"epsilon": found.pld, "epsilon_rdp": found.rdp}

    def _shares(self, v: Tensor, field: int, federation: Federation, uplinks: Uplinks) -> Tensor:
        """Every client's own part of the noise, by its number."""
        assert self.among is not None
        clip, among, seed = self.clip * largest_weight(federation), self.among, federation.seed
        rows = zip(v.reshape(-1, v.shape[-1]), uplinks.ids.reshape(-1).tolist(), strict=True)
        noise = torch.stack(
            [share_of_noise(r, clip, self.noise_multiplier, among, seed, CLIENT, uplinks.t, i, field) for r, i in rows]
        )
        if federation.weights is not None:  # the sum weighs what is sent
            noise = noise / federation.each[uplinks.ids].to(noise).unsqueeze(-1)
        return noise.reshape(v.shape)


def gaussian(like: Tensor, deviation: float, *address: int) -> Tensor:
    """Return independent N(0, deviation^2) in the shape, dtype and place of `like`: a pure function of the address.

    A run that is resumed, or cut into chunks, adds the same numbers again. A simulation's noise is therefore only as
    secret as its seed; between real parties the seed is a secret of whoever adds the noise.

    >>> gaussian(torch.zeros(2), 1.0, 0, SERVER, 7).equal(gaussian(torch.zeros(2), 1.0, 0, SERVER, 7))
    True
    """
    drawn = np.random.default_rng(address).standard_normal(tuple(like.shape))
    return torch.from_numpy(deviation * drawn).to(like)


def share_of_noise(like: Tensor, clip: float, noise_multiplier: float, among: int, *address: int) -> Tensor:
    """Return the noise that one of `among` clients adds to its vector; together N(0, (noise_multiplier clip)^2).

    The server then adds nothing and sees, by secure aggregation, the noised sum alone. `among` is the number of honest
    clients whose noise must suffice: the least that a round is opened with, less those who may betray theirs. A client
    keeps the state that belongs to the clipped vector WITHOUT this noise: one that held it would give it back in the
    next round (`docs/privacy.md`).

    >>> four = [share_of_noise(torch.zeros(10_000), 1.0, 2.0, 4, client, 7) for client in range(4)]
    >>> round(float(sum(four).std()), 1)
    2.0
    """
    return gaussian(like, noise_multiplier * clip / among**0.5, *address)


def clipped(uplinks: Uplinks, clip: float) -> State:
    """Return the uplinks with norms of at most `clip`, all vectors of one client together."""
    fields = uplinks.rows()
    norm = torch.stack([v.square().sum(-1) for v in fields]).sum(0).sqrt()
    scale = (clip / norm.clamp_min(clip)).unsqueeze(-1)
    return type(uplinks.sent)(*(v * scale for v in fields))


def check_uplink_can_change(algorithm: Algorithm) -> None:
    """Raise InputError for a method with client state and without `state_after_sending`."""
    algorithm = without_phi(algorithm)
    server, client = algorithm.init(torch.zeros(1, device="cpu"))
    up = dry_run(algorithm, server, client)
    algorithm.state_after_sending(algorithm.broadcast(server), client, up, up)


def without_phi(algorithm: Algorithm) -> Algorithm:
    """The method with phi = 0, to be tried on a short vector: groups, parts and matrices know how long theirs is."""
    if is_dataclass(algorithm) and any(field.name == "phi" and field.init for field in fields(algorithm)):
        return replace(algorithm, phi=Zero())
    return algorithm


def coin(federation: Federation) -> float:
    """Return the probability with which every client takes part; refuse samplers that are not Poisson sampling."""
    sampler: Any = federation.sampler
    if isinstance(sampler, PoissonSampler) or (isinstance(sampler, Uniform) and sampler.share == 1):
        return float(sampler.share)
    raise InputError(
        f"the accounting of a sampled round assumes Poisson sampling, got {sampler}; "
        "use the sampler poisson, or participation = 1"
    )


def largest_weight(federation: Federation) -> float:
    """Return what the weightiest client counts in the sum: the noise must hide it."""
    return 1.0 if federation.weights is None else float(federation.weights.max())
