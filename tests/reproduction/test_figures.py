"""The paper's figures: trials, tables, pages and pictures."""

import csv
import gzip
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from curves import ROUNDS, curve, mobilenet_curves, nn_curves, table_curves

import fednmap
from reproduction import mobilenet, nn, speedup, table1
from reproduction.command import NAMES
from reproduction.figures import FIGURES
from reproduction.overview import overview
from reproduction.reproduce import reproduce
from reproduction.store import CODE, ROOMS, Provenance, Store
from reproduction.trials import Curve, Trial, select, summary
from reproduction.verdict import Claim, Verdict, as_json, provenance


def silent(line: str) -> None:
    pass


def keep(store: Store, *curves: Curve, code: str = CODE, **configuration: Any) -> None:
    """Add trials with these curves."""
    for c in curves:
        records = [dict(zip(c.columns, map(float, row), strict=True)) for row in zip(*c.columns.values(), strict=True)]
        job = Trial(c.setting, lambda path: [], configuration)
        store.add(job, records, Provenance.of(job, {})._replace(code_digest=code))


def test_tables_hold_every_trial(tmp_path: Path) -> None:
    curves = [curve(1e-3, trial, wobble=0.1, method="FedNMap", n=20) for trial in range(3)]
    store = Store(tmp_path / "figure")
    keep(store, *curves)
    assert len(gzip.decompress(store.history_table.read_bytes()).splitlines()) == 1 + 3 * len(ROUNDS)
    assert len(store.table.read_text().splitlines()) == 1 + 3
    head, row = summary(curves).splitlines()
    closing = dict(zip(head.split(","), row.split(","), strict=True))
    assert closing["trials"] == "3"
    finals = [c.final("stationarity") for c in curves]
    assert float(closing["stationarity_mean"]) == pytest.approx(np.mean(finals), rel=1e-5)
    assert float(closing["stationarity_std"]) == pytest.approx(np.std(finals, ddof=1), rel=1e-5)


def test_trials_with_other_columns_are_one_table(tmp_path: Path) -> None:
    more = Curve(
        {"trial": 1, "tuned": 2}, {"round": np.array([0.0, 1.0]), "loss": np.ones(2), "stationarity": np.ones(2)}
    )
    store = Store(tmp_path / "figure")
    keep(store, curve(1.0), more)
    text = gzip.decompress(store.history_table.read_bytes()).decode()
    rows = list(csv.DictReader(text.splitlines(), restkey="too many"))
    assert list(rows[0]) == ["name", "round", "stationarity", "loss"]
    assert (rows[0]["loss"], rows[-1]["loss"]) == ("", "1")
    trials = list(csv.DictReader(store.table.read_text().splitlines(), restkey="too many"))
    assert list(trials[0])[:4] == ["name", "trial", "tuned", "seed"]
    assert [(t["tuned"], t["loss"]) for t in trials] == [("", ""), ("2", "1")]
    first, second = store.curves([Trial(c.setting, lambda path: [], {}) for c in (curve(1.0), more)])
    assert list(first.columns) == ["round", "stationarity"]
    assert list(second.columns) == ["round", "stationarity", "loss"]
    assert len(summary([more, curve(1.0)]).splitlines()) == 3


def test_final_is_the_mean_of_the_last_tenth() -> None:
    c = Curve({"trial": 0}, {"round": np.arange(0.0, 101.0, 5.0), "y": np.arange(21.0)})
    assert c.final("y") == 19.5
    assert c.final("y", rounds=50) == 10


def test_select_sorts_by_trial() -> None:
    curves = [curve(1.0, k, method="A") for k in (2, 0, 1)]
    assert [c.setting["trial"] for c in select(curves, method="A")] == [0, 1, 2]


def test_settings_that_only_one_side_names_have_their_default() -> None:
    was = Provenance.of(Trial({}, lambda path: [], {"rounds": 500, "gamma": 2.5}), {})
    assert was.changed_settings({"rounds": 500, "gamma": 2.5, "minibatches": "replacement", "columns": ["loss"]}) == ""
    assert (
        was.changed_settings({"rounds": 500, "gamma": 2.5, "eval_samples": 5000}) == "eval_samples was None and is 5000"
    )


def test_nothing_finished_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no finished trial"):
        reproduce(nn.FIGURE, "quick", trials=1, out=tmp_path, workers=1, report=silent, only_finished=True)


def test_too_few_trials_to_compare_is_said(tmp_path: Path) -> None:
    job = mobilenet.jobs("middle", 1)[0]
    store = mobilenet.FIGURE.store(tmp_path)
    store.add(job, [{"round": 500, "hoyer": 0.5, "loss": 1.0}], Provenance.of(job, {}))
    with pytest.raises(ValueError, match="too few of mobilenet's trials"):
        reproduce(mobilenet.FIGURE, "middle", trials=1, out=tmp_path, workers=1, report=silent, only_finished=True)
    assert [path.name for path in (tmp_path / "mobilenet").glob("verdict*")] == []


def test_the_page_shows_every_verdict_there_is(tmp_path: Path) -> None:
    claims = [Claim(f"claim {h}", "", "|x|", h, power="3 %") for h in (True, False, None)]
    (tmp_path / "nn").mkdir()
    (tmp_path / "nn" / "verdict.json").write_text(as_json("nn", "quick", 2, 2, Verdict(claims)))
    text = overview(tmp_path, FIGURES.values())
    assert (
        "| Figure 2 | [nn](#figure-2-nn) | quick | 2 | 1 | 1 | 1 | `fednmap reproduce nn --scale quick --trials 2` |"
        in text
    )
    assert '| claim False |  | \\|x\\| | 3 % | <b class="fails">not reproduced</b> |' in text
    assert "| Figure 3 | speedup-n | not run | - | - | - | - | `fednmap reproduce speedup-n` |" in text
    assert "older code" not in text


def test_the_page_begins_with_what_holds_and_how_much(tmp_path: Path) -> None:
    for k, code in enumerate(("aaa", "aaa", "bbb", CODE)):
        keep(nn.FIGURE.store(tmp_path), curve(1.0, k), code=code)
    keep(FIGURES["speedup-n"].store(tmp_path), curve(1.0, 0), code="aaa")  # shared, and counted once
    verdict = Verdict([Claim("a", "p", "m", False, "0.90 of b"), Claim("without", "p", "m", True)])
    (tmp_path / "nn" / "verdict.json").write_text(as_json("nn", "paper", 10, 10, verdict, {"bbb": 1, CODE: 2}))
    text = overview(tmp_path, FIGURES.values())
    sentences, first = text.split("\n\n")[1:3]
    counts = "Of the 1 main claims below, 0 are reproduced, 1 are not and 0 are not judged."
    assert counts in " ".join(sentences.split())
    row = '| a | <b class="fails">not reproduced</b> | 0.90 of b | - | 10 | [Figure 2](#figure-2-nn) |'
    assert first.splitlines()[2:] == [row]
    text = " ".join(text.split())
    assert f"2 by aaa; 1 by {CODE}; 1 by bbb." in text or f"2 by aaa; 1 by bbb; 1 by {CODE}." in text
    assert f"This page was written with code {CODE}: 3 of the 4 trials are of older code." in text
    assert (
        f"2 by {CODE}; 1 by bbb. This page was written with code {CODE}: 1 of the 3 trials are of older code." in text
    )


def test_a_page_says_which_code_its_trials_were_run_with() -> None:
    older, same = provenance({"aaa": 2}, True), provenance({CODE: 2}, False)
    assert f"2 by aaa. This page was written with code {CODE}: all trials are of older code." in older
    assert f"This page was written with code {CODE}: all trials are of this code." in same
    assert ("histories.csv.gz" in older, "histories.csv.gz" in same) == (True, False)


def test_the_code_digest_covers_parts_that_exist() -> None:
    assert all((Path(fednmap.__file__).parent / room).exists() for room in ROOMS)


@pytest.mark.parametrize("draw", [partial(speedup.draw_speedup, factor="n"), nn.draw, mobilenet.draw, table1.draw])
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
    assert len({job.name for job in jobs}) == len(jobs)
    assert FIGURES[name].name == name
    assert name in NAMES


def test_speedup_in_n_shares_trials_with_the_comparison() -> None:
    ours = {job.name for job in FIGURES["nn"].jobs("paper", 1)}
    shared = [job for job in FIGURES["speedup-n"].jobs("paper", 1) if job.name in ours]
    assert [job.setting["n"] for job in shared] == [20, 50, 100]
