"""Extreme numbers: what each family does with them, as a table. Exact, refused in one line, or warned; never silent.

exact:   the coefficients are those of the ordinary table, in other units
refused: an error of one line
warned:  a warning says what is wrong
"""

import warnings
from functools import cache

import numpy as np
import pytest

from fednmap.estimators import FederatedCoxRegression, FederatedGLM

N, P = 80, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, P))
ETA = X @ [1.0, -0.5, 0.0]
TARGETS = {
    "gaussian": ETA + RNG.normal(size=N),
    "logistic": (RNG.random(N) < 1 / (1 + np.exp(-ETA))).astype(float),
    "poisson": RNG.poisson(np.exp(0.5 * ETA)).astype(float),
    "cox": np.stack([RNG.exponential(np.exp(-ETA)), RNG.random(N) < 0.7], 1),
}
TARGETS |= {
    "huber": TARGETS["gaussian"],
    "gamma": np.exp(0.5 * ETA) * RNG.gamma(2.0, 0.5, N),
    "negative-binomial": RNG.negative_binomial(2, 2 / (2 + np.exp(0.5 * ETA))).astype(float),
}
SITES = np.repeat(["a", "b"], N // 2)


def fitted(family, x, y=None, sites=SITES, weight=None, **options):
    y = TARGETS[family] if y is None else y
    given = {"penalty": "l1", "lam": 0.05, "tol": 1e-9} | options
    model = FederatedCoxRegression(**given) if family == "cox" else FederatedGLM(family, **given)
    return model.fit(x, y, sites, weight)


@cache
def ordinary(family):
    return fitted(family, X).coef_.ravel()


def scaled(factor):
    def change(family):
        x = X.copy()
        x[:, 0] *= factor
        return fitted(family, x).coef_.ravel() * [factor, 1, 1]

    return change


def constant(family):
    return fitted(family, np.column_stack([X, np.full(N, 7.0)])).coef_.ravel()[:P]


def duplicated(family):
    found = fitted(family, np.column_stack([X, X[:, 0]])).coef_.ravel()
    return found[:P] + np.array([found[P], 0, 0])


def shifted(family):
    return fitted(family, X + np.array([1e8, 0, 0])).coef_.ravel()


def one_row_site(family):
    return fitted(family, X, sites=np.array(["a"] * (N - 1) + ["b"])).coef_.ravel()


def one_class_site(family):
    y = TARGETS[family]
    if family == "cox":  # its risk sets are those of the sites: no event at the second one
        first = SITES == "a"
        found = fitted(family, X, np.column_stack([y[:, 0], y[:, 1] * first])).coef_.ravel()
        assert np.isfinite(found).all()
        return None
    order = np.argsort(y, kind="stable")
    return fitted(family, X[order], y[order]).coef_.ravel()


def one_class(family):
    y = TARGETS[family].copy()
    y[..., -1 if family == "cox" else slice(None)] = 0.0
    return fitted(family, X, y).coef_.ravel() + ordinary(family)  # all of them are 0


def zero_weights(family):
    x, y = np.concatenate([X, 3 * X[:10]]), np.concatenate([TARGETS[family], TARGETS[family][10:20]])
    return fitted(family, x, y, np.concatenate([SITES, SITES[:10]]), np.repeat([1.0, 0.0], [N, 10])).coef_.ravel()


def wide(family):
    x = np.column_stack([X, np.random.default_rng(1).normal(size=(N, 150))])
    model = fitted(family, x, penalty="l1", lam=0.1)
    assert model.converged_ or family in ("huber", "negative-binomial")
    return None


def infinite(family):
    x = X.copy()
    x[3, 1] = np.inf
    return fitted(family, x).coef_.ravel()


def no_rows(family):
    return fitted(family, X[:0], TARGETS[family][:0], SITES[:0]).coef_.ravel()


CASES = {
    "a column times 1e-30": scaled(1e-30),
    "a column times 1e-8": scaled(1e-8),
    "a column times 1e8": scaled(1e8),
    "a column times 1e30": scaled(1e30),
    "a column plus 1e8": shifted,
    "a constant column": constant,
    "a duplicated column": duplicated,
    "a site of one row": one_row_site,
    "sites of one class": one_class_site,
    "one class, no event, no count": one_class,
    "rows of weight 0": zero_weights,
    "more columns than rows": wide,
    "an infinite cell": infinite,
    "no rows": no_rows,
}


def outcome(family, case):
    """In a word what the family does."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found = CASES[case](family)
        except ValueError as error:
            return "refused" if "\n" not in str(error) else "refused in several lines"
    if said:
        return "warned"
    same = found is None or np.allclose(found, ordinary(family), rtol=1e-5, atol=1e-6)
    return "exact" if same else f"other: {found}"


TABLE = {case: dict.fromkeys(TARGETS, "exact") for case in CASES}
for name in ("an infinite cell", "no rows", "a site of one row", "one class, no event, no count"):
    TABLE[name] = dict.fromkeys(TARGETS, "refused")
TABLE["one class, no event, no count"] |= {"gaussian": "exact", "huber": "exact"}
TABLE["more columns than rows"] |= {"huber": "warned", "negative-binomial": "warned"}  # not converged


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "family", ["gaussian", *(pytest.param(family, marks=pytest.mark.slow) for family in list(TARGETS)[1:])]
)
def test_what_extreme_numbers_give(family, case):
    assert outcome(family, case) == TABLE[case][family]
