"""Small problems with minibatches in float64, of every kind, whose clients hold unequal numbers of samples."""

import torch
from torch.nn.functional import cross_entropy

from fednmap.models import mlp
from fednmap.problems import LeastSquares, Logistic, Network

SIZES = (7, 12, 5, 9)


def _samples(target):
    rng = torch.Generator().manual_seed(1)
    data = []
    for i, m in enumerate(SIZES):
        a = torch.randn(m, 6, generator=rng, dtype=torch.float64) + 0.3 * i
        data.append((a, target(a, i, rng)))
    return data


def _real(a, i, rng):
    return a @ torch.randn(6, generator=rng, dtype=torch.float64)


def _labels(classes):
    return lambda a, i, rng: (torch.randint(0, classes, (len(a),), generator=rng) + i) % classes


def least_squares(batch_size=3, **options):
    return LeastSquares(_samples(_real), batch_size=batch_size, **options)


def binary(batch_size=3, **options):
    return Logistic(_samples(_labels(2)), batch_size=batch_size, **options)


def multinomial(batch_size=3, **options):
    return Logistic(_samples(_labels(3)), batch_size=batch_size, **options)


def network(batch_size=3, **options):
    torch.manual_seed(0)
    return Network(
        mlp(6, 3, hidden=(4,)).double(), cross_entropy, _samples(_labels(3)), batch_size=batch_size, **options
    )


KINDS = {"least_squares": least_squares, "binary": binary, "multinomial": multinomial, "network": network}
