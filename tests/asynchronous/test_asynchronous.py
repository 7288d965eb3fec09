"""Asynchronous runs: the invariant h = mean h_i, the optimum in every delay model, parity with `simulate`."""

import pickle
from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from lasso import PHI, PROBLEM, L, best, distance, last

import fednmap
from fednmap import InputError, simulate
from fednmap.algorithms import SCAFFOLD, CompressedFedNMap, FedAvg, FedCanon, FedDR, FedMiD, FedNewton, FedNMap, Zhang
from fednmap.asynchronous import (
    Asynchronous,
    FedAsync,
    FedBuff,
    Ledger,
    delays_of,
    factors,
    rule_of,
    safe_step,
    times_counted,
)
from fednmap.core import info_of
from fednmap.decentralized import Decentralized, NormED, Ring
from fednmap.measure import stationarity
from fednmap.problems import LeastSquares
from fednmap.simulation.uplink import Federation, Pipeline, client_round

N = PROBLEM.n
EVERYBODY = torch.arange(N)
STEP = FedNMap(PHI, eta_a=0.1 / L, Q=5)
MODELS = {
    "constant": {},
    "heavy tails": {"delays": "pareto:1.2"},
    "exponential": {"delays": "exponential"},
    "slow clients": {"delays": "uniform:0.8,1.2", "slowdown": "lognormal:1.2"},
    "both": {"delays": "pareto:1.2", "slowdown": "1,1,1,2,5,20"},
}
RULES = (
    {"window": 2.0},
    *(
        pytest.param(rule, marks=pytest.mark.slow)
        for rule in ({"buffer": 1}, {"buffer": 3}, {"window": 1.0, "staleness": 4}, {"buffer": 2, "window": 3.0})
    ),
)


def unequal():
    """The same problem with weights."""
    return LeastSquares(PROBLEM.data, weights=torch.arange(1, 7) / 21)


def difference(r, weights=None):
    """|h - mean h_i| / |h|."""
    h = r.clients[EVERYBODY].h
    mean = h.mean(0) if weights is None else weights @ h
    return float((r.server.h - mean).norm() / r.server.h.norm())


# ---------------------------------------------------------------------------------------- the limit of waiting for all


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize(
    ("make", "infinite"),
    [
        *((FedNMap, rule) for rule in ({}, {"window": 1e9}, {"buffer": N}, {"window": 0.1, "staleness": 0})),
        *((Zhang, {}), (FedCanon, {})),
    ],
)
def test_waiting_for_all_is_simulate(make, participation, infinite):
    method = make(PHI, eta_a=0.02, Q=3)
    asynchronous = Asynchronous(method, delays="pareto:1.2", **infinite)
    expected = list(simulate(method, PROBLEM, rounds=12, participation=participation, seed=3))
    found = list(simulate(asynchronous, PROBLEM, rounds=12, participation=participation, seed=3))
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a.counted, b.counted)
        torch.testing.assert_close(asynchronous.model(b.server), method.model(a.server), rtol=1e-12, atol=1e-12)
    assert found[-1].server.staleness == 0
    assert [r.bytes_up for r in found] == [r.bytes_up for r in expected]


def test_waiting_for_all_sees_the_same_minibatches_and_weights():
    problem = LeastSquares(PROBLEM.data, batch_size=4, weights=torch.arange(1, 7) / 21)
    method = FedNMap(PHI, eta_a=0.01, Q=3)
    expected, found = (last(m, problem, rounds=20) for m in (method, Asynchronous(method)))
    torch.testing.assert_close(found.server.z, expected.server.z, rtol=1e-12, atol=1e-12)


def test_the_clock_of_waiting_for_all_is_the_slowest_client():
    asynchronous = Asynchronous(STEP, delays="constant:2", slowdown="1,1,1,1,1,20")
    assert last(asynchronous, rounds=3).server.virtual_time == 3 * 40


# ------------------------------------------------------------------------------------------------------- exact, always


@pytest.mark.parametrize(
    "model", [pytest.param(m, marks=pytest.mark.slow) if m in ("constant", "exponential") else m for m in MODELS]
)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_optimum_in_every_delay_model(model, rule):
    asynchronous = Asynchronous(STEP, **MODELS[model], **rule)
    for r in simulate(asynchronous, PROBLEM, rounds=9000, seed=1):
        if r.t % 20 == 0 and distance(asynchronous.model(r.server), best(0.2)) < 1e-8:
            break
    assert distance(asynchronous.model(r.server), best(0.2)) < 1e-8
    assert difference(r) < 1e-12


@pytest.mark.slow
def test_lost_replies_and_few_jobs_and_weights():
    problem = unequal()
    x = last(STEP, problem, rounds=400)
    asynchronous = Asynchronous(STEP, delays="exponential", slowdown="1,1,1,1,4,8", buffer=2)
    r = last(asynchronous, problem, rounds=1500, participation=0.5, drop=0.3, seed=2)
    assert distance(asynchronous.model(r.server), STEP.model(x.server)) < 1e-8
    assert difference(r, info_of(problem).weights) < 1e-12


@pytest.mark.parametrize("make", [Zhang, pytest.param(FedCanon, marks=pytest.mark.slow)])
def test_other_methods_with_a_control_variate(make):
    """FedCanon ends where it ends without delays, with its bias."""
    method = make(PHI, eta_a=0.06 / L, Q=5)
    asynchronous = Asynchronous(method, delays="pareto:1.2", window=2)
    r = last(asynchronous, rounds=500)
    end = best(0.2) if make is Zhang else method.model(last(method, rounds=300).server)
    assert distance(asynchronous.model(r.server), end) < 1e-5
    assert difference(r) < 1e-12


def test_a_deadline_solves_another_problem():
    """Client 5 is always late: the deadline ends at the lasso of the other five, the window at the optimum."""
    slow = {"delays": "constant", "slowdown": "1,1,1,1,1,20"}
    late = last(Asynchronous(STEP, deadline=2, **slow), rounds=300)
    assert times_counted(late).tolist() == [300] * 5 + [0]
    assert distance(STEP.model(STEP.Server(*late.server[:2])), best(0.2)) > 1e-2
    exact = Asynchronous(STEP, window=2, **slow)
    r = last(exact, rounds=400)
    assert distance(exact.model(r.server), best(0.2)) < 1e-8
    assert r.server.staleness_max == 9
    assert (r.server.counted_least, r.server.counted_most) == (40, 400)


@pytest.mark.parametrize("comparator", [FedBuff(FedMiD(PHI, eta_a=0.06 / L, Q=5), buffer=3, delays="pareto:1.2")])
def test_fedbuff_is_biased(comparator):
    assert distance(comparator.model(last(comparator, rounds=400).server), best(0.2)) > 1e-2


def test_fedbuff_and_fedasync_by_hand():
    """Three replies at one time, in a plain loop, of Algorithm 1 in both papers; every client begins at version 0."""
    method = FedAvg(eta_a=0.02, Q=3)
    x = PROBLEM.start
    changes = [
        method.local(method.Server(x), method.Client(), PROBLEM.oracle(torch.tensor(i), 0))[0].change for i in range(3)
    ]
    (r,) = simulate(FedBuff(method, buffer=3), PROBLEM, rounds=1)
    torch.testing.assert_close(r.server.x, x + sum(changes) / 3)
    *_, r = simulate(FedAsync(method, mixing=0.6, discount=0.5), PROBLEM, rounds=3)
    for late, change in enumerate(changes):
        weight = 0.6 * (1 + late) ** -0.5
        x = (1 - weight) * x + weight * (PROBLEM.start + change)
    torch.testing.assert_close(r.server.x, x)


@pytest.mark.parametrize("staleness", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_the_guaranteed_step_falls_in_any_order(staleness):
    """Q = 1 and gamma = eta_hat: proximal gradient steps with late gradients; the worst staleness that is allowed."""
    own = [float(torch.linalg.matrix_norm(a, 2) ** 2 / len(a)) for a, _ in PROBLEM.data]
    step = 0.99 * safe_step(sum(own) / N, staleness, largest=max(own))
    method = FedNMap(PHI, eta_a=step, Q=1, gamma=step)
    rule = {"buffer": 1, "staleness": staleness, "delays": "pareto:1.2", "slowdown": "1,1,1,1,50,90"}
    asynchronous = Asynchronous(method, **rule)
    r = last(asynchronous, rounds=500 + 4000 * staleness)
    assert r.server.staleness_max == staleness
    assert distance(asynchronous.model(r.server), best(0.2)) < 1e-8


def test_one_reply_at_a_time_may_need_a_smaller_step():
    """Five clients, nearly equal curvature in all directions: D is the change of one client, and 1 / L is too long."""
    rng = torch.Generator().manual_seed(1)
    data = []
    for i, scale in enumerate((3.0, 3.06, 3.12, 3.18, 1.0)):
        a = torch.linalg.qr(torch.randn(9, 6, generator=rng, dtype=torch.float64))[0] * scale
        data.append((a, a @ (torch.randn(6, generator=rng, dtype=torch.float64) + i)))
    problem, ends = LeastSquares(data), {}
    for scaled in (0.17, 0.67):
        method = FedNMap(PHI, eta_a=scaled / 1.06**2, Q=1)
        asynchronous = Asynchronous(method, buffer=1, delays="uniform:0.8,1.2", slowdown="1,1,1,1,20")
        x = asynchronous.model(last(asynchronous, problem, rounds=150).server)
        ends[scaled] = float(stationarity(problem, PHI, x, 1.0))
    assert ends[0.17] < 1e-2
    assert ends[0.67] > 1e3


# ------------------------------------------------------------------------------------------- any order of messages


@dataclass
class Node:
    """A client between machines: its state, and the states that replies would give it, by ticket."""

    h: torch.Tensor
    pending: dict

    def work(self, method, i, ticket, counted, down, problem, t):
        """As the message says which ticket was counted, take its state; then compute a reply."""
        self.h = self.pending.get(counted, self.h)
        ids, state = torch.tensor(i), method.Client(self.h)
        federation = Federation(N, None, lambda n, t, rng: range(n), 0.0, 0)
        up, new = client_round(method, Pipeline(), federation, t, ids, down, state, problem.oracle(ids, t))
        self.pending = {ticket: new.h}
        return up


@pytest.mark.parametrize("orders", [range(40), pytest.param(range(40, 1040), marks=pytest.mark.slow)], ids=len)
def test_the_invariant_under_any_order_of_messages(orders):
    """Random orders of sending, replies, losses, duplicates, given-up jobs, and restarts of server and clients."""
    worst = 0.0
    for seed in orders:
        rng = np.random.default_rng(seed)
        asynchronous = Asynchronous(FedNMap(PHI, eta_a=0.02, Q=1), buffer=int(rng.integers(1, N + 1)))
        method = asynchronous.method
        server, client = method.init(PROBLEM.start)
        nodes, ledger, version = [Node(client.h, {}) for _ in range(N)], Ledger(N), 0
        sent, wire, buffer = {}, [], []  # (client, ticket) -> what it was sent; replies on their way; replies received
        saved = pickle.dumps((server, ledger, version, sent))
        for event in range(40):
            kind, i = (
                rng.choice(["send", "reply", "twice", "lose", "give up", "server", "client"], p=P),
                int(rng.integers(N)),
            )
            if kind == "send" and not ledger.in_flight[i] and not any(j == i for j, _ in buffer):
                counted = int(ledger.last_counted[i])
                (ticket,) = ledger.send(np.array([i]), version).tolist()
                sent[i, ticket] = method.broadcast(server)
                wire.append((i, ticket, nodes[i].work(method, i, ticket, counted, server, PROBLEM, event)))
                saved = pickle.dumps((server, ledger, version, sent)) if not buffer else saved
            elif kind in ("reply", "twice") and wire:
                k = int(rng.integers(len(wire)))  # in any order
                j, ticket, up = wire[k] if kind == "twice" else wire.pop(k)
                if ledger.receive(j, ticket):
                    buffer.append((j, asynchronous.read(sent[j, ticket], up, torch.tensor(0))))
            elif kind == "lose" and wire:
                j, ticket, _ = wire.pop(int(rng.integers(len(wire))))
                if ledger.ticket[j] == ticket:
                    ledger.give_up(np.array([j])) if not any(k == j for k, _ in buffer) else None
            elif kind == "give up" and ledger.in_flight[i]:
                ledger.give_up(np.array([i]))  # its reply may still come
            elif kind == "server":  # killed: what it received since it saved is lost
                server, ledger, version, sent = pickle.loads(saved)
                buffer = []
            elif kind == "client":  # killed: its state and what is pending are on disk
                nodes[i] = pickle.loads(pickle.dumps(nodes[i]))
            if len(buffer) >= asynchronous.buffer:
                mean = method.Up(sum(read.y for _, read in buffer) / len(buffer))
                server = asynchronous.advance(server, mean, len(buffer) / N)
                version, buffer = version + 1, []
                saved = pickle.dumps((server, ledger, version, sent))
        server, ledger, version, sent = pickle.loads(saved)
        true = [node.pending.get(int(ledger.last_counted[i]), node.h) for i, node in enumerate(nodes)]
        worst = max(worst, float((server.h - sum(true) / N).norm() / max(1e-3, float(server.h.norm()))))
    assert worst < 1e-12


P = [0.35, 0.3, 0.1, 0.08, 0.05, 0.07, 0.05]


@pytest.mark.parametrize("seed", range(5))
def test_the_invariant_in_the_simulator(seed):
    rng = np.random.default_rng(seed)
    rule = [{"buffer": 1}, {"buffer": 2}, {"window": 0.7}, {"deadline": 1.5}, {"buffer": 2, "staleness": 2}][seed]
    asynchronous = Asynchronous(STEP, delays="exponential", slowdown="lognormal:1", **rule)
    for r in simulate(asynchronous, PROBLEM, rounds=60, drop=0.3, participation=0.7, seed=int(rng.integers(99))):
        assert r.server.h.norm() == 0 or difference(r) < 1e-12


@pytest.mark.parametrize(
    "rule",
    [{}, {"buffer": 2}, {"window": 0.7}, {"window": 0.4, "staleness": 2}, {"buffer": 3, "window": 0.5}],
    ids=str,
)
def test_the_rule_of_a_real_server_steps_when_the_simulator_does(rule):
    """`ready`, asked at every event in time, in a plain loop."""
    asynchronous = Asynchronous(STEP, delays="exponential", slowdown="1,1,1,2,3,9", **rule)
    delays = delays_of("exponential", "1,1,1,2,3,9", N, seed=0)
    clock, jobs, number = 0.0, {}, dict.fromkeys(range(N), 0)
    for r in simulate(asynchronous, PROBLEM, rounds=60):
        for i in (i for i in range(N) if i not in jobs):
            number[i] += 1
            jobs[i] = clock + float(delays(np.array([i]), np.array([number[i]]))[0]), r.t
        end, got = clock + rule.get("window", np.inf), []
        while not asynchronous.ready(
            len(got), len(jobs), max((r.t - s for _, s in jobs.values()), default=0), clock >= end
        ):
            if not got and clock >= end:
                end += rule["window"]
            first = min(jobs, key=jobs.get)
            clock = min(jobs[first][0], end) if clock < end else jobs[first][0]
            if clock == jobs[first][0]:
                got.append(first)
                del jobs[first]
        assert sorted(got) == r.counted.tolist()
        assert clock == pytest.approx(float(r.server.virtual_time))


# --------------------------------------------------------------------------------------------------- rounds are values


@pytest.mark.parametrize("rule", [{"buffer": 2}, {"window": 1.0}, {"deadline": 1.0}, {}], ids=str)
def test_continuing_from_any_round_gives_the_same_bits(rule):
    asynchronous = Asynchronous(STEP, delays="pareto:1.2", slowdown="lognormal:1", **rule)
    options = {"participation": 0.7, "drop": 0.2, "seed": 5}
    whole = list(simulate(asynchronous, PROBLEM, rounds=30, **options))
    for k in (0, 7, 28):
        for _ in range(2):
            *_, again = simulate(asynchronous, PROBLEM, rounds=30, after=whole[k], **options)
            assert all(torch.equal(a, b) for a, b in zip(again.server, whole[-1].server, strict=True))
            ends = zip(again.clients[EVERYBODY], whole[-1].clients[EVERYBODY], strict=True)
            assert all(torch.equal(a, b) for a, b in ends)


def test_a_run_folder_continues_to_the_same_bits(tmp_path):
    asynchronous = Asynchronous(STEP, delays="pareto:1.2", window=1, staleness=6)
    whole = fednmap.run(asynchronous, PROBLEM, rounds=60, folder=tmp_path / "whole")
    fednmap.run(asynchronous, PROBLEM, rounds=25, folder=tmp_path / "part", checkpoint_every=10)
    part = fednmap.run(asynchronous, PROBLEM, rounds=60, folder=tmp_path / "part", checkpoint_every=10)
    assert torch.equal(part.x, whole.x)
    assert part.final["virtual_time"] == whole.final["virtual_time"]
    with pytest.raises(InputError, match="holds another run: algorithm is"):
        fednmap.run(Asynchronous(STEP, delays="pareto:1.2", window=2), PROBLEM, rounds=70, folder=tmp_path / "part")


def test_threads_and_chunks_do_not_show():
    asynchronous = Asynchronous(STEP, delays="exponential", buffer=4)
    ends = [last(asynchronous, rounds=50, chunk=2, threads=k).server.z for k in (1, 2)]
    assert torch.equal(*ends)
    torch.testing.assert_close(last(asynchronous, rounds=50).server.z, ends[0], rtol=1e-12, atol=1e-12)


def test_what_is_counted_of_bytes_and_time():
    asynchronous = Asynchronous(STEP, delays="exponential", buffer=2)
    rounds = list(simulate(asynchronous, PROBLEM, rounds=20))
    vector = PROBLEM.dim * 8
    assert [r.bytes_up for r in rounds] == [2 * vector] * 20
    assert [r.bytes_down for r in rounds] == [(6 + 2) * 2 * vector, *[2 * 2 * vector] * 19]
    times = [float(r.server.virtual_time) for r in rounds]
    assert times == sorted(times)
    assert all(len(r.counted) == 2 for r in rounds)
    counts = times_counted(rounds[-1])
    assert counts.sum() == 40
    assert (rounds[-1].server.counted_least, rounds[-1].server.counted_most) == (counts.min(), counts.max())


def test_float32_and_another_seed():
    problem = LeastSquares([(a.float(), b.float()) for a, b in PROBLEM.data])
    asynchronous = Asynchronous(STEP, delays="pareto:1.2", window=1)
    one, two = (deque(simulate(asynchronous, problem, rounds=100, seed=s), maxlen=1)[0] for s in (0, 1))
    assert one.server.z.dtype == torch.float32
    assert not torch.equal(one.server.z, two.server.z)
    assert difference(one) < 1e-5


# ------------------------------------------------------------------------------------------------------------ delays


@pytest.mark.parametrize(
    ("spec", "mean"),
    [("constant:3", 3), ("uniform:1,3", 2), ("exponential:2", 2), ("lognormal:0.5", np.exp(0.125)), ("pareto:3", 0.75)],
)
def test_the_distributions(spec, mean):
    jobs = np.arange(1, 200_001)
    found = delays_of(spec, None, 4, seed=1)(np.zeros_like(jobs), jobs)
    assert abs(found.mean() - mean) < 0.02 * mean
    again = delays_of(spec, None, 4, seed=1)(np.array([0, 0]), np.array([7, 5]))
    assert again.tolist() == found[[6, 4]].tolist()  # by client and job, in any order


def test_heavy_tails_are_cut():
    found = delays_of("pareto:1.2", None, 1, 0)(np.zeros(100_000, dtype=np.int64), np.arange(100_000))
    assert found.min() >= 0.5
    assert found.max() == 100
    assert abs((found > 5).mean() - 10**-1.2) < 0.003


def test_slowdowns():
    assert factors("1,2,30", 3).tolist() == [1, 2, 30]
    drawn = factors("lognormal:1.2", 1001, seed=4)
    assert np.median(drawn) == 1
    assert abs(np.log(drawn).std() - 1.2) < 0.1


def test_traces(tmp_path):
    (tmp_path / "each.txt").write_text("1 2\n\n3,4,5\n")
    delays = delays_of(f"trace:{tmp_path / 'each.txt'}", "1,10", 2, 0)
    assert delays(np.array([0, 0, 1, 1]), np.array([1, 3, 3, 4])).tolist() == [1, 1, 50, 30]
    (tmp_path / "one.txt").write_text("1 2 3")
    assert delays_of(f"trace:{tmp_path / 'one.txt'}", None, 5, 0)(np.array([4]), np.array([2])).tolist() == [2]
    asynchronous = Asynchronous(STEP, delays=lambda clients, jobs: 1.0 + clients + jobs, buffer=1)
    assert last(asynchronous, rounds=1).server.virtual_time == 2


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Asynchronous(STEP, delays="paretto"), "did you mean 'pareto'"),
        (lambda: Asynchronous(STEP, delays="pareto:-1"), "expected delays such as .*got 'pareto:-1'"),
        (lambda: Asynchronous(STEP, delays="uniform:3"), "uniform:LOW,HIGH"),
        (lambda: Asynchronous(STEP, delays="trace:missing.txt"), "cannot read the trace missing.txt"),
        (lambda: Asynchronous(STEP, slowdown="fast"), "expected a slowdown such as lognormal"),
        (lambda: last(Asynchronous(STEP, slowdown="1,2"), rounds=1), "each of 6 clients, got 2 numbers"),
        (lambda: last(Asynchronous(STEP, delays=lambda c, k: 0 * c), rounds=1), "expected 6 delays above 0"),
        (lambda: Asynchronous(STEP, buffer=0), "buffer to be an integer of at least 1, got 0"),
        (lambda: Asynchronous(STEP, window=0), "window to be a number above 0, got 0"),
        (lambda: Asynchronous(STEP, window=1, deadline=1), "leave buffer, window and staleness out"),
        (lambda: Asynchronous(STEP, staleness=-1), "staleness to be an integer of at least 0"),
        (lambda: Asynchronous(FedNMap), "expected a method with a server, such as .*got FedNMap"),
        (lambda: Asynchronous(Decentralized(NormED(PHI), Ring(6))), "expected a method with a server"),
        (lambda: Asynchronous(FedNMap(PHI, forget=0.5)), "does not determine how far.*forget = 0"),
        (lambda: Asynchronous(SCAFFOLD()), "the uplink of SCAFFOLD does not determine"),
        (lambda: Asynchronous(CompressedFedNMap(PHI)), "CompressedFedNMap"),
        (lambda: Asynchronous(FedDR(PHI)), "FedDR"),
        (lambda: Asynchronous(FedNewton(PHI)), "FedNewton"),
        (lambda: Asynchronous(STEP, mixing=0.5, buffer=1), "counts late replies in full"),
        (lambda: Asynchronous(FedAvg(), mixing=0.5), "one client's model at a time"),
        (lambda: last(Asynchronous(STEP), rounds=1, sampler=lambda n, t, rng: [0]), "leave sampler and store out"),
        (lambda: last(Asynchronous(STEP), rounds=1, uplink=fednmap.privacy.Median()), "leave uplink out"),
        (lambda: rule_of("window"), "expected all, buffer:K, window:TIME or deadline:TIME, got 'window'"),
        (lambda: rule_of("buffer:1.5"), "got 'buffer:1.5'"),
        (lambda: rule_of("all:3"), "got 'all:3'"),
        (lambda: safe_step(2.0, 1, largest=1.0), "expected 0 < smoothness <= largest"),
    ],
)
def test_refusals_are_one_line(make, words):
    with pytest.raises(InputError, match=words) as error:
        make()
    assert "\n" not in str(error.value)
