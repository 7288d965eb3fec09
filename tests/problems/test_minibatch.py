"""Minibatches are addressed by (seed, client, round, step), not consumed."""

import numpy as np
import pytest
import torch
from drawn import minibatches

from fednmap.problems.minibatch import BLOCK

SIZES = torch.tensor([5, 1, 40, 17, 3])
OFFSETS = SIZES.cumsum(0) - SIZES
EVERYBODY = torch.arange(5)


def rows(clients, t, q, seed=0, batch=8, sizes=SIZES):
    clients = torch.as_tensor(clients)
    return minibatches(seed, clients, t, batch, sizes, sizes.cumsum(0) - sizes)(q)


@pytest.mark.parametrize("group", [[0], [3, 1], [4, 3, 2, 1, 0], [2, 2]])
@pytest.mark.parametrize("q", [0, 1, BLOCK - 1, BLOCK, 5 * BLOCK + 3])
def test_any_grouping_sees_the_same_samples(group, q):
    expected = rows(EVERYBODY, 3, q)
    assert torch.equal(rows(group, 3, q), expected[group])
    for i in group:
        assert torch.equal(rows(i, 3, q), expected[i])


def test_steps_may_be_asked_for_in_any_order_and_again():
    draw = minibatches(0, EVERYBODY, 2, 4, SIZES, OFFSETS)
    order = [40, 0, 17, 40, 3, 0]
    assert all(torch.equal(draw(q), rows(EVERYBODY, 2, q, batch=4)) for q in order)


def test_a_larger_batch_begins_with_the_smaller_one():
    assert torch.equal(rows(EVERYBODY, 1, 2, batch=8)[:, :3], rows(EVERYBODY, 1, 2, batch=3))


def test_every_row_belongs_to_its_client():
    for t in range(20):
        for q in range(20):
            drawn = rows(EVERYBODY, t, q)
            assert bool((drawn >= OFFSETS[:, None]).all())
            assert bool((drawn < (OFFSETS + SIZES)[:, None]).all())


def test_every_sample_is_drawn():
    drawn = torch.cat([rows(EVERYBODY, t, 0).flatten() for t in range(200)])
    assert set(drawn.tolist()) == set(range(int(SIZES.sum())))


BINS = 50
WIDE = torch.full((40,), BINS)


def numbers(clients, ts, qs, seeds=(0,), batch=1):
    """Sample numbers in [0, BINS) at every address."""
    offsets = (WIDE.cumsum(0) - WIDE)[clients].unsqueeze(-1)
    drawn = [rows(clients, t, q, seed, batch, WIDE) - offsets for seed in seeds for t in ts for q in qs]
    return torch.stack(drawn).numpy()


AXES = {
    "clients": lambda: numbers(torch.arange(40), range(10), range(10)),
    "rounds": lambda: numbers(torch.tensor([7]), range(4000), [0]),
    "steps": lambda: numbers(torch.tensor([7]), [3], range(4000)),
    "seeds": lambda: numbers(torch.tensor([7]), [3], [0], seeds=range(4000)),
    "batch": lambda: numbers(torch.tensor([7]), [3], [0], batch=4000),
}


def chi_square(values, bins):
    counts = np.bincount(values, minlength=bins)
    expected = len(values) / bins
    return ((counts - expected) ** 2 / expected).sum()


@pytest.mark.parametrize("axis", AXES)
def test_draws_are_uniform_and_neighbours_independent(axis):
    drawn = AXES[axis]().astype(np.int64)
    freedom = BINS - 1
    assert abs(chi_square(drawn.ravel(), BINS) - freedom) < 5 * np.sqrt(2 * freedom)
    # neighbours along the axis: all pairs of a coarser number equally likely
    series = drawn.ravel() // 10
    pairs = series[:-1] * 5 + series[1:]
    assert abs(chi_square(pairs, 25) - 24) < 5 * np.sqrt(2 * 24)


def test_neighbouring_addresses_differ():
    here = rows(EVERYBODY, 4, 4, sizes=WIDE, batch=16)
    for there in (
        rows(EVERYBODY, 5, 4, sizes=WIDE, batch=16),
        rows(EVERYBODY, 4, 5, sizes=WIDE, batch=16),
        rows(EVERYBODY, 4, 4, seed=1, sizes=WIDE, batch=16),
        rows(EVERYBODY, 4, 4, seed=-1, sizes=WIDE, batch=16),
        here.roll(1, 0) % BINS + here // BINS * BINS,
    ):
        assert float((here == there).double().mean()) < 0.15
