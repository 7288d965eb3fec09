"""Public data sets: published counts and balances, and no damaged file gets through."""

import gzip
import hashlib
import pickle

import numpy as np
import pytest
import torch
from public_data import needs, needs_cifar10

from fednmap.data import heart_disease, load, partition, pictures

MNIST_COUNTS = {
    "train": [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
    "test": [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
}


def balanced(y, each):
    return y.bincount().tolist() == [each] * 10


def test_mnist_has_the_published_counts_and_balance():
    needs("mnist", "train-images-idx3-ubyte.gz")
    data = load("mnist")
    assert data.x_train.shape == (60_000, 1, 28, 28)
    assert data.x_test.shape == (10_000, 1, 28, 28)
    assert data.y_train.bincount().tolist() == MNIST_COUNTS["train"]
    assert data.y_test.bincount().tolist() == MNIST_COUNTS["test"]
    assert data.y_train[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert (float(data.x_train.min()), float(data.x_train.max())) == (0, 1)
    assert float(data.x_train.double().mean()) == pytest.approx(0.1307, abs=5e-5)
    assert float(data.x_train.double().std()) == pytest.approx(0.3081, abs=5e-5)


@pytest.mark.parametrize("clients", [20, 50, 100])
def test_sorted_mnist_uses_every_training_image_once(clients):
    needs("mnist", "train-images-idx3-ubyte.gz")
    y = load("mnist").y_train
    parts = partition("sorted", y, clients)
    assert len(parts) == clients
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(60_000))
    assert {len(part) for part in parts} == {60_000 // clients}


def test_fashion_mnist_has_the_published_counts_and_balance():
    needs("fashion-mnist", "train-images-idx3-ubyte.gz")
    data = load("fashion-mnist")
    assert data.x_train.shape == (60_000, 1, 28, 28)
    assert balanced(data.y_train, 6000)
    assert balanced(data.y_test, 1000)
    assert float(data.x_train.double().mean()) == pytest.approx(0.2860, abs=5e-5)


def test_cifar10_has_the_published_counts_and_balance():
    needs_cifar10()
    data = load("cifar10")
    assert data.x_train.shape == (50_000, 3, 32, 32)
    assert balanced(data.y_train, 5000)
    assert balanced(data.y_test, 1000)
    means = data.x_train.mean((0, 2, 3), dtype=torch.float64).tolist()
    assert means == pytest.approx([0.4914, 0.4822, 0.4465], abs=5e-5)


def test_four_hospitals_keep_the_rows_that_flamby_keeps():
    needs("heart_disease", "processed.va.data")
    data = load("heart-disease")
    rows = data.clients.bincount() + data.test_clients.bincount()
    assert rows.tolist() == [303, 261, 46, 130]
    assert data.x_train.shape[1] == 13
    assert set(data.y_train.tolist()) == {0, 1}
    ill = torch.cat([data.clients[data.y_train == 1], data.test_clients[data.y_test == 1]])
    assert ill.bincount().tolist() == [139, 98, 45, 101]  # as cut, grep and awk count them in the files
    assert data.x_train.mean(0).abs().max() < 1e-5
    parts = partition("natural", data.y_train, 4, ids=data.clients)
    assert [len(part) for part in parts] == data.clients.bincount().tolist()


def damage(how, contents):
    """A copy that is cut short, has one byte changed, or is something else."""
    middle = len(contents) // 2
    if how == "truncated":
        return contents[:middle]
    if how == "changed":
        return contents[:middle] + bytes([contents[middle] ^ 1]) + contents[middle + 1 :]
    return b"<html>Not found</html>"


def damaged_copy(folder, original, how, monkeypatch):
    """FEDNMAP_DATA with `original` damaged, its neighbours whole, and an empty cache."""
    copy = folder / "data" / original.parent.name
    copy.mkdir(parents=True)
    for file in original.parent.iterdir():
        if file.name != original.name:
            (copy / file.name).symlink_to(file)
    (copy / original.name).write_bytes(damage(how, original.read_bytes()))
    monkeypatch.setenv("FEDNMAP_DATA", str(folder / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    return copy / original.name


def refused(name, path):
    with pytest.raises(ValueError, match="fresh copy") as error:
        load(name)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "how"), [("mnist", "truncated"), ("mnist", "changed"), ("mnist", "other"), ("fashion-mnist", "changed")]
)
@pytest.mark.parametrize("file", pictures.IDX_FILES)
def test_damaged_idx_file_is_refused_by_name(name, file, how, tmp_path, monkeypatch):
    original = needs(name, f"{file}.gz")
    refused(name, damaged_copy(tmp_path, original, how, monkeypatch))


@pytest.mark.parametrize("how", ["truncated", "changed", "other"])
@pytest.mark.parametrize("hospital", heart_disease.HOSPITALS)
def test_damaged_hospital_file_is_refused_by_name(hospital, how, tmp_path, monkeypatch):
    original = needs("heart_disease", f"processed.{hospital}.data")
    refused("heart-disease", damaged_copy(tmp_path, original, how, monkeypatch))


@pytest.mark.parametrize(
    ("file", "how"), [*((file, "changed") for file in pictures.CIFAR_FILES), ("data_batch_1", "truncated")]
)
def test_damaged_cifar_file_is_refused_by_name(file, how, tmp_path, monkeypatch):
    original = needs("cifar10", f"{file}.bin")
    refused("cifar10", damaged_copy(tmp_path, original, how, monkeypatch))


def test_idx_packed_again_or_unpacked_is_as_good(tmp_path, monkeypatch):
    original = needs("mnist", f"{pictures.IDX_FILES[0]}.gz")
    (tmp_path / "mnist").mkdir()
    for k, file in enumerate(pictures.IDX_FILES):
        contents = gzip.decompress((original.parent / f"{file}.gz").read_bytes())
        if k % 2:
            (tmp_path / "mnist" / file).write_bytes(contents)
        else:
            (tmp_path / "mnist" / f"{file}.gz").write_bytes(gzip.compress(contents, 1))
    monkeypatch.setenv("FEDNMAP_DATA", str(tmp_path))
    assert load("mnist").y_test.bincount().tolist() == MNIST_COUNTS["test"]


@pytest.mark.parametrize(
    "contents", [b"", b"\0\0\x08", b"\0\0\x08\x01\0\0\0\x05abc", b"\0\0\x0d\x01\0\0\0\x01a", b"abcdefgh"]
)
def test_idx_that_does_not_hold_what_it_declares_is_refused(contents):
    with pytest.raises(ValueError, match="labels-idx1"):
        pictures.parse_idx("labels-idx1", contents)


class OldPickler(pickle._Pickler):
    """Writes numpy's dtypes as the numpy of the CIFAR-10 authors did: with 0 and 1 for False and True."""

    def save_reduce(self, func, args, *rest, **options):
        if func is np.dtype:
            args = (args[0], 0, 1)
        super().save_reduce(func, args, *rest, **options)


def cifar_batches(folder, form):
    """Six small files in one of CIFAR-10's two forms; returns their labels, pixels and md5s."""
    rng = np.random.default_rng(0)
    labels, pixels = rng.integers(0, 10, (6, 4)), rng.integers(0, 256, (6, 4, 3072), dtype=np.uint8)
    md5s = {}
    for name, y, x in zip(pictures.CIFAR_FILES, labels, pixels, strict=True):
        path = folder / (name + ".bin" if form == "binary" else name)
        if form == "binary":
            path.write_bytes(np.concatenate([y[:, None].astype(np.uint8), x], 1).tobytes())
        else:
            with path.open("wb") as file:
                OldPickler(file, protocol=2).dump({b"labels": y.tolist(), b"data": x})
        md5s[name] = (hashlib.md5(path.read_bytes()).hexdigest(),) * 2
    return labels, pixels, md5s


@pytest.mark.parametrize("form", ["binary", "python"])
@pytest.mark.parametrize("place", [".", "subfolder", "archive"])
def test_both_forms_of_cifar10_are_read(form, place, tmp_path, monkeypatch):
    import tarfile

    folder = tmp_path / "cifar10"
    inner = folder / {"binary": "cifar-10-batches-bin", "python": "cifar-10-batches-py"}[form]
    home = folder if place == "." else inner
    home.mkdir(parents=True)
    labels, pixels, md5s = cifar_batches(home, form)
    if place == "archive":
        archive = folder / {"binary": pictures.BINARY, "python": pictures.PYTHON}[form]
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(home, home.name)
        for file in home.iterdir():
            file.unlink()
        monkeypatch.setitem(pictures.CIFAR_MD5, archive.name, hashlib.md5(archive.read_bytes()).hexdigest())
    monkeypatch.setattr(pictures, "CIFAR_FILES", md5s)
    monkeypatch.setenv("FEDNMAP_DATA", str(tmp_path))
    data = load("cifar10")
    assert data.y_train.tolist() == labels[:5].ravel().tolist()
    assert data.y_test.tolist() == labels[5].tolist()
    assert (data.x_train.flatten(1) * 255).round().to(torch.uint8).tolist() == pixels[:5].reshape(-1, 3072).tolist()


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('a pickle was loaded')",)


def test_no_pickle_is_loaded_without_its_checksum(tmp_path, monkeypatch):
    (tmp_path / "cifar10").mkdir()
    for name in pictures.CIFAR_FILES:
        (tmp_path / "cifar10" / name).write_bytes(pickle.dumps(Bomb()))
    monkeypatch.setenv("FEDNMAP_DATA", str(tmp_path))
    refused("cifar10", tmp_path / "cifar10" / "data_batch_1")


def test_missing_cifar_batch_is_named(tmp_path, monkeypatch):
    (tmp_path / "cifar10").mkdir()
    cifar_batches(tmp_path / "cifar10", "binary")
    (tmp_path / "cifar10" / "data_batch_3.bin").unlink()
    monkeypatch.setenv("FEDNMAP_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=r"data_batch_3\.bin is missing"):
        load("cifar10")
