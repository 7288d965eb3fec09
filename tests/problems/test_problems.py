"""Losses and gradients: against finite differences and autograd, in every shape the protocol allows."""

import numpy as np
import pytest
import torch
from stochastic import KINDS, SIZES, binary, least_squares, network
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from fednmap import problems, simulate
from fednmap.algorithms import FedNMap
from fednmap.core import info_of
from fednmap.measure import evaluate
from fednmap.models import mlp
from fednmap.names import InputError
from fednmap.problems import LeastSquares, Logistic, Network, Pooled, finite_sum
from fednmap.regularizers import L1
from fednmap.simulation.sums import divided
from fednmap.simulation.threads import ThreadPool

EXACT = {name: (lambda make=make, **options: make(batch_size=None, **options)) for name, make in KINDS.items()}
EVERYBODY = torch.arange(len(SIZES))
WEIGHTS = [0.4, 0.3, 0.2, 0.1]


def point(problem, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return 0.5 * torch.randn(problem.dim, generator=rng, dtype=torch.float64)


def differences(f, x, h=1e-5):
    steps = h * torch.eye(len(x), dtype=x.dtype)
    return torch.stack([(f(x + e) - f(x - e)) / (2 * h) for e in steps])


def test_every_problem_is_tested():
    made = {type(make()).__name__ for make in KINDS.values()}
    elsewhere = {"GLM", "Cox"}  # problems/test_families.py, problems/test_cox.py
    assert made == set(problems.__all__) - {"FiniteSum", "Pooled", "families"} - elsewhere


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_gradient_is_that_of_the_loss(kind, weights):
    problem = EXACT[kind](weights=weights)
    x = point(problem)
    assert torch.allclose(problem.gradient(x), differences(problem.loss, x), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_the_mean_over_clients_of_their_own(kind):
    problem = EXACT[kind]()
    x = point(problem)
    alone = [rebuilt(problem, [pair]) for pair in problem.data]
    assert torch.allclose(problem.loss(x), sum(p.loss(x) for p in alone) / len(alone), rtol=1e-13)
    weighted = EXACT[kind](weights=WEIGHTS)
    expected = sum(w * p.loss(x) for w, p in zip(WEIGHTS, alone, strict=True))
    assert torch.allclose(weighted.loss(x), expected, rtol=1e-13)


def rebuilt(problem, data):
    """The same kind of problem on other data."""
    if isinstance(problem, Network):
        return Network(problem.module(problem.start), cross_entropy, data, batch_size=None)
    return Logistic(data, classes=problem.classes) if isinstance(problem, Logistic) else LeastSquares(data)


@pytest.mark.parametrize("kind", KINDS)
def test_a_clients_exact_gradient_is_that_of_its_own_loss(kind):
    problem = EXACT[kind]()
    x = point(problem)
    g = problem.oracle(EVERYBODY, 0)
    for i, pair in enumerate(problem.data):
        alone = rebuilt(problem, [pair])
        assert torch.allclose(g(x, 0)[i], differences(alone.loss, x), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_the_exact_oracles_average_to_the_gradient(kind, weights):
    problem = EXACT[kind](weights=weights)
    x = point(problem)
    w = torch.full((4,), 0.25, dtype=torch.float64) if weights is None else torch.tensor(weights, dtype=torch.float64)
    assert torch.allclose(w @ problem.oracle(EVERYBODY, 0)(x, 0), problem.gradient(x), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_size", [None, 3])
def test_stack_common_point_and_one_client_agree(kind, batch_size):
    problem = KINDS[kind](batch_size=batch_size)
    x, ids = point(problem), torch.tensor([2, 0, 3])
    g = problem.oracle(ids, 5)
    common = g(x, 1)
    assert common.shape == (3, problem.dim)
    assert torch.allclose(common, g(x.expand(3, -1), 1), rtol=1e-12, atol=1e-14)
    apart = torch.stack([point(problem, seed) for seed in range(3)])
    stacked = g(apart, 1)
    for row, i in enumerate(ids):
        one = problem.oracle(i, 5)
        assert one(x, 1).shape == (problem.dim,)
        assert torch.allclose(one(x, 1), common[row], rtol=1e-12, atol=1e-14)
        assert torch.allclose(one(apart[row], 1), stacked[row], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_minibatch_gradients_are_unbiased(kind):
    problem = KINDS[kind](batch_size=400)
    x = point(problem)
    noisy = torch.stack([problem.oracle(EVERYBODY, t)(x, 0) for t in range(40)])
    exact = EXACT[kind]().oracle(EVERYBODY, 0)(x, 0)
    error = noisy.std(0) / 40**0.5
    assert bool(((noisy.mean(0) - exact).abs() <= 5 * error + 1e-12).all())
    assert not torch.equal(noisy[0], noisy[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 100, 1000])
def test_bounded_memory_gives_the_same_result(kind, chunk, monkeypatch):
    whole = EXACT[kind](weights=WEIGHTS)
    x = point(whole)
    expected = whole.loss(x), whole.gradient(x), whole.oracle(EVERYBODY, 0)(x, 0)
    monkeypatch.setattr(finite_sum, "CHUNK_BYTES", chunk)
    got = whole.loss(x), whole.gradient(x), whole.oracle(EVERYBODY, 0)(x, 0)
    assert all(torch.allclose(u, v, rtol=1e-12, atol=1e-14) for u, v in zip(expected, got, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_float32_runs_in_float32(kind):
    problem = KINDS[kind]()
    x = point(problem).float()
    assert problem.gradient(x).dtype == problem.loss(x).dtype == torch.float32
    assert problem.oracle(EVERYBODY, 0)(x, 0).dtype == torch.float32
    assert torch.allclose(problem.gradient(x), problem.gradient(x.double()).float(), rtol=1e-4, atol=1e-5)


def test_binary_labels_may_be_zero_one_or_plus_minus_one():
    zero_one = binary(batch_size=None)
    signs = Logistic([(a, 2 * b - 1) for a, b in zero_one.data])
    real = Logistic([(a, (2 * b - 1).double()) for a, b in zero_one.data])
    x = point(zero_one)
    for other in (signs, real):
        assert torch.equal(zero_one.loss(x), other.loss(x))
        assert torch.equal(zero_one.gradient(x), other.gradient(x))
    by_hand = torch.stack(
        [torch.log1p(torch.exp(-(2 * b - 1) * (a @ x))).mean() for a, b in zero_one.data]
    ).mean()  # f = mean_i mean_j log(1 + exp(-s <a, x>))
    assert torch.allclose(zero_one.loss(x), by_hand, rtol=1e-12)


def test_logistic_does_not_overflow():
    a = torch.tensor([[1000.0], [-1000.0]], dtype=torch.float64)
    problem = Logistic([(a, torch.tensor([1, 0]))])
    for value in (5.0, -5.0):
        x = torch.tensor([value], dtype=torch.float64)
        assert torch.isfinite(problem.loss(x))
        assert torch.isfinite(problem.gradient(x)).all()
    assert float(problem.loss(torch.tensor([-5.0], dtype=torch.float64))) == 5000.0


def test_two_classes_of_a_multinomial_are_the_binary_problem():
    problem = binary(batch_size=None)
    three = Logistic(list(problem.data), classes=3)
    assert three.dim == 3 * problem.dim
    assert problem.predict(point(problem), problem.data.x).max() <= 1


def test_least_squares_by_hand():
    problem = least_squares(batch_size=None)
    x = point(problem)
    by_hand = sum((a @ x - b).square().mean() / 2 for a, b in problem.data) / problem.n
    assert torch.allclose(problem.loss(x), by_hand, rtol=1e-13)
    assert torch.equal(problem.predict(x, problem.data.x), problem.data.x @ x)


def test_a_linear_network_is_least_squares():
    reference = least_squares(batch_size=None)
    data = [(a, b.unsqueeze(-1)) for a, b in reference.data]
    linear = torch.nn.Linear(6, 1, bias=False).double()
    linked = Network(linear, lambda o, y: mse_loss(o, y) / 2, data, batch_size=None)
    x = point(reference)
    assert torch.allclose(linked.loss(x), reference.loss(x), rtol=1e-13)
    assert torch.allclose(linked.gradient(x), reference.gradient(x), rtol=1e-12)
    some = torch.tensor([1, 3])
    minibatches = (
        p.oracle(some, 2)(x, 1) for p in (Network(linear, linked._function.loss, data, batch_size=3), least_squares())
    )
    assert torch.allclose(*minibatches, rtol=1e-12)


def test_network_gradient_is_what_autograd_gives_its_module():
    problem = network(batch_size=None)
    x = point(problem)
    module = problem.module(x)
    loss = sum(cross_entropy(module(a), b) for a, b in problem.data) / problem.n
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in module.parameters()])
    assert torch.allclose(problem.gradient(x), expected, rtol=1e-12, atol=1e-14)
    assert torch.equal(problem.predict(x, problem.data.x), module(problem.data.x).argmax(-1))


def test_network_starts_at_the_modules_parameters_and_leaves_the_module_alone():
    module = mlp(6, 3, hidden=(4,)).double()
    before = [p.detach().clone() for p in module.parameters()]
    problem = Network(module, cross_entropy, list(network().data))
    assert torch.equal(problem.start, torch.cat([p.flatten() for p in before]))
    problem.gradient(problem.start + 1)
    problem.module(problem.start + 1)
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))
    with pytest.raises(ValueError, match="no parameters"):
        Network(torch.nn.ReLU(), cross_entropy, list(network().data))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_pooled_is_the_mean_of_the_same_minibatches(kind, weights):
    problem = KINDS[kind](weights=weights)
    pooled = Pooled(problem)
    x = point(problem)
    w = torch.full((4,), 0.25, dtype=torch.float64) if weights is None else torch.tensor(weights, dtype=torch.float64)
    expected = w @ problem.oracle(EVERYBODY, 3)(x, 2)
    assert (pooled.n, pooled.dim) == (1, problem.dim)
    assert torch.allclose(pooled.oracle(torch.tensor(0), 3)(x, 2), expected, rtol=1e-12, atol=1e-14)
    assert torch.allclose(pooled.oracle(torch.tensor([0]), 3)(x[None], 2), expected[None], rtol=1e-12, atol=1e-14)
    assert torch.equal(pooled.loss(x), problem.loss(x))
    assert torch.equal(pooled.gradient(x), problem.gradient(x))
    assert torch.equal(pooled.start, problem.start)


def test_predictions_are_made_in_the_precision_of_the_model():
    inputs, labels = torch.randn(6, 3), torch.arange(6) % 3
    for problem in (
        Network(nn.Linear(3, 3), nn.functional.cross_entropy, [(inputs, labels)]),
        Logistic([(inputs, labels)]),
        LeastSquares([(inputs, labels.float())]),
    ):
        wide = problem.predict(problem.start.double(), inputs)
        assert torch.allclose(wide.double(), problem.predict(problem.start, inputs).double(), atol=1e-6)


def test_data_that_carry_gradients_are_only_data():
    inputs = torch.randn(6, 3, requires_grad=True)
    assert not LeastSquares([(inputs, torch.randn(6))]).data.x.requires_grad


def test_a_batch_is_a_whole_number_of_samples():
    with pytest.raises(InputError, match=r"batch_size is 2\.5"):
        LeastSquares([(torch.eye(3), torch.ones(3))], batch_size=2.5)


class Noisy(nn.Linear):
    """Randomness that torch knows nothing about."""

    def forward(self, inputs):
        return super().forward(inputs) + float(np.random.default_rng().standard_normal())


def test_a_module_that_differs_from_call_to_call_is_refused():
    with pytest.raises(InputError, match="random"):
        Network(Noisy(3, 2), nn.functional.cross_entropy, [(torch.randn(6, 3), torch.arange(6) % 2)])


@pytest.mark.parametrize("kind", [*KINDS, "autograd", "regression"])
def test_loss_and_gradient_in_one_pass_are_the_same_two(kind):
    if kind == "autograd":
        module = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Softplus(), torch.nn.Linear(4, 3)).double()
        problem = Network(module, cross_entropy, list(network().data), weights=WEIGHTS)
    elif kind == "regression":
        data = [(a, b.unsqueeze(1)) for a, b in least_squares().data]
        problem = Network(torch.nn.Linear(6, 1).double(), mse_loss, data, weights=WEIGHTS)
    else:
        problem = KINDS[kind](weights=WEIGHTS)
    x = point(problem)
    for one in (problem, problem.part(0, 1), Pooled(problem)):
        loss, gradient = info_of(one).value_and_gradient(x)
        assert torch.allclose(loss, problem.loss(x), rtol=1e-13)
        assert torch.allclose(gradient, problem.gradient(x), rtol=1e-12, atol=1e-14)
    assert not loss.requires_grad


def test_measurements_go_through_the_data_once(monkeypatch):
    problem, phi = network(), L1(0.1)
    x = point(problem)
    expected = evaluate(problem, phi, x, 0.5)
    pool = ThreadPool(1)
    monkeypatch.setattr(finite_sum, "CHUNK_BYTES", 400)
    pieces = divided(problem, pool)
    assert pieces is not problem
    for twice in ("loss", "gradient"):
        monkeypatch.setattr(Network, twice, None)
    for one in (problem, pieces):
        assert evaluate(one, phi, x, 0.5) == pytest.approx(expected, rel=1e-12)


def test_small_minibatches_are_as_precise_as_the_data(monkeypatch):
    rng = torch.Generator().manual_seed(0)
    data = [tuple(torch.randn(9, k, generator=rng, dtype=torch.float64) for k in (4, 2)) for _ in range(3)]
    problem = Network(nn.Linear(4, 2), mse_loss, data, batch_size=5)  # whose start is in float32
    x = point(problem).expand(3, -1)
    small = problem.oracle(torch.arange(3), 0)(x, 0)
    monkeypatch.setattr(finite_sum, "AT_ONCE_BYTES", 0)
    torch.testing.assert_close(small, problem.oracle(torch.arange(3), 0)(x, 0), rtol=1e-12, atol=1e-14)


def last_axis_loss(out, y):
    return cross_entropy(out.flatten(0, 1), y.flatten())


@pytest.mark.parametrize(("loss", "first"), [(last_axis_loss, False), (cross_entropy, True)])
@pytest.mark.parametrize("classes", [5, 7])
def test_the_axis_of_the_classes_is_that_of_the_loss(loss, first, classes):
    """Sequences of 5: with 5 classes the shapes say nothing."""
    y = torch.randint(0, classes, (9, 5), generator=torch.Generator().manual_seed(0))
    right = nn.functional.one_hot(y, classes).float()  # what a perfect model gives
    inputs = right.transpose(1, 2).contiguous() if first else right
    module = nn.Conv1d(classes, classes, 1, bias=False) if first else nn.Linear(classes, classes, bias=False)
    problem = Network(module, loss, [(inputs, y)])
    perfect = torch.eye(classes).flatten()
    assert torch.equal(problem.predict(perfect, inputs), y)


def test_the_axis_of_the_classes_with_labels_that_the_loss_leaves_out():
    def masked(out, y):
        each = cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)  # 0 where y is -100
        return (each.sum(1) / (y >= 0).sum(1)).mean()

    y = torch.randint(0, 5, (9, 5), generator=torch.Generator().manual_seed(0))
    inputs = nn.functional.one_hot(y, 5).float()
    problem = Network(nn.Linear(5, 5, bias=False), masked, [(inputs, torch.where(torch.arange(5) < 2, -100, y))])
    assert torch.equal(problem.predict(torch.eye(5).flatten(), inputs), y)


class Tokens(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.embedding, self.bag = nn.Embedding(6, 3, sparse=sparse), nn.EmbeddingBag(6, 3, sparse=sparse)
        self.head = nn.Linear(3, 2)

    def forward(self, tokens):
        return self.head(self.embedding(tokens).tanh().mean(1) + self.bag(tokens))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch, of a stack of bags
def test_embeddings_with_sparse_gradients_are_trained_as_any_other():
    rng = torch.Generator().manual_seed(0)
    data = [(torch.randint(0, 6, (8, 4), generator=rng), torch.randint(0, 2, (8,), generator=rng)) for _ in range(3)]
    torch.manual_seed(0)
    module, dense = Tokens(True), Tokens(False)
    dense.load_state_dict(module.state_dict())
    found, expected = Network(module, cross_entropy, data), Network(dense, cross_entropy, data)
    x, clients = expected.start, torch.arange(3)
    assert torch.equal(found.gradient(x), expected.gradient(x))
    assert torch.equal(found.oracle(clients, 2)(x, 1), expected.oracle(clients, 2)(x, 1))
    assert found.module(x).embedding.sparse  # what was given stays as it is


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layers", [lambda: [nn.Linear(6, 8), nn.Tanh()], lambda: [nn.Linear(6, 8), nn.LayerNorm(8)]])
def test_a_module_in_half_precision_has_gradients_and_states_in_float32(dtype, layers):
    rng = torch.Generator().manual_seed(0)
    data = [(torch.randn(10, 6, generator=rng), torch.randint(0, 3, (10,), generator=rng)) for _ in range(4)]
    torch.manual_seed(0)
    module = nn.Sequential(*layers(), nn.Linear(8, 3)).to(dtype)
    problem = Network(module, cross_entropy, data, batch_size=5)
    assert problem.start.dtype == torch.float32
    losses, slopes = [], []
    for x, y in data:
        loss = cross_entropy(module(x.to(dtype)).float(), y)
        losses.append(loss.detach())
        slopes.append(torch.cat([g.flatten().float() for g in torch.autograd.grad(loss, list(module.parameters()))]))
    mean, gradient, eps = torch.stack(losses).mean(), torch.stack(slopes).mean(0), torch.finfo(dtype).eps
    torch.testing.assert_close(problem.loss(problem.start), mean, rtol=1e-6, atol=0)  # summed in float32
    assert (problem.gradient(problem.start) - gradient).norm() <= 4 * eps * gradient.norm()
    everybody = problem.exact().oracle(torch.arange(4), 0)(problem.start, 0)
    one = problem.exact().oracle(torch.tensor(2), 0)(problem.start, 0)
    assert {v.dtype for v in (everybody, one, problem.gradient(problem.start))} == {torch.float32}
    assert (everybody - torch.stack(slopes)).norm() <= 4 * eps * torch.stack(slopes).norm()
    again = problem.module(problem.start)
    assert torch.equal(again(data[0][0].to(dtype)), module(data[0][0].to(dtype)))
    method = FedNMap(L1(1e-4), eta_a=0.05, Q=3)
    *_, last = simulate(method, problem, rounds=40)
    assert {v.dtype for v in (*last.server, *last.clients[torch.arange(4)])} == {torch.float32}
    drift = last.server.h - last.clients[torch.arange(4)].h.mean(0)
    assert drift.norm() <= 1e-5 * last.server.h.norm()  # the server's h is the mean of the clients'
    assert problem.loss(method.model(last.server)) < 0.95 * mean


def test_a_start_in_half_precision_is_refused():
    problem = network()
    with pytest.raises(InputError, match="expected start in float32 or float64"):
        simulate(FedNMap(L1(1e-4), eta_a=0.05), problem, rounds=1, start=problem.start.bfloat16())
