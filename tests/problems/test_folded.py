"""Clients folded into the channels of a convolution network: the gradients that each has alone."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fednmap import simulate
from fednmap.algorithms import FedNMap
from fednmap.models import cnn, mobilenet_v3_small
from fednmap.problems import Network
from fednmap.problems.kernels.folded import FoldedModule
from fednmap.regularizers import L1


def pictures(n=5, samples=12, shape=(3, 16, 16)):
    torch.manual_seed(1)
    return [(torch.randn(samples, *shape).double(), torch.randint(0, 4, (samples,))) for _ in range(n)]


def separable(*more):
    """Layers of every kind, of odd shapes."""
    return nn.Sequential(
        nn.Conv2d(3, 6, (3, 2), stride=(2, 1), padding=(0, 1), dilation=(1, 2)),
        nn.GroupNorm(2, 6),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, padding=1, groups=6, stride=2),
        nn.BatchNorm2d(6, affine=False, track_running_stats=False),
        nn.SiLU(),
        nn.Conv2d(6, 8, 1),
        nn.MaxPool2d(2),
        nn.BatchNorm2d(8),
        *more,
        nn.Flatten(),
        nn.LazyLinear(4),
    )


def made(module, loss=cross_entropy, data=None, **options):
    torch.manual_seed(0)
    module = module.double()
    module(torch.zeros(2, 3, 16, 16).double())  # sizes of lazy layers
    return Network(module, loss, pictures() if data is None else data, **{"batch_size": 4, **options})


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Conv2d(8, 8, 1)

    def forward(self, x):
        return x + self.inner(x) * x.mean((-2, -1), keepdim=True)


class Mixing(nn.Module):
    """Knows the number of its channels, or what lies beside one of them."""

    def __init__(self, mix):
        super().__init__()
        self.mix = mix
        self.inner = nn.Conv2d(8, 8, 1)

    def forward(self, x):
        return self.mix(self.inner(x))


MODULES = {
    "separable": separable,
    "residual": lambda: separable(Residual()),
    "mobilenet, batch norm": lambda: mobilenet_v3_small(4),
    "mobilenet, group norm": lambda: mobilenet_v3_small(4, norm="group"),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("clients", [[0, 1, 2, 3, 4], [3, 1]])
def test_folded_clients_have_the_gradients_they_have_alone(name, clients):
    problem = made(MODULES[name]())
    assert problem.chunk == 5
    ids = torch.tensor(clients)
    x = problem.start + 0.01 * torch.randn(len(ids), problem.dim).double()
    for point in (x, problem.start):  # each its own, and one that is common to all
        together = problem.oracle(ids, 2)(point, 1)
        added = torch.randn(len(ids), problem.dim).double()
        z = added.clone()
        problem.oracle(ids, 2).add(z, point, 1, -0.5)
        for k, i in enumerate(ids):
            alone = problem.oracle(i.reshape(1), 2)(point[k : k + 1] if point.ndim > 1 else point, 1)[0]
            torch.testing.assert_close(together[k], alone, rtol=1e-6, atol=1e-9)
            torch.testing.assert_close(z[k], added[k] - 0.5 * alone, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("batch", [4, 5])  # fifteen alike, or 5 and 7 in turn
def test_measurements_are_those_of_batch_after_batch(name, batch):
    problem = made(MODULES[name](), weights=[0.1, 0.2, 0.2, 0.2, 0.3], batch_size=batch)
    value, gradient = problem.value_and_gradient(problem.start)
    torch.testing.assert_close(value, problem.loss(problem.start), rtol=1e-9, atol=0)
    batches = problem._everything(problem.start)
    alone = sum(problem.batch_gradient(problem.start, *batch) for batch in batches)
    torch.testing.assert_close(gradient, alone, rtol=1e-6, atol=1e-9)


class Before(nn.Module):
    """Looks at all channels of the pictures themselves."""

    def __init__(self, before):
        super().__init__()
        self.before, self.inner = before, separable()

    def forward(self, x):
        return self.inner(self.before(x))


@pytest.mark.parametrize(
    "before",
    [
        lambda x: x.flip(1),
        lambda x: x - x.mean(1, keepdim=True),
        lambda x: x / x.abs().amax((1, 2, 3), keepdim=True),
        lambda x: (x - x.mean((1, 2, 3), keepdim=True)) / x.std((1, 2, 3), keepdim=True),
        lambda x: nn.functional.group_norm(x, 1),
        lambda x: nn.functional.local_response_norm(x, 3),
        lambda x: x[:, :6],  # all of one client and of two
        lambda x: torch.cat([x[:, :9], 2 * x[:, 9:]], 1),  # of three, the fourth and those after it are others
        lambda x: 2 * x if x.shape[1] == 9 else x,
    ],
)
def test_a_forward_pass_that_mixes_colours_is_computed_one_by_one(before):
    problem = made(Before(before))
    assert problem.chunk == 1
    assert_alone(problem)


class Silent(nn.Module):
    """Mixes channels, which has no effect and no gradient at the start."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        for p in (*self.one.parameters(), self.other.weight):
            nn.init.zeros_(p)

    def forward(self, x):
        return x + self.other(self.one(x).flip(1))


class Reading(nn.Module):
    """Asks a layer for what it is no longer when it is folded."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Conv2d(8, 8, 1)

    def forward(self, x):
        return self.inner(x) / self.inner.in_channels


class Clipped(nn.Conv2d):
    """A plain convolution at the start, and not elsewhere."""

    def forward(self, x):
        return self._conv_forward(x, self.weight.clamp(-0.36, 0.36), self.bias)


def hooked():
    layer = nn.Conv2d(8, 8, 1)
    layer.register_forward_hook(lambda layer, inputs, out: out.clamp(max=9.0))
    return separable(layer)


@pytest.mark.parametrize(
    "make", [lambda: separable(Silent()), lambda: separable(Reading()), lambda: separable(Clipped(8, 8, 1)), hooked]
)
def test_what_folding_would_leave_out_is_computed_one_by_one(make):
    problem = made(make())
    assert problem.chunk == 1
    assert_alone(problem)


@pytest.mark.parametrize(
    ("module", "targets"),
    [
        (nn.Sequential(nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Conv2d(6, 3, 1)), (3, 16, 16)),
        (nn.Sequential(nn.Conv2d(3, 3, 3, groups=3), nn.ReLU(inplace=True), nn.Conv2d(3, 1, 14), nn.Flatten(0)), ()),
        (nn.Sequential(nn.Conv2d(3, 6, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 1)), (1,)),
    ],
)
@pytest.mark.filterwarnings("error")
def test_outputs_of_other_shapes(module, targets):
    data = [(x, torch.randn(len(x), *targets).double()) for x, _ in pictures()]
    assert_alone(made(module, data=data, loss=nn.functional.mse_loss))


def test_more_clients_than_are_folded_and_exact_gradients():
    problem = made(separable_by_groups(), data=pictures(n=21))
    assert_alone(problem, 21)
    assert problem.exact().chunk == 5
    assert_alone(problem.exact(), 21)
    many = made(separable_by_groups(), data=pictures(n=2, samples=130))
    assert (many.chunk, many.exact().chunk) == (5, 1)


def separable_by_groups():
    return nn.Sequential(*(layer for layer in separable() if not isinstance(layer, nn.BatchNorm2d)))


def assert_alone(problem, n=5):
    ids, generator = torch.arange(n), torch.Generator().manual_seed(3)
    x = problem.start + 0.05 * torch.randn(n, problem.dim, generator=generator).double()
    together = problem.oracle(ids, 2)(x, 1)
    for i in ids:
        alone = problem.oracle(i.reshape(1), 2)(x[i].unsqueeze(0), 1)[0]
        torch.testing.assert_close(together[i], alone, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x + x.mean(1, keepdim=True),
        lambda x: x.flip(1),
        lambda x: x[:, :8],
        lambda x: torch.cat([x[:, 4:], x[:, :4]], 1),
        lambda x: x / x.shape[1],
        lambda x: x.view(-1, 8, *x.shape[2:]),
        lambda x: x.softmax(1),
    ],
)
def test_a_forward_pass_that_mixes_channels_is_computed_one_by_one(mix):
    problem = made(separable(Mixing(mix)))
    assert problem.chunk == 1
    ids = torch.arange(3)
    together = problem.oracle(ids, 0)(problem.start, 0)
    for i in ids:
        torch.testing.assert_close(problem.oracle(i.reshape(1), 0)(problem.start, 0)[0], together[i])


def twice():
    layer = nn.Conv2d(8, 8, 1)
    return separable(layer, nn.ReLU(), layer)


def tied():
    one, other = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
    other.weight = one.weight
    return separable(one, other)


def frozen():
    layer = nn.Conv2d(8, 8, 1)
    layer.weight.requires_grad_(False)
    return separable(layer)


@pytest.mark.parametrize(
    "make",
    [twice, tied, frozen, lambda: separable(nn.Conv2d(8, 8, 3, padding=1)), lambda: separable(nn.Softmax2d())],
)
def test_other_modules_are_computed_one_by_one(make):
    assert made(make()).chunk == 1


def test_what_is_not_folded_by_rule():
    assert not FoldedModule.accepts(cnn((1, 28, 28), 10))
    assert not FoldedModule.accepts(nn.Conv2d(3, 3, 1))
    assert made(separable(), batch_size=200).chunk == 1


def test_the_module_that_was_given_stays_as_it_is():
    module = mobilenet_v3_small(4).double()
    before = copy.deepcopy(module.state_dict())
    problem = Network(module, cross_entropy, pictures(), batch_size=4)
    problem.oracle(torch.arange(5), 0)(problem.start + 1, 0)
    assert all(torch.equal(before[name], v) for name, v in module.state_dict().items())
    assert problem.architecture.state_dict().keys() == before.keys()


def test_rounds_are_the_same_folded_or_not_and_on_any_number_of_threads():
    problem = made(separable())
    method = FedNMap(L1(1e-3), eta_a=0.05, Q=3)
    ends = {
        (chunk, threads): list(simulate(method, problem, rounds=3, chunk=chunk, threads=threads))[-1].server.z
        for chunk, threads in ((5, 1), (2, 1), (2, 2), (2, 3), (1, 1))
    }
    assert torch.equal(ends[2, 1], ends[2, 2])
    assert torch.equal(ends[2, 1], ends[2, 3])
    for z in ends.values():
        torch.testing.assert_close(z, ends[1, 1], rtol=1e-6, atol=1e-9)


def test_a_problem_is_sent_without_the_points_it_has_seen():
    problem = made(mobilenet_v3_small(4))
    new = len(pickle.dumps(problem))
    gradients = problem.oracle(torch.arange(5), 0)(problem.start.repeat(5, 1), 0)
    sent = pickle.dumps(problem)
    assert len(sent) < 1.1 * new < 5 * problem.start.nbytes
    for other in (pickle.loads(sent), copy.deepcopy(problem)):
        assert torch.equal(other.oracle(torch.arange(5), 0)(problem.start.repeat(5, 1), 0), gradients)
