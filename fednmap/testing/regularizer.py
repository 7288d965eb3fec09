"""The contract every regularizer meets, checked by brute force."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fednmap.core import Regularizer

F64 = torch.float64
EPS = torch.finfo(F64).eps


def check_regularizer(
    phi: Regularizer,
    dim: int = 6,
    *,
    steps: Sequence[float] | None = None,
    points: Tensor | None = None,
    seed: int = 0,
) -> None:
    r"""Raise AssertionError, with the numbers, where phi breaks the contract of `fednmap.core.Regularizer`.

    dim: length of the vectors to try phi on; a small one, for a phi that fits any length.
    steps: prox steps to try; by default small, medium and large, for weakly convex phi up to 0.999 / rho.
    points: (m, dim) points where phi is finite, to compare the prox with; for a constraint whose set has no
    interior, such as a plane, where a search around the prox finds few points of the set by itself.

    The prox is compared with a search that uses only `value`: dense grids along every axis and through pairs of
    axes, random directions at all lengths, lines to the other points found. For a step s below
    $1 / \rho$ the objective F is strongly convex, so x is its minimiser exactly when every y has
    $F(y) \ge F(x) + (1/s - \rho) |y - x|^2 / 2$; both sides are compared. For infinite $\rho$ only $F(y) \ge F(x)$ is.
    Before that, rho is compared with the value alone, so that the prox is not blamed for a rho that is too small.

    >>> from fednmap.regularizers import L1
    >>> check_regularizer(L1(0.3))
    """
    with torch.device("cpu"):
        rng, convex = torch.Generator().manual_seed(seed), phi.rho < math.inf
        v = _vectors(dim, rng)
        if steps is None:
            limited = 0 < phi.rho < math.inf
            steps = [s / phi.rho for s in (0.05, 0.5, 0.9, 0.999)] if limited else [0.05, 1.0, 20.0]
        steps = [float(step) for step in steps]
        known = v if points is None else torch.cat([v, points.to(F64)])
        _refuses(phi, v)
        _shapes(phi, v, steps[0])
        if convex:
            _weakly_convex(phi, known, rng)
        for step in steps:
            _shapes(phi, v, step)
            _nan(phi, v, step)
            x, what = phi.prox(v, step), f"prox at step {step:g} is not the minimiser of phi(y) + |y - v|^2 / (2 step)"
            _compare(phi, phi.value, v, x, 1 / step, 1 / step - phi.rho, _candidates(v, x, points, rng), what)
            if convex:
                _lipschitz(phi, v, step, rng)
                _single_precision(phi, v, step)
        _zero_step(phi, v, points, rng)
        if convex:
            known = torch.cat([known, *(phi.prox(v, step) for step in steps)])
            _weakly_convex(phi, known, rng)
            _convex_domain(phi, known, rng)


def _vectors(dim: int, rng: torch.Generator) -> Tensor:
    """What to try: five orders of magnitude, zeros, ties, few nonzeros."""
    v = torch.randn(17, dim, generator=rng, dtype=F64) * torch.logspace(-2, 2, 17, dtype=F64)[:, None]
    sparse = v[::4] * (torch.rand(5, dim, generator=rng) < 0.4)
    ties = v[1::4].sign() * v[1::4, :1].abs()
    return torch.cat([v, sparse, ties, torch.zeros(1, dim, dtype=F64)])


def _require(ok: bool | Tensor, phi: Regularizer, what: str) -> None:
    if not bool(torch.as_tensor(ok).all()):
        raise AssertionError(f"{phi}: {what}")


def _row(x: Tensor) -> str:
    return "[" + ", ".join(f"{entry:.9g}" for entry in x.tolist()) + "]"


def _refuses(phi: Regularizer, v: Tensor) -> None:
    _require(phi.rho >= 0, phi, f"rho is {phi.rho}; weak convexity is a number >= 0")
    too_large = [factor / phi.rho for factor in (1 + 1e-9, 2.0)] if 0 < phi.rho < math.inf else []
    for step in [-1.0, math.nan, *too_large]:
        try:
            phi.prox(v, step)
        except ValueError:
            continue
        limit = f" although step * rho = {step * phi.rho:g} >= 1" if step > 0 else ""
        raise AssertionError(f"{phi}: prox took step = {step:g}{limit}; it must raise ValueError (see check_step)")


def _shapes(phi: Regularizer, v: Tensor, step: float) -> None:
    """One vector, a stack, a stack of stacks and a stack made by broadcasting agree; inputs stay as they are."""
    v, stacked = v[::3], len(v[::3]) // 2 * 2
    for dtype in (torch.float32, F64):
        u = v[:stacked].to(dtype)
        before = u.clone()
        x = phi.prox(u, step)
        value = phi.value(x)
        _require(torch.equal(u, before), phi, f"prox at step {step:g} changed its input")
        result = x.clone()
        phi.value(x)
        _require(torch.equal(x, result), phi, "value changed its input")
        _require(x.shape == u.shape, phi, f"prox maps shape {tuple(u.shape)} to {tuple(x.shape)}; it must keep it")
        _require(x.dtype == dtype, phi, f"prox maps {dtype} to {x.dtype}; it must keep the dtype")
        _require(value.dtype == dtype, phi, f"value of {dtype} is {value.dtype}; it must be a real number, like x")
        _require(value.shape == u.shape[:-1], phi, f"value of {tuple(u.shape)} has shape {tuple(value.shape)}")
        finite = f"value is {value[~value.isfinite()][:1].tolist()} at prox(v, {step:g}); it must be finite"
        _require(value.isfinite(), phi, finite)
        tight = 1e3 * torch.finfo(dtype).eps * _gain(phi, step) * _size(u, x)[:, None]
        others = {
            "a single vector": torch.stack([phi.prox(row, step) for row in u]),
            "a stack (a, b, p)": phi.prox(u.reshape(2, -1, u.shape[-1]), step).reshape(u.shape),
            "a strided stack": phi.prox(u.T.contiguous().T, step),
            "a step given as a 0-d tensor": phi.prox(u, torch.tensor(step, dtype=F64)),
        }
        for name, other in others.items():
            _require(other.dtype == dtype, phi, f"prox of {name} is {other.dtype} for {dtype}")
            apart = ((other - x).abs() > tight).any(-1)
            if phi.rho < math.inf and bool(apart.any()):
                i = int(apart.int().argmax())
                at = f"at v = {_row(u[i])}, step {step:g}, {_row(other[i])} and {_row(x[i])}"
                _require(False, phi, f"prox of {name} differs from prox of a stack (n, p): {at}")
        single = torch.stack([phi.value(row) for row in x])
        nested = phi.value(x.reshape(2, -1, x.shape[-1]))
        _require(nested.shape == (2, stacked // 2), phi, f"value of a stack (2, n, p) has shape {tuple(nested.shape)}")
        close = torch.allclose(single, value, rtol=1e-4) and torch.allclose(nested.flatten(), value, rtol=1e-4)
        _require(close, phi, "value of a single vector, of a stack (n, p) and of a stack (a, b, p) differ")


def _gain(phi: Regularizer, step: float) -> float:
    """The Lipschitz constant of the prox."""
    return 1 / (1 - step * phi.rho) if phi.rho < math.inf else 1.0


def _size(v: Tensor, x: Tensor) -> Tensor:
    """What rounding is relative to, for each row; never so small that float32 has no digits left."""
    return torch.maximum(v.abs(), x.abs()).amax(-1).clamp_min(1e-30)


def _nan(phi: Regularizer, v: Tensor, step: float) -> None:
    u = v[:2].clone()
    u[0, -1] = math.nan
    x = phi.prox(u, step)
    _require(bool(x[0].isnan().any()), phi, f"prox hides a NaN: v = {_row(u[0])} gives {_row(x[0])}")
    alone = phi.prox(u[1], step)
    near = 1e3 * EPS * _gain(phi, step) * _size(u[1], alone)
    reached = not bool(((x[1] - alone).abs() <= near).all()) if phi.rho < math.inf else bool(x[1].isnan().any())
    _require(not reached, phi, "a NaN in one row of a stack reaches another row")


def _zero_step(phi: Regularizer, v: Tensor, points: Tensor | None, rng: torch.Generator) -> None:
    """The limit of a vanishing step: v where phi is finite, the nearest such point elsewhere."""
    x = phi.prox(v, 0.0)

    def outside(y: Tensor) -> Tensor:
        return torch.where(phi.value(y).isfinite(), 0.0, math.inf).to(F64)

    _require(not bool(outside(x).any()), phi, "prox at step 0 leads to a point where phi is not finite")
    candidates = torch.cat([_candidates(v, x, points, rng), v[:, None]], 1)
    what = "prox at step 0 is not v itself, or for a constraint the projection of v"
    _compare(phi, outside, v, x, 1.0, 1.0, candidates, what)


def _candidates(v: Tensor, x: Tensor, points: Tensor | None, rng: torch.Generator) -> Tensor:
    """Points to compare each row x with, (rows, m, dim): lines through x, in many directions, near and far."""
    dim = x.shape[-1]
    axes = torch.eye(dim, dtype=F64)
    i, j = torch.triu_indices(dim, dim, 1)
    pairs = torch.cat([axes[i] + axes[j], axes[i] - axes[j]])
    anywhere = torch.randn(24, dim, generator=rng, dtype=F64)
    anywhere = anywhere / anywhere.norm(dim=-1, keepdim=True)
    reach = torch.maximum(x.abs(), v.abs()).amax(-1).clamp_min(1.0)[:, None, None, None]
    near = torch.logspace(-7, 0.5, 20, dtype=F64)
    dense = torch.linspace(-3, 3, 301, dtype=F64)

    def lines(directions: Tensor, lengths: Tensor) -> Tensor:
        return (x[:, None, None] + reach * directions[:, None] * lengths[:, None]).flatten(1, 2)

    known = torch.cat([x, *([] if points is None else [points.to(F64)]), torch.zeros(1, dim, dtype=F64)])
    toward = torch.logspace(-6, 0, 13, dtype=F64)[:, None]
    found = [
        lines(axes, dense),
        lines(torch.cat([axes, pairs, anywhere]), torch.cat([near, -near])),
        (x[:, None, None] + (known[:, None] - x[:, None, None]) * toward).flatten(1, 2),
        (x[:, None] + (v - x)[:, None] * torch.cat([toward, -toward])),
    ]
    # Two entries swapped, or one set to zero: where penalties of order and of support jump.
    for first, second, at_first, at_second in ((i, j, x[:, j], x[:, i]), (i, j, v[:, i], 0.0), (j, i, v[:, j], 0.0)):
        changed = x[:, None].repeat(1, len(i), 1)
        changed[:, torch.arange(len(i)), first] = at_first
        changed[:, torch.arange(len(i)), second] = at_second
        found.append(changed)
    return torch.cat([*found, x[:, None] * (1 - axes)], 1)


def _compare(
    phi: Regularizer,
    value: Callable[[Tensor], Tensor],
    v: Tensor,
    x: Tensor,
    inverse_step: float,
    curvature: float,
    candidates: Tensor,
    what: str,
) -> None:
    """F(y) >= F(x) + curvature |y - x|^2 / 2 for every candidate y, up to rounding of the terms that are added.

    The curvature is 0 where rho = inf.
    """
    curvature = curvature if phi.rho < math.inf else 0.0

    def objective(y: Tensor, v: Tensor) -> Tensor:
        return value(y) + inverse_step * (y - v).square().sum(-1) / 2

    best = objective(x, v)[:, None]
    found = objective(candidates, v[:, None])
    distance = (candidates - x[:, None]).square().sum(-1)
    size = candidates.square().sum(-1) + v.square().sum(-1)[:, None]
    rounding = 1e4 * EPS * (best.abs() + (inverse_step + abs(curvature)) * size)
    rounding = rounding + 100 * (_shaken(value, x, x)[:, None] + _shaken(value, candidates, candidates))
    missing = best + curvature * distance / 2 - found - rounding
    missing[found.isinf()] = -math.inf
    worst = missing.amax()
    if worst > 0 or bool(worst.isnan()):
        row, column = divmod(int(missing.argmax()), missing.shape[1])
        y = candidates[row, column]
        if not bool((best - found > rounding).any()):  # nothing is better than x: it only stands out less than expected
            what = f"{what}, or rho = {phi.rho:g} is too small"
        raise AssertionError(
            f"{phi}: {what}: at v = {_row(v[row])} prox gives x = {_row(x[row])} with objective "
            f"{float(best[row]):.12g}, but y = {_row(y)} has {float(found[row, column]):.12g}, where at least "
            f"{float(best[row] + curvature * distance[row, column] / 2):.12g} is expected"
        )


def _shaken(value: Callable[[Tensor], Tensor], x: Tensor, size: Tensor) -> Tensor:
    """How much the value changes if the coordinates are rounded, up and down in turn, relative to `size`."""
    signs = 1.0 - 2.0 * (torch.arange(x.shape[-1]) % 2)
    return (value(x + EPS * signs * size) - value(x)).abs().nan_to_num(0.0, posinf=0.0)  # 0 outside a set


def _lipschitz(phi: Regularizer, v: Tensor, step: float, rng: torch.Generator) -> None:
    """|prox(v) - prox(w)| <= |v - w| / (1 - step rho)."""
    gain = _gain(phi, step)
    for distance in (1e-4, 1e-2, 1.0):
        w = v + distance * torch.randn(v.shape, generator=rng, dtype=F64) * v.abs().amax(-1, keepdim=True)
        moved = (phi.prox(v, step) - phi.prox(w, step)).norm(dim=-1)
        allowed = gain * ((v - w).norm(dim=-1) * (1 + 1e-9) + 1e3 * EPS * (1 + v.norm(dim=-1)))
        i = int((moved - allowed).argmax())
        _require(
            moved[i] <= allowed[i],
            phi,
            f"prox at step {step:g} is steeper than 1/(1 - step rho) = {gain:g} allows: v = {_row(v[i])} and "
            f"w = {_row(w[i])} are {float((v - w)[i].norm()):.9g} apart, their proxes {float(moved[i]):.9g}",
        )


def _single_precision(phi: Regularizer, v: Tensor, step: float) -> None:
    """prox in float32 is prox in float64 up to rounding of v and of the step, as far as the prox magnifies it there."""
    u = v.float().double()
    x, exact = phi.prox(u.float(), step).double(), phi.prox(u, step)
    eps = torch.finfo(torch.float32).eps
    size = _size(u, exact)
    noise = 16 * eps * size[:, None] * torch.ones_like(u)
    alternating = noise * (1 - 2 * (torch.arange(u.shape[-1]) % 2))
    nearby = [phi.prox(u + shift, step) for shift in (noise, -noise, alternating, -alternating)]
    nearby.append(phi.prox(u, step * (1 - 16 * eps)))
    magnified = torch.stack([(near - exact).abs().amax(-1) for near in nearby]).amax(0)
    error, allowed = (x - exact).abs().amax(-1), 100 * eps * size + 8 * magnified
    i = int((error - allowed).argmax())
    _require(
        bool(error[i] <= allowed[i]),
        phi,
        f"prox at step {step:g} loses accuracy in float32: at v = {_row(u[i])} it gives {_row(x[i])}, "
        f"in float64 {_row(exact[i])}",
    )


def _weakly_convex(phi: Regularizer, x: Tensor, rng: torch.Generator) -> None:
    """phi((x + y) / 2) <= (phi(x) + phi(y)) / 2 + rho |x - y|^2 / 8, on pairs near and far; asks `value` alone."""
    for y in _partners(x, rng):
        middle = phi.value((x + y) / 2)
        chord = (phi.value(x) + phi.value(y)) / 2 + phi.rho * (x - y).square().sum(-1) / 8
        rounding = 1e3 * EPS * (chord.abs() + phi.rho * (x.square() + y.square()).sum(-1))
        rounding = rounding + 100 * _shaken(phi.value, (x + y) / 2, x.abs() + y.abs())
        over = torch.where(chord.isfinite() & middle.isfinite(), middle - chord - rounding, -math.inf)
        i = int(over.argmax())
        _require(
            bool(over[i] <= 0),
            phi,
            f"value is not weakly convex with rho = {phi.rho:g}, rho is too small: x = {_row(x[i])}, y = {_row(y[i])}: "
            f"at the middle {float(middle[i]):.12g}, more than the chord and rho |x - y|^2 / 8 give, "
            f"{float(chord[i]):.12g}",
        )


def _convex_domain(phi: Regularizer, x: Tensor, rng: torch.Generator) -> None:
    """The middle of two points where phi is finite is another, up to a rounding that the prox at step 0 takes back."""
    for y in _partners(x, rng):
        middle = (x + y) / 2
        between = phi.value(x).isfinite() & phi.value(y).isfinite() & ~phi.value(middle).isfinite()
        off = (phi.prox(middle, 0.0) - middle).norm(dim=-1) > 1e3 * EPS * (x.norm(dim=-1) + y.norm(dim=-1))
        i = int((between & off).to(F64).argmax())
        _require(
            not bool((between & off)[i]),
            phi,
            f"value is not weakly convex with rho = {phi.rho:g}: it is finite at x = {_row(x[i])} and "
            f"y = {_row(y[i])}, but not at their middle",
        )


def _partners(x: Tensor, rng: torch.Generator) -> list[Tensor]:
    """What to pair x with: a neighbour, another row, the opposite, and points along each axis."""
    size = x.abs().amax(-1, keepdim=True)
    near = x + 1e-2 * torch.randn(x.shape, generator=rng, dtype=F64) * size
    along = [
        x + length * size.clamp_min(1e-2) * axis
        for axis in torch.eye(x.shape[-1], dtype=F64)
        for length in (1e-2, 0.1, -0.1, 0.5)
    ]
    return [near, x[torch.randperm(len(x), generator=rng)], -x, *along]
