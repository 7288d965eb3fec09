"""No tensor is made without a device: data on the CPU, while the default device is one that cannot compute.

Where a tensor takes the default device instead of that of its neighbours, its numbers do not exist and the test fails;
on a GPU the same line would mix devices.
"""

import warnings

import numpy as np
import pytest
import torch
from methods import MAKE
from torch import nn
from torch.nn.functional import cross_entropy

from fednmap import regularizers as R
from fednmap import simulate
from fednmap.algorithms import EControlDA, FedNMap, ProxSGD, Scaffnew
from fednmap.core import pack, unpack
from fednmap.measure import evaluate, problem_gamma, support
from fednmap.problems import LeastSquares, Logistic, Network, Pooled
from fednmap.simulation.participation import PoissonSampler
from fednmap.testing import check_algorithm, check_regularizer
from fednmap.theory import estimate_smoothness, estimate_variance

DTYPES = [torch.float32, torch.float64]


@pytest.fixture
def elsewhere():
    """The default device holds no numbers."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def samples(*shape, classes=0, dtype=torch.float32, n=4):
    """Data of n clients of different sizes, on the CPU."""
    rng = np.random.default_rng(0)
    for i in range(n):
        x = torch.from_numpy(rng.standard_normal((5 + 2 * i, *shape))).to(dtype)
        labels = np.arange(5 + 2 * i) % classes if classes else rng.standard_normal(5 + 2 * i)
        yield x, torch.from_numpy(labels) if classes else torch.from_numpy(labels).to(dtype)


def dense():
    with torch.device("cpu"):
        return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))


def convolution():
    with torch.device("cpu"):
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3))


PROBLEMS = {
    "least squares": lambda dtype, **o: LeastSquares(list(samples(6, dtype=dtype)), **o),
    "binary": lambda dtype, **o: Logistic(list(samples(6, classes=2, dtype=dtype)), **o),
    "multinomial": lambda dtype, **o: Logistic(list(samples(6, classes=3, dtype=dtype)), **o),
    "dense": lambda dtype, **o: Network(
        dense().to(dtype), cross_entropy, list(samples(6, classes=3, dtype=dtype)), **o
    ),
    "convolution": lambda dtype, **o: Network(
        convolution().to(dtype), cross_entropy, list(samples(1, 5, 5, classes=3, dtype=dtype)), **o
    ),
}

MASK = torch.tensor([True, False, True, True, False, True])
PLANE = torch.tensor([[1.0, -2.0, 0.5, 1.0, 0.3, 1.0]])
REGULARIZERS = {
    "Zero": R.Zero,
    "L1": lambda: R.L1(0.1),
    "L1, a weight each": lambda: R.L1(np.linspace(0, 1, 6)),
    "SquaredL2": lambda: R.SquaredL2(0.1),
    "ElasticNet": lambda: R.ElasticNet(0.1, 0.2),
    "L2": lambda: R.L2(0.1),
    "LInf": lambda: R.LInf(0.1),
    "GroupLasso": lambda: R.GroupLasso(0.1, 2),
    "GroupLasso, lists": lambda: R.GroupLasso(0.1, [[0, 2], [1, 3, 5]]),
    "SparseGroupLasso": lambda: R.SparseGroupLasso(0.1, 0.2, [[0, 2, 4], [1, 5]]),
    "Slope": lambda: R.Slope(0.3, 0.2),
    "Slope, a weight each": lambda: R.Slope(np.linspace(1, 0, 6)),
    "TotalVariation": lambda: R.TotalVariation(0.1),
    "Nuclear": lambda: R.Nuclear(0.1, (2, 3)),
    "Box": lambda: R.Box(-0.1, 0.2),
    "NonNegative": R.NonNegative,
    "L2Ball": lambda: R.L2Ball(0.5),
    "L1Ball": lambda: R.L1Ball(0.5),
    "LInfBall": lambda: R.LInfBall(0.5),
    "Simplex": R.Simplex,
    "Halfspace": lambda: R.Halfspace(PLANE[0], 0.1),
    "Affine": lambda: R.Affine(PLANE, PLANE[0, :1]),
    "MCP": lambda: R.MCP(0.1, 2.0),
    "SCAD": lambda: R.SCAD(0.1, 3.0),
    "LogSum": lambda: R.LogSum(0.1, 0.7),
    "TransformedL1": lambda: R.TransformedL1(0.1, 1.2),
    "L0": lambda: R.L0(0.1, allow_nonconvex=True),
    "TopK": lambda: R.TopK(2, allow_nonconvex=True),
    "Scaled": lambda: R.Scaled(R.L1(0.1), 0.5),
    "Masked": lambda: R.Masked(R.L2(0.1), MASK),
    "Separable": lambda: R.Separable([(slice(0, 2), R.L1(0.1)), (slice(3, 6), R.Simplex())]),
    "PerLayer": lambda: R.PerLayer({"weight": R.rows(0.1)}, linear()),
    "PerLayer, restricted": lambda: R.restrict(R.PerLayer({"*": R.L1(0.1)}, linear()), linear(), "weights"),
    "Masked, restricted": lambda: R.restrict(R.L1(0.1), linear(), "weights"),
}


def linear():
    with torch.device("cpu"):
        return nn.Linear(2, 2)


def same(a, b):
    assert a.device.type == b.device.type == "cpu"
    assert torch.equal(a, b)


def trajectory(algorithm, problem, **options):
    return [algorithm.model(round_.server) for round_ in simulate(algorithm, problem, rounds=3, **options)]


def plain(make):
    """What `make` gives where the default device is the CPU."""
    with torch.device("cpu"):
        return make()


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_method(name, dtype, elsewhere):
    algorithm = MAKE[name](R.L1(0.1) if MAKE[name](R.Zero(), 1.0, 1).traits.composite else R.Zero(), 8.0, 1)
    options = {} if algorithm.traits.full_participation else {"participation": 0.5, "drop": 0.3}

    def run():
        problem = PROBLEMS["least squares"](dtype, batch_size=None if algorithm.traits.hessians else 2)
        return trajectory(algorithm, Pooled(problem) if algorithm.traits.central else problem, **options)

    for x, expected in zip(run(), plain(run), strict=True):
        same(x, expected)


@pytest.mark.parametrize("method", [Scaffnew(eta_a=0.1, Q=3), EControlDA(R.L1(0.1), K=0.5, compressor="random")])
def test_methods_that_draw(method, elsewhere):
    def run():
        return trajectory(method, PROBLEMS["least squares"](torch.float64, batch_size=2))

    for x, expected in zip(run(), plain(run), strict=True):
        same(x, expected)
    up = method.Up(torch.linspace(-1, 1, 6, device="cpu"))
    sent = unpack(method, pack(method, up), up)
    assert all(v.device.type == "cpu" for v in (*sent, *pack(method, up)))


@pytest.mark.parametrize("kind", PROBLEMS)
@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("weights", [None, [0.1, 0.2, 0.3, 0.4]], ids=["equal", "weighted"])
def test_every_problem(kind, batch_size, weights, elsewhere):
    phi, algorithm = R.L1(0.01), FedNMap(R.L1(0.01), eta_a=0.05, Q=2, gamma=0.5)

    def run():
        torch.manual_seed(0)
        problem = PROBLEMS[kind](torch.float64, batch_size=batch_size, weights=weights)
        models = trajectory(algorithm, problem, sampler=PoissonSampler(0.7))
        gamma = problem_gamma(problem, phi, models[-1])
        numbers = evaluate(problem, phi, models[-1], gamma)
        labels = problem.predict(models[-1], problem.data.x)
        return [*models, problem.gradient(models[-1]), labels], numbers, gamma

    found, expected = run(), plain(run)
    for x, y in zip(found[0], expected[0], strict=True):
        same(x, y)
    assert found[1:] == expected[1:]


@pytest.mark.parametrize("kind", PROBLEMS)
def test_pooled(kind, elsewhere):
    def run():
        torch.manual_seed(0)
        problem = Pooled(PROBLEMS[kind](torch.float32, batch_size=2))
        models = trajectory(ProxSGD(R.L1(0.01), eta_a=0.1, Q=2), problem)
        return [*models, problem.loss(models[-1]), problem.gradient(models[-1])]

    for x, expected in zip(run(), plain(run), strict=True):
        same(x, expected)


def test_going_on_from_a_round_and_states_on_disk(elsewhere, tmp_path):
    problem = PROBLEMS["least squares"](torch.float64, batch_size=2)
    algorithm = FedNMap(R.L1(0.1), eta_a=0.05, Q=2)
    options = {"rounds": 5, "participation": 0.5}
    *_, last = rounds = list(simulate(algorithm, problem, **options))
    *_, again = simulate(algorithm, problem, after=rounds[1], **options)
    *_, stored = simulate(algorithm, problem, store=tmp_path, **options)
    for other in (again, stored):
        same(algorithm.model(other.server), algorithm.model(last.server))


@pytest.mark.parametrize("name", REGULARIZERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.filterwarnings("ignore:.* is not weakly convex")
def test_every_regularizer(name, dtype, elsewhere):
    v = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 6))).to(dtype)

    def found():
        phi = REGULARIZERS[name]()
        x = phi.prox(v, 0.5)
        return x, phi.value(x), phi.value(v), phi.prox(v[0], 0.0)

    for result, expected in zip(found(), plain(found), strict=True):
        assert result.dtype == dtype
        same(result, expected)


def test_every_regularizer_is_here():
    public = {name for name in R.__all__ if isinstance(getattr(R, name), type)}
    assert public == {name.partition(",")[0] for name in REGULARIZERS}


def test_constants(elsewhere):
    def found():
        problem = PROBLEMS["least squares"](torch.float64, batch_size=2)
        smoothness = estimate_smoothness(problem, problem.start)
        return smoothness.clients, estimate_variance(problem, problem.start).clients

    for result, expected in zip(found(), plain(found), strict=True):
        same(result, expected)


def test_support(elsewhere):
    with torch.device("cpu"):
        x, truth = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([1.0, 1.0, 0.0])
    assert support(x, truth) == (0.5, 0.5)


def test_the_checks_of_plug_ins(elsewhere):
    check_regularizer(R.MCP(0.3, 2.0))
    check_algorithm(MAKE["FedAvg"], rounds=5)
    with warnings.catch_warnings(action="ignore"):
        check_regularizer(R.L0(0.3, allow_nonconvex=True))
