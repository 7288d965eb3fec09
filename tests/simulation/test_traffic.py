"""One vector down: who was counted follows the server from the mean uplink, to the bit, and the bytes say so."""

import pytest
import torch
from lasso import PHI, L
from methods import MAKE
from small import begin, outcome, resume

from fednmap import algorithms as A
from fednmap import run, simulate
from fednmap.core import next_broadcast
from fednmap.problems import LeastSquares
from fednmap.regularizers import Zero
from fednmap.simulation.participation import Trace
from fednmap.testing import check_algorithm, heterogeneous

SIX = heterogeneous()
NOISY = LeastSquares([(a.float(), b.float()) for a, b in SIX.data], batch_size=3)
VECTOR = SIX.dim * 8
FOLLOWING = ("FedNMap", "Zhang", "FedCanon")


def method(name="FedNMap", Q=3):
    return MAKE[name](PHI if A.ALGORITHMS[name.lower()].traits.composite else Zero(), L, Q)


@pytest.mark.parametrize("name", ["FedNMap", "Zhang", "FedCanon", "SCAFFOLD", "FedAvg"])
def test_with_everybody_it_is_two_vectors_once_and_one_from_then_on(name):
    traits = A.ALGORITHMS[name.lower()].traits
    later = traits.up if traits.broadcast_follows else traits.down
    assert traits.broadcast_follows == (name in FOLLOWING)
    rounds = list(simulate(method(name), SIX, rounds=5))
    assert [r.bytes_down for r in rounds] == [6 * traits.down * VECTOR, *[6 * later * VECTOR] * 4]
    assert [r.bytes_up for r in rounds] == [6 * traits.up * VECTOR] * 5


def expected(rounds):
    """Vectors down of each round, from who was there: two, or one for who was counted when the server last moved."""
    holders, due = set(), []
    for last in rounds:
        here = set(last.participants.tolist())
        due.append(2 * len(here) - len(here & holders))
        holders = set(last.counted.tolist()) or holders
    return due


HOW = {
    "sampled": {"participation": 0.5, "seed": 3},
    "lossy": {"drop": 0.3, "seed": 5},
    "both": {"participation": 0.7, "drop": 0.5, "seed": 1},
    "now and then nobody": {"sampler": Trace([[0, 1, 2], [], [1, 2, 3], [], [], [3]])},
}


@pytest.mark.parametrize("how", HOW)
def test_who_was_not_counted_is_sent_both(how):
    rounds = list(simulate(method(), SIX, rounds=30, **HOW[how]))
    due = expected(rounds)
    assert [r.bytes_down for r in rounds] == [k * VECTOR for k in due]
    assert 0 < sum(due) < 2 * sum(len(r.participants) for r in rounds)


@pytest.mark.parametrize("how", HOW)
def test_a_run_that_goes_on_counts_the_same_bytes(how):
    whole = list(simulate(method(), SIX, rounds=12, **HOW[how]))
    for at in (0, 3, 4, 8):
        rest = list(simulate(method(), SIX, rounds=12, after=whole[at], **HOW[how]))
        assert [r.bytes_down for r in rest] == [r.bytes_down for r in whole[at + 1 :]]


def test_a_client_that_weighs_nothing_brings_no_news():
    """Round 1 is its alone: the server does not move, and those of round 0 still hold what they need."""
    problem = LeastSquares([SIX.data[i] for i in range(3)], weights=[0.5, 0.5, 0.0])
    rounds = list(simulate(method(), problem, rounds=4, sampler=Trace([[0, 1], [2], [0, 1, 2], [0, 1, 2]])))
    assert [r.bytes_down // VECTOR for r in rounds] == [4, 2, 4, 3]


@pytest.mark.parametrize("name", FOLLOWING)
@pytest.mark.parametrize("eta_a", [None, lambda t: 0.05 / (t + 1)])
def test_who_follows_has_the_servers_bits(name, eta_a):
    """A client of its own, told nothing but mean uplinks, in float32 with minibatches, half of the replies lost."""
    from fednmap.simulation import schedules

    algorithm, told = method(name), []
    aggregate = type(algorithm).aggregate
    down = algorithm.broadcast(algorithm.init(NOISY.start)[0])

    class Told(type(algorithm)):
        def aggregate(self, server, up, share):
            told.append((up, share))
            return aggregate(self, server, up, share)

    spied = Told(**{k: v for k, v in vars(algorithm).items()})
    for last in simulate(spied, NOISY, rounds=25, drop=0.5, seed=2, eta_a=eta_a):
        for up, share in told:
            down = next_broadcast(schedules.at(algorithm, eta_a, last.t), down, up, share)
        told.clear()
        assert all(torch.equal(a, b) for a, b in zip(down, last.server, strict=True))


def test_a_killed_run_has_counted_the_bytes_of_one_that_was_not(tmp_path):
    from fednmap import Callback

    class Kill(Callback):
        def on_round(self, round, totals):
            if round.t == 10:
                raise KeyError("killed")

    with pytest.raises(KeyError):
        begin(tmp_path / "a", Kill())
    from fednmap.runs.folder import RunFolder

    resume(RunFolder.open(tmp_path / "a"))
    assert outcome(RunFolder.open(tmp_path / "a")) == outcome(begin(tmp_path / "b"))


def test_the_contract_notices_a_client_that_follows_elsewhere():
    class Astray(A.FedNMap):
        """Broadcasts something else than the server's state."""

        def broadcast(self, server):
            return server._replace(h=2 * server.h)

    with pytest.raises(AssertionError, match="the next broadcast does not follow"):
        check_algorithm(lambda phi, L, Q: Astray(phi, eta_a=0.5 / (L * Q), Q=Q), rounds=1)


def test_totals_and_list_say_it(command):
    result = run(method(), SIX, rounds=10)
    assert result.totals["bytes_down"] == (6 * 2 + 9 * 6) * VECTOR
    out = command("list", "algorithms")[1]
    row, *_ = [line for line in out.splitlines() if " fednmap " in line]
    assert " 2, 1 " in row
