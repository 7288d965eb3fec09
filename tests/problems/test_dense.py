"""Backpropagation written out, against autograd on every chain of layers up to a depth of 4."""

import weakref
from itertools import product

import pytest
import torch
from methods import MAKE
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from fednmap.core import AccumulatingOracle
from fednmap.models import mlp
from fednmap.problems import Network
from fednmap.problems.kernels.dense import SMALL, dense_layers
from fednmap.regularizers import L1, Zero

WIDTH = 3  # of inputs, hidden layers and outputs: every order of layers fits
KINDS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "no-bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "identity": nn.Identity,
    "flatten": nn.Flatten,
}
EVERYBODY = torch.arange(3)


def chains(depth):
    """All orders of `depth` layers of which at least one has parameters."""
    orders = product(KINDS, repeat=depth)
    return [names for names in orders if "linear" in names or "no-bias" in names]


def data(real):
    rng = torch.Generator().manual_seed(0)
    parts = []
    for m in (4, 7, 5):
        x = torch.randn(m, WIDTH, generator=rng, dtype=torch.float64)
        y = torch.randn(m, WIDTH, generator=rng, dtype=torch.float64)
        parts.append((x, y if real else y.argmax(1)))
    return parts


def autograd(module, loss, x, parts):
    """Torch's own gradient of each part's loss at x."""
    nn.utils.vector_to_parameters(x, module.parameters())
    found = [torch.autograd.grad(loss(module(a), b), list(module.parameters())) for a, b in parts]
    return torch.stack([nn.utils.parameters_to_vector(gradients) for gradients in found])


def check(names, loss):
    torch.manual_seed(len(names))
    module = nn.Sequential(*(KINDS[name]() for name in names)).double()
    parts = data(real=loss is mse_loss)
    problem = Network(module, loss, parts, batch_size=None)
    rows = problem.data.x.clone()
    x = problem.start + 0.1
    each = autograd(module, loss, x, parts)
    torch.testing.assert_close(problem.gradient(x), each.mean(0), rtol=1e-10, atol=1e-12)
    apart = torch.stack([x, x + 0.1, x - 0.1])
    stacked = torch.stack([autograd(module, loss, apart[i], parts)[i] for i in range(3)])
    torch.testing.assert_close(problem.oracle(EVERYBODY, 0)(x, 0), each, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(problem.oracle(EVERYBODY, 0)(apart, 0), stacked, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(problem.oracle(EVERYBODY[1], 0)(x, 0), each[1], rtol=1e-10, atol=1e-12)
    assert torch.equal(problem.data.x, rows), f"{names} wrote over the samples"


@pytest.mark.parametrize("depth", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("loss", [cross_entropy, mse_loss])
def test_every_chain_has_the_gradient_of_autograd_and_leaves_the_data_alone(depth, loss):
    for names in chains(depth):
        check(names, loss)


@pytest.mark.slow
@pytest.mark.ci(turn=11)
def test_some_chains_of_four():
    for names in chains(4)[::11]:
        check(names, mse_loss)


@pytest.mark.parametrize("names", [("linear", "relu", "sigmoid", "linear"), ("sigmoid", "linear"), ("linear", "tanh")])
def test_the_orders_that_used_to_go_wrong(names):
    check(names, cross_entropy)


def test_minibatches_too():
    torch.manual_seed(0)
    module = nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, 5), nn.Tanh(), nn.Sigmoid(), nn.Linear(5, WIDTH)).double()
    problem = Network(module, cross_entropy, data(real=False), batch_size=4)
    g, x = problem.oracle(EVERYBODY, 2), problem.start
    one = torch.stack([problem.oracle(i, 2)(x, 1) for i in EVERYBODY])
    torch.testing.assert_close(g(x, 1), one, rtol=1e-12, atol=1e-14)


def test_ordinary_chains_stay_written_out():
    linear = KINDS["linear"]
    for layers in ([linear()], [nn.Flatten(), linear(), nn.ReLU(), linear(), nn.Sigmoid()], [linear(), linear()]):
        assert dense_layers(nn.Sequential(*layers), torch.zeros(WIDTH)) is not None
    for layers in ([nn.ReLU(), linear()], [linear(), nn.ReLU(), nn.Tanh(), linear()]):
        assert dense_layers(nn.Sequential(*layers), torch.zeros(WIDTH)) is None


def written_out(bias=True, last=()):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, 5, bias=bias), nn.Tanh(), nn.Linear(5, WIDTH, bias=bias), *last).double()
    return Network(module, cross_entropy, data(real=False), batch_size=4)


def wide():
    """Its first product is not a small one."""
    torch.manual_seed(0)
    return Network(mlp(WIDTH, WIDTH, (SMALL,)).double(), cross_entropy, data(real=False), batch_size=4)


def convolutions():
    """Kernels that lie as they are used, one that must be turned, and a layer that is not trained."""
    rng = torch.Generator().manual_seed(0)
    rows = [(torch.randn(m, 2, 4, 4, generator=rng, dtype=torch.float64), torch.arange(m) % 3) for m in (4, 7, 5)]
    torch.manual_seed(0)
    kernels = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 2, groups=4), nn.Conv2d(4, 3, 1), nn.Conv2d(3, 3, 1)
    module = nn.Sequential(*kernels[:2], nn.Tanh(), *kernels[2:], nn.Flatten()).double()
    module[-2].requires_grad_(False)
    return Network(module, cross_entropy, rows, batch_size=4)


ADDING = {
    "written out": written_out,
    "no bias": lambda: written_out(bias=False),
    "ends with an activation": lambda: written_out(last=[nn.Sigmoid()]),
    "wide": wide,
    "convolutions": convolutions,
}


@pytest.mark.parametrize("name", ADDING)
def test_a_gradient_added_is_the_gradient(name):
    problem = ADDING[name]()
    k, close = len(EVERYBODY), {"rtol": 1e-12, "atol": 1e-14}
    g, apart = problem.oracle(EVERYBODY, 2), problem.start + torch.randn(k, problem.dim, dtype=torch.float64)
    z = torch.randn(k, problem.dim, dtype=torch.float64)
    assert isinstance(g, AccumulatingOracle)
    assert g.stack == (k,)
    for x in (problem.start, apart, apart):  # one point for all, and a point each, the second time from what is kept
        onto = z.clone()
        g.add(onto, x, 1, -0.3)
        torch.testing.assert_close(onto, z - 0.3 * g(x, 1), **close)
    onto = apart.clone()
    g.add(onto, onto, 1, -0.3)  # the point itself
    torch.testing.assert_close(onto, apart - 0.3 * g(apart, 1), **close)
    one = problem.oracle(EVERYBODY[1], 2)
    onto = z[1].clone()
    one.add(onto, problem.start, 1, 2.0)
    torch.testing.assert_close(onto, z[1] + 2 * one(problem.start, 1), **close)
    assert one.stack == ()
    torch.testing.assert_close(g(apart, 1)[1], one(apart[1].clone(), 1), **close)
    turned = torch.randn(problem.dim, k, dtype=torch.float64).t()  # not side by side in memory
    onto = turned.clone(memory_format=torch.preserve_format)
    g.add(onto, apart, 1, 2.0)
    torch.testing.assert_close(onto, turned + 2 * g(apart, 1), **close)
    torch.testing.assert_close(g(turned, 1), g(turned.contiguous(), 1), **close)


@pytest.mark.parametrize("problem", ["written out", "convolutions"])
@pytest.mark.parametrize("name", sorted(MAKE.keys() - {"FedNewton", "EControlDA"}))
def test_methods_go_the_same_way_with_gradients_that_are_added(name, problem):
    problem, close = ADDING[problem](), {"rtol": 1e-10, "atol": 1e-12}
    method = MAKE[name](Zero(), 2.0, 3)
    method = method if not method.traits.composite else MAKE[name](L1(0.01), 2.0, 3)
    server, client = method.init(problem.start)
    clients = type(client)(*(v + 0.01 * torch.randn(len(EVERYBODY), *v.shape, dtype=v.dtype) for v in client))
    for ids, state in ((EVERYBODY, clients), (EVERYBODY[1], type(client)(*(v[1] for v in clients)))):
        g, before = problem.oracle(ids, 2), [v.clone() for v in (*server, *state)]
        added = method.local(method.broadcast(server), state, g)
        apart = method.local(method.broadcast(server), state, lambda x, q, g=g: g(x, q))
        torch.testing.assert_close(added, apart, **close)
        torch.testing.assert_close([*server, *state], before, rtol=0, atol=0)


def test_what_is_kept_from_step_to_step_is_no_more_than_the_vector():
    torch.manual_seed(0)
    problem = Network(nn.Linear(WIDTH, 3).double(), cross_entropy, data(real=False), batch_size=4)
    g, x = problem.oracle(EVERYBODY, 0), problem.start.expand(len(EVERYBODY), -1).clone()
    before = g(x, 0)
    x.mul_(2)  # in place, as local steps do
    after = g(x, 0)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, g(x.clone(), 0), rtol=0, atol=0)
    gone = weakref.ref(x)
    g.add(x, x, 0, 1.0)
    del x
    assert gone() is None
