"""Formulas that somebody else wrote: none runs code, none hangs, each that cannot be used is refused in one line."""

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("formulaic")

import fednmap
from fednmap.names import InputError
from fednmap.tables import FederatedFormula, table
from fednmap.tables.table import SiteError

CODE = "__import__('os').mkdir('made')"
REFUSED = [
    *(f"y ~ {CODE}", f"y ~ {{{CODE}}}", f"y ~ I({CODE})", f"{CODE} ~ x", f"y ~ `{CODE}`", f"y ~ x + bs(x, df={CODE})"),
    *("y ~ x.__class__", "y ~ log.__globals__", "y ~ I(().__class__)", "y ~ (lambda: 1)()", "y ~ {[c for c in x]}"),
    *("y ~ x[0]", "y ~ I(x if x else 1)", "y ~ I(x @ x)", "y ~ I(x << 3)", "y ~ I(x + 1j)", "y ~ I('a' * x)"),
    *("y ~ I(9**9**9**9 + x)", "y ~ I(I(9)**I(9)**I(9) + x)", "y ~ I(x * (10**100)**100)", "y ~ I(9**999999 * x)"),
    *("y ~ bs(x, 1000000000)", "y ~ bs(x, degree=100000)", "y ~ bs(x, degree=-1)", "y ~ bs(x, df='a')"),
    *("y ~ bs(x, df=[1])", "y ~ bs(x, df=1e400)", "y ~ bs(x, df=4.5)", "y ~ bs(x, True)", "y ~ bs(x, knots=5)"),
    *("y ~ bs(x, knots=['a'])", "y ~ bs(x, [1]*999999999)", "y ~ bs(x, 5, lower_bound='z')", "y ~ scale(x, ddof='a')"),
    *("y ~ scale(x, ddof=99)", "y ~ scale(x, center='a')", "y ~ x^99999999999", "y ~ (x + age + sex)**40"),
    *("y ~ (x + age + sex)**3**12", "y ~ I('a'**'b' + x)", "y ~ I(2**'b' * x)"),
    *("y ~ " + "*".join(["x", "age"] * 20), "y ~ x" + " + x" * 20_000, "y ~ " + "log(" * 500 + "x" + ")" * 500),
    *("y ~ Intercept", "y ~ x + Intercept", "y ~ .", "y ~ x | age", "", "y ~", "y ~ 1", "y ~ \0x", "y ~ log(`a [b]`)"),
]
ALLOWED = [
    *("y ~ x*age*sex", "y ~ I(x / 10**6)", "y ~ (x + age + sex)**2 + bs(age, 5)", "y ~ (x + age)^3", "y ~ `a [b]` + x"),
    *("y ~ x/sex", "y ~ x:sex + I(x**2)", "y ~ bs(age, knots=[30, 40.5], degree=2)", "y ~ scale(x, ddof=0)"),
    " + ".join(["y ~ x", *(f"I(x + {k})" for k in range(40))]),
]


def frame(n=40):
    rng = np.random.default_rng(0)
    numbers = {name: rng.random(n) for name in ("y", "x", "a [b]", "Intercept")}
    return numbers | {"age": 20.0 + np.arange(n) % 30, "sex": np.array(["f", "m"] * (n // 2), object)}


@pytest.mark.parametrize("formula", REFUSED, ids=lambda words: words[:30])
def test_refused_in_one_line_and_without_running_it(formula, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    began = time.process_time()
    with pytest.raises(InputError) as error:
        FederatedFormula(formula).fit({"a": frame(), "b": frame()}).transform(frame())
    assert time.process_time() - began < 5
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400
    assert os.listdir() == []


@pytest.mark.parametrize("formula", ALLOWED, ids=lambda words: words[:30])
def test_what_is_right_is_not_refused(formula):
    assert FederatedFormula(formula).fit({"a": frame(), "b": frame()}).transform(frame()).shape[0] == 40


def test_a_folder_of_somebody_else_runs_no_code(command):
    """A model.json with another formula, or with other kinds of values: refused, in Python and by the command."""
    lines = [f"{20 + k % 9},{'fm'[k % 2]},{k % 3 % 2}" for k in range(30)]
    Path("t.csv").write_text("\n".join(["age,sex,y", *lines]) + "\n")
    assert command("fit", "--data", "csv:t.csv", "--formula", "y ~ age + sex", "--quiet", "--out", "run")[0] == 0
    text = Path("run/model.json").read_text()
    whole, place = json.loads(text), text.index('"intercept"') + 18
    Path("run/model.json").write_text(text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :])
    for words in (("predict", "run", "t.csv"), ("show", "run")):  # one digit
        code, out, err = command(*words)
        assert "model.json is not the file that was written" in out + err
        assert (code, words[0]) in ((2, "predict"), (0, "show"))
    Path("run/SHA256SUMS").unlink()  # whoever changes the model changes the list too
    changes = [{"formula": f"y ~ {{{CODE}}}"}, {"formula": "y ~ I(9**9**9**9 + age)"}, {"formula": 5}, {"state": 5}]
    changes += [{"coef": "x"}, {"coef": [[1e999]]}, {"columns": 5}, {"statistics": [5]}, {"statistics": []}]
    changes += [{"classes": 5}, {"family": ["cox"]}, {"intercept": [[[1]]]}, {"site_effects": 5}, {"site_effects": []}]
    changes += [{"constants": 5}, {"offset": 5}, {"exposure": ["age"]}, {"formula": "y ~ age"}]
    for change in changes:
        Path("run/model.json").write_text(json.dumps(whole | change))
        with pytest.raises(InputError):
            fednmap.load("run").predict({"age": [50.0], "sex": ["f"]})
        code, _, err = command("predict", "run", "t.csv")
        assert code in (1, 2), change
        assert len(err.splitlines()) == 1, (change, err)
    assert not Path("made").exists()


@pytest.mark.parametrize(
    "formula", [words for words in REFUSED if "ddof=99" not in words], ids=lambda words: words[:30]
)
def test_a_site_between_machines_refuses_it_too(formula, tmp_path, monkeypatch):
    """`read` and `features` are how the words of a server reach the columns of a site."""
    pytest.importorskip("flwr")
    from fednmap.flower.table_app import read

    monkeypatch.chdir(tmp_path)
    with pytest.raises((InputError, SiteError)):
        read({"names": "a,b", "run-folder": "run", "target": "", "formula": formula})[0].features(table(frame()))
    assert os.listdir() == []
