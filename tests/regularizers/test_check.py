"""`check_regularizer` notices what it is for: each of these is a regularizer broken in one place."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softshrink

from fednmap import regularizers as R
from fednmap.core import Regularizer
from fednmap.testing import check_regularizer

Step = float | Tensor


@dataclass(frozen=True)
class Patched(Regularizer):
    """phi with some of its methods replaced; each replacement gets phi first."""

    phi: Regularizer
    value_of: Callable[[Regularizer, Tensor], Any] | None = None
    prox_of: Callable[[Regularizer, Tensor, Step], Tensor] | None = None
    claim: float | None = None

    @property
    def rho(self) -> float:  # type: ignore[override]
        return self.phi.rho if self.claim is None else self.claim

    def value(self, x: Tensor) -> Tensor:
        return self.value_of(self.phi, x) if self.value_of else self.phi.value(x)

    def prox(self, v: Tensor, step: Step) -> Tensor:
        return self.prox_of(self.phi, v, step) if self.prox_of else self.phi.prox(v, step)


def in_place(phi: Regularizer, v: Tensor, step: Step) -> Tensor:
    return v.copy_(phi.prox(v, step))


def hides_nan(phi: Regularizer, v: Tensor, step: Step) -> Tensor:
    return phi.prox(v, step).nan_to_num()


def rows_mixed(phi: Regularizer, v: Tensor, step: Step) -> Tensor:
    phi.check_step(step)
    return v * (1 - float(step) / v.norm().clamp_min(1e-300)).clamp_min(0)


def half_step_zero(phi: Regularizer, v: Tensor, step: Step) -> Tensor:
    phi.check_step(step)
    return phi.prox(v, step if float(step) > 0 else 0.1)


def cancelling(phi: Regularizer, v: Tensor, step: Step) -> Tensor:
    """MCP's prox as a difference of two steep lines."""
    assert isinstance(phi, R.MCP)
    step = phi.check_step(step)
    slope = phi.theta / (phi.theta - step)
    return slope * softshrink(v, step * phi.lam) - (slope - 1) * softshrink(v, phi.theta * phi.lam)


def two_nonzeros() -> R.TopK:
    with warnings.catch_warnings(action="ignore"):
        return R.TopK(2, allow_nonconvex=True)


BROKEN: dict[str, tuple[Patched, str]] = {
    "threshold doubled": (Patched(R.L1(0.3), prox_of=lambda p, v, s: p.prox(v, 2 * s)), "not the minimiser"),
    "threshold off by a thousandth": (Patched(R.L1(0.3), prox_of=lambda p, v, s: p.prox(v, 1.001 * s)), "not the min"),
    "value halved": (Patched(R.L2(0.3), value_of=lambda p, x: p.value(x) / 2), "not the minimiser"),
    "elastic net with a factor 1/2": (
        Patched(R.ElasticNet(0.3, 0.4), value_of=lambda p, x: R.ElasticNet(0.3, 0.2).value(x)),
        "not the minimiser",
    ),
    "hard thresholding as the prox of L1": (
        Patched(R.L1(0.3), prox_of=lambda p, v, s: v * (v.abs() > 0.3 * p.check_step(s))),
        "not the minimiser",
    ),
    "clipping as the projection on the l1 ball": (
        Patched(R.L1Ball(1.0), prox_of=lambda p, v, s: p.prox(v / 2, s)),
        "not the minimiser",
    ),
    "a set the prox leaves": (Patched(R.Box(-1, 1), prox_of=lambda p, v, s: R.Box(-2, 2).prox(v, s)), "must be finite"),
    "sign flipped": (Patched(R.L1(0.3), prox_of=lambda p, v, s: -p.prox(v, s)), "not the minimiser"),
    "rho understated": (Patched(R.MCP(0.3, 2.0), claim=0.4), "not weakly convex with rho = 0.4"),
    "rho a little understated": (Patched(R.MCP(0.3, 2.0), claim=0.49), "not weakly convex with rho = 0.49"),
    "rho of SCAD as that of MCP": (Patched(R.SCAD(0.3, 2.5), claim=0.4), "not weakly convex with rho = 0.4"),
    "rho forgotten": (Patched(R.LogSum(0.3, 0.7), claim=0.0), "not weakly convex with rho = 0"),
    "rho halved": (Patched(R.TransformedL1(0.3, 1.2), claim=0.45), "not weakly convex with rho = 0.45"),
    "a set that is not convex": (Patched(two_nonzeros(), claim=0.0), "rho = 0 is too small"),
    "prox of another theta": (
        Patched(R.MCP(0.3, 2.0), prox_of=lambda p, v, s: R.MCP(0.3, 2.2).prox(v, p.check_step(s))),
        "prox at step .* is not the minimiser",
    ),
    "steps beyond 1/rho taken": (
        Patched(R.MCP(0.3, 2.0), prox_of=lambda p, v, s: p.prox(v, min(float(s), 1.9))),
        r"prox took step = 2 although step \* rho = 1 >= 1",
    ),
    "negative steps taken": (Patched(R.L1(0.3), prox_of=lambda p, v, s: p.prox(v, abs(s))), "prox took step = -1"),
    "in place": (Patched(R.L1(0.3), prox_of=in_place), "changed its input"),
    "a bool for a value": (Patched(R.Box(-1, 1), value_of=lambda p, x: p.value(x) == 0), "torch.bool"),
    "value summed over the stack": (Patched(R.L1(0.3), value_of=lambda p, x: p.value(x).sum()), "shape"),
    "float64 always": (Patched(R.L1(0.3), prox_of=lambda p, v, s: p.prox(v.double(), s)), "keep the dtype"),
    "rows mixed": (Patched(R.L2(1.0), prox_of=rows_mixed), "of a single vector"),
    "NaN hidden": (Patched(R.L1(0.3), prox_of=hides_nan), "hides a NaN"),
    "a NaN beside": (Patched(R.L1(0.3), prox_of=lambda p, v, s: p.prox(v, s) + v.isnan().any()), "reaches another row"),
    "step 0 shrinks": (Patched(R.L1(0.3), prox_of=half_step_zero), "step 0"),
    "cancellation near the limit": (Patched(R.MCP(0.3, 2.0), prox_of=cancelling), "float32"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_noticed(name: str) -> None:
    phi, message = BROKEN[name]
    with pytest.raises(AssertionError, match=message):
        check_regularizer(phi, steps=[1.9999] if name.startswith("cancellation") else None)


def test_the_message_has_the_numbers() -> None:
    with pytest.raises(AssertionError) as caught:
        check_regularizer(Patched(R.L1(0.3), prox_of=lambda p, v, s: p.prox(v, 2 * s)), dim=2)
    message = str(caught.value)
    assert "at v = [" in message
    assert "prox gives x = [" in message
    assert "with objective" in message


def test_a_regularizer_written_by_a_user_passes() -> None:
    @dataclass(frozen=True)
    class Ridge(Regularizer):
        weight: float

        def value(self, x: Tensor) -> Tensor:
            return self.weight * x.square().sum(-1) / 2

        def prox(self, v: Tensor, step: Step) -> Tensor:
            return v / (1 + self.check_step(step) * self.weight)

    check_regularizer(Ridge(0.5))
    check_regularizer(Ridge(0.5), dim=1)
    check_regularizer(Ridge(0.5), dim=3, steps=[1e-3, 1e3])


def test_points_reach_a_set_without_interior() -> None:
    """Without points a projection on the wrong line of the plane would look fine."""
    wrong = Patched(R.Affine(torch.tensor([[1.0, 1.0]]), torch.tensor([1.0])), prox_of=lambda p, v, s: _corner(p, v, s))
    with pytest.raises(AssertionError, match="not the minimiser"):
        check_regularizer(wrong, dim=2, points=torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.5, 0.5]]))


def _corner(phi: Regularizer, v: Tensor, step: Step) -> Tensor:
    phi.check_step(step)
    return v * 0 + torch.tensor([1.0, 0.0], dtype=v.dtype)
