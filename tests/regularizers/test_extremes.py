"""Steps next to nothing, weights without end, numbers whose squares overflow, a NaN beside good rows."""

from __future__ import annotations

import math

import pytest
import torch

from fednmap import regularizers as R


def test_linf_with_a_step_next_to_nothing() -> None:
    """Where s weight is below a rounding of the largest entry, that is all that may move, by a rounding."""
    v = torch.tensor([1.0, -1.0, 0.5, 1.0])
    torch.testing.assert_close(R.LInf(1e-3).prox(v, 1e-4), v, rtol=0, atol=1e-7)
    rows = torch.randn(200, 100, generator=torch.Generator().manual_seed(0))
    for dtype, total in ((torch.float32, 1e-7), (torch.float32, 1e-6), (torch.float64, 1e-17), (torch.float64, 1e-15)):
        u = rows.to(dtype)
        moved = (R.LInf(1.0).prox(u, total) - u).abs().amax(-1)
        assert (moved <= total + torch.finfo(dtype).eps * u.abs().amax(-1)).all()
    assert R.LInf(1.0).prox(torch.tensor([math.nan, 1.0]), 1e-9).isnan().any()


@pytest.mark.parametrize("phi", [R.Simplex(1e-7), R.L1Ball(1e-7)], ids=lambda phi: type(phi).__name__)
def test_sets_next_to_nothing(phi: R.Simplex | R.L1Ball) -> None:
    x = phi.prox(torch.tensor([[10.0, 10.0, 0.0, 3.0], [1.0, 1.0, 0.5, 1.0]]), 1.0)
    assert phi.value(x).eq(0).all()
    torch.testing.assert_close(x.sum(-1), torch.full((2,), 1e-7))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_is_nobody_elses(bad: float) -> None:
    clean = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    broken = clean.clone()
    broken[1, 0] = bad
    for phi in (R.Slope(0.3), R.TotalVariation(0.3), R.LInf(0.3), R.L1Ball(1.0), R.Nuclear(0.3, (1, 5))):
        x, due = phi.prox(broken, 1.0), phi.prox(clean, 1.0)
        torch.testing.assert_close(x[[0, 2, 3]], due[[0, 2, 3]])
        assert x[1].isnan().any(), phi


@pytest.mark.parametrize("weight", [1e2, 1e12, 1e17, 1e20, 1e300])
def test_total_variation_without_end_is_the_mean(weight: float) -> None:
    v = torch.tensor([[1.0, 2.0, 3.0, 6.0], [1e-9, 0.0, 0.0, 0.0], [5.0, 5.0, 5.0, 5.0]], dtype=torch.float64)
    due = v.mean(-1, keepdim=True).expand(3, 4)
    torch.testing.assert_close(R.TotalVariation(weight).prox(v, 1.0), due, rtol=1e-12, atol=1e-16)
    torch.testing.assert_close(R.TotalVariation(1.0).prox(v, weight), due, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("size", [1e20, 3e38])
def test_numbers_whose_squares_overflow(size: float) -> None:
    v = torch.tensor([[size, -size], [0.3, 0.4]])
    x = R.L2Ball(1.0).prox(v, 1.0)
    torch.testing.assert_close(x, torch.tensor([[0.5**0.5, -(0.5**0.5)], [0.3, 0.4]]))
    torch.testing.assert_close(R.LogSum(1.0, 2.0).prox(v[0], 1.0), v[0])


def test_the_nuclear_norm_of_what_is_not_finite_is_nan() -> None:
    value = R.Nuclear(1.0, (2, 2)).value(torch.tensor([[math.nan, 0.0, 0.0, 1.0], [2.0, 0.0, 0.0, 1.0]]))
    assert value[0].isnan()
    assert value[1] == 3.0
    assert R.Nuclear(1.0, (2, 2)).value(torch.tensor([math.inf, 0.0, 0.0, 1.0])).isnan()
