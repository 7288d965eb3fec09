"""`fednmap watch`: every measurement once, in three forms."""

import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from fednmap.commands import watch
from fednmap.runs.atomic_files import locked
from fednmap.runs.configuration import Config
from fednmap.runs.execution import Reporter, execute
from fednmap.runs.folder import Job, RunFolder

SETTINGS = {"data": "digits", "model": "logistic", "clients": 4, "local_steps": 2, "eval_every": 2}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    config = Config.make(algorithms=("fednmap", "fedavg"), rounds=6, penalty="l1:0.01", **SETTINGS)
    folder = RunFolder.create(tmp_path / "a run", config, "compare")
    execute(config, folder, Reporter())
    return folder


def test_json_has_each_measurement_once(command, run: RunFolder) -> None:
    _, out, _ = command("watch", run.path, "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [(line["method"], line["round"]) for line in lines] == [
        (method, t) for method in ("fednmap", "fedavg") for t in (0, 2, 4, 6)
    ]
    assert lines[3]["objective"] == run.records("fednmap", 0)[-1]["objective"]


def test_lines_where_nobody_watches(command, run: RunFolder) -> None:
    told = command("watch", run.path)[1].splitlines()
    assert told[3].startswith("fednmap  round 6  psi ")
    assert told[-1] == "finished"


def test_a_run_that_goes_on_is_followed_to_its_end(run: RunFolder) -> None:
    """The rows of the last rounds are written while it is watched."""
    rows = (run.path / "metrics.csv").read_bytes()
    cut = rows.index(b"fedavg,0,4,")
    (run.path / "metrics.csv").write_bytes(rows[:cut])
    seen: list[tuple[str, float]] = []
    with locked(run.path):
        news = watch._news(run, every=0.05)
        seen += [(job.method, record["round"]) for job, record in (next(news) for _ in range(6))]
        (run.path / "metrics.csv").write_bytes(rows)
    seen += [(job.method, record["round"]) for job, record in news]
    assert seen == [(method, t) for method in ("fednmap", "fedavg") for t in (0, 2, 4, 6)]


def test_prometheus_reads_every_quantity(run: RunFolder) -> None:
    samples = {}
    for line in watch.to_prometheus(run).splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            samples[name] = float(value)
    assert samples['fednmap_running{run="a run"}'] == 0
    assert samples['fednmap_jobs_finished{run="a run"}'] == samples['fednmap_jobs_expected{run="a run"}'] == 2
    for method in ("fednmap", "fedavg"):
        for name, value in run.records(method, 0)[-1].items():
            assert samples[f'fednmap_{name}{{run="a run",method="{method}",trial="0"}}'] == value


def test_labels_and_numbers_of_prometheus() -> None:
    assert watch._labels(run='a"b\\c\nd') == '{run="a\\"b\\\\c\\nd"}'
    assert [watch._number(v) for v in (1.5, math.nan, math.inf, -math.inf)] == ["1.5", "NaN", "+Inf", "-Inf"]
    assert json.loads(watch.to_json_line(Job("m", 0), {"round": 1.0, "loss": math.nan}))["loss"] is None


def test_the_port(run: RunFolder) -> None:
    with watch.server(run, "127.0.0.1", 0) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{serving.server_address[1]}"
        with urlopen(f"{address}/metrics") as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert answer.read().decode() == watch.to_prometheus(run)
        with urlopen(f"{address}/healthz") as answer:
            assert answer.read() == b"finished\n"
        (run.path / "results.json").write_text("[]")  # as after a crash
        with pytest.raises(HTTPError, match="503") as refused:
            urlopen(f"{address}/healthz")
        assert refused.value.read().startswith(b"stopped, 0 of 2 methods done")
        with pytest.raises(HTTPError, match="404"):
            urlopen(f"{address}/elsewhere")
        serving.shutdown()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--json", "--port", "0"], "expected --json or --port, got both"),
        (["--port", "70000"], "Invalid value for '--port'"),
        (["--every", "0"], "Invalid value for '--every'"),
    ],
)
def test_bad_options(command, run: RunFolder, options: list[str], line: str) -> None:
    code, _, err = command("watch", run.path, *options)
    assert code == 2
    assert line in err


def test_a_folder_that_is_no_run(command, tmp_path: Path) -> None:
    code, _, err = command("watch", tmp_path)
    assert code == 2
    assert len(err.splitlines()) == 1


def test_the_terminals_table(run: RunFolder) -> None:
    """In a terminal of 80 columns, with a process of its own."""
    code = "import sys; from fednmap.cli import main; sys.argv[0] = 'fednmap'; main()"
    environment = {**os.environ, "FORCE_COLOR": "1", "TTY_COMPATIBLE": "1", "COLUMNS": "80"}
    told = subprocess.run(
        [sys.executable, "-c", code, "watch", str(run.path)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "newest measurement" in told.stdout
    assert told.stdout.rstrip().endswith("finished")
