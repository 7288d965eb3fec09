"""Every regularizer passes `check_regularizer`, with parameters, steps and vectors drawn by hypothesis."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fednmap import regularizers as R
from fednmap.core import Regularizer
from fednmap.testing import check_regularizer

DIM = 6
WEIGHT = st.floats(0.01, 5.0)
SEED = st.integers(0, 2**31)

Draw = Callable[[Any], Any]


def vector(draw: Draw, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(draw(SEED)), dtype=torch.float64)


def weights(draw: Draw, n: int = DIM) -> Tensor:
    return vector(draw, n).abs()


def groups(draw: Draw) -> Tensor:
    """Group numbers, some of them -1; every number below the largest occurs or has an empty group."""
    return torch.tensor(draw(st.lists(st.integers(-1, 3), min_size=DIM, max_size=DIM)))


def mask(draw: Draw) -> Tensor:
    return torch.tensor(draw(st.lists(st.booleans(), min_size=DIM, max_size=DIM).filter(any)))


def affine(draw: Draw) -> R.Affine:
    A = vector(draw, draw(st.integers(1, 3)), DIM)
    return R.Affine(A, A @ vector(draw, DIM))


def network(draw: Draw) -> R.PerLayer:
    """Two weights and two biases of one layer each: 6 numbers in all."""
    module = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1, bias=False))
    return R.PerLayer({"0.weight": R.rows(draw(WEIGHT)), "1.*": R.MCP(draw(WEIGHT), draw(WEIGHT))}, module)


def nonconvex(make: Callable[[], Regularizer]) -> Regularizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


MAKE: dict[str, Callable[[Draw], Regularizer]] = {
    "Zero": lambda draw: R.Zero(),
    "L1": lambda draw: R.L1(draw(WEIGHT)),
    "L1, a weight each": lambda draw: R.L1(weights(draw)),
    "SquaredL2": lambda draw: R.SquaredL2(draw(WEIGHT)),
    "ElasticNet": lambda draw: R.ElasticNet(draw(WEIGHT), draw(WEIGHT)),
    "L2": lambda draw: R.L2(draw(WEIGHT)),
    "LInf": lambda draw: R.LInf(draw(WEIGHT)),
    "GroupLasso": lambda draw: R.GroupLasso(draw(WEIGHT), draw(st.sampled_from([1, 2, 3, 6]))),
    "GroupLasso, any groups": lambda draw: R.GroupLasso(draw(WEIGHT), groups(draw)),
    "GroupLasso, a weight each": lambda draw: R.GroupLasso(weights(draw, 3), [[0, 5], [1], [2, 3, 4]]),
    "SparseGroupLasso": lambda draw: R.SparseGroupLasso(draw(WEIGHT), draw(WEIGHT), groups(draw)),
    "Slope": lambda draw: R.Slope(draw(WEIGHT), draw(st.floats(0.01, 0.99))),
    "Slope, a weight each": lambda draw: R.Slope(weights(draw).sort(descending=True).values),
    "TotalVariation": lambda draw: R.TotalVariation(draw(WEIGHT)),
    "Nuclear": lambda draw: R.Nuclear(draw(WEIGHT), draw(st.sampled_from([(2, 3), (3, 2), (1, 6)]))),
    "Box": lambda draw: R.Box(draw(st.floats(-2, 0.5)), draw(st.floats(0.5, 2))),
    "NonNegative": lambda draw: R.NonNegative(),
    "L2Ball": lambda draw: R.L2Ball(draw(WEIGHT)),
    "L1Ball": lambda draw: R.L1Ball(draw(WEIGHT)),
    "LInfBall": lambda draw: R.LInfBall(draw(WEIGHT)),
    "Simplex": lambda draw: R.Simplex(draw(WEIGHT)),
    "Halfspace": lambda draw: R.Halfspace(vector(draw, DIM), draw(st.floats(-2, 2))),
    "Affine": affine,
    "MCP": lambda draw: R.MCP(draw(WEIGHT), draw(WEIGHT)),
    "SCAD": lambda draw: R.SCAD(draw(WEIGHT), 1 + draw(WEIGHT)),
    "LogSum": lambda draw: R.LogSum(draw(WEIGHT), draw(WEIGHT)),
    "TransformedL1": lambda draw: R.TransformedL1(draw(WEIGHT), draw(WEIGHT)),
    "L0": lambda draw: nonconvex(lambda: R.L0(draw(WEIGHT), allow_nonconvex=True)),
    "TopK": lambda draw: nonconvex(lambda: R.TopK(draw(st.integers(1, DIM)), allow_nonconvex=True)),
    "Scaled": lambda draw: R.Scaled(R.MCP(draw(WEIGHT), draw(WEIGHT)), draw(WEIGHT)),
    "Masked": lambda draw: R.Masked(R.L2(draw(WEIGHT)), mask(draw)),
    "Separable": lambda draw: R.Separable([(slice(0, 2), R.SCAD(draw(WEIGHT), 3.0)), (slice(3, 6), R.Simplex())]),
    "PerLayer": network,
}


def inside(phi: Regularizer, seed: int) -> Tensor | None:
    """Points of a set without interior, which a search cannot find by itself, made without its projection."""
    rng = torch.Generator().manual_seed(seed)
    if isinstance(phi, R.Simplex):
        exponential = -torch.rand(20, DIM, generator=rng, dtype=torch.float64).log()
        return phi.total * exponential / exponential.sum(-1, keepdim=True)
    if isinstance(phi, R.Affine):
        A, b = phi.A.numpy(), phi.b.numpy()
        basis = torch.linalg.svd(phi.A)[2][len(A) :]
        start = torch.linalg.lstsq(phi.A, torch.from_numpy(b)).solution
        return start + 3 * torch.randn(20, len(basis), generator=rng, dtype=torch.float64) @ basis
    return None


@pytest.mark.parametrize("name", MAKE)
@settings(max_examples=2, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(data=st.data(), seed=SEED)
def test_contract(name: str, data: st.DataObject, seed: int) -> None:
    phi = MAKE[name](data.draw)
    check_regularizer(phi, DIM, points=inside(phi, seed), seed=seed)
    sent = pickle.loads(pickle.dumps(phi))  # as a run in several processes does
    v = vector(data.draw, DIM)
    assert torch.equal(sent.prox(v, 0.0), phi.prox(v, 0.0))
    assert hash(phi) == hash(phi)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKE)
@settings(max_examples=40, deadline=None, database=None, phases=[Phase.generate])
@given(data=st.data(), seed=SEED)
def test_contract_at_length(name: str, data: st.DataObject, seed: int) -> None:
    phi = MAKE[name](data.draw)
    check_regularizer(phi, DIM, points=inside(phi, seed), seed=seed)


def test_every_public_regularizer_is_checked() -> None:
    public = {name for name in R.__all__ if isinstance(getattr(R, name), type)}
    assert public == {name.partition(",")[0] for name in MAKE}
