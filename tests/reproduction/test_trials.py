"""How a figure's trials are run: never twice, as ordinary runs, continued where they were stopped."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import outcome

from fednmap import run as train
from fednmap.algorithms import FedNMap, Zhang
from fednmap.data import DATASETS, ClientData, Dataset, load, partition
from fednmap.models import mlp, mobilenet_v3_small
from fednmap.problems import Network
from fednmap.regularizers import L1, ElasticNet
from fednmap.report.progress import Warnings
from fednmap.runs.atomic_files import locked
from fednmap.runs.configuration import Config
from fednmap.runs.execution import Reporter, execute
from fednmap.runs.folder import RunFolder
from fednmap.runs.process_pool import Interrupted
from reproduction import mobilenet, nn, shallow, table1, table1_trials
from reproduction.reproduce import finished, reproduce, run_trials
from reproduction.store import CODE, Store
from reproduction.trials import Trial
from reproduction.verdict import Claim


def silent(line: str) -> None:
    pass


def forget(store: Store, name: str) -> None:
    """Remove a trial's row."""
    lines = store.table.read_text().splitlines(keepends=True)
    store.table.write_text("".join(line for line in lines if not line.startswith(f"{name},")))


class Counting:
    """A measurement that says how often it was made."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def job(self, trial: int, **configuration: Any) -> Trial:
        def measure(folder: Path) -> list[dict[str, float]]:
            self.calls.append(trial)
            return [{"round": float(t), "value": trial + t / 7} for t in range(3)]

        return Trial({"method": "A", "n": 2, "trial": trial}, measure, configuration)


def test_finished_trials_are_not_run_again(tmp_path: Path) -> None:
    counting = Counting()
    store = Store(tmp_path / "figure")
    first = run_trials([counting.job(k) for k in range(2)], store, 1, silent)
    again = run_trials([counting.job(k) for k in range(3)], store, 1, silent)
    assert counting.calls == [0, 1, 2]
    assert [c.setting for c in again[:2]] == [c.setting for c in first]
    np.testing.assert_allclose(again[2]["value"], [2, 2 + 1 / 7, 2 + 2 / 7], rtol=1e-5)


def test_an_interrupted_run_keeps_what_is_finished(tmp_path: Path) -> None:
    counting = Counting()

    def stop(folder: Path) -> list[dict[str, float]]:
        raise KeyboardInterrupt

    jobs = [counting.job(0), Trial({"method": "B", "trial": 0}, stop, {})]
    with pytest.raises(KeyboardInterrupt):
        run_trials(jobs, Store(tmp_path / "figure"), 1, silent)
    assert list(Store(tmp_path / "figure").rows()) == ["A_n2_trial0"]


def test_another_setting_is_another_trial(tmp_path: Path) -> None:
    a, b = (shallow.job(n=20, Q=10, eta_a=0.1, rounds=rounds, trial=0).name for rounds in (300, 400))
    assert a != b


def test_a_trial_of_other_settings_is_run_again_and_left_out_of_what_is_finished(tmp_path: Path) -> None:
    counting, lines, store = Counting(), list[str](), Store(tmp_path / "figure")
    run_trials([counting.job(0, eta=0.1, n=2), counting.job(1, eta=0.1, n=2)], store, 1, silent)
    changed = [counting.job(0, eta=0.2, n=2), counting.job(1, eta=0.1, n=2, later="a setting that is new")]
    assert [c.setting["trial"] for c in finished(changed, store, lines.append)] == [1]
    assert lines == ["1 of 2 trials left out: eta was 0.1 and is 0.2"]
    lines.clear()
    run_trials(changed, store, 1, lines.append)
    assert counting.calls == [0, 1, 0]
    assert lines[:2] == ["1 of 2 trials run again: eta was 0.1 and is 0.2", "2 trials, 1 already there"]
    run_trials(changed, store, 1, silent)
    assert counting.calls == [0, 1, 0]


@pytest.mark.parametrize("workers", [0, -1])
def test_workers_are_at_least_one(workers: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected --jobs of at least 1"):
        run_trials([], Store(tmp_path), workers, silent)


@pytest.mark.slow
def test_processes_give_the_same_numbers(tmp_path: Path) -> None:
    jobs = [
        table1._job({"method": m, "trial": 0}, partial(table1_trials.limit, m, "strongly convex", 50))
        for m in ("FedNMap", "Zhang")
    ]
    here, there = (run_trials(jobs, Store(tmp_path / str(w) / "figure"), w, silent) for w in (1, 2))
    for a, b in zip(here, there, strict=True):
        np.testing.assert_array_equal(a["value"], b["value"])


# --- a whole figure, on a handful of pictures


def shrink(patch: pytest.MonkeyPatch) -> None:
    pictures(patch, seed=0)
    patch.setattr(shallow, "HIDDEN", 4)
    patch.setattr(nn, "METHODS", ("FedNMap", "Zhang"))
    patch.setattr(nn, "ROUNDS", 20)
    patch.setattr(nn, "PANELS", {"quick": ((4, 2),), "paper": ((4, 2),)})


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)


def pictures(patch: pytest.MonkeyPatch, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.rand(100, 1, 28, 28, generator=generator), torch.arange(100) % 10
    patch.setitem(DATASETS, "mnist", lambda: Dataset(x, y, x[:2], y[:2]))


@pytest.mark.slow
@pytest.mark.ci(turn=9)
def test_changed_data_and_settings_are_never_mixed_with_old_numbers(
    tiny: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each change, told; what comes out is what an empty folder gives."""

    def figure(name: str, trials: int) -> tuple[bytes, list[str]]:
        lines: list[str] = []
        reproduce(nn.FIGURE, "quick", trials=trials, out=tmp_path / name, workers=1, report=lines.append)
        return (tmp_path / name / "nn" / "histories.csv.gz").read_bytes(), lines

    before, _ = figure("kept", 1)
    monkeypatch.setattr(shallow, "HIDDEN", 5)
    other, lines = figure("kept", 1)
    assert "2 of 2 trials run again: model was 'mlp:4:sigmoid' and is 'mlp:5:sigmoid'" in lines[0]
    assert other == figure("empty", 1)[0] != before
    pictures(monkeypatch, seed=1)
    new, lines = figure("kept", 1)  # although every trial is there
    assert lines[0] == "nn: 2 of 2 trials run again: their data were others"
    assert new == figure("new data", 1)[0] != other
    both, lines = figure("kept", 2)
    assert "nn: 4 trials, 2 already there" in lines
    assert both == figure("new data", 2)[0]
    assert figure("kept", 2)[1] == ["nn: 4 trials, 4 already there"]


def test_an_unfinished_trial_of_other_settings_begins_again(
    tiny: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stop(self: Warnings, record: dict[str, float]) -> None:
        if record["round"] == 10:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Warnings, "on_record", stop)
        with pytest.raises(Interrupted):
            shallow.job(n=4, Q=2, eta_a=0.5, rounds=20, trial=0).measure(tmp_path / "run")
    monkeypatch.setattr(shallow, "GAMMA", 2.0)
    job = shallow.job(n=4, Q=2, eta_a=0.5, rounds=20, trial=0)
    assert job.measure(tmp_path / "run") == job.measure(tmp_path / "empty")
    assert RunFolder.open(tmp_path / "run").config().gamma == 2.0


@pytest.mark.parametrize("constant", ["NOISE", "STEPS", "PHI", "PROBLEMS", "FACTORS", "LIMIT", "MEASURE_GAMMA"])
def test_the_constants_of_the_table_are_part_of_its_trials(monkeypatch: pytest.MonkeyPatch, constant: str) -> None:
    def configurations() -> list[dict[str, Any]]:
        return [dict(job.configuration) for job in table1.jobs("quick", 1)]

    before = configurations()
    others: dict[str, Any] = {
        "NOISE": 3.0,
        "STEPS": (1.0, 0.5),
        "PHI": dict.fromkeys(table1_trials.PHI, L1(0.2)),
        "PROBLEMS": {k: partial(p, smallest=0.1) for k, p in table1_trials.PROBLEMS.items()},
        "FACTORS": {"n": (2, 8), "Q": (1, 4, 16), "T": (32, 128, 512)},
        "LIMIT": (8, 5, 0.5),
        "MEASURE_GAMMA": 2.0,
    }
    monkeypatch.setattr(table1_trials, constant, others[constant])
    assert before == json.loads(json.dumps(before))
    assert not any(a in before for a in configurations())


def test_the_papers_gamma_is_said_and_trials_differ(tiny: None, tmp_path: Path) -> None:
    size = mobilenet.SIZES["quick"]
    jobs = [shallow.job(n=4, Q=2, eta_a=0.5, rounds=10, trial=k) for k in range(2)]
    assert {job.configuration["measure_gamma"] for job in jobs} == {4.0}
    assert mobilenet.job("FedNMap", 4, 10, size, 0).configuration["measure_gamma"] == 2.5
    first, second = (job.measure(tmp_path / job.name) for job in jobs)
    assert all(a["objective"] != b["objective"] for a, b in zip(first, second, strict=True))


def test_all_methods_start_at_the_same_model(tiny: None, tmp_path: Path) -> None:
    jobs = [shallow.job(method=m, n=4, Q=2, eta_a=0.5, rounds=10, trial=0) for m in ("FedNMap", "Zhang", "FedCanon")]
    first = [job.measure(tmp_path / job.name)[0] for job in jobs]
    assert first[0] == first[1] == first[2]


def test_a_trial_is_the_method_on_the_network_from_scratch(tiny: None, tmp_path: Path) -> None:
    """Written out by hand with the paper's settings, against what the configuration makes of them."""
    job = shallow.job(n=4, Q=2, eta_a=0.5, rounds=20, trial=3)
    data = load("mnist")
    clients = ClientData.split(data.x_train, data.y_train, partition("sorted", data.y_train, 4))
    torch.manual_seed(3)
    module = mlp(784, 10, (4,), "sigmoid")
    problem = Network(module, torch.nn.functional.cross_entropy, clients, batch_size=8, seed=3)
    algorithm = FedNMap(ElasticNet(0.001, 0.01), eta_a=0.5, Q=2, gamma=4.0)
    result = train(algorithm, problem, rounds=20, measure_gamma=4.0)
    expected = [{name: r[name] for name in ("round", "stationarity", "objective")} for r in result.records]
    assert job.measure(tmp_path / "run") == expected


@pytest.mark.slow
@pytest.mark.ci(turn=7)
@pytest.mark.filterwarnings("ignore:psi ended at")  # two rounds of large steps on noise
def test_a_mobilenet_trial_from_scratch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(30, 3, 32, 32, generator=generator), torch.arange(30) % 3

    def pictures(first: int, /) -> Dataset:
        return Dataset(x[:first], y[:first], x[:2], y[:2])

    monkeypatch.setitem(DATASETS, "cifar10", pictures)
    size = mobilenet.Size(((2, 2),), images=24, batch=4, rounds=2, every=1)
    parts = partition("dirichlet:0.5", y[:24], 2)
    mixed = torch.Generator().manual_seed(0)
    parts = [part[torch.randperm(len(part), generator=mixed)] for part in parts]
    torch.manual_seed(0)
    module = mobilenet_v3_small(3)
    clients = ClientData.split(x[:24], y[:24], parts)
    problem = Network(module, torch.nn.functional.cross_entropy, clients, batch_size=4)
    phi = L1(1e-4)
    start = phi.prox(problem.start, 2.5)
    result = train(Zhang(phi, eta_a=0.5, Q=2), problem, rounds=2, every=1, start=start, chunk=5)
    expected = [{name: r[name] for name in ("round", "hoyer", "loss")} for r in result.records]
    assert mobilenet.job("Zhang", 2, 2, size, 0).measure(tmp_path / "run") == expected


def test_a_trial_is_an_ordinary_run_that_can_be_run_again(tiny: None, tmp_path: Path) -> None:
    job = shallow.job(n=4, Q=2, eta_a=0.5, rounds=20, trial=1)
    store = Store(tmp_path / "figure")
    run_trials([job], store, 1, silent)
    folder = RunFolder.open(tmp_path / "runs" / job.name)
    assert sorted(p.name for p in folder.path.iterdir() if p.name[0] != ".") == [
        *("SHA256SUMS", "environment.json", "metrics.csv", "models", "results.json", "run.toml")
    ]
    assert folder.environment()["torch"] == version("torch")
    again = RunFolder.create(tmp_path / "again", Config.read(folder.path / "run.toml"), "train")
    execute(again.config(), again, Reporter())
    assert outcome(again) == outcome(folder)
    forget(store, job.name)
    before = (folder.path / "metrics.csv").stat().st_mtime_ns
    run_trials([job], store, 1, silent)
    assert list(store.rows()) == [job.name]
    assert (folder.path / "metrics.csv").stat().st_mtime_ns == before


def test_a_trial_of_the_table_says_where_it_comes_from(tmp_path: Path) -> None:
    job = table1._job({"method": "FedNMap", "trial": 0}, partial(table1_trials.limit, "FedNMap", "strongly convex", 50))
    store = Store(tmp_path / "figure")
    run_trials([job], store, 1, silent)
    row = store.rows()[job.name]
    assert row.setting == {"method": "FedNMap", "trial": "0"}
    assert json.loads(row.provenance.configuration) == job.configuration
    assert (row.provenance.seed, row.provenance.code_digest, row.provenance.data_digest) == ("0", CODE, "")
    assert row.provenance.torch == version("torch")


# --- what happens to it on the way


def work(out: Path) -> None:
    """A process of its own that makes the figure, taking its time."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        patch.setattr(nn, "ROUNDS", 120)
        patch.setattr(Warnings, "on_round", lambda self, round, totals: time.sleep(0.002))
        reproduce(nn.FIGURE, "quick", trials=1, out=out, workers=1, report=silent)


def test_kill_minus_nine_in_a_trial(tmp_path: Path) -> None:
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["reproduction.figures", "fednmap.runs.execution", "pytest"])
    whole = processes.Process(target=work, args=(tmp_path / "whole",))
    whole.start()
    for method in ("FedNMap", "Zhang"):
        killed = processes.Process(target=work, args=(tmp_path / "killed",))
        killed.start()
        states = tmp_path / "killed" / "runs" / f"{method}_n4_Q2_eta_a0.5_batch8_rounds120_trial0" / "checkpoints"
        while killed.is_alive() and not list(states.rglob("round-00000049.json")):
            time.sleep(0.002)
        killed.kill()
        killed.join()
        assert list(states.rglob("round-00000049.json"))
    work(tmp_path / "killed")
    whole.join()
    assert not list((tmp_path / "killed" / "runs").glob("*/checkpoints"))
    for name in ("nn/trials.csv", "nn/histories.csv.gz", "nn/verdict.md"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_ctrl_c_in_a_trial(tiny: None, command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def histories(out: str) -> bytes:
        return (tmp_path / out / "nn" / "histories.csv.gz").read_bytes()

    words = ("reproduce", "nn", "--trials", 1, "--out")
    assert command(*words, "whole")[0] == 0

    def stop(self: Warnings, record: dict[str, float]) -> None:
        if record["round"] == 10:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Warnings, "on_record", stop)
        code, out, err = command(*words, "stopped")
    assert (code, out) == (130, "")
    last = "stopped and saved; continue with\n  fednmap reproduce nn --trials 1 --out stopped\n"
    assert err == f"nn: 2 trials, 0 already there\n{last}"
    assert list((tmp_path / "stopped" / "nn").iterdir()) == []
    assert command(*words, "stopped")[0] == 0
    assert histories("stopped") == histories("whole")
    code, _, err = command(*words, "stopped")
    assert (code, err) == (0, "nn: 2 trials, 2 already there\n")


SLOW_TRIALS = """
import sys, time
from dataclasses import fields
from functools import partial
from pathlib import Path

from reproduction.reproduce import run_trials
from reproduction.store import Store
from reproduction.trials import Trial
from reproduction.verdict import Claim


def measure(k, fails, path):
    (path.parent.parent / f"begun{k}").touch()
    if k == fails:
        raise ZeroDivisionError("this one")
    for _ in range(10):  # a signal does not end the wait
        time.sleep(0.1)
    path.mkdir(parents=True)
    (path / "environment.json").write_text("{}")
    return [{"round": 0.0, "value": 1.0}]


if __name__ == "__main__":
    out, fails = Path(sys.argv[1]), int(sys.argv[2])
    jobs = [Trial({"trial": k}, partial(measure, k, fails), {}) for k in range(12)]
    run_trials(jobs, Store(out / "figure"), 2, print)
"""


@pytest.mark.slow
@pytest.mark.ci(turn=8)
@pytest.mark.parametrize("how", ["ctrl-c", "a trial fails"])
def test_no_trial_begins_after_an_end(how: str, tmp_path: Path) -> None:
    """What runs in the other process is finished, what waits is not begun, and nothing lives on."""
    (tmp_path / "slow.py").write_text(SLOW_TRIALS)
    (tmp_path / "out").mkdir()
    words = [sys.executable, "slow.py", "out", "1" if how == "a trial fails" else "-1"]
    process = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)
    if how == "ctrl-c":
        while process.poll() is None and len(list((tmp_path / "out").glob("begun*"))) < 2:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.splitlines()[-1].startswith(
        "ZeroDivisionError: this one" if "fails" in how else "fednmap.runs.process_pool."
    )
    begun = sorted(path.name for path in (tmp_path / "out").glob("begun*"))
    assert begun == ["begun0", "begun1"]
    done = ["trial0"] if "fails" in how else ["trial0", "trial1"]
    assert list(Store(tmp_path / "out" / "figure").rows()) == done


def test_a_folder_that_cannot_be_written_and_one_in_use(tiny: None, command: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = command("reproduce", "nn", "--trials", 1, "--out", "file/out")
    assert code == 1
    assert err.startswith("fednmap: cannot write to file/out/nn: Not a directory; what was saved before is intact")
    job = nn.FIGURE.jobs("quick", 1)[0]
    path = tmp_path / "out" / "runs" / job.name
    path.mkdir(parents=True)
    with locked(path):
        code, _, err = command("reproduce", "nn", "--trials", 1, "--out", "out")
    assert code == 2
    assert "is in use by another run; wait for it to end" in err.splitlines()[-1]


def test_a_trial_that_diverges_is_named(tiny: None, tmp_path: Path) -> None:
    job = shallow.job(n=4, Q=2, eta_a=1e30, rounds=20, trial=0)
    for _ in range(2):
        with pytest.raises(ArithmeticError, match=r"eta_a1e\+30.*use a smaller eta_a"):
            run_trials([job], Store(tmp_path / "figure"), 1, silent)


def test_a_figure_leaves_tables_pictures_and_a_verdict(tiny: None, tmp_path: Path) -> None:
    lines: list[str] = []
    options = {"out": tmp_path, "workers": 1, "report": lines.append}
    reproduce(nn.FIGURE, "quick", trials=1, **options)
    left = {p.name for p in (tmp_path / "nn").iterdir()}
    assert left == {"trials.csv", "histories.csv.gz", "summary.csv", "verdict.json", "verdict.md", "nn.png", "nn.pdf"}
    facts = json.loads((tmp_path / "nn" / "verdict.json").read_text())
    assert (facts["name"], facts["scale"], facts["trials"]) == ("nn", "quick", 1)
    assert {field.name for field in fields(Claim)} | {"verdict"} == set(facts["claims"][0])
    before = (tmp_path / "nn" / "histories.csv.gz").read_bytes()
    reproduce(nn.FIGURE, "quick", trials=1, **options)
    assert lines[-1] == "nn: 2 trials, 2 already there"
    assert (tmp_path / "nn" / "histories.csv.gz").read_bytes() == before
    reproduce(nn.FIGURE, "quick", trials=5, only_finished=True, **options)
    assert json.loads((tmp_path / "nn" / "verdict.json").read_text())["trials"] == 1


def test_finished_judges_all_trials_there_are(tiny: None, command: Any, tmp_path: Path) -> None:
    """More of them than the figure has by default; the page says how to have as many."""
    many = nn.FIGURE.trials["quick"] + 2
    assert command("reproduce", "nn", "--trials", many, "--out", ".")[0] == 0
    whole = (tmp_path / "nn/histories.csv.gz").read_bytes()
    page = tmp_path.parent / f"{tmp_path.name}.md"  # beside the folder, whatever it was called
    assert f"--scale quick --trials {many}`" in page.read_text()
    page.unlink()
    assert command("reproduce", "nn", "--finished", "--out", ".")[0] == 0
    assert (tmp_path / "nn/histories.csv.gz").read_bytes() == whole
    last = nn.FIGURE.jobs("quick", many)[-1]
    forget(nn.FIGURE.store(tmp_path), last.name)
    assert command("reproduce", "nn", "--finished", "--out", ".")[0] == 0
    facts = json.loads((tmp_path / "nn" / "verdict.json").read_text())
    assert (facts["trials"], facts["asked"]) == (many - 1, many)
    page.unlink()


def test_a_folder_with_a_dot_has_its_own_page(tiny: None, command: Any, tmp_path: Path) -> None:
    assert command("reproduce", "nn", "--trials", 1, "--out", "v0.1")[0] == 0
    assert (tmp_path / "v0.1.md").is_file()
