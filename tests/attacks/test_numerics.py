"""Extreme numbers: what each family does with them, as a table. Exact, refused in one line, or warned; never silent.

exact:   the coefficients are those of the ordinary table, in other units
refused: an InputError of one line
warned:  a warning says what is wrong
"""

import warnings

import numpy as np
import pytest

from fednmap import InputError
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
SITES = np.repeat(["a", "b"], N // 2)


def fitted(family, x, y=None, sites=SITES, **options):
    y = TARGETS[family] if y is None else y
    given = {"penalty": "l1", "lam": 0.05, "tol": 1e-10} | options
    model = FederatedCoxRegression(**given) if family == "cox" else FederatedGLM(family, **given)
    return model.fit(x, y, sites)


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
    return found[:P] + [found[P], 0, 0]


def shifted(family):
    return fitted(family, X + [1e8, 0, 0]).coef_.ravel()


def one_row_site(family):
    return fitted(family, X, sites=np.array(["a"] * (N - 1) + ["b"])).coef_.ravel()


def one_class_site(family):
    order = np.argsort(TARGETS[family][:, 1] if family == "cox" else TARGETS[family], kind="stable")
    return fitted(family, X[order], TARGETS[family][order]).coef_.ravel()


def one_class(family):
    y = TARGETS[family].copy()
    y[..., -1 if family == "cox" else slice(None)] = 0.0
    return fitted(family, X, y).coef_.ravel()


def wide(family):
    x = np.column_stack([X, np.random.default_rng(1).normal(size=(N, 150))])
    model = fitted(family, x, penalty="l1", lam=0.1)
    assert model.converged_
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
        except InputError as error:
            return "refused" if "\n" not in str(error) else "refused in several lines"
    if said:
        return "warned"
    ordinary = fitted(family, X).coef_.ravel()
    return "exact" if found is None or np.allclose(found, ordinary, rtol=1e-5, atol=1e-6) else f"other: {found}"


TABLE = {case: dict.fromkeys(TARGETS, "exact") for case in CASES}
for name in ("an infinite cell", "no rows"):
    TABLE[name] = dict.fromkeys(TARGETS, "refused")
TABLE["one class, no event, no count"] = {"gaussian": "exact", "logistic": "refused", "poisson": "refused", "cox": "refused"}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", TARGETS)
def test_what_extreme_numbers_give(family, case):
    assert outcome(family, case) == TABLE[case][family]
