"""Every tensor is made on a stated device: with a default device that holds no numbers, the numbers are the same."""

from contextlib import contextmanager

import pytest
import torch
from drawn import minibatches
from stochastic import KINDS, SIZES
from torch import nn
from torch.nn.functional import cross_entropy

from fednmap.core import info_of
from fednmap.data import ClientData, load, partition
from fednmap.models import build, cnn
from fednmap.problems import Network, Pooled

WEIGHTS = [0.4, 0.3, 0.2, 0.1]


@contextmanager
def elsewhere():
    """A tensor that is made without a device lands where nothing can be computed."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def pictures(batch_size=3, **options):
    rng = torch.Generator().manual_seed(0)
    data = [(torch.rand(m, 1, 8, 8, generator=rng), torch.arange(m) % 3) for m in SIZES]
    torch.manual_seed(0)
    return Network(cnn((1, 8, 8), 3), cross_entropy, data, batch_size=batch_size, **options)


def normalised(batch_size=3, **options):
    rng = torch.Generator().manual_seed(0)
    data = [(torch.rand(m, 4, generator=rng), torch.arange(m) % 3) for m in SIZES]
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    return Network(module, cross_entropy, data, batch_size=batch_size or 3, **options)


def frozen(batch_size=3, **options):
    problem = normalised(batch_size)
    module = problem.architecture
    module[0].requires_grad_(False)
    return Network(module, cross_entropy, list(problem.data), batch_size=batch_size or 3, **options)


ALL = KINDS | {"pictures": pictures, "normalised": normalised, "frozen": frozen}


def computed(problem, x, some, one):
    """All that a problem computes."""
    found = [problem.loss(x), problem.gradient(x), problem.part(0, 2).loss(x), problem.alone(1).gradient(x)]
    for p in (problem, problem.exact()):
        found += [p.oracle(some, 2)(x, 1), p.oracle(some, 2)(x.expand(2, -1), 17), p.oracle(one, 2)(x, 0)]
    pooled = Pooled(problem)
    found += [pooled.oracle(one * 0, 1)(x, 0), pooled.exact().oracle(one * 0, 1)(x, 0)]
    found += [problem.predict(x, problem.data.x), *problem.data.mixed(3)[0]]
    if make := info_of(problem).module:
        found += [make(x)(problem.data.x)]
    return [v.detach() for v in found]


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("kind", ALL)
def test_problems_compute_the_same(kind, weights):
    problem = ALL[kind](weights=weights)
    x, some, one = problem.start + 0.1, torch.tensor([2, 0]), torch.tensor(3)
    expected = computed(problem, x, some, one)
    with elsewhere():
        found = computed(problem, x, some, one)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("kind", ["least_squares", "binary", "multinomial"])
def test_problems_are_made_where_their_data_is(kind):
    given = ALL[kind]()
    with elsewhere():
        problem = type(given)(list(given.data), batch_size=3, weights=WEIGHTS)
        numpy = type(given)([(x.numpy(), y.numpy()) for x, y in given.data])
    for made in (problem, numpy):
        assert {v.device.type for v in (made.start, made.data.x, made.data.sizes)} == {"cpu"}
    assert problem.weights.device.type == "cpu"


def test_networks_are_made_where_their_module_is():
    problems = [pictures(), normalised(), frozen()]
    with elsewhere():
        for problem in problems:
            made = Network(problem.architecture, cross_entropy, list(problem.data), batch_size=3)
            assert torch.equal(made.start, problem.start)


@pytest.mark.parametrize("spec", ["sorted", "iid", "shards:2", "dirichlet:0.3", "natural"])
def test_data_is_loaded_divided_and_modelled_on_the_cpu(spec):
    data = load("synthetic")
    expected = partition(spec, data.y_train, 4, seed=1, ids=data.clients)
    with elsewhere():
        again = load("synthetic")
        parts = partition(spec, again.y_train, 4, seed=1, ids=again.clients)
        clients = ClientData.split(again.x_train, again.y_train, parts)
        assert build("mlp", again)[1].weight.device.type == "cpu"
        for name in ("digits", "sparse-regression"):
            assert load(name).x_train.device.type == "cpu"
    assert all(torch.equal(a, b) for a, b in zip(expected, parts, strict=True))
    assert torch.equal(clients.x, data.x_train[torch.cat(expected)])


class Moved:
    """A number of clients that is on another device until it is asked for on the CPU."""

    def __init__(self, values):
        self.values, self.asked = values, 0

    def cpu(self):
        self.asked += 1
        return self.values


def test_clients_that_are_on_another_device_are_counted_on_the_cpu():
    problem, some = KINDS["least_squares"](), torch.tensor([2, 0])
    sizes, offsets = problem.data.sizes, problem.data.offsets
    moved = Moved(some)
    rows = minibatches(0, moved, 1, 3, sizes, offsets)(2)
    assert torch.equal(rows, minibatches(0, some, 1, 3, sizes, offsets)(2))
    assert moved.asked == 1


def test_digest_tells_data_and_division_apart():
    problem = KINDS["binary"]()
    same, rest = KINDS["binary"](batch_size=None, seed=7), list(problem.data)
    assert problem.digest() == same.digest() == problem.exact().digest() == info_of(Pooled(problem)).digest()
    others = [
        problem.alone(1).digest(),
        type(problem)([(torch.cat([rest[0][0], rest[1][0]]), torch.cat([rest[0][1], rest[1][1]])), *rest[2:]]).digest(),
    ]
    x = rest[0][0].clone()
    x[0, 0] += 1e-12
    others.append(type(problem)([(x, rest[0][1]), *rest[1:]]).digest())
    assert len({problem.digest(), *others}) == 4
