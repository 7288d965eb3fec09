"""The theorems' constants, measured on a problem.

They are measurements at points, not bounds over all of R^p: L and sigma^2 are the largest values seen, a lower
estimate of what the assumptions ask for. Measure at several points of a short run to come closer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fednmap.core import Problem, Regularizer, info_of
from fednmap.measure import hessian_norms, objective
from fednmap.names import InputError
from fednmap.theory.steps import at_least_one, positive

Points = Tensor | Sequence[Tensor]
"""One point (p,), or several."""

FRESH = 1_000_000  # rounds from here on give minibatches that no run of ordinary length has seen


@dataclass(frozen=True, eq=False)
class Smoothness:
    """The norm of every client's Hessian and of the Hessian of f, at the worst of the points.

    >>> Smoothness(torch.tensor([0.5, 2.0]), 1.25).largest
    2.0
    """

    clients: Tensor
    overall: float

    @property
    def largest(self) -> float:
        r"""$\max_i L_i$, the L of Assumption 2."""
        return float(self.clients.max())


def estimate_smoothness(problem: Problem, points: Points, *, iterations: int = 30, seed: int = 0) -> Smoothness:
    r"""Return the largest absolute eigenvalues of the Hessians of the $f_i$ and of f, by power iteration.

    An iteration is $v \leftarrow H v / |H v|$, with $H v = (\nabla f(x + e v) - \nabla f(x - e v)) / (2 e)$ and
    $e = \epsilon^{1/3} \max(1, |x|)$: two gradients and no second derivatives, for any Problem. Its exact client
    gradients are used, or, where it has none, those of the minibatch of round 0, step 0, on both sides of the
    difference. Power iteration approaches the eigenvalue from below; for a quadratic that is the only error.

    >>> from fednmap.problems import LeastSquares
    >>> A, b = torch.eye(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    >>> found = estimate_smoothness(LeastSquares([(A, b), (2 * A, b)]), torch.zeros(2, dtype=torch.float64))
    >>> [round(v, 6) for v in found.clients.tolist()], round(found.overall, 6)
    ([0.5, 2.0], 1.25)
    """
    at_least_one(iterations=iterations)
    everyone = exact(problem).oracle(torch.arange(problem.n, device="cpu"), 0)
    generator = torch.Generator("cpu").manual_seed(seed)
    v = torch.randn(problem.n + 1, problem.dim, generator=generator, dtype=torch.float64, device="cpu")
    each, overall = [], []
    for x in _points(points):
        each.append(hessian_norms(lambda u: everyone(u, 0), x, v[:-1].to(x), iterations))
        overall.append(hessian_norms(lambda u: problem.gradient(u[0])[None], x, v[-1:].to(x), iterations))
    return Smoothness(torch.stack(each).amax(0), float(torch.stack(overall).max()))


@dataclass(frozen=True, eq=False)
class Variance:
    r"""$E|g_i - \nabla f_i|^2$ of every client, at the worst of the points.

    >>> Variance(torch.tensor([1.0, 3.0])).mean
    2.0
    """

    clients: Tensor

    @property
    def largest(self) -> float:
        r"""$\max_i \sigma_i^2$, the $\sigma^2$ of Assumption 1."""
        return float(self.clients.max())

    @property
    def mean(self) -> float:
        r"""$\mean \sigma_i^2$, what averaging over the clients sees."""
        return float(self.clients.mean())


def estimate_variance(problem: Problem, points: Points, *, draws: int = 16) -> Variance:
    r"""Return the unbiased variance $\sum_k |g_{ik} - \bar g_i|^2 / (\text{draws} - 1)$ of each minibatch gradient.

    Fewer than two draws raise InputError.

    >>> from fednmap.problems import LeastSquares
    >>> data = [(torch.ones(2, 1), torch.tensor([-1.0, 1.0]))]
    >>> estimate_variance(LeastSquares(data), torch.zeros(1)).largest
    0.0
    >>> round(estimate_variance(LeastSquares(data, batch_size=1), torch.zeros(1), draws=2000).largest, 1)
    1.0
    """
    if draws < 2:
        raise InputError(f"draws is {draws}; a variance needs at least 2")
    return Variance(torch.stack([_moments(problem, x, draws)[1] for x in _points(points)]).amax(0))


def estimate_heterogeneity(problem: Problem, points: Points, *, draws: int = 16) -> float:
    r"""Return $\mean |\nabla f_i(x) - \nabla f(x)|^2$ at the worst point; clients weigh as they do in f.

    FedNMap's theory does not need it. $|\mean_k g_{ik} - \nabla f|^2$ exceeds $|\nabla f_i - \nabla f|^2$ by
    $\sigma_i^2 / \text{draws}$ on average, which is subtracted.

    >>> from fednmap.problems import LeastSquares
    >>> one = torch.ones(1, 1)
    >>> estimate_heterogeneity(LeastSquares([(one, one[0]), (one, -one[0])]), torch.zeros(1))
    1.0
    """
    found = []
    for x in _points(points):
        mean, variance = _moments(exact(problem), x, draws)
        found.append(_average(problem, (mean - problem.gradient(x)).square().sum(-1) - variance / draws))
    return max(0.0, float(torch.stack(found).max()))


def mean_gradient2(problem: Problem, x: Tensor, *, draws: int = 16) -> float:
    r"""Return $\mean |\nabla f_i(x)|^2$, the `gradients2` of `nonconvex` and `rounds_to`; clients weigh as in f.

    >>> from fednmap.problems import LeastSquares
    >>> mean_gradient2(LeastSquares([(torch.ones(1, 1), torch.ones(1))]), torch.zeros(1))
    1.0
    """
    mean, variance = _moments(exact(problem), x, draws)
    return max(0.0, float(_average(problem, mean.square().sum(-1) - variance / draws)))


class Gap(NamedTuple):
    r"""$\psi$ at a point and the lowest $\psi$ found from there."""

    start: float
    best: float
    lower_bound: float

    @property
    def found(self) -> float:
        r"""$\psi(x)$ minus the lowest $\psi$ found: $\Delta_\psi$ from below."""
        return self.start - self.best

    @property
    def at_most(self) -> float:
        r"""$\psi(x)$ minus the lower bound on $\psi$: $\Delta_\psi$ from above."""
        return self.start - self.lower_bound


def estimate_gap(
    problem: Problem, phi: Regularizer, x: Tensor, *, L: float, steps: int = 100, lower_bound: float = 0.0
) -> Gap:
    r"""Return $\Delta_\psi = \psi(x) - \inf \psi$, from both sides.

    From below by the best of `steps` proximal gradient steps $x \leftarrow \prox_{s \phi}(x - s \nabla f(x))$ with
    $s = \min(1/L, 1/(2 \rho))$. From above by `lower_bound`, below which $\psi$ never falls: 0 for a nonnegative loss
    and regularizer.

    >>> from fednmap.problems import LeastSquares
    >>> from fednmap.regularizers import Zero
    >>> one = torch.ones(1, 1)
    >>> estimate_gap(LeastSquares([(one, 2 * one[0])]), Zero(), torch.zeros(1), L=1.0)
    Gap(start=2.0, best=0.0, lower_bound=0.0)
    """
    positive(L=L)
    step = min(1 / L, 0.5 / phi.rho) if phi.rho > 0 else 1 / L
    start = best = float(objective(problem, phi, x))
    for _ in range(steps):
        x = phi.prox(x - step * problem.gradient(x), step)
        best = min(best, float(objective(problem, phi, x)))
    return Gap(start, best, lower_bound)


def exact(problem: Problem) -> Problem:
    """Return the same problem with exact client gradients where it declares how; another one as it is."""
    make = info_of(problem).exact
    return problem if make is None else make()


def _moments(problem: Problem, x: Tensor, draws: int) -> tuple[Tensor, Tensor]:
    """Mean gradient (n, p) and variance (n,) of every client over fresh minibatches (Welford's recursion)."""
    g = problem.oracle(torch.arange(problem.n, device="cpu"), FRESH)
    mean, square = x.new_zeros(problem.n, problem.dim), x.new_zeros(problem.n)
    for k in range(draws):
        value = g(x, k)
        change = value - mean
        mean = mean + change / (k + 1)
        square = square + (change * (value - mean)).sum(-1)
    return mean, square / max(1, draws - 1)


def _average(problem: Problem, values: Tensor) -> Tensor:
    """Over the clients, by their weights."""
    weights = info_of(problem).weights
    return values.mean() if weights is None else values @ weights.to(values)


def _points(points: Points) -> Sequence[Tensor]:
    if isinstance(points, Tensor):
        return points.reshape(-1, points.shape[-1]).unbind(0)
    return points
