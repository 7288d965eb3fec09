"""Pictures: MNIST and Fashion-MNIST in the idx format, packed or not; CIFAR-10 in its binary or python version."""

from __future__ import annotations

import math
import pickle
import tarfile
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fednmap.data import cache
from fednmap.data.dataset import Dataset
from fednmap.names import InputError

IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")

# md5 of the four files, packed as published and unpacked; reading checks the latter, so that a copy that
# somebody packed again is as good as the original.
MNIST = (
    ("f68b3c2dcbeaaa9fbdd348bbdeb94873", "6bbc9ace898e44ae57da46a324031adb"),
    ("d53e105ee54ea40749a09fcbcd1e9432", "a25bea736e30d166cdddb491f175f624"),
    ("9fb629c4189551a2d022fa330f9573f3", "2646ac647ad5339dbf082846283269ea"),
    ("ec29112dd5afa0611ce80d1b7f02629c", "27ae3e4e09519cfbb04c329615203637"),
)
FASHION_MNIST = (
    ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
    ("25c81989df183df01b3e8a0aad5dffbe", "9018921c3c673c538a1fc5bad174d6f9"),
    ("bef4ecab320f06d8554ea6380940ec79", "8181f5470baa50b63fa0f6fddb340f0a"),
    ("bb300cfdad3c16e7a12a480ee83cd310", "15d484375f8d13e6eb1aabb0c3f46965"),
)
ADDRESSES = {
    "mnist": ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
    "fashion-mnist": ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
}


def mnist() -> Dataset:
    """Handwritten digits: 60,000 + 10,000 grey pictures of 28 x 28, values in [0, 1], 10 labels.

    Reference: LeCun et al., Gradient-based learning applied to document recognition, Proc. IEEE, 1998.
    """
    return _load("mnist", MNIST)


def fashion_mnist() -> Dataset:
    """Articles of clothing: 60,000 + 10,000 grey pictures of 28 x 28, values in [0, 1], 10 labels.

    Reference: Xiao, Rasul and Vollgraf, Fashion-MNIST: a novel image dataset for benchmarking, 2017.
    """
    return _load("fashion-mnist", FASHION_MNIST)


def parse_idx(path: Path | str, contents: bytes) -> Tensor:
    """Return the bytes in an idx file: 0, 0, type 8, number of axes, each length as 4 bytes, then the values."""
    axes = contents[3] if contents[:3] == b"\0\0\x08" and len(contents) > 3 else 0
    shape = np.frombuffer(contents, ">u4", axes, offset=4).tolist() if len(contents) >= 4 + 4 * axes else []
    start = 4 + 4 * axes
    if not shape or len(contents) - start != math.prod(shape):
        raise InputError(f"{path} is not a whole idx file of bytes; put a fresh copy there")
    return torch.from_numpy(np.frombuffer(contents, np.uint8, offset=start).reshape(shape).copy())


def _load(name: str, md5s: tuple[tuple[str, str], ...]) -> Dataset:
    arrays = []
    for file, (packed, unpacked) in zip(IDX_FILES, md5s, strict=True):
        path = cache.find(name, (f"{file}.gz", file)) or cache.download(name, f"{file}.gz", packed, ADDRESSES[name])
        arrays.append(parse_idx(path, cache.read(path, unpacked)))
    (x_train, x_test), (y_train, y_test) = ([v[:, None].float().div_(255) for v in arrays[::2]], arrays[1::2])
    return Dataset(x_train, y_train.long(), x_test, y_test.long())


# md5 of the six files, binary version and python version, as published.
CIFAR_FILES = {
    "data_batch_1": ("5dd7e06a14cb22eb9f671a540d1b7c25", "c99cafc152244af753f735de768cd75f"),
    "data_batch_2": ("5ea93a67294ea407fff1d09f752e9692", "d4bba439e000b95fd0a9bffe97cbabec"),
    "data_batch_3": ("942cd6a4bcdd0dd3c604fbe906cb4421", "54ebc095f3ab1f0389bbae665268c751"),
    "data_batch_4": ("ae636b3ba5c66a11e91e8cb52e771fcb", "634d18415352ddfa80567beed471001a"),
    "data_batch_5": ("53f37980c15c3d472c316c40844f3f0d", "482c414d41f54cd18b22e5b47cb7c3cb"),
    "test_batch": ("803d5f7f4d78ea53de84dbe85f74fb6d", "40351d587109b95175f43aff81a1287e"),
}
BINARY, PYTHON = "cifar-10-binary.tar.gz", "cifar-10-python.tar.gz"
CIFAR_MD5 = {BINARY: "c32a1d4ab5d03f1284b67883e8d87530", PYTHON: "c58f30108f718f92721af3b95e74349a"}
CIFAR_ADDRESSES = ("https://www.cs.toronto.edu/~kriz/",)


def cifar10(first: int = 50_000, /) -> Dataset:
    """Photographs: 50,000 + 10,000 colour pictures of 32 x 32, values in [0, 1], 10 labels; cifar10:N for fewer.

    first: how many of the training pictures; of the test pictures a fifth as many.

    Reference: Krizhevsky, Learning multiple layers of features from tiny images, 2009.
    """
    if not 5 <= first <= 50_000:
        raise InputError(f"cifar10 has 50,000 training pictures, asked for {first}; take 5 to 50000")
    found = next(filter(None, map(_in_folder, cache.folders("cifar10"))), None)
    found = found or _unpack(cache.download("cifar10", BINARY, CIFAR_MD5[BINARY], CIFAR_ADDRESSES))
    for (path, contents), md5s in zip(found, CIFAR_FILES.values(), strict=True):
        cache.check(path, contents, md5s[not path.endswith(".bin")])
    *train, (x_test, y_test) = (_parse_cifar(path, contents) for path, contents in found)
    x_train, y_train = (torch.cat(parts)[:first] for parts in zip(*train, strict=True))
    rest = first // 5
    return Dataset(x_train.float().div_(255), y_train, x_test[:rest].float().div_(255), y_test[:rest])


def _in_folder(folder: Path) -> list[tuple[str, bytes]]:
    """(path, contents) of the six files in one folder: bare, in the subfolder of the archive, or in an archive."""
    for subfolder, suffix in (("cifar-10-batches-bin", ".bin"), ("cifar-10-batches-py", "")):
        for place in (folder, folder / subfolder):
            paths = [place / (name + suffix) for name in CIFAR_FILES]
            here = [path.is_file() for path in paths]
            if any(here) and not all(here):
                raise InputError(f"{paths[here.index(False)]} is missing, and the other files are there; put it there")
            if any(here):
                return [(str(path), path.read_bytes()) for path in paths]
    return next((_unpack(folder / archive) for archive in CIFAR_MD5 if (folder / archive).is_file()), [])


def _unpack(archive: Path) -> list[tuple[str, bytes]]:
    cache.check(archive, archive.read_bytes(), CIFAR_MD5[archive.name])
    with tarfile.open(archive) as tar:
        members = {Path(member.name).stem: member for member in tar.getmembers() if member.isfile()}
        files = [(members[name].name, tar.extractfile(members[name])) for name in CIFAR_FILES]
        return [(f"{archive}/{name}", file.read() if file else b"") for name, file in files]


def _parse_cifar(path: str, contents: bytes) -> tuple[Tensor, Tensor]:
    """Pictures and labels of one file whose checksum was compared before: a pickle is code."""
    if path.endswith(".bin"):
        records = np.frombuffer(contents, np.uint8).reshape(-1, 1 + 3072)
        labels, pixels = records[:, 0], records[:, 1:]
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the files were pickled by an old numpy; newer ones frown at its dtypes
            table = pickle.loads(contents, encoding="bytes")
        labels, pixels = np.array(table[b"labels"]), table[b"data"]
    return torch.from_numpy(pixels.copy()).reshape(-1, 3, 32, 32), torch.from_numpy(labels.astype(np.int64))
