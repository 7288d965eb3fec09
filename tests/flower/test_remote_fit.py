"""Path, choice of lam and standard errors between machines have the estimator's numbers: what exists in one process."""

import json

import numpy as np
import polars as pl
import pytest
from scipy.stats import norm

pytest.importorskip("flwr")

from hospital_files import write_hospitals
from table_fits import fit, pooled

from fednmap import InputError
from fednmap.cli import app
from fednmap.estimators import fitted_model
from fednmap.estimators.evaluation import evaluate
from fednmap.estimators.handshake import answer
from fednmap.estimators.linear_models import FederatedCoxRegression, FederatedGLM, FederatedOrdinalRegression
from fednmap.estimators.model_selection import FederatedCoxRegressionCV, FederatedGLMCV
from fednmap.flower import table_app
from fednmap.flower.launch import Launcher
from fednmap.flower.new import write
from fednmap.tables import FederatedPreprocessor, read

SICK = {"target": "outcome", "exclude": "time,event"}
TIMES = {"time": "time", "event": "event", "exclude": "outcome"}
TIGHT = 1e-10
SECAGG = [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.ci(turn=10)])]
PLAIN = {
    "gaussian": ({"target": "time", "exclude": "event,outcome"}, ["time"], ["event", "outcome"]),
    "logistic": (SICK, ["outcome"], ["time", "event"]),
    "poisson": ({"target": "event", "exclude": "time,outcome"}, ["event"], ["time", "outcome"]),
    "cox": (TIMES, ["time", "event"], ["outcome"]),
}


@pytest.fixture
def hospitals(tmp_path):
    """Without gaps: estimators take numbers."""
    folder = write_hospitals(tmp_path / "hospitals")
    for path in folder.iterdir():
        pl.read_csv(path).with_columns(pl.col("pressure").fill_null(130.0)).write_csv(path)
    return folder


def data(hospitals, family):
    X, y, where, names = pooled(hospitals, *PLAIN[family][1:])
    frame = pl.DataFrame(dict(zip(names, X.T, strict=True)))
    y = (y == "sick").astype(float) if family == "logistic" else y.astype(float)
    return frame, y, where


def csv(run, name):
    return pl.read_csv(run / name)


def close(a, b):
    assert np.abs(np.asarray(a, float) - np.asarray(b, float)).max() <= 1e-8


@pytest.mark.parametrize("secagg", [False, True])
@pytest.mark.parametrize("family", PLAIN)
def test_a_path_is_the_estimators(hospitals, family, secagg):
    _, run = fit(
        hospitals,
        family=family,
        penalty="l1",
        lam=0.02,
        path=True,
        tol_absolute=TIGHT,
        **PLAIN[family][0],
        secagg=secagg,
    )
    X, y, where = data(hospitals, family)
    alone = (
        FederatedCoxRegression("l1", 0.02, tol=TIGHT)
        if family == "cox"
        else FederatedGLM(family, "l1", 0.02, tol=TIGHT)
    ).fit(X, y, where)
    found, path = csv(run, "path.csv"), alone.path(X, y, where)
    assert found.columns == ["lam", *X.columns]
    close(found["lam"], path.lambdas)
    close(found[:, 1:], path.coefs[:, 0])
    close(fitted_model.load(run).coef, np.atleast_2d(alone.coef_))


@pytest.mark.parametrize("secagg", [False, True])
@pytest.mark.parametrize("cov_type", ["nonrobust", "HC0", "cluster"])
@pytest.mark.parametrize("family", PLAIN)
def test_standard_errors_are_the_estimators(hospitals, family, cov_type, secagg):
    settings = {"family": family, "penalty": "none", "cov_type": cov_type, "tol_absolute": TIGHT} | PLAIN[family][0]
    X, y, where = data(hospitals, family)
    if secagg and cov_type == "cluster":
        with pytest.raises(InputError, match="needs the gradients of single sites"):
            fit(hospitals, secagg=True, **settings)
        return
    if (family, cov_type) == ("cox", "HC0"):
        return
    _, run = fit(hospitals, secagg=secagg, **settings)
    alone = (
        FederatedCoxRegression("none", tol=TIGHT) if family == "cox" else FederatedGLM(family, "none", tol=TIGHT)
    ).fit(X, y, where)
    errors, found = alone.inference(X, y, where, cov_type=cov_type), csv(run, "coefficients.csv")
    close(found["standard error"], errors.error)
    close(found["coefficient"], errors.estimate)
    assert (run / "summary.txt").read_text() == errors.summary() + "\n"


@pytest.mark.parametrize("options", [{"penalty": "none"}, {"penalty": "l1", "cv": "3"}], ids=["errors", "cv"])
def test_sites_that_count_alike_have_the_estimators_numbers(hospitals, options):
    """Errors are then those of the sandwich, of rows that weigh unequally."""
    _, run = fit(hospitals, weights="sites", tol_absolute=TIGHT, **SICK, **options)
    X, y, where = data(hospitals, "logistic")
    if "cv" in options:
        alone = FederatedGLMCV("logistic", "l1", cv=3, weights="sites", tol=TIGHT).fit(X, y, where)
        close(csv(run, "cv.csv")["mean"], alone.cv_mean_)
        close(csv(run, "cv.csv")["se"], alone.cv_se_)
    else:
        alone = FederatedGLM("logistic", "none", weights="sites", tol=TIGHT).fit(X, y, where)
        close(csv(run, "coefficients.csv")["standard error"], alone.inference(X, y, where).error)
    close(fitted_model.load(run).coef, np.atleast_2d(alone.coef_))


def test_penalty_factors_and_bounds_are_the_estimators(hospitals):
    given = {"penalty_factor": "age=0,sex=2", "bounds": "pressure=0:"}
    _, run = fit(hospitals, lam=0.02, tol_absolute=TIGHT, **SICK, **given)
    X, y, where = data(hospitals, "logistic")
    options = {"penalty_factor": {"age": 0.0, "sex=m": 2.0}, "bounds": {"pressure": (0.0, np.inf)}}
    alone = FederatedGLM("logistic", "l1", 0.02, tol=TIGHT, **options).fit(X, y, where)
    close(fitted_model.load(run).coef, alone.coef_)


def test_names_with_commas_have_penalty_factors_and_bounds(hospitals):
    for path in hospitals.iterdir():
        pl.read_csv(path).rename({"age": "age, years"}).write_csv(path)
    given = {"penalty_factor": "age, years=0,sex=2", "bounds": "pressure=0:, age, years=:0.01"}
    _, run = fit(hospitals, lam=0.02, tol_absolute=TIGHT, **SICK, **given)
    X, y, where = data(hospitals, "logistic")
    bounds = {"pressure": (0.0, np.inf), "age, years": (-np.inf, 0.01)}
    options = {"penalty_factor": {"age, years": 0.0, "sex=m": 2.0}, "bounds": bounds}
    alone = FederatedGLM("logistic", "l1", 0.02, tol=TIGHT, **options).fit(X, y, where)
    close(fitted_model.load(run).coef, alone.coef_)


@pytest.mark.parametrize("secagg", [False, True])
@pytest.mark.parametrize(("cv", "select"), [("4", "min"), ("leave-one-site-out", "1se"), (None, "bic")])
@pytest.mark.parametrize("family", PLAIN)
def test_the_choice_of_lam_is_the_estimators(hospitals, family, cv, select, secagg):
    settings = {"family": family, "penalty": "l1", "select": select, "tol_absolute": TIGHT} | PLAIN[family][0]
    settings |= {} if cv is None else {"cv": cv}
    if secagg and cv == "leave-one-site-out":
        with pytest.raises(InputError, match="reveals the losses of single sites"):
            fit(hospitals, secagg=True, **settings)
        return
    _, run = fit(hospitals, secagg=secagg, **settings)
    X, y, where = data(hospitals, family)
    how = {"select": select, "tol": TIGHT, "cv": int(cv) if cv and cv.isdecimal() else cv}
    kind = FederatedCoxRegressionCV("l1", **how) if family == "cox" else FederatedGLMCV(family, "l1", **how)
    alone, found = kind.fit(X, y, where), csv(run, "cv.csv")
    close(found["lam"], alone.lambdas_)
    if cv is None:
        close(found["bic"] / 100, alone.criterion_ / 100)
    else:
        close(found["mean"], alone.cv_mean_)
        close(found["se"], alone.cv_se_)
    assert json.loads((run / "model.json").read_text())["lam"] == pytest.approx(alone.lam_, rel=1e-9)
    close(fitted_model.load(run).coef, np.atleast_2d(alone.coef_))


def test_gaps_are_filled_by_the_rows_outside_of_a_fold(tmp_path):
    """As `fednmap fit --cv` does it, where the estimator is given what refills gaps."""
    hospitals, settings = write_hospitals(tmp_path / "hospitals"), {"cv": "3", "tol_absolute": TIGHT} | SICK
    for impute in ("mean", "median"):
        out, settings["run_folder"] = tmp_path / f"fit-{impute}", str(tmp_path / f"run-{impute}")
        fit(hospitals, impute=impute, **settings)
        options = ["--target", "outcome", "--exclude", "time,event", "--cv", "3", "--impute", impute]
        words = ["fit", "--data", f"csv:{hospitals}", *options, "--tol-absolute", str(TIGHT), "--out", str(out)]
        app.main(words, standalone_mode=False)
        for name in ("cv.csv", "path.csv"):
            close(csv(out, name), csv(tmp_path / f"run-{impute}", name))


def test_a_median_without_a_site(tmp_path):
    """A site that is left out has no extremes to tell."""
    hospitals, settings = write_hospitals(tmp_path / "hospitals"), {"cv": "leave-one-site-out", **SICK}
    fit(hospitals, impute="median", tol_absolute=TIGHT, **settings)
    options = ["--target", "outcome", "--exclude", "time,event", "--cv", "leave-one-site-out", "--impute", "median"]
    words = ["fit", "--data", f"csv:{hospitals}", *options, "--tol-absolute", str(TIGHT), "--out"]
    app.main([*words, str(tmp_path / "one")], standalone_mode=False)
    close(csv(tmp_path / "one", "cv.csv"), csv(tmp_path / "run", "cv.csv"))


@pytest.mark.parametrize("family", ["gamma", "negative-binomial", "ordinal"])
def test_more_families_are_the_estimators(hospitals, family):
    """Penalised, and with standard errors."""
    goals = {
        "gamma": ("time", "event,outcome"),
        "negative-binomial": ("visits", "time,event,outcome"),
        "ordinal": ("ecg", "time,event,outcome"),
    }
    if family == "negative-binomial":
        for path in hospitals.iterdir():
            rng, table = np.random.default_rng(len(path.stem)), pl.read_csv(path)
            mean = np.exp(0.02 * (table["age"].to_numpy() - 60) + 1) * rng.gamma(2.0, 0.5, len(table))
            table.with_columns(visits=rng.poisson(mean)).write_csv(path)
    target, drop = goals[family]
    settings = {
        "family": family,
        "target": target,
        "exclude": drop,
        "penalty": "none",
        "tol_absolute": 1e-9,
        "rounds": 5000,
    }
    _, run = fit(hospitals, **settings, **({"order": "a,b,c"} if family == "ordinal" else {}))
    X, y, where, names = pooled(hospitals, [target], drop.split(","))
    frame, options = pl.DataFrame(dict(zip(names, X.T, strict=True))), {"tol": 1e-9, "max_rounds": 5000}
    if family == "ordinal":
        alone = FederatedOrdinalRegression("none", order=("a", "b", "c"), **options).fit(frame, y.astype(str), where)
    else:
        alone = FederatedGLM(family, "none", **options).fit(frame, y.astype(float), where)
    assert np.abs(fitted_model.load(run).coef - np.atleast_2d(alone.coef_)).max() <= 1e-7
    errors = alone.inference(frame, y.astype(str if family == "ordinal" else float), where)
    found = csv(run, "coefficients.csv")
    assert list(found["name"]) == list(errors.names)
    close(found["standard error"], errors.error)


def numbers(said, name=""):
    """All numbers in an answer, each with the name under which it stands."""
    if isinstance(said, dict):
        return [pair for key, part in said.items() for pair in numbers(part, key)]
    if isinstance(said, list):
        return [pair for part in said for pair in numbers(part, name)]
    return [(name, said)] if isinstance(said, int | float) else []


def test_under_masks_no_number_is_in_the_clear_but_rows(hospitals):
    sent = []

    def listen(name, message, answer):
        reply = answer()
        sent.append(reply.content)
        return [reply]

    fit(hospitals, fault=listen, secagg=True, **SICK)
    assert not any("sum" in content for content in sent)
    assert sum("masked" in content for content in sent) > 40
    said = [json.loads(str(content["answer"]["json"])) for content in sent if "answer" in content]
    assert {name for part in said for name, _ in numbers(part)} == {"rows"}


def test_under_masks_a_column_may_be_called_rows(hospitals):
    """The number of rows is in the clear, the sums of a column of that name are not."""
    told = []
    for path in hospitals.iterdir():
        pl.read_csv(path).rename({"age": "rows"}).write_csv(path)

    def listen(name, message, answer):
        reply = answer()
        if "answer" in reply.content:
            told.extend(numbers(json.loads(str(reply.content["answer"]["json"]))))
        return [reply]

    fit(hospitals, fault=listen, secagg=True, **SICK)
    assert sorted(told) == sorted(("rows", len(pl.read_csv(path))) for path in hospitals.iterdir())


def test_a_server_that_asks_in_the_clear_gets_no_sum(hospitals):
    """Although the settings, which the site knows, say secagg."""
    asked = []

    def unmask(name, message, answer):
        if name == "bern" and "secagg" in message.content and '"sums"' in str(message.content.get("question", "")):
            del message.content["secagg"]
            asked.append(str((reply := answer()).content))
            return [reply]
        return [answer()]

    with pytest.raises(InputError, match="bern: secagg: the server asks for a vector in the clear; refused"):
        fit(hospitals, fault=unmask, secagg=True, **SICK)
    assert "sum.x" not in asked[0]


def test_a_reply_that_got_lost_under_masks_is_asked_for_again(hospitals):
    lost = []

    def fault(name, message, answer):
        if name == "chur" and '"gradients"' in str(message.content.get("question", "")) and len(lost) < 2:
            lost.append(answer())
            return []
        return [answer()]

    closing, _ = fit(hospitals, fault=fault, deadline=0.5, secagg=True, **SICK)
    assert len(lost) == 2
    assert closing["ended"] == "converged"


MADE_UP = {
    "cv": {"penalty": "l1", "cv": "4"},
    "errors": {"penalty": "none", "secagg": True},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", [pytest.param(name, marks=pytest.mark.ci(turn=k)) for name, k in zip(MADE_UP, (3, 7), strict=True)]
)
def test_nodes_have_the_numbers_of_the_estimator(tmp_path, what):
    """The template's tables on three real nodes: path and choice of lam in the clear, standard errors under masks."""
    write(tmp_path / "my-tables", "tables")
    names, run = ("client-0", "client-1", "client-2"), tmp_path / "run"
    with Launcher(tmp_path / "flower") as launcher:
        launcher.superlink()
        for name in names:
            launcher.supernode(name, tmp_path / "states", file=str(tmp_path / "my-tables" / "data" / f"{name}.csv"))
        settings = {"names": ",".join(names), "lam": "", "exclude": "pressure", "tol_absolute": TIGHT} | MADE_UP[what]
        process = launcher.run(tmp_path / "my-tables", run_folder=str(run), **settings)
        process.wait(1500)
        assert (run / "model.json").exists(), launcher.log("run")
    tables = {name: read(tmp_path / "my-tables" / "data" / f"{name}.csv") for name in names}
    features = {name: t.without(["pressure", "outcome"]) for name, t in tables.items()}
    encoder = FederatedPreprocessor().fit(features)
    X = np.concatenate([encoder.transform(t) for t in features.values()])
    frame = pl.DataFrame(dict(zip(encoder.get_feature_names_out().tolist(), X.T, strict=True)))
    y = np.concatenate([t["outcome"] for t in tables.values()]) == "sick"
    where = np.repeat(names, [t.rows for t in tables.values()])
    if what == "cv":
        alone = FederatedGLMCV("logistic", "l1", cv=4, tol=TIGHT).fit(frame, y.astype(float), where)
        close(csv(run, "cv.csv")["mean"], alone.cv_mean_)
        close(csv(run, "path.csv")[:, 1:], alone.path_.coefs[:, 0])
    else:
        alone = FederatedGLM("logistic", "none", tol=TIGHT).fit(frame, y.astype(float), where)
        close(csv(run, "coefficients.csv")["standard error"], alone.inference(frame, y.astype(float), where).error)
    close(fitted_model.load(run).coef, np.atleast_2d(alone.coef_))


def test_random_intercepts_are_not_known_between_machines(hospitals):
    with pytest.raises(InputError, match="site_effects 'random' is for one process"):
        fit(hospitals, family="gaussian", site_effects="random", mu=0.1, **PLAIN["gaussian"][0])


EFFECTS = [
    ("logistic", {"site_effects": "sparse", "mu": 0.004}),
    ("logistic", {"site_effects": "intercepts"}),
    ("gaussian", {"site_effects": "sparse", "mu": 0.05}),
    ("poisson", {"site_effects": "intercepts", "cv": "3"}),
    ("cox", {"site_effects": "sparse", "mu": 0.004}),
]


@pytest.mark.parametrize("secagg", SECAGG)
@pytest.mark.parametrize(("family", "effects"), EFFECTS, ids=[f"{f}-{e['site_effects']}" for f, e in EFFECTS])
def test_site_effects_are_the_estimators_and_stay_at_their_sites(hospitals, family, effects, secagg):
    """What a site has of its own is in a file of its state folder, from which it predicts; no message has it."""
    sent = []

    def listen(name, message, answer):
        reply = answer()
        sent.extend(
            np.ravel(array.numpy()) for record in reply.content.array_records.values() for array in record.values()
        )
        sent.append(
            [number for _, number in numbers(json.loads(str(reply.content.get("answer", {"json": "0"})["json"])))]
        )
        return [reply]

    settings = {"family": family, "penalty": "l1", "tol_absolute": TIGHT} | PLAIN[family][0] | effects
    settings |= {} if "cv" in effects else {"lam": 0.01}
    _, run = fit(hospitals, fault=listen, secagg=secagg, **settings)
    X, y, where = data(hospitals, family)
    how = {key: int(v) if key == "cv" else v for key, v in effects.items()} | {"tol": TIGHT}
    if family == "cox":
        alone = FederatedCoxRegression("l1", 0.01, **how)
    else:
        alone = FederatedGLMCV(family, "l1", **how) if "cv" in effects else FederatedGLM(family, "l1", 0.01, **how)
    alone.fit(X, y, where)
    model, own = fitted_model.load(run), alone.site_effects_
    close(model.coef, np.atleast_2d(alone.coef_))
    if secagg and family != "cox":
        close(model.intercept, alone.intercept_)
    elif family == "gaussian":  # in the clear: what gives the mean row the mean response
        close(model.intercept, y.mean() - X.to_numpy().mean(0) @ model.coef[0])
    if "cv" in effects:
        close(csv(run, "cv.csv")["mean"], alone.cv_mean_)
    assert "site_effects" not in json.loads((run / "model.json").read_text())
    assert not [path for path in run.rglob("*") if "deviation" in path.name or path.name == "sites.csv"]
    files = list((hospitals.parent / "states" / "effects").rglob("*.json"))
    assert sorted(path.parent.name for path in files) == sorted(own.sites)
    told = np.concatenate([np.ravel(part) for part in sent])
    for path in files:
        k = own.sites.index(path.parent.name)
        said = json.loads(path.read_text())
        close(said["deviation"], own.deviation[k])
        close(said["intercept"], own.intercept[k])
        with_own, site = fitted_model.with_effects(model, path)
        mine = read(hospitals / f"{site}.csv")
        expected = next(iter(with_own.predict(mine, site).values())) if family in ("gaussian", "poisson") else None
        if expected is not None:
            close(expected, alone.predict(X.filter(where == site), where[where == site]))
            words = ["predict", str(run), str(hospitals / f"{site}.csv"), "--effects", str(path)]
            app.main([*words, "--out", str(hospitals.parent / "new.csv")], standalone_mode=False)
            close(csv(hospitals.parent, "new.csv").to_series(), expected)
            path.write_text(json.dumps(said | {"coef": [1.0] * len(said["coef"])}))
            with pytest.raises(InputError, match="is of another fit; give the file that this site's node wrote"):
                fitted_model.with_effects(model, path)
        scale = np.where(X.to_numpy().std(0) > 0, X.to_numpy().std(0), 1.0)
        share = (where == site).mean()
        level = own.intercept[k] + X.to_numpy().mean(0) @ (model.coef[0] + own.deviation[k])  # of the mean row
        forms = (own.deviation[k], own.deviation[k] * scale, own.intercept[k], level * (family != "cox"))
        secret = np.concatenate([np.ravel(v) for v in forms])
        secret = secret[np.abs(secret) > 1e-6]
        for form in (secret, share * secret):
            assert not (np.abs(told[:, None] - form) < 1e-7 * np.abs(form)).any()


@pytest.mark.parametrize("secagg", SECAGG)
@pytest.mark.parametrize("family", ["logistic", "gaussian", "poisson"])
def test_an_evaluation_is_that_of_the_same_intervals(hospitals, family, secagg):
    """Every row is predicted by a model without its fold; the sites send sums by intervals of predictions."""
    _, run = fit(
        hospitals, family=family, lam=0.02, evaluate="3", tol_absolute=TIGHT, secagg=secagg, **PLAIN[family][0]
    )
    X, y, where = data(hospitals, family)
    alone, normal = FederatedGLM(family, "l1", 0.02, tol=TIGHT).fit(X, y, where), norm.ppf(np.arange(1, 20) / 20)
    positive = y.mean() * np.exp(normal)
    grid = {"logistic": np.arange(1, 20) / 20, "gaussian": y.mean() + y.std() * normal}.get(family, positive)
    expected, found = evaluate(alone, X, y, where, cv=3, grid=grid).table(), csv(run, "evaluation.csv")
    assert list(found["measure"]) == [row[0] for row in expected.rows]
    for k, name in enumerate(("value", "low", "high"), start=1):
        close([v for v in found[name] if v is not None], [row[k] for row in expected.rows if row[k] is not None])


def extended(hospitals):
    """With a column of offsets, of exposures, of strata and of starts of the time at risk."""
    for k, path in enumerate(sorted(hospitals.iterdir())):
        rng, table = np.random.default_rng(k), pl.read_csv(path)
        n, time = len(table), table["time"].to_numpy()
        table.with_columns(
            known=rng.normal(0.3, 1.0, n),
            years=rng.uniform(0.5, 4.0, n),
            ward=rng.choice(["x", "y"], n),
            start=time * rng.random(n) * 0.5,
        ).write_csv(path)
    return hospitals


MORE = {
    "poisson-exposure": ("poisson", {"exposure": "years"}, "known,ward,start"),
    "logistic-offset": ("logistic", {"offset": "known"}, "years,ward,start"),
    "gaussian-offset": ("gaussian", {"offset": "known"}, "years,ward,start"),
    "cox-strata": ("cox", {"strata": "ward"}, "known,years,start"),
    "cox-entry": ("cox", {"entry": "start", "strata": "ward"}, "known,years"),
}


@pytest.mark.parametrize("secagg", SECAGG)
@pytest.mark.parametrize("what", MORE)
def test_offsets_strata_and_entries_are_the_estimators(hospitals, what, secagg):
    """With a choice of lam, whose path begins at the model without columns; and with standard errors."""
    family, more, unused = MORE[what]
    settings = {"family": family, "tol_absolute": TIGHT} | PLAIN[family][0] | more
    settings["exclude"] += f",{unused}"
    sites = {path.stem: pl.read_csv(path) for path in sorted(extended(hospitals).iterdir())}
    goals, drop = PLAIN[family][1:]
    extra = [more[name] for name in ("offset", "exposure", "strata") if name in more]
    X, y, where, names = pooled(hospitals, goals, [*drop, *unused.split(","), *more.values()])
    frame = pl.DataFrame(dict(zip(names, X.T, strict=True)))
    whole = pl.concat([sites[name] for name in dict.fromkeys(where.tolist())])
    frame = frame.with_columns(whole[name] for name in extra)
    y = (y == "sick").astype(float) if family == "logistic" else y.astype(float)
    if "entry" in more:
        y = np.column_stack([whole["start"], y])
    how = {key: v for key, v in more.items() if key != "entry"} | {"tol": TIGHT}
    if family != "cox":
        _, run = fit(hospitals, penalty="l1", cv="3", secagg=secagg, **settings)
        chosen = FederatedGLMCV(family, "l1", cv=3, **how).fit(frame, y, where)
        close(csv(run, "cv.csv")["lam"], chosen.lambdas_)
        close(csv(run, "cv.csv")["mean"], chosen.cv_mean_)
        close(fitted_model.load(run).coef, np.atleast_2d(chosen.coef_))
    settings["run_folder"] = str(hospitals.parent / "run-2")
    fit(hospitals, penalty="none", secagg=secagg, **settings)
    alone = FederatedCoxRegression("none", **how) if family == "cox" else FederatedGLM(family, "none", **how)
    errors = alone.fit(frame, y, where).inference(frame, y, where)
    found = csv(hospitals.parent / "run-2", "coefficients.csv")
    close(found["coefficient"], errors.estimate)
    close(found["standard error"], errors.error)


FORMULAS = {
    "outcome ~ age * sex + C(ecg)": "logistic",
    "time ~ bs(age, df=4) + log(pressure):sex": "gaussian",
    "Surv(time, event) ~ standardize(age) + center(pressure) + sex": "cox",
}


@pytest.mark.parametrize("formula", FORMULAS)
def test_a_formula_has_the_columns_of_one_process(hospitals, formula):
    """Knots, means and levels are those of all rows; rows with gaps in its columns are left out at their sites."""
    path = hospitals / "bern.csv"
    pl.read_csv(path).with_columns(age=pl.when(pl.col("age") > 75).then(None).otherwise(pl.col("age"))).write_csv(path)
    family, out = FORMULAS[formula], hospitals.parent / "fit"
    settings = {"formula": formula, "family": family, "lam": 0.02, "tol_absolute": TIGHT}
    _, run = fit(hospitals, impute="mean", **settings)
    words = ["fit", "--data", f"csv:{hospitals}", "--formula", formula, "--family", family, "--lam", "0.02"]
    app.main([*words, "--tol-absolute", str(TIGHT), "--out", str(out)], standalone_mode=False)
    model, alone = fitted_model.load(run), fitted_model.load(out)
    assert model.columns == alone.columns
    close(model.coef, alone.coef)
    close(model.intercept, alone.intercept)
    rows = read(hospitals / "zug.csv")
    assert list(model.predict(rows).values())[-1] == pytest.approx(list(alone.predict(rows).values())[-1], rel=1e-6)


@pytest.mark.parametrize(
    ("question", "formula", "words"),
    [
        ({"ask": "ranges", "columns": ["pressure"]}, "time ~ bs(age, df=4) + pressure", "does not lead to ranges of"),
        ({"ask": "counts", "cuts": {"pressure": [120.0]}}, "time ~ bs(age, df=4) + pressure", "to counts of"),
        ({"ask": "counts", "cuts": {"age": [50.0]}}, "time ~ center(age)", "to counts of"),
        ({"ask": "ranges", "columns": ["age"]}, "time ~ age", "to ranges of"),
    ],
)
def test_a_formula_leads_to_few_questions(hospitals, question, formula, words):
    given = {"names": "a", "run-folder": "run", "formula": formula, "family": "gaussian"}
    task, rows = table_app.read(given)[0], read(hospitals / "bern.csv")
    with pytest.raises(InputError, match=words):
        answer(question, task.complete(rows), task)
