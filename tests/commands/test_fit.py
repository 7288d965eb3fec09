"""`fednmap fit` and `fednmap predict`: from files to a model with names, and back."""

import csv
import json
from html import escape

import numpy as np
import polars as pl
import pytest
from hospital_files import write_hospitals
from matplotlib import mathtext
from safetensors.torch import load_file

import fednmap
from fednmap.estimators import (
    FederatedCoxRegression,
    FederatedGLM,
    FederatedLasso,
    FederatedLogisticRegression,
    FederatedOrdinalRegression,
    evaluate,
    fitted_model,
)
from fednmap.runs.folder import RunFolder
from fednmap.tables import FederatedPreprocessor, read_sites


@pytest.fixture
def hospitals(tmp_path):
    return write_hospitals(tmp_path / "hospitals")


def test_a_fit_with_names_path_and_choice(command, hospitals):
    words = ("fit", "--data", f"csv:{hospitals}", "--target", "outcome", "--family", "logistic", "--penalty", "mcp")
    more = ("--path", "--cv", "leave-one-site-out", "--exclude", "time,event", "--out", "run")
    code, out, err = command(*words, *more)
    assert code == 0
    assert "4 sites, 300 rows, 6 columns; family logistic, penalty mcp" in err
    assert "sex=m" in out
    assert "odds ratio" in out
    assert "outcome = sick" in out
    run = hospitals.parent / "run"
    assert {p.name for p in run.iterdir()} == {
        *("model.json", "coefficients.csv", "path.csv", "path.png", "cv.csv", "cv.png", "report.html", "model_card.md"),
        *("run.toml", "environment.json", "metrics.csv", "results.json", "models", ".lock", "SHA256SUMS"),
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


def test_errors_after_a_penalty_do_not_replace_the_coefficients_that_predict(command, hospitals):
    words = ("fit", "--data", f"csv:{hospitals}", "--target", "outcome", "--exclude", "time,event")
    for out, penalty in (("run", "l1:0.05"), ("plain", "none")):
        code, *_ = command(*words, "--penalty", penalty, "--cov-type", "HC0", "--tol-absolute", 1e-9, "--out", out)
        assert code == 0
    run, plain = (pl.read_csv(hospitals.parent / out / "coefficients.csv") for out in ("run", "plain"))
    known = json.loads((hospitals.parent / "run" / "model.json").read_text())
    assert run["coefficient"].to_numpy() == pytest.approx([*known["coef"][0], *known["intercept"]], rel=1e-12)
    assert (run["coefficient"] == 0).any()
    assert run["unpenalised"].to_numpy() == pytest.approx(plain["coefficient"].to_numpy(), rel=1e-6)
    assert run["low"].to_numpy() == pytest.approx(plain["low"].to_numpy(), rel=1e-6)
    card = (hospitals.parent / "run" / "model_card.md").read_text()
    assert "are shrunk, and have no intervals: those here are of the estimates without the penalty" in card
    assert "unpenalised" not in plain.columns


def test_the_command_is_the_estimator(command, hospitals):
    words = ("--target", "outcome", "--penalty", "l1", "--lam", 0.01, "--tol-absolute", 1e-9, "--exclude", "time,event")
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


@pytest.mark.parametrize("order", [("b", "c", "a"), None])
def test_ordered_labels(command, hospitals, order):
    """The thresholds, their errors, the path and the probabilities of the estimator; words by name without --order."""
    words = ("fit", "--data", f"csv:{hospitals}", "--target", "ecg", "--family", "ordinal", "--penalty", "none")
    words += ("--exclude", "time,event,outcome", *(("--order", ",".join(order)) if order else ()))
    code, out, _ = command(*words, "--tol-absolute", 1e-9, "--json", "--quiet", "--out", "run")
    assert code == 0
    sites = read_sites(f"csv:{hospitals}")
    features = {name: t.without(["outcome", "time", "event", "ecg"]) for name, t in sites.items()}
    preprocessor = FederatedPreprocessor().fit(features)
    X = np.concatenate([preprocessor.transform(t) for t in features.values()])
    y = np.concatenate([t["ecg"] for t in sites.values()]).astype(str)
    where = np.repeat(list(sites), [t.rows for t in sites.values()])
    alone = FederatedOrdinalRegression("none", order=order, tol=1e-9).fit(X, y, where)
    found, errors = json.loads(out)["coefficients"], alone.inference(X, y, where)
    low, mid, high = order or ("a", "b", "c")
    assert [row["name"] for row in found][-2:] == [f"{low}|{mid}", f"{mid}|{high}"]
    assert [row["coefficient"] for row in found] == pytest.approx([*alone.coef_, *alone.thresholds_], abs=1e-6)
    assert [row["standard error"] for row in found] == pytest.approx(errors.error, rel=1e-6)
    command("predict", "run", hospitals / "bern.csv", "--out", "said.csv")
    said = pl.read_csv("said.csv")
    shares = np.column_stack([said[f"P({label})"] for label in alone.classes_])
    assert shares == pytest.approx(alone.predict_proba(X)[where == "bern"], abs=1e-6)
    code, _, err = command(*words, "--positive", "a", "--quiet")
    assert (code, "expected --positive with family logistic or cox, got family ordinal" in err) == (2, True)


def lower_median(values):
    return np.nanquantile(values, 0.5, method="inverted_cdf")


def with_flag(values, by):
    return np.c_[np.where(np.isnan(values), by, values), np.isnan(values)]


@pytest.mark.parametrize(("impute", "fill"), [("mean", np.nanmean), ("median", lower_median)])
def test_rows_that_are_held_out_do_not_fill_gaps(command, hospitals, impute, fill):
    """The held-out loss at every lam is that of tables whose gaps were filled by the other sites alone."""
    words = (
        "--target",
        "age",
        "--family",
        "gaussian",
        "--tol-absolute",
        1e-9,
        "--exclude",
        "sex,ecg,outcome,time,event",
    )
    more = (
        "--impute",
        impute,
        "--cv",
        "leave-one-site-out",
        "--evaluate",
        "leave-one-site-out",
        "--tol-absolute",
        1e-9,
        "--quiet",
        "--json",
        "--out",
        "run",
    )
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
    found = {row["measure"]: row["value"] for row in pl.read_csv("run/evaluation.csv").to_dicts()}
    assert found["squared error"] == pytest.approx(2 * losses.min(), rel=1e-6)


NAMES = ["pulse [/min]", "x [mg/dl]", "[bold]y[/bold]", ":warning:", "<b>z & 1", "$x_1^$", 'a, "b"']
"""Of columns, in the markup of rich, HTML, formulas and CSV."""


def write_named(folder, names=NAMES, classes=("[/no]", "$y^$ <i>"), sites=("_[/a]", "$b^$")):
    """Tables whose columns, labels and files have such names."""
    rng = np.random.default_rng(1)
    folder.mkdir()
    for site in sites:
        X = rng.normal(size=(40, len(names)))
        label = np.where(X[:, 0] + rng.normal(size=40) > 0, *classes)
        file = folder / f"{site}.csv".replace("/", "|")
        pl.DataFrame({name: X[:, j] for j, name in enumerate(names)} | {"target [/x] $^$": label}).write_csv(file)
    return folder


def test_names_are_printed_as_they_are(command, tmp_path, monkeypatch):
    """In the terminal, on the page, in files and in pictures."""
    monkeypatch.setenv("COLUMNS", "200")
    drawn = []
    render = mathtext.MathTextParser.parse
    monkeypatch.setattr(
        mathtext.MathTextParser, "parse", lambda self, s, *a, **k: drawn.append(s) or render(self, s, *a, **k)
    )
    words = ("--data", f"csv:{write_named(tmp_path / 'sites')}", "--target", "target [/x] $^$", "--path")
    code, out, _ = command("fit", *words, "--cv", "leave-one-site-out", "--out", "run")
    assert code == 0
    assert [name for name in NAMES if name not in out] == []
    assert "Coefficients are for target [/x] $^$ = [/no]." in out
    page = (tmp_path / "run" / "report.html").read_text()
    assert [name for name in NAMES if escape(name) not in page] == []
    assert "<b>z" not in page
    assert pl.read_csv(tmp_path / "run" / "coefficients.csv")["name"].to_list() == [*NAMES, "(intercept)"]
    first = (tmp_path / "run" / "path.csv").read_text().splitlines()[0]
    assert next(csv.reader([first])) == ["lam", *NAMES]
    assert {
        s for s in drawn if "^" in s and "mathdefault" not in s
    } == set()  # ticks of a logarithmic axis are formulas
    code, out, _ = command("predict", "run", tmp_path / "sites" / "$b^$.csv")
    assert code == 0
    assert next(csv.reader([out.splitlines()[0]])) == ["target [/x] $^$", "P($y^$ <i>)", "P([/no])"]


def test_a_weight_by_default_is_told(command, hospitals):
    words = ("--target", "outcome", "--exclude", "time,event", "--json", "--quiet", "--out", "run")
    assert json.loads(command("fit", "--data", f"csv:{hospitals}", *words)[1])["lam"] == 0.01


def test_cox_with_errors(command, hospitals):
    words = (
        "--time",
        "time",
        "--event",
        "event",
        "--penalty",
        "none",
        "--exclude",
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
    words = ("--target", target, "--family", family, "--penalty", "none", "--exclude", drop, "--json", "--quiet")
    code, out, _ = command("fit", "--data", f"csv:{hospitals}", *words, "--tol-absolute", 1e-9, "--out", "run")
    said = json.loads(out)
    assert (code, said["lam"]) == (0, None)
    for row in said["coefficients"]:  # each with its own interval
        assert (row["low"] + row["high"]) / 2 == pytest.approx(row["coefficient"], abs=1e-6)
        assert row["standard error"] > 0


@pytest.mark.parametrize(("labels", "more"), [(("no", "yes"), ()), (("alive", "dead"), ("--positive", "dead"))])
def test_events_in_words(command, hospitals, labels, more):
    words = (
        "fit",
        "--data",
        f"csv:{hospitals}",
        "--time",
        "time",
        "--event",
        "event",
        "--exclude",
        "outcome",
        "--json",
    )
    numbers = json.loads(command(*words, "--out", "numbers")[1])["coefficients"]
    for path in hospitals.iterdir():
        frame = pl.read_csv(path)
        frame.with_columns(event=pl.Series([labels[v] for v in frame["event"]])).write_csv(path)
    assert json.loads(command(*words, *more, "--out", "run")[1])["coefficients"] == numbers
    if more:
        code, _, err = command(*words, "--quiet", "--out", "other")
        assert (code, "1 or 0 is needed, yes or no, or --positive LABEL" in err) == (2, True)


@pytest.mark.filterwarnings("default:expected linearly independent columns")
def test_columns_that_cannot_be_told_apart_are_named_and_the_rest_is_written(command, hospitals):
    """Two pressures that lack in the same rows: their indicators are one column twice."""
    for path in hospitals.iterdir():
        frame = pl.read_csv(path).with_columns(pressure2=pl.col("pressure") * 2 + pl.col("time"))
        frame.write_csv(path)
    words = ("--target", "outcome", "--penalty", "none", "--exclude", "time,event", "--out", "run")
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
    (["--target", "age", "--exclude", "weight"], "'weight' is to be dropped, and no site has such a column"),
    (["--target", "age", "--cv", "5", "--lam", "1"], "--cv and --select choose lam; leave --lam out"),
    (["--target", "age", "--select", "1se"], "--select 1se compares held-out losses; add --cv 5"),
    (["--target", "age", "--select", "bic", "--cv", "5"], "--select bic is a criterion without folds; leave --cv out"),
    (["--target", "age", "--select", "bci"], "select is 'bci'; choose from min, 1se, bic, ebic"),
    (["--target", "age", "--cv", "5", "--penalty", "none"], "penalty 'none' has no weight to choose"),
    (["--target", "age", "--family", "logistic"], "'age' has 300 different values; logistic predicts classes"),
    (["--target", "outcome", "--out", "hospitals/zug.csv"], "zug.csv is a file; name a folder with --out"),
    (["--target", "age", "--evaluate", "leave-out"], "expected --evaluate as a number of folds or leave-one-site-out"),
    (["--target", "outcome", "--mu", "0.1"], "expected --mu with --site-effects random or sparse, got none"),
    (["--target", "outcome", "--categorical", "eec"], "'eec' is to be categorical, and no site has such a column"),
    (["--target", "pressure"], "the target 'pressure' has no value in row"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_mistakes_are_one_line(command, hospitals, words, message):
    code, out, err = command("fit", "--data", f"csv:{hospitals}", *words, "--quiet")
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


COX = ["--time", "time", "--event", "event", "--exclude", "outcome"]
COUNTS = ["--target", "event", "--family", "poisson", "--exclude", "outcome,time"]
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


def with_columns(hospitals, **more):
    """Add columns to every file, each a function of the number of rows."""
    for path in hospitals.iterdir():
        frame = pl.read_csv(path)
        frame.with_columns(**{name: pl.Series(make(frame.height)) for name, make in more.items()}).write_csv(path)


def test_predict_reads_the_columns_of_the_model_alone(command, hospitals):
    """Dates, identifiers and a target with gaps stand in a new file as they stood in those of the fit."""
    with_columns(
        hospitals,
        patient_id=lambda n: [f"{k:03d}" for k in range(n)],
        admitted=lambda n: [f"2024-01-{1 + k % 28:02d}" for k in range(n)],
    )
    words = ("--target", "outcome", "--exclude", "patient_id,admitted,time,event", "--quiet", "--out", "run")
    assert command("fit", "--data", f"csv:{hospitals}", *words)[0] == 0
    code, out, _ = command("predict", "run", hospitals / "zug.csv")
    assert (code, len(out.splitlines())) == (0, 41)
    code, with_id, _ = command("predict", "run", hospitals / "zug.csv", "--id", "patient_id")
    rows = [line.split(",", 1) for line in with_id.splitlines()]
    assert [rest for _, rest in rows] == out.splitlines()
    assert [first for first, _ in rows] == ["patient_id", *(f"{k:03d}" for k in range(40))]
    frame = pl.read_csv(hospitals / "zug.csv", schema_overrides={"patient_id": pl.String})
    frame.with_columns(pl.col("admitted").str.to_date()).write_parquet("zug.parquet")
    assert command("predict", "run", "zug.parquet", "--id", "patient_id")[1] == with_id
    days = command("predict", "run", "zug.parquet", "--id", "admitted")[1].splitlines()
    assert days[2].startswith("2024-01-02,")
    assert "there is no column 'pid'; there are age" in command("predict", "run", "zug.parquet", "--id", "pid")[2]
    assert (
        "expected an --id column that is not predicted"
        in command("predict", "run", "zug.parquet", "--id", "outcome")[2]
    )


def test_an_identifier_keeps_its_row_where_lines_are_empty(command, hospitals):
    words = ("--target", "outcome", "--exclude", "time,event", "--quiet", "--out", "run")
    assert command("fit", "--data", f"csv:{hospitals}", *words)[0] == 0
    head, *rows = (hospitals / "zug.csv").read_text().splitlines()
    lines = [f"{'NA' if k == 1 else k},{row}" for k, row in enumerate(rows[:4])]
    (hospitals.parent / "new.csv").write_text("\n".join([f"no,{head}", lines[0], "", *lines[1:], ""]) + "\n")
    code, out, _ = command("predict", "run", "new.csv", "--id", "no")
    assert code == 0
    assert [line.split(",")[0] for line in out.splitlines()] == ["no", "0", "NA", "2", "3"]


@pytest.mark.parametrize("family", ["logistic", "poisson", "cox", "gaussian"])
def test_a_ratio_has_its_own_interval(command, hospitals, monkeypatch, family):
    """exp of the coefficient's ends, with the ratio's name; the table to read shows one interval a row."""
    monkeypatch.setenv("COLUMNS", "200")
    targets = {"logistic": "outcome", "poisson": "event", "gaussian": "age"}
    goals = ("--time", "time", "--event", "event") if family == "cox" else ("--target", targets[family])
    drop = ",".join({"time", "event", "outcome"} - {*goals})
    words = ("--data", f"csv:{hospitals}", *goals, "--family", family, "--penalty", "none", "--exclude", drop)
    code, out, _ = command("fit", *words, "--out", "run")
    assert code == 0
    table = pl.read_csv(hospitals.parent / "run" / "coefficients.csv")
    name = {"logistic": "odds ratio", "poisson": "rate ratio", "cox": "hazard ratio"}.get(family)
    head = next(line for line in out.splitlines() if "coefficient" in line)
    shown = [word.strip() for word in head.strip("┃").split("┃")]
    if name is None:
        assert shown == table.columns == ["name", "coefficient", "standard error", "low", "high", "p"]
        return
    for end in ("low", "high"):
        assert table[f"{name} {end}"].to_numpy() == pytest.approx(np.exp(table[end].to_numpy()))
    inside = (table[f"{name} low"] < table[name]) & (table[name] < table[f"{name} high"])
    assert inside.all()
    assert shown == ["name", "coefficient", name, f"{name} low", f"{name} high", "standard error", "p"]
    assert "Low and high are the ends of 95 % intervals." in out


def test_the_modelled_label_is_chosen_and_printed(command, hospitals):
    """The other label of two: every sign changes, and no probability."""
    words = ("--data", f"csv:{hospitals}", "--target", "outcome", "--penalty", "none", "--exclude", "time,event")
    words = (*words, "--tol-absolute", 1e-10, "--json")
    _, plain, err = command("fit", *words, "--out", "plain")
    assert "modelled: outcome = sick, against healthy" in err
    code, out, err = command("fit", *words, "--positive", "healthy", "--out", "other")
    assert code == 0
    assert "modelled: outcome = healthy, against sick" in err
    for a, b in zip(json.loads(plain)["coefficients"], json.loads(out)["coefficients"], strict=True):
        ours = [b[key] for key in ("name", "coefficient", "odds ratio", "low", "p")]
        assert ours == pytest.approx([a["name"], -a["coefficient"], 1 / a["odds ratio"], -a["high"], a["p"]], abs=1e-6)
    said = {}
    for run in ("plain", "other"):
        code, out, err = command("predict", run, hospitals / "zug.csv", "--out", "said.csv")
        assert f"modelled: outcome = {'sick' if run == 'plain' else 'healthy'}, against" in err
        said[run] = pl.read_csv("said.csv")
    assert said["other"].columns == ["outcome", "P(sick)", "P(healthy)"]
    assert (said["plain"]["outcome"] == said["other"]["outcome"]).all()
    assert said["other"]["P(sick)"].to_numpy() == pytest.approx(said["plain"]["P(sick)"].to_numpy(), abs=1e-6)


NOT_POSITIVE = [
    (["--target", "outcome", "--positive", "ill"], "got 'ill'; 'outcome' has healthy, sick"),
    (["--target", "ecg", "--positive", "a"], "expected positive to be one of two labels, got 'a'; 'ecg' has a, b, c"),
    (["--target", "age", "--positive", "a"], "expected --positive with family logistic or cox, got family gaussian"),
]


@pytest.mark.parametrize(("words", "message"), NOT_POSITIVE, ids=[m for _, m in NOT_POSITIVE])
def test_a_label_that_cannot_be_modelled(command, hospitals, words, message):
    code, _, err = command("fit", "--data", f"csv:{hospitals}", *words, "--quiet")
    assert (code, len(err.splitlines())) == (2, 1)
    assert message in err


def test_what_is_simulated_is_called_so(command, hospitals):
    from fednmap.cli import COMMANDS

    words = ("--data", f"csv:{hospitals}", "--target", "outcome", "--exclude", "time,event")
    _, out, err = command("fit", *words, "--out", "run")
    assert "simulated: this process reads all files" in err
    cost = next(line for line in err.splitlines() if " rounds, " in line)
    assert cost.startswith("simulated: ")
    assert cost.split(" (")[0] in out
    assert cost.split(" (")[0] in (hospitals.parent / "run" / "report.html").read_text()
    assert json.loads((hospitals.parent / "run" / "model.json").read_text())["simulated"] is True
    assert "A simulation: this process reads all files" in COMMANDS["fit"]


def test_show_list_report_and_export_know_a_fit(command, hospitals, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    words = ("fit", "--data", f"csv:{hospitals}", "--target", "outcome", "--exclude", "time,event", "--lam", 0.02)
    command(*words, "--quiet", "--out", "runs/fit")
    folder = hospitals.parent / "runs" / "fit"
    made = json.loads((folder / "model.json").read_text())["environment"]
    assert made["fednmap"] == fednmap.__version__
    assert made["command"] == ["fednmap", *map(str, words), "--quiet", "--out", "runs/fit"]
    assert made["began"].startswith("20")
    for shown in (("show",), ("show", "runs/fit")):  # the newest
        code, out, _ = command(*shown)
        assert code == 0
        assert "logistic of outcome = sick, penalty l1, lam 0.02" in out
        assert "made by: fednmap fit --data" in out
        assert f"began: {made['began']}" in out
        assert "sex=m" in out
    code, out, _ = command("show", "--list")
    assert (code, "fit-logistic" in out, "finished" in out) == (0, True, True)
    began = RunFolder.open(folder).environment()
    assert began["settings"]["lam"] == 0.02
    assert len(began["data"]) == 64
    assert RunFolder.open(folder).results()[0]["ended"] == "converged"
    code, _, err = command("train", "--resume", "runs/fit")
    assert (code, "got a fit, runs/fit; repeat it with `fednmap fit`" in err) == (2, True)
    code, out, _ = command("report", "runs/fit", "-o", "page.html")
    page = (hospitals.parent / "page.html").read_text()
    assert (code, "made by: fednmap fit --data" in page, made["began"] in page) == (0, True, True)
    assert "give it alone" in command("report", "runs/fit", "runs/fit")[2]
    code, out, _ = command("export", "runs/fit", "--json")
    said = json.loads(out)
    assert code == 0
    model, tensors = fitted_model.load(folder), load_file(said["path"])
    assert said["features"] == list(model.columns)
    rows = model.preprocessor.transform(read_sites(f"csv:{hospitals}")["zug"])
    scores = rows @ tensors["1.weight"].numpy().T + tensors["1.bias"].numpy()
    command("predict", "runs/fit", hospitals / "zug.csv", "--out", "said.csv")
    assert pl.read_csv("said.csv")["P(sick)"].to_numpy() == pytest.approx(1 / (1 + np.exp(-scores[:, 0])))


def test_a_typo_in_the_target_is_said_before_anything_about_other_columns(command, tmp_path):
    for site in "ab":
        rows = "".join(f"2024-01-{k + 1:02d},{k},{k % 2}\n" for k in range(12))
        (tmp_path / f"{site}.csv").write_text("when,x,y\n" + rows)
    code, _, err = command("fit", "--data", f"csv:{tmp_path}", "--target", "yy", "--out", tmp_path / "out")
    assert (code, "there is no column 'yy'; there are when, x, y" in err) == (2, True)
    code, _, err = command("fit", "--data", f"csv:{tmp_path}", "--target", "y", "--out", tmp_path / "out")
    assert (code, "holds dates" in err) == (2, True)
    _, out, _ = command("fit", "--data", f"csv:{tmp_path}", "--formula", "y ~ x", "--out", tmp_path / "formula")
    assert "Coefficients are for y = 1." in out  # a formula without the column of dates does not look at it


def test_folds_within_sites_are_counted_once(command, tmp_path):
    for site in "ab":
        rows = "".join(f"{(7 * k) % 5},{k % 3},{k}\n" for k in range(24))
        (tmp_path / f"{site}.csv").write_text("u,v,y\n" + rows)
    words = ("fit", "--data", f"csv:{tmp_path}", "--target", "y", "--family", "gaussian", "--cv", 3)
    code, out, err = command(*words, "--out", tmp_path / "out")
    assert code == 0
    assert "fold 1 of 3\n" in out + err


@pytest.mark.parametrize("left", [[], ["run.toml"], ["run.toml", "environment.json", "model.json", "coefficients.csv"]])
def test_a_fit_that_was_stopped_is_made_again(command, hospitals, left):
    words = ("fit", "--data", f"csv:{hospitals}", "--target", "outcome", "--exclude", "time,event", "--quiet")
    assert command(*words, "--out", "run")[0] == 0
    run = hospitals.parent / "run"
    whole = (run / "coefficients.csv").read_bytes()
    assert command(*words, "--out", "run")[0] == 2  # it is finished
    for path in [p for p in run.rglob("*") if p.is_file() and p.name not in left]:
        path.unlink()
    (run / "models").rmdir()
    if "environment.json" in left:
        code, _, err = command(*words, "--lam", 0.5, "--out", "run")
        assert (code, "holds a fit that was stopped, of other settings (lam is 0.5" in err) == (2, True)
    assert command(*words, "--out", "run")[0] == 0
    assert (run / "coefficients.csv").read_bytes() == whole
    assert RunFolder(run).changed_files() == []


@pytest.mark.parametrize("name", ["x", "mean arterial blood pressure in mmHg (left arm)", "bdy_" * 16])
def test_the_coefficients_are_readable_at_80_columns(command, hospitals, monkeypatch, name):
    """No number is cut or folded, and a name breaks into pieces of 30 letters or more."""
    monkeypatch.setenv("COLUMNS", "80")
    for file in hospitals.iterdir():
        file.write_text(file.read_text().replace("pressure", name, 1))
    words = ("--data", f"csv:{hospitals}", "--target", "outcome", "--penalty", "none", "--exclude", "time,event")
    code, out, _ = command("fit", *words, "--out", "run")
    assert code == 0
    table = pl.read_csv(hospitals.parent / "run" / "coefficients.csv")
    boxes = [line for line in out.splitlines() if line[:1] in "┃│"]
    assert max(map(len, boxes)) <= 80
    cells = [[cell.strip() for cell in line.strip("┃│").replace("┃", "│").split("│")] for line in boxes]
    heads = [cell for row in cells if row[0] == "name" for cell in row[1:]]
    assert heads == ["coefficient", "odds ratio", "odds ratio low", "odds ratio high", "standard error", "p"]
    assert next(row[1] for row in cells if row[0] == "sex=m") == f"{table['coefficient'][1]:.4g}"
    pieces = [row[0] for row in cells if row[0] and row[0] in f"{name}=missing"]
    assert len(pieces) <= 6 * (1 + len(name) // 30)  # two names in three stacked tables


def test_factors_and_bounds_by_names_of_any_signs(command, tmp_path):
    """A column of words is meant with all its levels; brackets, commas and = belong to names."""
    folder = tmp_path / "sites"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for site in "ab":
        dose, age, stage = rng.normal(size=40), rng.normal(60, 9, 40), rng.choice(["I", "II", "III"], 40)
        y = dose + (stage == "II") + rng.normal(size=40)
        lines = [f"{a},{b},{c},{d}" for a, b, c, d in zip(dose, age, stage, y, strict=True)]
        (folder / f"{site}.csv").write_text("\n".join(['"dose, [mg]=x",age,stage,y', *lines]))
    common = ["fit", "--data", f"csv:{folder}", "--target", "y", "--family", "gaussian", "--penalty", "l1:1.5"]
    given = ["--penalty-factor", "dose, [mg]=x=0", "--penalty-factor", "stage=0", "--bounds", "dose, [mg]=x=0:0.25"]
    code, _, err = command(*common, *given, "--out", tmp_path / "RUN")
    assert code == 0, err
    model = fednmap.load(tmp_path / "RUN")
    coef = dict(zip(model.columns, model.coef[0], strict=True))
    assert coef["dose, [mg]=x"] == pytest.approx(0.25)
    assert coef["age"] == 0
    assert coef["stage=II"] != 0 != coef["stage=III"]
    for option, words in (("--penalty-factor", "stage"), ("--bounds", "age=0"), ("--bounds", "age=1:2")):
        code, _, err = command(*common, option, words, "--out", tmp_path / "OTHER")
        assert code == 2
        assert "expected" in err
        assert not (tmp_path / "OTHER").exists()


def test_cox_with_strata_and_intervals_of_time(command, tmp_path):
    """The command is the estimator; the formula says the same in words."""
    folder, parts = tmp_path / "sites", []
    folder.mkdir()
    rng = np.random.default_rng(0)
    for site in "ab":
        start, dose = rng.integers(0, 4, 40), rng.normal(size=40)
        ward = rng.choice(["x", "y"], 40)
        part = pl.DataFrame({"dose": dose, "ward": ward, "begin": start, "end": start + rng.integers(1, 6, 40)})
        parts.append(part.with_columns(died=pl.Series(rng.integers(0, 2, 40)), site=pl.lit(site)))
        parts[-1].drop("site").write_csv(folder / f"{site}.csv")
    rows = pl.concat(parts)
    model = FederatedCoxRegression(strata="ward").fit(
        rows.select("dose", "ward"), rows.select("begin", "end", "died").to_numpy(), rows["site"].to_numpy()
    )
    columns = ["--time", "end", "--event", "died", "--entry", "begin", "--strata", "ward"]
    formula = ["--formula", "Surv(begin, end, died) ~ dose", "--strata", "ward"]
    for k, words in enumerate((columns, formula)):
        code, _, err = command(
            "fit", "--data", f"csv:{folder}", *words, "--penalty", "none", "--out", tmp_path / f"RUN{k}"
        )
        assert code == 0, err
        assert fednmap.load(tmp_path / f"RUN{k}").coef[0] == pytest.approx(model.coef_, rel=1e-6)
    code, _, err = command("fit", "--data", f"csv:{folder}", "--target", "died", "--strata", "ward")
    assert (code, "expected --strata with family cox" in err) == (2, True)


@pytest.mark.parametrize("family", ["logistic", "cox", "gaussian"])
def test_predictions_of_rows_that_were_held_out(command, hospitals, family):
    """On the terminal, the page, the model card and in a file: what `evaluate` finds."""
    goals = {"logistic": ("--target", "outcome"), "cox": ("--time", "time", "--event", "event")}
    words = (*goals.get(family, ("--target", "age")), "--penalty", "ridge", "--lam", 0.1)
    drop = ",".join({"time", "event", "outcome", "pressure"} - {*words})  # pressure has gaps: see below
    code, out, err = command(
        "fit", "--data", f"csv:{hospitals}", *words, "--exclude", drop, "--evaluate", 4, "--out", "run"
    )
    assert (code, "evaluation: 4" in err) == (0, True)
    run = hospitals.parent / "run"
    found = {row["measure"]: row for row in pl.read_csv(run / "evaluation.csv").to_dicts()}
    first = {"logistic": "AUC", "cox": "concordance", "gaussian": "squared error"}[family]
    card = (run / "model_card.md").read_text()
    for text in (out, (run / "report.html").read_text(), card):
        assert "calibration slope" in text
        assert f"{found[first]['value']:.4g}" in text
    assert (run / "evaluation.png").exists() == (family != "cox")
    assert "`fednmap fit --data" in card
    assert "40 rows" not in card
    assert "300 rows of 4 sites" in card
    assert "| zug | 40 |" in card
    if family == "gaussian":
        sites = read_sites(f"csv:{hospitals}", drop.split(","))
        features = {name: t.without(["age"]) for name, t in sites.items()}
        preprocessor = FederatedPreprocessor().fit(features)
        X = np.concatenate([preprocessor.transform(t) for t in features.values()])
        y = np.concatenate([t["age"] for t in sites.values()])
        where = np.repeat([*sites], [t.rows for t in sites.values()])
        alone = FederatedGLM("gaussian", "ridge", 0.1).fit(X, y, where)
        assert found[first]["value"] == pytest.approx(evaluate(alone, X, y, where, cv=4).squared_error, rel=1e-5)
