"""`fednmap fit` and `predict` with counts, trials, formulas and exposures."""

import csv
import io
import json

import numpy as np
import pandas as pd
import pytest

from fednmap.estimators import (
    FederatedBinomialRegressor,
    FederatedLinearRegression,
    FederatedNegativeBinomialRegressor,
)


@pytest.fixture
def clinics(tmp_path):
    """Two files, and their rows as one frame with the column `site`."""
    rng, parts = np.random.default_rng(0), []
    (tmp_path / "clinics").mkdir()
    for name, n in (("basel", 60), ("bern", 50)):
        age, years = rng.normal(60, 10, n), rng.uniform(0.5, 4, n).round(2)
        score = 0.03 * (age - 60)
        visits = rng.negative_binomial(2, 1 / (1 + years * np.exp(score) / 2))
        pain = np.array(["low", "mid", "high"])[np.digitize(score + rng.logistic(size=n), [-0.5, 0.8])]
        doses = rng.integers(1, 6, n)
        taken = rng.binomial(doses, 1 / (1 + np.exp(-score)))
        table = {"age": age, "years": years, "visits": visits, "pain": pain, "doses": doses, "taken": taken}
        frame = pd.DataFrame(table)
        frame.to_csv(tmp_path / "clinics" / f"{name}.csv", index=False)
        parts.append(frame.assign(site=name))
    return tmp_path / "clinics", pd.concat(parts, ignore_index=True)


def fit(command, folder, *words):
    code, out, err = command(
        "fit", "--data", f"csv:{folder}", *words, "--tol-absolute", 1e-9, "--json", "--quiet", "--out", "run"
    )
    assert code == 0, err
    return json.loads(out)


def predictions(command, folder):
    code, out, err = command("predict", "run", folder / "bern.csv")
    assert code == 0, err
    return list(csv.DictReader(io.StringIO(out)))


def test_counts_with_an_exposure(command, clinics):
    folder, rows = clinics
    words = ("--target", "visits", "--family", "negative-binomial", "--exposure", "years", "--penalty", "none")
    said = fit(command, folder, *words, "--exclude", "pain,doses,taken")
    X, y, site = rows[["age", "years"]], rows["visits"], rows["site"]
    model = FederatedNegativeBinomialRegressor("none", exposure="years", tol=1e-9).fit(X, y, site)
    found = model.inference(X, y, site)
    age, level = said["coefficients"]
    assert (age["name"], level["name"]) == ("age", "(intercept)")
    assert age["coefficient"] == pytest.approx(found.estimate[0])
    assert age["rate ratio"] == pytest.approx(np.exp(found.estimate[0]))
    assert age["standard error"] == pytest.approx(found.error[0])
    told = [float(row["visits"]) for row in predictions(command, folder)]
    np.testing.assert_allclose(told, model.predict(X[site == "bern"]), rtol=1e-6)
    rows[["age"]].to_csv(folder / "bern.csv", index=False)
    code, _, err = command("predict", "run", folder / "bern.csv")
    assert code != 0
    assert "there is no column 'years'" in err


def test_trials(command, clinics):
    folder, rows = clinics
    words = (
        "--target",
        "taken",
        "--trials-column",
        "doses",
        "--family",
        "binomial",
        "--penalty",
        "ridge",
        "--lam",
        0.1,
    )
    said = fit(command, folder, *words, "--exclude", "pain,visits")
    X, y, site = rows[["age", "years"]], rows[["taken", "doses"]], rows["site"]
    model = FederatedBinomialRegressor("ridge", 0.1, tol=1e-9).fit(X, y, site)
    np.testing.assert_allclose([c["coefficient"] for c in said["coefficients"][:2]], model.coef_, rtol=1e-6)
    told = [float(row["P(success)"]) for row in predictions(command, folder)]
    np.testing.assert_allclose(told, model.predict(X[site == "bern"]), rtol=1e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--target", "taken", "--family", "binomial"), "--family binomial needs --trials-column"),
        (("--target", "visits", "--trials-column", "doses", "--family", "poisson"), "needs --trials-column"),
        (("--target", "visits", "--order", "a,b", "--family", "poisson"), "expected --order with family ordinal"),
        (("--target", "visits", "--offset", "age", "--exposure", "years"), "got both"),
        (("--target", "visits", "--exposure", "days"), "there is no column 'days'"),
        (("--target", "visits", "--exposure", "taken", "--family", "poisson"), "exposures must be above 0"),
        (("--target", "visits", "--family", "gamma"), "a Gamma target must be above 0"),
        (
            ("--target", "pain", "--order", "low,mid", "--family", "ordinal"),
            "expected order to name every label of 'pain'",
        ),
    ],
)
def test_mistakes_are_one_line(command, clinics, words, message):
    code, _, err = command("fit", "--data", f"csv:{clinics[0]}", *words, "--quiet", "--out", "run")
    assert code != 0
    assert message in err


def test_a_formula_with_gaps(command, clinics):
    folder, rows = clinics
    rows.loc[3, "age"] = np.nan
    rows[rows["site"] == "basel"].drop(columns="site").to_csv(folder / "basel.csv", index=False)
    formula = "taken ~ bs(age, 4) * pain + log(years)"
    words = ("fit", "--data", f"csv:{folder}", "--formula", formula, "--family", "gaussian", "--penalty", "none")
    code, out, err = command(*words, "--tol-absolute", 1e-10, "--json", "--out", "run")
    assert code == 0, err
    assert "1 rows with gaps are left out" in err
    kept = rows.drop(index=3)
    model = FederatedLinearRegression(formula=formula, tol=1e-10).fit(kept, sites=kept["site"])
    said = {c["name"]: c["coefficient"] for c in json.loads(out)["coefficients"]}
    assert list(said) == [*model.formula_.names_, "(intercept)"]
    np.testing.assert_allclose([*said.values()][:-1], model.coef_, rtol=1e-5, atol=1e-5)
    told = [float(row["taken"]) for row in predictions(command, folder)]
    np.testing.assert_allclose(told, model.predict(rows[rows["site"] == "bern"]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--formula", "taken ~ age", "--target", "taken"), "expected --formula or --target, got both"),
        (("--formula", "~ age"), "expected what to predict before ~"),
        (("--formula", "taken ~ poly(age, 2)"), "cannot be computed alike at all sites"),
        (("--formula", "nothing ~ age"), "there is no column 'nothing'"),
    ],
)
def test_mistakes_in_a_formula_are_one_line(command, clinics, words, message):
    code, _, err = command("fit", "--data", f"csv:{clinics[0]}", *words, "--quiet", "--out", "run")
    assert code != 0
    assert message in err
