"""Formulas: the columns of the pooled rows at every site, and what is refused; R's splines."""

import json
import shutil
import subprocess

import numpy as np
import pandas as pd
import pytest
from formulaic import model_matrix

from fednmap import InputError
from fednmap.estimators import (
    FederatedCoxRegression,
    FederatedGLM,
    FederatedLassoCV,
    FederatedLinearRegression,
    FederatedLogisticRegression,
    FederatedPoissonRegressor,
)
from fednmap.tables import FederatedFormula


@pytest.fixture
def rows():
    """Site 0 has one sex, no stage 3, and the youngest."""
    rng, n = np.random.default_rng(0), 120
    d = pd.DataFrame(
        {
            "y": rng.normal(size=n),
            "x1": rng.normal(size=n),
            "x2": rng.uniform(1, 3, n),
            "age": np.sort(rng.normal(60, 10, n)),
            "stage": rng.integers(1, 4, n),
            "sex": rng.choice(["f", "m"], n),
            "years [at risk]": rng.uniform(1, 2, n),
        }
    )
    site = np.repeat(["a", "b", "c"], 40)
    d.loc[site == "a", "sex"] = "f"
    d.loc[(site == "a") & (d.stage == 3), "stage"] = 1
    return d, site


FORMULAS = [
    "x1 * x2",
    "bs(age, 4)",
    "bs(age, df=6, degree=2) + C(stage)",
    "bs(log(age), knots=[4.0, 4.2]) : x1",
    "bs(age, 5, include_intercept=True)",
    "C(stage) * sex",
    "center(x1) + scale(x2) + standardize(log(x2)) + scale(age, center=False)",
    "I(x1**2) + {x1 / x2} + sqrt(x2) + (x1 + x2 + sex)**2",
    "`years [at risk]` + x1:stage",
]


@pytest.mark.parametrize("formula", FORMULAS)
def test_columns_are_those_of_the_pooled_rows(formula, rows):
    d, site = rows
    fitted = FederatedFormula(formula).fit(d, sites=site)
    whole = model_matrix(formula, d, context={"sqrt": np.sqrt}).drop(columns="Intercept")
    assert fitted.get_feature_names_out().tolist() == list(whole.columns)
    for name in ("a", "b", "c"):  # a site alone, with the levels and knots of all
        mine = site == name
        np.testing.assert_allclose(fitted.transform(d[mine]), whole[mine].to_numpy(float), rtol=1e-10, atol=1e-12)
    assert sorted(name for names in fitted.groups().values() for name in names) == sorted(whole.columns)


@pytest.mark.filterwarnings("ignore:lam_ =")
def test_a_fit_by_formula_is_the_fit_of_its_columns(rows):
    d, site = rows
    formula = "y ~ x1 * x2 + bs(age, 4) + C(stage)"
    whole = model_matrix(formula, d).rhs.drop(columns="Intercept")
    one = FederatedLinearRegression(formula=formula).fit(d, sites=site)
    other = FederatedLinearRegression().fit(whole, d["y"], site)
    np.testing.assert_allclose(one.coef_, other.coef_, atol=1e-6)
    np.testing.assert_allclose(one.predict(d.iloc[::-1]), other.predict(whole.iloc[::-1]), atol=1e-6)
    assert one.inference(d, sites=site).names == (*whole.columns, "(intercept)")
    np.testing.assert_allclose(one.inference(d, sites=site).error, other.inference(whole, d["y"], site).error)
    assert one.score(d, d["y"]) == pytest.approx(other.score(whole, d["y"]))
    again = one.fit(d.iloc[:90], sites=site[:90])  # a second fit has its own knots
    assert again.formula_.state_["bs(age, 4)"]["upper_bound"] == d["age"].iloc[89]
    chosen = FederatedLassoCV(formula=formula, cv=2, lambdas=4).fit(d, sites=site)
    assert len(chosen.coef_) == len(whole.columns)
    label = FederatedLogisticRegression(formula="sex ~ x1").fit(d, sites=site)
    assert label.classes_.tolist() == ["f", "m"]
    given = FederatedGLM("gaussian", "none", formula="~ x1").fit(d, d["y"], site)
    np.testing.assert_allclose(given.coef_, FederatedLinearRegression().fit(d[["x1"]], d["y"], site).coef_, atol=1e-6)


def test_cox_and_exposure_by_formula(rows):
    d, site = rows
    d = d.assign(time=np.arange(120) % 17 + 1.0, event=np.arange(120) % 3 > 0)
    one = FederatedCoxRegression(formula="Surv(time, event) ~ x1 + sex").fit(d, sites=site)
    X = np.column_stack([d["x1"], d["sex"] == "m"])
    np.testing.assert_allclose(one.coef_, FederatedCoxRegression().fit(X, d[["time", "event"]], site).coef_, atol=1e-6)
    name = "years [at risk]"
    rate = FederatedPoissonRegressor("none", formula="stage ~ x1", exposure=name).fit(d, sites=site)
    other = FederatedPoissonRegressor("none", exposure=name).fit(d[["x1", name]], d["stage"], site)
    np.testing.assert_allclose(rate.coef_, other.coef_, atol=1e-8)
    np.testing.assert_allclose(rate.predict(d), other.predict(d[["x1", name]]), rtol=1e-6)
    assert rate.score(d, d["stage"]) == pytest.approx(other.score(d[["x1", name]], d["stage"]))


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        ("y ~ poly(x1, 2)", "cannot be computed alike at all sites; known functions: C, bs"),
        ("y ~ lag(x1)", "cannot be computed alike"),
        ("y ~ x1.sum()", "cannot be computed alike"),
        ("y ~ {x1 - x1.mean()}", "cannot be computed alike"),
        ("y ~ bs(center(x1), 4)", "cannot be computed alike"),
        ("y ~ np.exp(x1)", "cannot be computed alike"),
        ("y ~ I(__import__)", "there is no column '__import__'"),
        ("y ~ C(stage, contr.sum)", "expected C.column."),
        ("y ~ bs(age, df=2)", "expected df of at least 3"),
        ("y ~ bs(age, x1)", "expected numbers as arguments of bs"),
        ("y ~ bs(age, width=2)", "expected bs.column"),
        ("y ~ bs(sex, 4)", "expected numbers in 'sex', got words"),
        ("y ~ log(sex)", "expected numbers in 'sex', got words"),
        ("y ~ C(stage) + stage", "either as C.stage. or as a number"),
        ("y ~ x1 - 1", "use fit_intercept=False"),
        ("y ~ (x1", "is not a formula"),
        ("y ~", "expected columns after ~"),
        ("y + x2 ~ x1", "expected one column before ~"),
        ("log(y) ~ x1", "before ~, got 'log.y.'"),
        ("y ~ x1 | x2", "leave '|' out"),
        ("y ~ nothing", "there is no column 'nothing'"),
        ("y ~ log(x1)", "'log.x1.' is not finite in row"),
    ],
)
def test_what_differs_from_site_to_site_is_refused_in_one_line(formula, message, rows):
    d, site = rows
    with pytest.raises(InputError, match=message) as error:
        FederatedLinearRegression(formula=formula).fit(d, sites=site)
    assert "\n" not in str(error.value)


def test_gaps_new_levels_and_rows_beyond_the_bounds(rows):
    d, site = rows
    fitted = FederatedFormula("bs(age, 4) + sex").fit(d, sites=site)
    for change, message in (
        ({"age": 300.0}, "extrapolation='extend'"),
        ({"sex": "x"}, "has the level 'x' in row 0, which no site had"),
        ({"age": np.nan}, "column 'age' has no value in row 0"),
    ):
        with pytest.raises(InputError, match=message):
            fitted.transform(d.head(3).assign(**change))
    with pytest.raises(InputError, match="column 'age' has 1 gaps"):
        FederatedFormula("age").fit(d.assign(age=d["age"].where(d.index != 5)), sites=site)


@pytest.mark.slow
@pytest.mark.parametrize("call", ["bs(age, 4)", "bs(age, df = 7, degree = 2)", "bs(age, knots = c(50, 60))"])
def test_splines_are_rs(call, rows):
    if shutil.which("Rscript") is None:
        pytest.skip("Rscript is not installed")
    d, site = rows
    values = ",".join(f"{v:.17g}" for v in d["age"])
    script = f'library(splines); age <- c({values}); cat("[", paste(sprintf("%.17g", t({call})), collapse = ","), "]")'
    done = subprocess.run(["Rscript", "-e", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    expected = np.array(json.loads(done.stdout)).reshape(len(d), -1)
    formula = call.replace("c(50, 60)", "[50, 60]")
    np.testing.assert_allclose(FederatedFormula(formula).fit(d, sites=site).transform(d), expected, atol=1e-12)


def test_words_that_are_one_code_stay_two_levels():
    """01 and 1 are one code where a column holds codes alone; among words they are two."""
    grades = {"grade": ["01", "1", "A", "1"]}
    fitted = FederatedFormula("~ grade").fit({"a": grades, "b": grades})
    assert fitted.names_ == ["grade[T.1]", "grade[T.A]"]
    assert fitted.transform(grades).tolist() == [[0, 0], [1, 0], [0, 1], [1, 0]]


def test_a_site_without_rows_is_refused():
    with pytest.raises(InputError, match="site 'b' has no rows"):
        FederatedFormula("~ bs(age, 4)").fit({"a": {"age": [1.0, 2.0, 3.0]}, "b": {"age": []}})
