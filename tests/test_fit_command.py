"""`fednmap fit` and `fednmap predict`: from files to a model with names, and back."""

import json

import numpy as np
import polars as pl
import pytest
from hospital_files import write_hospitals

from fednmap.estimators import FederatedLasso, FederatedLogisticRegression
from fednmap.tables import FederatedPreprocessor, read_sites


@pytest.fixture
def hospitals(tmp_path):
    return write_hospitals(tmp_path / "hospitals")


def test_a_fit_with_names_path_and_choice(command, hospitals):
    words = ("fit", "--data", f"csv:{hospitals}", "--target", "outcome", "--family", "logistic", "--penalty", "mcp")
    more = ("--path", "--cv", "leave-one-site-out", "--drop-columns", "time,event", "--out", "run")
    code, out, err = command(*words, *more)
    assert code == 0
    assert "4 sites, 300 rows, 6 columns; family logistic, penalty mcp" in err
    assert "sex=m" in out
    assert "odds ratio" in out
    assert "outcome = sick" in out
    run = hospitals.parent / "run"
    assert {p.name for p in run.iterdir()} == {
        *("model.json", "coefficients.csv", "path.csv", "path.png", "cv.csv", "cv.png", "report.html")
    }
    page = (run / "report.html").read_text()
    assert "pressure=missing" in page
    assert "data:image/png;base64" in page
    code, out, _ = command("predict", "run", hospitals / "zug.csv")
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == "outcome,P(healthy),P(sick)"
    assert len(lines) == 41
    assert lines[1].split(",")[0] in ("healthy", "sick")


def test_the_command_is_the_estimator(command, hospitals):
    words = ("--target", "outcome", "--penalty", "l1", "--lam", 0.01, "--tol", 1e-9, "--drop-columns", "time,event")
    code, out, _ = command("fit", "--data", f"csv:{hospitals}", *words, "--json", "--quiet", "--out", "run")
    said = json.loads(out)
    assert (code, said["lam"], said["converged"]) == (0, 0.01, True)
    sites = read_sites(f"csv:{hospitals}")
    features = {name: t.without(["outcome", "time", "event"]) for name, t in sites.items()}
    preprocessor = FederatedPreprocessor().fit(features)
    X = np.concatenate([preprocessor.transform(t) for t in features.values()])
    y = np.concatenate([t["outcome"] for t in sites.values()]).astype(str)
    where = np.repeat(list(sites), [t.rows for t in sites.values()])
    alone = FederatedLogisticRegression("l1", 0.01, tol=1e-9).fit(X, y, where)
    found = {row["name"]: row["coefficient"] for row in said["coefficients"]}
    assert list(found) == [*preprocessor.get_feature_names_out(), "(intercept)"]
    assert list(found.values()) == pytest.approx([*alone.coef_[0], alone.intercept_[0]])
    code, out, _ = command("predict", "run", hospitals / "bern.csv", "--out", "said.csv")
    said = pl.read_csv(hospitals.parent / "said.csv")
    assert said["P(sick)"].to_numpy() == pytest.approx(alone.predict_proba(X)[where == "bern", 1])


def lower_median(values):
    return np.nanquantile(values, 0.5, method="inverted_cdf")


def with_flag(values, by):
    return np.c_[np.where(np.isnan(values), by, values), np.isnan(values)]


@pytest.mark.parametrize(("impute", "fill"), [("mean", np.nanmean), ("median", lower_median)])
def test_rows_that_are_held_out_do_not_fill_gaps(command, hospitals, impute, fill):
    """The held-out loss at every lam is that of tables whose gaps were filled by the other sites alone."""
    words = ("--target", "age", "--family", "gaussian", "--tol", 1e-9, "--drop-columns", "sex,ecg,outcome,time,event")
    more = ("--impute", impute, "--cv", "leave-one-site-out", "--quiet", "--json", "--out", "run")
    code, out, _ = command("fit", "--data", f"csv:{hospitals}", *words, *more)
    assert code == 0
    sites = read_sites(f"csv:{hospitals}")
    lambdas = pl.read_csv(hospitals.parent / "run" / "path.csv")["lam"].to_numpy()
    losses = np.zeros(len(lambdas))
    for out_there in sites:
        kept = [t for name, t in sites.items() if name != out_there]
        by = fill(np.concatenate([t["pressure"] for t in kept]))
        tables = {name: with_flag(t["pressure"], by) for name, t in sites.items()}
        X = np.concatenate([tables[t.name] for t in kept])
        where = np.repeat([t.name for t in kept], [t.rows for t in kept])
        path = FederatedLasso(tol=1e-9).path(X, np.concatenate([t["age"] for t in kept]), where, lambdas=lambdas)
        for k, (coef, intercept) in enumerate(zip(path.coefs, path.intercepts, strict=True)):
            found = tables[out_there] @ coef[0] + intercept[0]
            losses[k] += np.square(found - sites[out_there]["age"]).sum() / 2 / 300
    assert json.loads(out)["lam_min"] == pytest.approx(lambdas[losses.argmin()])
    said = pl.read_csv(hospitals.parent / "run" / "cv.csv")
    assert said.columns == ["lam", "mean", "se", *sites]
    assert said["mean"].to_numpy() == pytest.approx(losses, rel=1e-7)


def test_a_weight_by_default_is_told(command, hospitals):
    words = ("--target", "outcome", "--drop-columns", "time,event", "--json", "--quiet", "--out", "run")
    assert json.loads(command("fit", "--data", f"csv:{hospitals}", *words)[1])["lam"] == 0.01


def test_cox_with_errors(command, hospitals):
    words = (
        "--time",
        "time",
        "--event",
        "event",
        "--penalty",
        "none",
        "--drop-columns",
        "outcome",
        "--json",
        "--quiet",
    )
    code, out, _ = command("fit", "--data", f"csv:{hospitals}", *words, "--out", "run")
    age = json.loads(out)["coefficients"][0]
    assert code == 0
    assert age["hazard ratio"] == pytest.approx(np.exp(age["coefficient"]))
    assert age["low"] < 0.05 < age["high"]
    code, out, _ = command("predict", "run", hospitals / "bern.csv")
    assert out.startswith("hazard ratio\n")
    ratios = [command("predict", "run", path)[1].split()[2:] for path in sorted(hospitals.iterdir())]
    logarithms = np.log(np.concatenate(ratios).astype(float))
    assert logarithms.mean() == pytest.approx(0, abs=1e-9)  # relative to the mean row, as the estimator has it


@pytest.mark.parametrize(("target", "family"), [("ecg", "logistic"), ("time", "huber")])
def test_errors_of_several_classes_and_of_huber(command, hospitals, target, family):
    drop = ",".join({"time", "event", "outcome"} - {target})
    words = ("--target", target, "--family", family, "--penalty", "none", "--drop-columns", drop, "--json", "--quiet")
    code, out, _ = command("fit", "--data", f"csv:{hospitals}", *words, "--tol", 1e-9, "--out", "run")
    said = json.loads(out)
    assert (code, said["lam"]) == (0, None)
    for row in said["coefficients"]:  # each with its own interval
        assert (row["low"] + row["high"]) / 2 == pytest.approx(row["coefficient"], abs=1e-6)
        assert row["standard error"] > 0


@pytest.mark.filterwarnings("default:expected linearly independent columns")
def test_columns_that_cannot_be_told_apart_are_named_and_the_rest_is_written(command, hospitals):
    """Two pressures that lack in the same rows: their indicators are one column twice."""
    for path in hospitals.iterdir():
        frame = pl.read_csv(path).with_columns(pressure2=pl.col("pressure") * 2 + pl.col("time"))
        frame.write_csv(path)
    words = ("--target", "outcome", "--penalty", "none", "--drop-columns", "time,event", "--out", "run")
    code, out, err = command("fit", "--data", f"csv:{hospitals}", *words)
    assert code == 0
    assert "pressure=missing and pressure2=missing are the same in every row" in err
    assert "warning: expected linearly independent columns, got 'pressure2=missing' determined" in err
    rows = {row["name"]: row for row in pl.read_csv(hospitals.parent / "run" / "coefficients.csv").to_dicts()}
    assert np.isnan(float(rows.pop("pressure2=missing")["standard error"]))
    assert all(float(row["standard error"]) > 0 for row in rows.values())
    assert "sex=m" in out
    assert (hospitals.parent / "run" / "model.json").exists()


MISTAKES = [
    (["--target", "result"], "basel: there is no column 'result'; there are age, sex"),
    ([], "say what to predict: --target COLUMN, or --time and --event"),
    (["--time", "time"], "needs both --time and --event"),
    (["--target", "sex", "--family", "gaussian"], "holds words, and family gaussian needs numbers; use logistic"),
    (["--target", "age", "--family", "gausian"], "unknown family 'gausian'; did you mean 'gaussian'?"),
    (["--target", "age", "--drop-columns", "weight"], "'weight' is to be dropped, and no site has such a column"),
    (["--target", "age", "--cv", "5", "--lam", "1"], "--cv and --select choose lam; leave --lam out"),
    (["--target", "age", "--select", "1se"], "--select 1se compares held-out losses; add --cv 5"),
    (["--target", "age", "--select", "bic", "--cv", "5"], "--select bic is a criterion without folds; leave --cv out"),
    (["--target", "age", "--select", "bci"], "select is 'bci'; choose from min, 1se, bic, ebic"),
    (["--target", "age", "--cv", "5", "--penalty", "none"], "penalty 'none' has no weight to choose"),
    (["--target", "age", "--family", "logistic"], "'age' has 300 different values; logistic tells classes apart"),
    (["--target", "outcome", "--out", "hospitals/zug.csv"], "zug.csv is a file; name a folder with --out"),
    (["--target", "outcome", "--categorical", "eec"], "'eec' is to be categorical, and no site has such a column"),
    (["--target", "pressure"], "the target 'pressure' has no value in row"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_mistakes_are_one_line(command, hospitals, words, message):
    code, out, err = command("fit", "--data", f"csv:{hospitals}", *words, "--quiet")
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


COX = ["--time", "time", "--event", "event", "--drop-columns", "outcome"]
COUNTS = ["--target", "event", "--family", "poisson", "--drop-columns", "outcome,time"]
IN_A_FILE = [
    ("time", float("inf"), COX, "bern: column 'time' has inf in row 3; give finite numbers"),
    ("time", -1.0, COX, "bern: column 'time' has -1 in row 3; times must be at least 0"),
    ("event", 2, COX, "bern: column 'event' has 2 in row 3; 1 is an event, 0 censored"),
    ("event", -2, COUNTS, "bern: column 'event' has -2 in row 3; counts must be at least 0"),
    ("age", float("inf"), COUNTS, "column 'age' has infinity at site 'bern', row 3"),
    ("age", float("inf"), ["--target", "age", "--family", "huber"], "bern: column 'age' has inf in row 3"),
    ("age", "old", COUNTS, "column 'age' has 'old' in row 3 at site 'bern', among numbers"),
    ("outcome", None, ["--target", "outcome"], "bern: the target 'outcome' has no value in row 3"),
]


@pytest.mark.parametrize(("column", "value", "words", "message"), IN_A_FILE, ids=[m for *_, m in IN_A_FILE])
def test_what_is_wrong_in_a_file_is_told_by_site_column_and_row(command, hospitals, column, value, words, message):
    """Rows are numbered within the file."""
    table = pl.read_csv(hospitals / "bern.csv")
    values = table[column].to_list()
    values[3] = value
    table.with_columns(pl.Series(column, list(map(str, values)) if value == "old" else values, strict=False)).write_csv(
        hospitals / "bern.csv"
    )
    code, out, err = command("fit", "--data", f"csv:{hospitals}", *words, "--quiet")
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_what_is_not_a_fit_or_not_its_table(command, hospitals):
    code, _, err = command("predict", hospitals, hospitals / "zug.csv")
    assert (code, "holds no model.json; give the folder of a `fednmap fit`" in err) == (2, True)
    command("fit", "--data", f"csv:{hospitals}", "--target", "age", "--quiet", "--out", "run")
    pl.read_csv(hospitals / "zug.csv").with_columns(ecg=pl.lit("z")).write_csv("new.csv")
    code, _, err = command("predict", "run", "new.csv")
    assert (code, "new: column 'ecg' has the level 'z' in row 0, which no site had" in err) == (2, True)
    code, _, err = command("fit", "--data", f"csv:{hospitals}", "--target", "age", "--quiet", "--out", "run")
    assert (code, "run exists already; choose another folder" in err) == (2, True)
