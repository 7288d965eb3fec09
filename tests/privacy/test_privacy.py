"""Differential privacy: what clipping leaves exact, noise that stays bounded, what it costs, who is hidden."""

import json
import math
import re
from itertools import islice

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting import pld, rdp
from lasso import PHI, PROBLEM, L, best, distance, last
from methods import MAKE

from fednmap import InputError, run, simulate
from fednmap import algorithms as A
from fednmap.core import with_fields
from fednmap.privacy import (
    Counted,
    Median,
    Monitor,
    NormClip,
    Privacy,
    PrivateRows,
    epsilon,
    noise_for,
    share_of_noise,
)
from fednmap.privacy.client_level import clipped
from fednmap.privacy.example_level import gradients_per_round
from fednmap.problems import LeastSquares, Logistic
from fednmap.regularizers import L1, GroupLasso, Separable, Zero
from fednmap.simulation.loop import federation_of
from fednmap.simulation.participation import PoissonSampler, Uniform
from fednmap.simulation.quantised import Quantised
from fednmap.simulation.uplink import Federation, Received, Rounding, Stage, Uplinks
from fednmap.testing import heterogeneous

Q = 5
NMAP = MAKE["FedNMap"](PHI, L, Q)
TINY = 0.1  # far below |grad f_i(x*)|, which is 1.06 to 2.58
HALF = {"sampler": PoissonSampler(0.5)}


def error(algorithm, optimum=None, **options):
    return distance(algorithm.model(last(algorithm, **options).server), best(0.2) if optimum is None else optimum)


def mean_error(algorithm, windows, **options):
    """The mean error over each of these windows of rounds."""
    found = [
        distance(algorithm.model(r.server), best(0.2))
        for r in simulate(algorithm, PROBLEM, rounds=max(map(max, windows)), **options)
    ]
    return [sum(found[a:b]) / (b - a) for a, b in windows]


# what clipping leaves exact


def test_the_clip_is_far_below_the_gradients():
    sizes = [float(PROBLEM.alone(i).gradient(best(0.2)).norm()) for i in range(PROBLEM.n)]
    assert min(sizes) > 10 * TINY


@pytest.mark.parametrize("options", [{}, HALF, {"participation": 0.5}, {"drop": 0.3}])
def test_clipping_leaves_the_fixed_point_exact(options):
    assert error(NMAP, rounds=1500, uplink=Privacy(TINY), **options) < 1e-10


def test_clipping_leaves_scaffold_exact():
    assert error(MAKE["SCAFFOLD"](Zero(), L, Q), best(0), rounds=1500, uplink=Privacy(TINY)) < 1e-10


def test_zhang_sends_what_does_not_vanish_so_clipping_leaves_a_bias():
    """Its y_i tend to grad f(x*), which balances a subgradient of phi; FedNMap's contain that balance and vanish."""
    zhang = MAKE["Zhang"](PHI, L, Q)
    gradient = float(PROBLEM.gradient(best(0.2)).norm())
    assert error(zhang, rounds=1000, uplink=Privacy(1.2 * gradient)) < 1e-10
    assert error(zhang, rounds=1000, uplink=Privacy(0.8 * gradient)) > 0.05


class Unknown(Stage):
    """Clips on the server, where the clients do not know of it."""

    def apply(self, federation, uplinks, rounding):
        return uplinks._replace(sent=clipped(uplinks, 0.4))


def test_a_clip_that_the_client_does_not_know_of_is_wrong_for_ever():
    assert error(NMAP, rounds=1500, uplink=Unknown()) > 0.3


def test_two_vectors_are_clipped_together():
    scaffold = MAKE["SCAFFOLD"](Zero(), L, Q)
    sent = []

    class Watch(Stage):
        def apply(self, federation, uplinks, rounding):
            sent.append(torch.cat(list(uplinks.sent), -1).norm(dim=-1))
            return uplinks

    last(scaffold, rounds=3, uplink=[Privacy(0.3), Watch()])
    sizes = torch.cat(sent)
    assert float(sizes.max()) == pytest.approx(0.3)
    assert float(sizes.min()) > 0.29


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_is_clipped_below_the_bound(dtype):
    start = PROBLEM.start.to(dtype)
    plain = last(NMAP, rounds=5, start=start)
    wide = last(NMAP, rounds=5, start=start, uplink=Privacy(1e6))
    assert torch.allclose(plain.server.z, wide.server.z, rtol=1e-5)
    assert wide.server.z.dtype == dtype


def test_an_uplink_that_does_nothing_changes_no_bit():
    plain, inert = last(NMAP, rounds=7, **HALF), last(NMAP, rounds=7, uplink=Stage(), **HALF)
    assert torch.equal(plain.server.z, inert.server.z)
    assert torch.equal(plain.server.h, inert.server.h)


# noise that stays bounded

NOISY = {"clip": 1.0, "noise_multiplier": 0.02}


@pytest.mark.slow
@pytest.mark.ci(turn=7)
@pytest.mark.parametrize("options", [{}, HALF], ids=["everybody", "poisson"])
def test_noise_is_bounded_where_corrections_forget(options):
    early, late = mean_error(NMAP, [(200, 300), (2900, 3000)], uplink=Privacy(**NOISY, forget=0.2), **options)
    assert late < 2 * early < 0.2


def test_noise_adds_up_for_ever_where_nothing_is_forgotten():
    early, late = mean_error(NMAP, [(50, 100), (2900, 3000)], uplink=Privacy(**NOISY, forget=0.0))
    assert late > 3 * early


@pytest.mark.parametrize("name", ["FedNMap", "Zhang", "SCAFFOLD", "FedCanon"])
def test_every_method_with_a_correction_forgets(name):
    algorithm = MAKE[name](Zero() if name == "SCAFFOLD" else PHI, L, Q)
    server = None
    apart = []
    for r in simulate(algorithm, PROBLEM, rounds=1500, uplink=Privacy(**(NOISY | {"clip": 3.0}), forget=0.2)):
        server = r.server
        own = r.clients[torch.arange(PROBLEM.n)][0].mean(0)
        apart.append(float(((server.c if name == "SCAFFOLD" else server.h) - own).norm()))
    assert max(apart[1400:]) < 3 * max(apart[100:200])


@pytest.mark.parametrize("forget", [0.1, 0.5, 1.0])
def test_the_noise_floor_is_the_one_that_was_derived(forget):
    """f_i = mu/2 |x - a_i|^2, Q = 1: (x, e) is linear, and its covariance solves a discrete Lyapunov equation."""
    n, p, mu, step, sigma = 5, 40, 0.5, 0.4, 0.3
    a = torch.randn(n, p, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    root = (mu * p) ** 0.5 * torch.eye(p, dtype=torch.float64)
    problem = LeastSquares([(root, root @ a_i) for a_i in a])
    algorithm = A.FedNMap(Zero(), eta_a=step, Q=1, gamma=1.0)
    privacy = Privacy(clip=100.0, noise_multiplier=sigma / 100, forget=forget)
    square = [
        float((algorithm.model(r.server) - a.mean(0)).square().mean())
        for r in simulate(algorithm, problem, rounds=2500, uplink=privacy)
    ]
    M = np.array([[1 - step * mu, -step * (1 - forget)], [0, 1 - forget]])
    b = np.array([-step, 1.0]) * sigma / n
    S = np.linalg.solve(np.eye(4) - np.kron(M, M), np.outer(b, b).ravel()).reshape(2, 2)
    assert np.mean(square[500:]) == pytest.approx(S[0, 0], rel=0.15)


def test_forgetting_of_exact_rounds_is_only_a_smaller_correction():
    """Its bias is between none and that of a method without correction, and grows with what is forgotten."""
    errors = [error(A.FedNMap(PHI, eta_a=0.1 / L, Q=Q, gamma=1 / L, forget=f), rounds=1000) for f in (0, 0.2, 0.6, 1)]
    assert errors[0] < 1e-10
    assert errors == sorted(errors)
    assert errors[1] < 0.3 * errors[3]


@pytest.mark.parametrize("name", ["FedNMap", "Zhang", "SCAFFOLD", "FedCanon"])
def test_who_clips_and_forgets_keeps_the_mean_of_the_corrections(name):
    """With everybody, and no noise: server's h = mean h_i, whatever is forgotten and clipped."""
    algorithm = MAKE[name](Zero() if name == "SCAFFOLD" else PHI, L, Q)
    for r in simulate(algorithm, PROBLEM, rounds=12, uplink=Privacy(0.5, forget=0.3)):
        own = r.clients[torch.arange(PROBLEM.n)][0].mean(0)
        assert float(((r.server.c if name == "SCAFFOLD" else r.server.h) - own).abs().max()) < 1e-12
    everybody, forgets = torch.arange(PROBLEM.n), with_fields(algorithm, forget=0.3)
    down, before = forgets.broadcast(r.server), r.clients[everybody]
    up, new = forgets.local(down, before, PROBLEM.oracle(everybody, 12))
    assert torch.allclose(forgets.state_after_sending(down, before, up, up)[0], new[0], rtol=0, atol=1e-12)


def test_without_phi_zhang_is_fednmap_and_fedavg_is_one_that_forgets_everything():
    """Clipped and noised alike: Zhang is FedNMap; FedAvg is FedNMap that forgets all, its uplink eta_a Q as long."""
    options = {"rounds": 30, "sampler": PoissonSampler(0.5)}
    nmap, zhang, average = (MAKE[name](Zero(), L, Q) for name in ("FedNMap", "Zhang", "FedAvg"))
    private = Privacy(0.7, 0.1)
    assert torch.allclose(
        last(nmap, uplink=private, **options).server.z, last(zhang, uplink=private, **options).server.x
    )
    short = Privacy(0.7 * average.eta_a * Q)
    forgets = last(nmap, uplink=Privacy(0.7, forget=1.0), **options).server.z
    assert torch.allclose(forgets, last(average, uplink=short, **options).server.x)


# what it costs


@pytest.mark.parametrize(
    ("noise", "share", "rounds"), [(2.5, 1.0, 15), (1.0, 0.1, 300), (0.8, 0.01, 1000), (20, 1.0, 100)]
)
def test_epsilon_is_that_of_the_accountants(noise, share, rounds):
    event = dp_accounting.GaussianDpEvent(noise)
    if share < 1:
        event = dp_accounting.PoissonSampledDpEvent(share, event)
    event = dp_accounting.SelfComposedDpEvent(event, rounds)
    found = epsilon(noise, share, rounds, 1e-5)
    assert found.rdp == pytest.approx(rdp.RdpAccountant().compose(event).get_epsilon(1e-5), rel=1e-12)
    assert found.pld == pytest.approx(pld.PLDAccountant().compose(event).get_epsilon(1e-5), rel=5e-4)  # on a finer grid
    assert found.pld <= found.rdp


@pytest.mark.parametrize(("target", "share", "rounds"), [(1.0, 0.1, 100), (8.0, 1.0, 30), (3.0, 0.02, 500)])
def test_the_noise_is_as_much_as_the_epsilon_needs(target, share, rounds):
    noise = noise_for(target, share, rounds, 1e-5)
    assert epsilon(noise, share, rounds, 1e-5).pld <= target < epsilon(0.99 * noise, share, rounds, 1e-5).pld


def test_epsilon_is_measured_as_the_run_goes_on():
    result = run(NMAP, PROBLEM, rounds=20, every=10, sampler=PoissonSampler(0.5), uplink=Privacy(1.0, 2.0))
    assert result.column("epsilon") == [epsilon(2.0, 0.5, t, 1e-5).pld for t in (0, 10, 20)]
    assert result.column("epsilon_rdp") == [epsilon(2.0, 0.5, t, 1e-5).rdp for t in (0, 10, 20)]


def test_without_noise_nothing_is_claimed():
    assert "epsilon" not in run(NMAP, PROBLEM, rounds=1, uplink=Privacy(1.0)).final


# who is hidden


def test_one_client_more_moves_what_is_released_by_clip_over_expected_number_and_nothing_else():
    privacy, federation = Privacy(clip=2.0, noise_multiplier=1.0), federation_of(PROBLEM, sampler=PoissonSampler(0.5))
    client = torch.tensor([2.0, 0.0])
    total = torch.tensor([5.0, -3.0])
    without = privacy.aggregate(federation, Received(3, torch.tensor([0, 2]), [total], 2.0))
    together = privacy.aggregate(federation, Received(3, torch.tensor([0, 1, 2]), [total + client], 3.0))
    assert torch.allclose(together.up[0] - without.up[0], client / (0.5 * PROBLEM.n))
    assert together.share == without.share == 0.5


def test_a_round_with_nobody_is_noise_too():
    sampler, privacy = PoissonSampler(0.01), Privacy(1.0, 1.0)
    rounds = list(simulate(NMAP, PROBLEM, rounds=5, sampler=sampler, uplink=privacy))
    assert len(rounds[0].counted) == 0
    assert float(rounds[0].server.z.norm()) > 0


def test_the_noise_is_addressed_by_seed_and_round():
    options = {"uplink": Privacy(1.0, 0.5), "sampler": PoissonSampler(0.5), "seed": 3}
    whole = list(simulate(NMAP, PROBLEM, rounds=8, **options))
    again = list(simulate(NMAP, PROBLEM, rounds=8, after=whole[4], **options))
    assert torch.equal(whole[-1].server.z, again[-1].server.z)
    one_by_one = last(NMAP, rounds=8, chunk=1, **options)
    assert torch.allclose(whole[-1].server.z, one_by_one.server.z, rtol=1e-9)
    other = last(NMAP, rounds=8, **(options | {"seed": 4, "sampler": None}))
    same = last(NMAP, rounds=8, **(options | {"sampler": None}))
    assert not torch.allclose(other.server.z, same.server.z)


def test_weights_are_hidden_as_well():
    """The noise is for the weightiest client."""
    light = LeastSquares(list(PROBLEM.data), weights=[0.5, 0.1, 0.1, 0.1, 0.1, 0.1])
    zero = [torch.zeros(20_000, dtype=torch.float64)]
    heard = Privacy(2.0, 3.0).aggregate(federation_of(light), Received(0, torch.arange(6), zero, 1.0))
    assert float(heard.up[0].std()) == pytest.approx(3.0 * 2.0 * 0.5, rel=0.05)


# noise that the clients add


def test_shares_of_noise_make_the_noise():
    like = torch.zeros(50_000, dtype=torch.float64)
    total = sum(share_of_noise(like, 2.0, 1.5, 10, 0, i) for i in range(10))
    assert float(total.std()) == pytest.approx(3.0, rel=0.03)


def test_a_client_keeps_the_state_without_its_noise():
    """A state that knew the noise would give it back in the next round, and the sums would hide less and less."""
    central, own = (last(NMAP, rounds=1, uplink=Privacy(1.0, 0.5, among=m)) for m in (None, 6))
    everybody = torch.arange(PROBLEM.n)
    assert torch.equal(central.clients[everybody].h, own.clients[everybody].h)
    assert not torch.equal(central.server.z, own.server.z)


@pytest.mark.parametrize("weights", [None, [0.5, 0.1, 0.1, 0.1, 0.1, 0.1]])
def test_rounding_for_secure_aggregation_leaves_the_noise_out_of_the_state_too(weights):
    problem, everybody = LeastSquares(list(PROBLEM.data), weights=weights), torch.arange(PROBLEM.n)
    grid, privacy = Quantised(problem.n, bound=64.0, bits=32), Privacy(1.0, 0.5, among=6)
    options = {"rounds": 1, "start": PROBLEM.start}
    plain, masked = (next(simulate(NMAP, problem, uplink=u, **options)) for u in (privacy, [privacy, grid]))
    apart = (plain.clients[everybody].h - masked.clients[everybody].h).abs().max()
    assert 0 < float(apart) < 10 * grid.step


def test_rounding_moves_what_the_state_is_built_from_as_it_moves_what_is_sent():
    """A client knows how its vector was rounded, and not the noise in it."""
    grid, federation = Quantised(6, bound=2.0**14, bits=32), federation_of(PROBLEM)
    known = NMAP.Up(torch.linspace(-1, 1, 6 * 4, dtype=torch.float64).reshape(6, 4))
    sent = NMAP.Up(known.y + 0.3)
    done = grid.apply(federation, Uplinks(0, torch.arange(6), sent, known), Rounding())
    torch.testing.assert_close(done.known.y - known.y, done.sent.y - sent.y, rtol=0, atol=1e-12)
    assert float((done.sent.y - sent.y).abs().max()) > 0.1 * grid.step


def test_what_is_rounded_is_no_longer_than_the_clip():
    """Half a step in every coordinate makes a vector longer: the noise is for clip, not for clip and that."""
    grid, problem = Quantised(6, bound=2.0**14, bits=32), PROBLEM
    assert grid.slack(NMAP.Up(torch.zeros(problem.dim))) > 1e-5
    sent = []

    class Watched(Privacy):
        def aggregate(self, federation, received):
            sent.append(received.parts[0])
            return super().aggregate(federation, received)

    far = torch.full((problem.dim,), 30.0, dtype=torch.float64)
    for i in range(6):  # alone in the sum
        one = lambda n, t, rng, i=i: [i]  # noqa: E731
        next(simulate(NMAP, problem, rounds=1, start=far, sampler=one, uplink=[Watched(0.01), grid]))
    assert min(float(v.norm()) for v in sent) > 0.0098
    assert max(float(v.norm()) for v in sent) <= 0.01
    with pytest.raises(InputError, match="too much for a clip of 1e-05; use 64 bits"):
        next(simulate(NMAP, problem, rounds=1, uplink=[Privacy(1e-5), grid]))


def test_noise_is_not_rounded_away():
    """Many clients add little each: below half a step nothing of it would be left in the sum."""
    grid = Quantised(1000, bound=2e5, bits=32)
    own, up = Privacy(1.0, 0.5, among=1000), NMAP.Up(torch.zeros(1))
    with pytest.raises(InputError, match=r"multiples of 0.12, and a client's own noise has .* 0.016, .*; use 64 bits"):
        own.check_rounding(Rounding(0.0, grid.step, grid.bound), up)
    own.check_rounding(Rounding(0.0, Quantised(1000, bound=2e5).step, grid.bound), up)
    Privacy(1.0, 0.5).check_rounding(Rounding(0.0, grid.step, grid.bound), up)  # the server adds it, after rounding
    grid, fine = Quantised(6, bound=2.0**14, bits=32), Privacy(1.0, 1e-4, among=6)
    with pytest.raises(InputError, match="less than 2 of them"):
        next(simulate(NMAP, PROBLEM, rounds=1, uplink=[fine, grid]))
    next(simulate(NMAP, PROBLEM, rounds=1, uplink=[Privacy(1.0, 1e-2, among=6), grid]))
    deviation = 2.0 * grid.step  # at the limit the sum has what is claimed
    drawn = torch.from_numpy(np.random.default_rng(0).normal(0, deviation, (20_000, 6)))
    assert float(grid.rounded(drawn).sum(1).std()) == pytest.approx(6**0.5 * deviation, rel=0.03)


def test_noise_is_independent_between_rounds_vectors_and_clients():
    """And as large as it should be in the sum, also where clients weigh differently."""
    p, weights = 20_000, [0.5, 0.3, 0.1, 0.1]
    scaffold, zero = A.SCAFFOLD(eta_a=0.1, Q=2), torch.zeros(p, dtype=torch.float64)
    federation = Federation(4, torch.tensor(weights, dtype=torch.float64), Uniform(), 0.0, 3)
    central, own = Privacy(2.0, 1.5), Privacy(2.0, 1.5, among=4)
    drawn = [
        v for t in (0, 1) for v in central.aggregate(federation, Received(t, torch.arange(4), [zero, zero], 1.0)).up
    ]
    many = scaffold.Up(zero.expand(4, p), zero.expand(4, p))
    sums = []
    for t in (0, 1):
        sent = own.apply(federation, Uplinks(t, torch.arange(4), many, many), Rounding()).sent
        drawn += [row for field in sent for row in field]
        sums += [federation.weights @ field for field in sent]
    apart = torch.corrcoef(torch.stack(drawn)) - torch.eye(len(drawn))
    assert float(apart.abs().max()) < 0.04
    for total in (*drawn[:4], *sums):
        assert float(total.std()) == pytest.approx(2.0 * 1.5 * 0.5, rel=0.03)


@pytest.mark.parametrize("uplink", [Median(), NormClip(1.0), Monitor(Privacy(1.0))])
def test_secure_aggregation_shows_nobody_single_uplinks(uplink):
    with pytest.raises(InputError, match="the sum of the uplinks alone"):
        simulate(NMAP, PROBLEM, rounds=1, uplink=[uplink, Quantised(PROBLEM.n)])
    next(simulate(NMAP, PROBLEM, rounds=1, uplink=[Monitor(norms_only=True), Quantised(PROBLEM.n)]))


def test_a_monitor_leaves_rounding_and_bytes_of_secure_sums_as_they_are():
    parts = [Privacy(0.3), Quantised(PROBLEM.n, bits=32)]
    *_, plain = simulate(NMAP, PROBLEM, rounds=3, uplink=parts)
    *_, watched = simulate(NMAP, PROBLEM, rounds=3, uplink=Monitor(parts, norms_only=True))
    assert torch.equal(plain.server.z, watched.server.z)
    assert plain.bytes_up == watched.bytes_up == PROBLEM.n * (PROBLEM.dim + 1) * 4
    with pytest.raises(InputError, match="the sum of the uplinks alone"):
        simulate(NMAP, PROBLEM, rounds=1, uplink=Monitor(parts))


def test_a_client_that_weighs_nothing_adds_no_noise():
    light = LeastSquares(list(PROBLEM.data), weights=[0.5, 0.5, 0, 0, 0, 0])
    with pytest.raises(InputError, match="some have weight 0"):
        simulate(NMAP, light, rounds=1, start=PROBLEM.start, uplink=Privacy(1.0, 0.5, among=3))


def test_a_round_with_too_little_noise_is_not_opened():
    rounds = list(simulate(NMAP, PROBLEM, rounds=40, sampler=PoissonSampler(0.5), uplink=Privacy(1.0, 0.5, among=4)))
    everybody, before = torch.arange(PROBLEM.n), NMAP.init(PROBLEM.start)[0]
    states = torch.zeros(PROBLEM.n, PROBLEM.dim, dtype=torch.float64)
    for r in rounds:
        assert torch.equal(r.server.z, before.z) == (len(r.counted) < 4)
        assert torch.equal(r.clients[everybody].h, states) == (len(r.counted) < 4)  # what is not summed is not believed
        before, states = r.server, r.clients[everybody].h
    assert {len(r.counted) < 4 for r in rounds} == {True, False}


# rows instead of clients

ROWS = Logistic(
    [(torch.randn(30, 4, generator=torch.Generator().manual_seed(i)), torch.arange(30) % 2) for i in range(3)]
)


def test_private_rows_without_noise_and_clipping_are_the_problem():
    private, x = PrivateRows(ROWS, clip=1e6), torch.ones(3, 4)
    everybody = torch.arange(3)
    assert torch.allclose(private.oracle(everybody, 0)(x, 0), ROWS.oracle(everybody, 0)(x, 0), atol=1e-6)
    assert torch.allclose(
        private.oracle(torch.tensor(1), 0)(x[1], 0), ROWS.oracle(torch.tensor(1), 0)(x[1], 0), atol=1e-6
    )


def test_a_row_moves_the_sum_by_the_clip_at_most():
    rows, labels = ROWS.data[0]
    rows = rows.clone()
    rows[0] *= 1e4  # whose gradient is longest

    def total(first):
        problem = Logistic([(rows[first:], labels[first:])], classes=2)
        return (30 - first) * PrivateRows(problem, clip=0.5).oracle(torch.tensor(0), 0)(x, 0)

    x = torch.zeros(4)  # where every row has a gradient
    assert float((total(0) - total(1)).norm()) == pytest.approx(0.5, rel=1e-3)


def test_a_site_alone_draws_what_it_draws_among_others():
    private, x = PrivateRows(ROWS, 1.0, 2.0, rate=0.5, seed=5), torch.ones(3, 4)
    together = private.oracle(torch.arange(3), 7)(x, 2)
    for i in range(3):
        assert torch.allclose(private.alone(i).oracle(torch.tensor(0), 7)(x[i], 2), together[i])
    assert not torch.allclose(private.oracle(torch.arange(3), 8)(x, 2), together)
    assert not torch.allclose(private.oracle(torch.arange(3), 7)(x, 3), together)


def test_coins_and_noise_leave_the_gradient_right_on_average():
    private, x = PrivateRows(ROWS, 10.0, 0.1, rate=0.3), torch.ones(4)
    drawn = torch.stack([private.oracle(torch.tensor(1), t)(x, 0) for t in range(3000)])
    assert torch.allclose(drawn.mean(0), ROWS.alone(1).gradient(x), atol=4 * float(drawn.std(0).max()) / 3000**0.5)


def test_steps_of_a_random_number_are_not_counted():
    private = PrivateRows(ROWS, 1.0, 4.0)
    with pytest.raises(InputError, match="gradients in a round, at random"):
        run(A.Scaffnew(eta_a=0.1, Q=5), private, rounds=2, uplink=Counted(private, 5))
    assert gradients_per_round(A.Scaffnew(eta_a=0.1, Q=1)) == 1
    assert gradients_per_round(A.FedNMapMemory(L1(0.1), Q=3, memory=5)) == 3


@pytest.mark.parametrize(
    "phi", [Separable([(slice(0, 3), L1(0.1))]), GroupLasso(0.1, groups=torch.tensor([0, 0, 1, 1]))]
)
def test_phi_may_know_how_long_its_vector_is(phi):
    algorithm, private = A.FedNMap(phi, eta_a=0.1, Q=2), PrivateRows(ROWS, 1.0, 4.0)
    next(simulate(algorithm, ROWS, rounds=1, uplink=Privacy(1.0)))
    next(simulate(algorithm, ROWS, rounds=1, uplink=NormClip(1.0)))
    next(simulate(algorithm, private, rounds=1, uplink=Counted(private, 2)))


def test_rows_are_counted_by_gradients():
    private = PrivateRows(ROWS, 1.0, 4.0)
    algorithm = A.FedNMap(L1(0.01), eta_a=0.1, Q=3)
    result = run(algorithm, private, rounds=10, uplink=Counted(private, 3))
    assert result.final["epsilon"] == epsilon(4.0, 1.0, 30, 1e-5).pld
    with pytest.raises(InputError, match="3 gradients per round, and steps is 1"):
        run(algorithm, private, rounds=10, uplink=Counted(private, 1))


# the command

DP = ("train", "--data", "digits", "--model", "linear", "--clients", 20, "--eval-every", 3, "--quiet")
PRIVATE = (*DP, "--participation", 0.5, "--sampler", "poisson", "--dp-clip", 1)


@pytest.mark.slow
@pytest.mark.ci(turn=5)
def test_train_tells_epsilon_in_json_table_and_report(command, tmp_path):
    code, out, err = command(*PRIVATE, "--dp-epsilon", 4, "--rounds", 6, "--json", "--out", "a")
    assert code == 0, err
    closing = json.loads(out)
    assert 3.9 < closing["epsilon"] <= 4 <= closing["epsilon_rdp"]
    noise = float(re.search(r"^dp_noise = (.*)$", (tmp_path / "a/run.toml").read_text(), re.M)[1])
    assert noise == noise_for(4.0, 0.5, 6, 1e-5)
    assert "epsilon" in command("show", "a")[1]
    assert command("report", "a")[0] == 0
    assert "epsilon" in (tmp_path / "report.html").read_text()


def test_a_central_method_hides_rows_too(command):
    """It takes the mean of what the sites have made private, as many gradients as it makes steps."""
    options = ("--algorithm", "prox-sgd", "--local-steps", 2, "--batch-size", 0)
    code, out, err = command(
        *DP, *options, "--dp-clip", 1, "--dp-noise", 8, "--dp-unit", "example", "--rounds", 6, "--json"
    )
    assert code == 0, err
    assert json.loads(out)["epsilon"] == pytest.approx(epsilon(8.0, 1.0, 12, 1e-5).pld)


@pytest.mark.slow
@pytest.mark.ci(turn=8)
def test_a_private_run_is_resumed_to_the_same_bits(command, tmp_path):
    for out, rounds in (("whole", 6), ("cut", 3)):
        assert command(*PRIVATE, "--dp-noise", 1.5, "--rounds", rounds, "--out", out)[0] == 0
    file = tmp_path / "cut/run.toml"
    file.write_text(file.read_text().replace("\nrounds = 3", "\nrounds = 6"))
    assert command("train", "--resume", "cut")[0] == 0
    results = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("whole", "cut")]
    found = [json.dumps(result) for result in results]
    digest = [re.search(r'"model_sha256": "(\w+)"', text)[1] for text in found]
    assert digest[0] == digest[1]


@pytest.mark.slow
@pytest.mark.ci(turn=1)
def test_a_run_that_goes_on_spends_no_more_than_it_was_asked_for(command, tmp_path):
    """The noise that epsilon 4 needs for 3 rounds: 6 of them are refused; stopped early, less is spent."""
    assert command(*DP, "--dp-clip", 1, "--dp-epsilon", 4, "--rounds", 3, "--out", "a")[0] == 0
    file, noise = tmp_path / "a/run.toml", noise_for(4.0, 1.0, 3, 1e-5)
    first = json.loads((tmp_path / "a/results.json").read_text())[0]["epsilon"]
    assert first == pytest.approx(epsilon(noise, 1.0, 3, 1e-5).pld)
    file.write_text(file.read_text().replace("\nrounds = 3", "\nrounds = 6"))
    later = epsilon(noise, 1.0, 6, 1e-5).pld
    assert first <= 4 < later
    code, _, err = command("train", "--resume", "a")
    assert code == 2
    assert f"6 rounds would spend an epsilon of {later:.4g}, and the budget is 4; use fewer rounds" in err
    assert json.loads((tmp_path / "a/results.json").read_text())[0]["epsilon"] == first
    file.write_text(file.read_text().replace("dp_budget = 4.0", "dp_budget = 40.0"))
    code, _, err = command("train", "--resume", "a")
    assert (code, "dp_budget is 40.0 and was 4.0" in err) == (2, True)
    early = run(NMAP, PROBLEM, rounds=9, every=3, stop=lambda record: record["round"] >= 3, uplink=Privacy(1.0, 1.0))
    assert early.final["epsilon"] == pytest.approx(epsilon(1.0, 1.0, 3, 1e-5).pld)


def test_sampling_hides_nobody_from_the_server_that_draws(command):
    """With noise of the clients' own every round counts for every client; the server's noise hides from others."""
    sampled = {"rounds": 3, "every": 3, "sampler": PoissonSampler(0.5)}
    own, central = (run(NMAP, PROBLEM, uplink=Privacy(1.0, 1.5, among=m), **sampled).final for m in (2, None))
    assert own["epsilon"] == pytest.approx(epsilon(1.5, 1.0, 3, 1e-5).pld)
    assert central["epsilon"] == pytest.approx(epsilon(1.5, 0.5, 3, 1e-5).pld)
    words = (*DP, "--participation", 0.5, "--sampler", "poisson", "--dp-clip", 1, "--dp-epsilon", 4, "--dp-among", 2)
    code, out, err = command(*words, "--rounds", 3, "--json")
    assert code == 0, err
    assert 3.9 < json.loads(out)["epsilon"] <= 4


OTHER_NOISE = {
    "less": {"uplink": Privacy(1.0, 2.0)},
    "delta": {"uplink": Privacy(1.0, 3.0, delta=1e-3)},
    "sampling": {"uplink": Privacy(1.0, 3.0), "sampler": PoissonSampler(0.5)},
    "none": {},
    "clip": {"uplink": Privacy(1.0)},
}


@pytest.mark.parametrize("kind", OTHER_NOISE)
def test_rounds_are_not_counted_with_the_noise_of_other_rounds(kind):
    private = {"uplink": Privacy(1.0, 3.0)}
    first = run(NMAP, PROBLEM, rounds=2, **private)
    later = run(NMAP, PROBLEM, rounds=4, after=first, **private)
    assert later.final["epsilon"] == pytest.approx(epsilon(3.0, 1.0, 4, 1e-5).pld)
    with pytest.raises(InputError, match=r"spent an epsilon of \d.*; continue with the same noise") as refused:
        run(NMAP, PROBLEM, rounds=4, after=first, **OTHER_NOISE[kind])
    assert "\n" not in str(refused.value)


def test_rounds_without_noise_are_not_counted_as_private():
    plain = run(NMAP, PROBLEM, rounds=2)
    with pytest.raises(InputError, match=r"an epsilon of none, got \d"):
        run(NMAP, PROBLEM, rounds=4, after=plain, uplink=Privacy(1.0, 3.0))
    run(NMAP, PROBLEM, rounds=1, after=run(NMAP, PROBLEM, rounds=0), uplink=Privacy(1.0, 3.0))  # nothing was sent yet


def test_a_round_does_not_tell_the_noise_before_it():
    """Of a Round alone nobody knows; records that come with it are compared, also those of round 0."""
    noised = {"uplink": Privacy(1.0, 3.0)}
    first = run(NMAP, PROBLEM, rounds=2, every=5, **noised)
    for round_ in (run(NMAP, PROBLEM, rounds=2).last, first.last):
        with pytest.raises(InputError, match="does not say what privacy was spent") as refused:
            run(NMAP, PROBLEM, rounds=4, after=round_, **noised)
        assert "\n" not in str(refused.value)
    for records in (first.records[:1], first.records):
        later = run(NMAP, PROBLEM, rounds=4, after=first.last, earlier=records, **noised)
        assert later.final["epsilon"] == pytest.approx(epsilon(3.0, 1.0, 4, 1e-5).pld)
    plain = run(NMAP, PROBLEM, rounds=2)
    for records in (plain.records[:1], plain.records):
        with pytest.raises(InputError, match="an epsilon of none"):
            run(NMAP, PROBLEM, rounds=4, after=plain.last, earlier=records, **noised)
    with pytest.raises(InputError, match="continue with the same noise"):
        run(NMAP, PROBLEM, rounds=4, after=first.last, earlier=first.records, uplink=Privacy(1.0, 2.0))
    assert run(NMAP, PROBLEM, rounds=4, after=plain.last, uplink=Privacy(1.0)).final["round"] == 4  # no epsilon


@pytest.mark.slow
@pytest.mark.ci(turn=6)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("unit", ["client", "example"])
def test_an_epsilon_that_protects_nobody_is_said(command, unit):
    code, _, err = command(*DP, "--dp-clip", 1, "--dp-noise", 0.5, "--dp-unit", unit, "--rounds", 10)
    assert code == 0
    assert "no protection worth the name" in err


@pytest.mark.slow
@pytest.mark.ci(turn=6)
def test_rows_of_a_run_are_counted(command):
    words = (*DP, "--dp-clip", 1, "--dp-epsilon", 5, "--dp-unit", "example", "--rounds", 4, "--batch-size", 20)
    code, out, err = command(*words, "--local-steps", 3, "--json")
    assert code == 0, err
    assert 4.9 < json.loads(out)["epsilon"] <= 5


REFUSED = [
    ("--dp-noise 1", "dp_noise is 1.0 without dp_clip"),
    ("--dp-epsilon 1", "dp_epsilon is 1.0 without dp_clip"),
    ("--dp-clip 1 --dp-noise 1 --dp-epsilon 2", "both given"),
    ("--dp-clip 1 --dp-epsilon 1e-7", "reached by no noise"),
    ("--dp-clip 1 --dp-noise 1 --dp-delta 1", "dp_delta is 1"),
    ("--dp-clip 1 --dp-noise 1 --dp-delta 0.2", "below 1/20"),
    ("--dp-clip 1 --dp-noise 1 --participation 0.5", "use sampler = poisson"),
    ("--dp-clip 1 --dp-noise 1 --algorithm feddr", "FedDR has no state_after_sending"),
    ("--dp-clip 1 --dp-noise 1 --aggregate median", "the noise is for a mean"),
    ("--dp-clip 0 --dp-noise 1", "dp_clip is 0"),
    ("--dp-clip 1 --dp-among 5", "there is none"),
    ("--secagg --aggregate median", "only the sum of the uplinks"),
    ("--dp-clip 1 --dp-noise 1 --dp-among 21", "of 20 clients"),
    ("--dp-clip 1 --memory 5 --batch-size 0", "memory = 0"),
    ("--dp-clip 1 --dp-forget 2", "dp_forget is 2"),
    ("--aggregate middle", "aggregate"),
    ("--aggregate clip", "clip:1.0"),
    ("--aggregate trimmed:0.7", "below 0.5"),
    ("--attack flip:1", "attack"),
    ("--attack sign-flip", "KIND:COUNT"),
    ("--attack sign-flip:20", "leave some that do not"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=[words for words, _ in REFUSED])
def test_refused_in_one_line(command, words, said):
    code, _, err = command(*DP, "--rounds", 2, *words.split())
    assert code == 2, err
    assert said in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Privacy(0), "clip is 0"),
        (lambda: Privacy(1.0, -1), "noise_multiplier is -1"),
        (lambda: Privacy(1.0, 1.0, delta=0), "delta is 0"),
        (lambda: Privacy(1.0, among=3), "there is none"),
        (lambda: simulate(NMAP, PROBLEM, rounds=1, uplink=Privacy), "the class Privacy"),
        (lambda: simulate(NMAP, PROBLEM, rounds=1, uplink=Privacy(1.0, 1.0), participation=0.5), "sampler poisson"),
        (
            lambda: simulate(MAKE["FedPD"](Zero(), L, Q), PROBLEM, rounds=1, uplink=Privacy(1.0)),
            "FedPD has no",
        ),
        (lambda: PrivateRows(heterogeneous(), 1.0, rate=0), "rate is 0"),
        (lambda: noise_for(math.inf, 1.0, 1, 1e-5), "epsilon is inf"),
        (lambda: noise_for(1.0, 1.0, 0, 1e-5), "0 rounds"),
    ],
)
def test_refused_in_python(make, said):
    with pytest.raises(InputError, match=re.escape(said)) as refused:
        make()
    assert "\n" not in str(refused.value)


def test_a_run_in_python_knows_its_privacy(tmp_path):
    first = run(NMAP, PROBLEM, rounds=4, folder=tmp_path / "a", uplink=Privacy(1.0, 1.0))
    again = run(NMAP, PROBLEM, rounds=8, folder=tmp_path / "a", uplink=Privacy(1.0, 1.0))
    whole = run(NMAP, PROBLEM, rounds=8, uplink=Privacy(1.0, 1.0))
    assert first.final["epsilon"] < again.final["epsilon"]
    assert torch.equal(again.x, whole.x)
    with pytest.raises(InputError, match="holds another run"):
        run(NMAP, PROBLEM, rounds=8, folder=tmp_path / "a", uplink=Privacy(1.0, 2.0))


def test_islands_of_a_generator_are_values():
    """A private run that is cut after any round goes on to the same bits."""
    options = {"uplink": Privacy(1.0, 0.5), "rounds": 6}
    rounds = list(islice(simulate(NMAP, PROBLEM, **options), 6))
    for r in rounds[:-1]:
        assert torch.equal(last(NMAP, after=r, **options).server.z, rounds[-1].server.z)
