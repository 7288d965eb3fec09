"""FedNMap with memory: the model is BFGS, its minimiser is a z, few rounds, the same fixed point, no harm."""

import math

import pytest
import torch
from lasso import PHI, PROBLEM, L, best, distance

from fednmap import run, simulate
from fednmap.algorithms import FedNMap, FedNMapMemory, quasi_newton
from fednmap.measure import residual
from fednmap.names import InputError
from fednmap.problems import LeastSquares, Logistic
from fednmap.regularizers import L0, L1, MCP, Box, ElasticNet, GroupLasso
from fednmap.testing import check_algorithm


def secants(p, m, seed=0):
    """Of a quadratic: y = H s."""
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(p, p, generator=generator, dtype=torch.float64)
    H = root @ root.T / p + 0.1 * torch.eye(p, dtype=torch.float64)
    S = torch.randn(m, p, generator=generator, dtype=torch.float64)
    return S, S @ H, H


def bfgs(S, Y):
    """The updates one after another, as the textbook has them."""
    sigma = float(Y[-1] @ Y[-1] / (S[-1] @ Y[-1]))
    B = sigma * torch.eye(S.shape[1], dtype=S.dtype)
    for s, y in zip(S, Y, strict=True):
        B = B - torch.outer(B @ s, B @ s) / (s @ B @ s) + torch.outer(y, y) / (s @ y)
    return B


@pytest.mark.parametrize("m", [1, 3, 7])
def test_the_model_is_that_of_bfgs(m):
    S, Y, _ = secants(9, m)
    S[0], Y[0] = 1e-5 * S[0], 1e-5 * Y[0]  # the length of a secant does not matter
    model, B = quasi_newton.QuadraticModel(S, Y, 1.0), bfgs(S, Y)
    got = torch.stack([model(e) for e in torch.eye(9, dtype=torch.float64)])
    torch.testing.assert_close(got, B, rtol=1e-8, atol=1e-8)
    assert model.largest == pytest.approx(float(torch.linalg.eigvalsh(B)[-1]), rel=1e-8)


@pytest.mark.parametrize(
    "phi", [L1(0.3), ElasticNet(0.2, 0.1), Box(-0.1, 0.4), GroupLasso(0.4, torch.arange(9) // 3), MCP(0.3, 8.0)]
)
def test_the_next_z_solves_the_normal_map_of_the_model(phi):
    S, Y, _ = secants(9, 4)
    x, g = S[0].sin(), 3 * S[1].cos()
    model, gamma = quasi_newton.QuadraticModel(S, Y, 1.0), 0.7
    z = quasi_newton.minimised(phi, gamma, x, g, model, model.largest, 1e-13)
    u = phi.prox(z, gamma)
    torch.testing.assert_close(g + model(u - x) + (z - u) / gamma, torch.zeros_like(x), atol=1e-9, rtol=0)


def test_without_secants_it_is_the_plain_step():
    steps = {"eta_a": 0.5 / L, "Q": 1, "gamma": 0.5 / L}
    plain, remembering = FedNMap(PHI, **steps), FedNMapMemory(PHI, memory=5, **steps)
    one, other = (
        [a.model(r.server) for r in simulate(a, PROBLEM, rounds=1, start=PROBLEM.start)] for a in (plain, remembering)
    )
    torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)


def test_contract():
    report = check_algorithm(
        lambda phi, L, Q: FedNMapMemory(phi, eta_a=0.5 / (L * Q), Q=Q, gamma=1 / L, memory=5), rounds=800
    )
    assert report.full < 1e-10
    assert report.sampled < 1e-6  # with some clients only, secants help less
    assert report.lossy < 1e-10


def rounds_to(algorithm, problem, tol, limit, **options):
    for round in simulate(algorithm, problem, rounds=limit, **options):
        x = algorithm.model(round.server)
        if float(residual(x, problem.gradient(x), algorithm.phi, algorithm.gamma).norm()) < tol:
            return round.t + 1
    return math.inf


def ill_conditioned(kind, n=5, rows=40, p=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n * rows, p, generator=generator, dtype=torch.float64) * torch.logspace(
        0, -1.5, p, dtype=torch.float64
    )
    score = X @ torch.randn(p, generator=generator, dtype=torch.float64) * 3
    y = score if kind is LeastSquares else (score > 0).to(torch.int64)
    order = score.argsort()  # sorted: every client sees another part of the world
    return kind(
        [(X[rows_], y[rows_]) for rows_ in order.split(rows)], **({} if kind is LeastSquares else {"classes": 2})
    )


@pytest.mark.parametrize("kind", [LeastSquares, Logistic])
@pytest.mark.parametrize("wrong", [0.03, 1.0, 30.0])
def test_few_rounds_whatever_the_step(kind, wrong):
    problem = ill_conditioned(kind)
    L = problem.smoothness()
    plain = rounds_to(FedNMap(L1(1e-3), eta_a=1 / L, Q=1, gamma=1 / L), problem, 1e-7, 400)
    quick = FedNMapMemory(L1(1e-3), eta_a=wrong / L, Q=1, gamma=1 / L, memory=20)
    assert rounds_to(quick, problem, 1e-7, 120) < min(plain / 4, 100)


@pytest.mark.parametrize("options", [{"drop": 0.3}, {"participation": 0.6}])
def test_lost_replies_leave_the_invariant_and_the_fixed_point(options):
    problem = ill_conditioned(LeastSquares)
    L = problem.smoothness()
    algorithm = FedNMapMemory(L1(1e-3), eta_a=0.3 / L, Q=1, gamma=1 / L, memory=10)
    for round in simulate(algorithm, problem, rounds=250, **options):
        h = round.clients[torch.arange(problem.n)].h.mean(0)
        torch.testing.assert_close(h, round.server.h, rtol=0, atol=1e-12)
    x = algorithm.model(round.server)
    assert float(residual(x, problem.gradient(x), algorithm.phi, algorithm.gamma).norm()) < 1e-4


def test_noise_costs_stages_at_most():
    """Secants of noise are no curvature: plain rounds take over, and the run ends where the plain one does."""
    noisy = LeastSquares(ill_conditioned(LeastSquares).data, batch_size=4, seed=1)
    ends = []
    for m in (0, 10):
        steps = {"eta_a": 0.1 / noisy.smoothness(), "Q": 1, "gamma": 1 / noisy.smoothness()}
        algorithm = FedNMapMemory(L1(1e-3), memory=m, **steps) if m else FedNMap(L1(1e-3), **steps)
        *_, last = simulate(algorithm, noisy, rounds=300)
        ends.append(float(noisy.loss(algorithm.model(last.server))))
    assert ends[1] < 2 * ends[0]


def test_secants_that_are_bent_the_wrong_way_are_an_alarm():
    """As every other one of noise is: a few of them, and plain rounds follow."""
    algorithm = FedNMapMemory(L1(1e-9), eta_a=0.1, Q=1, gamma=0.1, memory=10)
    server, _ = algorithm.init(torch.ones(4, dtype=torch.float64))
    alarms = []
    for _ in range(12):
        x = algorithm.model(server)
        server = algorithm.aggregate(server, algorithm.Up(-x + (server.z - x) / algorithm.gamma), 1.0)  # f = -|x|^2/2
        alarms.append(quasi_newton.Counts(*server.counts.tolist()).alarms)
    assert alarms[2] == 0
    assert alarms[-1] == 1


def test_a_bounded_gradient_cannot_hide_a_runaway():
    """The gradient of a logistic loss stays bounded, so psi is watched as well as the residual."""
    problem = ill_conditioned(Logistic)
    algorithm = FedNMapMemory(L1(1e-3), eta_a=1e3 / problem.smoothness(), Q=1, gamma=1.0, memory=10)
    *_, last = simulate(algorithm, problem, rounds=80)
    x = algorithm.model(last.server)
    assert float(problem.loss(x)) < math.log(2)


@pytest.mark.parametrize("wrong", [3.0, 30.0])
def test_what_is_solved_stays_solved(wrong):
    """Also where the plain step is far too large, long after the residual is nothing but rounding."""
    algorithm = FedNMapMemory(L1(0.1), eta_a=wrong / L, Q=1, gamma=1 / L, memory=10)
    sizes = []
    for round in simulate(algorithm, PROBLEM, rounds=300):
        x = algorithm.model(round.server)
        sizes.append(float(residual(x, PROBLEM.gradient(x), algorithm.phi, 1 / L).norm()))
    solved = next(t for t, size in enumerate(sizes) if size < 1e-10)
    assert solved < 100
    assert max(sizes[solved:]) < 1e-2
    assert sizes[-1] < 1e-6


def test_going_on_from_any_round_gives_the_same_bits():
    algorithm = FedNMapMemory(PHI, eta_a=1 / L, Q=1, gamma=1 / L, memory=4)
    whole = list(simulate(algorithm, PROBLEM, rounds=12, drop=0.2))
    for t in (0, 5, 5, 9):
        *_, last = simulate(algorithm, PROBLEM, rounds=12, drop=0.2, after=whole[t])
        assert all(torch.equal(a, b) for a, b in zip(last.server, whole[-1].server, strict=True))


def test_the_optimum_is_reached():
    algorithm = FedNMapMemory(PHI, eta_a=1 / L, Q=1, gamma=1 / L, memory=10)
    *_, last = simulate(algorithm, PROBLEM, rounds=60)
    assert distance(algorithm.model(last.server), best(0.2)) < 1e-12


def test_clients_receive_what_they_always_did():
    server, _ = FedNMapMemory(PHI, memory=3).init(torch.ones(4))
    assert FedNMapMemory(PHI, memory=3).broadcast(server)._fields == ("z", "h")
    assert FedNMap(PHI).init(torch.ones(4))[0]._fields == ("z", "h")


@pytest.mark.parametrize("memory", [-1, 0, 2.5, True])
def test_bad_memory(memory):
    with pytest.raises(InputError, match=r"memory is .*; it must be an integer, at least 1"):
        FedNMapMemory(PHI, memory=memory)


@pytest.mark.filterwarnings("ignore:L0 is not weakly convex")
def test_memory_needs_a_weakly_convex_phi():
    with pytest.raises(InputError, match="FedNMapMemory needs a weakly convex phi, and L0 has rho = inf"):
        FedNMapMemory(L0(0.1, allow_nonconvex=True), memory=3)


@pytest.mark.parametrize("seed", range(4))
def test_few_clients_in_the_first_round_do_not_stop_it(seed):
    """At x = 0, h of a tenth of the clients is within phi's subgradients: a residual of 0, that nothing is below."""
    rng = torch.Generator().manual_seed(0)
    rows = [torch.randn(30, 6, generator=rng, dtype=torch.float64) for _ in range(20)]
    data = [(a, 0.3 * a[:, :2].sum(1) + 0.1 * torch.randn(30, generator=rng, dtype=torch.float64)) for a in rows]
    problem, phi = LeastSquares(data), L1(0.05)
    method = FedNMapMemory(phi, eta_a=0.1, Q=1, memory=8)
    found = run(method, problem, rounds=300, every=300, participation=0.1, seed=seed)
    assert found.final["stationarity"] < 0.2 * found.records[0]["stationarity"]
    assert found.last.server.counts[3] >= 0.25  # pace
