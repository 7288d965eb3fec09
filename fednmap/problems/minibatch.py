"""Which samples a local step sees: a pure function of (seed, client, round, step).

Nothing is consumed, so every way of running (all clients in one batch, one by one, on other machines,
resumed, retried) sees the same minibatches.

Two rules: with replacement (`sample_numbers`), every number is drawn by itself; reshuffled (`reshuffled_numbers`),
a client goes through its rows in an order that is another one in every epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]

Draw = Callable[[int, Numbers, int, Numbers, int, Numbers], Numbers]
"""A rule draw(seed, clients, t, steps, batch, sizes): sample numbers in [0, sizes), (steps, *clients.shape, batch)."""

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
SWAPS = 24  # rounds of the shuffle: a row's place and a pair's places depend on the order before by 2^-20
BLOCK = 10  # steps drawn in one go: the cost of numpy's calls is shared, the numbers are the same


def mix(h: Words) -> Words:
    """Return the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection that scatters its input."""
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


def absorb(h: Words, value: Numbers) -> Words:
    """Return the hash h extended by one more coordinate of the address."""
    return mix(h + (value.astype(np.uint64) + np.uint64(1)) * GOLDEN)


def sample_numbers(seed: int, clients: Numbers, t: int, steps: Numbers, batch: int, sizes: Numbers) -> Numbers:
    """Sample numbers in [0, sizes), with replacement; shape (steps, *clients.shape, batch)."""
    h = mix(np.array([seed], dtype=np.int64).astype(np.uint64))
    h = absorb(absorb(h, clients[None]), np.array([t]))
    h = absorb(h, steps.reshape(-1, *[1] * clients.ndim))
    h = absorb(h[..., None], np.arange(batch))
    scaled = (h >> np.uint64(32)) * sizes[..., None].astype(np.uint64)
    return (scaled >> np.uint64(32)).astype(np.int64)


def step_seed(seed: int, client: int, t: int, step: int) -> int:
    """Return the seed of all other randomness of a local step, such as dropout: a pure function of its address.

    >>> step_seed(0, client=3, t=1, step=2) == step_seed(0, client=3, t=1, step=2) != step_seed(0, 3, 1, 3)
    True
    """
    h = mix(np.array([seed], dtype=np.int64).astype(np.uint64) + GOLDEN)  # other numbers than the minibatch's
    for value in (client, t, step):
        h = absorb(h, np.array([value]))
    return int(h[0] >> np.uint64(1))


@contextmanager
def seeded(number: int, device: torch.device) -> Iterator[None]:
    """Torch's random numbers as after torch.manual_seed(number); afterwards those of before."""
    states = [(torch.get_rng_state(), torch.set_rng_state)]  # torch.random.fork_rng takes 70 times as long
    torch.default_generator.manual_seed(number)
    if device.type != "cpu":
        there = torch.get_device_module(device)
        states.append((there.get_rng_state(device), partial(there.set_rng_state, device=device)))
        there.manual_seed(number)
    try:
        yield
    finally:
        for state, restore in states:
            restore(state)


def reshuffled_numbers(
    seed: int, clients: Numbers, t: int, steps: Numbers, batch: int, sizes: Numbers, *, local_steps: int | None
) -> Numbers:
    """Sample numbers without replacement; shape (steps, *clients.shape, batch).

    A client's rows are one endless stream: number k of it is row pi_e(k mod m) of its m rows, in epoch e = k // m, and
    pi_e is a permutation that (seed, client, e) decides. Batch number b holds numbers b batch .. (b + 1) batch - 1, and
    local step q of round t takes batch number t local_steps + q. So every row comes once in each epoch, whatever the
    sizes: a batch that an epoch does not fill continues in the next one.

    local_steps: of a round; None where that is not known: every round then begins a new epoch.
    """
    round, first = (t, 0) if local_steps is None else (0, t * local_steps)
    places = ((first + steps) * batch).reshape(-1, *[1] * (clients.ndim + 1)) + np.arange(batch)
    epochs, places = np.divmod(places, sizes[..., None])
    since = epochs.min((0, -1), keepdims=True)
    epochs -= since
    several = np.arange(epochs.max() + 1)  # epochs of one client that these steps touch
    h = mix(np.array([seed], dtype=np.int64).astype(np.uint64) ^ GOLDEN)  # other numbers than with replacement
    h = absorb(absorb(absorb(h, clients[..., None]), np.array([round])), since[0] + several)
    which = epochs + np.arange(clients.size).reshape(*clients.shape, 1) * len(several)
    return shuffle(h.ravel(), sizes.repeat(len(several)), which, places)


def shuffle(keys: Words, sizes: Numbers, which: Numbers, x: Numbers) -> Numbers:
    """pi(x), number by number, for permutations pi of 0 .. size - 1 that keys decide; `which` says whose each x is.

    No permutation is stored. Swap-or-not: in each round K - x (modulo size) is x's partner, K drawn by the key, and a
    coin that the pair shares says whether they change places.

    Hoang, Morris and Rogaway, An Enciphering Scheme Based on a Card Shuffle, CRYPTO 2012, figure 1.
    """
    wide, size, x = sizes.astype(np.uint64), sizes.astype(np.int32)[which], x.astype(np.int32)
    for _ in range(SWAPS):
        keys = mix(keys + GOLDEN)
        turn = (((keys >> np.uint64(32)) * wide) >> np.uint64(32)).astype(np.int32)
        partner = turn[which] - x
        partner += size & (partner >> np.int32(31))  # where it is negative
        coin = np.maximum(x, partner).view(np.uint32) * np.uint32(0x9E3779B1)
        coin += keys.astype(np.uint32)[which]
        coin ^= coin >> np.uint32(15)
        coin *= np.uint32(0x85EBCA6B)
        coin ^= coin >> np.uint32(13)
        coin *= np.uint32(0xC2B2AE35)
        x = x ^ ((x ^ partner) & (coin.view(np.int32) >> np.int32(31)))  # the partner where the coin is heads
    return x.astype(np.int64)


def blocks(
    seed: int,
    clients: Tensor,
    t: int,
    batch: int,
    sizes: Tensor,
    offsets: Tensor,
    first: int = 0,
    draw: Draw = sample_numbers,
) -> Callable[[int], Tensor]:
    """block(b): the rows of the clients' minibatches in BLOCK local steps of round t, from step b BLOCK on, shape
    (BLOCK, *clients.shape, batch).

    They are computed on the CPU, where sizes and offsets are.

    first: the number that client 0 has in the whole federation, where only some of its clients are here.
    draw:  the rule; default with replacement.
    """
    clients = clients.cpu()
    ids = np.asarray(clients.numpy() + first)
    held, offset = sizes[clients].numpy(), offsets[clients].unsqueeze(-1)

    def block(number: int) -> Tensor:
        steps = np.arange(number * BLOCK, (number + 1) * BLOCK)
        return torch.from_numpy(draw(seed, ids, t, steps, batch, held)) + offset

    return block


def by_step(block: Callable[[int], Any]) -> Callable[[int], Any]:
    """What belongs to local step q, from block(b), which holds it for BLOCK steps; the last block is remembered."""
    kept: dict[int, Any] = {}

    def step(q: int) -> Any:
        number = q // BLOCK
        if number not in kept:
            kept.clear()
            kept[number] = block(number)
        return kept[number][q % BLOCK]

    return step
