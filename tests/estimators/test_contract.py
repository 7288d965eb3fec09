"""The estimators: scikit-learn's contract, what is refused, and what a fit promises."""

import re
import warnings

import numpy as np
import pandas as pd
import polars as pl
import pytest
from scipy import sparse
from sklearn.base import clone
from sklearn.datasets import load_diabetes
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.estimator_checks import (
    check_estimator,
    check_sample_weight_equivalence_on_dense_data,
    check_sample_weight_equivalence_on_sparse_data,
)

import fednmap.estimators
from fednmap import InputError
from fednmap.estimators import (
    FederatedCoxRegression,
    FederatedCoxRegressionCV,
    FederatedElasticNet,
    FederatedElasticNetCV,
    FederatedGammaRegressor,
    FederatedGLM,
    FederatedGLMCV,
    FederatedHuberRegressor,
    FederatedLasso,
    FederatedLassoCV,
    FederatedLinearRegression,
    FederatedLogisticRegression,
    FederatedLogisticRegressionCV,
    FederatedNegativeBinomialRegressor,
    FederatedOrdinalRegression,
    FederatedPoissonRegressor,
    FederatedPoissonRegressorCV,
)
from fednmap.estimators.penalties import group_numbers
from fednmap.regularizers import L1

ALL = (
    FederatedLasso(),
    FederatedElasticNet(),
    FederatedLinearRegression(),
    FederatedLogisticRegression(),
    FederatedPoissonRegressor(),
    FederatedGammaRegressor(),
    FederatedNegativeBinomialRegressor(),
    FederatedOrdinalRegression(),
    FederatedHuberRegressor(),
    FederatedCoxRegression(),
    FederatedGLM(),
    FederatedGLM("logistic"),
)
FEW = {"lambdas": 4, "cv": 2, "tol": 1e-10}  # weights and copies of rows are compared to 1e-7
CHOSEN = (
    FederatedLassoCV(**FEW),
    FederatedElasticNetCV(**FEW),
    FederatedLogisticRegressionCV(**FEW),
    FederatedPoissonRegressorCV(**FEW),
    FederatedCoxRegressionCV(**FEW),
    FederatedCoxRegressionCV(ties="breslow", **FEW),
    FederatedGLMCV(**FEW),
)
TIED = dict.fromkeys(
    ("check_sample_weight_equivalence_on_dense_data", "check_sample_weight_equivalence_on_sparse_data"),
    "by Efron's rule copies of an event are tied, as in R's survival and lifelines",
)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [*ALL, *CHOSEN], ids=repr)
def test_scikit_learn_contract(estimator):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        efron = isinstance(estimator, FederatedCoxRegression) and estimator.ties == "efron"
        unlike = TIED if efron else None
        check_estimator(estimator, on_skip=None, expected_failed_checks=unlike)


@pytest.mark.slow
@pytest.mark.ci(turn=3)
@pytest.mark.filterwarnings("error::sklearn.exceptions.ConvergenceWarning", "ignore:lam_ =")
@pytest.mark.parametrize(
    "estimator",
    [
        FederatedLassoCV(),
        FederatedPoissonRegressorCV(),
        FederatedLogisticRegressionCV(),
        *(
            pytest.param(estimator, marks=pytest.mark.slow)
            for estimator in (
                FederatedElasticNetCV(),
                FederatedGLMCV(),
                FederatedGLMCV("logistic"),
                FederatedCoxRegressionCV(ties="breslow"),
            )
        ),
    ],
    ids=repr,
)
def test_at_default_settings_a_weight_of_two_is_two_rows(estimator):
    check_sample_weight_equivalence_on_dense_data(type(estimator).__name__, estimator)
    check_sample_weight_equivalence_on_sparse_data(type(estimator).__name__, estimator)


@pytest.fixture
def diabetes():
    data = load_diabetes(as_frame=True)
    return data.data, data.target.to_numpy(), np.array(["basel", "bern", "zug"])[np.arange(len(data.target)) % 3]


def test_a_frame_keeps_its_names(diabetes):
    X, y, hospitals = diabetes
    pandas = FederatedLasso(0.5).fit(X, y, hospitals)
    other = FederatedLasso(0.5).fit(pl.DataFrame(X.to_dict("list")), y, hospitals)
    assert list(pandas.feature_names_in_) == list(X.columns) == list(other.feature_names_in_)
    assert np.array_equal(pandas.coef_, other.coef_)
    assert [site["site"] for site in pandas.site_report_] == ["basel", "bern", "zug"]
    assert sum(site["weight"] for site in pandas.site_report_) == pytest.approx(1)
    assert pandas.bytes_sent_ > 0
    assert pandas.converged_


def test_standardised_fits_do_not_know_units(diabetes):
    X, y, hospitals = diabetes
    a = FederatedLasso(1.0, tol=1e-8).fit(X, y, hospitals)
    b = FederatedLasso(1.0, tol=1e-8).fit(X * np.arange(1, 11) + 7, y, hospitals)
    assert b.coef_ * np.arange(1, 11) == pytest.approx(a.coef_, abs=1e-3)
    assert b.predict(X * np.arange(1, 11) + 7) == pytest.approx(a.predict(X), abs=1e-3)


def test_a_regularizer_is_taken_as_it_is(diabetes):
    X, y, hospitals = diabetes
    by_name = FederatedGLM("gaussian", "l1", 2.0).fit(X, y, hospitals)
    by_object = FederatedGLM("gaussian", L1(2.0)).fit(X, y, hospitals)
    scaled = FederatedGLM("gaussian", L1(1.0), 2.0).fit(X, y, hospitals)
    assert np.array_equal(by_name.coef_, by_object.coef_)
    assert scaled.coef_ == pytest.approx(by_name.coef_)
    assert clone(by_object).penalty.weight == 2.0


def test_groups_enter_together(diabetes):
    X, y, hospitals = diabetes
    groups = {"blood": ["s1", "s2", "s3", "s4", "s5", "s6"], "body": ["bmi", "bp"]}
    fitted = FederatedGLM("gaussian", "group-lasso", 12.0, groups=groups).fit(X, y, hospitals)
    found = dict(zip(X.columns, fitted.coef_ != 0, strict=True))
    assert len({found[name] for name in groups["blood"]}) == 1
    assert found["bmi"]
    assert found["bp"]
    assert not found["age"]


def test_group_numbers():
    columns = ["age", "wbc", "rbc", "sex"]
    assert group_numbers({"blood": ["wbc", "rbc"]}, columns) == [1, 0, 0, 2]
    assert group_numbers([[0, 3], ["rbc"]], columns) == [0, 2, 1, 0]
    assert group_numbers(["a", "b", "b", "a"], columns) == [0, 1, 1, 0]
    with pytest.raises(InputError, match="'wbc' is in two groups"):
        group_numbers({"a": ["wbc"], "b": ["wbc"]}, columns)
    with pytest.raises(InputError, match="'crp', which X has not"):
        group_numbers({"a": ["crp"]}, columns)


def test_too_few_rounds_are_told(diabetes):
    X, y, hospitals = diabetes
    with pytest.warns(ConvergenceWarning, match=r"after 2 rounds.*raise max_rounds"):
        fitted = FederatedLasso(0.1, max_rounds=2).fit(X, y, hospitals)
    assert fitted.n_iter_ == 2
    assert not fitted.converged_


def rows(n=24, seed=0):
    rng = np.random.default_rng(seed)
    X = pd.DataFrame(rng.normal(size=(n, 2)), columns=["age", "bmi"])
    return X, rng.normal(size=n), np.array(["basel", "bern"])[np.arange(n) % 2]


REFUSED = [
    (
        lambda X, y, s: FederatedLasso().fit(X.mask(np.c_[X.index == 3, X.index == 3]), y, s),
        "'age' has NaN in row 3 at site 'bern'",
    ),
    (lambda X, y, s: FederatedLasso().fit(X.replace(X.bmi[4], np.inf), y, s), "'bmi' has infinity in row 4 .* 'basel'"),
    (
        lambda X, y, s: FederatedLasso().fit(X.mask(np.c_[s == "bern", s == "bern"]), y, s),
        "'age' has no value at site 'bern'",
    ),
    (lambda X, y, s: FederatedLasso().fit(X, np.where(y == y[5], np.nan, y), s), "y has NaN in row 5 at site 'bern'"),
    (lambda X, y, s: FederatedPoissonRegressor().fit(X, -np.abs(y), s), "in row 0 at site 'basel'; counts must be at"),
    (lambda X, y, s: FederatedPoissonRegressor().fit(X, 0 * y, s), "all counts are 0"),
    (lambda X, y, s: FederatedLogisticRegression().fit(X, y > 9, s), "one class only, .*False.* at all sites"),
    (lambda X, y, s: FederatedLasso().fit(X, y, np.where(np.arange(24) == 7, "zug", s)), "site 'zug' has one sample"),
    (lambda X, y, s: FederatedLasso().fit(X, y, s[:3]), r"sites has shape \(3,\); give one site per row, 24 in all"),
    (lambda X, y, s: FederatedLasso(weights="patients").fit(X, y, s), "weights is 'patients'; 'samples' counts"),
    (lambda X, y, s: FederatedLasso(lam=-1).fit(X, y, s), "lam is -1; it must be a finite number, at least 0"),
    (lambda X, y, s: FederatedLasso(tol=0).fit(X, y, s), "tol is 0; it must be a finite number above 0"),
    (lambda X, y, s: FederatedGLM(penalty="lasso").fit(X, y, s), "unknown penalty 'lasso'; did you mean"),
    (lambda X, y, s: FederatedGLM(penalty="l2").fit(X, y, s), "'ridge' is lam"),
    (lambda X, y, s: FederatedGLM(penalty="group-lasso").fit(X, y, s), "needs groups"),
    (lambda X, y, s: FederatedGLM("cox").fit(X, y, s), "use FederatedCoxRegression"),
    (lambda X, y, s: FederatedGLM("tweedie").fit(X, y, s), "unknown family 'tweedie'"),
    (lambda X, y, s: FederatedHuberRegressor(epsilon=0.5).fit(X, y, s), "epsilon is 0.5; it must be"),
    (
        lambda X, y, s: FederatedCoxRegression().fit(X, np.c_[np.where(y == y[1], np.inf, 1 + y * y), y > 0], s),
        "time has infinity in row 1 at site 'bern'",
    ),
    (lambda X, y, s: FederatedCoxRegression().fit(X, np.c_[y, y > 0], s), "the time is -.* at site '"),
    (lambda X, y, s: FederatedCoxRegression().fit(X, np.c_[y * y, y], s), "the event is .* 1 is an event, 0 censored"),
    (lambda X, y, s: FederatedCoxRegression().fit(X, np.c_[y * y, 0 * y], s), "no event at any site"),
    (lambda X, y, s: FederatedCoxRegression(ties="exact").fit(X, y * y, s), "unknown rule for ties 'exact'"),
    (lambda X, y, s: FederatedLassoCV(cv="leave-one-site-out").fit(X, y), "with one site; give sites"),
    (lambda X, y, s: FederatedLassoCV(cv=1).fit(X, y, s), "cv is 1; give a number of folds, at least 2"),
    (lambda X, y, s: FederatedLassoCV(select="aic").fit(X, y, s), "select is 'aic'; choose from min, 1se, bic, ebic"),
    (lambda X, y, s: FederatedLinearRegression().path(X, y, s), "penalty 'none' has no weight"),
]


@pytest.mark.parametrize(("attempt", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused_in_one_line(attempt, message):
    with pytest.raises(InputError) as refused:
        attempt(*rows())
    assert re.search(message, str(refused.value)), str(refused.value)
    assert "\n" not in str(refused.value)


def test_sparse_rows_with_a_gap_are_refused_by_name():
    X = sparse.csr_array(np.eye(6))
    X.data[2] = np.nan
    with pytest.raises(InputError, match="column 'x2' has NaN in row 2 at site 'b'"):
        FederatedLasso().fit(X, np.arange(6.0), ["a", "b", "b", "a", "a", "b"])


def test_the_old_name_of_a_path_still_works():
    with pytest.warns(DeprecationWarning, match="RegularizationPath"):
        assert fednmap.estimators.Path is fednmap.estimators.RegularizationPath
