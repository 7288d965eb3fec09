"""Run folders: whatever happens to a run, it can be continued to the same bits, or says why not."""

import json
import math
import multiprocessing
import os
import random
import resource
import signal
import stat
import threading
import time
import tomllib
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path

import pytest
import tomli_w
import torch
from small import FEDNMAP, Heard, begin, damage, megabytes, outcome, resume, small

from fednmap import Callback
from fednmap.names import InputError
from fednmap.runs import atomic_files as files
from fednmap.runs import checkpoints
from fednmap.runs.atomic_files import FolderError, locked
from fednmap.runs.execution import execute, settings
from fednmap.runs.experiment import prepare
from fednmap.runs.folder import About, RunFolder
from fednmap.runs.process_pool import Interrupted


class StopAt(Callback):
    """Does something after some number of rounds."""

    def __init__(self, done, act):
        self.done, self.act = done, act

    def on_round(self, round, totals):
        if round.t + 1 == self.done:
            self.act()


def fall():
    raise SystemExit  # nothing is saved on the way out, as after a power failure


def ctrl_c():
    signal.raise_signal(signal.SIGINT)


def stopped(path, done, act=fall, **given):
    """A run that ended after `done` rounds."""
    with pytest.raises((SystemExit, Interrupted)):
        begin(path, StopAt(done, act), **given)
    return RunFolder.open(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The outcome of an undisturbed run."""
    return outcome(begin(tmp_path_factory.mktemp("whole") / "run"))


def test_a_folder_holds_what_its_description_says(tmp_path):
    folder = begin(tmp_path / "run")
    assert sorted(p.name for p in folder.path.iterdir() if p.name[0] != ".") == [
        *("SHA256SUMS", "checkpoints", "environment.json", "metrics.csv", "models", "results.json", "run.toml")
    ]
    assert folder.config() == small()
    assert folder.environment()["torch"] == version("torch")
    assert folder.environment()["settings"]["drop"] == 0.3
    states = sorted(p.name for p in folder.checkpoints(FEDNMAP).iterdir())
    assert states == [f"round-{t:08d}.{end}" for t in (15, 19) for end in ("json", "safetensors")]
    assert [r["round"] for r in folder.records(*FEDNMAP)] == list(range(0, 25, 3))
    assert folder.model(FEDNMAP).parameters["x"].shape == (640,)
    assert folder.model(FEDNMAP).inputs == (1, 8, 8)
    assert not [p for p in folder.path.rglob("*") if p.suffix in (".pkl", ".pt", ".part")]


@pytest.mark.parametrize("method", ["fednmap", "scaffold"])
def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path, method):
    whole = outcome(begin(tmp_path / "whole", algorithms=(method,)))
    for done in (1, 4, 5, 22):
        folder = stopped(tmp_path / f"fall-{done}", done, fall, algorithms=(method,))
        assert resume(folder).done == [done - done % 4]
        assert outcome(folder) == whole
        folder = stopped(tmp_path / f"ctrl-c-{done}", done, ctrl_c, algorithms=(method,))
        assert resume(folder).done == [done + 1]  # the round that was under way is finished and saved
        assert outcome(folder) == whole


def test_several_methods_and_trials_go_on_where_they_were(tmp_path):
    given = {"algorithms": ("fednmap", "fedavg"), "trials": 2, "rounds": 8}
    whole = begin(tmp_path / "whole", **given)
    config = small(**given)
    folder = RunFolder.create(tmp_path / "parts", config, "compare")
    for _ in range(4):
        with pytest.raises(Interrupted):
            execute(config, folder, Heard(), (StopAt(5, ctrl_c),))
    execute(config, folder, Heard())
    assert sorted(outcome(folder)[0]) == sorted(outcome(whole)[0])
    assert outcome(folder)[1:] == outcome(whole)[1:]


def work(path, given):
    """A process of its own: begins the run, or continues it, taking its time."""
    torch.set_num_threads(1)
    if (path / "run.toml").exists():
        resume(RunFolder.open(path), Slow())
    else:
        begin(path, Slow(), **given)


class Slow(Callback):
    def on_round(self, round, totals):
        time.sleep(0.001)


def killed(path, given, kills, rng):
    """The run's folder, after so many kills -9 at random moments and the way to the end."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["fednmap.runs.execution", "pytest", "sklearn.datasets"])  # once for all of them
    while True:
        process = processes.Process(target=work, args=(path, given))
        process.start()
        metrics = path / "metrics.csv"
        before = metrics.stat().st_size if metrics.exists() else 0
        while kills and process.is_alive() and not (metrics.exists() and metrics.stat().st_size != before):
            time.sleep(0.002)
        if kills:
            process.join(rng.uniform(0, 0.15))
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                kills -= 1
        process.join()
        if process.exitcode != -signal.SIGKILL:
            assert process.exitcode == 0
            return RunFolder.open(path), kills


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", ["fednmap", "scaffold"])
def test_kill_minus_nine_at_random_moments(tmp_path, method, kills):
    given = {"algorithms": (method,), "rounds": 150 * kills, "checkpoint_every": 7, "eval_every": 5}
    whole, _ = killed(tmp_path / "whole", given, 0, random.Random(0))
    folder, left = killed(tmp_path / "killed", given, kills, random.Random(kills))
    assert left == 0
    assert outcome(folder) == outcome(whole)


def test_without_a_checkpoint_a_run_begins_again(tmp_path, whole):
    folder = stopped(tmp_path / "run", 2)
    assert resume(folder).done == [0]
    assert outcome(folder) == whole


def test_a_folder_with_nothing_but_its_configuration_is_run(tmp_path, whole):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.toml").write_text(small().toml())
    folder = RunFolder.open(tmp_path / "run")
    resume(folder)
    assert outcome(folder) == whole


def test_a_finished_run_returns_what_is_stored(tmp_path):
    folder = begin(tmp_path / "run")
    (folder.path / "results.json").write_text((folder.path / "results.json").read_text().replace("24,", "24 ,"))
    before = {p: p.read_bytes() for p in folder.path.rglob("*") if p.is_file()}
    assert resume(folder).done == []
    assert {p: p.read_bytes() for p in folder.path.rglob("*") if p.is_file()} == before


def test_a_run_can_be_made_longer(tmp_path, whole):
    folder = begin(tmp_path / "run", rounds=12)
    (folder.path / "run.toml").write_text(small().toml())
    assert resume(folder).done == [8]
    assert outcome(folder) == whole
    (folder.path / "run.toml").write_text(small(rounds=6).toml())
    with pytest.raises(ValueError, match=r"expected at least the 24 rounds that fednmap in .* has run, got rounds = 6"):
        resume(folder)


@pytest.mark.parametrize("suffix", ["json", "safetensors"])
def test_a_damaged_checkpoint_is_refused_and_told(tmp_path, whole, suffix):
    for harm in (damage, lambda path: path.write_bytes(path.read_bytes()[:-7]), lambda path: path.write_bytes(b"")):
        folder = stopped(tmp_path / f"run-{time.time_ns()}", 14)
        harm(folder.checkpoints(FEDNMAP) / f"round-00000011.{suffix}")
        first_reason = resume(folder)
        assert first_reason.done == [8]
        assert "fednmap-0/round-00000011 is refused" in first_reason.lines[0]
        assert "going on from round-00000007" in first_reason.lines[0]
        assert outcome(folder) == whole


def test_without_any_intact_checkpoint_the_run_begins_again_and_says_so(tmp_path, whole):
    folder = stopped(tmp_path / "run", 14)
    for path in folder.checkpoints(FEDNMAP).glob("*.safetensors"):
        path.unlink()
    first_reason = resume(folder)
    assert first_reason.done == [0]
    assert "beginning at round 0" in first_reason.lines[1]
    assert outcome(folder) == whole


def says(data):
    """What a file says: JSON may say the same in other bytes, as by the last of too many digits."""
    try:
        return json.dumps(json.loads(data), sort_keys=True)
    except ValueError:
        return data


def test_a_thousand_damaged_checkpoints(tmp_path):
    folder = stopped(tmp_path / "run", 14)
    experiment = prepare(small())
    algorithm = experiment.algorithm("fednmap")
    states, rng = folder.checkpoints(FEDNMAP), random.Random(0)
    arguments = (states, algorithm, experiment.start(algorithm), settings(experiment.config), experiment.problem.n)
    whole = {p: p.read_bytes() for p in states.iterdir()}
    intact = {}
    for t in (7, 11):
        (copy := tmp_path / f"{t}" / states.name).mkdir(parents=True)
        for path in states.glob(f"round-{t:08d}.*"):
            (copy / path.name).write_bytes(path.read_bytes())
        intact[t], _ = checkpoints.newest(copy, *arguments[1:])
    found = []
    for _ in range(1000):
        path = rng.choice(sorted(whole))
        path.write_bytes(damaged(whole[path], rng))
        harmed = says(path.read_bytes()) != says(whole[path])
        after, refused = checkpoints.newest(*arguments)
        t = 7 if harmed and "11" in path.name else 11
        assert after.t == t
        assert len(refused) == (t == 7)
        assert after.totals == intact[t].totals
        assert all(torch.equal(a, b) for a, b in zip(after.server, intact[t].server, strict=True))
        assert torch.equal(after.as_round().clients.tensors()["h"], intact[t].as_round().clients.tensors()["h"])
        found.append(t)
        path.write_bytes(whole[path])
    assert found.count(7) > 400


def damaged(data, rng):
    """The same bytes after one of the things that happen to files."""
    at, to = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return rng.choice(
        [
            lambda: data[:at],
            lambda: data[at:],
            lambda: data[:at] + data[to:],
            lambda: data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:],
            lambda: data[: at - 1] + bytes([data[at - 1] ^ (1 << rng.randrange(8))]) + data[at:] if at else b"",
            lambda: data[:at] + bytes(to - at) + data[to:],
            lambda: data.replace(str(rng.randrange(10)).encode(), str(rng.randrange(10)).encode(), 1),
        ]
    )()


@pytest.mark.parametrize(("setting", "value"), [("eta_a", 0.3), ("penalty", "l1:0.1"), ("seed", 1), ("drop", 0.1)])
def test_an_edited_configuration_is_noticed(tmp_path, setting, value):
    for state in (stopped(tmp_path / "stopped", 14), begin(tmp_path / "finished")):
        (state.path / "run.toml").write_text(small(**{setting: value}).toml())
        with pytest.raises(ValueError, match=f"{setting} is .* and was .*; put it back, or use it for a new run"):
            resume(state)


def test_checkpoints_know_their_settings(tmp_path):
    folder = stopped(tmp_path / "run", 14)
    (folder.path / "run.toml").write_text(small(eta_a=0.3).toml())
    (folder.path / "environment.json").unlink()
    first_reason = resume(folder)
    assert first_reason.done == [0]
    assert "made with other settings" in first_reason.lines[0]
    assert outcome(folder) == outcome(begin(tmp_path / "whole", eta_a=0.3))


@pytest.mark.parametrize("row", range(0, 60, 7))
def test_one_number_changed_in_the_data_is_noticed(tmp_path, row):
    path = tmp_path / "data.csv"
    rows = [f"{i % 7},{i % 5},{i % 3},{i % 2}" for i in range(60)]
    text = "a,b,c,label\n" + "\n".join(rows) + "\n"
    path.write_text(text)
    folder = stopped(tmp_path / "run", 14, data=f"csv:{path}", clients=3)
    rows[row] = "9" + rows[row][1:]
    path.write_text("a,b,c,label\n" + "\n".join(rows) + "\n")
    with pytest.raises(ValueError, match="have changed since the run began; put them back, or start a new run"):
        resume(folder)
    path.write_text(text)
    assert resume(folder).done == [12]


def test_who_takes_part_must_not_change_while_a_run_is_stopped(tmp_path):
    trace = tmp_path / "trace.txt"
    trace.write_text("0 1 2\n3 4\n")
    settings = {"sampler": f"trace:{trace}", "participation": 1.0, "rounds": 12}
    folder = begin(tmp_path / "run", **settings)
    longer = small(**settings | {"rounds": 16})
    trace.write_text("0 1 2\n5 6\n")
    with pytest.raises(InputError, match="have changed since the run began"):
        execute(longer, folder, Heard())
    trace.write_text("0, 1, 2\n3, 4\n")  # the same clients
    assert execute(longer, folder, Heard())[0]["rounds"] == 16


def test_data_of_another_size_do_not_fit_a_checkpoint(tmp_path):
    folder = stopped(tmp_path / "run", 14)
    experiment = prepare(small(data="synthetic:1,1", clients=30))
    algorithm = experiment.algorithm("fednmap")
    start = experiment.start(algorithm)
    states, known = folder.checkpoints(FEDNMAP), settings(prepare(small()).config)
    _, refused = checkpoints.newest(states, algorithm, start, known, experiment.problem.n)
    assert "data must have changed" in refused[0]


def test_other_versions_are_told(tmp_path):
    folder = stopped(tmp_path / "run", 14)
    began = folder.environment() | {"torch": "1.0"}
    (folder.path / "environment.json").write_text(json.dumps(began))
    assert f"began with torch 1.0 and continues with {version('torch')}" in resume(folder).lines[0]


@pytest.mark.parametrize("name", ["results.json", "environment.json", "run.toml"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"3", b"[" * 5000])
def test_damaged_files_are_named(tmp_path, name, content):
    folder = stopped(tmp_path / "run", 5)
    (folder.path / name).write_bytes(content)
    if (name, content) == ("run.toml", b""):
        pytest.skip("an empty configuration is that of the defaults, noticed as edited")
    with pytest.raises(ValueError, match=name):
        resume(folder)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run; whoever damages a file puts it back."""
    return begin(tmp_path_factory.mktemp("finished") / "run")


def test_a_cut_file_of_measurements_has_whole_ones_or_none(finished):
    path = finished.path / "metrics.csv"
    data, whole = path.read_bytes(), finished.records(*FEDNMAP)
    try:
        for cut in [*range(0, 600, 7), *range(600, len(data), 97)]:
            path.write_bytes(data[:cut])
            found = finished.records(*FEDNMAP)
            assert found == whole[: len(found)]
            assert len(found) <= cut // (len(data) // len(whole) - 60)
    finally:
        path.write_bytes(data)


@pytest.mark.parametrize("line", ["fednmap,0,x,loss,1.0", "fednmap,0,3", "", "fednmap,0,3,loss,1.o", "\ufffd"])
def test_a_line_of_the_measurements_that_cannot_be_read_is_named(finished, line):
    path = finished.path / "metrics.csv"
    data = path.read_text()
    try:
        rows = data.splitlines()
        path.write_text("\n".join([*rows[:7], line, *rows[8:]]) + "\n")
        with pytest.raises(InputError, match=r"metrics.csv, line 8 was changed since it was written; put the file"):
            finished.curves()
    finally:
        path.write_text(data)


def same_numbers(text, other):
    """Whether both are JSON of the same value: a number may not keep its last digit."""
    try:
        return json.loads(text) == json.loads(other)
    except ValueError:
        return False


def test_a_flipped_digit_in_the_results_is_noticed(finished):
    path, rng = finished.path / "results.json", random.Random(0)
    text = path.read_text()
    try:
        for at in [k for k, c in enumerate(text) if c.isdigit()]:
            path.write_text(text[:at] + rng.choice([d for d in "0123456789" if d != text[at]]) + text[at + 1 :])
            if not same_numbers(path.read_text(), text):
                with pytest.raises(InputError, match=r"results.json was changed"):
                    finished.results()
    finally:
        path.write_text(text)


def test_a_flipped_bit_in_a_model_is_noticed(finished):
    path, rng = finished.model_path(FEDNMAP), random.Random(0)
    data = path.read_bytes()
    try:
        for _ in range(100):
            path.write_bytes(damaged(data, rng))
            if path.read_bytes() != data:
                with pytest.raises(InputError, match=r"fednmap-0.safetensors was changed or cut short"):
                    finished.model(FEDNMAP)
    finally:
        path.write_bytes(data)


def test_the_measurements_are_a_plain_table(finished):
    pandas = pytest.importorskip("pandas")
    table = pandas.read_csv(finished.path / "metrics.csv", float_precision="round_trip")
    assert list(table.columns) == ["method", "trial", "round", "metric", "value"]
    wide = table.pivot(index=["method", "trial", "round"], columns="metric", values="value")
    assert list(wide["objective"]) == [r["objective"] for r in finished.records(*FEDNMAP)]


@pytest.mark.parametrize(
    ("name", "value"), [("algorithms", "fednmap"), ("data", 3), ("rounds", True), ("measure_gamma", "x")]
)
def test_a_configuration_of_other_kinds_is_named(command, tmp_path, name, value):
    folder = begin(tmp_path / "runs" / "run")
    path = folder.path / "run.toml"
    path.write_text(tomli_w.dumps(tomllib.loads(path.read_text()) | {name: value}))
    for words in (["show", folder.path], ["report", folder.path], ["export", folder.path]):
        code, _, err = command(*words)
        assert (code, err.count("\n")) == (2, 1)
        assert f"run.toml was changed: {name} is {value!r}" in err
    assert "damaged" in command("show", "--list")[1]


def earlier_version(folder, column):
    """Write the folder as earlier versions did: with checksums of rows or without, and no digests of models."""
    path = folder.path / "metrics.csv"
    if column:
        first, *rows = path.read_text().splitlines()
        path.write_text("".join(f"{row}\n" for row in [f"{first},check", *(f"{row},0123abcd" for row in rows)]))
    results = [{k: v for k, v in r.items() if k != "model_sha256"} for r in folder.results()]
    if results:
        (folder.path / "results.json").write_text(json.dumps(results))
    return results


@pytest.mark.parametrize("column", [False, True])
def test_folders_of_earlier_versions_are_read_and_continued(tmp_path, whole, column):
    folder = begin(tmp_path / "finished")
    before = folder.records(*FEDNMAP)
    results = earlier_version(folder, column)
    assert folder.records(*FEDNMAP) == before
    assert folder.results() == results
    assert folder.model(FEDNMAP).parameters["x"].shape == (640,)
    folder = stopped(tmp_path / "stopped", 14)
    earlier_version(folder, column)
    assert resume(folder).done == [12]
    assert outcome(folder) == whole


def test_a_metric_whose_name_would_break_the_table_is_refused(tmp_path):
    folder = RunFolder.create(tmp_path / "run", small(), "train")
    with pytest.raises(InputError, match="leave out commas"):
        folder.append(FEDNMAP, {"round": 0, "precision, recall": 1.0})


def test_a_run_is_described_without_looking_names_up(tmp_path):
    folder = begin(tmp_path / "run", rounds=2)
    about = folder.about()
    assert (about.data, about.model, about.clients, about.rounds) == ("digits", "logistic", 10, 2)
    assert (about.algorithms, about.trials, about.measure_gamma) == (("fednmap",), 1, None)
    text = (folder.path / "run.toml").read_text().replace('"digits"', '"my:own"').replace("fednmap", "a.b:Mine")
    (folder.path / "run.toml").write_text(text + "\nfrom_the_future = 3\n")
    with pytest.raises(InputError):
        folder.config()
    assert folder.about() == about.model_copy(update={"data": "my:own", "algorithms": ("a.b:Mine",)})
    (folder.path / "run.toml").write_text("")
    assert folder.about() == About()


def test_a_file_that_takes_another_ones_place_is_on_disk_with_its_name(tmp_path, monkeypatch):
    synced = []

    def fsync(descriptor):
        synced.append((stat.S_ISDIR(os.fstat(descriptor).st_mode), (tmp_path / "file").exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    files.write_atomically(tmp_path / "file", b"text")
    assert synced == [(False, False), (True, True)]  # the contents before the name, the name before the return


def test_json_is_strict(tmp_path):
    folder = RunFolder.create(tmp_path / "run", small(), "train")
    numbers = {"rounds": 1, "objective": math.inf, "loss": [math.nan, 1.0], "zeros": {"a": -math.inf}}
    stored = folder.finish(FEDNMAP, numbers, None)
    text = (folder.path / "results.json").read_text()
    (entry,) = json.loads(text, parse_constant=pytest.fail)
    assert (entry["objective"], entry["loss"], entry["zeros"]) == (None, [None, 1.0], {"a": None})
    assert folder.results() == [stored]


def test_two_runs_never_share_a_folder(tmp_path):
    folder = begin(tmp_path / "run")
    with pytest.raises(ValueError, match="is not empty; choose another folder, or continue it with --resume"):
        RunFolder.create(folder.path, small(), "train")
    with locked(folder.path):
        assert folder.running()
        with pytest.raises(ValueError, match="in use by another run"):
            resume(folder)
    assert not folder.running()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        RunFolder.create(tmp_path / "file", small(), "train")


def test_runs_that_begin_in_the_same_second_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made, threads = [], []
    for _ in range(8):
        threads.append(threading.Thread(target=lambda: made.append(RunFolder.create(None, small(), "train").path)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 8


def test_a_race_for_an_empty_folder_has_one_winner(tmp_path):
    (tmp_path / "run").mkdir()
    made, lost = [], []

    def create():
        try:
            made.append(RunFolder.create(tmp_path / "run", small(), "train"))
        except ValueError as error:
            lost.append(str(error))

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert len(lost) == 7


def limit(size):
    """No file may grow beyond `size`: a full disk for a process that has one to spare."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.parametrize("done", [3, 13])
def test_a_full_disk_ends_the_run_and_leaves_the_last_checkpoint(tmp_path, whole, done):
    try:
        with pytest.raises(FolderError, match=r"cannot write to .*: File too large; what was saved before is intact"):
            begin(tmp_path / "run", StopAt(done, lambda: limit(1000)))
    finally:
        limit(resource.RLIM_INFINITY)
    folder = RunFolder.open(tmp_path / "run")
    first_reason = resume(folder)
    assert first_reason.done == [done - done % 4]
    assert first_reason.lines == []
    assert outcome(folder) == whole


def test_a_disk_that_fills_up_while_a_checkpoint_is_written(tmp_path, whole, monkeypatch):
    def full(path, *_):
        if "round-00000011" in path.name:
            raise OSError(28, os.strerror(28))

    monkeypatch.setattr(files, "to_disk", full)
    with pytest.raises(FolderError, match="No space left on device"):
        begin(tmp_path / "run")
    monkeypatch.undo()
    folder = RunFolder.open(tmp_path / "run")
    assert resume(folder).done == [8]
    assert outcome(folder) == whole


def test_an_unwritable_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match=r"cannot write to .*file/run: Not a directory"):
        RunFolder.create(tmp_path / "file" / "run", small(), "train")


def test_a_method_that_diverges_keeps_what_was_measured(tmp_path):
    folder = begin(tmp_path / "run", algorithms=("fednmap", "fedavg"), penalty="none", eta_a=1e150, model="mlp:3:relu")
    first, second = folder.results()
    assert "smaller eta_a" in first["error"]
    assert first["rounds"] == 0
    assert second["method"] == "fedavg"
    assert len(folder.records(*FEDNMAP)) == 1
    assert resume(folder).done == []


def test_a_method_that_diverges_after_it_was_continued_ends_as_if_it_never_stopped(tmp_path):
    given = {
        "data": "sparse-regression",
        "model": "least-squares",
        "penalty": "none",
        "eta_a": 10.0,
        "dtype": "float32",
    }
    given |= {"participation": 1.0, "drop": 0.0, "eval_every": 10}
    whole = begin(tmp_path / "whole", **given)
    folder = stopped(tmp_path / "run", 5, **given)
    assert resume(folder).done == [4]  # nothing is measured between this and the end
    assert "after round 6" in folder.results()[0]["error"]
    assert outcome(folder) == outcome(whole)
    assert folder.model(FEDNMAP) is None


@pytest.mark.slow
def test_memory_stays_flat_over_ten_thousand_rounds(tmp_path):
    (tmp_path / "data.csv").write_text("a,b,label\n" + "1,2,0\n2,1,1\n3,1,0\n" * 20)
    config = small(data=f"csv:{tmp_path / 'data.csv'}", clients=4, rounds=10_000, eval_every=1, checkpoint_every=500)
    folder = RunFolder.create(tmp_path / "run", config, "train")
    with ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn")
    ) as fresh:  # other tests leave holes in this process's memory
        first, last = fresh.submit(megabytes, config, folder, 1000, 9999).result()
    print(f"{first:.1f} MB after 1,000 rounds, {last:.1f} MB after 9,999")
    assert last - first < 3
    assert len(folder.records(*FEDNMAP)) == 10_001


DIVERGES = ("compare", "--data", "sparse-regression", "--model", "least-squares", "--penalty", "none", "--rounds", 12)
DIVERGES += (
    "--clients",
    10,
    "--eta-a",
    0.0001,
    "--set",
    "fedavg.eta_a=100.0",
    "--set",
    "scaffold.eta_a=100.0",
    "--quiet",
)


@pytest.mark.parametrize("out", ["table", "json"])
def test_a_method_that_diverged_is_named_and_the_command_ends_with_one(command, out):
    words = (*DIVERGES, "--algorithms", "fednmap,fedavg,scaffold", "--out", "run")
    more = ("--json",) if out == "json" else ()
    code, first, err = command(*words, *more)
    assert code == 1
    last = err.splitlines()[-1]
    assert last.startswith("fednmap: fedavg, scaffold diverged: the iterate is no longer finite after round ")
    if out == "json":
        results = json.loads(first, parse_constant=pytest.fail)["results"]
        assert ["error" in r for r in results] == [False, True, True]
    else:
        assert "fedavg (diverged)" in first
        assert "run folder: run" in first
    for again in ("compare", "train"):
        code, said, err = command(again, "--resume", "run", "--quiet", *more)
        assert (code, said, err) == (1, first, last + "\n")


def test_one_method_that_diverged_ends_the_same_way(command):
    words = ("train", *DIVERGES[1:-5], "--algorithm", "fedavg", "--eta-a", 100.0, "--quiet", "--out", "run")
    code, first, err = command(*words)
    assert code == 1
    assert "fedavg (diverged)" in first
    last = err.splitlines()[-1]
    assert last.startswith("fednmap: fedavg diverged: the iterate is no longer finite after round ")
    for again in ("train", "compare"):
        assert command(again, "--resume", "run", "--quiet") == (1, first, last + "\n")


def test_a_method_that_diverged_and_has_no_measurements_left_is_told(tmp_path):
    given = {
        "data": "sparse-regression",
        "model": "least-squares",
        "penalty": "none",
        "eta_a": 10.0,
        "dtype": "float32",
    }
    given |= {"participation": 1.0, "drop": 0.0, "eval_every": 10}
    folder = stopped(tmp_path / "run", 5, **given)
    (folder.path / "metrics.csv").unlink()
    first_reason = resume(folder)
    assert first_reason.done == [0]
    assert "metrics.csv does not hold the measurements before it; beginning at round 0" in first_reason.lines[0]
    (result,) = folder.results()
    assert "error" in result


@pytest.mark.parametrize("cut", [0, 20, 60, 250, 450, 2000])
def test_a_cut_file_of_measurements_can_be_looked_at_and_continued(command, tmp_path, whole, cut):
    folder = begin(tmp_path / "runs" / "run")
    path = folder.path / "metrics.csv"
    path.write_bytes(path.read_bytes()[:cut])
    assert command("show", folder.path)[0] == 0
    assert command("show", "--list")[0] == 0
    assert command("report", folder.path)[0] == 0
    (folder.path / "results.json").unlink()
    assert command("train", "--resume", folder.path, "--quiet")[0] == 0
    assert outcome(folder)[1:] == whole[1:]


def test_numbers_that_are_not_finite_stand_as_null_and_can_be_looked_at(command):
    words = ("compare", *("--model", "logistic", "--rounds", 2, "--clients", 5, "--penalty", "box:0,0.001", "--quiet"))
    code, first, _ = command(*words, "--algorithms", "fednmap,fedavg", "--out", "runs/run")
    assert code == 0
    results = json.loads(Path("runs/run/results.json").read_text(), parse_constant=pytest.fail)
    assert [r["objective"] is None for r in results] == [False, True]
    assert command("compare", "--resume", "runs/run", "--quiet")[:2] == (0, first)
    assert command("show", "runs/run")[0] == 0
    assert command("report", "runs/run")[0] == 0


def test_a_checkpoint_is_read_onto_the_device_of_the_start(tmp_path):
    """Without a GPU: a device that computes nothing shows where each tensor is."""
    folder = stopped(tmp_path / "run", 14)
    experiment = prepare(small())
    algorithm = experiment.algorithm("fednmap")
    start, known = experiment.start(algorithm).to("meta"), settings(experiment.config)
    after, refused = checkpoints.newest(folder.checkpoints(FEDNMAP), algorithm, start, known, experiment.problem.n)
    assert (after.t, refused) == (11, [])
    assert {v.device.type for v in after.server} == {"meta"}
    states = after.as_round().clients.tensors()
    assert (states["ids"].device.type, states["h"].device.type) == ("cpu", "meta")
    assert len(after.as_round().clients) == len(states["ids"]) > 0


def test_a_fault_of_ours_is_not_taken_for_a_damaged_checkpoint(tmp_path, monkeypatch):
    folder = stopped(tmp_path / "run", 14)

    def fail(self, tensors):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("fednmap.simulation.states.Clients.restore", fail)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        resume(folder)
