"""Value and prox against the documented formula, written here a second time, and a solver that knows nothing else."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations, product

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import LinearConstraint, NonlinearConstraint, minimize

from fednmap import regularizers as R
from fednmap.core import Regularizer

Array = NDArray[np.float64]
QUICK = settings(max_examples=8, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
NUMBER = st.floats(0.05, 3.0)
SHARE = st.sampled_from([0.1, 0.5, 0.9, 0.999, 1 - 1e-6])


# One coordinate at a time: (regularizer, its documented formula at x >= 0).
def scad(lam: float, a: float) -> Callable[[Array], Array]:
    def formula(x: Array) -> Array:
        middle = (2 * a * lam * x - x**2 - lam**2) / (2 * (a - 1))
        return np.select([x <= lam, x <= a * lam], [lam * x, middle], lam**2 * (a + 1) / 2)

    return formula


def mcp(lam: float, theta: float) -> Callable[[Array], Array]:
    return lambda x: np.where(x <= theta * lam, lam * x - x**2 / (2 * theta), theta * lam**2 / 2)


SCALAR: dict[str, Callable[[float, float], tuple[Regularizer, Callable[[Array], Array]]]] = {
    "L1": lambda a, b: (R.L1(a), lambda x: a * x),
    "SquaredL2": lambda a, b: (R.SquaredL2(a), lambda x: a * x**2),
    "ElasticNet": lambda a, b: (R.ElasticNet(a, b), lambda x: a * x + b * x**2),
    "MCP": lambda a, b: (R.MCP(a, b), mcp(a, b)),
    "SCAD": lambda a, b: (R.SCAD(a, 1 + b), scad(a, 1 + b)),
    "LogSum": lambda a, b: (R.LogSum(a, b), lambda x: a * np.log(1 + x / b)),
    "TransformedL1": lambda a, b: (R.TransformedL1(a, b), lambda x: a * (b + 1) * x / (b + x)),
    "Scaled": lambda a, b: (R.Scaled(R.LogSum(1.0, b), a), lambda x: a * np.log(1 + x / b)),
    "LInfBall": lambda a, b: (R.LInfBall(a), lambda x: np.where(x <= a, 0.0, np.inf)),
}


@pytest.mark.parametrize("name", SCALAR)
@QUICK
@given(a=NUMBER, b=NUMBER, share=SHARE)
def test_dense_grid_on_one_coordinate(name: str, a: float, b: float, share: float) -> None:
    phi, formula = SCALAR[name](a, b)
    step = share / phi.rho if phi.rho else 3 * share
    v = np.concatenate([np.linspace(0, 4 * max(a, b, a * b), 40), [a * step, a / b * step, a * b, 1e-9, 50.0]])
    x = np.abs(phi.prox(torch.from_numpy(-v)[:, None], step).numpy()[:, 0])

    def objective(y: Array) -> Array:
        return formula(y) + (y - v[:, None]) ** 2 / (2 * step)

    # the objective is strongly convex on y >= 0: look at all of [0, 1.5 v], then closer and closer at its best cell
    lo, hi = np.zeros_like(v), 1.5 * v + 1e-6
    for _ in range(6):
        grid = np.linspace(lo, hi, 2001, axis=1)
        best = objective(grid).argmin(1)
        rows = np.arange(len(v))
        lo, hi = grid[rows, np.maximum(best - 3, 0)], grid[rows, np.minimum(best + 3, 2000)]
    y = grid[rows, best]
    found, reached = (
        objective(y[:, None])[:, 0],
        objective(np.minimum(x, a if name == "LInfBall" else x)[:, None])[:, 0],
    )
    assert np.all(reached <= found + 1e-12 * (1 + v**2 / step))
    # |x - y|^2 (1/step - rho) / 2 <= F(y) - F(x), which the grid and rounding leave at about 1e-15
    assert np.all((x - y) ** 2 * (1 / step - phi.rho) <= 1e-11 * (1 + v**2 / step))
    finite = y[np.isfinite(formula(y))]
    np.testing.assert_allclose(phi.value(torch.from_numpy(-finite)[:, None]), formula(finite), rtol=1e-12, atol=1e-13)


# Polyhedral: phi(x) = max_k <piece_k, x> on the set {G x <= h, E x = e}, so the prox is a small quadratic programme.
def signs(p: int) -> Array:
    return np.array(list(product([-1.0, 1.0], repeat=p)))


W = np.array([1.1, 0.7, 0.2, 0.0])
PLANE = np.array([[1.0, -2.0, 0.5, 1.0], [0.3, 1.0, 1.0, -1.0]])
NONE = np.zeros((0, 4)), np.zeros(0)
NO_PHI = np.zeros((1, 4))
Polyhedral = tuple[Regularizer, Array, tuple[Array, Array], tuple[Array, Array]]
POLYHEDRAL: dict[str, Polyhedral] = {
    "L1": (R.L1(0.8), 0.8 * signs(4), NONE, NONE),
    "L1, a weight each": (R.L1(torch.from_numpy(W)), W * signs(4), NONE, NONE),
    "LInf": (R.LInf(0.9), 0.9 * np.concatenate([np.eye(4), -np.eye(4)]), NONE, NONE),
    "Slope": (
        R.Slope(torch.from_numpy(W)),
        np.concatenate([signs(4) * W[list(order)] for order in permutations(range(4))]),
        NONE,
        NONE,
    ),
    "TotalVariation": (R.TotalVariation(0.6), 0.6 * signs(3) @ np.diff(np.eye(4), axis=0), NONE, NONE),
    "Box": (R.Box(-0.4, 0.7), NO_PHI, (np.concatenate([np.eye(4), -np.eye(4)]), np.repeat([0.7, 0.4], 4)), NONE),
    "NonNegative": (R.NonNegative(), NO_PHI, (-np.eye(4), np.zeros(4)), NONE),
    "L1Ball": (R.L1Ball(1.3), NO_PHI, (signs(4), np.full(16, 1.3)), NONE),
    "Simplex": (R.Simplex(1.3), NO_PHI, (-np.eye(4), np.zeros(4)), (np.ones((1, 4)), np.array([1.3]))),
    "Halfspace": (R.Halfspace(torch.from_numpy(PLANE[0]), -0.3), NO_PHI, (PLANE[:1], np.array([-0.3])), NONE),
    "Affine": (
        R.Affine(torch.from_numpy(PLANE), torch.tensor([0.5, -1.0])),
        NO_PHI,
        NONE,
        (PLANE, np.array([0.5, -1])),
    ),
}


@pytest.mark.parametrize("name", POLYHEDRAL)
def test_quadratic_programme(name: str) -> None:
    phi, pieces, (G, h), (E, e) = POLYHEDRAL[name]
    rng = np.random.default_rng(0)
    for size, step in product([0.3, 1.0, 4.0], [0.2, 1.5]):
        v = size * rng.normal(size=4)
        # in (x, t): |x - v|^2 / (2 step) + t, with t above every piece
        constraints = [LinearConstraint(np.c_[pieces, -np.ones(len(pieces))], ub=0.0)]
        if len(G):
            constraints.append(LinearConstraint(np.c_[G, np.zeros(len(G))], ub=h))
        if len(E):
            constraints.append(LinearConstraint(np.c_[E, np.zeros(len(E))], lb=e, ub=e))
        solved = minimize(
            lambda z, v=v, step=step: ((z[:-1] - v) ** 2).sum() / (2 * step) + z[-1],
            np.zeros(5),
            jac=lambda z, v=v, step=step: np.append((z[:-1] - v) / step, 1.0),
            constraints=constraints,
            method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 500},
        )
        x = phi.prox(torch.from_numpy(v), step)
        np.testing.assert_allclose(x, solved.x[:-1], atol=2e-6)
        np.testing.assert_allclose(phi.value(x), (pieces @ x.numpy()).max(), atol=1e-12)
        assert np.all(G @ x.numpy() <= h + 1e-12)
        np.testing.assert_allclose(E @ x.numpy(), e, atol=1e-12)


def test_l2_ball_by_a_solver() -> None:
    rng = np.random.default_rng(0)
    for size in (0.1, 1.0, 5.0):
        v = size * rng.normal(size=4)
        inside = NonlinearConstraint(lambda y: (y**2).sum(), -np.inf, 1.21, jac=lambda y: 2 * y)
        solved = minimize(
            lambda y, v=v: ((y - v) ** 2).sum(),
            np.zeros(4),
            jac=lambda y, v=v: 2 * (y - v),
            constraints=[inside],
            method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 500},
        )
        np.testing.assert_allclose(R.L2Ball(1.1).prox(torch.from_numpy(v), 0.3), solved.x, atol=1e-6)


# Round ones: a grid in the whole space, halved around its best point again and again.
def nuclear(y: Array) -> Array:
    """Of 2 x 2 matrices: (sigma_1 + sigma_2)^2 = |Y|_F^2 + 2 |det Y|."""
    return 0.7 * np.sqrt((y**2).sum(-1) + 2 * np.abs(y[..., 0] * y[..., 3] - y[..., 1] * y[..., 2]))


ROUND: dict[str, tuple[Regularizer, Callable[[Array], Array], int]] = {
    "L2": (R.L2(0.8), lambda y: 0.8 * np.sqrt((y**2).sum(-1)), 3),
    "GroupLasso": (
        R.GroupLasso(0.8, [[0, 2], [1]]),
        lambda y: 0.8 * (np.hypot(y[..., 0], y[..., 2]) + abs(y[..., 1])),
        3,
    ),
    "GroupLasso, a weight each, one free": (
        R.GroupLasso(torch.tensor([0.8], dtype=torch.float64), torch.tensor([0, -1, 0])),
        lambda y: 0.8 * np.hypot(y[..., 0], y[..., 2]),
        3,
    ),
    "SparseGroupLasso": (
        R.SparseGroupLasso(0.3, 0.5, torch.tensor([0, -1, 0])),
        lambda y: 0.3 * abs(y).sum(-1) + 0.5 * np.hypot(y[..., 0], y[..., 2]),
        3,
    ),
    "Nuclear": (R.Nuclear(0.7, (2, 2)), nuclear, 4),
    "Masked": (
        R.Masked(R.L2(0.8), torch.tensor([True, False, True])),
        lambda y: 0.8 * np.hypot(y[..., 0], y[..., 2]),
        3,
    ),
    "Separable": (
        R.Separable([(slice(0, 2), R.L2(0.8)), (slice(2, 3), R.L1(0.4))]),
        lambda y: 0.8 * np.hypot(y[..., 0], y[..., 1]) + 0.4 * abs(y[..., 2]),
        3,
    ),
}


@pytest.mark.parametrize("name", ROUND)
def test_grid_in_space(name: str) -> None:
    phi, formula, p = ROUND[name]
    cell = np.stack(np.meshgrid(*[np.linspace(-1, 1, 9)] * p, indexing="ij"), -1).reshape(-1, p)
    rng = np.random.default_rng(1)
    for size, step in product([0.5, 2.0], [0.3, 1.5]):
        v = size * rng.normal(size=p)

        def objective(y: Array, v: Array = v, step: float = step) -> Array:
            return formula(y) + ((y - v) ** 2).sum(-1) / (2 * step)

        centre, width = np.zeros(p), 2 * np.abs(v).max()
        for _ in range(60):
            grid = centre + width * cell
            centre = grid[objective(grid).argmin()]
            width *= 0.7
        x = phi.prox(torch.from_numpy(v), step)
        np.testing.assert_allclose(phi.value(torch.from_numpy(grid)), formula(grid), rtol=1e-12)
        assert objective(x.numpy()) <= objective(centre) + 1e-12
        np.testing.assert_allclose(x, centre, atol=1e-5)


def test_total_variation_certificate_on_a_long_signal() -> None:
    """x is the prox exactly when u = cumsum(v - x) stays within step w, is at a border where x jumps, and ends at 0."""
    rng = torch.Generator().manual_seed(0)
    v = torch.randn(3, 5000, generator=rng, dtype=torch.float64).cumsum(-1)
    x = R.TotalVariation(0.5).prox(v, 4.0)
    u, jump = (v - x).cumsum(-1), x.diff(dim=-1)
    assert u[:, -1].abs().max() < 1e-9
    assert u.abs().max() < 2 + 1e-9
    assert (jump.abs() > 1e-9).sum() > 100
    assert torch.allclose(u[:, :-1][jump > 1e-9], torch.tensor(-2.0, dtype=torch.float64), atol=1e-9)
    assert torch.allclose(u[:, :-1][jump < -1e-9], torch.tensor(2.0, dtype=torch.float64), atol=1e-9)


NORMS: dict[str, tuple[Regularizer, Callable[[torch.Tensor], torch.Tensor]]] = {
    "LInf": (R.LInf(3.0), lambda g: g.abs().sum(-1) / 3),
    "L2": (R.L2(3.0), lambda g: g.norm(dim=-1) / 3),
    "GroupLasso": (R.GroupLasso(3.0, 4), lambda g: g.reshape(*g.shape[:-1], -1, 4).norm(dim=-1).amax(-1) / 3),
    "Nuclear": (R.Nuclear(3.0, (20, 30)), lambda g: torch.linalg.svdvals(g.reshape(-1, 20, 30))[:, 0] / 3),
    "Slope": (
        R.Slope(torch.linspace(3, 1, 600, dtype=torch.float64)),
        lambda g: (
            g.abs().sort(-1, descending=True).values.cumsum(-1) / torch.linspace(3, 1, 600, dtype=g.dtype).cumsum(-1)
        ).amax(-1),
    ),
}


@pytest.mark.parametrize("name", NORMS)
def test_dual_certificate_of_a_norm(name: str) -> None:
    """x = prox(v, s) exactly when g = (v - x) / s has dual norm at most 1 and <g, x> = phi(x)."""
    phi, dual = NORMS[name]
    v = 4 * torch.randn(5, 600, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = phi.prox(v, 1.3)
    g = (v - x) / 1.3
    assert dual(g).max() <= 1 + 1e-12
    torch.testing.assert_close((g * x).sum(-1), phi.value(x), rtol=1e-12, atol=1e-10)
    assert bool((x != 0).any())
