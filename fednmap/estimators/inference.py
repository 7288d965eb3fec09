"""Standard errors and confidence intervals: from the sum of the sites' Hessians, or from fits to sites drawn again."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import linalg, stats
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted

from fednmap.estimators.base import Federated, check_level, infinite_words, is_whole, warn_unconverged
from fednmap.estimators.engine import MOVING, moving
from fednmap.estimators.family_problems import RATIOS, threshold_names
from fednmap.estimators.penalties import penalty_name
from fednmap.estimators.prepare import Prepared
from fednmap.estimators.rows import Floats, Rows
from fednmap.names import InputError, choose
from fednmap.report.data_table import DataTable

COV_TYPES = ("nonrobust", "HC0", "cluster")
ALIASED = 1e-11  # share of a column's square that those before it leave (weighted as at first), as in R's glm
SINGULAR = 1e-13  # least eigenvalue of a Hessian with ones on its diagonal
STEPS = 25  # Newton steps at most
CLOSE = 1e-16  # decrement times rows at which Newton steps end: within 1e-8 standard errors of the maximum
VANISHED = 1e-10  # curvature along a step over that without columns, below which estimates are infinite
ROUNDING = 1e-14  # relative change of f that is rounding
SHORTEST = 1e-9  # least part of a Newton step
CERTAIN = 1e-6  # loss over that without columns, below which classes are completely separated
FEWEST_SITES = 3  # of which samples can be drawn
NODEWISE_SWEEPS = 2000  # over all columns, at most
NODEWISE_CLOSE = 1e-7  # change of a sweep at which the nodewise regressions end


@dataclass(frozen=True, eq=False)
class Inference:
    """Estimates and standard errors in units of the columns, the intercept last; `inference()` returns it.

    estimate: the maximum-likelihood estimates of the unpenalised model with all columns, also after a penalised fit.
              An aliased column, a linear combination of those before it, has NaN (NA in R), and the others are those of
              the model without it. An infinite estimate is +-inf, with NaN for its error, interval and p-value.
              With three classes or more there is one coefficient for every column and class, those of a column sum to
              0 over classes, and names are "column [class]"; a contrast of two classes is a difference of two.
    """

    names: tuple[str, ...]
    estimate: Floats
    error: Floats
    low: Floats
    high: Floats
    p_value: Floats
    covariance: Floats
    """Of the estimates, for tests of several and for differences."""
    family: str = ""
    level: float = 0.95
    """Of the intervals."""
    cov_type: str = "nonrobust"
    rows: float = math.nan
    """Rows, or the sum of weights that count equal rows."""
    sites: int = 1
    parameters: int = 0
    """Estimated coefficients, with the sites' intercepts."""
    log_likelihood: float = math.nan
    """At the estimates, partial in a Cox model; NaN where the loss is no likelihood or weights are relative."""

    def table(self) -> DataTable:
        """Return coefficient, standard error, z (t with an estimated variance), p, and the intervals."""
        z = np.divide(self.estimate, self.error, out=np.full_like(self.error, np.nan), where=self.error > 0)
        found: dict[str, Any] = {"name": self.names, "coefficient": self.estimate, "standard error": self.error}
        letter = "t" if self.family in ("gaussian", "gamma") and self.cov_type == "nonrobust" else "z"
        found |= {letter: z, "p": self.p_value, "low": self.low, "high": self.high}
        if ratio := RATIOS.get(self.family):
            with np.errstate(over="ignore"):
                ends = {"": self.estimate, " low": self.low, " high": self.high}
                found |= {ratio + end: np.exp(value) for end, value in ends.items()}
        return DataTable.of_columns(found)

    def to_frame(self) -> Any:
        """Return the table as a polars frame; `.to_pandas()` makes one of pandas."""
        return self.table().frame()

    def to_csv(self) -> str:
        """Return the table as CSV, with all digits."""
        return self.table().csv()

    def to_markdown(self) -> str:
        """Return the table as Markdown, with four digits."""
        return self.table().markdown()

    def to_latex(self) -> str:
        """Return the table as a LaTeX tabular, with four digits."""
        return self.table().latex()

    def summary(self) -> str:
        """Return the table as text, laid out as statsmodels prints it.

        >>> import numpy as np
        >>> from fednmap.estimators import FederatedLinearRegression
        >>> X, y, sites = np.arange(6.0)[:, None], [1.0, 3.1, 4.9, 7.0, 9.2, 10.8], [0, 0, 0, 1, 1, 1]
        >>> text = FederatedLinearRegression().fit(X, y, sites).inference(X, y, sites).summary()
        >>> print(text.splitlines()[7])
        x0                1.983    0.03681     53.865      0.000      1.881      2.085
        """
        table, half = self.table(), (1 - self.level) / 2
        letter, ratio = table.head[3], RATIOS.get(self.family)
        ends = [f"[{half:.4g}", f"{1 - half:.4g}]"]
        head = ["coef", "std err", letter, f"P>|{letter}|", *ends, *([ratio, *ends] if ratio else [])]
        width = max(12, *map(len, self.names))
        wide = [max(11, len(name) + 2) for name in head]
        top = " " * width + "".join(f"{name:>{w}}" for name, w in zip(head, wide, strict=True))
        digits = [".3f" if k in (2, 3) else ".4g" for k in range(len(head))]
        cells = [[f"{v:>{w}{d}}" for v, w, d in zip(row[1:], wide, digits, strict=True)] for row in table.rows]
        lines = [f"{name:<{width}}" + "".join(row) for name, row in zip(self.names, cells, strict=True)]
        facts = {"Family": self.family, "Rows": f"{self.rows:g}", "Sites": str(self.sites), "Covariance": self.cov_type}
        if math.isfinite(self.log_likelihood):
            facts |= {"Log-likelihood": f"{self.log_likelihood:.6g}"}
            facts |= {"AIC": f"{2 * self.parameters - 2 * self.log_likelihood:.6g}"}
        pairs, long = [f"{name + ':':<16}{value}" for name, value in facts.items()], len(top)
        above = [f"{a:<{long // 2}}{b}".rstrip() for a, b in zip(pairs[::2], [*pairs[1::2], ""], strict=False)]
        return "\n".join(["=" * long, *above, "=" * long, top, "-" * long, *lines, "=" * long])


@dataclass(frozen=True, eq=False)
class Bootstrap:
    """Coefficients of fits to sites drawn with replacement, in units of the columns; `bootstrap()` returns it."""

    names: tuple[str, ...]
    estimate: Floats
    """Of the fit to all sites."""
    error: Floats
    low: Floats
    high: Floats
    """Percentiles of the draws."""
    draws: Floats
    """(times, coefficients)"""
    failed: int
    """Draws that could not be fitted, such as those that lack a class; they are left out."""


def inference(
    self: Federated,
    X: Any,
    y: Any = None,
    sites: Any = None,
    sample_weight: Any = None,
    *,
    level: float = 0.95,
    cov_type: str | None = None,
) -> Inference:
    """Return Wald intervals of the unpenalised model with all columns, by Newton steps from the fitted one.

    X, y:     the rows of the fit.
    cov_type: None chooses as below; "nonrobust", from the likelihood; "HC0", the sandwich of the rows' gradients;
              "cluster", that of the sites' gradients, for rows of a site that are dependent (without a correction for
              few sites, as in R's coxph).

    Every site sends its gradient and its Hessian, p^2 numbers, at each step: two steps after an unpenalised fit, about
    six after a penalised one. Estimates and intervals do not depend on the penalty, nor on the coefficients that it set
    to 0, so they need no correction for selection; a refit of the selected columns alone would ignore the selection.
    Wald intervals rely on many rows per column: with p / n above about 0.1, logistic estimates are biased away from 0.

    Whole-number weights count equal rows (2 is two of them), so that larger ones make errors smaller. Others are
    relative, and so are those of weights="sites": errors are then the sandwich's, $H^{-1} J H^{-1}$ with $J$ the sum of
    squares of the rows' gradients, which every site sends too. So are those of Huber's regression, whose loss is no
    likelihood.

    Warns of aliased columns and of infinite estimates. Raises InputError if there are no more rows than coefficients.

    References: Huber, The behavior of maximum likelihood estimates under nonstandard conditions, 1967. Sur and Candes,
    A modern maximum-likelihood theory for high-dimensional logistic regression, PNAS 2019. On selection: Berk et al.,
    Valid post-selection inference, Annals of Statistics 2013.
    """
    check_level(level)
    estimator, rows = _rows_of_the_fit(self, X, y, sites, sample_weight)
    if estimator.site_effects == "sparse":
        raise InputError(
            "expected site_effects 'none' or 'intercepts' for standard errors, got 'sparse'; the sites' deviations are "
            "penalised, and heterogeneity() tests them"
        )
    if estimator.bounds is not None:
        raise InputError("expected no bounds for standard errors, got some: estimates at a bound are not normal")
    prepared = estimator._prepare(rows)
    return wald(estimator, prepared, rows, fitted_point(self, prepared), level, cov_type)


def _rows_of_the_fit(fitted: Federated, *given: Any) -> tuple[Federated, Rows]:
    """A copy of a fitted estimator and the rows of its fit; rows with other columns or classes are refused."""
    check_is_fitted(fitted)
    estimator, rows = fitted._reading(*given)
    if estimator._names() != fitted._names():
        raise InputError("these rows have other columns than those of the fit; give the rows of the fit")
    if not np.array_equal(getattr(fitted, "classes_", 0), getattr(estimator, "classes_", 0)):
        raise InputError("these rows have other classes than those of the fit; give the rows of the fit")
    return estimator, rows


def fitted_point(fitted: Federated, prepared: Prepared) -> Floats:
    """The vector of `prepared` that a fitted estimator is."""
    coef, intercept = np.atleast_2d(fitted.coef_), np.atleast_1d(np.asarray(fitted.intercept_, float))
    coef, intercept = prepared.scaling.standard(coef, intercept)
    intercept = intercept / prepared.level_unit
    constants = fitted.constants_ if prepared.constants else []
    return np.concatenate([coef.flatten(), intercept if prepared.intercept else [], constants])


def wald(
    estimator: Federated, prepared: Prepared, rows: Rows, point: Floats, level: float, cov_type: str | None = None
) -> Inference:
    """Compute what `inference` says, by Newton steps from `point`."""
    if cov_type is not None:
        choose("cov_type", cov_type, dict.fromkeys(COV_TYPES))
    counted = rows.counted and (estimator.weights == "samples" or len(rows.sites) == 1)
    by_rows = not counted or not prepared.family.likelihood
    cov_type = cov_type or ("HC0" if by_rows else "nonrobust")
    if cov_type == "nonrobust" and by_rows:
        raise InputError(
            "expected cov_type 'HC0' or 'cluster', got 'nonrobust': this loss or weight is no likelihood's"
        )
    if cov_type != "nonrobust" and estimator.site_effects == "random":
        raise InputError(
            f"expected cov_type 'nonrobust' with site_effects='random', and weights that count rows, got {cov_type}"
        )
    if cov_type == "cluster" and len(rows.sites) < 2:
        raise InputError("expected at least two sites for cov_type='cluster', got one")
    if cov_type == "HC0" and prepared.family.name == "cox":
        raise InputError(
            "a Cox model has standard errors for weights='samples' and weights that count equal rows (whole numbers) "
            "only"
        )
    n = prepared.size
    first = prepared.hessian(prepared.start).numpy()
    kept, x = _identified(prepared, first, point)
    basis = _basis(prepared, kept)
    parameters = basis.shape[1] + prepared.own_intercepts
    if len(rows.y) <= parameters:
        raise InputError(
            f"expected more rows than coefficients, got {len(rows.y)} rows and {parameters} coefficients; leave "
            "columns out"
        )
    unknown = np.zeros((prepared.outputs, prepared.columns + 1))  # added to the estimates, the intercepts last
    aliased = np.setdiff1d(np.arange(prepared.columns), kept)
    unknown[:, aliased] = np.nan
    if len(aliased):
        given = ", ".join(repr(estimator._names()[j]) for j in aliased[:3]) + (", ..." if len(aliased) > 3 else "")
        warnings.warn(
            f"expected linearly independent columns, got {given} determined by the columns before, with NaN for "
            f"estimates and errors; leave {'it' if len(aliased) == 1 else 'them'} out",
            UserWarning,
            stacklevel=3,
        )
    x = basis @ (basis.T @ x)  # of classes, what is common to all says nothing
    found = _newton(prepared, basis, torch.from_numpy(x), first, n)
    if found.step is not None:
        infinite, marks = _infinite(prepared, found.x, torch.from_numpy(found.step))
        warnings.warn(infinite_words(estimator._names(), infinite), ConvergenceWarning, stacklevel=3)
        unknown += marks
        basis = _basis(prepared, np.setdiff1d(kept, infinite))
    hessian = prepared.information(found.x) if cov_type == "nonrobust" else prepared.hessian(found.x)
    inverse = _inverse(basis.T @ hessian.numpy() @ basis)
    if inverse is None:
        raise InputError(
            f"expected a Hessian that can be inverted, got a singular one: {basis.shape[1]} coefficients, "
            f"{len(rows.y)} rows; leave columns out"
        )
    distribution: Any = stats.norm
    loss = prepared.loss(torch.from_numpy(found.estimate))
    if cov_type == "HC0":
        copies = n if counted and prepared.family.name != "binomial" else None
        small = inverse @ (basis.T @ prepared.outer(found.x, copies).numpy() @ basis) @ inverse
    elif cov_type == "cluster":
        each = prepared.site_gradients(found.x) @ basis @ inverse
        small = each.T @ each
    else:
        left = max(n - len(inverse) - prepared.own_intercepts, 1)
        if prepared.family.dispersed:
            distribution = stats.t(left)
        small = prepared.noise(torch.from_numpy(found.estimate)) * inverse / (left if prepared.family.dispersed else n)
    # on the scale of the given columns, a linear map of the estimates; constants are left out
    p, outputs, factor = prepared.columns, prepared.outputs, prepared.scaling.factor
    back = np.zeros((outputs * (p + prepared.intercept), len(found.estimate)))
    back[: outputs * p, : outputs * p] = np.kron(np.eye(outputs), np.diag(factor))
    if prepared.intercept:
        back[outputs * p :, : outputs * p] = np.kron(np.eye(outputs), -factor * prepared.scaling.shift)
        back[outputs * p :, outputs * p : outputs * (p + 1)] = prepared.level_unit * np.eye(outputs)
    marks = np.concatenate([unknown[:, :-1].flatten(), unknown[:, -1] if prepared.intercept else []])
    names = coefficient_names(estimator, prepared.intercept)
    if prepared.family.name == "ordinal":  # thresholds in place of the intercept
        steps = np.tril(np.ones((prepared.constants + 1, prepared.constants)), -1)
        cuts = np.column_stack([np.tile(-back[-1, : p + 1], (len(steps), 1)), steps])
        back, marks = np.vstack([back[:-1], cuts]), np.concatenate([marks[:-1], np.tile(-marks[-1], len(steps))])
        names = (*names[:-1], *threshold_names(estimator.classes_))
    estimate, covariance = back @ found.estimate + marks, back @ (basis @ small @ basis.T) @ back.T
    covariance[marks != 0], covariance[:, marks != 0] = np.nan, np.nan
    error = np.sqrt(np.clip(np.diag(covariance), 0, None))
    reach = distribution.ppf((1 + level) / 2) * error
    ratio = np.divide(np.abs(estimate), error, out=np.zeros_like(error), where=error > 0)
    p_value = np.where(error > 0, 2 * distribution.sf(ratio), np.nan)
    ends, name = (estimate - reach, estimate + reach), prepared.family.name
    likelihood, count = math.nan, len(rows.sites)
    if counted and prepared.family.likelihood and estimator.site_effects != "random":
        constant = prepared.family.left_out(rows.y, rows.weight) if rows.remote is None else rows.remote.left_out()
        likelihood = -(float(prepared.family.minus_two_log(np.array(loss), n)) + constant) / 2
    found_ends = (names, estimate, error, *ends, p_value, covariance)
    return Inference(*found_ends, name, level, cov_type, n, count, parameters, likelihood)


def _basis(prepared: Prepared, kept: Any) -> Floats:
    """An orthonormal basis of what is estimated: these columns, and with several outputs a sum of 0 of each."""
    outputs = prepared.outputs
    across = linalg.null_space(np.ones((1, outputs))) if outputs > 1 else np.ones((1, 1))
    parts = [np.kron(across, np.eye(prepared.columns)[:, kept])]
    if prepared.intercept:
        parts.append(across)
    if prepared.constants:
        parts.append(np.eye(prepared.constants))
    found: Floats = linalg.block_diag(*parts)
    return found


def _identified(prepared: Prepared, first: Floats, x: Floats) -> tuple[Any, Floats]:
    """The columns that do not depend on the intercept and those before them, and the same model in these alone.

    By a Cholesky factorisation of `first`, the Hessian of the model without columns: there all rows have the same
    curvature, and one output stands for all.
    """
    p, outputs = prepared.columns, prepared.outputs
    places = np.array([outputs * p, *range(p)] if prepared.intercept else range(p))
    gram = first[np.ix_(places, places)]
    scale = np.sqrt(np.where(gram.diagonal() > 0, gram.diagonal(), 1.0))
    left = gram / np.outer(scale, scale)
    found, whole = [], left.copy()
    for j in range(len(left)):
        if left[j, j] > ALIASED:
            left[j + 1 :, j + 1 :] -= np.outer(left[j + 1 :, j], left[j, j + 1 :]) / left[j, j]
            found.append(j)
    kept, others = np.array(found, np.intp), np.setdiff1d(np.arange(len(left)), found)
    move = np.zeros_like(left)
    move[np.ix_(kept, kept)] = np.eye(len(kept))
    move[np.ix_(kept, others)] = np.linalg.solve(whole[np.ix_(kept, kept)], whole[np.ix_(kept, others)])
    move = move * scale / scale[:, None]
    model = x.copy()
    for k in range(outputs):
        mine = np.array([*([outputs * p + k] if prepared.intercept else []), *range(k * p, (k + 1) * p)])
        model[mine] = move @ model[mine]
    return places[kept][places[kept] < p], model


class _Maximum(NamedTuple):
    x: torch.Tensor
    """Where the Hessian is taken, within `CLOSE` of the estimate."""
    estimate: Floats
    step: Floats | None = None
    """The last Newton step, where there is no end because some estimates are infinite."""


def _newton(prepared: Prepared, basis: Floats, x: torch.Tensor, first: Floats, n: float) -> _Maximum:
    """Newton steps, halved while f rises, from x to the minimiser of f; if the Hessian is singular at x, from the model
    without columns, where it is `first`.

    Where estimates are infinite, every step adds about 1 to some linear predictors, and the curvature vanishes.
    """
    likelihood = prepared.family.likelihood and not prepared.family.dispersed  # whose estimates may be infinite
    unit = 1.0 if likelihood else abs(prepared.loss(prepared.start))
    loss, last = prepared.loss(x), _Maximum(x, x.numpy())
    for k in range(STEPS):
        inverse = _inverse(basis.T @ prepared.hessian(x).numpy() @ basis)
        if inverse is None and k == 0:
            x, loss = prepared.start, prepared.loss(prepared.start)
            inverse = _inverse(basis.T @ first @ basis)
        if inverse is None:
            break
        g = basis.T @ prepared.gradient(x).numpy()
        step = -basis @ (inverse @ g)
        last = _Maximum(x, x.numpy() + step, step)
        decrement = float(g @ inverse @ g)
        if likelihood and decrement <= VANISHED * float(step @ first @ step):
            break
        if n * decrement <= CLOSE * unit:
            return last._replace(step=None)
        part = 1.0
        while not (new := prepared.loss(x + part * torch.from_numpy(step))) <= loss + ROUNDING * abs(loss):
            part /= 2
            if part < SHORTEST:
                return last._replace(step=None)  # f is the same at both points
        x, loss = x + part * torch.from_numpy(step), new
    return last if likelihood else last._replace(step=None)


def _infinite(prepared: Prepared, x: torch.Tensor, step: torch.Tensor) -> tuple[list[int], Floats]:
    """The columns with infinite estimates, and +-inf in their places among coefficients and intercepts (K, p + 1)."""
    labels = prepared.family.name not in ("poisson", "negative-binomial")
    complete = labels and prepared.loss(x) < CERTAIN * prepared.loss(prepared.start)
    columns = list(range(prepared.columns)) if complete else moving(prepared, step)
    change = prepared.parameters(step)
    level = np.where(np.abs(change.intercept) > MOVING, np.sign(change.intercept), 0.0)
    signs = np.column_stack([np.zeros_like(change.coef), level])
    signs[:, columns] = np.sign(change.coef[:, columns])
    return columns, np.where(signs == 0, 0.0, np.copysign(np.inf, signs))


def _inverse(hessian: Floats) -> Floats | None:
    """The inverse, by a matrix with ones on its diagonal: units do not matter; None where that is singular."""
    diagonal = hessian.diagonal()
    if not bool(np.isfinite(hessian).all()) or not bool((diagonal > 0).all()):
        return None
    scale = np.sqrt(np.outer(diagonal, diagonal))
    values, vectors = np.linalg.eigh(hessian / scale)
    if len(values) and values[0] <= SINGULAR:
        return None
    found: Floats = (vectors / values) @ vectors.T / scale
    return found


def coefficient_names(estimator: Federated, intercept: bool) -> tuple[str, ...]:
    """Of the coefficients, class by class, then of the intercepts."""
    columns, classes = estimator._names(), [f" [{name}]" for name in estimator._classes()] or [""]
    names = [f"{column}{name}" for name in classes for column in columns]
    return (*names, *([f"(intercept){name}" for name in classes] if intercept else []))


def bootstrap(
    self: Federated,
    X: Any,
    y: Any = None,
    sites: Any = None,
    sample_weight: Any = None,
    *,
    times: int = 200,
    level: float = 0.95,
    random_state: int = 0,
) -> Bootstrap:
    """Return standard errors and percentile intervals from fits to sites drawn with replacement: how sites differ.

    As many sites as there are are drawn, so many times; a site that is drawn twice counts twice. It says how
    coefficients would vary with other sites of the same kind, where `inference` asks for other rows of the same sites;
    with few sites it is rough. An estimator that chooses its lam is fitted before, and keeps its choice.

    Raises InputError with fewer than three sites.

    Reference: Davison and Hinkley, Bootstrap methods and their application, 1997, section 3.8.
    """
    check_level(level)
    if not is_whole(times, 2):
        raise InputError(f"times is {times!r}; give a number of draws, at least 2, such as 200")
    estimator, rows = self._reading(X, y, sites, sample_weight)
    if len(rows.sites) < FEWEST_SITES:
        raise InputError(f"there are {len(rows.sites)} sites; a bootstrap over sites needs at least {FEWEST_SITES}")
    estimate = _coefficients(estimator, rows)[0]
    rng, found, failed, converged = np.random.default_rng(random_state), [], 0, []
    for _ in range(times):
        count = np.bincount(rng.integers(0, len(rows.sites), len(rows.sites)), minlength=len(rows.sites))
        weight = rows.weight * count[rows.sites.of_row]
        drawn = rows._replace(weight=weight).some(weight > 0)
        try:
            estimator._check(drawn.y, drawn.sites)
        except InputError:
            failed += 1
            continue
        draw, reached = _coefficients(estimator, drawn)
        found.append(draw)
        converged.append(reached)
    if len(found) < 2:
        raise InputError(f"{failed} of {times} draws of sites cannot be fitted (a class lacks, or there is no event)")
    warn_unconverged(converged, "draws")
    draws = np.stack(found)
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], axis=0)
    own = estimator.site_effects != "none"  # the intercepts, then, are the sites'
    names = coefficient_names(estimator, estimator.fit_intercept and estimator._family().level and not own)
    return Bootstrap(names, estimate, draws.std(0, ddof=1), low, high, draws, failed)


def _coefficients(estimator: Federated, rows: Rows) -> tuple[Floats, bool]:
    """And whether the fit converged."""
    prepared = estimator._prepare(rows)
    fit = estimator._solve(prepared)
    model = prepared.parameters(fit.x)
    return np.concatenate([model.coef.flatten(), model.intercept if prepared.intercept else []]), fit.converged


def debiased(
    self: Federated,
    X: Any,
    y: Any = None,
    sites: Any = None,
    sample_weight: Any = None,
    *,
    level: float = 0.95,
    nodewise: float | None = None,
) -> Inference:
    r"""Return debiased (desparsified) estimates and intervals after an l1-penalised fit, even if p > n.

    X, y: the rows of the fit. nodewise: the weight of the nodewise regressions; default sqrt(log(columns) / rows).

    With the lasso's estimate $b$, gradient $g$ and Hessian $H$ of the mean loss there, and an approximate inverse $T$
    of $H$, the vector $b - T g$ is about normal with the true coefficients as its mean and covariance
    $T H T^\top / n$ (times the dispersion, if any). Row j of $T$ comes from a lasso of column j on the others, which
    needs $H$ alone: sites send their gradient and Hessian once.

    References: Zhang and Zhang, JRSS B 2014. Van de Geer, Buehlmann, Ritov and Dezeure, On asymptotically optimal
    confidence regions and tests for high-dimensional models, Annals of Statistics 2014.
    """
    check_level(level)
    fitted, (estimator, rows) = self, _rows_of_the_fit(self, X, y, sites, sample_weight)
    if penalty_name(fitted.penalty) not in ("l1", "elastic-net"):
        raise InputError(f"expected a fit with penalty l1 or elastic-net, got {fitted.penalty!r:.40}; use inference()")
    if fitted.bounds is not None:
        raise InputError("expected a fit without bounds, got some; the correction would leave them")
    prepared = estimator._prepare(rows)
    if prepared.outputs > 1 or prepared.constants or estimator.site_effects != "none":
        raise InputError("expected a model with one score per row, no scale and no site effects")
    if not rows.counted or (estimator.weights == "sites" and len(rows.sites) > 1):
        raise InputError("expected weights that count equal rows (whole numbers, weights='samples') for intervals")
    p, n = prepared.columns, float(rows.weight.sum())
    x = torch.from_numpy(fitted_point(fitted, prepared))
    coef = x[:p].numpy()
    g, H = prepared.gradient(x).numpy(), prepared.hessian(x).numpy()
    if prepared.intercept:  # what the intercept leaves
        g, H = g[:p] - H[:p, p] * g[p] / H[p, p], H[:p, :p] - np.outer(H[:p, p], H[:p, p]) / H[p, p]
    varies = H.diagonal() > 1e-12 * max(float(H.diagonal().max()), 1e-300)
    scale = np.sqrt(np.where(varies, H.diagonal(), 1.0))
    unit = (H / np.outer(scale, scale))[np.ix_(varies, varies)]
    weight = np.sqrt(np.log(max(p, 2)) / n) if nodewise is None else nodewise
    T = np.zeros((p, p))
    T[np.ix_(varies, varies)] = approximate_inverse(unit, weight)
    T /= np.outer(scale, scale)
    left = n - np.count_nonzero(coef) - prepared.intercept if prepared.family.dispersed else n
    if left < 1:
        raise InputError("expected fewer nonzero coefficients than rows, got a fit without noise left; raise lam")
    factor = prepared.scaling.factor
    estimate, covariance = (
        factor * (coef - T @ g),
        np.outer(factor, factor) * (prepared.noise(x) * T @ H @ T.T / left),
    )
    estimate[~varies] = np.nan
    error = np.where(varies, np.sqrt(np.clip(covariance.diagonal(), 0, None)), np.nan)
    reach = stats.norm.ppf((1 + level) / 2) * error
    p_value = 2 * stats.norm.sf(np.abs(estimate) / error)
    about = (prepared.family.name, level, "debiased", n, len(rows.sites), p + prepared.intercept)
    names = coefficient_names(estimator, False)
    return Inference(names, estimate, error, estimate - reach, estimate + reach, p_value, covariance, *about)


def approximate_inverse(H: Floats, weight: float) -> Floats:
    """Return T with T H about the identity: row j is (1, -c_j) / t_j, where c_j is the lasso of column j on the others.

    H has ones on its diagonal. c_j minimises <v, H v> / 2 + weight |c_j|_1, v = (1, -c_j), by coordinate descent, all j
    together; t_j = <H_j, v> is the residual variance plus weight |c_j|_1.

    >>> import numpy as np
    >>> approximate_inverse(np.eye(2), 0.1)
    array([[1., 0.],
           [0., 1.]])
    """
    V, slope = np.eye(len(H)), H.copy()  # column j of V is v of column j
    for _ in range(NODEWISE_SWEEPS):
        largest = 0.0
        for k in range(len(H)):
            v = V[k] - slope[k]
            change = np.sign(v) * np.maximum(np.abs(v) - weight, 0.0) - V[k]
            change[k] = 0.0
            some = np.flatnonzero(change)
            if len(some):
                V[k] += change
                slope[:, some] += np.outer(H[k], change[some])
                largest = max(largest, float(np.abs(change).max()))
        if largest <= NODEWISE_CLOSE:
            break
    found: Floats = (V / slope.diagonal()).T + 0.0
    return found
