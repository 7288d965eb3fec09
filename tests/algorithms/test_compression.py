"""FedNMap with compressed uplinks: what is sent, what it weighs, and that it ends at the same point."""

import itertools

import pytest
import torch
from lasso import PHI, PROBLEM, L, best, distance, last

from fednmap.algorithms import CompressedFedNMap, EControlDA
from fednmap.algorithms.compressors import QuantisedCompressor, RandomK, TopKCompressor
from fednmap.core import nbytes
from fednmap.problems import LeastSquares
from fednmap.regularizers import L1, MCP
from fednmap.simulation import simulate
from fednmap.simulation.participation import Uniform, take_part
from fednmap.testing import check_algorithm, heterogeneous, optimum, smoothness

T0 = torch.tensor(0.0)
KINDS = {
    "top": TopKCompressor(3),
    "random": RandomK(3, 0),
    "8 bits": QuantisedCompressor(8),
    "4 bits": QuantisedCompressor(4),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(7,), (5, 7), (1, 1), (3, 64)])
def test_packing_loses_nothing(kind, shape, dtype):
    compress = KINDS[kind]
    for scale in (1.0, 1e-30, 1e20, 0.0):
        v = compress(torch.linspace(-1, 1.7, torch.Size(shape).numel(), dtype=dtype).reshape(shape).sin() * scale, T0)
        packed = compress.pack(v)
        assert torch.equal(compress.unpack(packed), v)
        assert v.dtype == dtype
        assert torch.equal(compress(v, T0), v)  # what has gone through once goes through


def test_what_is_packed_is_small():
    v = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sizes = {name: nbytes(kind.pack(kind(v, T0))) for name, kind in KINDS.items()}
    assert sizes == {"top": 3 * 12, "random": 3 * 12, "8 bits": 1008, "4 bits": 508}


@pytest.mark.parametrize("kind", KINDS)
def test_a_compressor_is_a_contraction(kind):
    rng = torch.Generator().manual_seed(1)
    compress = KINDS[kind]
    for p in (3, 10, 1000):
        v = torch.randn(200, p, generator=rng, dtype=torch.float64).pow(3)
        left = (compress(v, T0) - v).norm(dim=-1) / v.norm(dim=-1)
        assert float(left.max()) <= 1
        assert float(left.mean()) < (1.0 if p > 3 or "bits" in kind else 1e-12)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_entries_are_rounded_to_the_nearest(bits):
    v = torch.linspace(-3, 5, 200, dtype=torch.float64)
    sent = QuantisedCompressor(bits)(v, T0)
    unit = torch.unique(sent).diff().min()
    assert float((sent - v).abs().max()) <= float(unit) / 2
    assert float(5 / unit) <= 2 ** (bits - 1) - 1 < float(10 / unit)  # the smallest power of two that does


def test_who_takes_part_says_nothing_of_which_entries_are_sent():
    """With one seed for both: each of 12 entries is as likely whichever of six clients comes."""
    rounds, p, n = 2400, 12, 6
    together = torch.zeros(n, p)
    for t in range(rounds):
        who = take_part(n, t, sampler=Uniform(1 / n), drop=0.0, seed=0).counted
        together[who] += RandomK(1, 0)(torch.ones(p), torch.tensor(float(t)))
    due = rounds / (n * p)
    chi_squared = float((together - due).square().sum() / due)
    assert chi_squared < 130  # of 71 degrees of freedom: five deviations


@pytest.mark.parametrize("K", [0.5, 0.9, 0.95, 0.99])
def test_error_control_never_swings(K):
    assert 0 < TopKCompressor(K).control(1000) <= 1
    assert TopKCompressor(1000).control(1000) == 0


@pytest.mark.slow
@pytest.mark.ci(turn=7)
@pytest.mark.parametrize(("compressor", "bits"), [("random", 8), ("quantised", 8), ("quantised", 4)])
def test_contract_of_every_compressor(compressor, bits):
    """compressed_fednmap: the exact optimum with everybody, sampled, and with lost replies."""
    report = check_algorithm(
        lambda phi, L, Q: CompressedFedNMap(
            phi, eta_a=0.5 / (L * Q), Q=Q, gamma=1 / L, K=4, compressor=compressor, bits=bits
        ),
        rounds=3000,
    )
    assert max(report) < 1e-10


@pytest.fixture(scope="module")
def long_lasso():
    """100 coordinates, of which a client sends one per round; clients disagree about all of them."""
    rng, data = torch.Generator().manual_seed(0), []
    for _ in range(4):
        a, own = (torch.randn(*shape, generator=rng, dtype=torch.float64) for shape in ((200, 100), (100,)))
        a = torch.linalg.qr(a).Q * 200**0.5 * torch.linspace(0.95, 1.05, 100, dtype=torch.float64)
        data.append((a, a @ own))
    problem = LeastSquares(data)
    return problem, smoothness(problem), optimum(problem, L1(0.1))


HISTORIES = {"all": {}, "most": {"participation": 0.75}, "half": {"participation": 0.5}, "lossy": {"drop": 0.3}}
IN_CI = {("top", "0", "all"): 4, ("top", "0", "half"): 5, ("random", "0", "all"): 6, ("random", "0", "most"): 7}
"""The turn of a case in CI."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compressor", "control", "history"),
    [
        pytest.param(*case, marks=[pytest.mark.ci(turn=IN_CI[case])] if case in IN_CI else [])
        for case in itertools.product(("top", "random"), ("0", "default"), HISTORIES)
    ],
)
def test_one_per_cent_of_the_entries_suffice(long_lasso, compressor, control, history):
    """compressed_fednmap: with FedNMap's steps, and its own pace, to the exact optimum."""
    problem, L, solution = long_lasso
    eta = {"0": 0.0, "default": None}[control]
    algorithm = CompressedFedNMap(L1(0.1), eta_a=0.5 / L, Q=2, gamma=1 / L, K=0.01, compressor=compressor, control=eta)
    for round_ in simulate(algorithm, problem, rounds=60_000, **HISTORIES[history]):
        if round_.t % 200 == 0 and distance(algorithm.model(round_.server), solution) < 1e-11:
            break
    assert distance(algorithm.model(round_.server), solution) < 1e-10
    assert round_.bytes_up == len(round_.participants) * (8 + 4)  # one number and its place
    mean = round_.clients[torch.arange(problem.n)].h.mean(0)
    torch.testing.assert_close(mean, round_.server.h, rtol=0, atol=1e-11)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("history", HISTORIES)
def test_a_few_bits_suffice(long_lasso, bits, history):
    problem, L, solution = long_lasso
    algorithm = CompressedFedNMap(L1(0.1), eta_a=0.5 / L, Q=2, gamma=1 / L, compressor="quantised", bits=bits)
    x = algorithm.model(last(algorithm, problem, rounds=400, **HISTORIES[history]).server)
    assert distance(x, solution) < 1e-10


@pytest.mark.slow
@pytest.mark.ci(turn=3)
def test_random_entries_do_not_bear_longer_steps(long_lasso):
    """Of an entry that is heard of every 100 rounds, z goes on in the old direction meanwhile."""
    problem, L, solution = long_lasso
    steps = {"eta_a": 0.5 / L, "Q": 2, "gamma": 1 / L, "K": 0.01, "control": 0.0}
    for compressor, times in (("random", 10), ("top", 10)):
        own = {"random": 1, "top": 20}[compressor] * (1 - 0.99**0.5)
        assert CompressedFedNMap(L1(0.1), **steps, compressor=compressor).compression().pace(100) == own
        algorithm = CompressedFedNMap(L1(0.1), **steps, compressor=compressor, pace=min(1.0, times * own))
        assert not distance(algorithm.model(last(algorithm, problem, rounds=1500).server), solution) < 0.5


def test_pace_of_compressed_fednmap_is_the_share_of_a_step():
    given = {"eta_a": 0.5 / L, "gamma": 1 / L, "Q": 5, "K": 2}
    one, other = CompressedFedNMap(PHI, **given, pace=0.5), CompressedFedNMap(PHI, **given, eta_s=0.5, pace=1.0)
    assert torch.equal(last(one, rounds=9).server.z, last(other, rounds=9).server.z)
    assert TopKCompressor(8).pace(8) == RandomK(8, 0).pace(8) == QuantisedCompressor(4).pace(8) == 1
    for pace in (0.0, 1.5, "1"):
        with pytest.raises(ValueError, match=r"^CompressedFedNMap: pace is [^\n]*$"):
            CompressedFedNMap(PHI, pace=pace)


@pytest.mark.slow
@pytest.mark.ci(turn=1)
def test_weakly_convex_phi():
    phi = MCP(0.2, 8.0)
    ends = []
    for K in (2, PROBLEM.dim):
        algorithm = CompressedFedNMap(phi, eta_a=0.1 / L, Q=5, gamma=1 / L, K=K)
        ends.append(algorithm.model(last(algorithm, rounds=3000).server))
    assert distance(*ends) < 1e-10


@pytest.mark.slow
@pytest.mark.ci(turn=0)
def test_noise_is_averaged_out_by_error_control():
    """With minibatches the compressed method ends where the whole one does, up to the same noise."""
    problem = heterogeneous()
    problem.batch_size = 5
    spread = {}
    for K in (2, problem.dim):
        algorithm = CompressedFedNMap(PHI, eta_a=0.02 / L, Q=5, gamma=1 / L, K=K)
        points = [algorithm.model(r.server) for r in simulate(algorithm, problem, rounds=3000)][1000:]
        spread[K] = distance(torch.stack(points).mean(0), best(0.2))
    assert spread[2] < 3 * spread[problem.dim] + 0.01


@pytest.mark.slow
@pytest.mark.ci(turn=2)
def test_econtrolda_with_nearly_everything_converges():
    """The published share of the error is above 1 there, and the error would swing out."""
    problem = heterogeneous(samples=60, dim=40)
    L = smoothness(problem)
    algorithm = EControlDA(L1(0.2), K=39, gamma=8 * L)
    x = algorithm.model(last(algorithm, problem, rounds=6000).server)
    assert distance(x, optimum(problem, L1(0.2))) < 1e-8


def test_econtrolda_quantised_is_exact():
    algorithm = EControlDA(PHI, gamma=8 * L, compressor="quantised", bits=4)
    assert distance(algorithm.model(last(algorithm, rounds=1600).server), best(0.2)) < 1e-10
