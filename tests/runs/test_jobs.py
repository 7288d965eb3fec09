"""Runs side by side: the same bits as one after another, stopped, killed and gone on."""

import os
import signal
import subprocess
import sys
import threading
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from small import Heard, outcome, small

from fednmap.names import InputError
from fednmap.report.closing import closing_table
from fednmap.report.progress import Bar, Lines
from fednmap.runs.execution import JobRequest, RunInfo, Worker, _run_in, execute
from fednmap.runs.experiment import prepare, settled
from fednmap.runs.folder import Job, RunFolder
from fednmap.runs.process_pool import Interrupted, how_many, interrupts, process_pool
from fednmap.runs.sweep import Sweep
from fednmap.simulation import threads
from fednmap.simulation.distributed import WorkerLost

SETTINGS = {"algorithms": ("fednmap", "fedavg", "zhang"), "trials": 2}


class Twins(Heard):
    """Heard, with a twin for every run."""

    def __init__(self):
        super().__init__()
        self.others = []

    def clone(self):
        self.others.append(Heard())
        return self.others[-1]


def bits(folder):
    metrics, results, models = outcome(folder)
    return metrics, [{k: v for k, v in r.items() if k != "jobs"} for r in results], models


def compared(path, count, **settings):
    experiment = settled(prepare(small(**SETTINGS | settings)))
    folder, first_reason = RunFolder.create(path, experiment.config, "compare"), Twins()
    with process_pool(Worker(experiment), count) as processes:
        execute(experiment.config, folder, first_reason, (), experiment, processes)
    return folder, first_reason


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return compared(tmp_path_factory.mktemp("alone") / "run", 1)[0]


def test_side_by_side_is_one_after_another(alone, tmp_path):
    folder, first_reason = compared(tmp_path / "run", 2)
    assert bits(folder) == bits(alone)
    assert len(first_reason.others) == 6
    assert all(one.done == [0] and len(one.records) == 9 for one in first_reason.others)
    assert {r["jobs"] for r in folder.results()} == {2}
    assert "2 runs at a time shared the machine" in closing_table(folder.results()).below
    assert all("jobs" not in r for r in alone.results())
    assert not folder.running()


def test_stopped_runs_are_saved_and_go_on(alone, tmp_path):
    experiment = settled(prepare(small(**SETTINGS)))
    folder = RunFolder.create(tmp_path / "run", experiment.config, "compare")
    folder.repair()
    asked, first_reason = threading.Event(), Twins()

    class Stops(Heard):
        def on_record(self, record):
            asked.set()

    first_reason.clone = Stops
    jobs = [Job(method, trial) for trial in (0, 1) for method in SETTINGS["algorithms"]]
    seeded = [experiment.config.model_copy(update={"seed": job.trial}) for job in jobs]
    given = [JobRequest(job, config, folder.path, 2) for job, config in zip(jobs, seeded, strict=True)]
    with process_pool(Worker(experiment), 2) as processes, pytest.raises(Interrupted):
        _run_in(processes, given, first_reason, asked)
    assert len(folder.results()) < 6
    with process_pool(Worker(None), 2) as processes:
        execute(experiment.config, folder, Twins(), (), None, processes)
    assert bits(folder) == bits(alone)


def test_trials_of_a_sweep_side_by_side(tmp_path):
    given = small(rounds=12, trials=3, eval_last=3, clients=4, measure_gamma=1.0)
    one, other = (Sweep.create(tmp_path / name, given, "n", (2, 4)) for name in ("one", "other"))
    with process_pool(Worker(None), 2) as processes:
        assert other.run(given, Twins(), processes) == one.run(given, Heard())
    assert [bits(part) for part in other.parts()] == [bits(part) for part in one.parts()]


class Fails:
    def __call__(self, order, send):
        if order.job.trial == 1:
            raise ValueError("a mistake of ours")
        with interrupts() as asked:
            while not asked.is_set():
                time.sleep(0.01)
        raise Interrupted


class Dies(Fails):
    def __call__(self, order, send):
        os.kill(os.getpid(), signal.SIGKILL)


def orders(tmp_path):
    return [JobRequest(Job("fednmap", trial), small(), tmp_path, 2) for trial in range(4)]


def test_a_mistake_in_one_stops_the_others_and_keeps_its_traceback(tmp_path):
    with process_pool(Fails(), 2) as processes, pytest.raises(ValueError, match="a mistake of ours") as caught:
        _run_in(processes, orders(tmp_path), Twins(), threading.Event())
    assert "in __call__" in str(caught.value.__cause__)


def test_a_process_that_is_killed_is_named(tmp_path):
    with process_pool(Dies(), 2) as processes, pytest.raises(WorkerLost, match="ended by SIGKILL"):
        _run_in(processes, orders(tmp_path), Twins(), threading.Event())


def test_processes_have_their_share_of_the_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(threads, "_limit", None)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")

    class Tells(Fails):
        def __call__(self, order, send):
            return {"threads": threads.default()}

    with process_pool(Tells(), 2) as processes:
        assert {
            found["threads"] for found in _run_in(processes, orders(tmp_path), Twins(), threading.Event()).values()
        } == {2}
    assert how_many(None, 3) == 3
    assert how_many(None, 9) == 4
    assert how_many(7, 9) == 7
    with process_pool(Tells(), 1) as none:
        assert none is None


def test_one_display_for_all():
    bar, lines = Bar(Console(file=StringIO())), Lines(Console(file=StringIO()))
    first, second = bar.clone(), bar.clone()
    for k, one in enumerate((first, second)):
        one.begin(RunInfo(Job("fednmap", k), 0, 10, 2, {}))
    first.on_record({"round": 3.0, "objective": 1.0})
    second.on_record({"round": 7.0, "objective": 1.0})
    assert [task.completed for task in bar.progress.tasks] == [3, 7]
    lines.label = "n=5 "
    assert lines.clone().label == "n=5 "
    assert lines.clone() is not lines


@pytest.mark.parametrize(
    "words", [("--jobs", 0), ("--jobs", 2, "--workers", 2), ("--jobs", 2, "--track", "tensorboard")]
)
def test_numbers_of_jobs_that_make_no_sense(command, words, tmp_path):
    code, _, err = command("compare", "--model", "logistic", "--rounds", 1, "--out", tmp_path / "run", *words)
    assert code == 2
    assert "jobs" in err
    assert not (tmp_path / "run").exists()


def test_at_least_one_run_goes_on():
    with pytest.raises(InputError, match="jobs is 0"):
        how_many(0, 3)


@pytest.mark.slow
def test_the_command_stopped_by_ctrl_c_goes_on(alone, tmp_path):
    folder = tmp_path / "run"
    words = ["--config", str(alone.path / "run.toml"), "--out", str(folder), "--jobs", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "fednmap", "compare", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not (folder / "metrics.csv").exists() or len((folder / "metrics.csv").read_text().splitlines()) < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "stopped and saved" in err
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    again = [sys.executable, "-m", "fednmap", "compare", "--resume", str(folder), "--jobs", "2", "--quiet"]
    assert subprocess.run(again, check=False, capture_output=True).returncode == 0
    assert bits(RunFolder(folder)) == bits(alone)
