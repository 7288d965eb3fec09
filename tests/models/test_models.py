"""Networks: sizes, names, what they compute, and training them as flat vectors."""

import json
from itertools import pairwise
from typing import ClassVar

import pytest
import torch
from public_data import needs, needs_cifar10
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy, mse_loss

from fednmap import simulate
from fednmap.algorithms import FedNMap
from fednmap.data import Dataset, load
from fednmap.models import build, mobilenet_v3_small
from fednmap.models.mobilenet import Depthwise
from fednmap.models.prune import prunable
from fednmap.problems import Network
from fednmap.regularizers import L1


def pictures(*shape, labels=10):
    x = torch.zeros(labels, *shape)
    return Dataset(x, torch.arange(labels), x, torch.arange(labels))


def size(module):
    return sum(p.numel() for p in module.parameters())


def test_mobilenet_has_the_published_number_of_parameters():
    assert size(mobilenet_v3_small(num_classes=10)) == 1_528_106
    # 2,542,856 with 1,000 labels, as torchvision documents its own
    assert size(mobilenet_v3_small(num_classes=1000)) == 2_542_856
    assert size(mobilenet_v3_small(norm="group")) == 1_528_106


def test_mobilenet_has_the_parameter_names_and_shapes_of_torchvision():
    path = needs(".", "mobilenet_v3_small_parameters.json")
    expected = [(name, tuple(shape)) for name, shape in json.loads(path.read_text())]
    for norm in ("batch", "group"):
        found = [(name, tuple(p.shape)) for name, p in mobilenet_v3_small(norm=norm).named_parameters()]
        assert found == expected


def test_mobilenet_loads_a_state_dict_of_torchvisions_form():
    module = mobilenet_v3_small()
    # besides the parameters, torchvision's state dict has three buffers for each batch norm layer
    buffers = {name.rpartition(".")[2] for name, _ in module.named_buffers()}
    assert buffers == {"running_mean", "running_var", "num_batches_tracked"}
    mobilenet_v3_small().load_state_dict(module.state_dict(), strict=True)


def test_mobilenet_halves_the_picture_as_table_2_says():
    module, sides, x = mobilenet_v3_small().eval(), [], torch.zeros(1, 3, 224, 224)
    for layer in module.features:
        x = layer(x)
        sides.append(x.shape[-1])
    assert sides == [112, 56, 28, 28, 14, 14, 14, 14, 14, 7, 7, 7, 7]


@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("sides", [(1, 1), (1, 2), (2, 2), (2, 3), (3, 3), (4, 1), (4, 4), (7, 6)])
def test_a_kernel_without_what_meets_padding_alone_is_the_whole_kernel(kernel, stride, sides):
    torch.manual_seed(0)
    layer, x = Depthwise(6, kernel, stride).double(), torch.randn(3, 6, *sides).double().requires_grad_()
    found, whole = layer(x), nn.Conv2d.forward(layer, x)
    g = torch.randn_like(whole)
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-14)
    for ours, theirs in zip(*(torch.autograd.grad(y, (x, layer.weight), g) for y in (found, whole)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)


@pytest.mark.filterwarnings("ignore:Converting a tensor", "ignore::DeprecationWarning")
def test_small_filters_can_be_traced():
    torch.manual_seed(0)
    layer, x, d = Depthwise(4, 5, 2).double(), torch.randn(3, 4, 4, 4).double(), torch.randn(3, 4, 4, 4).double()
    assert torch.equal(torch.jit.trace(layer, x)(d), layer(d))


def test_gradients_of_single_pictures_by_torch_func():
    """Its transformations need rules of their own for gradients that are written out."""
    torch.manual_seed(0)
    module, x = mobilenet_v3_small(4, norm="group").double(), torch.randn(3, 3, 32, 32).double()
    parameters = dict(module.named_parameters())

    def total(values, picture):
        return functional_call(module, values, (picture.unsqueeze(0),)).square().sum()

    found = vmap(grad(total), (None, 0))(parameters, x)
    for i, picture in enumerate(x):
        alone = torch.autograd.grad(total(parameters, picture), list(parameters.values()))
        for (name, _), v in zip(parameters.items(), alone, strict=True):
            torch.testing.assert_close(found[name][i], v, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        ("linear", 7_850),
        ("mlp", 50_890),
        ("mlp:64", 50_890),
        ("mlp:64,32:relu", 784 * 64 + 64 + 64 * 32 + 32 + 330),
        ("cnn", 160 + 4_640 + 32 * 6 * 6 * 64 + 64 + 650),
        ("mobilenet-v3-small", 1_528_106 - 2 * 9 * 16),
        ("mobilenet-v3-small:group", 1_528_106 - 2 * 9 * 16),
    ],
)
def test_models_by_name_fit_mnist(spec, count):
    data = pictures(1, 28, 28)
    module = build(spec, data)
    assert size(module) == count
    assert module(data.x_train).shape == (10, 10)


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 8), (2, 9, 12)])
@pytest.mark.parametrize("spec", ["linear", "mlp:8:tanh", "cnn"])
def test_models_take_pictures_of_any_size(spec, shape):
    data = pictures(*shape, labels=4)
    assert build(spec, data)(data.x_train).shape == (4, 4)


def test_activation_is_the_one_asked_for():
    assert isinstance(build("mlp:4", pictures(8))[2], nn.Sigmoid)
    assert isinstance(build("mlp:4:relu", pictures(8))[2], nn.ReLU)


@pytest.mark.parametrize("spec", ["linear", "mlp:4:relu"])
def test_outputs_of_a_regression_have_the_shape_of_its_targets(spec):
    data = load("sparse-regression")
    assert build(spec, data)(data.x_train).shape == data.y_train.shape


class Doubled(nn.Sequential):
    """Layers in a row whose sum of parts is not what it computes."""

    def __init__(self, shape, outputs):
        super().__init__(nn.Flatten(), nn.Linear(shape[0], 3), nn.ReLU(), nn.Linear(3, outputs))

    def forward(self, x):
        return 2 * super().forward(x)


def test_a_row_of_layers_of_ones_own_computes_what_it_computes():
    data = Dataset(torch.randn(4, 5), torch.randn(4), torch.randn(2, 5), torch.randn(2))
    torch.manual_seed(0)
    found = build(f"{__name__}:Doubled", data)
    torch.manual_seed(0)
    torch.testing.assert_close(found(data.x_train), Doubled((5,), 1)(data.x_train).squeeze(1))
    assert not prunable(Doubled((5,), 1))


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        ("mlpp", "did you mean 'mlp'"),
        ("mlp:x", "numbers of hidden units"),
        ("mlp:0", "at least 1"),
        ("mlp:4:relu:1", "takes 2 arguments"),
        ("mlp:4:sigmod", "did you mean 'sigmoid'"),
        ("linear:3", "takes no arguments"),
        ("cnn", "pictures"),
        ("mobilenet-v3-small", "pictures"),
    ],
)
def test_what_cannot_be_built_is_explained(spec, what):
    with pytest.raises(ValueError, match=what):
        build(spec, pictures(64))


def test_norm_that_is_none_is_explained():
    with pytest.raises(ValueError, match="did you mean 'group'"):
        build("mobilenet-v3-small:grup", pictures(3, 32, 32))


def normalised():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)).double()


def clients(*sizes):
    torch.manual_seed(1)
    # each client has its own contrast and brightness, so that clients' statistics differ
    return [(i + (i + 1) * torch.rand(n, 1, 8, 8).double(), torch.randint(0, 3, (n,))) for i, n in enumerate(sizes)]


def batch_statistics_loss(module, x, y):
    """What torch itself computes in train mode, on a copy."""
    import copy

    return cross_entropy(copy.deepcopy(module).train()(x), y).detach()


def test_loss_of_a_batch_norm_network_uses_fixed_chunks_of_each_clients_rows():
    module, data = normalised(), clients(7, 4, 3)
    problem = Network(module, cross_entropy, data, batch_size=4)
    mean = torch.zeros((), dtype=torch.float64)
    for x, y in data:  # 7 rows: one chunk, the three left over join it; 4 and 3 rows: one chunk each
        mean += batch_statistics_loss(module, x, y) / 3
    assert float(problem.loss(problem.start)) == pytest.approx(float(mean), rel=1e-12)
    x, y = data[0]
    two = Network(module, cross_entropy, data[:1], batch_size=3)  # chunks of 3 and 4
    expected = 3 / 7 * batch_statistics_loss(module, x[:3], y[:3]) + 4 / 7 * batch_statistics_loss(module, x[3:], y[3:])
    assert float(two.loss(two.start)) == pytest.approx(float(expected), rel=1e-12)


def test_gradient_of_a_batch_norm_network_is_the_derivative_of_its_loss():
    problem = Network(normalised(), cross_entropy, clients(9, 6), batch_size=4)
    x, gradient = problem.start, problem.gradient(problem.start)
    torch.manual_seed(2)
    for _ in range(3):
        d = torch.randn_like(x)
        slope = (problem.loss(x + 1e-6 * d) - problem.loss(x - 1e-6 * d)) / 2e-6
        assert float(slope) == pytest.approx(float(gradient @ d), rel=1e-6, abs=1e-8)


def test_minibatch_gradients_use_batch_statistics_stacked_or_one_by_one():
    problem = Network(normalised(), cross_entropy, clients(9, 6), batch_size=4)
    points = torch.stack([problem.start, problem.start * 1.1])
    stacked = problem.oracle(torch.arange(2), 3)(points, 1)
    for i in range(2):
        torch.testing.assert_close(problem.oracle(torch.tensor(i), 3)(points[i], 1), stacked[i])
    from drawn import minibatches

    rows = minibatches(0, torch.tensor(0), 3, 4, problem.data.sizes, problem.data.offsets)(1)
    module = normalised()
    batch_statistics_loss_ = cross_entropy(module.train()(problem.data.x[rows]), problem.data.y[rows])
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(batch_statistics_loss_, list(module.parameters()))])
    torch.testing.assert_close(stacked[0], expected)


def test_running_statistics_are_not_part_of_x_and_training_leaves_them():
    module = normalised()
    problem = Network(module, cross_entropy, clients(9, 6), batch_size=4)
    assert problem.dim == size(module)
    problem.gradient(problem.start)
    assert module[1].running_mean.abs().max() == 0
    assert int(module[1].num_batches_tracked) == 0


def test_calibration_is_the_clients_average_of_batch_statistics():
    module, data = normalised(), clients(8, 4)
    trained = Network(module, cross_entropy, data, batch_size=4, weights=[0.75, 0.25]).calibrate(
        torch.cat([p.detach().flatten() for p in module.parameters()])
    )
    met = [module[0](x).detach() for x in (data[0][0][:4], data[0][0][4:], data[1][0])]
    mean = [m.mean((0, 2, 3)) for m in met]
    variance = [m.transpose(0, 1).flatten(1).var(1) for m in met]
    for found, (a, b, c) in ((trained[1].running_mean, mean), (trained[1].running_var, variance)):
        torch.testing.assert_close(found, 0.75 * (a + b) / 2 + 0.25 * c)
    assert not trained.training
    inputs = data[0][0]
    torch.testing.assert_close(trained(inputs[:1]), trained(inputs)[:1])  # no longer depends on the batch


def test_a_calibrated_module_is_ordinary(tmp_path):
    problem = Network(normalised(), cross_entropy, clients(8, 4), batch_size=4)
    trained = problem.module(problem.start + 0.1)
    torch.save(trained.state_dict(), tmp_path / "weights.pt")
    again = normalised().eval()
    again.load_state_dict(torch.load(tmp_path / "weights.pt"))
    assert torch.equal(again(problem.data.x), trained(problem.data.x))


def test_batch_norm_without_batches_is_refused():
    with pytest.raises(ValueError, match="batch norm needs a batch_size"):
        Network(normalised(), cross_entropy, clients(4), batch_size=None)


def test_module_without_batch_norm_keeps_its_parameters():
    problem = Network(nn.Linear(2, 1), mse_loss, [(torch.ones(2, 2), torch.ones(2, 1))])
    x = torch.tensor([1.0, 2.0, 3.0])
    assert problem.module(x)(torch.ones(1, 2)).item() == 6


@pytest.mark.slow
def test_mobilenet_trains_on_cifar10_and_its_exported_copy_predicts_the_same(tmp_path):
    needs_cifar10()
    from safetensors.torch import load_file

    from fednmap.models.export import write

    data = load("cifar10")
    parts = [(data.x_train[k : k + 128], data.y_train[k : k + 128]) for k in range(0, 512, 128)]
    torch.manual_seed(0)
    problem = Network(mobilenet_v3_small(), cross_entropy, parts, batch_size=16)
    method = FedNMap(L1(1e-5), eta_a=0.05, Q=2)
    losses = [float(problem.loss(problem.start))]
    for last in simulate(method, problem, rounds=30):
        if last.t % 10 == 9:
            losses.append(float(problem.loss(method.model(last.server))))
    assert losses[0] == pytest.approx(2.30, abs=0.02)  # log 10: nothing known yet
    assert len(losses) == 4
    assert all(later < earlier - 0.02 for earlier, later in pairwise(losses)), losses
    assert losses[-1] < 2.1

    trained = problem.module(method.model(last.server))
    write(trained, tmp_path / "model.safetensors")
    again = mobilenet_v3_small().eval()
    again.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    with torch.no_grad():
        expected = trained(data.x_test[:500])
        assert torch.equal(again(data.x_test[:500]), expected)
    assert len(expected.argmax(1).unique()) > 1
    # the calibrated statistics stand in for those of a batch: the loss is nearly the one that was trained
    rows = problem.data.x, problem.data.y
    with torch.no_grad():
        assert float(cross_entropy(trained(rows[0]), rows[1])) == pytest.approx(losses[-1], abs=0.2)


def trained_a_while():
    """The same with running statistics and an affine map that are far from those of the clients."""
    module = normalised()
    with torch.no_grad():
        module[1].running_mean.normal_()
        module[1].running_var.uniform_(0.5, 3)
        module[1].weight.uniform_(0.5, 2)
    return module


def plain_gradient(module, data):
    """By autograd alone, client by client, with the module as it is."""
    losses = [cross_entropy(module(x), y) for x, y in data]
    slopes = torch.autograd.grad(sum(losses) / len(data), [p for p in module.parameters() if p.requires_grad])
    return torch.cat([g.flatten() for g in slopes])


@pytest.mark.parametrize("batch_size", [4, None])
def test_batch_norm_in_eval_mode_keeps_its_running_statistics(batch_size):
    module, data = trained_a_while().eval(), clients(9, 6)
    problem = Network(module, cross_entropy, data, batch_size=batch_size)
    torch.testing.assert_close(problem.gradient(problem.start), plain_gradient(module, data))
    everybody = problem.exact().oracle(torch.arange(2), 0)(problem.start, 0)
    torch.testing.assert_close(everybody.mean(0), plain_gradient(module, data))
    mean = sum(cross_entropy(module(x), y) for x, y in data) / 2
    torch.testing.assert_close(problem.loss(problem.start), mean.detach())
    kept = problem.module(problem.start)
    assert torch.equal(kept(data[0][0]), module(data[0][0]))
    assert torch.equal(kept[1].running_mean, module[1].running_mean)


def test_each_batch_norm_layer_has_its_own_mode():
    def two():
        return nn.Sequential(nn.BatchNorm2d(1), nn.Tanh(), trained_a_while()).double()

    module, data = two(), clients(4, 4)
    module[2][1].eval()
    problem = Network(module, cross_entropy, data, batch_size=4)  # one chunk per client
    plain = two()
    plain[2][1].eval()
    torch.testing.assert_close(problem.gradient(problem.start), plain_gradient(plain, data))
    kept = problem.module(problem.start)
    assert torch.equal(kept[2][1].running_var, module[2][1].running_var)
    assert not torch.equal(kept[0].running_var, module[0].running_var)  # that one is calibrated


def test_frozen_batch_norm_of_another_precision_than_x():
    module, data = trained_a_while().eval(), clients(5)
    problem = Network(module.float(), cross_entropy, [(x.float(), y) for x, y in data], batch_size=None)
    wide = Network(module.double(), cross_entropy, data, batch_size=None)
    for name in ("gradient", "loss"):
        torch.testing.assert_close(
            getattr(problem, name)(wide.start), getattr(wide, name)(wide.start), rtol=1e-5, atol=1e-6
        )


class Watching(nn.Module):
    """Tells how many rows it is given at once."""

    rows: ClassVar[list[int]] = []

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(4, 100), nn.Linear(100, 3)

    def forward(self, x):
        self.rows.append(len(x))
        return self.head(self.inner(x).tanh())


def small_clients(n=3, rows=40):
    rng = torch.Generator().manual_seed(0)
    return [(torch.randn(rows, 4, generator=rng), torch.randint(0, 3, (rows,), generator=rng)) for _ in range(n)]


def test_all_data_is_gone_through_with_bounded_activations(monkeypatch):
    module, data = Watching(), small_clients()
    problem = Network(module, cross_entropy, data)
    # of a row the backward pass needs tanh's outputs, 100 numbers, and has three times the outputs: 436 bytes
    assert problem._activation_bytes == 512
    monkeypatch.setattr("fednmap.problems.network.ACTIVATION_BYTES", 7 * 512)
    expected = plain_gradient(module, data)
    Watching.rows.clear()
    torch.testing.assert_close(problem.gradient(problem.start), expected)
    problem.loss(problem.start)
    problem.predict(problem.start, problem.data.x)
    assert max(Watching.rows) == 7
    everybody = problem.exact().oracle(torch.arange(3), 0)(problem.start, 0)
    torch.testing.assert_close(everybody.mean(0), expected)


def test_a_stack_of_clients_counts_their_activations(monkeypatch):
    problem = Network(Watching(), cross_entropy, small_clients(), batch_size=8)
    assert problem.chunk >= 3
    monkeypatch.setattr("fednmap.problems.network.ACTIVATION_BYTES", 2 * 8 * 512)
    assert problem.chunk == 2


def test_frozen_parameters_are_kept_once(monkeypatch):
    import pickle
    from threading import Thread

    module = nn.Sequential(nn.Linear(4, 400), nn.Linear(400, 400), nn.LayerNorm(400), nn.Linear(400, 3))
    module[1].requires_grad_(False)
    problem = Network(module, cross_entropy, small_clients(), batch_size=8)
    places = []

    def place():
        problem.exact().oracle(torch.tensor(0), 0)(problem.start, 0)
        places.append(problem._function.local.module[1].weight.data_ptr())

    for _ in range(3):
        thread = Thread(target=place)
        thread.start()
        thread.join()
    assert set(places) == {problem._original[1].weight.data_ptr()}
    assert problem._original[1].weight.data_ptr() != module[1].weight.data_ptr()  # the module itself is copied
    held = sum(p.nbytes for p in module.parameters())
    assert len(pickle.dumps(problem)) < 1.2 * held
    again = pickle.loads(pickle.dumps(problem))
    assert torch.equal(again.gradient(problem.start), problem.gradient(problem.start))


def test_the_measuring_gamma_of_large_data_is_that_of_a_sample_of_every_client(monkeypatch):
    from fednmap.measure import problem_gamma
    from fednmap.regularizers import Zero
    from fednmap.simulation.sums import divided
    from fednmap.simulation.threads import ThreadPool

    problem = Network(Watching(), cross_entropy, small_clients(rows=400))
    assert problem.subsample() is problem  # small data are measured whole
    whole = problem_gamma(problem, Zero(), problem.start)
    monkeypatch.setattr("fednmap.problems.network.ACTIVATION_BYTES", 5 * 512)  # 240 chunks
    few = problem.subsample()
    assert few.data.sizes.tolist() == [27] * 3  # 16 chunks of 5 rows, shared by the clients
    expected = plain_gradient(problem.module(problem.start), [few.data[i] for i in range(3)])
    torch.testing.assert_close(few.gradient(problem.start), expected)
    Watching.rows.clear()
    gamma = problem_gamma(problem, Zero(), problem.start)
    assert sum(Watching.rows) == 16 * 81  # 8 iterations of 2 gradients
    assert gamma == pytest.approx(whole, rel=0.25)
    for threads in (1, 2):
        with ThreadPool(threads) as pool:
            assert problem_gamma(divided(problem, pool), Zero(), problem.start) == gamma
