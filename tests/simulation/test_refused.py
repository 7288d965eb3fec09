"""What a problem cannot be made from is refused in one line; what is clear is accepted."""

import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import TensorDataset

from fednmap.data import ClientData, Dataset
from fednmap.models import build, mlp
from fednmap.names import InputError
from fednmap.problems import LeastSquares, Logistic, Network
from fednmap.regularizers import L1, parse, restrict

RNG = torch.Generator().manual_seed(0)
X = torch.randn(12, 5, generator=RNG)
LABELS = torch.arange(12) % 3
REAL = torch.randn(12, generator=RNG)
SIZES = (7, 5)


def clients(x=X, y=LABELS, sizes=SIZES):
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def linear(outputs=3):
    return nn.Linear(5, outputs)


class Returns(nn.Module):
    """A linear layer whose outputs are passed through a function."""

    def __init__(self, function, outputs=3):
        super().__init__()
        self.layer, self.function = nn.Linear(5, outputs), function

    def forward(self, x):
        return self.function(self.layer(x))


def network(module=None, loss=cross_entropy, data=None, **options):
    return Network(linear() if module is None else module, loss, clients() if data is None else data, **options)


def dropout(x):
    return nn.functional.dropout(x, 0.01)


REFUSED = {
    # the module
    "module is a list": lambda: Network(clients(), cross_entropy, linear()),
    "module is a function": lambda: Network(cross_entropy, linear(), clients()),
    r"draws random numbers .*module\.eval\(\)": lambda: network(
        nn.Sequential(linear(), nn.Dropout(0.01)), batch_size=None
    ),
    "random numbers in eval mode too": lambda: network(Returns(dropout)),
    "returns a tuple": lambda: network(Returns(lambda out: (out, out))),
    r"outputs of shape \(\)": lambda: network(Returns(torch.sum)),
    "overwrites its inputs": lambda: network(nn.Sequential(nn.ReLU(inplace=True), linear())),
    r"cannot take samples of shape \(\d, 5\)": lambda: network(nn.Linear(6, 3)),
    "no parameters to train": lambda: network(nn.Softmax(1)),
    "Linear has no parameters to train": lambda: network(linear().requires_grad_(False)),
    "client 1 holds one sample, and batch norm": lambda: network(
        nn.Sequential(nn.BatchNorm1d(5), linear()), data=clients(sizes=(11, 1)), batch_size=4
    ),
    "batch_size is 1, and batch norm": lambda: network(nn.Sequential(nn.BatchNorm1d(5), linear()), batch_size=1),
    # the loss
    "loss is 0.5": lambda: network(loss=0.5),
    "loss is 'mse'": lambda: network(loss="mse"),
    "the class CrossEntropyLoss": lambda: network(loss=nn.CrossEntropyLoss),
    "they must agree: use reduction='mean'": lambda: network(loss=nn.CrossEntropyLoss(reduction="sum")),
    r"a tensor of shape \(\d,\); .*reduction='mean'": lambda: network(loss=nn.CrossEntropyLoss(reduction="none")),
    "go with torch.nn.CrossEntropyLoss": lambda: network(
        loss=lambda out, y: cross_entropy(out, y, torch.tensor([1.0, 2.0, 3.0]))
    ),
    "differentiable": lambda: network(loss=lambda out, y: (out.argmax(1) == y).float().mean()),
    r"the loss returns a float": lambda: network(loss=lambda out, y: 1.0),
    r"\(\d, 1\) and targets \(\d,\), so that samples mix": lambda: network(linear(1), mse_loss, clients(y=REAL)),
    r"\(\d,\) and targets \(\d, 1\)": lambda: network(
        nn.Sequential(linear(1), nn.Flatten(0)), mse_loss, clients(y=REAL.unsqueeze(1))
    ),
    r"samples mix": lambda: network(linear(1), mse_loss, clients(y=1e3 + REAL)),
    "cannot take outputs": lambda: network(linear(2), mse_loss, clients(y=torch.randn(12, 3))),
    # labels
    "label 2 with 2 outputs": lambda: network(linear(2)),
    "label -1 with 3 outputs": lambda: network(data=clients(y=LABELS - 1)),
    "one output is too few": lambda: network(linear(1), data=clients(y=LABELS * 0)),
    "cannot take outputs of shape .* torch.float32 targets": lambda: network(data=clients(y=LABELS + 0.5)),
    "labels are 1 to 2, 2 different ones; number them 0 to 1": lambda: Logistic(clients(y=LABELS % 2 + 1)),
    "labels are 0 to 2, 2 different": lambda: Logistic(clients(y=LABELS % 2 * 2)),
    "all labels are 0": lambda: Logistic(clients(y=LABELS * 0)),
    "all labels are 1": lambda: Logistic(clients(y=LABELS * 0 + 1)),
    "classes is 1": lambda: Logistic(clients(y=LABELS * 0), classes=1),
    "with 3 classes use 0 to 2": lambda: Logistic(clients(y=LABELS + 1), classes=3),
    "all training rows have the same label": lambda: build("linear", Dataset(X, LABELS * 0, X, LABELS * 0)),
    # the data
    "not divided among clients": lambda: LeastSquares((X, REAL)),
    "not divided among": lambda: network(data=[X, LABELS]),
    "not divided": lambda: network(data=(X.numpy(), LABELS.numpy())),
    "the data is a TensorDataset": lambda: network(data=TensorDataset(X, LABELS)),
    "the data is a Tensor": lambda: LeastSquares(X),
    "the data is a Linear": lambda: Network(linear(), cross_entropy, linear()),
    "the data is a int": lambda: LeastSquares(3),
    "the data is a str": lambda: LeastSquares("digits"),
    "client 0 is a str, not a pair": lambda: LeastSquares({"a": (X, REAL)}),
    "client 1 is a tuple, not a pair": lambda: LeastSquares([(X, REAL), (X, REAL, REAL)]),
    "client 0 is a TensorDataset, not a pair": lambda: LeastSquares([TensorDataset(X)]),
    "y of client 0 is a list that does not hold numbers": lambda: LeastSquares([(X[:2], ["a", "b"])]),
    r"one x of client 1 has shape \(4,\), of client 0 \(5,\)": lambda: LeastSquares([(X, REAL), (X[:, 1:], REAL)]),
    r"one y of client 1 has shape \(1,\), of client 0 \(\)": lambda: LeastSquares([(X, REAL), (X, REAL[:, None])]),
    "client 0 has one number": lambda: LeastSquares([(X, torch.tensor(1.0))]),
    r"x has shape \(12,\)": lambda: LeastSquares([(REAL, REAL)]),
    r"y has shape \(12, 5\)": lambda: Logistic([(X, X)]),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_in_one_line(message):
    with pytest.raises(InputError, match=message) as error:
        REFUSED[message]()
    assert "\n" not in str(error.value)


def test_dropout_in_eval_mode_is_fine():
    problem = network(nn.Sequential(linear(), nn.Dropout(0.5)).eval())
    assert torch.equal(problem.loss(problem.start), problem.loss(problem.start))


def test_looking_for_randomness_leaves_the_generator_alone():
    module = nn.Sequential(linear(), nn.Dropout(0.5))
    state = torch.get_rng_state()
    problem = network(module)
    problem.oracle(torch.arange(2), 0)(problem.start, 0)
    assert torch.equal(state, torch.get_rng_state())


def test_class_labels_as_targets_of_a_regression_are_warned_of():
    with pytest.warns(UserWarning, match="to classify use Logistic") as found:
        LeastSquares(clients())
    assert "\n" not in str(found[0].message)
    assert found[0].filename == __file__


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float32, torch.float64])
def test_labels_of_any_type_that_are_whole_are_labels(dtype):
    data = clients(y=LABELS.to(dtype))
    torch.manual_seed(0)
    module = linear()
    for loss in (cross_entropy, nn.CrossEntropyLoss()):
        given, expected = network(module, loss, data), network(module, loss)
        assert torch.equal(given.loss(given.start), expected.loss(given.start))
        assert torch.equal(given.gradient(given.start), expected.gradient(given.start))
    x = torch.randn(15)
    assert torch.equal(Logistic(data).gradient(x), Logistic(clients()).gradient(x))


def test_a_client_may_lack_labels_and_all_may_where_the_number_is_given():
    assert Logistic([(X[:1], LABELS[:1]), (X[1:], LABELS[1:])]).classes == 3
    assert Logistic(clients(y=LABELS % 2 * 2), classes=4).classes == 4
    assert Logistic(clients(y=LABELS * 0 + 1), classes=2).classes == 2
    network(data=clients(y=LABELS * 0))  # one client of a federation may hold one label; the outputs say how many are


FORMS = {
    "numpy": lambda x, y: (x.numpy(), y.numpy()),
    "read-only numpy": lambda x, y: (np.broadcast_to(x.numpy(), x.shape), y.numpy()),
    "numpy backwards": lambda x, y: (x.flip(0).numpy()[::-1], y.flip(0).numpy()[::-1]),
    "a list of both": lambda x, y: [x, y],
    "a TensorDataset": TensorDataset,
    "numpy and a tensor": lambda x, y: (x.numpy(), y),
    "lists of numbers": lambda x, y: (x.tolist(), y.tolist()),
    "a column of targets": lambda x, y: (x, y.unsqueeze(1)),
}


@pytest.mark.parametrize("form", FORMS)
def test_data_in_any_clear_form(form):
    data = [FORMS[form](x, y) for x, y in clients(y=REAL)]
    x = torch.randn(5)
    torch.testing.assert_close(LeastSquares(data).gradient(x), LeastSquares(clients(y=REAL)).gradient(x))
    torch.testing.assert_close(LeastSquares(iter(data)).loss(x), LeastSquares(clients(y=REAL)).loss(x))


def test_whole_numbers_as_features_become_real():
    problem = LeastSquares(clients(x=(10 * X).long(), y=REAL))
    assert problem.start.dtype == torch.float32
    assert torch.isfinite(problem.gradient(problem.start)).all()


def test_pooled_numpy_arrays_are_split():
    found = ClientData.split(X.numpy(), LABELS.numpy(), [torch.tensor([3, 1]), torch.tensor([0])])
    assert torch.equal(found.x, X[[3, 1, 0]])
    assert found.sizes.tolist() == [2, 1]


def test_a_loss_that_sees_to_the_shapes_itself_is_fine():
    squeezed = network(linear(1), lambda out, y: mse_loss(out.squeeze(-1), y), clients(y=REAL))
    plain = network(squeezed.architecture, mse_loss, clients(y=REAL.unsqueeze(1)))
    torch.testing.assert_close(squeezed.gradient(squeezed.start), plain.gradient(plain.start))


def test_smoothed_labels_are_fine():
    network(loss=functools.partial(cross_entropy, label_smoothing=0.1))


def test_frozen_parameters_stay_and_are_not_part_of_x():
    torch.manual_seed(0)
    for module in (
        nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)),
        nn.Sequential(linear(), nn.LayerNorm(3)),
    ):
        module[0].requires_grad_(False)
        kept = {name: p.detach().clone() for name, p in module.named_parameters()}
        problem = network(module, batch_size=4)
        assert problem.dim == sum(p.numel() for p in module[-1].parameters())
        x = problem.start + 0.1
        trained = problem.module(x)
        for name, p in trained.named_parameters():
            assert torch.equal(p, kept[name]) == name.startswith("0.")
        loss = sum(cross_entropy(trained(a), b) for a, b in problem.data) / 2
        torch.testing.assert_close(problem.loss(x), loss)
        expected = torch.autograd.grad(loss, list(trained[-1].parameters()))
        torch.testing.assert_close(problem.gradient(x), torch.cat([g.flatten() for g in expected]))
        both = problem.oracle(torch.arange(2), 0)
        one = [problem.oracle(torch.tensor(i), 0)(x, 0) for i in range(2)]
        torch.testing.assert_close(both(x, 0), torch.stack(one))
        assert problem.gradient(x.double()).dtype == torch.float64
        torch.testing.assert_close(problem.gradient(x), problem.gradient(x.double()).float())


def test_regularizers_know_that_frozen_parameters_are_not_part_of_x():
    module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    module[0].requires_grad_(False)
    x = network(module).start
    on_weights = parse("group-lasso:1", module).value(x)
    assert float(on_weights) == pytest.approx(
        float(parse("group-lasso:1", nn.Sequential(module[2])).value(x)), rel=1e-5
    )
    on_biases = restrict(L1(1.0), module, "*.bias").value(x)
    assert float(on_biases) == pytest.approx(module[2].bias.abs().sum().item(), rel=1e-5)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.last = kind(1, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.layer(x.unsqueeze(-1))[0][:, -1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_are_computed_one_client_at_a_time(kind):
    torch.manual_seed(0)
    problem = network(Recurrent(kind), batch_size=None)
    assert problem.chunk == 1
    x = problem.start + 0.1
    trained = problem.module(x)
    expected = [torch.autograd.grad(cross_entropy(trained(a), b), list(trained.parameters())) for a, b in problem.data]
    expected = torch.stack([torch.cat([g.flatten() for g in gradients]) for gradients in expected])
    g = problem.oracle(torch.arange(2), 0)
    torch.testing.assert_close(g(x, 0), expected)
    torch.testing.assert_close(g(torch.stack([x, x]), 0), expected)
    torch.testing.assert_close(problem.gradient(x), expected.mean(0))


def test_a_layer_used_twice_has_the_gradient_of_its_loss_after_the_loss_was_taken():
    torch.manual_seed(0)
    shared = nn.Linear(5, 5)
    tied = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5), nn.Linear(5, 3))
    tied[2].weight = tied[0].weight
    for module in (nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(5, 3)), tied):
        problem = network(module.double(), data=clients(x=X.double()), batch_size=None)
        x = problem.start + 0.1
        before = problem.gradient(x)
        problem.loss(x)
        assert torch.equal(problem.gradient(x), before)
        d = torch.ones_like(x)
        slope = (problem.loss(x + 1e-6 * d) - problem.loss(x - 1e-6 * d)) / 2e-6
        assert float(slope) == pytest.approx(float(before @ d), rel=1e-6)


class Beside(nn.Module):
    """Looks at the other samples of the batch."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(5, 3)

    def forward(self, x):
        return self.last((x - x.mean(0)) / (x.std(0) + 1))


class Turned(Recurrent):
    """Takes the samples for steps."""

    def __init__(self):
        super().__init__(nn.GRU)
        self.layer.batch_first = False


@pytest.mark.parametrize("make", [Beside, Turned])
def test_samples_that_depend_on_each_other_are_refused(make):
    torch.manual_seed(0)
    with pytest.raises(InputError, match="depends on the others of its batch"):
        network(make())


@pytest.mark.parametrize("frozen", [False, True])
def test_group_norm_of_what_needs_no_gradient(frozen):
    """In channels-last torch ends the process there."""
    torch.manual_seed(0)
    first = nn.Conv2d(3, 6, 3, padding=1).requires_grad_(False) if frozen else nn.Identity()
    width = 6 if frozen else 3
    module = nn.Sequential(first, nn.GroupNorm(1, width), nn.Conv2d(width, 4, 3), nn.Flatten(), nn.Linear(144, 3))
    data = [(torch.randn(9, 3, 8, 8).double(), torch.randint(0, 3, (9,))) for _ in range(3)]
    problem = Network(module.double(), cross_entropy, data, batch_size=None)
    trained = problem.module(problem.start)
    leaves = [p for p in trained.parameters() if p.requires_grad]
    for i, (x, y) in enumerate(data):
        alone = torch.cat([g.flatten() for g in torch.autograd.grad(cross_entropy(trained(x), y), leaves)])
        torch.testing.assert_close(problem.oracle(torch.tensor(i), 0)(problem.start, 0), alone)


def test_labels_of_every_point_of_a_picture():
    torch.manual_seed(0)
    data = [(torch.randn(9, 3, 4, 4), torch.randint(0, 4, (9, 4, 4))) for _ in range(2)]
    problem = Network(nn.Conv2d(3, 4, 1), cross_entropy, data, batch_size=4)
    x = data[0][0]
    assert torch.equal(problem.predict(problem.start, x), problem.module(problem.start)(x).argmax(1))


@pytest.mark.parametrize(
    ("loss", "label", "says"),
    [
        (nn.CrossEntropyLoss(ignore_index=-1), -100, "label -100 with 3 outputs; labels must be 0 to 2, or -1"),
        (lambda out, y: cross_entropy(out, y, ignore_index=-7), -7, "go with torch.nn.CrossEntropyLoss"),
        (lambda out, y: cross_entropy(out, y, ignore_index=1), 1, "go with torch.nn.CrossEntropyLoss"),
        (cross_entropy, -7, "label -7 with 3 outputs"),
        (lambda out, y: cross_entropy(out, y, torch.tensor([1.0, 5.0, 1.0]).double()), 1, "go with torch.nn.CrossE"),
    ],
)
@pytest.mark.parametrize("make", [lambda: mlp(5, 3), lambda: nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))])
def test_losses_that_are_no_mean_over_samples_are_refused(loss, label, says, make):
    """The mean over a batch, with labels ignored or weighted, is neither a client's nor the finite sum's."""
    data = [(a.double(), b.clone()) for a, b in clients()]  # LABELS are others' too
    data[0][1][3] = label
    with pytest.raises(InputError, match=says):
        Network(make().double(), loss, data, batch_size=4)
