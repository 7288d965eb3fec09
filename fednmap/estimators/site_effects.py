"""Models in which sites differ. What differs is minimised at its site; the server sees shared coefficients b alone:

    F_i(b) = min over a, d of  w_i f_i(b + d, a) + mu |d|_1,    grad F_i(b) = w_i grad f_i(b + d_i, a_i).

The gradient, at the minimising (a_i, d_i), is the only uplink, and no entry of it exceeds mu. F_i is convex and no
steeper than w_i f_i. With d = 0 ("intercepts") every site has its own intercept; with d ("sparse") coefficients
differ too, where the rows of a site say so. With "random" the server sees a common intercept c as well, and

    F_i(b, c) = min over a of  w_i f_i(b, a) + mu (a - c)^2 / 2,    grad F_i(b, c) = w_i grad f_i(b, a_i),

plus log(1 + h_i / mu) / (2 N), where h_i is the curvature of w_i f_i in a and N the number of rows. That is Laplace's
approximation of the marginal likelihood where a - c is normal with variance 1 / (N mu), over N. In a linear regression,
whose h_i is constant, the term is left out; mu is there the variance of the noise over N times that of a - c.

References: Danskin, The theory of max-min, 1966. Gross and Tibshirani, Data shared lasso, 2016. Breslow and Clayton,
Approximate inference in generalized linear mixed models, 1993 ("random").
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fednmap.estimators.family_problems import Linear
from fednmap.estimators.path_solver import EPS, HessianModel, Penalties
from fednmap.estimators.rows import Floats
from fednmap.names import InputError
from fednmap.problems import GLM
from fednmap.problems.families import Gaussian
from fednmap.report.data_table import DataTable

KINDS = ("none", "intercepts", "random", "sparse")
SHARE = 0.7  # mu over lam by default; no whole number is its inverse, so that b is unique
STEPS = 100  # Newton steps at a site, at most
CLOSE = 1e-12  # |F_nat| at a site, relative to what the site weighs and to the unit of f
STALLED, ROUNDING = 0.5, 1e-8  # |F_nat| over the one before, and its size, at which rounding forbids more
SHORTER = 0.5 ** np.arange(12)  # parts of a Newton step that are tried
LONGEST = 4.0  # the first Newton step of an intercept, at most; then twice as long, ...
RIDGE = 1e-11  # added to the diagonal of a site's Hessian, which may be singular, relative to its mean
ALIASED = 1e-11  # share of a column's square that varies within sites, below which intercepts determine the column


@dataclass(frozen=True, eq=False)
class SiteEffects:
    """The effects of each site, in units of the columns: its coefficients are coef_ + deviation.

    >>> from fednmap.estimators import FederatedLinearRegression
    >>> model = FederatedLinearRegression(site_effects="intercepts")
    >>> X, y, hospital = np.array([[0.0], [1.0], [0.0], [1.0]]), [1.0, 3.0, 5.0, 7.0], ["a", "a", "b", "b"]
    >>> model.fit(X, y, sites=hospital).site_effects_.intercept.round(3)
    array([1., 5.])
    """

    sites: tuple[str, ...]
    names: tuple[str, ...]
    intercept: Floats
    """(sites,); 0 in a Cox model, where the sites' baseline hazards differ."""
    deviation: Floats
    """(sites, columns)"""
    variance: float = math.nan
    """Of random intercepts."""

    def table(self, coef: Any = None) -> DataTable:
        """Return a row per column whose coefficient differs somewhere, a column per site, and `coef` as "shared"."""
        some = np.flatnonzero(self.deviation.any(0))
        shared = np.zeros(len(self.names)) if coef is None else np.asarray(coef, float).reshape(-1)
        rows = [[self.names[j], float(shared[j]), *(shared[j] + self.deviation[:, j]).tolist()] for j in some]
        if self.intercept.any():
            rows.append(["(intercept)", None, *self.intercept.tolist()])
        return DataTable(["name", "shared", *self.sites], rows)

    def added(self, X: Any, labels: Any, intercept: Any) -> Floats:
        """Return what the site of each row adds to the shared model's score with this intercept; 0 for a new site."""
        found = np.zeros(X.shape[0])
        for k, name in enumerate(self.sites):
            mine = labels == name
            found[mine] = X[mine] @ self.deviation[k] + self.intercept[k] - intercept
        return found


class PartialMinimum:
    """The sum of the sites' F_i, as a problem of the shared coefficients, and of c if intercepts are random.

    weights: w_i; mu: None where intercepts alone differ; unit: what tolerances are relative to; ridge: the mu of random
    intercepts; rows: their N.
    """

    def __init__(
        self,
        problem: Linear,
        names: Any,
        weights: Floats,
        mu: float | None,
        unit: float,
        *,
        ridge: float = 0.0,
        rows: float = 1.0,
    ) -> None:
        self.problem, self.n, self.mu, self.unit = problem, problem.n, mu, unit
        self.ridge, self.rows, self.random = ridge, rows, ridge > 0
        self.weights, self._sites = weights, [problem.alone(i) for i in range(problem.n)]
        self.columns = problem.data.x.shape[1]
        self._last: dict[tuple[int, int], tuple[Floats, Floats]] = {}  # b and (d, a), by site and place among points
        self._hessians: dict[int, Floats] = {}
        self._traces: dict[int, float] = {}  # of a site's Hessian at the model without columns
        self._rows: dict[int, Any] = {}  # of a site, to compute with
        self.own = problem.dim - self.columns
        """Intercepts per site: 1, or 0 in a Cox model."""
        self.dim = self.columns + self.random
        gaussian = isinstance(problem, GLM) and isinstance(problem.family, Gaussian)
        self._laplace = self.random and not gaussian
        self._first = [np.zeros(problem.dim) for _ in self._sites]  # (d, a) of the models without columns
        if self.random:
            self._first = [problem.start.numpy().copy() for _ in self._sites]
        elif isinstance(problem, GLM) and self.own:
            for name, site, first in zip(names, self._sites, self._first, strict=True):
                assert isinstance(site, GLM)
                y = site.data.y.double().numpy()
                try:
                    problem.family.check(y[site._shares.numpy() > 0], lambda row: "")
                except InputError as error:
                    raise InputError(
                        f"site {str(name)!r}: {error}; its own intercept would be infinite and the site would say "
                        "nothing about coefficients: leave it out, or merge it with another"
                    ) from None
                share = site._shares.numpy()
                first[self.columns :] = problem.family.first(y, share / share.sum())

    def effects(self, b: Tensor) -> tuple[Floats, Floats]:
        """d_i (n, p) and a_i (n,), 0 where there is no intercept, on the scale of the problem's columns."""
        if self.mu is None:
            found = np.stack([self._intercepts(i, b[None])[0].numpy() for i in range(self.n)])
        else:
            found = np.stack([self._minimiser(i, b.numpy(), 0) for i in range(self.n)])
        d = found[:, : self.columns]
        return d, found[:, -1] if self.own else np.zeros(self.n)

    def losses(self, points: Tensor) -> Tensor:
        total = torch.zeros(len(points), dtype=torch.float64, device="cpu")
        for i, (inner, size) in enumerate(self.inner(points)):
            total += self.weights[i] * self._sites[i].losses(inner) + size
            if self._laplace:
                total += self._spread(i, inner)[0]
        return total

    def gradients(self, points: Tensor) -> Tensor:
        """Of F at several points (k, p)."""
        return sum(self.site_gradients(points), start=torch.zeros_like(points))

    def site_gradients(self, points: Tensor) -> list[Tensor]:
        """Of each F_i at several points (k, p): what the sites send."""
        inner = self.inner(points)
        each = zip(self.weights, self._sites, inner, strict=True)
        found = [w * site.gradients(x)[:, : self.dim] for w, site, (x, _) in each]
        for i, (x, _) in enumerate(inner if self.random else ()):
            if self.ridge < self.weights[i]:  # the same by the optimality of a, with less rounding
                found[i][:, -1] = self.ridge * (points[:, -1] - x[:, -1])
        if self._laplace:
            return [g + self._spread(i, x)[1] for i, (g, (x, _)) in enumerate(zip(found, inner, strict=True))]
        return found

    def _spread(self, i: int, inner: Tensor) -> tuple[Tensor, Tensor]:
        """log(1 + h_i / mu) / (2 N) at points whose (b, a_i) are `inner`, and its gradient by (b, c)."""
        site, p = self._sites[i], self.columns
        assert isinstance(site, GLM)
        design, y, share = self._rows[i]
        eta = (design.times_each(inner[:, :p]) + inner[:, p]).requires_grad_()
        with torch.enable_grad():
            curve = site.family.curvature(eta, y.unsqueeze(-1).expand(eta.shape))
            third = torch.autograd.grad(curve.sum(), eta)[0]
        parts = [float(self.weights[i]) * share.unsqueeze(-1) * part.detach() for part in (curve, third)]
        by_b, by_a = zip(*((design.transposed_each(part), part.sum(0)[:, None]) for part in parts), strict=True)
        steep = by_a[0] + self.ridge
        moves = torch.cat([-by_b[0], torch.full_like(steep, self.ridge)], 1) / steep  # of a with (b, c)
        slope = torch.cat([by_b[1], torch.zeros_like(steep)], 1) + by_a[1] * moves
        return torch.log1p(by_a[0] / self.ridge)[:, 0] / (2 * self.rows), slope / steep / (2 * self.rows)

    def loss(self, x: Tensor) -> Tensor:
        return self.losses(x[None])[0]

    def gradient(self, x: Tensor) -> Tensor:
        return self.gradients(x[None])[0]

    def client_losses(self, x: Tensor) -> Tensor:
        """f_i of every site under its own model."""
        each = zip(self._sites, self.inner(x[None]), strict=True)
        return torch.stack([site.losses(inner)[0] for site, (inner, _) in each])

    def smoothness(self) -> float:
        return self.problem.smoothness()

    def hessian(self, x: Tensor) -> Tensor:
        """Of F if intercepts alone differ: what the sites' intercepts leave of each Hessian (Schur complements)."""
        return identified(*self.projected("hessian", x))

    def outer(self, x: Tensor, copies: float | None) -> Tensor:
        """The sum over rows of squares of their gradients, less what intercepts explain; see `GLM.outer`."""
        return identified(*self.projected("outer", x, copies))

    def projected(self, what: str, x: Tensor, copies: float | None = 1.0) -> tuple[Tensor, Tensor]:
        """The sum over sites of what intercepts leave of a matrix, "hessian" or "outer", and its diagonal before."""
        p, d, power = self.columns, self.dim, 2 if copies is None else 1
        total, whole = torch.zeros(d, d, dtype=x.dtype, device="cpu"), torch.zeros(d, dtype=x.dtype, device="cpu")
        for w, site, (inner, _) in zip(self.weights, self._sites, self.inner(x[None]), strict=True):
            hessian = w * site.hessian(inner[0])
            found = hessian
            if what == "outer":
                assert isinstance(site, GLM)
                found = w**power * site.outer(inner[0], copies)
            whole += found.diagonal()[:d]
            if self.own:  # out: how (b, a) changes with x
                out = torch.eye(p + 1, d, dtype=x.dtype, device="cpu")
                out[p, p:] = self.ridge
                out[p, :p] = -hessian[p, :p]
                out[p] /= hessian[p, p] + self.ridge
                found = out.mT @ found @ out
                if self.random:
                    apart = out[p].clone()
                    apart[p] -= 1
                    found += self.ridge * torch.outer(apart, apart)
            total += found
        return total, whole

    def inner(self, points: Tensor) -> list[tuple[Tensor, Tensor]]:
        """For each site (b + d_i, a_i) at every point, and mu |d_i|_1, or mu (a_i - c)^2 / 2."""
        found = []
        shared = points[:, : self.columns]
        for i in range(self.n):
            if self.mu is None:
                u = self._intercepts(i, points)
            else:
                u = torch.from_numpy(np.stack([self._minimiser(i, b, k) for k, b in enumerate(points.numpy())]))
            d, a = u[:, : self.columns], u[:, self.columns :]
            size = (self.mu or 0.0) * d.abs().sum(1)
            if self.random:
                size = self.ridge / 2 * (a - points[:, self.columns :]).square().sum(1)
            found.append((torch.cat([shared + d, a], 1), size))
        return found

    def _intercepts(self, i: int, points: Tensor) -> Tensor:
        """The best intercept at each point, by Newton steps within a bracket; after zeros for d."""
        site = self._sites[i]
        assert isinstance(site, GLM)
        if i not in self._rows:
            self._rows[i] = site._prepared(slice(0, len(site.data.x)), site._shares, points.dtype)
        design, y, share = self._rows[i]
        pull = self.ridge / float(self.weights[i])
        centre = points[:, self.columns] if self.random else 0.0
        points = points[:, : self.columns]
        eta, weight = design.times_each(points), share.unsqueeze(-1)
        y = y.unsqueeze(-1).expand(eta.shape)
        a = torch.full((len(points),), float(self._first[i][-1]), dtype=points.dtype, device="cpu")
        low, high = torch.full_like(a, -torch.inf), torch.full_like(a, torch.inf)
        for k in range(STEPS):
            slope = (weight * site.family.slope(eta + a, y)).sum(0) + pull * (a - centre)
            if bool((slope.abs() <= CLOSE * (self.unit + pull)).all()):
                break
            low, high = torch.where(slope < 0, a, low), torch.where(slope > 0, a, high)
            curve = (weight * site.family.curvature(eta + a, y)).sum(0).clamp_min(1e-300) + pull
            limit = torch.inf if isinstance(site.family, Gaussian) else LONGEST * 2.0**k
            step = a - torch.where(curve < torch.inf, slope / curve, slope.sign() * limit).clamp(-limit, limit)
            stays = (slope == 0) | (step == a)  # to rounding; an end of the bracket may be infinite
            a = torch.where((step > low) & (step < high), step, torch.where(stays, a, (low + high) / 2))
        if math.isfinite(float(a[0])):
            self._first[i][-1] = float(a[0])
        return torch.cat([torch.zeros_like(points), a[:, None]], 1)

    def _minimiser(self, i: int, b: Floats, k: int) -> Floats:
        """(d, a) of site i at b, by Newton steps with the l1 penalty; NaN if they do not reach the minimum.

        A coefficient b + d that differed at the last b of place k stays as it was, one that did not differ follows b.
        If the loss is smaller there, all stay as they were. The last resort is the model without columns.
        """
        p = self.columns
        last, u = self._last.get((i, k)) or self._last.get((i, max(k - 1, 0))) or (np.zeros(p), self._first[i])
        stay = np.append(last + u[:p] - b, u[p:])
        follow = np.append(np.where(u[:p] * stay[:p] > 0, stay[:p], 0.0), u[p:])
        starts = sorted((follow, stay), key=lambda u: np.nan_to_num(self._site_loss(i, b, u)[0], nan=np.inf))
        for start in (*starts, np.append(-b, self._first[i][p:])):
            found, solved = self._newton(i, b, start)
            if solved:
                self._last[i, k] = b.copy(), found
                return found
        return np.full(len(u), np.nan)

    def _site_loss(self, i: int, b: Floats, u: Floats) -> tuple[float, Floats, Tensor]:
        """w_i f_i(b + d, a) + mu |d|_1 at u = (d, a), the gradient of the first term, and the point (b + d, a)."""
        p, w = self.columns, float(self.weights[i])
        x = torch.from_numpy(np.append(b + u[:p], u[p:]))
        loss, gradient = self._sites[i].value_and_gradient(x)
        return w * float(loss) + (self.mu or 0.0) * float(np.abs(u[:p]).sum()), w * gradient.numpy(), x

    def _newton(self, i: int, b: Floats, u: Floats) -> tuple[Floats, bool]:
        """The minimiser from u, and whether it is one. The Hessian is made steeper where shorter steps do not help."""
        p, mu = self.columns, self.mu or 0.0
        phi, unit = Penalties(np.full((1, 1), mu), np.zeros((1, 1)), p), float(self.weights[i]) * self.unit
        value, g, x = self._site_loss(i, b, u)
        size, ridge = np.inf, RIDGE
        for _ in range(STEPS):
            if not np.isfinite(value):
                return u, False
            D, gamma = self._curvature(i, x, ridge)
            before, size = size, float(np.abs(phi.residuals(u[None], g[None], gamma)).max())
            if EPS * np.abs(u).max() > ROUNDING * unit * gamma:
                return u, False  # too far out for F_nat to be more than rounding
            if size <= CLOSE * unit or STALLED * before < size <= ROUNDING * unit:
                return u, True
            step = HessianModel(D, True).next_points(u[None], g[None], phi, np.array([1e-3 * size]))[0] - u
            for part in SHORTER:
                after = self._site_loss(i, b, u + part * step)
                if after[0] <= value + 1e-14 * abs(value):
                    u, (value, g, x), ridge = u + part * step, after, max(RIDGE, ridge / 10)
                    break
            else:
                ridge, size = 1e3 * ridge, np.inf
        return u, size <= ROUNDING * unit

    def _curvature(self, i: int, x: Tensor, ridge: float) -> tuple[Floats, float]:
        """w_i times the Hessian of f_i at x, with a ridge; and gamma of F_nat, one over the trace without columns."""
        least = 1e-12 * float(self.weights[i])
        if i not in self._traces:
            self._traces[i] = max(float(self._hessian(i, torch.from_numpy(self._first[i])).trace()), least)
        found = self._hessian(i, x)
        return found + ridge * max(found.trace(), least) / len(found) * np.eye(len(found)), 1 / self._traces[i]

    def _hessian(self, i: int, x: Tensor) -> Floats:
        """w_i times that of f_i; one of a linear regression is kept."""
        found = self._hessians.get(i)
        if found is None:
            found = float(self.weights[i]) * self._sites[i].hessian(x).numpy()
            if isinstance(self.problem, GLM) and isinstance(self.problem.family, Gaussian):
                self._hessians[i] = found
        return found


def identified(matrix: Tensor, whole: Tensor) -> Tensor:
    """A matrix without columns that the sites' intercepts determine; whole: its diagonal before they left it."""
    inside = (matrix.diagonal() > ALIASED * whole).to(matrix)
    return matrix * inside * inside[:, None]
