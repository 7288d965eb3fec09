"""The tables of trials: complete after a kill, the same bytes in any order, and never read where they are damaged."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from fednmap.names import InputError
from fednmap.runs.atomic_files import digest
from reproduction import store as store_module
from reproduction.figures import FIGURES
from reproduction.reproduce import finished, run_trials
from reproduction.store import CODE, Provenance, Store
from reproduction.trials import Trial
from reproduction.verdict import as_json

KEPT = Path(__file__).parents[2] / "docs" / "reproduction"


def silent(line: str) -> None:
    pass


def job(trial: int, **configuration: object) -> Trial:
    def measure(path: Path) -> list[dict[str, float]]:
        return [{"round": float(t), "value": trial + t / 7} for t in range(0, 30, 10)]

    return Trial({"method": "A", "trial": trial}, measure, configuration)


def add(store: Store, trial: int) -> None:
    one = job(trial)
    store.add(one, one.measure(store.folder), Provenance.of(one, {"torch": "2"}))


def content(store: Store) -> tuple[bytes, bytes]:
    return store.table.read_bytes(), store.history_table.read_bytes()


def test_a_row_says_where_its_numbers_come_from(tmp_path: Path) -> None:
    store, one = Store(tmp_path / "figure"), job(3, seed=45, eta=0.1)
    store.add(one, one.measure(tmp_path), Provenance.of(one, {"torch": "2", "data": "abc"}))
    row = store.rows()["A_trial3"]
    assert row.setting == {"method": "A", "trial": "3"}
    assert row.provenance._asdict() == {
        "seed": "45",
        "code_digest": CODE,
        "configuration_digest": digest({"seed": 45, "eta": 0.1}),
        "data_digest": "abc",
        "fednmap": "",
        "torch": "2",
        "numpy": "",
        "configuration": '{"seed": 45, "eta": 0.1}',
    }
    assert row.final == {"value": f"{3 + 20 / 7:.6g}"}  # the mean of the last tenth
    (curve,) = store.curves([one])
    np.testing.assert_allclose(curve["value"], [3, 3 + 10 / 7, 3 + 20 / 7], rtol=1e-5)
    assert curve.code == CODE


def test_a_figure_without_histories_keeps_the_last_measurement(tmp_path: Path) -> None:
    store = Store(tmp_path / "figure", histories=False)
    add(store, 0)
    assert [path.name for path in store.folder.iterdir()] == ["trials.csv"]
    (curve,) = store.curves([job(0)])
    assert (curve["round"].tolist(), curve["value"].tolist()) == ([20.0], [2.85714])


def test_the_bytes_do_not_depend_on_the_order(tmp_path: Path) -> None:
    one, other = Store(tmp_path / "one" / "figure"), Store(tmp_path / "other" / "figure")
    for k in (0, 2, 10, 1):
        add(one, k)
    for k in (10, 1, 0, 2, 1):
        add(other, k)
    assert content(one) == content(other)
    assert list(one.rows()) == ["A_trial0", "A_trial1", "A_trial2", "A_trial10"]


def test_writers_wait_for_each_other(tmp_path: Path) -> None:
    """A lock on a file also holds between the threads of one process."""
    store = Store(tmp_path / "figure")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda k: add(store, k), range(12)))
    assert len(store.rows()) == len(store.curves([job(k) for k in range(12)])) == 12


@pytest.mark.parametrize("table", ["trials.csv", "histories.csv.gz"])
def test_a_kill_while_writing_loses_the_trial_that_ended(
    table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, whole = Store(tmp_path / "figure"), Store(tmp_path / "whole" / "figure")
    add(store, 0)
    write: Callable[[Path, bytes], None] = store_module.write_atomically

    def killed(path: Path, data: bytes) -> None:
        if path.name == table:
            raise KeyboardInterrupt
        write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "write_atomically", killed)
        with pytest.raises(KeyboardInterrupt):
            add(store, 1)
    assert len(finished([job(0), job(1)], store, silent)) == 1
    run_trials([job(0), job(1)], store, 1, silent)
    run_trials([job(0), job(1)], whole, 1, silent)
    assert store.history_table.read_bytes() == whole.history_table.read_bytes()


def test_trials_of_another_figure_are_taken_over(tmp_path: Path) -> None:
    first, second, lines = Store(tmp_path / "first"), Store(tmp_path / "second"), list[str]()
    run_trials([job(0, eta=0.1), job(1, eta=0.1)], first, 1, silent)
    run_trials([job(0, eta=0.1), job(1, eta=0.2)], second, 1, lines.append)
    assert lines[0] == "2 trials, 1 already there"
    assert json.loads(second.rows()["A_trial1"].provenance.configuration) == {"eta": 0.2}
    assert second.rows()["A_trial0"] == first.rows()["A_trial0"]
    assert json.loads(first.rows()["A_trial1"].provenance.configuration) == {"eta": 0.1}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seed,", "", r"expected .*trials.csv to have the columns seed, "),
        (',"{}"', "", "expected .* columns and a configuration as JSON in line 2"),
        ("{}", "{", "expected .* columns and a configuration as JSON in line 2"),
    ],
)
def test_a_damaged_table_is_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    store = Store(tmp_path / "figure")
    add(store, 0)
    text = store.table.read_text().replace("{}\n", '"{}"\n')
    assert old in text
    store.table.write_text(text.replace(old, new))
    with pytest.raises(InputError, match=message):
        store.rows()


def test_damaged_and_missing_histories_are_refused(tmp_path: Path) -> None:
    store = Store(tmp_path / "figure")
    add(store, 0)
    store.history_table.write_bytes(store.history_table.read_bytes()[:-12])
    with pytest.raises(InputError, match="got a damaged file"):
        store.curves([job(0)])
    store.history_table.unlink()
    with pytest.raises(InputError, match="expected the measurements of A_trial0"):
        store.curves([job(0)])


# --- the trials of the repository


@pytest.mark.parametrize("name", FIGURES)
def test_what_is_kept_says_what_it_was_made_from(name: str) -> None:
    rows = FIGURES[name].store(KEPT).rows()
    assert rows
    for row in rows.values():
        made = row.provenance
        assert digest(json.loads(made.configuration)) == made.configuration_digest
        assert made.code_digest
        assert made.seed
    assert sorted(path.suffix for path in (KEPT / name).iterdir()) == sorted(
        [".csv", ".csv", ".json", ".md", ".pdf", ".png", *([".gz"] if FIGURES[name].histories else [])]
    )


@pytest.mark.parametrize("name", FIGURES)
def test_the_verdict_follows_from_what_is_kept(name: str) -> None:
    figure, facts = FIGURES[name], json.loads((KEPT / name / "verdict.json").read_text())
    curves = finished(figure.jobs(facts["scale"], facts["asked"]), figure.store(KEPT), silent)
    again = json.loads(as_json(name, facts["scale"], facts["trials"], facts["asked"], figure.judge(curves)))
    assert again["claims"] == facts["claims"], f"run `python -m reproduction {name} --finished --out docs/reproduction`"
