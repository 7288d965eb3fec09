"""Regularizers on networks and by name: masks, layers, patterns, the command line's short names, errors."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fednmap import regularizers as R
from fednmap import simulate
from fednmap.algorithms import FedNMap
from fednmap.core import Regularizer
from fednmap.names import InputError
from fednmap.problems import LeastSquares
from fednmap.regularizers import norms, signature


def network() -> nn.Sequential:
    """A convolution, a norm layer whose scale is called weight too, and a linear layer."""
    return nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))


def flat(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def named(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    sizes = [parameter.numel() for parameter in module.parameters()]
    return dict(zip((name for name, _ in module.named_parameters()), x.split(sizes), strict=True))


def test_weights_are_the_parameters_with_two_or_more_axes() -> None:
    module = network()
    v = flat(module)
    before, after = named(module, v), named(module, R.restrict(R.L1(100.0), module, "weights").prox(v, 1.0))
    assert {name for name in after if not torch.equal(before[name], after[name])} == {"0.weight", "3.weight"}
    assert not after["0.weight"].any()
    assert not after["3.weight"].any()


def test_a_pattern_selects_by_name() -> None:
    module = network()
    v = flat(module)
    before, after = named(module, v), named(module, R.restrict(R.L1(100.0), module, "3.*").prox(v, 1.0))
    assert {name for name in after if not torch.equal(before[name], after[name])} == {"3.weight", "3.bias"}


def test_group_lasso_takes_the_filters_and_rows() -> None:
    module = network()
    v = flat(module)
    after = named(module, R.parse("group-lasso:0.3", module).prox(v, 1.0))
    for name in ("0.weight", "3.weight"):
        weight = module.get_parameter(name).detach()
        for row, was in zip(after[name].view(len(weight), -1), weight.flatten(1), strict=True):
            torch.testing.assert_close(row, was * max(0.0, 1 - 0.3 / float(was.norm())))
    assert torch.equal(after["1.weight"], module.get_parameter("1.weight"))
    assert torch.equal(after["3.bias"], module.get_parameter("3.bias"))


def test_nuclear_takes_each_weight_as_a_matrix() -> None:
    module = network()
    v = flat(module)
    after = named(module, R.parse("nuclear:0.2", module).prox(v, 1.0))
    for name in ("0.weight", "3.weight"):
        weight = module.get_parameter(name).detach().flatten(1)
        sigma = torch.linalg.svdvals(after[name].view_as(weight))
        torch.testing.assert_close(sigma, (torch.linalg.svdvals(weight) - 0.2).clamp_min(0), atol=1e-5, rtol=0)


def test_a_slice_may_begin_where_the_vector_does() -> None:
    v = torch.tensor([3.0, -2.0, 0.5])
    for first in (slice(None, 2), slice(2)):
        phi = R.Separable([(slice(2, 3), R.Box(0, 0.1)), (first, R.L1(1.0))])
        assert torch.equal(phi.prox(v, 1.0), torch.tensor([2.0, -1.0, 0.1]))


def test_groups_may_be_empty_the_last_one_too() -> None:
    v, weight = torch.tensor([3.0, 4.0, 2.0]), torch.tensor([1.0, 9.0, 1.0, 9.0])
    phi = R.GroupLasso(weight, [[0, 1], [], [2], []])
    assert torch.equal(phi.prox(v, 1.0), R.GroupLasso(1.0, [[0, 1], [2]]).prox(v, 1.0))
    assert phi.value(v) == 7.0
    assert torch.equal(R.GroupLasso(torch.tensor(1.0), 3).prox(v, 1.0), R.GroupLasso(1.0, 3).prox(v, 1.0))


def test_a_structured_regularizer_can_be_restricted() -> None:
    module = network()
    v = flat(module)
    phi = R.parse("group-lasso:100", module)
    after = named(module, R.restrict(phi, module, "3.*").prox(v, 1.0))
    assert not after["3.weight"].any()
    assert torch.equal(after["0.weight"], module.get_parameter("0.weight").flatten())
    same = R.restrict(phi, module, "weights")
    assert torch.equal(same.prox(v, 1.0), phi.prox(v, 1.0))
    with pytest.raises(ValueError, match="nothing is left"):
        R.restrict(phi, module, "*.bias")


def test_per_layer_applies_the_first_rule_that_fits() -> None:
    module = network()
    v = flat(module)
    phi = R.PerLayer({"0.weight": R.L2(100.0), "*.weight": R.Box(-0.01, 0.01)}, module)
    after = named(module, phi.prox(v, 1.0))
    assert not after["0.weight"].any()
    assert after["1.weight"].eq(0.01).all()
    assert after["3.weight"].abs().max() <= 0.01
    assert torch.equal(after["3.bias"], module.get_parameter("3.bias"))
    value = phi.value(phi.prox(v, 1.0))
    assert value.shape == ()
    assert value == 0
    assert R.PerLayer({"3.*": R.MCP(1.0, 4.0), "0.*": R.SCAD(1.0, 3.0)}, module).rho == 0.5


def test_masked_many_runs_and_few_are_the_same() -> None:
    """Up to 256 runs are copied as slices, more through an index."""
    v = torch.randn(3, 4, 2000)
    for mask in (torch.arange(2000) % 2 == 0, torch.arange(2000) % 200 < 100, torch.ones(2000, dtype=torch.bool)):
        expected = v.clone()
        expected[..., mask] = R.L1Ball(3.0).prox(v[..., mask], 1.0)
        phi = R.Masked(R.L1Ball(3.0), mask)
        assert torch.equal(phi.prox(v, 1.0), expected)
        assert phi.value(phi.prox(v, 1.0)).eq(0).all()


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("none", "Zero()"),
        ("l1:0.001", "L1(weight=0.001)"),
        ("elastic-net:0.001,0.01", "ElasticNet(nu1=0.001, nu2=0.01)"),
        ("mcp:0.01,3", "MCP(lam=0.01, theta=3)"),
        ("scad:0.01,3.7", "SCAD(lam=0.01, a=3.7)"),
        ("box:-1,1", "Box(lo=-1, hi=1)"),
        ("box: -1, 1", "Box(lo=-1, hi=1)"),
        ("slope:0.1", "Slope(weight=0.1, q=0.1)"),
        ("slope:0.1,0.05", "Slope(weight=0.1, q=0.05)"),
        ("simplex", "Simplex(total=1.0)"),
        ("nonnegative", "NonNegative()"),
        ("log-sum:1e-3,0.1", "LogSum(lam=0.001, eps=0.1)"),
        ("transformed-l1:1e-3,1", "TransformedL1(lam=0.001, a=1)"),
        ("l1-ball:10", "L1Ball(radius=10)"),
        ("total-variation:0.1", "TotalVariation(weight=0.1)"),
    ],
)
def test_names(spec: str, expected: str) -> None:
    assert repr(R.parse(spec)) == expected


def test_every_name_parses() -> None:
    module = network()
    for name in R.REGULARIZERS:
        words = [word for word in signature(name).partition(":")[2].split(",") if word and word[0] != "["]
        numbers = ",".join(["1", "2"][: len(words)])
        if "allow_nonconvex" in signature(name):
            with pytest.warns(UserWarning, match="guarantees"):
                phi = R.parse(f"{name}:{numbers},allow_nonconvex", module)
        else:
            phi = R.parse(f"{name}:{numbers}", module)
        assert isinstance(phi, (R.REGULARIZERS[name], R.PerLayer))
        assert phi.prox(flat(module), 0.1).shape == flat(module).shape


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("l11:0.1", r"unknown regularizer 'l11'; did you mean 'l1'\? choose from box, elastic-net"),
        ("l1", r"'l1' does not fit 'l1:weight'"),
        ("mcp:0.1", r"'mcp:0.1' does not fit 'mcp:lam,theta'"),
        ("mcp:0.1,3,4", r"'mcp:0.1,3,4' does not fit 'mcp:lam,theta'"),
        ("slope", r"'slope' does not fit 'slope:weight,\[q\]'"),
        ("l1:small", r"'small' in 'l1:small' is not a number"),
        ("l1:", r"'l1:' does not fit"),
        ("mcp:0.1,", r"'' in 'mcp:0.1,' is not a number"),
        ("l1:-1", r"L1: weight is -1; it must be a finite number, at least 0"),
        ("l1:nan", r"L1: weight is nan; it must be a finite number"),
        ("mcp:1,0", r"MCP: theta is 0; it must be a finite positive number"),
        ("scad:1,1", r"SCAD: a is 1; it must be a finite number above 1"),
        ("box:1,-1", r"Box needs lo <= hi, given lo = 1 and hi = -1"),
        ("group-lasso:0.1", r"'group-lasso' takes its structure from the weights of a network"),
        ("nuclear:0.1", r"'nuclear' takes its structure from the weights of a network"),
        ("l0:0.1", r"L0 is not weakly convex .* pass allow_nonconvex=True"),
        ("topk:3", r"TopK is not weakly convex .* pass allow_nonconvex=True"),
        ("topk:2.5,allow_nonconvex", r"TopK: k is 2.5; it must be an integer, at least 1"),
        ("l1:allow_nonconvex", r"'allow_nonconvex' in 'l1:allow_nonconvex' is not a number"),
    ],
)
def test_errors_of_names(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        R.parse(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: R.Masked(R.Zero(), torch.tensor([1, 0])), "1-D tensor of bools"),
        (lambda: R.Masked(R.Zero(), torch.tensor([True])).prox(torch.zeros(2), 1.0), "mask has 1 coordinates"),
        (lambda: R.Separable([(slice(0, 2), R.Zero()), (slice(1, 3), R.Zero())]), "disjoint slices"),
        (
            lambda: R.Separable([(slice(0, 4), R.Zero())]).prox(torch.zeros(3), 1.0),
            "the vector has 3 coordinates, .* ends at 4",
        ),
        (lambda: R.Scaled(R.Zero(), 0.0), "factor is 0.0; it must be a finite positive"),
        (lambda: R.PerLayer({"nothing": R.Zero()}, network()), "unknown parameter pattern 'nothing'"),
        (lambda: R.restrict(R.Zero(), network(), "4.weight"), r"did you mean '\d.weight'"),
        (lambda: R.restrict(R.Zero(), nn.BatchNorm1d(3), "weights"), "no parameter with two or more axes"),
        (lambda: R.GroupLasso(1.0, [[0, 1], [1]]), "disjoint"),
        (lambda: R.GroupLasso(1.0, 0), "at least one coordinate"),
        (lambda: R.GroupLasso(1.0, 4).prox(torch.zeros(6), 1.0), "do not divide"),
        (lambda: R.GroupLasso(1.0, [[1], [0]]).prox(torch.zeros(3), 1.0), "the groups cover 2 coordinates"),
        (lambda: R.GroupLasso(1.0, torch.tensor([0.5])), "integers"),
        (
            lambda: R.GroupLasso(torch.tensor([1.0, 2.0]), torch.tensor([0, 0, -1])).prox(torch.zeros(3), 1.0),
            r"weights of shape \(2,\) for 1 groups; give one for each",
        ),
        (lambda: R.GroupLasso(torch.tensor([1.0, 5.0]), 3).value(torch.zeros(3)), r"shape \(2,\) for 1 groups"),
        (lambda: R.GroupLasso(torch.tensor([1.0]), 3).prox(torch.zeros(6), 1.0), r"shape \(1,\) for 2 groups"),
        (lambda: R.L1(torch.tensor([2.0])).prox(torch.zeros(2), 1.0), r"shape \(1,\) for 2 coordinates"),
        (lambda: R.L1(torch.tensor([2.0])).value(torch.zeros(2)), r"shape \(1,\) for 2 coordinates"),
        (lambda: R.L1(torch.ones(2, 2)), r"L1: weight has shape \(2, 2\); it must have one axis"),
        (lambda: R.Slope(torch.tensor([2.0])).prox(torch.zeros(2), 1.0), r"shape \(1,\) for 2 coordinates"),
        (lambda: R.Slope(torch.tensor(2.0)), "a tensor of one weight per coordinate"),
        (lambda: R.Halfspace(torch.tensor([1.0]), 1.0).prox(torch.zeros(5), 1.0), "length 1, for one of length 5"),
        (lambda: R.Halfspace(torch.tensor([1.0]), 1.0).value(torch.zeros(5)), "length 1, for one of length 5"),
        (lambda: R.Slope(torch.tensor([1.0, 2.0])), "descending"),
        (lambda: R.Slope(1.0, 1.0), "q is 1.0; .* between 0 and 1"),
        (lambda: R.Nuclear(1.0, (2, 2)).prox(torch.zeros(3), 1.0), "2, 2"),
        (lambda: R.Halfspace(torch.zeros(3), 1.0), "nonzero"),
        (lambda: R.Affine(torch.ones(2, 3), torch.tensor([1.0, 2.0])), "contradict"),
        (
            lambda: R.Affine(torch.ones(2, 3).double(), torch.tensor([1.0, 1 + 1e-6], dtype=torch.float64)),
            "contradict",
        ),
        (lambda: R.Affine(torch.ones(2, 3), torch.tensor([1e-9, 2e-9])), "contradict"),
        (lambda: R.Box(math.inf, math.inf), "a number between lo and hi"),
        (lambda: R.Box(-math.inf, -math.inf), "a number between lo and hi"),
        (lambda: R.Separable([(slice(0, None), R.Zero())]), "slices with an end, such as"),
        (lambda: R.Separable([(3, R.Zero())]), "slices with an end"),  # type: ignore[list-item]
        (lambda: R.parse("group-lasso:0.5", nn.BatchNorm1d(3)), "two or more axes, and this network has none"),
        (lambda: R.Affine(torch.ones(3), torch.ones(1)), r"shape \(m, p\)"),
        (lambda: R.MCP(1.0, 2.0).prox(torch.zeros(3), 2.0), r"rho = 0.5.*step = 2 \(step \* rho = 1\).*below 2"),
        (lambda: R.L0(1.0, allow_nonconvex=False), "allow_nonconvex"),
    ],
)
def test_errors(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As where only the base is installed."""
    monkeypatch.setitem(sys.modules, "numba", None)
    norms._solver.cache_clear()
    yield
    norms._solver.cache_clear()


V = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
COMPILED = R.TotalVariation(0.3).prox(V, 0.7)


def test_total_variation_without_numba_is_the_same_and_says_that_it_is_slow(without_numba: None) -> None:
    with pytest.warns(UserWarning, match=r"^TotalVariation is not compiled.*pip install 'fednmap\[numba\]'$"):
        phi = R.TotalVariation(0.3)
    R.TotalVariation(0.4)  # says it once
    assert torch.equal(phi.prox(V, 0.7), COMPILED)


@pytest.mark.filterwarnings("default:TotalVariation is not compiled")
def test_total_variation_without_numba_on_the_command_line(without_numba: None, command: Callable[..., Any]) -> None:
    options = ("--data", "digits", "--model", "logistic", "--clients", "4", "--rounds", "1", "--local-steps", "1")
    code, _, err = command("train", *options, "--penalty", "total-variation:0.1", "--out", "run")
    assert code == 0
    assert [line for line in err.splitlines() if "TotalVariation is not compiled" in line]


NOT_NUMBERS = [True, "0.1", None, torch.tensor([0.1, 0.2]), 1j]


MAKES: list[Callable[[Any], Regularizer]] = [
    lambda value: R.ElasticNet(value, 0.1),
    lambda value: R.ElasticNet(0.1, value),
    lambda value: R.MCP(value, 2.0),
    lambda value: R.MCP(0.1, value),
    lambda value: R.SCAD(0.1, value),
    lambda value: R.LogSum(0.1, value),
    lambda value: R.Box(value, 1.0),
    lambda value: R.Box(0.0, value),
    lambda value: R.L2Ball(value),
    lambda value: R.Slope(0.1, value),
    lambda value: R.TopK(value, allow_nonconvex=True),
    lambda value: R.Nuclear(value, (2, 2)),
    lambda value: R.Scaled(R.L1(0.1), value),
]


@pytest.mark.parametrize(
    ("make", "value"), [*((MAKES[0], value) for value in NOT_NUMBERS), *((make, "0.1") for make in MAKES[1:])]
)
def test_what_is_not_a_number_is_refused_in_one_line(make: Callable[[Any], Regularizer], value: object) -> None:
    with pytest.raises(InputError, match=r"^\w+: \w+ is [^\n]*; it must be [^\n]*$"):
        make(value)


@pytest.mark.parametrize("value", [True, "0.1", None, torch.tensor([0.1, -0.2]), torch.tensor([True, False])], ids=str)
@pytest.mark.parametrize("make", [R.L1, R.Slope, lambda value: R.GroupLasso(value, 2)])
def test_what_is_not_a_weight_is_refused_in_one_line(make: Callable[[Any], Regularizer], value: object) -> None:
    with pytest.raises(InputError, match=r"^\w+: weight is [^\n]*; it must be [^\n]*$"):
        make(value)


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.int64, int, float])
def test_numbers_of_numpy_are_stored_as_plain_ones(kind: type) -> None:
    x = torch.ones(4)
    for phi in (R.L1(kind(2)), R.ElasticNet(kind(2), kind(2)), R.MCP(kind(2), kind(2)), R.L2(kind(2))):
        assert all(type(value) in (int, float) for value in vars(phi).values())
        assert phi.value(x).dtype == x.dtype
        assert phi.prox(x, 0.1).dtype == x.dtype
    assert torch.equal(R.L1(np.full(4, 0.5)).prox(x, 1.0), torch.full((4,), 0.5))
    assert R.GroupLasso(kind(2), np.int64(2)).value(x) == pytest.approx(2 * 2 * 2**0.5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: R.Scaled(0.5, R.L1(0.1)),  # type: ignore[arg-type]
        lambda: R.Scaled(R.L1, 0.5),  # type: ignore[arg-type]
        lambda: R.Masked("l1:0.1", torch.tensor([True])),  # type: ignore[arg-type]
        lambda: R.Masked(R.L1(0.1), [True]),  # type: ignore[arg-type]
        lambda: R.Separable([(slice(0, 2), 0.1)]),  # type: ignore[list-item]
        lambda: R.GroupLasso(0.1, True),
    ],
)
def test_what_a_regularizer_is_made_of_is_checked(make: Callable[[], Regularizer]) -> None:
    with pytest.raises(InputError, match=r"^[^\n]+$"):
        make()


@pytest.mark.filterwarnings("ignore:L0 is not weakly convex", "ignore:TopK is not weakly convex")
def test_beyond_the_theory_fednmap_still_runs() -> None:
    """On well-posed least squares with three clear coefficients both find them; no theorem says so."""
    rng = torch.Generator().manual_seed(0)
    truth = torch.tensor([3.0, 0, 0, -2.0, 0, 0, 0, 4.0], dtype=torch.float64)
    data = []
    for _ in range(4):
        a = torch.randn(30, 8, generator=rng, dtype=torch.float64)
        data.append((a, a @ truth + 0.01 * torch.randn(30, generator=rng, dtype=torch.float64)))
    problem = LeastSquares(data)
    for phi in (R.L0(0.1, allow_nonconvex=True), R.TopK(3, allow_nonconvex=True)):
        method = FedNMap(phi=phi, eta_a=0.02, eta_s=1.0, Q=2)
        *_, last = simulate(method, problem, rounds=300)
        x = method.model(last.server)
        assert torch.equal(x != 0, truth != 0)
        torch.testing.assert_close(x, truth, atol=0.02, rtol=0)


def test_rows_of_any_scale_do_not_meet() -> None:
    """A stack of rows from 1e-12 to 1e12 gives what each row gives by itself."""
    v = torch.randn(25, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    v *= torch.logspace(-12, 12, 25, dtype=torch.float64)[:, None]
    for phi in (R.Slope(0.3), R.TotalVariation(0.3), R.L1Ball(1.0), R.Simplex(), R.LInf(0.3), R.Nuclear(0.3, (5, 8))):
        together, alone = phi.prox(v, 1.0), torch.stack([phi.prox(row, 1.0) for row in v])
        scale = torch.maximum(v.abs(), alone.abs()).amax(-1, keepdim=True)
        assert ((together - alone).abs() <= 1e-13 * scale).all(), phi


SETS: list[Regularizer] = [
    R.L1Ball(1.0),
    R.L2Ball(1.0),
    R.LInfBall(0.1),
    R.Simplex(),
    R.Box(-0.1, 0.3),
    R.Halfspace(torch.linspace(-1, 2, 100_000), -1.0),
    R.Affine(torch.linspace(-1, 2, 200_000).reshape(2, -1).sin(), torch.tensor([1.0, -1.0])),
]


@pytest.mark.parametrize("phi", SETS, ids=lambda phi: type(phi).__name__)
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e6])
def test_a_long_float32_vector_is_projected_into_the_set(phi: Regularizer, size: float) -> None:
    v = size * torch.randn(2, 100_000, generator=torch.Generator().manual_seed(0))
    assert phi.value(phi.prox(v, 1.0)).eq(0).all()
    assert phi.value(size * torch.ones(100_000)).isinf() or size < 1


def test_large_entries_survive_near_the_limit_in_float32() -> None:
    """At slope 1e6 the middle piece is steep, but what lies beyond it is returned as it came."""
    v = torch.linspace(3.01, 50, 1000)
    for phi, step in ((R.MCP(1.0, 2.0), 2 * (1 - 1e-6)), (R.SCAD(1.0, 3.0), 2 * (1 - 1e-6))):
        torch.testing.assert_close(phi.prox(v, step), v, rtol=3e-7, atol=0)


def test_examples_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "regularizers.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert blocks
    namespace: dict[str, object] = {"__name__": "docs"}
    for block in blocks:
        exec(block, namespace)


def test_every_name_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "regularizers.md").read_text()
    for name in R.REGULARIZERS:
        assert re.search(rf"`{name}[:`]", page), name


@pytest.mark.parametrize("groups", [[[0], [1]], torch.tensor([0, 1]), [[0, 1]], [[0, 1], [2, 3]], [[1, 0], [2, 3]]])
@pytest.mark.parametrize("make", [lambda g: R.GroupLasso(1.0, g), lambda g: R.SparseGroupLasso(0.0, 1.0, g)])
def test_groups_refuse_a_vector_of_another_length(make: Callable[[Any], Regularizer], groups: Any) -> None:
    """A coordinate beyond the groups, such as an intercept, must not end up in a group."""
    phi, length = make(groups), len(groups) if isinstance(groups, Tensor) else sum(map(len, groups))
    assert phi.prox(torch.ones(length), 1.0).shape == (length,)
    for other in (length - 1, length + 1, 2 * length):
        for call in (phi.value, lambda x: phi.prox(x, 1.0)):
            with pytest.raises(InputError, match=f"the groups cover {length} coordinates, the vector has {other}"):
                call(torch.ones(other))
    labels = torch.tensor([0, 1, -1])
    left = R.GroupLasso(1.0, labels).prox(torch.tensor([3.0, 0.5, 9.0]), 1.0)
    assert left.tolist() == pytest.approx([2.0, 0.0, 9.0])


@pytest.mark.parametrize("restricted", [False, True])
def test_a_regularizer_of_a_network_refuses_the_vector_of_another(restricted: bool) -> None:
    module = nn.Linear(2, 1)
    phi: Regularizer = R.PerLayer({"weight": R.L1(1.0)}, module)
    phi = R.restrict(phi, module, "weights") if restricted else phi
    assert phi.prox(torch.tensor([3.0, 0.2, 0.5]), 1.0).tolist() == [2.0, 0.0, 0.5]
    for length in (2, 4):
        with pytest.raises(InputError, match=f"the vector has {length} coordinates, expected 3, as the network has"):
            phi.prox(torch.ones(length), 1.0)
