"""FedNewton: few rounds to the optimum, its safeguard, its matrices, and what it refuses."""

import pytest
import torch
from lasso import PHI, PROBLEM, best, distance, last
from stochastic import binary, least_squares, multinomial, network

from fednmap import run
from fednmap.algorithms import FedNewton, FedNMap
from fednmap.algorithms.fednewton import newton_point, prox_jacobian
from fednmap.core import SecondOrder, info_of, oracle_of
from fednmap.measure import normal_map
from fednmap.names import InputError
from fednmap.problems import GLM, Cox, Logistic, Pooled
from fednmap.regularizers import (
    L0,
    L1,
    L2,
    MCP,
    Box,
    ElasticNet,
    GroupLasso,
    LogSum,
    NonNegative,
    Slope,
    TotalVariation,
    Zero,
)
from fednmap.simulation import simulate
from fednmap.simulation.callbacks import Tolerance

GROUPS = torch.arange(6) // 2
PENALTIES = {
    "l1": L1(0.05),
    "elastic net": ElasticNet(0.05, 0.1),
    "group lasso": GroupLasso(0.05, GROUPS),
    "l2": L2(0.1),
    "box": Box(-0.3, 0.2),
    "nonnegative": NonNegative(),
    "slope": Slope(torch.linspace(0.1, 0.02, 6, dtype=torch.float64)),
    "total variation": TotalVariation(0.05),
    "mcp": MCP(0.05, 8.0),
    "log-sum": LogSum(0.02, 1.0),
    "none": Zero(),
}


def residuals(algorithm, problem, rounds):
    """|F_nor(z)| after every round."""
    rounds = simulate(algorithm, problem, rounds=rounds)
    return [float(normal_map(problem, algorithm.phi, r.server.z, algorithm.gamma).norm()) for r in rounds]


@pytest.mark.parametrize("name", PENALTIES)
def test_jacobian_of_prox_for_every_penalty(name):
    """Against differences of another length and, where prox is separable, by cases."""
    phi, z = PENALTIES[name], torch.tensor([1.3, -0.2, 0.04, 0.31, -2.0, 0.7], dtype=torch.float64)
    P, e = prox_jacobian(phi, z, 0.5), 1e-4
    for j in range(6):
        step = e * torch.eye(6, dtype=torch.float64)[j]
        slope = (phi.prox(z + step, 0.5) - phi.prox(z - step, 0.5)) / (2 * e)
        torch.testing.assert_close(P[:, j], slope, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(P, P.mT, rtol=0, atol=1e-6)  # the Hessian of a function


def test_jacobian_of_l1_by_cases():
    z = torch.tensor([3.0, 0.5, -2.0, -0.1], dtype=torch.float64)
    expected = torch.tensor([1.0, 0, 1, 0], dtype=torch.float64).diag()
    torch.testing.assert_close(prox_jacobian(L1(1.0), z, 1.0), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", [binary, multinomial, least_squares], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", PENALTIES)
def test_it_ends_where_fednmap_ends(kind, name):
    """And nearly there after ten rounds; FedNMap takes thousands."""
    problem, phi = kind(batch_size=None), PENALTIES[name]
    if problem.dim != 6 and name in ("group lasso", "slope"):
        pytest.skip("made for 6 coordinates")
    if name == "none" and kind is not least_squares:
        pytest.skip("separable: there is no minimum")
    algorithm = FedNewton(phi, eta_a=0.5)
    x = algorithm.model(last(algorithm, problem, rounds=10).server)
    L = problem.smoothness()
    plain = FedNMap(phi, eta_a=1 / L, Q=1, gamma=min(1 / L, 0.5 / phi.rho) if phi.rho else 1 / L)
    end = last(plain, problem, rounds=1, start=x + plain.gamma * _subgradient(problem, x))
    assert residuals(algorithm, problem, 10)[-1] < 1e-10
    torch.testing.assert_close(plain.model(end.server), x, rtol=0, atol=1e-10)  # a fixed point of the plain method


def _subgradient(problem, x):
    """Of phi at its solution x."""
    return -problem.gradient(x)


def test_from_far_away_it_comes_to_the_optimum_of_fednmap():
    problem, phi = binary(batch_size=None), L1(0.05)
    far = FedNewton(phi, eta_a=0.5)
    ends = [
        far.model(last(far, problem, rounds=40, start=s * torch.ones(6, dtype=torch.float64)).server) for s in (0, 30)
    ]
    plain = FedNMap(phi, eta_a=1 / problem.smoothness(), Q=1)
    slow = plain.model(last(plain, problem, rounds=4000).server)
    assert distance(ends[0], slow) < 1e-10
    assert distance(ends[1], slow) < 1e-10


def test_plain_newton_would_run_away_from_there():
    """fednewton's safeguard is needed: from far away the first steps are taken back."""
    problem, algorithm = binary(batch_size=None), FedNewton(L1(0.05), eta_a=0.5)
    start = 30 * torch.ones(6, dtype=torch.float64)
    damping = [float(r.server.mu) for r in simulate(algorithm, problem, rounds=12, start=start)]
    assert max(damping) > 0
    assert damping[0] == 0


def test_a_counts_model_from_a_bad_start():
    """Poisson's curvature grows without bound: fednewton must not leave the ground."""
    rng = torch.Generator().manual_seed(0)
    a = torch.randn(4, 50, 3, generator=rng, dtype=torch.float64)
    y = torch.poisson(torch.exp(a @ torch.tensor([0.5, -0.3, 0.0], dtype=torch.float64)), generator=rng)
    problem = GLM(list(zip(a, y, strict=True)), "poisson")
    algorithm = FedNewton(L1(0.02), eta_a=0.1)
    for start in (torch.zeros(3), torch.tensor([-3.0, 3.0, 3.0])):
        x = algorithm.model(last(algorithm, problem, rounds=40, start=start.double()).server)
        step = 0.01
        assert float((x - algorithm.phi.prox(x - step * problem.gradient(x), step)).norm()) < 1e-11


def test_least_squares_takes_one_round():
    algorithm = FedNewton(PHI)
    assert distance(algorithm.model(last(algorithm, rounds=1).server), best(0.2)) < 1e-12


@pytest.mark.parametrize("kind", [binary, least_squares], ids=lambda f: f.__name__)
@pytest.mark.parametrize("gamma", [0.01, 10.0])
def test_once_there_it_stays(kind, gamma):
    """At the level of rounding nothing can be compared any more, and nothing may be concluded from it."""
    sizes = residuals(FedNewton(L1(0.02), gamma=gamma), kind(batch_size=None), 60)
    assert max(sizes[12:]) < 1e-11


def test_convergence_is_quadratic():
    sizes = [size for size in residuals(FedNewton(L1(0.01), eta_a=0.5), multinomial(batch_size=None), 9) if size > 1e-9]
    assert sizes[-1] < 20 * sizes[-2] ** 2 / sizes[0]


def test_gamma_does_not_matter():
    problem = binary(batch_size=None)
    ends = [last(FedNewton(L1(0.05), gamma=gamma), problem, rounds=3) for gamma in (0.01, 1.0, 100.0)]
    points = [L1(0.05).prox(r.server.z, g) for r, g in zip(ends, (0.01, 1.0, 100.0), strict=True)]
    assert max(distance(x, points[1]) for x in points) < 1e-6


@pytest.mark.parametrize("mu", [0.0, 0.7])
def test_a_newton_point_minimises_the_model(mu):
    rng = torch.Generator().manual_seed(3)
    a, g, z = (torch.randn(*shape, generator=rng, dtype=torch.float64) for shape in ((8, 6), (6,), (6,)))
    H, phi, gamma = a.mT @ a / 8, L1(0.1), 0.7
    x = phi.prox(z, gamma)
    new = phi.prox(newton_point(phi, gamma, z, g, H, mu), gamma)
    u, B = x, H + mu * torch.eye(6, dtype=torch.float64)
    for _ in range(20_000):
        u = phi.prox(u - 0.1 * (g + B @ (u - x)), 0.1)
    torch.testing.assert_close(new, u, rtol=0, atol=1e-7)


def test_a_large_mu_makes_the_plain_step():
    """fednewton's safeguard: with H + mu I = 1000 I a proximal gradient step of length 1/1000."""
    rng = torch.Generator().manual_seed(3)
    g, z = (torch.randn(6, generator=rng, dtype=torch.float64) for _ in range(2))
    phi, x = L1(0.1), L1(0.1).prox(z, 0.7)
    new = phi.prox(newton_point(phi, 0.7, z, g, torch.eye(6, dtype=torch.float64), 999.0), 0.7)
    torch.testing.assert_close(new, phi.prox(x - g / 1000, 1 / 1000), rtol=0, atol=1e-12)


def cox():
    rng = torch.Generator().manual_seed(0)
    rows = [torch.randn(20, 3, generator=rng, dtype=torch.float64) for _ in range(3)]
    time = [torch.rand(20, generator=rng, dtype=torch.float64) for _ in range(3)]
    return Cox([(a, torch.stack([t, (t < 0.8).double()], 1)) for a, t in zip(rows, time, strict=True)])


PROBLEMS = {
    "least squares": lambda: least_squares(None),
    "binary": lambda: binary(None),
    "multinomial": lambda: multinomial(None),
    "weighted": lambda: binary(None, weights="samples", intercept=True),
    "cox": cox,
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_hessians_of_the_clients_are_derivatives_of_their_gradients(name):
    problem = PROBLEMS[name]()
    clients, x = torch.tensor([2, 0]), torch.linspace(-0.4, 0.6, problem.dim, dtype=torch.float64)
    g = oracle_of(FedNewton(Zero()), problem, clients, 0)
    assert isinstance(g, SecondOrder)
    H, e = g.hessian(x), 1e-5
    assert H.shape == (2, problem.dim, problem.dim)
    for j in range(problem.dim):
        step = e * torch.eye(problem.dim, dtype=torch.float64)[j]
        torch.testing.assert_close(H[:, :, j], (g(x + step, 0) - g(x - step, 0)) / (2 * e), rtol=1e-5, atol=1e-7)
    points = torch.stack([x, 2 * x])
    torch.testing.assert_close(g.hessian(points)[0], H[0])
    torch.testing.assert_close(oracle_of(FedNewton(Zero()), problem, torch.tensor(2), 0).hessian(x), H[0])
    weights = problem.weights if problem.weights is not None else torch.full((problem.n,), 1 / problem.n)
    every = info_of(problem).hessians(torch.arange(problem.n))(x)
    torch.testing.assert_close(torch.einsum("i,ijk->jk", weights.double(), every), problem.hessian(x))


@pytest.mark.parametrize("name", ["weighted", "cox"])
def test_weights_and_survival_in_few_rounds(name):
    problem, algorithm = PROBLEMS[name](), FedNewton(L1(0.01), eta_a=0.5)
    assert residuals(algorithm, problem, 10)[-1] < 1e-10


def test_a_client_sends_its_gradient_and_half_a_matrix():
    for dtype in (torch.float32, torch.float64):
        round_ = last(FedNewton(PHI), rounds=1, start=torch.zeros(PROBLEM.dim, dtype=dtype))
        assert round_.bytes_up == PROBLEM.n * (8 + 8 * 9 // 2) * dtype.itemsize
        assert round_.bytes_down == PROBLEM.n * 8 * dtype.itemsize


def test_single_precision_reaches_its_floor():
    problem = PROBLEM
    algorithm = FedNewton(PHI)
    x = algorithm.model(last(algorithm, problem, rounds=6, start=torch.zeros(8)).server)
    assert x.dtype == torch.float32
    assert distance(x.double(), best(0.2)) < 1e-5


def test_a_run_ends_when_it_is_good_enough():
    result = run(FedNewton(L1(0.05)), binary(None), rounds=50, stop=Tolerance(1e-6))
    assert result.final["round"] <= 10


REFUSED = {
    "network": (lambda: network(None), "needs the clients' Hessians, and Network has none"),
    "minibatches": (lambda: least_squares(3), "needs exact gradients"),
    "pooled": (lambda: Pooled(least_squares(None)), "Pooled has none"),
    "too many": (lambda: Logistic([(torch.zeros(2, 2001), torch.tensor([0, 1]))]), "at most 2000 x 2000"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_fednewton_cannot_do_is_refused_in_one_line(what):
    make, words = REFUSED[what]
    with pytest.raises(InputError, match=rf"^FedNewton[^\n]*{words}[^\n]*$"):
        simulate(FedNewton(PHI), make(), rounds=1)


@pytest.mark.filterwarnings("ignore:L0 is not weakly convex")
def test_a_prox_that_jumps_is_refused_in_one_line():
    with pytest.raises(InputError, match=r"^FedNewton[^\n]*that of L0 jumps; use [^\n]*$"):
        FedNewton(L0(0.1, allow_nonconvex=True))


@pytest.mark.parametrize("options", [{"participation": 0.5}, {"drop": 0.1}])
def test_everybody_is_needed(options):
    with pytest.raises(InputError, match="FedNewton needs every client"):
        simulate(FedNewton(PHI), PROBLEM, rounds=1, **options)


def test_a_quadratic_takes_one_step():
    """With the whole Hessian: half of it would be another quadratic."""
    method = FedNewton(Zero(), gamma=1.0)
    x = method.model(last(method, rounds=1).server)
    assert float(PROBLEM.gradient(x).norm()) < 1e-9
