"""The paper's figures: trials, tables, pages and pictures."""

import csv
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from curves import ROUNDS, curve, mobilenet_curves, nn_curves, table_curves

from fednmap.commands.reproduce import NAMES
from fednmap.paper import FIGURES, mobilenet, nn, slopes, table1
from fednmap.paper.overview import overview
from fednmap.paper.reproduce import reproduce
from fednmap.paper.trials import Curve, Made, select, summary, tidy
from fednmap.paper.verdict import Claim, Verdict, as_json


def silent(line: str) -> None:
    pass


def test_tables_hold_every_trial() -> None:
    curves = [curve(1e-3, trial, wobble=0.1, method="FedNMap", n=20) for trial in range(3)]
    assert len(tidy(curves).splitlines()) == 1 + 3 * len(ROUNDS)
    head, row = summary(curves).splitlines()
    closing = dict(zip(head.split(","), row.split(","), strict=True))
    assert closing["trials"] == "3"
    finals = [c.final("stationarity") for c in curves]
    assert float(closing["stationarity_mean"]) == pytest.approx(np.mean(finals), rel=1e-5)
    assert float(closing["stationarity_std"]) == pytest.approx(np.std(finals, ddof=1), rel=1e-5)


def test_trials_with_other_columns_are_one_table() -> None:
    more = Curve(
        {"trial": 1, "tuned": 2}, {"round": np.array([0.0, 1.0]), "loss": np.ones(2), "stationarity": np.ones(2)}
    )
    rows = list(csv.DictReader(tidy([curve(1.0), more]).splitlines(), restkey="too many"))
    assert list(rows[0]) == ["trial", "tuned", "round", "stationarity", "loss"]
    assert (rows[0]["loss"], rows[0]["tuned"], rows[-1]["loss"]) == ("", "", "1")
    assert len(summary([more, curve(1.0)]).splitlines()) == 3


def test_final_is_the_mean_of_the_last_tenth() -> None:
    c = Curve({"trial": 0}, {"round": np.arange(0.0, 101.0, 5.0), "y": np.arange(21.0)})
    assert c.final("y") == 19.5
    assert c.final("y", rounds=50) == 10


def test_select_sorts_by_trial() -> None:
    curves = [curve(1.0, k, method="A") for k in (2, 0, 1)]
    assert [c.setting["trial"] for c in select(curves, method="A")] == [0, 1, 2]


def test_settings_that_only_one_side_names_have_their_default() -> None:
    was = Made({"rounds": 500, "gamma": 2.5}, None, None)
    assert was.differs({"rounds": 500, "gamma": 2.5, "minibatches": "replacement", "columns": ["loss"]}) == ""
    assert was.differs({"rounds": 500, "gamma": 2.5, "eval_samples": 5000}) == "eval_samples was None and is 5000"


def test_nothing_finished_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no finished trial"):
        reproduce(nn.FIGURE, "quick", trials=1, out=tmp_path, workers=1, tell=silent, only_finished=True)


def test_too_few_trials_to_compare_is_said(tmp_path: Path) -> None:
    job = mobilenet.jobs("middle", 1)[0]
    (tmp_path / "trials").mkdir()
    columns = [*job.setting, "round", "hoyer", "loss"]
    row = [*job.setting.values(), 500, 0.5, 1.0]
    told = json.dumps({"configuration": dict(job.configuration)})
    (tmp_path / "trials" / job.file).write_text(f"# {told}\n{','.join(columns)}\n{','.join(map(str, row))}\n")
    with pytest.raises(ValueError, match="too few of mobilenet's trials"):
        reproduce(mobilenet.FIGURE, "middle", trials=1, out=tmp_path, workers=1, tell=silent, only_finished=True)
    assert not (tmp_path / "mobilenet").exists()


def test_the_page_shows_every_verdict_there_is(tmp_path: Path) -> None:
    claims = [{"claim": f"claim {h}", "paper": "", "measured": "|x|", "holds": h} for h in (True, False, None)]
    facts = {"name": "nn", "scale": "quick", "trials": 2, "claims": claims}
    (tmp_path / "nn").mkdir()
    (tmp_path / "nn" / "verdict.json").write_text(json.dumps(facts))
    text = overview(tmp_path, FIGURES.values())
    assert "| [nn](#nn) | quick | 2 | 1 | 1 | 1 | `fednmap reproduce nn --scale quick --trials 2` |" in text
    assert "| claim False |  | \\|x\\| | **does not hold** |" in text
    assert "| speedup-n | not run | - | - | - | - | `fednmap reproduce speedup-n` |" in text
    assert "do not say what they were made from" not in text


def test_the_page_counts_trials_that_do_not_say_what_they_were_made_from(tmp_path: Path) -> None:
    (tmp_path / "trials").mkdir()
    (tmp_path / "trials" / "old.csv").write_text("method,round\n")
    (tmp_path / "trials" / "new.csv").write_text('# {"configuration": {}}\nmethod,round\n')
    assert "1 of the 2 files of trials are older than that line" in overview(tmp_path, FIGURES.values())


def test_the_page_begins_with_what_holds_and_how_much(tmp_path: Path) -> None:
    (tmp_path / "trials").mkdir()
    for k, code in enumerate(("aaa", "aaa", "bbb")):
        told = json.dumps({"configuration": {}, "code": code})
        (tmp_path / "trials" / f"{k}.csv").write_text(f"# {told}\nmethod,round\n")
    (tmp_path / "nn").mkdir()
    verdict = Verdict([Claim("a", "p", "m", False, "0.90 of b"), Claim("without", "p", "m", True)])
    (tmp_path / "nn" / "verdict.json").write_text(as_json("nn", "paper", 10, 10, verdict))
    text = overview(tmp_path, FIGURES.values())
    first = text.split("\n\n")[1]
    assert first.splitlines()[2:] == ["| a | **does not hold** | 0.90 of b | 10 | [nn](#nn) |"]
    assert "2 by aaa; 1 by bbb." in text


@pytest.mark.parametrize("draw", [partial(slopes.draw_speedup, factor="n"), nn.draw, mobilenet.draw, table1.draw])
def test_pictures_can_be_drawn(draw: object, tmp_path: Path) -> None:
    curves = {
        nn.draw: lambda: nn_curves(2.0),
        mobilenet.draw: lambda: mobilenet_curves(1.0),
        table1.draw: lambda: table_curves(-1.0),
    }.get(draw, lambda: [curve(1 / n, k, n=n) for n in (5, 10) for k in range(2)])()
    draw(curves).savefig(tmp_path / "figure.png", dpi=30)  # type: ignore[operator]
    assert (tmp_path / "figure.png").stat().st_size > 1000


@pytest.mark.parametrize(("name", "scale"), [(name, scale) for name in FIGURES for scale in FIGURES[name].trials])
def test_every_figure_names_its_trials_apart(name: str, scale: str) -> None:
    jobs = FIGURES[name].jobs(scale, 2)
    assert len({job.file for job in jobs}) == len(jobs)
    assert FIGURES[name].name == name
    assert name in NAMES


def test_speedup_in_n_shares_trials_with_the_comparison() -> None:
    ours = {job.file for job in FIGURES["nn"].jobs("paper", 1)}
    shared = [job for job in FIGURES["speedup-n"].jobs("paper", 1) if job.file in ours]
    assert [job.setting["n"] for job in shared] == [20, 50, 100]
