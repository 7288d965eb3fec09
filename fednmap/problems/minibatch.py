"""Which samples a local step sees: a pure function of (seed, client, round, step).

Nothing is consumed, so every way of running (all clients at once, one by one, on other machines,
resumed, retried) sees the same minibatches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

T = TypeVar("T")
U = TypeVar("U")
Words = npt.NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
BLOCK = 10  # steps drawn in one go: the cost of numpy's calls is shared, the numbers are the same


def mix(h: Words) -> Words:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection that scatters its input."""
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


def absorb(h: Words, value: npt.NDArray[np.int64]) -> Words:
    """The hash h extended by one more coordinate of the address."""
    return mix(h + (value.astype(np.uint64) + np.uint64(1)) * GOLDEN)


def sample_numbers(
    seed: int,
    clients: npt.NDArray[np.int64],
    t: int,
    steps: npt.NDArray[np.int64],
    batch: int,
    sizes: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Sample numbers in [0, sizes), with replacement; shape (steps, *clients.shape, batch)."""
    h = mix(np.array([seed], dtype=np.int64).astype(np.uint64))
    h = absorb(absorb(h, clients[None]), np.array([t]))
    h = absorb(h, steps.reshape(-1, *[1] * clients.ndim))
    h = absorb(h[..., None], np.arange(batch))
    scaled = (h >> np.uint64(32)) * sizes[..., None].astype(np.uint64)
    return (scaled >> np.uint64(32)).astype(np.int64)


def blocks(
    seed: int, clients: Tensor, t: int, batch: int, sizes: Tensor, offsets: Tensor, first: int = 0
) -> Callable[[int], Tensor]:
    """block(b): the rows of the clients' minibatches in BLOCK local steps of round t, from step b BLOCK on, shape
    (BLOCK, *clients.shape, batch).

    They are computed on the CPU, where sizes and offsets are.

    first: the number that client 0 has in the whole federation, where only some of its clients are here.
    """
    clients = clients.cpu()
    ids = np.asarray(clients.numpy() + first)
    held, offset = sizes[clients].numpy(), offsets[clients].unsqueeze(-1)

    def block(number: int) -> Tensor:
        steps = np.arange(number * BLOCK, (number + 1) * BLOCK)
        return torch.from_numpy(sample_numbers(seed, ids, t, steps, batch, held)) + offset

    return block


def minibatches(
    seed: int, clients: Tensor, t: int, batch: int, sizes: Tensor, offsets: Tensor, first: int = 0
) -> Callable[[int], Tensor]:
    """rows(q): the rows of the clients' minibatches in local step q of round t, shape (*clients.shape, batch)."""
    return by_step(blocks(seed, clients, t, batch, sizes, offsets, first), lambda drawn, k: drawn[k])


def by_step(block: Callable[[int], T], pick: Callable[[T, int], U]) -> Callable[[int], U]:
    """What belongs to local step q, from what is made for BLOCK steps at once; the last block is remembered."""
    kept: dict[int, T] = {}

    def step(q: int) -> U:
        number = q // BLOCK
        if number not in kept:
            kept.clear()
            kept[number] = block(number)
        return pick(kept[number], q % BLOCK)

    return step
