"""CIFAR-10: the binary and the python version, unpacked or as the published archives."""

from __future__ import annotations

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

# md5 of the six files, binary version and python version, as published.
FILES = {
    "data_batch_1": ("5dd7e06a14cb22eb9f671a540d1b7c25", "c99cafc152244af753f735de768cd75f"),
    "data_batch_2": ("5ea93a67294ea407fff1d09f752e9692", "d4bba439e000b95fd0a9bffe97cbabec"),
    "data_batch_3": ("942cd6a4bcdd0dd3c604fbe906cb4421", "54ebc095f3ab1f0389bbae665268c751"),
    "data_batch_4": ("ae636b3ba5c66a11e91e8cb52e771fcb", "634d18415352ddfa80567beed471001a"),
    "data_batch_5": ("53f37980c15c3d472c316c40844f3f0d", "482c414d41f54cd18b22e5b47cb7c3cb"),
    "test_batch": ("803d5f7f4d78ea53de84dbe85f74fb6d", "40351d587109b95175f43aff81a1287e"),
}
BINARY, PYTHON = "cifar-10-binary.tar.gz", "cifar-10-python.tar.gz"
MD5 = {BINARY: "c32a1d4ab5d03f1284b67883e8d87530", PYTHON: "c58f30108f718f92721af3b95e74349a"}
ADDRESSES = ("https://www.cs.toronto.edu/~kriz/",)


def cifar10(first: int = 50_000) -> Dataset:
    """Photographs: 50,000 + 10,000 colour pictures of 32 x 32, values in [0, 1], 10 labels; cifar10:N for fewer.

    first: how many of the training pictures; of the test pictures a fifth as many.

    Reference: Krizhevsky, Learning multiple layers of features from tiny images, 2009.
    """
    if not 5 <= first <= 50_000:
        raise InputError(f"cifar10 has 50,000 training pictures, asked for {first}; take 5 to 50000")
    found = next(filter(None, map(_in_folder, cache.folders("cifar10"))), None)
    found = found or _unpack(cache.download("cifar10", BINARY, MD5[BINARY], ADDRESSES))
    for (path, contents), md5s in zip(found, FILES.values(), strict=True):
        cache.check(path, contents, md5s[not path.endswith(".bin")])
    *train, (x_test, y_test) = (_parse(path, contents) for path, contents in found)
    x_train, y_train = (torch.cat(parts)[:first] for parts in zip(*train, strict=True))
    rest = first // 5
    return Dataset(x_train.float().div_(255), y_train, x_test[:rest].float().div_(255), y_test[:rest])


def _in_folder(folder: Path) -> list[tuple[str, bytes]]:
    """(path, contents) of the six files in one folder: bare, in the subfolder of the archive, or in an archive."""
    for subfolder, suffix in (("cifar-10-batches-bin", ".bin"), ("cifar-10-batches-py", "")):
        for place in (folder, folder / subfolder):
            paths = [place / (name + suffix) for name in FILES]
            here = [path.is_file() for path in paths]
            if any(here) and not all(here):
                raise InputError(f"{paths[here.index(False)]} is missing beside the others; put it there")
            if any(here):
                return [(str(path), path.read_bytes()) for path in paths]
    return next((_unpack(folder / archive) for archive in MD5 if (folder / archive).is_file()), [])


def _unpack(archive: Path) -> list[tuple[str, bytes]]:
    cache.check(archive, archive.read_bytes(), MD5[archive.name])
    with tarfile.open(archive) as tar:
        members = {Path(member.name).stem: member for member in tar.getmembers() if member.isfile()}
        files = [(members[name].name, tar.extractfile(members[name])) for name in FILES]
        return [(f"{archive}/{name}", file.read() if file else b"") for name, file in files]


def _parse(path: str, contents: bytes) -> tuple[Tensor, Tensor]:
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
