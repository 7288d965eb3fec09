"""Robust centres, attacks and the monitor: what withstands what, and who is named."""

from itertools import pairwise

import pytest
import torch
from lasso import distance, last

from fednmap import InputError, simulate
from fednmap.algorithms import SCAFFOLD, CompressedFedNMap, FedADMM, FedAvg, FedAvgM, FedDR, FedNMap, Zhang
from fednmap.privacy import Attack, GeometricMedian, Median, Monitor, NormClip, Privacy, Trimmed, centre_of
from fednmap.privacy.robust import median, z_scores
from fednmap.problems import LeastSquares
from fednmap.regularizers import L1
from fednmap.simulation.loop import federation_of
from fednmap.simulation.participation import PoissonSampler
from fednmap.simulation.uplink import Pipeline, Received, Stage
from fednmap.testing import heterogeneous, optimum, smoothness

TEN, PHI = heterogeneous(n=10), L1(0.2)
L = smoothness(TEN)
NMAP = FedNMap(PHI, eta_a=0.1 / L, Q=5, gamma=1 / L)
HONEST = optimum(LeastSquares([TEN.data[i] for i in range(1, 10)]), PHI, 4000)
CENTRES = [Median(), Trimmed(0.1), GeometricMedian(), NormClip(0.3, 0.2)]
ATTACKS = [Attack("sign-flip"), Attack("scale"), Attack("random"), Attack("constant")]


def error(uplink, rounds=250, due=HONEST, **options):
    return distance(NMAP.model(last(NMAP, TEN, rounds=rounds, uplink=uplink, **options).server), due)


def rows(k=9, p=5, seed=0):
    return torch.randn(k, p, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("centre", [Median(), Trimmed(0.2), GeometricMedian()], ids=lambda c: type(c).__name__)
def test_a_centre_moves_with_the_vectors_and_ignores_their_order(centre):
    v, shift = rows(), torch.arange(5.0, dtype=torch.float64)
    assert torch.allclose(centre.centre(v + shift), centre.centre(v) + shift)
    assert torch.allclose(centre.centre(3 * v), 3 * centre.centre(v))
    assert torch.allclose(centre.centre(v.flip(0)), centre.centre(v))


@pytest.mark.parametrize("centre", [Median(), Trimmed(0.2), GeometricMedian()], ids=lambda c: type(c).__name__)
def test_one_vector_moves_a_centre_only_so_far(centre):
    v = rows()
    far = v.clone()
    far[0] = 1e9
    assert float((centre.centre(far) - centre.centre(v)).norm()) < 3


def test_the_geometric_median_has_the_least_sum_of_distances():
    v = rows()
    found = GeometricMedian(iterations=1000).centre(v)

    def cost(x):
        return float((v - x).norm(dim=-1).sum())

    nudges = 1e-3 * rows(50, 5, seed=1)
    assert all(cost(found) <= cost(found + nudge) + 1e-9 for nudge in nudges)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("equal", [3, 4, 10])
def test_the_geometric_median_of_vectors_that_are_mostly_one(equal, dtype):
    these = torch.tensor([[1.0, 1.0]] * equal + [[9.0, 9.0], [9.0, -5.0]], dtype=dtype)
    assert torch.equal(GeometricMedian().centre(these), torch.ones(2, dtype=dtype))


def test_the_median_of_two_in_the_middle():
    assert torch.equal(median(torch.tensor([[4.0], [1.0], [2.0], [100.0]])), torch.tensor([3.0]))


@pytest.mark.slow
@pytest.mark.ci(turn=1)
def test_without_attack_only_the_mean_and_self_consistent_clipping_are_exact():
    due = optimum(TEN, PHI, 4000)
    assert error(NormClip(0.3), 600, due) < 1e-8
    assert all(error(centre, 600, due) > 0.01 for centre in (Median(0.0), Trimmed(0.1, 0.0), GeometricMedian(0.0)))


def drift(uplink, rounds=200):
    """|h - mean h_i| at the end."""
    r = last(NMAP, TEN, rounds=rounds, uplink=uplink)
    return float((r.server.h - r.clients[torch.arange(10)].h.mean(0)).norm())


def test_who_keeps_mean_h_i_equal_to_h():
    assert drift(Stage()) < 1e-12
    assert drift(NormClip(0.3)) < 1e-12
    assert all(drift(centre) > 0.1 for centre in (Median(0.0), Trimmed(0.1, 0.0), GeometricMedian(0.0)))


def test_what_a_method_cannot_forget_is_refused_and_not_ignored():
    """By default a centre lets corrections forget where there are any."""
    with pytest.raises(ValueError, match=r"forget is 0\.3, and FedAvg has no correction that could; leave it out"):
        simulate(FedAvg(eta_a=0.1 / L), TEN, rounds=1, uplink=Median(forget=0.3))
    for centre in (Median(), Median(forget=0.0)):
        last(FedAvg(eta_a=0.1 / L), TEN, rounds=1, uplink=centre)
    one = FedNMap(PHI, eta_a=0.5 / L, Q=1, gamma=1 / L)
    ends = [last(one, TEN, rounds=5, uplink=centre).server.z for centre in (Median(), Median(0.2), Median(0.0))]
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


@pytest.mark.parametrize("kind", [CompressedFedNMap, FedDR, FedADMM])
def test_where_nothing_is_forgotten_only_centres_that_keep_the_mean_are_taken(kind):
    for centre in (Median(), Trimmed(0.2, 0.0), GeometricMedian(), [Median(), Attack("sign-flip")]):
        with pytest.raises(InputError, match=rf"of {kind.__name__}, which cannot forget; use FedNMap.*FedAvg$"):
            simulate(kind(PHI, eta_a=0.1 / L), TEN, rounds=1, uplink=centre)


def test_where_something_is_forgotten_or_nothing_kept_every_centre_is_taken():
    for kind in (FedNMap, Zhang):
        simulate(kind(PHI, eta_a=0.1 / L), TEN, rounds=1, uplink=Median())
    for method in (SCAFFOLD(eta_a=0.1 / L), FedAvgM(eta_a=0.1 / L), FedAvgM(of=SCAFFOLD(eta_a=0.1 / L))):
        simulate(method, TEN, rounds=1, uplink=Median())
    simulate(FedNMap(PHI, eta_a=0.1 / L), TEN, rounds=1, uplink=NormClip(0.3))
    with pytest.raises(InputError, match="no correction that could"):
        simulate(FedAvgM(eta_a=0.1 / L), TEN, rounds=1, uplink=Median(0.3))


@pytest.mark.slow
@pytest.mark.ci(turn=0)
def test_where_a_centre_forgets_the_end_does_not_depend_on_how_much():
    """centre(grad f_i(x)) + (z - x)/gamma = 0, for every forget > 0 and Q = 1."""
    one = FedNMap(PHI, eta_a=0.5 / L, Q=1, gamma=1 / L)
    ends = []
    for forget in (0.3, 0.7):
        z = last(one, TEN, rounds=1500, uplink=Trimmed(0.2, forget)).server.z
        x = PHI.prox(z, 1 / L)
        each = TEN.oracle(torch.arange(10), 0)(x, 0)
        assert float((Trimmed(0.2).centre(each) + (z - x) * L).norm()) < 1e-6
        ends.append(x)
    assert distance(*ends) < 1e-6


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda a: a.kind)
@pytest.mark.parametrize("centre", CENTRES, ids=lambda c: type(c).__name__)
def test_robust_centres_withstand_one_in_ten(centre, attack):
    assert error([centre, attack]) < 0.25


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda a: a.kind)
def test_the_mean_does_not(attack):
    assert error(attack) > 0.5


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda a: a.kind)
@pytest.mark.parametrize("norms_only", [False, True])
def test_the_monitor_names_the_attacker(attack, norms_only):
    monitor = Monitor([Trimmed(0.1), attack], norms_only=norms_only)
    last(NMAP, TEN, rounds=20, uplink=monitor)
    assert monitor.named() == [0]
    assert monitor.scores()[0].rounds == 20


def test_the_monitor_names_nobody_where_all_are_honest():
    for norms_only in (False, True):
        monitor = Monitor(norms_only=norms_only)
        watched = last(NMAP, TEN, rounds=20, uplink=monitor, sampler=PoissonSampler(0.7))
        assert monitor.named() == []
    assert torch.allclose(watched.server.z, last(NMAP, TEN, rounds=20, sampler=PoissonSampler(0.7)).server.z)


def test_alike_is_not_suspect_whatever_the_spread():
    assert float(z_scores(torch.tensor([1.0, 1.0, 1.0, 1.05])).abs().max()) < 1


def test_attackers_and_their_noise_are_addressed():
    options = {"uplink": [Median(), Attack("random", 2)], "rounds": 6}
    whole = list(simulate(NMAP, TEN, **options))
    again = last(NMAP, TEN, after=whole[2], **options)
    assert torch.equal(again.server.z, whole[-1].server.z)
    assert torch.allclose(last(NMAP, TEN, chunk=3, **options).server.z, again.server.z)


def test_rounds_with_nobody_leave_all_as_it_is():
    rounds = list(simulate(NMAP, TEN, rounds=30, sampler=PoissonSampler(0.05), uplink=Median()))
    empty = [(a, b) for a, b in pairwise(rounds) if not len(b.counted)]
    assert empty
    assert all(torch.equal(a.server.z, b.server.z) for a, b in empty)


def test_a_share_of_the_clients_is_told_to_the_method():
    heard = Median().aggregate(federation_of(TEN), Received(0, torch.arange(5), [rows(5)], 5.0))
    assert heard.share == 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_methods_without_state_take_any_centre(dtype):
    average = FedAvg(eta_a=0.1 / L, Q=5)
    for centre in (*CENTRES[:3], NormClip(0.3)):
        x = last(average, TEN, rounds=5, start=TEN.start.to(dtype), uplink=centre).server.x
        assert x.dtype == dtype


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Pipeline([Median(), Privacy(1.0, 1.0)]), "expected one aggregator, got Median and Privacy"),
        (lambda: Trimmed(0.5), "share is 0.5"),
        (lambda: centre_of("mean:3"), "expected mean, median, .*, got .mean:3."),
        (lambda: centre_of("clip:wide"), "got .clip:wide."),
        (lambda: Attack("sign-flip", 0), "count is 0"),
        (
            lambda: (
                last(NMAP, LeastSquares(list(TEN.data), weights="samples"), rounds=1, uplink=Median())
                and last(NMAP, LeastSquares(list(TEN.data), weights=[0.55] + 9 * [0.05]), rounds=1, uplink=Median())
            ),
            "knows no weights",
        ),
    ],
)
def test_refused(make, said):
    with pytest.raises(InputError, match=said) as refused:
        make()
    assert "\n" not in str(refused.value)
