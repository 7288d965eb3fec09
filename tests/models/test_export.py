"""Files of trained networks: other programs read the same network, and pruning changes its size alone."""

import gzip
import os
import resource
import stat

import pytest
import torch
from torch import nn

from fednmap.models import cnn, linear, mlp, mobilenet_v3_small
from fednmap.models.export import sparsity, write
from fednmap.models.prune import prunable, prune
from fednmap.names import InputError


def perceptron(activation="sigmoid"):
    torch.manual_seed(0)
    return mlp(20, 3, hidden=(12, 9), activation=activation)


def convolutional():
    torch.manual_seed(0)
    return cnn((1, 12, 12), 3)


def inputs(module):
    torch.manual_seed(1)
    return torch.randn(7, 1, 12, 12) if isinstance(module[0], nn.Conv2d) else torch.randn(7, 20)


@torch.no_grad()
def empty(layer, units):
    """Zero incoming weights for `units`; their biases, and so their constants, stay."""
    layer.weight[units] = 0


def layers(module):
    return [part for part in module if isinstance(part, nn.Linear | nn.Conv2d)]


def same(a, b, x):
    with torch.no_grad():
        torch.testing.assert_close(a(x), b(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("activation", ["sigmoid", "relu", "tanh"])
def test_pruned_mlp_is_smaller_and_computes_the_same(activation):
    module = perceptron(activation)
    empty(layers(module)[0], [0, 3, 11])
    empty(layers(module)[1], [2])
    small = prune(module)
    assert [tuple(layer.weight.shape) for layer in layers(small)] == [(9, 20), (8, 9), (3, 8)]
    same(module, small, inputs(module))
    assert len(layers(module)[0].weight) == 12  # the original is left alone


def test_pruned_cnn_is_smaller_and_computes_the_same():
    module = convolutional()
    first, second, third, _ = layers(module)
    empty(first, [0, 5, 6])
    empty(second, [1, 30, 31])
    empty(third, list(range(60)))
    for layer in (first, second, third):
        nn.init.uniform_(layer.bias, 0.5, 1)  # constants that a ReLU lets through
    small = prune(module)
    assert [tuple(layer.weight.shape) for layer in layers(small)] == [
        (13, 1, 3, 3),
        (29, 13, 3, 3),
        (4, 29 * 2 * 2),
        (3, 4),
    ]
    same(module, small, inputs(module))


def test_units_that_nothing_reads_go_and_so_do_those_that_only_they_read():
    module = perceptron()
    _, second, third = layers(module)
    with torch.no_grad():
        third.weight[:, 4] = 0
        second.weight[[i for i in range(9) if i != 4], 7] = 0  # unit 7 of the first layer feeds unit 4 alone
    small = prune(module)
    assert [len(layer.weight) for layer in layers(small)] == [11, 8, 3]
    same(module, small, inputs(module))


def test_constants_stay_where_the_next_convolution_pads_with_zeros():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 2, 3))
    empty(module[0], [0, 1])
    with torch.no_grad():
        module[0].bias[0], module[0].bias[1] = 1.0, -1.0  # through the ReLU: 1, and 0, which padding equals
    small = prune(module)
    assert len(small[0].weight) == 3
    same(module, small, inputs(module))


def test_network_of_zeros_keeps_one_unit_a_layer():
    module = perceptron()
    for p in module.parameters():
        nn.init.zeros_(p)
    small = prune(module)
    assert [len(layer.weight) for layer in layers(small)] == [1, 1, 3]
    same(module, small, inputs(module))


def test_layers_without_bias_are_pruned_too():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(20, 5, bias=False), nn.Sigmoid(), nn.Linear(5, 2, bias=False))
    empty(module[0], [2])
    small = prune(module)
    assert small[2].bias is not None  # sigmoid(0) = 1/2 had to go somewhere
    same(module, small, inputs(module))


def test_what_has_norm_layers_or_branches_is_not_pruned():
    assert prunable(linear(3, 2))
    assert not prunable(mobilenet_v3_small())
    assert not prunable(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2)))
    with pytest.raises(ValueError, match="MobileNetV3Small is not a row of layers"):
        prune(mobilenet_v3_small())


def test_sparsity_counts_zeros_and_whole_rows_and_filters():
    module = convolutional()
    assert sparsity(module)[1:] == (0, 0)
    empty(module[0], [0, 1, 2, 3])
    count, zeros, rows = sparsity(module)
    assert zeros == pytest.approx(4 * 9 / count)
    assert rows == pytest.approx(4 / (16 + 32 + 64 + 3))


@pytest.mark.parametrize("make", [perceptron, convolutional])
def test_safetensors_and_torch_files_hold_the_same_network(make, tmp_path):
    from safetensors.torch import load_file

    module = make()
    for format, read in (("safetensors", load_file), ("torch", torch.load)):
        report = write(module, tmp_path / format, format)
        again = make()
        for p in again.parameters():
            nn.init.zeros_(p)
        again.load_state_dict(read(tmp_path / format))
        assert torch.equal(again(inputs(module)), module(inputs(module)))
        assert report.bytes == (tmp_path / format).stat().st_size
        assert report.parameters == sum(p.numel() for p in module.parameters())


def test_zeros_compress_and_the_compressed_file_is_the_file(tmp_path):
    module = mlp(784, 10)
    dense = write(module, tmp_path / "dense.safetensors")
    with torch.no_grad():
        module[1].weight[torch.rand_like(module[1].weight) < 0.9] = 0
    sparse = write(module, tmp_path / "sparse.safetensors", compress=True)
    assert sparse.bytes == dense.bytes
    assert sparse.compressed < 0.3 * dense.compressed
    packed = tmp_path / "sparse.safetensors.gz"
    assert packed.stat().st_size == sparse.compressed
    assert gzip.decompress(packed.read_bytes()) == (tmp_path / "sparse.safetensors").read_bytes()
    assert sparse.zeros == pytest.approx(0.9 * 784 * 64 / sparse.parameters, abs=0.01)
    assert f"{sparse.zeros:.1%} zero" in str(sparse)


@pytest.mark.slow
@pytest.mark.parametrize("make", [perceptron, convolutional, lambda: prune(convolutional())])
def test_onnxruntime_computes_what_torch_computes(make, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    module = make()
    report = write(module, tmp_path / "model.onnx", "onnx", example=inputs(module))
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for count in (1, 5):  # any number of samples
        x = inputs(module)[:count]
        (found,) = session.run(None, {"inputs": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), module(x).detach(), rtol=1e-4, atol=1e-5)
    assert report.bytes > 4 * report.parameters  # the weights are in the file


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_onnxruntime_computes_the_same_mobilenet(norm, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    module = mobilenet_v3_small(norm=norm)
    module(torch.randn(16, 3, 32, 32))  # running statistics other than 0 and 1
    module.eval()
    x = torch.randn(5, 3, 32, 32)
    write(module, tmp_path / "model.onnx", "onnx", example=x)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"inputs": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), module(x).detach(), rtol=1e-4, atol=1e-5)


def test_writing_leaves_the_module_in_its_mode(tmp_path):
    module = perceptron()
    write(module, tmp_path / "a")
    assert module.training


def test_what_cannot_be_written_is_explained(tmp_path):
    with pytest.raises(ValueError, match="did you mean 'onnx'"):
        write(perceptron(), tmp_path / "a", "onx")
    with pytest.raises(ValueError, match="example of the inputs"):
        write(perceptron(), tmp_path / "a", "onnx")


def command(*arguments):
    from click.testing import CliRunner

    from fednmap.cli import app

    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def training(out, *options):
    command("train", "--rounds", 4, "--clients", 3, "--eval-every", 4, "--out", out, "--quiet", *options)
    return out


def test_a_run_is_exported_and_pruned(tmp_path):
    import json

    from safetensors.torch import load_file

    run = training(tmp_path / "run", "--model", "mlp:16:relu", "--penalty", "group-lasso:0.09", "--eta-a", "0.2")
    report = json.loads(command("export", run, "--json"))
    saved = load_file(run / "fednmap-0.safetensors")
    original = load_file(run / "models" / "fednmap-0.safetensors")
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[name], original[name]) for name in saved)
    assert report["parameters"] == 64 * 16 + 16 + 170
    assert report["zeros"] > 0
    small = json.loads(command("export", run, "--prune", "--out", tmp_path / "small.safetensors", "--json"))
    assert small["parameters"] < small["parameters_before"] == report["parameters"]
    assert "pruned: 1,210 parameters before" in command("export", run, "--prune", "--format", "torch")
    assert (run / "fednmap-0-pruned.pt").exists()
    assert not (run / "fednmap-0.pt").exists()


def test_a_pruned_file_stands_beside_the_whole_one(tmp_path):
    run = training(tmp_path / "run", "--model", "mlp:16:relu", "--penalty", "group-lasso:0.09", "--eta-a", "0.2")
    command("export", run)
    whole = (run / "fednmap-0.safetensors").read_bytes()
    assert "fednmap-0-pruned.safetensors" in command("export", run, "--prune")
    assert (run / "fednmap-0.safetensors").read_bytes() == whole


def test_files_have_the_modes_that_the_system_gives(tmp_path):
    before = os.umask(0o022)
    try:
        for format in ("safetensors", "torch"):
            write(perceptron(), tmp_path / format, format, compress=True)
            for path in (tmp_path / format, tmp_path / f"{format}.gz"):
                assert stat.S_IMODE(path.stat().st_mode) == 0o644
    finally:
        os.umask(before)


@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_a_full_disk_leaves_the_file_that_was_there(tmp_path, format):
    write(perceptron(), tmp_path / "model", format)
    before = (tmp_path / "model").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            write(perceptron("relu"), tmp_path / "model", format)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model").read_bytes() == before


@pytest.mark.parametrize("harm", ["flip", "cut", "empty"])
def test_a_damaged_model_is_not_exported(tmp_path, harm):
    run = training(tmp_path / "run", "--model", "linear")
    path = run / "models" / "fednmap-0.safetensors"
    data = path.read_bytes()
    flipped = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
    path.write_bytes({"flip": flipped, "cut": data[:-7], "empty": b""}[harm])
    with pytest.raises(InputError, match=r"fednmap-0.safetensors was changed or cut short: it is not the file that"):
        command("export", run)
    assert not (run / "fednmap-0.safetensors").exists()


@pytest.mark.parametrize(("model", "outputs"), [("logistic", 10), ("linear", 10)])
def test_linear_models_of_a_run_predict_as_the_run_did(model, outputs, tmp_path):
    from fednmap.commands.export_model import trained
    from fednmap.runs.experiment import prepare
    from fednmap.runs.folder import Job, RunFolder

    run = training(tmp_path / "run", "--model", model)
    folder, job = RunFolder.open(run), Job("fednmap", 0)
    module, example = trained(folder, job, folder.model(job), trust=False)
    assert module(example).shape == (2, outputs)
    folder = RunFolder.open(run)
    data = prepare(folder.config()).dataset
    accuracy = float((module(data.x_test).argmax(1) == data.y_test).double().mean())
    assert accuracy == pytest.approx(folder.results()[0]["test_accuracy"])


def test_regression_of_a_run_reports_its_support_and_exports_a_row(tmp_path):
    from fednmap.commands.export_model import trained
    from fednmap.runs.folder import Job, RunFolder

    run = training(
        tmp_path / "run", "--data", "sparse-regression", "--clients", 10, "--penalty", "l1:0.2", "--eta-a", "0.005"
    )
    result = RunFolder.open(run).results()[0]
    assert 0 <= result["support_precision"] <= 1
    assert 0 <= result["support_recall"] <= 1
    folder, job = RunFolder.open(run), Job("fednmap", 0)
    module, example = trained(folder, job, folder.model(job), trust=False)
    assert module(example).shape == (2,)


def test_a_network_of_standardised_columns_without_names_tells_how_they_were_scaled(tmp_path):
    import json

    from fednmap.data import load

    run = training(
        tmp_path / "run", "--data", "sparse-regression", "--clients", 10, "--model", "mlp:4", "--standardize"
    )
    about = json.loads(command("export", run, "--json"))
    x = load("sparse-regression").x_train.double()
    assert about["shift"] == pytest.approx(x.mean(0).tolist())
    assert about["scale"] == pytest.approx(x.std(0, correction=0).tolist())
    assert "features" not in about


def test_export_of_what_is_not_there_is_explained(tmp_path):
    with pytest.raises(ValueError, match="not a run folder"):
        command("export", tmp_path)
    run = training(tmp_path / "run", "--model", "linear")
    with pytest.raises(ValueError, match="has no finished model zhang-0; it has fednmap-0"):
        command("export", run, "--method", "zhang")
    with pytest.raises(ValueError, match="choose from onnx, safetensors, torch"):
        command("export", run, "--format", "zip")


def test_a_model_without_unused_units_is_packed_and_not_called_pruned(tmp_path):
    """l1 makes single weights zero; what they are worth is in the packed file."""
    run = training(tmp_path / "run", "--model", "mlp:16:relu", "--penalty", "l1:0.003", "--eta-a", "0.2")
    said = command("export", run, "--prune")
    whole, packed = run / "fednmap-0.safetensors", run / "fednmap-0.safetensors.gz"
    assert f"not pruned: no hidden unit is unused, and the zeros are single weights; {packed} is packed" in said
    assert gzip.decompress(packed.read_bytes()) == whole.read_bytes()
    assert packed.stat().st_size < whole.stat().st_size
    assert not list(run.glob("*pruned*"))


def test_a_linear_model_is_exported_with_the_scaling_of_its_run(tmp_path):
    """The weights are those of the columns as they were given to the run, whatever has become of the file since."""
    from safetensors.torch import load_file

    from fednmap.runs.folder import Job, RunFolder

    folder = tmp_path / "sites"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    tables = [torch.randn(40, 2, generator=generator) * torch.tensor([1.0, 5.0]) + 3 for _ in range(3)]

    def store(factor):
        for k, table in enumerate(tables):
            rows = [f"{a * factor:.6f},{b:.6f},{int(a + b > 6)}" for a, b in table.tolist()]
            (folder / f"site{k}.csv").write_text("\n".join(["a,b,y", *rows]) + "\n")

    store(1)
    run = training(tmp_path / "run", "--data", f"csv:{folder}", "--model", "logistic", "--batch-size", 8)
    command("export", run)
    before = load_file(run / "fednmap-0.safetensors")
    saved = RunFolder.open(run).model(Job("fednmap", 0))
    scale = torch.tensor(saved.scaling[1])
    assert torch.allclose(before["1.weight"][0] * scale, saved.parameters["x"][:2], rtol=1e-5)
    store(10)
    command("export", run)
    after = load_file(run / "fednmap-0.safetensors")
    assert all(torch.equal(after[name], before[name]) for name in before)
