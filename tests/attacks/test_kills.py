"""Kill -9 at random moments, of real processes: the same command again ends with the bits of an undisturbed run.

100 kills in all; after each, no process that the command has started may stay.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hospital_files import write_hospitals

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--data", "digits", "--model", "logistic", "--clients", "4", "--batch-size", "8", "--checkpoint-every", "5"]
TRIALS = """
import sys
from pathlib import Path
from reproduction.reproduce import run_trials
from reproduction import shallow
from reproduction.store import Store

if __name__ == "__main__":
    jobs = [shallow.job(n=4, Q=2, eta_a=0.5, rounds=20, trial=k) for k in range(2)]
    run_trials(jobs, Store(Path("run") / "figure"), 2, print)
"""
FEDNMAP = [sys.executable, "-m", "fednmap"]
COMMANDS = {
    "train": [*FEDNMAP, "train", *SMALL, "--rounds", "300", "--quiet", "--out", "run"],
    "workers": [*FEDNMAP, "train", *SMALL, "--rounds", "60", "--workers", "2", "--quiet", "--out", "run"],
    "compare": [
        *(*FEDNMAP, "compare", *SMALL, "--rounds", "100", "--algorithms", "fednmap,fedavg,zhang", "--jobs", "2"),
        *("--quiet", "--out", "run"),
    ],
    "fit": [
        *(*FEDNMAP, "fit", "--data", "csv:hospitals", "--target", "outcome", "--exclude", "time,event"),
        *("--cv", "5", "--path", "--quiet", "--out", "run"),
    ],
    "reproduce": [sys.executable, "trials.py"],
}


def again(words):
    """The command that continues, as a user would type it."""
    if words[-1] == "run" and words[3] in ("train", "compare") and Path("run/run.toml").exists():
        at = words.index("--workers") if "--workers" in words else None
        return [*words[:4], "--resume", "run", "--quiet", *(words[at : at + 2] if at else [])]
    return words


def started(words):
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open("log", "wb") as log:
        return subprocess.Popen(words, env=env, start_new_session=True, stdout=log, stderr=log)


def left(session):
    """The processes of a session that are there, without those that have ended and wait to be collected."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, its = (place / "stat").read_text().rsplit(")", 1)[1].split()[:4]
            if int(its) == session and state not in "ZX":
                found.append((place / "cmdline").read_text().replace("\0", " ")[:80])
        except OSError:
            continue
    return found


def survivors(session, seconds=60.0):
    """What stays of a session whose leader was killed; a process that was starting ends after its imports."""
    end = time.monotonic() + seconds
    while (found := left(session)) and time.monotonic() < end:
        time.sleep(0.1)
    return found


def contents():
    """What a run leaves, without seconds, times and what was written on the way."""
    found = {}
    for path in sorted(Path("run").rglob("*")):
        kept = path.name in ("model.json", "path.csv", "cv.csv", "coefficients.csv", "trials.csv", "metrics.csv")
        if path.is_file() and (kept or path.parent.name == "models"):
            data = path.read_bytes()
            if path.name == "metrics.csv":
                data = b"".join(line for line in data.splitlines(True) if b"_seconds," not in line)
            elif path.name in ("model.json", "trials.csv"):
                data = b"" if path.name == "trials.csv" else data[data.index(b'"data":') :]
            found[str(path)] = data
    assert found
    return found


def run_to_the_end(words):
    process = started(words)
    assert process.wait(300) == 0, Path("log").read_text()[-2000:]
    assert survivors(process.pid) == []


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize(
    ("name", "kills"),
    [
        pytest.param(name, kills, marks=[pytest.mark.slow, *([pytest.mark.ci(turn=turn)] if kills == 2 else [])])
        for turn, name in enumerate(COMMANDS)
        for kills in (2, 18)
    ],
)
def test_a_killed_command_ends_as_if_it_had_not_been(tmp_path, monkeypatch, name, kills):
    words, rng = COMMANDS[name], random.Random(name)
    places = {}
    for place in ("whole", "killed"):
        places[place] = tmp_path / place
        places[place].mkdir()
        write_hospitals(places[place] / "hospitals")
        (places[place] / "trials.py").write_text(TRIALS)
    monkeypatch.chdir(places["whole"])
    began = time.monotonic()
    run_to_the_end(words)
    seconds, whole = time.monotonic() - began, contents()
    monkeypatch.chdir(places["killed"])
    orphans = []
    for _ in range(kills):
        process = started(again(words))
        try:
            process.wait(rng.uniform(0.3, 1.0) * seconds)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
        code = process.wait()
        log = Path("log").read_text()[-2000:]
        orphans += survivors(process.pid)
        complete = "run exists already" in log  # it was killed after its last file
        assert code in (0, -signal.SIGKILL) or complete, log
        if code == 0 or complete:  # begin again
            assert contents() == whole
            shutil.rmtree("run")
    if not Path("run/SHA256SUMS").exists() or name != "fit":
        run_to_the_end(again(words))
    assert orphans == []
    assert contents() == whole
