"""What is measured of a model."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fednmap.measure import hoyer, residual
from fednmap.regularizers import L1

ENTRIES = st.lists(st.floats(-1, 1, width=32).map(lambda u: 0.0 if abs(u) < 1e-3 else u), min_size=1, max_size=30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(entries=ENTRIES, exponent=st.integers(-30, 30))
def test_hoyer_is_between_0_and_1_and_does_not_depend_on_the_scale(dtype, entries, exponent):
    x = torch.tensor(entries, dtype=dtype)
    at_one, scaled = float(hoyer(x)), float(hoyer(x * 10.0**exponent))
    assert 0 <= scaled <= 1
    assert abs(at_one - scaled) < 1e-4


@pytest.mark.parametrize("scale", [1e-45, 1e-30, 1.0, 1e30, 3e38])
def test_hoyer_at_its_ends(scale):
    equal, single = torch.full((1000,), scale), torch.zeros(1000)
    single[7] = -scale
    assert float(hoyer(equal)) == pytest.approx(0, abs=1e-5)
    assert float(hoyer(single)) == 1
    assert float(hoyer(torch.zeros(1000))) == 1


def test_hoyer_by_hand():
    assert float(hoyer(torch.tensor([3.0, 0.0, -4.0, 0.0]))) == pytest.approx(2 - 7 / 5)


def test_hoyer_of_what_is_not_finite_is_not_a_number():
    assert math.isnan(float(hoyer(torch.tensor([1.0, math.nan, 0.0]))))
    assert math.isnan(float(hoyer(torch.tensor([1.0, math.inf, 0.0]))))


@pytest.mark.parametrize(("size", "gamma"), [(1e4, 1e-8), (1e9, 1.0), (1.0, 1e-9)])
def test_the_residual_of_float32_is_not_lost_in_the_difference(size, gamma):
    """Far from 0 the residual of |.|_1 is gradient + sign(x), whatever gamma."""
    x, gradient = size * torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.3, 0.7, -5.0])
    found = residual(x, gradient, L1(0.1), gamma)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, gradient + 0.1 * x.sign(), rtol=1e-3, atol=0)
