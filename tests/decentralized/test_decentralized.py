"""Methods on a graph: they are what they are called, end where they say, and run like all others."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from graph_methods import MAKE
from torch import Tensor

import fednmap
from fednmap import decentralized as D
from fednmap import simulate
from fednmap.algorithms import FedNMap, NormalMapSGD, ProxSGD
from fednmap.core import Regularizer
from fednmap.names import InputError
from fednmap.problems import LeastSquares, Pooled
from fednmap.regularizers import L1, MCP, Zero
from fednmap.runs.configuration import Config
from fednmap.simulation.loop import Diverged
from fednmap.simulation.schedules import Cosine, InverseSqrt
from fednmap.simulation.states import Clients
from fednmap.testing import check_decentralized, heterogeneous, optimum, smoothness

PROBLEM, PHI = heterogeneous(8), L1(0.2)
L, N = smoothness(PROBLEM), 8
EVERYBODY = torch.arange(N)
G = PROBLEM.oracle(EVERYBODY, 0)
RING = D.Ring(N).weights(0)
LAZY = (torch.eye(N, dtype=torch.float64) + RING) / 2  # the ring's W has the eigenvalue -1/3
GRAPHS = [D.Ring, D.Grid, D.Torus, D.Star, D.Complete, D.ErdosRenyi, D.UndirectedExponential]


def noisy(batch_size=3, **more):
    return LeastSquares(PROBLEM.data, batch_size=batch_size, seed=4, **more)


def states(method, rounds, graph=None, problem=PROBLEM, **options):
    """The nodes' states after some rounds, from zero."""
    *_, last = simulate(D.Decentralized(method, graph or D.Ring(problem.n)), problem, rounds=rounds, **options)
    return last.clients[torch.arange(problem.n)]


def zeros():
    return torch.zeros(N, PROBLEM.dim, dtype=torch.float64)


@pytest.mark.parametrize("name", MAKE)
def test_contract(name):
    report = check_decentralized(MAKE[name])
    biased = MAKE[name](PHI, L).traits.fixed_point is not fednmap.core.FixedPoint.EXACT
    assert biased == (report.ring > 1e-3)


@dataclass(frozen=True)
class LookingBack(D.DecentralizedAlgorithm):
    """PG-EXTRA as its paper writes it, from the round before: the new state holds tensors of the old one."""

    phi: Regularizer
    eta_a: float
    traits = D.PGExtra.traits

    class State(NamedTuple):
        x: Tensor
        x_before: Tensor
        v: Tensor
        half: Tensor
        g: Tensor
        first: Tensor

    class Message(NamedTuple):
        x: Tensor

    class Kept(NamedTuple):
        x: Tensor
        x_before: Tensor
        v: Tensor
        half: Tensor
        g: Tensor
        first: Tensor
        now: Tensor

    def init(self, start):
        zero = torch.zeros_like(start)
        return self.State(start, zero, zero, zero, zero, zero + 1)

    def message(self, state, g):
        return self.Message(state.x), self.Kept(*state, g(state.x, 0))

    def update(self, kept, mixed):
        x, _, v, half, old, first, g = kept
        v = mixed.x + (1 - first) * (v - half) - self.eta_a * (g - (1 - first) * old)
        return self.State(self.phi.prox(v, self.eta_a), x, v, (x + mixed.x) / 2, g, torch.zeros_like(first))

    def iterate(self, state):
        return state.x

    def model(self, iterate):
        return iterate


@pytest.mark.parametrize("options", [{}, {"chunk": 1}, {"chunk": 3, "threads": 2}], ids=["all", "alone", "threads"])
def test_states_are_values(options):
    method = LookingBack(PHI, 0.5 / L)
    *_, before, last = simulate(D.Decentralized(method, D.Ring(N)), PROBLEM, rounds=7, **options)
    assert torch.equal(last.clients[EVERYBODY].x_before, before.clients[EVERYBODY].x)
    expected = states(D.PGExtra(PHI, 0.5 / L), 7).x
    torch.testing.assert_close(last.clients[EVERYBODY].x, expected, rtol=1e-12, atol=1e-12)


def test_the_contract_notices_states_that_are_written_too_early(monkeypatch):
    copies = Clients.read

    def lend(self, ids, used=None):
        """The tables' own rows, where they are neighbours."""
        rows = self.row[ids].tolist() if ids.ndim else []
        if not rows or rows != list(range(rows[0], rows[0] + len(rows))):
            return copies(self, ids, used)
        return self._make(*(table[rows[0] : rows[-1] + 1] for table in self._blocks[0]))

    monkeypatch.setattr(Clients, "read", lend)
    with pytest.raises(AssertionError, match="than a loop over single nodes"):
        check_decentralized(lambda phi, L: LookingBack(phi, 0.5 / L))


# what they are, written out


def F(z, gamma, phi=PHI):
    x = phi.prox(z, gamma)
    return G(x, 0) + (z - x) / gamma


@pytest.mark.parametrize("phi", [PHI, Zero()])
def test_normdsgt_is_gradient_tracking_of_the_normal_map(phi):
    a, gamma, z = 0.1 / L, 1 / L, zeros()
    y = was = F(z, gamma, phi)
    for _ in range(20):
        z = RING @ (z - a * y)
        now = F(z, gamma, phi)
        y, was = RING @ y + now - was, now
    torch.testing.assert_close(states(D.NormDSGT(phi, a, gamma), 20).z, z, rtol=1e-12, atol=1e-12)


def test_normdsgt_without_phi_is_gradient_tracking():
    a, x = 0.1 / L, zeros()
    y = was = G(x, 0)
    for _ in range(20):
        x = RING @ (x - a * y)
        y, was = RING @ y + G(x, 0) - was, G(x, 0)
    torch.testing.assert_close(states(D.NormDSGT(Zero(), a), 20).z, x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("phi", [PHI, Zero()])
def test_normed_in_its_form_with_two_rounds(phi):
    a, gamma, before = 0.4 / L, 1 / L, zeros()
    z = LAZY @ (before - a * F(before, gamma, phi))
    for _ in range(19):
        z, before = LAZY @ (2 * z - before - a * (F(z, gamma, phi) - F(before, gamma, phi))), z
    torch.testing.assert_close(states(D.NormED(phi, a, gamma), 20).z, z, rtol=1e-11, atol=1e-11)


def test_normed_without_phi_is_exact_diffusion():
    """Yuan, Ying, Zhao and Sayed 2019: adapt, correct, combine."""
    a, w = 0.4 / L, zeros()
    was = w
    for _ in range(20):
        psi = w - a * G(w, 0)
        w, was = LAZY @ (psi + w - was), psi
    torch.testing.assert_close(states(D.NormED(Zero(), a), 20).z, w, rtol=1e-11, atol=1e-11)


def test_pgextra_is_the_box_of_its_paper():
    a, second = 0.4 / L, (torch.eye(N, dtype=torch.float64) + RING) / 2
    before = torch.ones(N, PROBLEM.dim, dtype=torch.float64)
    half = RING @ before - a * G(before, 0)
    x = PHI.prox(half, a)
    for _ in range(19):
        half = RING @ x + half - second @ before - a * (G(x, 0) - G(before, 0))
        x, before = PHI.prox(half, a), x
    found = states(D.PGExtra(PHI, a), 20, start=torch.ones_like(PROBLEM.start)).x
    torch.testing.assert_close(found, x, rtol=1e-12, atol=1e-12)


def test_proxdsgd_is_adapt_then_combine_then_prox():
    a, x = 0.4 / L, zeros()
    for _ in range(20):
        x = PHI.prox(RING @ (x - a * G(x, 0)), a)
    torch.testing.assert_close(states(D.ProxDSGD(PHI, a), 20).x, x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("method", "central"),
    [
        (D.NormDSGT(PHI, 0.1, 0.2), NormalMapSGD(PHI, 0.1, 1, 0.2)),
        (D.NormED(PHI, 0.1, 0.2), NormalMapSGD(PHI, 0.1, 1, 0.2)),
        (D.ProxDSGD(PHI, 0.1), ProxSGD(PHI, 0.1)),
        (D.PGExtra(PHI, 0.1), ProxSGD(PHI, 0.1)),
    ],
)
def test_one_node_alone_is_the_central_method(method, central):
    """NormDSGT, NormED, ProxDSGD, PGExtra."""
    alone, one = LeastSquares([PROBLEM.data[0]], batch_size=3, seed=1), D.Decentralized(method, D.Ring(1))
    for ours, theirs in zip(simulate(one, alone, rounds=30), simulate(central, alone, rounds=30), strict=True):
        torch.testing.assert_close(one.model(ours.server), central.model(theirs.server), rtol=1e-11, atol=1e-12)
        assert ours.bytes_up == ours.bytes_down == 0


def test_proxdsgd_where_all_hear_all_is_prox_sgd():
    a, pooled = 0.4 / L, Pooled(PROBLEM)
    *_, last = simulate(ProxSGD(PHI, a), pooled, rounds=30)
    torch.testing.assert_close(
        states(D.ProxDSGD(PHI, a), 30, D.Complete(N)).x[3], last.server.x, rtol=1e-10, atol=1e-12
    )


# what holds in every round


@pytest.mark.parametrize("drop", [0.0, 0.4])
def test_normdsgt_tracks_the_mean_gradient(drop):
    state = states(D.NormDSGT(PHI, 0.1 / L), 40, problem=noisy(), drop=drop)
    assert float(state.y.std()) > 1e-2
    torch.testing.assert_close(state.y.mean(0), state.G.mean(0), rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:NormED is proved")
def test_normed_on_average_takes_the_central_step():
    """Also where links fail."""
    problem, a, gamma = noisy(), 0.3 / L, 1 / L
    method = D.Decentralized(D.NormED(PHI, a, gamma), D.Ring(N))
    z = torch.zeros(N, problem.dim, dtype=torch.float64)
    for last in simulate(method, problem, rounds=25, drop=0.3):
        x = PHI.prox(z, gamma)
        due = z.mean(0) - a * (problem.oracle(EVERYBODY, last.t)(x, 0) + (z - x) / gamma).mean(0)
        z = last.clients[EVERYBODY].z
        torch.testing.assert_close(z.mean(0), due, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(last.server.iterate, z.mean(0), rtol=1e-10, atol=1e-12)


def test_pgextra_corrections_cancel():
    state = states(D.PGExtra(PHI, 0.3 / L), 40, problem=noisy())
    assert float(state.u.abs().max()) > 1e-3
    assert float(state.u.mean(0).abs().max()) < 1e-12


@pytest.mark.filterwarnings("ignore:.* is proved")
@pytest.mark.parametrize("name", ["NormDSGT", "NormED", "PGExtra"])
def test_exact_also_where_three_links_in_ten_fail(name):
    method = MAKE[name](PHI, L)
    found = method.model(method.iterate(states(method, 2500, drop=0.3)))
    best = optimum(PROBLEM, PHI, 4000)
    assert float((found - best).norm(dim=-1).max() / best.norm()) < 1e-8


@pytest.mark.slow
@pytest.mark.ci(turn=8)
@pytest.mark.filterwarnings("ignore:.* is proved")
@pytest.mark.parametrize("name", ["NormED", "PGExtra"])
def test_too_many_failing_links_are_too_many(name):
    """What the warning is about: small steps on a ring that loses eight links in ten; gradient tracking goes on."""
    small = {"NormED": D.NormED(PHI, 0.02 / L, 1 / L), "PGExtra": D.PGExtra(PHI, 0.02 / L)}[name]
    best = optimum(PROBLEM, PHI, 4000)
    assert float((states(small, 1500, drop=0.8)[0] - best).norm()) > 1e6
    tracking = states(D.NormDSGT(PHI, 0.02 / L, 1 / L), 1500, drop=0.8).z
    assert float((PHI.prox(tracking.mean(0), 1 / L) - best).norm()) < 1


def test_weights_of_the_clients_count():
    """f = sum w_i f_i, also on a graph whose mixing knows no weights."""
    w = torch.arange(1.0, N + 1, dtype=torch.float64) / 36

    class Weighted:
        n, dim, weights, start = N, PROBLEM.dim, w, PROBLEM.start
        oracle = staticmethod(PROBLEM.oracle)

        def loss(self, x):
            return w @ torch.stack([(a @ x - b).square().mean() / 2 for a, b in PROBLEM.data])

        def gradient(self, x):
            return w @ G(x.expand(N, -1), 0)

    problem = Weighted()
    method = D.Decentralized(D.PGExtra(PHI, 0.2 / L), D.Complete(N))
    result = fednmap.run(method, problem, rounds=1500, every=1500, measure_gamma=1 / L)
    assert result.final["stationarity"] < 1e-20
    assert result.final["consensus"] < 1e-20


def test_weakly_convex_penalties_and_their_limits():
    phi = MCP(0.3, 4.0)
    result = fednmap.run(D.Decentralized(D.NormED(phi, 0.2 / L, 1 / L), D.Torus(N)), PROBLEM, rounds=1500, every=1500)
    assert result.final["stationarity"] < 1e-18
    with pytest.raises(InputError, match="gamma = 5"):
        D.NormED(phi, gamma=5.0)
    with pytest.raises(InputError, match="eta_a"):
        D.PGExtra(phi, eta_a=5.0)


# graphs


@pytest.mark.parametrize("graph", [*GRAPHS, D.Exponential, D.OnePeer, D.Matchings])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 12])
def test_weights_are_doubly_stochastic(graph, n):
    topology = graph(n)
    for t in (0, 1, 5):
        W = topology.weights(t)
        assert W.shape == (n, n)
        assert W.dtype == torch.float64
        assert bool((W >= 0).all())
        torch.testing.assert_close(W.sum(0), torch.ones(n, dtype=torch.float64))
        torch.testing.assert_close(W.sum(1), torch.ones(n, dtype=torch.float64))
        assert not topology.symmetric or torch.equal(W, W.T)
        assert topology.static == torch.equal(W, topology.weights(0)) or not topology.static
    if topology.static:
        D.Weights(topology.weights(0))  # connected, and it mixes
    fails = D.Lossy(D.Ring(n), 0.5, 3)
    assert torch.equal(fails.weights(4), fails.weights(4))
    torch.testing.assert_close(fails.weights(4).sum(0), torch.ones(n, dtype=torch.float64))


def test_gaps_that_are_known():
    n = 12
    eigenvalues = (1 + 2 * torch.cos(2 * torch.pi * torch.arange(n) / n)) / 3
    assert D.spectral_gap(D.Ring(n).weights(0)) == pytest.approx(
        1 - float(eigenvalues.abs().sort().values[-2]), abs=1e-6
    )
    assert D.spectral_gap(D.Complete(n).weights(0)) == pytest.approx(1)
    product = torch.eye(8, dtype=torch.float64)
    for t in range(3):
        product = D.OnePeer(8).weights(t) @ product
    torch.testing.assert_close(product, torch.full_like(product, 1 / 8))
    assert len(D.Grid(12).edges()) == 17
    assert len(D.Torus(12).edges()) == 24
    assert len(D.Torus(12, 2).edges()) == 18  # two rows: above is below
    assert D.ErdosRenyi(12, 0.3, 1).edges() == D.ErdosRenyi(12, 0.3, 1).edges() != D.ErdosRenyi(12, 0.3, 2).edges()


def test_a_graph_from_a_file(tmp_path):
    links = tmp_path / "links.txt"
    links.write_text("# a ring\n0 1\n1,2\n2 3  # and back\n3 0\n\n0 1\n")
    torch.testing.assert_close(D.topology_of(f"file:{links}", 4).weights(0), D.Ring(4).weights(0))
    matrix = tmp_path / "W.csv"
    matrix.write_text("\n".join(",".join(f"{float(v):.9f}" for v in row) for row in D.Exponential(5).weights(0)))
    found = D.topology_of(f"file:{matrix}", 5)
    assert not found.symmetric
    torch.testing.assert_close(found.weights(0), D.Exponential(5).weights(0), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("text", "n", "words"),
    [
        ("0 1\n2 3", 4, "without a path from node 0 to node 2"),
        ("0 1\n1 2", 4, "without a path from node 0 to node 3"),
        ("0 1\n1 9", 4, "names node 9, and there are 4 nodes"),
        ("0.5 0.5 0\n0.5 0.5 0\n0 0 1", 3, "expected a connected graph"),
        ("0.5 0.3 0\n0.5 0.5 0\n0 0.2 0.9", 3, "row 0 sums to 0.8"),
        ("0.5 0.5 0\n0.5 0.5 0\n0.5 0.5 0", 3, "column 2 sums to 0"),
        ("-1 1 1\n1 -1 1\n1 1 -1", 3, "below 0"),
        ("0 1 0\n1 0 0\n0 0 1", 4, "holds 3 lines of 3 numbers, and there are 4"),
        ("0 0.5 0 0.5\n0.5 0 0.5 0\n0 0.5 0 0.5\n0.5 0 0.5 0", 4, "never mixes"),
        ("0 1\n1 2 3", 4, r"lines hold \[2, 3\]"),
        ("0 one", 4, "line 1 is '0 one'"),
        ("", 4, "no numbers"),
        (None, 4, "cannot be read"),
    ],
)
def test_files_that_are_no_graph(tmp_path, text, n, words):
    path = tmp_path / "graph"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=words) as error:
        D.topology_of(f"file:{path}", n)
    assert "\n" not in str(error.value)


# runs


@pytest.mark.parametrize("name", MAKE)
def test_going_on_threads_and_chunks(name):
    problem, method = noisy(), D.Decentralized(MAKE[name](PHI, L), D.Ring(N))
    whole = list(simulate(method, problem, rounds=12))
    again = list(simulate(method, problem, rounds=12, after=whole[4], threads=2))
    assert len(again) == 7
    assert all(
        torch.equal(u, v) for u, v in zip(whole[-1].clients[EVERYBODY], again[-1].clients[EVERYBODY], strict=True)
    )
    many = [list(simulate(method, problem, rounds=12, chunk=2, threads=k))[-1] for k in (1, 2)]
    assert all(torch.equal(u, v) for u, v in zip(*(last.clients[EVERYBODY] for last in many), strict=True))
    torch.testing.assert_close(many[0].server.iterate, whole[-1].server.iterate, rtol=1e-10, atol=1e-12)


def test_a_folder_goes_on_to_the_same_bits(tmp_path):
    method = D.Decentralized(D.NormDSGT(PHI, 0.1 / L), D.ErdosRenyi(N))
    options = {"every": 5, "drop": 0.2, "checkpoint_every": 4}
    whole = fednmap.run(method, noisy(), rounds=20, **options)
    fednmap.run(method, noisy(), rounds=9, folder=tmp_path / "run", **options)
    result = fednmap.run(method, noisy(), rounds=20, folder=tmp_path / "run", **options)
    assert torch.equal(result.x, whole.x)
    assert result.final["consensus"] == whole.final["consensus"] > 0
    assert result.final["bytes_up"] == 20 * 2 * len(D.ErdosRenyi(N).edges()) * 2 * PROBLEM.dim * 8
    with pytest.raises(InputError, match="holds another run"):
        fednmap.run(D.Decentralized(method.method, D.Ring(N)), noisy(), rounds=20, folder=tmp_path / "run", **options)


def test_schedules_and_float32():
    start = torch.zeros(PROBLEM.dim, dtype=torch.float32)
    problem = LeastSquares([(a.float(), b.float()) for a, b in PROBLEM.data])
    for make in MAKE.values():
        method = D.Decentralized(make(PHI, L), D.Ring(N))
        result = fednmap.run(method, problem, rounds=300, every=300, start=start, eta_a=InverseSqrt(method.eta_a))
        assert result.x.dtype == torch.float32
        assert result.final["stationarity"] < 0.5 * result.records[0]["stationarity"]


def test_many_nodes_are_mixed_by_their_nonzeros():
    problem, method = heterogeneous(150, 3, 4), D.NormED(PHI, 0.05 / L, 1 / L)
    sparse = states(method, 5, D.Ring(150), problem)
    z, s, g = torch.zeros(150, 4, dtype=torch.float64), torch.zeros(150, 4, dtype=torch.float64), None
    W = (torch.eye(150, dtype=torch.float64) + D.Ring(150).weights(0)) / 2
    state = method.State(z, s)
    for t in range(5):
        g = problem.oracle(torch.arange(150), t)
        message, kept = method.message(state, g)
        state = method.update(kept, method.Message(W @ message.z))
    torch.testing.assert_close(sparse.z, state.z, rtol=1e-11, atol=1e-12)


def test_divergence_is_told():
    with pytest.raises(Diverged):
        fednmap.run(D.Decentralized(D.ProxDSGD(PHI, 1e3), D.Ring(N)), PROBLEM, rounds=500)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: D.Decentralized(D.NormED(PHI), D.Exponential(N)), "needs a symmetric mixing matrix"),
        (lambda: D.Decentralized(D.PGExtra(PHI), D.OnePeer(N)), "needs a symmetric mixing matrix"),
        (lambda: D.Decentralized(FedNMap(PHI), D.Ring(N)), "got FedNMap"),
        (lambda: D.Decentralized(D.NormED(PHI), D.Ring), "got Ring"),
        (lambda: D.Weights(torch.eye(3)), "expected a connected graph"),
        (lambda: D.Torus(7, 2), "does not divide"),
        (lambda: D.ErdosRenyi(30, 0.001), "none of 1000 graphs"),
        (lambda: D.Sequence((D.Ring(3), D.Ring(4))), r"\[3, 4\] nodes"),
        (lambda: D.topology_of("rin", 3), "did you mean 'ring'"),
        (lambda: D.topology_of("ring:2", 3), "does not fit"),
        (lambda: D.NormDSGT(PHI, eta_a=-1), "eta_a is -1"),
        (
            lambda: simulate(D.Decentralized(D.NormED(PHI), D.Ring(5)), PROBLEM, rounds=1),
            "has 5 nodes and the problem 8",
        ),
        (lambda: simulate(on_ring(), PROBLEM, rounds=1, participation=0.5), "every node takes part"),
        (lambda: simulate(on_ring(), PROBLEM, rounds=1, store="x"), "leave it out"),
        (lambda: simulate(D.Decentralized(D.NormDSGT(PHI), D.OnePeer(N)), PROBLEM, rounds=1, drop=0.1), "lead one way"),
        (lambda: simulate(on_ring(), PROBLEM, rounds=9, eta_a=Cosine(0.1, 5)), "eta_a is 0 in round 8"),
        (lambda: simulate(on_ring(), PROBLEM, rounds=9, eta_a=Cosine), "got the class Cosine"),
        (lambda: on_ring().local(None, None, None), "runs its rounds itself"),
        (lambda: Config.make(algorithms=("norm-ed",)), "needs a graph; give topology"),
        (lambda: Config.make(algorithms=("fednmap", "norm-ed"), topology="ring"), "fednmap works with a server"),
        (lambda: Config.make(algorithms=("norm-ed",), topology="ring", participation=0.5), "every node takes part"),
        (lambda: Config.make(algorithms=("norm-ed",), topology="rong"), "did you mean 'ring'"),
        (lambda: Config.make(algorithms=("norm-de",), topology="ring"), "did you mean 'norm-ed'"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(make, words):
    with pytest.raises(InputError, match=words) as error:
        make()
    assert "\n" not in str(error.value)


def on_ring():
    return D.Decentralized(D.NormED(PHI), D.Ring(N))


def test_links_that_come_and_go_are_warned_of():
    with pytest.warns(UserWarning, match="NormED is proved for a graph that stays"):
        simulate(on_ring(), PROBLEM, rounds=1, drop=0.1)
    simulate(D.Decentralized(D.NormDSGT(PHI), D.Matchings(N)), PROBLEM, rounds=1)


# the command

QUICK = ("--data", "digits", "--model", "logistic", "--clients", "6", "--rounds", "12", "--eval-every", "4")


def test_train_compare_resume_and_lists(command, tmp_path):
    code, out, _ = command(
        "train", *QUICK, "--topology", "ring", "--algorithm", "norm-ed", "--out", "one", "--json", "--quiet"
    )
    found = json.loads(out)
    assert code == 0
    assert found["consensus"] > 0
    assert (found["bytes_up"], found["bytes_down"]) == (12 * 12 * 640 * 4, 0)
    assert command("train", "--resume", "one", "--json", "--quiet")[1] == out
    names = "norm-dsgt,norm-ed,prox-dsgd,pg-extra"
    code, out, _ = command("compare", *QUICK, "--topology", "torus:2", "--algorithms", names, "--quiet", "--out", "all")
    assert code == 0
    assert "apart" in out
    assert all(name in out for name in names.split(","))
    assert command("report", "all", "--out", "page.html")[0] == 0
    assert "consensus error" in (tmp_path / "page.html").read_text()
    code, out, _ = command("list", "topologies")
    assert all(name in out for name in D.TOPOLOGIES)
    assert all(name in command("list", "algorithms")[1] for name in D.DECENTRALIZED)


def test_other_links_in_the_file_are_noticed(command, tmp_path):
    (tmp_path / "links").write_text("\n".join(f"{i} {i + 1}" for i in range(5)))
    given = (
        *QUICK,
        "--topology",
        "file:links",
        "--algorithm",
        "norm-dsgt",
        "--out",
        "run",
        "--checkpoint-every",
        "4",
        "--quiet",
    )
    assert command("train", *given, "--json")[0] == 0
    code, _, err = command(
        "train", *QUICK, "--topology", "file:links", "--algorithm", "norm-ed", "--clients", "7", "--quiet"
    )
    assert code == 2
    assert "node 6" in err


@pytest.mark.slow
def test_processes_exchange_with_their_neighbours(tmp_path):
    """Three processes over gloo, nodes 0 3 6, 1 4 7 and 2 5: the stacked run, to rounding; also lossy and one way."""
    code = f"""
import sys, torch, torch.distributed as dist, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
rank, size = int(sys.argv[1]), int(sys.argv[2])
if size > 1:
    dist.init_process_group("gloo", init_method="file://{tmp_path / "meeting"}", rank=rank, world_size=size)
from fednmap import decentralized as D, simulate
from graph_methods import MAKE
from fednmap.problems import LeastSquares
from fednmap.regularizers import L1
from fednmap.testing import heterogeneous, smoothness
plain = heterogeneous(8)
problem, L, found = LeastSquares(plain.data, batch_size=3, seed=2), smoothness(plain), {{}}
for name, make in MAKE.items():
    for graph, drop in ((D.Ring(8), 0.0), (D.Torus(8), 0.3), (D.Exponential(8), 0.0), (D.Matchings(8), 0.0)):
        method = make(L1(0.2), L)
        if graph.symmetric or method.traits.directed:
            *_, last = simulate(D.Decentralized(method, graph), problem, rounds=30, drop=drop)
            states = last.clients.tensors()
            order = states["ids"].argsort()
            stacked = [v[order] for v in states.values()]
            found[name, type(graph).__name__] = [*stacked, *last.server, last.bytes_up]
if rank == 0:
    torch.save(found, sys.argv[3])
"""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    for size, name in ((1, "alone"), (3, "shared")):
        started = [
            subprocess.Popen([sys.executable, "-c", code, str(rank), str(size), str(tmp_path / name)], env=environment)
            for rank in range(size)
        ]
        assert [process.wait(timeout=240) for process in started] == [0] * size
    alone, shared = torch.load(tmp_path / "alone"), torch.load(tmp_path / "shared")
    assert alone.keys() == shared.keys()
    assert len(alone) == 14
    for key, tensors in alone.items():
        for mine, theirs in zip(tensors, shared[key], strict=True):
            torch.testing.assert_close(torch.as_tensor(theirs), torch.as_tensor(mine), rtol=1e-10, atol=1e-11)


@pytest.mark.slow
def test_the_command_with_workers(tmp_path):
    run = [sys.executable, "-m", "fednmap", "train", *QUICK, "--topology", "ring", "--algorithm", "norm-dsgt"]
    results = []
    for more in ([], ["--workers", "2"]):
        done = subprocess.run(
            [*run, *more, "--dtype", "float64", "--out", str(tmp_path / f"run{len(more)}"), "--json", "--quiet"],
            capture_output=True,
            check=True,
        )
        results.append(json.loads(done.stdout))
    for key in ("objective", "consensus", "bytes_up"):
        assert results[0][key] == pytest.approx(results[1][key], rel=1e-9)
