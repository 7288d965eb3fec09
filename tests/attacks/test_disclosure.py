"""What a site's own rules refuse: attacks by whoever submits the run, ended at the site with a code and no cell."""

import json
import shutil
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

pytest.importorskip("flwr")

from flower_grid import NAMES as CLIENTS
from flower_grid import FakeGrid, Federation
from hospital_files import write_hospitals

from fednmap import InputError
from fednmap.flower import table_app
from fednmap.flower.audit_log import logs
from fednmap.flower.disclosure import Rules, effective_rows, weights
from fednmap.flower.local import LocalProblem
from fednmap.problems import GLM, LeastSquares
from fednmap.tables import Table, read
from fednmap.tables.table import SiteError

NAMES = ("basel", "bern", "chur", "zug")
ZUG = 104
SICK = {"target": "outcome", "exclude": "time,event"}


def fit(folder, text, change=None, **settings):
    """A fit in one process in which zug has rules: its closing numbers and all that zug has sent."""
    hospitals = folder / "hospitals"
    if not hospitals.exists():
        write_hospitals(hospitals)
    (folder / "rules.toml").write_text(text)
    given = {"names": ",".join(NAMES), "run-folder": str(folder / "run"), "deadline": 1.0, "attempts": 1}
    given |= {key.replace("_", "-"): v for key, v in settings.items()}
    sent = []

    def load(context):
        name = context.node_config["client"]
        rows = read(hospitals / f"{name}.csv")
        return change(rows) if change and name == "zug" else rows

    def listen(name, message, answer):
        reply = answer()
        if name == "zug":
            sent.append(str(reply.error) if reply.has_error() else str(reply.content))
        return [reply]

    grid = FakeGrid(
        {101 + i: name for i, name in enumerate(NAMES)}, table_app.client_app(load), given, folder / "s", listen
    )
    grid.about = {ZUG: {"rules": str(folder / "rules.toml")}}
    return lambda: table_app.fit(grid, *table_app.read(given)), sent


def with_levels(*words):
    """The first rows of ecg hold these words."""

    def change(rows):
        ecg = rows["ecg"].copy()
        ecg[: len(words)] = words
        return Table({**rows.columns, "ecg": ecg}, rows.name)

    return change


def first(n):
    return lambda rows: rows.some(slice(0, n))


PAGE = Path(__file__).parents[2] / "docs" / "disclosure.md"
LEVEL, MERGE = "min-level-count = 5", 'min-level-count = 5\nsmall-levels = "merge"'
INTERCEPTS = {"site_effects": "intercepts"}
FOLDS, QUESTIONS = {"cv": "4"}, 'questions = ["columns", "deviations", "target", "agree"]'


def documented(attack, rules, printed, code):
    """The row of an attack is on the page as it is printed."""
    row = f"| {attack} | `{rules}` | {printed} | `{code}` |"
    assert row in PAGE.read_text().splitlines(), row


@pytest.mark.parametrize(
    ("attack", "rules", "change", "settings", "code"),
    [
        ("the sums of two rows", "min-rows = 5", first(2), {}, "rule-rows"),
        ("the median of three rows", "min-rows = 5", first(3), {"impute": "median"}, "rule-rows"),
        ("a level with one patient", LEVEL, with_levels("Miller"), {}, "rule-level"),
        ("", MERGE, with_levels("Miller"), {}, "rule-level"),
        ("a model with as many parameters as rows allow", "max-parameters-per-row = 0.1", None, {}, "rule-parameters"),
        ("a column for which nobody asked the site", 'columns = ["age", "outcome"]', None, {}, "rule-column"),
        ("", 'columns = ["age", "sex"]', None, {}, "rule-column"),
        ("", 'questions = ["columns", "target"]', None, {}, "rule-question"),
        ("a question that the site does not answer", QUESTIONS, None, {}, "rule-question"),
        ("gradients at more and more models", "max-points = 3", None, {}, "rule-points"),
        ("a gradient that rests on few rows", "min-effective-rows = 60", None, {}, "rule-few-rows"),
        ("a gradient at a site's own model, on few rows", "min-effective-rows = 60", None, INTERCEPTS, "rule-few-rows"),
        ("", "min-effective-rows = 60", None, {"offset": "age"}, "rule-few-rows"),
        ("", "min-rows = 15", None, FOLDS, "rule-rows"),  # 10 rows of 40 are held out
        ("a fold in which a level is rare", "min-level-count = 8", None, FOLDS, "rule-level"),
        ("the sums of a small fold, by difference", "min-effective-rows = 12", None, FOLDS, "rule-few-rows"),
        ("exact answers beyond a privacy budget", "max-epsilon = 1.0", None, {}, "rule-budget"),
        ("", "min-rows = many", None, {}, "rules"),
        ("a rule that is misspelt", "min-row = 5", None, {}, "rules"),
    ],
)
def test_refused_at_the_site_with_a_code(tmp_path, caplog, attack, rules, change, settings, code):
    run, sent = fit(tmp_path, rules, change, **SICK, **settings)
    with pytest.raises(InputError) as error:
        run()
    assert str(error.value).startswith("zug")
    assert "\n" not in str(error.value)
    last = logs(tmp_path / "s")["zug"][-1]
    assert {"refused.code", "refused.column"} == {item["name"] for item in last["items"]}
    assert last["items"][0]["value"] == code
    assert "rules of this site" in caplog.text
    assert not any("Miller" in reply for reply in [*sent, str(error.value)])
    if attack:
        documented(attack, rules, error.value, code)


def test_forged_statistics_are_refused(tmp_path):
    """A number as a category would be counted value by value: the server offers an agreement of its own making."""
    forge, negotiate = {"kind": "category", "levels": ("40.0", "41.0")}, table_app.negotiate

    def forged(task):
        known = yield from negotiate(task)
        statistics = [replace(s, **forge) if s.column == "age" else s for s in known.statistics]
        return known.model_copy(update={"statistics": tuple(statistics)})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_app, "negotiate", forged)
        run, _ = fit(tmp_path, "", **SICK)
        with pytest.raises(InputError) as error:
            run()
    name = next(site for site in NAMES if site in str(error.value))
    last = logs(tmp_path / "s")[name][-1]
    assert last["items"][0]["value"] == "settings"
    documented("forged statistics: a number as a category", "none needed", error.value, "settings")


@pytest.mark.parametrize(
    ("attack", "formula", "rules", "code"),
    [
        ("a formula with a bump at one patient", "I(exp(-100 * (age - 61.3)**2))", LEVEL, "rule-formula"),
        ("", "bs(age, knots=[61.2, 61.4])", LEVEL, "rule-formula"),
        ("a formula that only the oldest patient feels", "exp(age)", LEVEL, "rule-few-rows"),
        ("an interaction in which a cell is small", "C(sex):C(ecg):C(ward)", LEVEL, "rule-few-rows"),
    ],
)
def test_a_formula_that_singles_out_a_row_is_refused(tmp_path, attack, formula, rules, code):
    write_hospitals(tmp_path / "hospitals")
    for path in (tmp_path / "hospitals").iterdir():
        table = pl.read_csv(path)
        table.with_columns(ward=pl.Series(["a", "b", "c", "d"] * (len(table) // 4))).write_csv(path)
    run, _ = fit(tmp_path, rules, formula=f"outcome ~ {formula}")
    with pytest.raises(InputError) as error:
        run()
    assert logs(tmp_path / "s")["zug"][-1]["items"][0]["value"] == code
    if attack:
        documented(attack, rules, error.value, code)


@pytest.mark.parametrize("rules", ["min-cell = 5", "min-effective-rows = 5"])
def test_intervals_of_predictions_with_few_rows_are_refused(tmp_path, caplog, rules):
    """An interval with one row has the outcome of one patient. The fit ends without an evaluation."""
    fit(tmp_path, rules, **SICK, evaluate="2")[0]()
    assert logs(tmp_path / "s")["zug"][-1]["items"][0]["value"] == "rule-few-rows"
    assert not (tmp_path / "run" / "evaluation.csv").exists()
    printed = next(r.getMessage() for r in caplog.records if r.getMessage().startswith("no evaluation"))
    if "cell" in rules:
        documented("the outcome of a patient by intervals of predictions", rules, printed, "rule-few-rows")


def test_effects_are_told_once_and_at_one_model(tmp_path):
    """The server asks again at another model: the share of a mean intercept would be another one."""
    run, _ = fit(tmp_path, "", **SICK, **INTERCEPTS, secagg=True)
    told = table_app.SiteQuestions.sum

    def twice(self, question, length, points=None):
        found = told(self, question, length, points)
        return told(self, question, length, points + 1.0) if question["ask"] == "effects" else found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_app.SiteQuestions, "sum", twice)
        with pytest.raises(InputError, match="the server asks about 'effects' again in this run") as error:
            run()
    attack = "the mean intercept at a second model"
    documented(attack, "none needed", error.value, "settings")


def test_small_levels_are_merged_into_one_if_the_site_says_so(tmp_path):
    change = with_levels(*("Miller", "Smith", "Jones") * 2)
    run, sent = fit(tmp_path, 'min-level-count = 5\nsmall-levels = "merge"', change, **SICK)
    run()
    assert "ecg=other" in json.loads((tmp_path / "run" / "model.json").read_text())["columns"]
    assert not any("Miller" in reply for reply in sent)


def test_rules_that_nothing_breaks_change_nothing(tmp_path):
    rules = (
        "min-rows = 10\nmin-level-count = 3\nmax-parameters-per-row = 0.33\nmin-effective-rows = 5\nmax-points = 500"
    )
    for name, text in (("with", rules), ("without", "")):
        (tmp_path / name).mkdir()
        fit(tmp_path / name, text, **SICK)[0]()
    with_rules, without = (
        json.loads((tmp_path / name / "run" / "model.json").read_text()) for name in ("with", "without")
    )
    assert with_rules["coef"] == without["coef"]


def test_extremes_and_quantiles_are_rounded(tmp_path):
    """All ages through the cuts of a median: with few digits the cuts tell no age, and counts come in steps."""
    run, sent = fit(tmp_path, "digits = 1\nmin-cell = 5", **SICK, impute="median")
    run()
    answers = [json.loads(reply.split("'json': '")[1].split("'}")[0]) for reply in sent if "'json': '{\"age\"" in reply]
    ranges = next(a["age"] for a in answers if isinstance(a["age"], list) and len(a["age"]) == 2)
    counts = [a["age"] for a in answers if isinstance(a["age"], list) and len(a["age"]) > 2]
    assert all(v % 10 == 0 for v in ranges)
    assert counts
    assert all(v % 5 == 0 for found in counts for v in found)
    ages = read(tmp_path / "hospitals" / "zug.csv")["age"]
    own = Table({"age": ages})
    cut = {"ask": "counts", "cuts": {"age": [float(np.sort(ages)[7]) + 1e-9]}}
    assert Rules(digits=1).coarse(cut, own)["cuts"]["age"][0] % 10 == 0


def people(n=60, p=4, seed=0):
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.normal(size=(n, p)))
    y = torch.from_numpy((rng.random(n) < 0.5).astype(np.int64))
    return x, y


def half_spaces(x, scale=1e4):
    """Points between the rows in the order of a direction: neighbours differ in the residual of one row."""
    direction = torch.from_numpy(np.random.default_rng(1).normal(size=x.shape[1]))
    places = torch.sort(x @ direction).values
    for low, high in pairwise(places):
        yield torch.cat([scale * direction, -scale * (low + high)[None] / 2])


def recovered(local, x):
    """How many rows are read off differences of gradients at half-spaces."""
    found, before = 0, None
    for point in half_spaces(x):
        try:
            now = local.gradient(point)
        except SiteError:
            continue
        if before is not None:
            row = (now - before)[:-1] / (now - before)[-1]
            found += bool((x - row).abs().max(1).values.min() < 1e-6)
        before = now
    return found


def test_gradients_at_half_spaces_recover_no_row(tmp_path):
    x, y = people()
    local = LocalProblem(GLM([(x, y)], "logistic", intercept=True))
    assert recovered(local, x) > 40
    guarded = Rules(min_effective_rows=5).guarded(local, tmp_path, "zug")
    assert recovered(guarded, x) == 0


@pytest.mark.parametrize("kind", ["curvature", "information"])
def test_hessians_at_half_spaces_rest_on_many_rows(tmp_path, kind):
    """Between two half-spaces lies one row, and a Hessian there is that row's alone."""
    x, y = people()
    problem, rules = GLM([(x, y)], "logistic", intercept=True), Rules(min_effective_rows=5)
    weigh = lambda point: weights(kind, problem, point)  # noqa: E731
    rules.points(kind, torch.zeros(1, 5, dtype=torch.float64), weigh, tmp_path)
    for point in half_spaces(x):
        shifted = torch.cat([point[:4], -(x @ point[:4]).median()[None]])  # the median is a row
        with pytest.raises(SiteError, match="few-rows"):
            rules.points(kind, shifted[None], weigh, tmp_path)


def test_fits_that_differ_in_one_row_are_refused(tmp_path):
    """The second is refused at the site before any sum of it leaves that the first one had not told."""
    run, _ = fit(tmp_path, "min-effective-rows = 5", **SICK)
    run()
    for k, change in enumerate((lambda rows: rows.some(slice(0, rows.rows - 1)), with_outcome_of_first_changed)):
        other = {"run_folder": str(tmp_path / f"run-{k}")}
        again, sent = fit(tmp_path, "min-effective-rows = 5", change, **SICK, **other)
        with pytest.raises(InputError) as error:
            again()
        attack = ("a second fit without one row", "a second fit with one changed outcome")[k]
        documented(attack, "min-effective-rows = 5", error.value, "rule-few-rows")
        *earlier, last = [words for words in sent if "proof" not in words and "'name': 'zug'" not in words]
        assert not earlier  # its first answer
        assert "rule-few-rows" in last
        assert logs(tmp_path / "s")["zug"][-1]["items"][0]["value"] == "rule-few-rows"
    fit(tmp_path, "min-effective-rows = 5", **SICK, run_folder=str(tmp_path / "run-2"))[0]()


def with_outcome_of_first_changed(rows):
    outcome = rows["outcome"].copy()
    outcome[0] = "sick" if outcome[0] == "healthy" else "healthy"
    return Table({**rows.columns, "outcome": outcome}, rows.name)


def test_a_table_that_has_lost_a_row_is_not_asked_again(tmp_path):
    x, y = people()
    whole, less = (LocalProblem(GLM([(x[k:], y[k:])], "logistic", intercept=True)) for k in (0, 1))
    rules, point = Rules(min_effective_rows=5), torch.zeros(5, dtype=torch.float64)
    rules.guarded(whole, tmp_path, "zug").gradient(point)
    rules.guarded(whole, tmp_path, "zug").gradient(point)
    with pytest.raises(SiteError, match="few-rows"):
        rules.guarded(less, tmp_path, "zug").gradient(point)
    changed = LocalProblem(GLM([(x, torch.cat([1 - y[:1], y[1:]]))], "logistic", intercept=True))
    with pytest.raises(SiteError, match="few-rows"):
        rules.guarded(changed, tmp_path, "zug").gradient(point)


def test_the_number_of_points_is_one_of_all_runs(tmp_path):
    x, y = people()
    local = LocalProblem(LeastSquares([(x, y.double())]))
    rules = Rules(max_points=3)
    for k in (0, 1, 2, 1):
        rules.guarded(local, tmp_path, "zug").loss(torch.full((4,), float(k), dtype=torch.float64))
    with pytest.raises(SiteError, match="points"):
        rules.guarded(local, tmp_path, "zug").oracle(0, 0)(torch.full((4,), 9.0, dtype=torch.float64), 0)
    shutil.rmtree(tmp_path / "points" / "zug-all")  # points that were lost are not new ones
    with pytest.raises(InputError, match=r"points\.json"):
        rules.guarded(local, tmp_path, "zug").loss(torch.full((4,), 9.0, dtype=torch.float64))


def test_another_scaling_of_a_point_is_another_point(tmp_path):
    x, y = people()
    problem, place = GLM([(x, y)], "logistic", intercept=True), tmp_path / "zug"
    ask = lambda rules, k: rules.points(  # noqa: E731
        "slope", torch.zeros(1, 5, dtype=torch.float64), lambda p: weights("slope", problem, p), place, f"scaling {k}"
    )
    for k in (0, 1, 0):
        ask(Rules(max_points=2), k)
    with pytest.raises(SiteError, match="points"):
        ask(Rules(max_points=2), 2)


@pytest.mark.parametrize("kind", ["slope", "rows"])
def test_folds_that_differ_in_one_row_are_refused(tmp_path, kind):
    """At the same point: the second fold differs in many rows from all, the third in one from the second."""
    rules, whole = Rules(min_effective_rows=5), np.ones((60, 1))
    folds = [np.where(np.arange(60) < n, whole[:, 0], 0.0)[:, None] for n in (60, 40, 41)]
    for k, fold in enumerate(folds):
        point = torch.from_numpy(fold.T) if kind == "rows" else torch.zeros(1, 5, dtype=torch.float64)
        ask = lambda p=point, f=fold, k=k: rules.points(kind, p, lambda _: f, tmp_path / "zug", rows=str(k))  # noqa: E731
        if k < 2:
            ask()
    with pytest.raises(SiteError, match="few-rows"):
        ask()


def test_sums_of_a_fold_rest_on_many_rows(tmp_path):
    """Before any model of a fold: the sums of all rows less those of the others are of the rows held out."""
    run, _ = fit(tmp_path, "min-effective-rows = 15", **SICK, cv="4", select="min")
    with pytest.raises(InputError, match="rest on too few rows"):
        run()
    answers = logs(tmp_path / "s")["zug"]
    assert sum("refused.code" in str(line["items"]) for line in answers) == 1


def test_no_setting_of_a_run_reaches_the_rules(tmp_path):
    for name in ("rules", "min-rows", "max-points"):
        with pytest.raises(InputError, match="unknown setting"):
            fit(tmp_path, "", **SICK, **{name: "0"})[0]()


def test_a_lifetime_budget_is_kept_at_the_client_and_fails_closed(tmp_path):
    pytest.importorskip("dp_accounting")
    from fednmap.privacy.accounting import epsilon

    rules, replies = Rules(max_epsilon=2.0), 0
    try:
        while replies < 100:  # two runs with different noise: one budget
            rules.spend(5.0 if replies < 4 else 10.0, tmp_path, "zug")
            replies += 1
    except SiteError as error:
        refused = error.code
    assert refused == "rule-budget"
    kept = json.loads((tmp_path / "budget" / "zug-all.json").read_text())
    assert kept["epsilon"] <= 2.0
    assert kept["spent"] == pytest.approx(4 / 25 + (replies - 4) / 100)
    assert epsilon((kept["spent"] + 1 / 100) ** -0.5, 1.0, 1, 1e-5).pld > 2.0
    assert epsilon(5.0, 1.0, 4, 1e-5).pld == pytest.approx(epsilon((4 / 25) ** -0.5, 1.0, 1, 1e-5).pld, rel=1e-2)
    Rules(max_epsilon=2.0, study="other").spend(5.0, tmp_path, "zug")
    for noise in (None, 0.0):
        with pytest.raises(SiteError, match="budget"):
            Rules(max_epsilon=2.0, study="new").spend(noise, tmp_path, "zug")
    for text in ("", "{}", '{"spent": -5}', "x"):
        (tmp_path / "budget" / "zug-all.json").write_text(text)
        with pytest.raises(SiteError, match="budget"):
            rules.spend(100.0, tmp_path, "zug")
    shutil.rmtree(tmp_path / "budget")  # a budget that was lost is not a new one
    with pytest.raises(SiteError, match="budget"):
        rules.spend(100.0, tmp_path, "zug")
    Rules(max_epsilon=2.0, study="third").spend(5.0, tmp_path, "zug")


class Leaking(Federation):
    """A site of a plain app whose own code fails at one of its parts, with a cell in the words of the error."""

    part, kind = "load", ValueError

    def load(self, context):
        local = super().load(context)
        if context.node_config["client"] != CLIENTS[1]:
            return local

        def fail(*_):
            raise self.kind("could not convert 'Miller 77123' in row 3")

        if self.part == "load":
            fail()
        broken = type("Broken", (LocalProblem,), {self.part: fail})
        return broken(local.problem)

    def sent(self):
        """All that this site has sent, with its errors."""
        replies = []

        def listen(name, message, answer):
            reply = answer()
            if name == CLIENTS[1]:
                replies.append(str(reply.error) if reply.has_error() else str(reply.content))
            return [reply]

        with suppress(ValueError, OSError):
            self.start(fault=listen)
        return replies


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        *((part, InputError) for part in ("load", "oracle", "loss")),
        *((part, kind) for part in ("load", "oracle", "loss") for kind in (ValueError, RuntimeError, SiteError)),
        *((part, ValueError) for part in ("gradient", "accuracy")),
    ],
)
def test_an_error_in_the_code_of_a_site_sends_no_cell(tmp_path, caplog, part, kind):
    federation = Leaking(tmp_path, rounds=2, eval_every=1, deadline=0.2, attempts=1, dtype="float64")
    federation.part, federation.kind = part, kind
    sent = federation.sent()
    said = "the site refused" if kind is SiteError else f"the site refused ({kind.__name__})"
    assert any(f"{said}; the site" in words for words in sent)
    files = [path.read_text() for path in tmp_path.rglob("*.json*")]
    assert not any("77123" in words for words in [*sent, *files])
    assert "77123" in caplog.text  # where the site can read it


def test_effective_rows():
    assert effective_rows(np.ones((7, 1))) == pytest.approx(7)
    assert effective_rows(np.array([[3.0], [0.0], [0.0]])) == 1
    assert effective_rows(np.array([[1e-300], [1e-300]])) == pytest.approx(2)
