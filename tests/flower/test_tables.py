"""A fit of tables between machines is the estimator's: in one process here, between real processes where slow."""

import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

pytest.importorskip("flwr")

from flower_grid import context
from hospital_files import write_hospitals
from public_data import needs
from table_fits import NAMES, fit, pooled

from fednmap import InputError
from fednmap.estimators import FederatedCoxRegression, FederatedGLM, FederatedLogisticRegression, fitted_model
from fednmap.estimators.handshake import Agreement, RemoteFitConfig, answer, reply, side
from fednmap.flower import roster, server, table_app
from fednmap.flower.audit_log import logs, rows
from fednmap.flower.identity import make
from fednmap.flower.launch import Launcher
from fednmap.flower.new import write
from fednmap.tables import read


@pytest.fixture
def hospitals(tmp_path):
    return write_hospitals(tmp_path / "hospitals")


LOGISTIC = [
    {"penalty": "l1", "lam": 0.01},
    {"penalty": "none"},
    {"penalty": "mcp", "lam": 0.02, "weights": "sites"},
    {"penalty": "ridge", "lam": 0.1, "impute": "median"},
]


@pytest.mark.parametrize("options", LOGISTIC, ids=lambda o: o["penalty"])
def test_logistic_regression_is_the_estimators(hospitals, options):
    closing, run = fit(hospitals, target="outcome", exclude="time,event", tol_absolute=1e-11, **options)
    assert str(closing["ended"]).startswith("converged")
    impute = {"impute": options.pop("impute")} if "impute" in options else {}
    X, y, where, names = pooled(hospitals, ["outcome"], ["time", "event"], **impute)
    alone = FederatedLogisticRegression(tol=1e-11, **options).fit(X, y.astype(str), where)
    model = fitted_model.load(run)
    assert list(model.columns) == names
    assert model.classes == ("healthy", "sick")
    assert np.abs(model.coef - alone.coef_).max() <= 1e-8
    assert np.abs(model.intercept - alone.intercept_).max() <= 1e-8 * max(1, np.abs(alone.intercept_).max())
    said = model.predict(read(hospitals / "zug.csv"))
    assert said["P(sick)"] == pytest.approx(alone.predict_proba(X[where == "zug"])[:, 1], abs=1e-8)


FAMILIES = [
    ({"family": "gaussian", "target": "time"}, ["event", "outcome"]),
    ({"family": "huber", "target": "time"}, ["event", "outcome"]),
    ({"family": "poisson", "target": "event"}, ["time", "outcome"]),
    ({"family": "logistic", "target": "ecg"}, ["time", "event", "outcome"]),
]


NET = {"penalty": "elastic-net", "lam": 0.02}


@pytest.mark.parametrize(("settings", "drop"), FAMILIES, ids=[f"{s['family']}-{s['target']}" for s, _ in FAMILIES])
def test_every_family_is_the_estimators(hospitals, settings, drop):
    closing, run = fit(
        hospitals, **settings, exclude=",".join(drop), penalty="elastic-net", lam=0.02, tol_absolute=1e-10
    )
    assert str(closing["ended"]).startswith("converged")
    X, y, where, _ = pooled(hospitals, [settings["target"]], drop)
    y = y.astype(str) if settings["family"] == "logistic" else y.astype(float)
    alone = FederatedGLM(settings["family"], **NET, tol=1e-10).fit(X, y, where)
    model = fitted_model.load(run)
    assert np.abs(model.coef - np.atleast_2d(alone.coef_)).max() <= 1e-7
    assert closing["objective"] == pytest.approx(alone.objective_, abs=1e-9)


def test_large_counts(hospitals):
    """The curvature is that where the fit begins, at the mean of the counts, not at 1."""
    for path in hospitals.iterdir():
        pl.read_csv(path).with_columns(event=(50 * pl.col("age")).round()).write_csv(path)
    given = {"family": "poisson", "target": "event", "exclude": "time,outcome,age", "lam": 0.01}
    closing, run = fit(hospitals, **given, tol_absolute=1e-8, rounds=100)
    assert str(closing["ended"]).startswith("converged")
    X, y, where, _ = pooled(hospitals, ["event"], ["time", "outcome", "age"])
    alone = FederatedGLM("poisson", lam=0.01, tol=1e-8).fit(X, y.astype(float), where)
    assert fitted_model.load(run).coef[0] == pytest.approx(alone.coef_, abs=1e-6)


def test_no_counts_at_all(hospitals):
    for path in hospitals.iterdir():
        pl.read_csv(path).with_columns(event=pl.lit(0)).write_csv(path)
    with pytest.raises(InputError, match="all counts are 0"):
        fit(hospitals, family="poisson", target="event", exclude="time,outcome")


def test_cox_is_the_estimators(hospitals):
    _, run = fit(
        hospitals, family="cox", time="time", event="event", penalty="l1", exclude="outcome", tol_absolute=1e-11
    )
    X, y, where, _ = pooled(hospitals, ["time", "event"], ["outcome"])
    alone = FederatedCoxRegression("l1", tol=1e-11).fit(X, y.astype(float), where)
    assert np.abs(fitted_model.load(run).coef - alone.coef_).max() <= 1e-8


def test_cox_with_a_site_where_nothing_happened(hospitals):
    path = hospitals / "zug.csv"
    pl.read_csv(path).with_columns(event=pl.lit(0)).write_csv(path)
    goals = {"family": "cox", "time": "time", "event": "event"}
    closing, run = fit(hospitals, **goals, penalty="l1", exclude="outcome", tol_absolute=1e-10)
    assert str(closing["ended"]).startswith("converged")
    X, y, where, _ = pooled(hospitals, ["time", "event"], ["outcome"])
    alone = FederatedCoxRegression("l1", tol=1e-10).fit(X, y.astype(float), where)
    model = fitted_model.load(run)
    assert np.abs(model.coef - alone.coef_).max() <= 1e-7
    said = model.predict(read(path))["hazard ratio"]
    assert said == pytest.approx(alone.predict_hazard(X[where == "zug"]), rel=1e-6)


def test_codes_as_categories_and_groups(hospitals):
    _, run = fit(
        hospitals,
        **{"target": "outcome", "exclude": "time", "categorical": "event"},
        **{"penalty": "group-lasso", "lam": 0.01, "tol_absolute": 1e-10},
    )
    assert "event=1" in fitted_model.load(run).columns
    assert (run / "coefficients.csv").read_text().startswith("name,coefficient,odds ratio\n")


def test_only_sums_leave_a_site(hospitals):
    """No answer of a site has as many numbers as it has rows."""
    said = []

    def listen(name, message, answer):
        reply = answer()
        said.append(str(reply.content["answer"]["json"]) if "answer" in reply.content else "")
        return [reply]

    fit(hospitals, fault=listen, target="outcome", exclude="time,event")
    assert max(text.count(",") for text in said) < 40


def test_answers_are_in_the_log_of_what_was_sent(hospitals):
    sent = []

    def listen(name, message, answer):
        sent.append((name, message.metadata.message_type))
        return [answer()]

    fit(hospitals, fault=listen, target="outcome", exclude="time,event")
    entered = logs(hospitals.parent / "states")
    for name in NAMES:
        assert [line["kind"] for line in entered[name]] == [kind for who, kind in sent if who == name]
        asked = {f"answer about its table: {ask}" for ask in ("columns", "sums", "gradients", "agree")}
        assert asked <= {row.kind for row in rows(name, entered[name])}


def test_who_requires_masks_answers_no_question(hospitals):
    with pytest.raises(InputError, match="chur: this client takes part with secure aggregation alone"):
        fit(hospitals, about={103: {"require-secagg": True}}, target="outcome", exclude="time,event")


def test_no_node_answers_a_question_under_a_name_that_it_cannot_prove(hospitals, monkeypatch):
    """Names are bound to keys before the first question, not only before the first round."""
    monkeypatch.setattr(roster, "STUCK", 0.1)
    folder, asked = hospitals.parent / "keys", []
    make(folder, list(NAMES), "127.0.0.1")
    about = {101 + i: {"key": str(folder / name)} for i, name in enumerate(NAMES)}
    about[104] = {"key": str(folder / "basel")}  # it calls itself zug

    def listen(name, message, answer):
        asked.append((name, message.metadata.message_type))
        return [answer()]

    given = {"target": "outcome", "exclude": "time,event", "clients_file": str(folder / "clients.toml")}
    with pytest.raises(TimeoutError, match="3 clients connected, at least 4 are needed; missing: zug"):
        fit(hospitals, fault=listen, about=about, deadline=0.2, **given)
    assert {kind for _, kind in asked} == {"query"}
    about[104] = {"key": str(folder / "zug")}
    assert str(fit(hospitals, about=about, **given)[0]["ended"]).startswith("converged")


REFUSED = [
    ({"target": "result"}, "basel: there is no column 'result'"),
    ({"target": "pressure", "family": "gaussian"}, "basel: column 'pressure' has gaps, and may have none"),
    ({"target": "sex", "family": "gaussian"}, "basel: column 'sex' holds words; numbers are needed"),
    ({"target": "outcome", "positive": "ill"}, "expected positive to be one of two labels, got 'ill'"),
    ({"target": "outcome", "penalty": "l3"}, "unknown penalty 'l3'"),
    ({"target": "outcome", "reg": "l1:0.1"}, "unknown setting 'reg'"),
    ({}, "say what to predict"),
    ({"target": "outcome", "exclude": "tiem"}, "'tiem' is to be dropped, and no site has such a column"),
    ({"target": "outcome", "secagg_threshold": 3}, "secagg-threshold is given without it; add secagg = true"),
    ({"target": "outcome", "pin_on_first_use": True}, "pin-on-first-use writes keys into clients-file"),
    ({"target": "outcome", "lam": -1.0}, "lam: Input should be greater than or equal to 0, given -1.0"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused_in_one_line(hospitals, settings, message):
    with pytest.raises(InputError) as refused:
        fit(hospitals, **settings)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (hospitals.parent / "run").exists()


OTHER_QUESTIONS = [
    ({"categorical": "age"}, "categorical is ['age'] in the question and [] in this site's settings"),
    ({"impute": "median"}, "ranges are for impute = 'median', and this site's settings have 'mean'"),
    ({"weights": "sites"}, "what was agreed is not what the settings of 'basel' say"),
]


@pytest.mark.parametrize(("server", "message"), OTHER_QUESTIONS, ids=[next(iter(s)) for s, _ in OTHER_QUESTIONS])
def test_a_site_tells_nothing_that_its_own_settings_do_not_ask_for(hospitals, server, message):
    with pytest.raises(InputError) as refused:
        fit(hospitals, target="outcome", exclude="time,event", server=server)
    assert message in str(refused.value)
    assert str(refused.value).endswith("give all machines the same app")
    assert "\n" not in str(refused.value)


def agreed(hospitals, **settings):
    """What was agreed in a fit, and the table of bern."""
    _, run = fit(hospitals, **SICK, **settings)
    known = Agreement.model_validate(json.loads((run / "agreement.json").read_text()))
    return known, replace(read(hospitals / "bern.csv"), name="bern")


def test_an_agreement_is_about_what_the_site_fits(hospitals):
    """A target that becomes a feature would be told column by column."""
    known, rows = agreed(hospitals, rounds=1)
    known.check(known.task, rows)
    for task in ({"target": "ecg"}, {"exclude": "time"}):
        other = known.model_copy(update={"task": known.task.model_copy(update=task)})
        with pytest.raises(InputError, match="what was agreed is not what the settings of 'bern' say"):
            other.check(known.task, rows)


@pytest.mark.parametrize("ask", ["hessian", "information", "outer", "pearson", "left-out", "rows"])
def test_a_question_that_the_settings_do_not_lead_to_is_refused(hospitals, ask):
    known, rows = agreed(hospitals)
    with pytest.raises(InputError, match=f"the settings do not lead to the question '{ask}'; refused"):
        reply({"ask": ask, "part": None, "fill": {}}, None, known, rows, lambda *_: None)


SQUARES = {"ask": "squares", "part": None, "fill": {}}
AT_ZERO = {"ask": "gradients", "part": None, "fill": {}}


@pytest.mark.parametrize("name", ["mean", "y", "shift", "factor", "fill"])
def test_numbers_of_a_question_cannot_choose_rows(hospitals, name):
    """With a factor of 0 for all rows but one, or a mean for each row, an answer would be a single row."""
    _, run = fit(hospitals, family="gaussian", target="time", exclude="event,outcome", rounds=1)
    known = Agreement.model_validate(json.loads((run / "agreement.json").read_text()))
    rows = replace(read(hospitals / "bern.csv"), name="bern")
    n, p = rows.rows, len(known.names)
    question = {**SQUARES, "mean": [0.0] * p, "y": 0.0} if name in ("mean", "y") else AT_ZERO | {"shift": [0.0] * p}
    question |= {} if name in ("mean", "y") else {"factor": [1.0] * p}
    points = torch.zeros(1, known.dim, dtype=torch.float64) if "factor" in question else None
    reply(question, points, known, rows, lambda *_: None)
    each = [[float(k == 0)] * p for k in range(n)] if name in ("mean", "shift", "factor") else [0.0] * n
    with pytest.raises((InputError, TypeError)):
        reply(question | {name: {"pressure": each} if name == "fill" else each}, points, known, rows, lambda *_: None)


def test_a_mean_for_each_row_is_refused(hospitals):
    rows, task = read(hospitals / "bern.csv"), RemoteFitConfig.make(**SICK)
    with pytest.raises(TypeError):
        answer({"ask": "deviations", "means": {"age": [0.0] * rows.rows}}, rows, task)


@pytest.mark.parametrize("columns", [["time"], ["age"], [], ["pressure", "event"]])
def test_fills_are_those_of_columns_with_gaps(hospitals, columns):
    """Sums of columns that are left out of the fit would tell of these."""
    known, rows = agreed(hospitals, rounds=1)
    question = {"ask": "fills", "part": None, "fill": {}, "columns": ["pressure"]}
    assert len(reply(question, None, known, rows, lambda *_: None)) == 2
    with pytest.raises(InputError, match="fills of other columns than those with gaps; refused"):
        reply(question | {"columns": columns}, None, known, rows, lambda *_: None)


def test_a_fold_of_one_row_is_refused(hospitals):
    """The sums of all rows less those of the others would be that row; under masks it is one of several."""
    path = hospitals / "bern.csv"
    pl.read_csv(path).head(9).write_csv(path)
    with pytest.raises(InputError, match=r"bern: a fold has one row of the site, .* give fewer folds"):
        fit(hospitals, cv="5", **SICK)
    fit(hospitals, cv="5", secagg=True, rounds=1, run_folder=str(hospitals.parent / "run-2"), **SICK)
    known = Agreement.model_validate(json.loads((hospitals.parent / "run-2" / "agreement.json").read_text()))
    rows = replace(read(path), name="bern")
    sizes = [side({"ask": "losses", "part": [k, True]}, known, rows).sum() for k in range(5)]
    assert sorted(sizes) == [1, 2, 2, 2, 2]


@pytest.mark.parametrize(("ask", "held_out"), [("sums", True), ("gradients", True), ("columns", False)])
def test_questions_that_no_fit_asks_about_a_fold_are_refused(hospitals, ask, held_out):
    known, rows = agreed(hospitals, cv="4", rounds=1)
    with pytest.raises(InputError, match="about these rows of a fold; refused"):
        side({"ask": ask, "part": [0, held_out]}, known, rows)


def test_a_table_that_has_grown_is_not_asked_on(hospitals):
    """Sums of the rows before and after would be added up, with the weights of those before."""
    settings = {"penalty": "l1", "lam": 0.001, "tol_absolute": 1e-9} | SICK
    left = [25]

    def stop(name, message, answer):
        left[0] -= "question" in message.content
        return [answer()] if left[0] > 0 else []

    with pytest.raises(TimeoutError):
        fit(hospitals, fault=stop, deadline=0.2, attempts=1, **settings)
    path = hospitals / "bern.csv"
    pl.concat([pl.read_csv(path), pl.read_csv(path).head(2)]).write_csv(path)
    with pytest.raises(InputError, match="bern: the table has other rows than when the run began; begin a new run"):
        fit(hospitals, resume=True, **settings)


@pytest.mark.parametrize(
    "part",
    [[0, True], [7, False], [-1, True], ["0", True], [[0, 1], True], 5, [0], [1.0, True], [True, False], [1, 1]],
)
def test_a_fold_that_the_settings_do_not_lead_to_is_refused(hospitals, part):
    """Rows of the server's choice would tell single ones by differences."""
    known, rows = agreed(hospitals, **({} if part == [0, True] else {"cv": "4"}))
    with pytest.raises(InputError, match="that the settings do not lead to; refused"):
        side({"part": part}, known, rows)


def test_columns_are_asked_for_with_the_sites_own_limits(hospitals):
    own, rows = RemoteFitConfig.make(target="outcome"), read(hospitals / "bern.csv")
    for more in ({"max_levels": 10**6}, {"categorical": ["age"]}):
        question = {"ask": "columns", "max_levels": 50, "categorical": []} | more
        with pytest.raises(InputError, match=r"in the question and .* in this site's settings"):
            answer(question, rows, own)
    for question in ({"ask": "ranges", "columns": ["age"]}, {"ask": "counts", "cuts": {"age": [50.0]}}):
        with pytest.raises(InputError, match="are for impute = 'median'"):
            answer(question, rows, own)
        assert answer(question, rows, RemoteFitConfig.make(target="outcome", impute="median"))


def cell(column, value, where=3):
    """A table with `value` in its fourth row, or elsewhere; the rest as it was."""

    def change(rows):
        values = rows[column].astype(object) if isinstance(value, str) else rows[column].copy()
        values[where] = value
        return replace(rows, columns={**rows.columns, column: values})

    return change


def unreadable(rows):
    raise ValueError("could not convert string to float: 'Miller 77123'")


COUNTS = {"target": "event", "family": "poisson", "exclude": "time,outcome"}
SICK = {"target": "outcome", "exclude": "time,event"}
IN_A_CELL = [
    (SICK, cell("age", "Miller 77123"), "stray-word", "age"),
    (SICK, cell("age", float("inf")), "infinite", "age"),
    (COUNTS, cell("event", -77123.0), "range", "event"),
    ({"time": "time", "event": "event", "family": "cox"}, cell("time", -77123.0), "range", "time"),
    ({"target": "age", "family": "gaussian"}, cell("age", "Miller 77123", slice(None)), "words", "age"),
    (SICK, unreadable, "ValueError", ""),
]


@pytest.mark.parametrize(
    ("settings", "change", "code", "column"), IN_A_CELL, ids=[f"{c}-{n}" for *_, c, n in IN_A_CELL]
)
def test_a_refusal_shows_cells_at_the_site_alone(hospitals, caplog, settings, change, code, column):
    """Code and column are sent, and are in the log of what was sent; the site's terminal says more."""
    sent = []

    def load(context):
        rows = read(hospitals / f"{context.node_config['client']}.csv")
        return change(rows) if context.node_config["client"] == "chur" else rows

    def listen(name, message, answer):
        reply = answer()
        sent.append(str(reply.content))
        return [reply]

    with pytest.raises(InputError) as refused:
        fit(hospitals, load=load, fault=listen, **settings)
    assert str(refused.value).startswith("chur: ")
    assert repr(column) in str(refused.value) or not column
    for words in (str(refused.value), *sent):
        assert "77123" not in words
        assert "row 3" not in words
    assert "77123" in caplog.text or "inf" in caplog.text
    last = logs(hospitals.parent / "states")["chur"][-1]
    assert {item["name"]: item["value"] for item in last["items"]} == {"refused.code": code, "refused.column": column}
    assert f"refused.code str {code!r}" in str(rows("chur", [last])[0].items)
    assert "77123" not in json.dumps(last)


def test_an_error_in_a_round_shows_no_cell(hospitals, caplog, monkeypatch):
    """Flower sends the words of an exception. A node that was started again reads its file again."""
    sent, broken = [], []
    monkeypatch.setattr(table_app.plain, "once", lambda load: load)

    def load(context):
        rows = read(hospitals / f"{context.node_config['client']}.csv")
        return cell("sex", "Miller 77123")(rows) if broken else rows

    def listen(name, message, answer):
        if '"losses"' in str(message.content.get("question", "")):
            broken.append(name)
        reply = answer()
        sent.append(str(reply.error) if reply.has_error() else str(reply.content))
        return [reply]

    with pytest.raises((InputError, OSError)):
        fit(hospitals, load=load, fault=listen, deadline=0.2, attempts=1, **SICK)
    assert any("unknown-level" in words for words in sent)
    assert not any("77123" in words for words in sent)
    assert "77123" in caplog.text


def test_a_site_answers_about_statistics_that_it_took_part_in(hospitals):
    """A column of numbers as a category would be counted value by value; levels and gaps may not be left out."""
    _, run = fit(hospitals, rounds=1, **SICK)
    said = json.loads((run / "agreement.json").read_text())
    own, rows = Agreement.model_validate(said).task, replace(read(hospitals / "bern.csv"), name="bern")
    place = {s["column"]: k for k, s in enumerate(said["statistics"])}
    changes = [
        ("age", {"kind": "category", "levels": [str(v) for v in rows["age"]]}),
        ("sex", {"levels": ["f"]}),
        ("sex", {"kind": "number"}),
        ("pressure", {"flagged": False}),
        ("age", {"column": "sex "}),
    ]
    for column, change in changes:
        statistics = [dict(s) for s in said["statistics"]]
        statistics[place[column]] |= change
        with pytest.raises(InputError, match=r"the statistics of column .* are not those that 'bern' took part in"):
            Agreement.model_validate(said | {"statistics": statistics}).check(own, rows)


def ask_again(question):
    """The question of a server that wants to know more: other statistics, other cuts, another mean."""
    other = json.loads(json.dumps(question))
    if "agreement" in other:
        other["agreement"]["statistics"][0]["fill"] += 1.0
    elif "fill" in other:
        other["fill"] = {"age": 1.0}
    elif other["ask"] == "counts":
        other["cuts"] = {name: [v + 1e-3 for v in cuts] for name, cuts in other["cuts"].items()}
    elif other["ask"] == "deviations":
        other["means"] = {name: v + 1.0 for name, v in other["means"].items()}
    return other


@pytest.mark.parametrize("ask", ["deviations", "counts", "sums", "squares", "agree"])
def test_a_question_is_answered_once_in_a_run(hospitals, ask):
    """The same again is answered: a reply may get lost."""
    found = []

    def put(name, message, answer):
        if message.metadata.message_type != "query.tables":
            return [answer()]
        question = json.loads(str(message.content["question"]["json"]))
        reply = answer()
        if question["ask"] == ask and name == "bern" and "refused" not in reply.content:
            found.append("refused" not in answer().content)
        if question["ask"] == ask and name == "bern" and len(found) == (10 if ask == "counts" else 1):
            message.content["question"]["json"] = json.dumps(ask_again(question))
            found.append(str(answer().content))
            message.content["question"]["json"] = json.dumps(question)  # which others are asked too
        return [reply]

    fit(hospitals, fault=put, impute="median", rounds=1, **SICK)
    *same, other = found
    assert same == [True] * (10 if ask == "counts" else 1)
    assert "again in this run, in other words; refused" in other


def test_the_modelled_label_is_the_settings(hospitals):
    _, run = fit(hospitals, positive="healthy", penalty="none", tol_absolute=1e-8, **SICK)
    X, y, where, _ = pooled(hospitals, ["outcome"], ["time", "event"])
    alone = FederatedGLM("logistic", "none", tol=1e-8).fit(X, y == "healthy", where)
    model = fitted_model.load(run)
    assert model.classes == ("sick", "healthy")
    assert model.coef[0] == pytest.approx(alone.coef_[0], abs=1e-5)


def test_a_column_that_one_site_lacks_is_named(hospitals):
    def load(context):
        found = read(hospitals / f"{context.node_config['client']}.csv")
        return found.without(["age"]) if context.node_config["client"] == "chur" else found

    with pytest.raises(InputError, match="column 'age' is missing at site 'chur', and site 'basel' has it"):
        fit(hospitals, load=load, target="outcome", exclude="time,event")


def test_the_template_has_every_setting_and_reads_as_it_is(tmp_path):
    write(tmp_path / "my-tables", "tables")
    settings = tomllib.loads((tmp_path / "my-tables" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    task, federation = table_app.read(settings)
    assert (task.target, task.lam, federation.min_clients) == ("outcome", 0.01, 3)
    assert "file='$PWD/client-0.csv'" in (tmp_path / "my-tables" / "README.md").read_text()
    with pytest.raises(InputError, match="unknown template 'table'; did you mean 'tables'"):
        write(tmp_path / "other", "table")


@pytest.mark.slow
@pytest.mark.ci(turn=8)
def test_the_template_between_real_processes_is_the_estimator(tmp_path):
    """The four hospitals of the heart-disease data, each a node with a file of its own."""
    needs("heart_disease", "processed.va.data")
    hospitals = tmp_path / "hospitals"
    script = Path(__file__).parents[2] / "examples" / "hospitals" / "files.py"
    subprocess.run([sys.executable, script, hospitals], check=True)
    write(tmp_path / "my-tables", "tables")
    names = [path.stem for path in sorted(hospitals.iterdir())]
    run = tmp_path / "run"
    with Launcher(tmp_path / "flower") as launcher:
        launcher.superlink()
        for name in names:
            launcher.supernode(name, tmp_path / "states", file=str(hospitals / f"{name}.csv"))
        settings = {"names": ",".join(names), "lam": 0.005, "tol_absolute": 1e-10, "impute": "median"}
        process = launcher.run(
            tmp_path / "my-tables", run_folder=str(run), exclude="cholesterol", **settings
        )  # not measured in Switzerland
        process.wait(900)
        assert (run / "model.json").exists(), launcher.log("run")
    X, y, where, columns = pooled(hospitals, ["outcome"], ["cholesterol"], impute="median")
    alone = FederatedLogisticRegression("l1", 0.005, tol=1e-10).fit(X, y.astype(str), where)
    model = fitted_model.load(run)
    assert list(model.columns) == columns
    assert np.abs(model.coef - alone.coef_).max() <= 1e-8
    assert np.abs(model.intercept - alone.intercept_).max() <= 1e-8
    said = command("predict", run, hospitals / "va.csv").splitlines()
    assert said[0] == "outcome,P(healthy),P(sick)"
    assert [float(line.split(",")[2]) for line in said[1:]] == pytest.approx(
        alone.predict_proba(X[where == "va"])[:, 1], abs=1e-8
    )
    for words in (["show", run], ["report", run], ["export", run]):
        command(*words)


def command(*words):
    done = subprocess.run(
        [sys.executable, "-m", "fednmap", *map(str, words)], cwd=words[1], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_server_that_was_killed_goes_on(hospitals):
    settings = {"target": "outcome", "exclude": "time,event", "tol_absolute": 1e-10}
    asked = []

    def killed(name, message, answer):
        asked.append(str(message.content.get("question", "")))
        if sum('"gradients"' in words for words in asked) == 20:
            raise KeyboardInterrupt
        return [answer()]

    with pytest.raises(KeyboardInterrupt):
        fit(hospitals, fault=killed, **settings)
    run = hospitals.parent / "run"
    assert not (run / "model.json").exists()
    with pytest.raises(InputError, match=r"the settings differ from those of .*; keep them, or begin a new run"):
        fit(hospitals, resume=True, **settings, lam=0.5)
    with pytest.raises(InputError, match="exists already; choose another run-folder, or set resume = true"):
        fit(hospitals, **settings)
    fit(hospitals, resume=True, **settings)
    X, y, where, _ = pooled(hospitals, ["outcome"], ["time", "event"])
    alone = FederatedLogisticRegression(tol=1e-10).fit(X, y.astype(str), where)
    assert np.abs(fitted_model.load(run).coef - alone.coef_).max() <= 1e-8


def test_the_server_ends_with_the_superlink(tmp_path, monkeypatch):
    """As the server of a network does."""
    done = []
    for place, name in ((server, "end_with_the_superlink"), (table_app, "fit")):
        monkeypatch.setattr(place, name, lambda *_, name=name: done.append(name))
    given = {"names": "bern,chur", "run-folder": str(tmp_path / "run"), "target": "outcome"}
    table_app.server_app()(None, context("", given, tmp_path))
    assert done == ["end_with_the_superlink", "fit"]


def test_an_answer_that_got_lost_is_asked_for_again(hospitals):
    lost = []

    def fault(name, message, answer):
        if name == "chur" and "question" in message.content and len(lost) < 2:
            lost.append(message)
            return []
        return [answer()]

    closing, _ = fit(hospitals, fault=fault, target="outcome", exclude="time,event", deadline=0.3)
    assert len(lost) == 2
    assert str(closing["ended"]).startswith("converged")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"family": "binomial", "target": "time", "trials-column": "n"}, "family binomial is for `fednmap fit`"),
        ({"target": "outcome", "heterogeneity": True}, "heterogeneity is for `fednmap fit`"),
        ({"target": "outcome", "site-effects": "sparse", "cv": "leave-one-site-out"}, "has no effects of its own"),
        ({"target": "outcome", "site-effects": "sparse", "evaluate": "3"}, "one score per row, without site effects"),
        (
            {"family": "cox", "time": "time", "event": "event", "offset": "age"},
            "no offset and no exposure with family cox",
        ),
        ({"target": "outcome", "cv": "5", "evaluate": "3"}, "one dealing of folds, got cv 5 and evaluate 3"),
        (
            {"formula": "time ~ bs(age, df=4)", "family": "gaussian", "secagg": True},
            "bs in a formula asks for extremes",
        ),
    ],
)
def test_what_one_process_alone_has_is_refused(settings, message):
    with pytest.raises(InputError, match=message):
        table_app.read({"names": "a,b", "run-folder": "run", **settings})


def test_an_app_written_earlier_finds_its_functions():
    from fednmap.flower import tables

    with pytest.warns(DeprecationWarning, match="now fednmap.flower.table_app.client_app"):
        assert tables.client_app is table_app.client_app
