"""Reshuffled minibatches: a permutation per client and epoch, the same in every way of running; norm-PRR."""

import math
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from drawn import minibatches
from lasso import gap, models
from small import begin, outcome, resume, small
from stochastic import KINDS, SIZES, least_squares

from fednmap import simulate
from fednmap.algorithms import EControlDA, FedNMap, Scaffnew
from fednmap.decentralized import Decentralized, NormED, Ring
from fednmap.names import InputError
from fednmap.problems import Pooled
from fednmap.problems.minibatch import BLOCK, mix, reshuffled_numbers, shuffle
from fednmap.regularizers import L1
from fednmap.runs.experiment import prepare

HELD = torch.tensor([5, 1, 40, 17, 3])
OFFSETS = HELD.cumsum(0) - HELD
EVERYBODY = torch.arange(5)
PHI = L1(0.05)


def rows(clients, t, q, seed=0, batch=8, local_steps=None):
    draw = minibatches(
        seed,
        torch.as_tensor(clients),
        t,
        batch,
        HELD,
        OFFSETS,
        draw=partial(reshuffled_numbers, local_steps=local_steps),
    )
    return draw(q)


def stream(client, steps, batch, local_steps, seed=0):
    """The client's samples in the order in which it sees them."""
    places = [divmod(k, local_steps) for k in range(steps)]
    found = [rows(client, t, q, seed, batch, local_steps) for t, q in places]
    return (torch.cat(found) - OFFSETS[client]).numpy()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000, 4097])
def test_a_shuffle_is_a_permutation(size):
    shuffled = shuffle(mix(np.arange(3, dtype=np.uint64)), np.full(3, size), np.full(size, 2), np.arange(size))
    assert sorted(shuffled) == list(range(size))


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_permutations_are_equally_likely(size):
    many, kinds = 40_000, math.factorial(size)
    which = np.repeat(np.arange(many)[:, None], size, 1)
    shuffled = shuffle(mix(np.arange(many, dtype=np.uint64)), np.full(many, size), which, which * 0 + np.arange(size))
    counts = Counter(map(tuple, shuffled.tolist()))
    expected = many / kinds
    assert len(counts) == kinds
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
    assert abs(chi_square - (kinds - 1)) < 5 * math.sqrt(2 * (kinds - 1))


def test_in_a_long_permutation_neighbours_are_scattered():
    size, many = 1000, 200
    which = np.repeat(np.arange(many)[:, None], size, 1)
    shuffled = shuffle(mix(np.arange(many, dtype=np.uint64)), np.full(many, size), which, which * 0 + np.arange(size))
    steps = np.diff(shuffled, axis=1) % size  # uniform on 1 .. size - 1
    counts = np.bincount(steps.ravel() // 100, minlength=10)
    assert abs(counts / counts.sum() - 0.1).max() < 0.005
    assert abs(np.corrcoef(shuffled[:, :-1].ravel(), shuffled[:, 1:].ravel())[0, 1] + 1 / size) < 0.01


@pytest.mark.parametrize("client", range(5))
@pytest.mark.parametrize(("batch", "local_steps"), [(1, 4), (3, 4), (8, 1), (8, 40), (50, 3)])
def test_every_row_comes_once_in_every_epoch(client, batch, local_steps):
    size = int(HELD[client])
    seen = stream(client, 6 * size // batch + 12, batch, local_steps)
    for epoch in range(len(seen) // size):
        assert sorted(seen[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_without_local_steps_every_round_begins_an_epoch():
    for client, size in enumerate(HELD.tolist()):
        seen = torch.cat([rows(client, 9, q, batch=3) for q in range(2 * size)]) - OFFSETS[client]
        assert sorted(seen[:size].tolist()) == list(range(size))
        assert sorted(seen[size : 2 * size].tolist()) == list(range(size))


def test_orders_differ_between_clients_epochs_rounds_and_seeds():
    sizes = torch.full((4,), 30)

    def order(client, t, q=0, seed=0, local_steps=None):
        offsets = sizes.cumsum(0) - sizes
        found = minibatches(
            seed, torch.tensor(client), t, 30, sizes, offsets, draw=partial(reshuffled_numbers, local_steps=local_steps)
        )(q)
        return tuple((found - offsets[client]).tolist())

    addresses = [(0, 0), (1, 0), (0, 1), (0, 0, 1), (0, 0, 0, 1), (0, 0, 0, -1)]
    assert len({order(*address) for address in addresses}) == len(addresses)
    assert order(0, 0, 3, 0, 5) == order(0, 3, 0, 0, 1)  # the stream does not know how rounds cut it


@pytest.mark.parametrize("group", [[0], [3, 1], [4, 3, 2, 1, 0], [2, 2]])
@pytest.mark.parametrize("q", [0, BLOCK - 1, BLOCK, 5 * BLOCK + 3])
@pytest.mark.parametrize("local_steps", [None, 7])
def test_any_grouping_sees_the_same_samples(group, q, local_steps):
    expected = rows(EVERYBODY, 3, q, local_steps=local_steps)
    assert torch.equal(rows(group, 3, q, local_steps=local_steps), expected[group])
    for i in group:
        assert torch.equal(rows(i, 3, q, local_steps=local_steps), expected[i])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"chunk": 1}, {"chunk": 3}, {"threads": 3, "chunk": 1}], ids=str)
def test_chunks_and_threads_follow_one_trajectory(kind, options):
    problem = KINDS[kind](minibatches="reshuffle", local_steps=4)
    algorithm = FedNMap(PHI, eta_a=0.02, Q=4)
    history = {"rounds": 12, "participation": 0.5, "drop": 0.2}
    assert gap(models(algorithm, problem, **history), models(algorithm, problem, **history, **options)) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_by_itself_sees_what_it_sees_among_others(kind):
    """As on a machine of its own."""
    problem = KINDS[kind](minibatches="reshuffle", local_steps=4)
    for i in range(problem.n):
        alone, among = problem.alone(i).oracle(torch.tensor(0), 3), problem.oracle(torch.tensor(i), 3)
        for q in (0, 5):
            torch.testing.assert_close(alone(problem.start, q), among(problem.start, q), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("batch", [1, 3])
def test_fednmap_with_one_client_and_an_epoch_per_round_is_norm_prr(batch):
    """norm-PRR written out: z_(i+1) = z_i - alpha (grad f(prox(z_i), pi_i) + (z_1 - prox(z_1)) / lambda)."""
    (a, b), size = least_squares().data[1], SIZES[1]
    problem = least_squares(batch_size=batch, minibatches="reshuffle").alone(1)
    alpha, lam, z = 0.02, 0.3, torch.ones(6, dtype=torch.float64)
    algorithm = FedNMap(PHI, eta_a=alpha, Q=size // batch, gamma=lam)
    found, expected = models(algorithm, problem, rounds=20, start=z), []
    for k in range(20):
        draw = minibatches(
            0,
            torch.tensor(0),
            k,
            batch,
            torch.tensor([size]),
            torch.tensor([0]),
            1,
            partial(reshuffled_numbers, local_steps=None),
        )
        pi = torch.cat([draw(q) for q in range(size // batch)])
        assert sorted(pi.tolist()) == list(range(size))
        first = (z - PHI.prox(z, lam)) / lam
        for i in pi.split(batch):
            x = PHI.prox(z, lam)
            z = z - alpha * (a[i].T @ (a[i] @ x - b[i]) / batch + first)
        expected.append(PHI.prox(z, lam))
    assert gap(found, expected) < 1e-12
    assert gap(found[:-1], found[1:]) > 1e-4


def test_the_mean_gradient_of_an_epoch_is_exact():
    problem = least_squares(batch_size=1, minibatches="reshuffle")
    x = torch.linspace(-1, 1, problem.dim, dtype=torch.float64)
    for i, size in enumerate(SIZES):
        g = problem.oracle(torch.tensor(i), 5)
        mean = sum(g(x, q) for q in range(size)) / size
        torch.testing.assert_close(mean, problem.exact().oracle(torch.tensor(i), 5)(x, 0))


def test_with_row_weights_the_mean_gradient_of_an_epoch_is_exact():
    weights = torch.linspace(0.5, 2, sum(SIZES), dtype=torch.float64)
    problem = least_squares(batch_size=1, minibatches="reshuffle", sample_weights=weights)
    g = problem.oracle(torch.tensor(2), 5)
    mean = sum(g(problem.start, q) for q in range(SIZES[2])) / SIZES[2]
    torch.testing.assert_close(mean, problem.exact().oracle(torch.tensor(2), 5)(problem.start, 0))


def test_pooled_sees_the_clients_reshuffled_minibatches():
    problem = least_squares(minibatches="reshuffle")
    pooled = Pooled(problem).oracle(torch.tensor(0), 2)(problem.start, 1)
    torch.testing.assert_close(pooled, problem.oracle(torch.arange(problem.n), 2)(problem.start, 1).mean(0))


@pytest.mark.slow
@pytest.mark.ci(turn=5)
def test_an_epoch_per_round_ends_closer_than_with_replacement():
    algorithm = FedNMap(PHI, eta_a=0.01, Q=12)
    best = models(algorithm, least_squares(None), rounds=4000)[-1]
    last = {}
    for rule in ("replacement", "reshuffle"):
        points = models(algorithm, least_squares(1, minibatches=rule, local_steps=12), rounds=1000)[500:]
        last[rule] = float(torch.stack([(x - best).square().sum() for x in points]).mean())
    assert last["reshuffle"] < 0.5 * last["replacement"]


def test_a_run_that_was_stopped_goes_on_to_the_same_bits(tmp_path):
    whole = begin(tmp_path / "whole", minibatches="reshuffle")
    part = begin(tmp_path / "part", minibatches="reshuffle", rounds=10)
    path = part.path / "run.toml"
    path.write_text(path.read_text().replace("rounds = 10", "rounds = 24"))
    resume(part)
    assert outcome(part) == outcome(whole)
    assert outcome(begin(tmp_path / "other")) != outcome(whole)


def test_what_is_asked_for_wrongly_is_refused_in_one_line():
    with pytest.raises(InputError, match=r"^unknown minibatches 'shuffle'[^\n]*$"):
        least_squares(minibatches="shuffle")
    for steps in (0, -1, 2.0, "4"):
        with pytest.raises(InputError, match=r"^local_steps is [^\n]*at least 1[^\n]*$"):
            least_squares(minibatches="reshuffle", local_steps=steps)


def test_exact_gradients_have_nothing_to_shuffle():
    problems = [least_squares(None, minibatches=rule) for rule in ("replacement", "reshuffle")]
    one, other = (models(FedNMap(PHI, eta_a=0.02, Q=4), p, rounds=5) for p in problems)
    assert gap(one, other) == 0


@pytest.mark.parametrize("method", [FedNMap(PHI, eta_a=0.02, Q=3), EControlDA(PHI), Scaffnew(Q=40, seed=1)])
def test_rounds_that_are_not_those_of_the_epochs_are_told(method):
    problem = least_squares(minibatches="reshuffle", local_steps=4)
    with pytest.warns(UserWarning, match=rf"^{method.name} takes \d+ gradients? in a round, [^\n]* cut for 4: [^\n]*$"):
        models(method, problem, rounds=1)


def test_rounds_that_are_those_of_the_epochs_need_no_word(recwarn):
    for options in ({"local_steps": 4}, {}, {"local_steps": 7, "minibatches": "replacement"}, {"batch_size": None}):
        models(FedNMap(PHI, eta_a=0.02, Q=4), least_squares(**{"minibatches": "reshuffle"} | options), rounds=1)
    assert not recwarn.list


def test_on_a_graph_a_round_is_a_step_of_the_epochs(recwarn):
    """Whatever Q is, which methods on a graph do not have."""
    experiment = prepare(small(algorithms=("norm-ed",), topology="ring", participation=1.0, minibatches="reshuffle"))
    assert experiment.problem.steps_per_round == 1
    next(simulate(experiment.algorithm("norm-ed"), experiment.problem, rounds=1))
    assert not recwarn.list
    on_ring = Decentralized(NormED(PHI, eta_a=0.02), Ring(4))
    with pytest.warns(UserWarning, match=r"^NormED takes 1 gradient in a round, and [^\n]* cut for 4: [^\n]*$"):
        models(on_ring, least_squares(minibatches="reshuffle", local_steps=4), rounds=1)
