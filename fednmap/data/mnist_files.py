"""MNIST and Fashion-MNIST: the idx format, packed or not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fednmap.data import cache
from fednmap.data.dataset import Dataset
from fednmap.names import InputError

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)

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
    "mnist": (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
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


def parse(path: Path | str, contents: bytes) -> Tensor:
    """The bytes in an idx file: 0, 0, type 8, number of axes, each length as 4 bytes, then the values."""
    axes = contents[3] if contents[:3] == b"\0\0\x08" and len(contents) > 3 else 0
    shape = np.frombuffer(contents, ">u4", axes, offset=4).tolist() if len(contents) >= 4 + 4 * axes else []
    start = 4 + 4 * axes
    if not shape or len(contents) - start != int(np.prod(shape)):
        raise InputError(f"{path} is not a whole idx file of bytes; put a fresh copy there")
    return torch.from_numpy(np.frombuffer(contents, np.uint8, offset=start).reshape(shape).copy())


def _load(name: str, md5s: tuple[tuple[str, str], ...]) -> Dataset:
    arrays = []
    for file, (packed, unpacked) in zip(FILES, md5s, strict=True):
        path = cache.find(name, (f"{file}.gz", file)) or cache.download(name, f"{file}.gz", packed, ADDRESSES[name])
        arrays.append(parse(path, cache.read(path, unpacked)))
    (x_train, x_test), (y_train, y_test) = ([v[:, None].float().div_(255) for v in arrays[::2]], arrays[1::2])
    return Dataset(x_train, y_train.long(), x_test, y_test.long())
