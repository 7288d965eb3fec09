"""The round loop: exactness under sampling and loss, one trajectory however it is run, refusals, limits of float32."""

import platform
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lasso import PHI, gap, last, models
from stochastic import KINDS, least_squares
from torch import Tensor

from fednmap import Diverged, InputError, run, simulate
from fednmap import algorithms as A
from fednmap.core import Algorithm, ProblemInfo, info_of
from fednmap.data.partition import iid
from fednmap.decentralized import Complete, Decentralized, NormED
from fednmap.measure import stationarity
from fednmap.privacy import Attack, Monitor, Privacy
from fednmap.problems import LeastSquares, Logistic
from fednmap.regularizers import L1, Zero
from fednmap.simulation.quantised import Quantised
from fednmap.simulation.states import Clients
from fednmap.simulation.uplink import Stage
from fednmap.testing import check_algorithm, heterogeneous, optimum, smoothness

TEN = heterogeneous(n=10)
L = smoothness(TEN)
GAMMA = 1 / L


def fednmap(phi=PHI, Q=5):
    return A.FedNMap(phi, eta_a=0.5 / (L * Q), Q=Q, gamma=GAMMA)


def residual(algorithm, round_, problem=TEN):
    return float(stationarity(problem, algorithm.phi, algorithm.model(round_.server), GAMMA))


@pytest.mark.parametrize(
    ("rounds", "history"),
    [(700, {}), (2400, {"participation": 0.3}), (1200, {"drop": 0.3}), (1800, {"participation": 0.5, "drop": 0.3})],
    ids=["everybody", "3 of 10", "30 % lost", "both"],
)
@pytest.mark.parametrize("make", [fednmap, lambda: A.Zhang(PHI, eta_a=0.1 / L, Q=5)], ids=["FedNMap", "Zhang"])
def test_the_lasso_is_solved_exactly(make, rounds, history):
    algorithm = make()
    end = last(algorithm, TEN, rounds=rounds, seed=1, **history)
    assert residual(algorithm, end) < 1e-20


def test_three_of_ten_are_drawn():
    seen = torch.zeros(10)
    for round_ in simulate(fednmap(), TEN, rounds=200, participation=0.3):
        assert len(round_.participants) == len(set(round_.participants.tolist())) == 3
        assert torch.equal(round_.counted, round_.participants)
        seen[round_.participants] += 1
    assert seen.min() > 30  # 60 expected, standard deviation 6.5
    assert seen.max() < 90


def test_replies_are_lost_as_often_as_asked():
    rounds = list(simulate(A.FedAvg(eta_a=0.01, Q=1), TEN, rounds=200, drop=0.3))
    counted = sum(len(r.counted) for r in rounds)
    assert all(set(r.counted.tolist()) <= set(r.participants.tolist()) for r in rounds)
    assert abs(counted / 2000 - 0.7) < 0.05


@pytest.mark.parametrize(("participation", "count"), [(0.01, 1), (0.26, 3), (0.5, 5), (1.0, 10)])
def test_at_least_one_client_takes_part(participation, count):
    assert len(last(fednmap(), TEN, rounds=1, participation=participation).participants) == count


MEMORY = {
    "FedNMap": (A.FedNMap(L1(0.05), eta_a=0.02, Q=3, gamma=0.3), "h"),
    "Zhang": (A.Zhang(L1(0.05), eta_a=0.02, Q=3), "h"),
    "FedCanon": (A.FedCanon(L1(0.05), eta_a=0.02, Q=3), "h"),
    "SCAFFOLD": (A.SCAFFOLD(eta_a=0.02, Q=3), "c"),
    "FedDR": (A.FedDR(L1(0.05), eta_a=0.02, Q=3, r=0.4), "xhat"),
    "FedADMM": (A.FedADMM(L1(0.05), eta_a=0.02, Q=3, beta=3.0), "xhat"),
}


@pytest.mark.parametrize("name", MEMORY)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    participation=st.floats(0.05, 1.0),
    drop=st.floats(0.0, 0.9),
    rounds=st.integers(1, 25),
    seed=st.integers(0, 2**32),
    chunk=st.none() | st.integers(1, 5),
    weights=st.none() | st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4),
)
def test_the_servers_memory_is_the_mean_of_the_clients(name, participation, drop, rounds, seed, chunk, weights):
    w = torch.full((4,), 0.25, dtype=torch.float64)
    if weights is not None:
        w = torch.tensor(weights, dtype=torch.float64)
        w = w / w.sum()
    problem = least_squares(weights=None if weights is None else w)
    algorithm, field = MEMORY[name]
    history = {"participation": participation, "drop": drop, "rounds": rounds, "seed": seed, "chunk": chunk}
    end = last(algorithm, problem, **history)
    held = getattr(end.clients[torch.arange(4)], field)
    kept = getattr(end.server, "xtilde" if field == "xhat" else field)
    assert float((w @ held - kept).abs().max()) < 1e-11 * (1 + float(held.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_all_at_once_in_chunks_and_one_at_a_time_are_one_trajectory(kind):
    problem, algorithm = KINDS[kind](), MEMORY["FedNMap"][0]
    history = {"rounds": 20, "participation": 0.8, "drop": 0.2, "seed": 2}
    together = models(algorithm, problem, **history)
    for chunk in (1, 2, 3, 100):
        assert gap(together, models(algorithm, problem, chunk=chunk, **history)) < 1e-12


@pytest.mark.parametrize("name", MEMORY)
def test_chunks_do_not_matter_to_any_method_with_memory(name):
    problem, algorithm = least_squares(), MEMORY[name][0]
    history = {"rounds": 20, "participation": 0.8, "drop": 0.2, "seed": 2}
    pair = [models(algorithm, problem, chunk=chunk, **history) for chunk in (None, 1)]
    assert gap(*pair) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_same_bits(kind):
    history = {"rounds": 10, "participation": 0.6, "drop": 0.2, "seed": 9}
    one, two = (models(MEMORY["FedNMap"][0], KINDS[kind](), **history) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))


def test_seeds_matter():
    history = {"rounds": 10, "participation": 0.5}
    one, two = (models(fednmap(), TEN, seed=seed, **history) for seed in (0, 1))
    assert gap(one, two) > 1e-3
    one, two = (models(MEMORY["FedNMap"][0], least_squares(seed=seed), rounds=10) for seed in (0, 1))
    assert gap(one, two) > 1e-3


def test_fednmap_sends_exactly_half_of_what_scaffold_sends():
    ours, theirs = (last(m, TEN, rounds=3) for m in (fednmap(Zero()), A.SCAFFOLD(eta_a=0.01, Q=5)))
    assert 2 * ours.bytes_up == theirs.bytes_up == 2 * 10 * TEN.dim * 8
    assert (
        2 * ours.bytes_down == theirs.bytes_down == 2 * 10 * TEN.dim * 8
    )  # and receives half, from the second round on


def test_bytes_count_the_clients_that_took_part_in_the_dtype_of_the_run():
    start = torch.zeros(TEN.dim, dtype=torch.float32)
    end = last(fednmap(), TEN, rounds=1, start=start, participation=0.3, drop=0.5)
    assert (end.bytes_up, end.bytes_down) == (3 * TEN.dim * 4, 3 * 2 * TEN.dim * 4)
    assert fednmap().model(end.server).dtype == torch.float32


def test_without_a_reply_the_server_stays_and_the_round_is_told():
    algorithm, before, silent = fednmap(), None, 0
    for t, round_ in enumerate(simulate(algorithm, TEN, rounds=60, participation=0.1, drop=0.8)):
        assert round_.t == t
        if not len(round_.counted):
            silent += 1
            server = algorithm.init(TEN.start)[0] if before is None else before
            assert all(torch.equal(u, v) for u, v in zip(server, round_.server, strict=True))
        before = round_.server
    assert silent > 30


def test_a_reply_that_weighs_nothing_moves_nothing():
    weights = torch.tensor([0.0] + [1 / 9] * 9, dtype=torch.float64)
    problem, algorithm = LeastSquares(list(TEN.data), weights=weights), fednmap()
    before, alone = algorithm.init(TEN.start)[0], 0
    for round_ in simulate(algorithm, problem, rounds=60, participation=0.1):
        if round_.counted.tolist() == [0]:
            alone += 1
            assert all(torch.equal(u, v) for u, v in zip(before, round_.server, strict=True))
        before = round_.server
    assert alone > 0


@pytest.mark.slow
@pytest.mark.ci(turn=2)
def test_weighted_clients_reach_the_weighted_optimum():
    weights = torch.arange(1.0, 11.0, dtype=torch.float64)
    problem = LeastSquares(list(TEN.data), weights=weights / weights.sum())
    best, unweighted = optimum(problem, PHI), optimum(TEN, PHI)
    algorithm = fednmap()
    end = last(algorithm, problem, rounds=2400, participation=0.4, drop=0.1)
    assert float((algorithm.model(end.server) - best).norm()) < 1e-10
    assert float((best - unweighted).norm()) > 1e-2


class Quadratics:
    """What a user would write, and no more: f_i(x) = d_i/2 |x - b_i|^2."""

    n, dim = 3, 4

    def __init__(self):
        self.d = torch.tensor([1.0, 2.0, 3.0])
        self.b = torch.arange(12.0).reshape(3, 4)

    def oracle(self, clients, t):
        d, b = self.d[clients].unsqueeze(-1), self.b[clients]
        return lambda x, q: d * (x - b)

    def loss(self, x):
        return (self.d / 2 * (x - self.b).square().sum(-1)).mean()

    def gradient(self, x):
        return (self.d.unsqueeze(-1) * (x - self.b)).mean(0)


def test_a_problem_with_nothing_but_the_protocol_works():
    algorithm = A.FedNMap(L1(0.5), eta_a=0.02, Q=5, gamma=0.3)
    end = last(algorithm, Quadratics(), rounds=400, participation=0.7)
    x = algorithm.model(end.server)
    assert x.dtype == torch.float32
    assert float(stationarity(Quadratics(), algorithm.phi, x, 0.3)) < 1e-8


class Named(Quadratics):
    """The same, with attributes of its own that are called as what a problem may declare."""

    chunk, pieces, concurrent, digest, exact_gradients = "a", "b", "c", "d", "e"

    def __init__(self):
        super().__init__()
        self.module, self.exact, self.made_of, self.smoothness, self.steps_per_round = 1.5, None, [], 3.0, "often"

    def part(self, name):
        raise AssertionError

    value_and_gradient = hessian = hessians = subsample = part


def test_only_what_a_problem_says_by_info_is_a_declaration(tmp_path):
    algorithm = A.FedNMap(L1(0.5), eta_a=0.02, Q=5, gamma=0.3)
    plain, found = (run(algorithm, kind(), rounds=5) for kind in (Quadratics, Named))
    assert torch.equal(found.x, plain.x)
    assert found.final["objective"] == plain.final["objective"]
    run(algorithm, Named(), rounds=2, folder=tmp_path / "run")
    with pytest.raises(InputError, match="not made from a torch module"):
        found.module()


def test_what_info_returns_is_declared_and_nothing_else():
    class Telling(Named):
        def info(self):
            return ProblemInfo(start=ONES, chunk=2)

    assert info_of(Telling()) == ProblemInfo(start=ONES, chunk=2)
    assert torch.equal(run(fednmap(), Telling(), rounds=0).x, PHI.prox(ONES, GAMMA))
    assert info_of(Named()) == ProblemInfo()
    Telling.info = "about this problem"
    with pytest.raises(InputError, match=r"expected Telling.info\(\) to return a ProblemInfo, got str"):
        run(fednmap(), Telling(), rounds=1)


ONES = torch.ones(4)


class Double(Quadratics):
    """The same in float64 only, with clients that may weigh differently; it does not say where to begin."""

    def __init__(self, weights=None):
        super().__init__()
        self.d, self.b, self.weights = self.d.double(), self.b.double(), weights

    def shares(self):
        w = torch.ones(3) if self.weights is None else torch.as_tensor(self.weights)
        return (w / w.sum()).double()

    def loss(self, x):
        return self.shares() @ (self.d / 2 * (x - self.b).square().sum(-1))

    def gradient(self, x):
        curvature = self.shares() @ self.d * torch.eye(4, dtype=torch.float64)
        return torch.matmul(curvature, x) - (self.shares() * self.d) @ self.b


ZEROS = torch.zeros(4, dtype=torch.float64)


def test_a_problem_of_another_dtype_is_measured_in_that_of_the_start(tmp_path):
    plain = run(fednmap(), Double(), rounds=3, start=ZEROS)
    kept = run(fednmap(), Double(), rounds=3, start=ZEROS, folder=tmp_path / "run")
    assert plain.x.dtype == torch.float64
    assert plain.measure_gamma == kept.measure_gamma


@pytest.mark.parametrize("weights", [[1, 2, 3], torch.tensor([0.5, 1.0, 1.5]), torch.tensor([1.0, 2.0, 3.0]) / 6])
def test_weights_count_by_their_ratios(weights):
    """With a server and on a graph, whatever they sum to."""
    problem = Double(weights)
    curvature = problem.shares() @ problem.d
    due = L1(1.0).prox((problem.shares() * problem.d) @ problem.b / curvature, float(1 / curvature))
    for algorithm in (A.FedNMap(L1(1.0), eta_a=0.05, Q=2), Decentralized(NormED(L1(1.0), eta_a=0.05), Complete(3))):
        end = last(algorithm, problem, rounds=400, start=ZEROS)
        torch.testing.assert_close(algorithm.model(end.server), due)


def test_weights_that_sum_to_one_stay_to_the_bit():
    weights = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64) * (1 + 1e-9)
    assert torch.equal(info_of(Double(weights)).weights, weights)


@dataclass(frozen=True)
class Telling(A.FedAvg):
    """Every client also sends a number, with an axis of its own or without."""

    axis: bool = True

    class Up(NamedTuple):
        x: Tensor
        size: Tensor

    class Server(NamedTuple):
        x: Tensor
        size: Tensor

    def init(self, start):
        return self.Server(start, start.new_zeros(1)), self.Client()

    def local(self, down, client, g):
        moved = g(down.x, 0)
        return self.Up(moved, moved.norm(dim=-1, keepdim=self.axis)), client

    def aggregate(self, server, up, share):
        return self.Server(server.x - self.eta_a * up.x, up.size)


def test_a_number_of_every_client_is_averaged_alike_in_any_chunks():
    sizes = [last(Telling(eta_a=0.1 / L), TEN, rounds=3, chunk=chunk).server.size for chunk in (1, 2, 10)]
    assert all(torch.allclose(size, sizes[0], rtol=1e-12) for size in sizes)


def test_what_a_result_hands_out_is_not_the_servers_own():
    """A model that is changed by its owner does not change where a run goes on."""
    method = A.FedAvg(eta_a=0.1 / L, Q=2)
    first, whole = run(method, TEN, rounds=5), run(method, TEN, rounds=10)
    first.x.zero_()
    again = run(method, TEN, rounds=7, after=first)
    assert torch.equal(again.x, run(method, TEN, rounds=7).x)
    again.x.zero_()
    assert torch.equal(run(method, TEN, rounds=10, after=again).x, whole.x)


NAN = torch.tensor([[1.0, 2.0], [float("nan"), 0.0]])
REFUSED = {
    "participation is 0": lambda: simulate(fednmap(), TEN, rounds=1, participation=0.0),
    "participation is 1.1": lambda: simulate(fednmap(), TEN, rounds=1, participation=1.1),
    "participation is nan": lambda: simulate(fednmap(), TEN, rounds=1, participation=float("nan")),
    r"expected drop, .* got 1": lambda: simulate(fednmap(), TEN, rounds=1, drop=1.0),
    "got -0.1": lambda: simulate(fednmap(), TEN, rounds=1, drop=-0.1),
    "expected rounds to be an integer of at least 0, got -1": lambda: simulate(fednmap(), TEN, rounds=-1),
    "expected chunk to be an integer of at least 1, got 0": lambda: simulate(fednmap(), TEN, rounds=1, chunk=0),
    "expected start of length 8, got shape": lambda: simulate(fednmap(), TEN, rounds=1, start=torch.zeros(3)),
    "got torch.int64": lambda: simulate(fednmap(), TEN, rounds=1, start=torch.zeros(8, dtype=torch.int64)),
    "central method": lambda: simulate(A.ProxSGD(PHI), TEN, rounds=1),
    "every client": lambda: simulate(A.FedPD(), TEN, rounds=1, participation=0.5),
    "every client in": lambda: simulate(A.Scaffnew(), TEN, rounds=1, drop=0.1),
    r"3 finite weights of Double, .* got shape \(2,\)": lambda: simulate(fednmap(), Double([0.5, 0.5]), rounds=1),
    "and sum nan": lambda: simulate(fednmap(), Double([float("nan"), 0.5, 0.5]), rounds=1),
    "at least 0 and not all 0": lambda: simulate(fednmap(), Double([-1.0, 0.5, 1.5]), rounds=1),
    "not all 0": lambda: simulate(fednmap(), Double([0, 0, 0]), rounds=1),
    r"Telling sends size of shape \(\), .* one axis": lambda: simulate(Telling(axis=False), TEN, rounds=1),
    "NaN or infinity": lambda: LeastSquares([(NAN, torch.zeros(2))]),
    "y holds NaN": lambda: LeastSquares([(torch.ones(2, 2), NAN[:, 0])]),
    "no sample": lambda: LeastSquares([(torch.ones(2, 2), torch.ones(2)), (torch.ones(0, 2), torch.ones(0))]),
    "no clients": lambda: LeastSquares([]),
    "clients": lambda: iid(torch.zeros(5), 6),
    "must agree": lambda: LeastSquares([(torch.ones(2, 2), torch.ones(3))]),
    "batch_size is 0": lambda: LeastSquares([(torch.ones(2, 2), torch.ones(2))], batch_size=0),
    "weights must be": lambda: LeastSquares([(torch.ones(2, 2), torch.ones(2))], weights=[0.5]),
    "whole-number labels": lambda: Logistic([(torch.ones(2, 2), torch.tensor([0.5, 1.0]))]),
    "labels are -1 to 1": lambda: Logistic([(torch.ones(3, 2), torch.tensor([-1, 0, 1]))]),
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_input_is_refused_before_the_first_round(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


def test_no_rounds_is_an_empty_run():
    assert list(simulate(fednmap(), TEN, rounds=0)) == []


def test_divergence_names_the_round_and_a_remedy_after_what_was_measured():
    measured = []
    with pytest.raises(Diverged, match=r"after round \d+; use a smaller eta_a") as stopped:
        measured.extend(round_.t for round_ in simulate(A.FedAvg(eta_a=50.0, Q=5), TEN, rounds=500))
    assert len(measured) > 3
    assert stopped.value.t == measured[-1] + 1


@pytest.mark.slow
@pytest.mark.ci(turn=3)
def test_float32_has_a_floor():
    # Under sampling the server's h and the mean of the h_i part by a random walk of rounding: far below minibatch
    # noise in float32, at rounding in float64.
    apart = {}
    for dtype in (torch.float32, torch.float64):
        history = {"rounds": 2000, "participation": 0.5, "drop": 0.3, "start": torch.zeros(TEN.dim, dtype=dtype)}
        end = last(fednmap(), TEN, **history)
        held = end.clients[torch.arange(10)].h
        assert held.dtype == end.server.h.dtype == dtype
        apart[dtype] = float((held.double().mean(0) - end.server.h).abs().max())
    assert 1e-8 < apart[torch.float32] < 1e-4
    assert apart[torch.float64] < 1e-12


class Down(NamedTuple):
    z: Tensor
    h: Tensor
    t: Tensor


class Up(NamedTuple):
    y: Tensor
    arrived: Tensor


@dataclass(frozen=True)
class Forgetful(Algorithm):
    """FedNMap that loses 30 % of the replies itself; where `moves`, a client whose reply was lost still moves h_i."""

    inner: A.FedNMap
    moves: bool
    traits = A.FedNMap.traits
    Server = Down

    @property
    def phi(self):
        return self.inner.phi

    def init(self, start):
        server, client = self.inner.init(start)
        return Down(*server, torch.tensor(0)), client

    def broadcast(self, server):
        return server

    def local(self, down, client, g):
        up, new = self.inner.local(down, client, g)
        drawn = np.random.default_rng([3, int(down.t)]).random(client.h.shape[:-1]) >= 0.3
        arrived = torch.as_tensor(drawn).to(up.y).unsqueeze(-1)
        kept = new.h if self.moves else torch.where(arrived > 0, new.h, client.h)
        return Up(arrived * up.y, arrived), type(new)(kept)

    def aggregate(self, server, up, share):
        received = float(up.arrived)
        inner = self.inner.aggregate(self.inner.Server(*server[:2]), self.inner.Up(up.y / received), received)
        return Down(*inner, server.t + 1)

    def model(self, server):
        return self.inner.model(server)


@pytest.mark.parametrize("moves", [False, True])
def test_a_lost_reply_must_not_move_the_clients_state(moves):
    algorithm = Forgetful(fednmap(), moves)
    end = residual(algorithm, last(algorithm, TEN, rounds=1200))
    assert end > 1e-3 if moves else end < 1e-20


@dataclass(frozen=True)
class Delayed(Algorithm):
    """Sends what its clients kept one and two rounds ago: the uplink and the new state are the old state's tensors."""

    eta_a: float
    phi = Zero()
    traits = replace(A.FedAvg.traits, up=2, down=1)

    class Server(NamedTuple):
        x: Tensor

    class Client(NamedTuple):
        h: Tensor
        previous: Tensor
        shown: Tensor

    class Up(NamedTuple):
        h: Tensor
        previous: Tensor

    def init(self, start):
        return self.Server(start), self.Client(*torch.zeros_like(start).expand(3, -1))

    def local(self, down, client, g):
        shown = torch.from_numpy(client.h.numpy())  # the same memory, another storage
        return self.Up(client.h, client.previous), self.Client(g(down.x, 0), client.h, shown)

    def aggregate(self, server, up, share):
        return self.Server(server.x - self.eta_a * (up.h + 0.3 * up.previous))

    def model(self, server):
        return server.x


@dataclass(frozen=True)
class LookingBack(Algorithm):
    """FedNMap whose clients also keep the h of the round before, and exchange it with a third vector."""

    inner: A.FedNMap
    traits = A.FedNMap.traits
    Server, Up = A.FedNMap.Server, A.FedNMap.Up

    class Client(NamedTuple):
        h: Tensor
        before: Tensor
        third: Tensor

    @property
    def phi(self):
        return self.inner.phi

    def init(self, start):
        server, client = self.inner.init(start)
        return server, self.Client(client.h, client.h, client.h + 1)

    def local(self, down, client, g):
        up, new = self.inner.local(down, A.FedNMap.Client(client.h), g)
        return up, self.Client(new.h, client.third, client.before)

    def state_after_sending(self, down, client, up, sent):
        new = self.inner.state_after_sending(down, A.FedNMap.Client(client.h), up, sent)
        return self.Client(new.h, client.third, client.before)

    def aggregate(self, server, up, share):
        return self.inner.aggregate(server, up, share)

    def model(self, server):
        return self.inner.model(server)


ALIASING = {
    "Delayed": lambda phi=Zero(), L=L, Q=1: Delayed(0.1 / L),  # noqa: B008
    "LookingBack": lambda phi=PHI, L=L, Q=5: LookingBack(A.FedNMap(phi, eta_a=0.5 / (L * Q), Q=Q, gamma=1 / L)),
}
WAYS = {
    "everybody": {},
    "one by one": {"chunk": 1},
    "chunks": {"chunk": 3},
    "threads": {"chunk": 2, "threads": 2},
    "sampled": {"participation": 0.5},
    "a run of neighbours": {"sampler": lambda n, t, rng: range(2, 7)},
    "lossy": {"drop": 0.3},
    "on disk": {"chunk": 4, "store": None},
    "stages": {"uplink": [Stage(), Monitor(norms_only=True)]},
    "every uplink": {"uplink": Monitor()},
    "every uplink in chunks": {"uplink": Monitor(), "chunk": 3, "threads": 2},
    "clipped": {"uplink": Privacy(1e9)},
    "clipped, every uplink": {"uplink": Monitor(Privacy(1e9))},
    "secure sums": {"uplink": Quantised(10)},
    "an attack of size 1": {"uplink": Attack("scale", 2, 1.0)},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ALIASING)
def test_states_are_values(name, way, tmp_path):
    """A new state or an uplink may be an old state's tensor: the run is that of single clients, one after another."""
    algorithm, options = ALIASING[name](), dict(WAYS[way])
    if name == "Delayed" and way in ("clipped", "clipped, every uplink", "secure sums"):
        pytest.skip("its state does not follow from what it sent")
    if "store" in options:
        options["store"] = tmp_path
    rounds = list(simulate(algorithm, TEN, rounds=6, start=TEN.start + 1, **options))
    clients = [algorithm.init(TEN.start + 1)[1]] * TEN.n
    server = algorithm.init(TEN.start + 1)[0]
    for t, round_ in enumerate(rounds):
        counted = round_.counted.tolist()
        ups = []
        for i in counted:
            up, clients[i] = algorithm.local(server, clients[i], TEN.oracle(torch.tensor(i), t))
            ups.append(up)
        mean = type(up)(*(torch.stack(v).mean(0) for v in zip(*ups, strict=True)))
        server = algorithm.aggregate(server, mean, len(counted) / TEN.n)
        for mine, due in zip(round_.server, server, strict=True):
            torch.testing.assert_close(mine, due, rtol=1e-9, atol=1e-9)
    for mine, *due in zip(rounds[-1].clients[torch.arange(TEN.n)], *clients, strict=True):
        torch.testing.assert_close(mine, torch.stack(due), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ALIASING)
def test_the_contract_notices_states_that_are_written_too_early(name, monkeypatch):
    check_algorithm(ALIASING[name], rounds=10, tolerance=torch.inf)
    copies = Clients.read

    def lend(self, ids, used=None):
        """The tables' own rows, where they are neighbours."""
        rows = self.row[ids].tolist() if ids.ndim else []
        if not rows or rows != list(range(rows[0], rows[0] + len(rows))):
            return copies(self, ids, used)
        return self._make(*(table[rows[0] : rows[-1] + 1] for table in self._blocks[0]))

    monkeypatch.setattr(Clients, "read", lend)
    with pytest.raises(AssertionError, match="than a loop over single clients"):
        check_algorithm(ALIASING[name], rounds=10, tolerance=torch.inf)


FAULTS = """
import resource, torch
from fednmap import simulate
from fednmap.algorithms import FedAvg

class Flat:
    n, dim = 1, 9_000_000
    def oracle(self, clients, t):
        return lambda x, q: x.expand(*clients.shape, self.dim) * 0.5
    def loss(self, x):
        return x.sum()
    gradient = loss

rounds = simulate(FedAvg(eta_a=0.1, Q=2), Flat(), rounds=6)
counts = []
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    next(rounds)
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(counts[2:]))
"""


@pytest.mark.slow
@pytest.mark.ci(turn=4)
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator of another C library")
def test_large_vectors_are_not_given_back_to_the_system_in_every_step():
    """Page faults of a round: each vector of 36 MB that came from the system would cost 8,789."""
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2000


@pytest.mark.parametrize("disk", [False, True])
def test_tables_of_several_blocks_and_clients_without_a_state_of_their_own(disk, tmp_path, monkeypatch):
    """Rounds are values, in memory and on disk, whatever the blocks hold."""
    options = {"rounds": 12, "participation": 0.4, "drop": 0.2, "seed": 3}
    store = tmp_path / "states" if disk else None
    whole = list(simulate(fednmap(), TEN, **options))
    monkeypatch.setattr("fednmap.simulation.states.BLOCK_BYTES", 3 * whole[0].server.h.nbytes)
    everybody = torch.arange(TEN.n)
    for one, expected in zip(simulate(fednmap(), TEN, store=store, **options), whole, strict=True):
        assert torch.equal(one.server.z, expected.server.z)
        assert torch.equal(one.clients[everybody].h, expected.clients[everybody].h)
    rounds = list(simulate(fednmap(), TEN, **options))
    for one, expected in zip(rounds, whole, strict=True):  # older rounds, read after the last one
        assert torch.equal(one.clients[everybody].h, expected.clients[everybody].h)
    again = list(simulate(fednmap(), TEN, after=rounds[4], **options))
    assert torch.equal(again[-1].server.z, whole[-1].server.z)
    taken = rounds[0].clients[everybody].h
    taken += 1  # a copy, of the initial state too
    assert torch.equal(rounds[0].clients[everybody].h, whole[0].clients[everybody].h)
