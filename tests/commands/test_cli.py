"""The command: exit codes, one line for each mistake, JSON that is JSON, help one can read."""

import io
import json
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from small import SMALL

import fednmap
from fednmap import cli
from fednmap.cli import COMMANDS, LazyCommand
from fednmap.names import FOREIGN, InputError
from fednmap.report.progress import Bar, Lines, waiting
from fednmap.runs.atomic_files import FolderError
from fednmap.runs.execution import RunInfo
from fednmap.runs.folder import Job
from fednmap.simulation.distributed import WorkerLost

KEYS = (
    *("rounds", "objective", "loss", "stationarity", "zeros", "hoyer", "test_accuracy", "bytes_up", "bytes_down"),
    *("seconds", "train_seconds", "eval_seconds"),
)
QUICK = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def test_json_is_one_object_and_nothing_else(command):
    code, out, err = command("train", *QUICK, "--out", "run", "--json")
    found = json.loads(out)
    assert code == 0
    assert all(key in found for key in KEYS)
    assert found["rounds"] == 24
    assert found["seconds"] == pytest.approx(found["train_seconds"] + found["eval_seconds"])
    assert found["bytes_up"] == 24 * 5 * 640 * 8
    assert "round 24/24" in err
    code, out, err = command("train", "--resume", "run", "--json", "--quiet")
    assert (code, json.loads(out), err) == (0, found, "")


def test_json_is_strict_where_a_constraint_is_violated(command):
    code, out, _ = command(
        "compare", *QUICK, "--algorithms", "fednmap,fedavg", "--penalty", "box:0,0.001", "--json", "--quiet"
    )
    first, second = json.loads(out, parse_constant=pytest.fail)["results"]
    assert code == 0
    assert first["objective"] > 0
    assert second["objective"] is None


def test_a_table_a_picture_and_the_folder(command, tmp_path):
    code, out, err = command("compare", *QUICK, "--algorithms", "fednmap,fedavg", "--trials", 2, "--quiet")
    (folder,) = (tmp_path / "runs").iterdir()
    assert (code, err) == (0, "")
    assert "|F_nat|^2" in out
    assert "±" in out
    assert str(folder.relative_to(tmp_path)) in out
    assert max(len(line) for line in out.splitlines()) <= 80
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert command("compare", "--resume", folder.relative_to(tmp_path), "--quiet")[:2] == (0, out)
    assert command("train", "--config", folder / "run.toml", "--out", "again", "--quiet")[0] == 0
    assert (tmp_path / "again" / "run.toml").read_text() == (folder / "run.toml").read_text()

    code, out, _ = command("show")
    assert code == 0
    assert "state: finished" in out
    assert "█" in out
    code, out, _ = command("show", "--list")
    assert folder.name[:8] in out
    code, out, _ = command("report", folder, "-o", "page.html")
    assert (code, out) == (0, "page.html\n")


BAD = {
    "unknown algorithm": (
        ["--algorithm", "fednmpa"],
        "algorithms: unknown algorithm 'fednmpa'; did you mean 'fednmap'?",
    ),
    "step beyond float32": (
        ["--eta-a", "1e200", "--dtype", "float32"],
        "fednmap: eta_a is 1e+200; float32 holds numbers from 1.18e-38 up to 3.4e+38",
    ),
    "step below float32": (["--eta-a", "1e-50", "--dtype", "float32"], "fednmap: eta_a is 1e-50; float32 holds"),
    "unknown data": (["--data", "digit"], "data: unknown data set 'digit'; did you mean 'digits'?"),
    "unknown regularizer": (["--penalty", "l11:1"], "penalty: unknown regularizer 'l11'; did you mean 'l1'?"),
    "unknown partition": (["--partition", "iidd"], "partition: unknown partition 'iidd'; did you mean 'iid'?"),
    "unknown model": (["--model", "mpl"], "model: unknown model 'mpl'; did you mean 'mlp'?"),
    "unknown option": (["--roundz", "3"], "No such option"),
    "gamma rho": (
        ["--penalty", "mcp:0.1,2", "--gamma", "3"],
        "gamma * rho must stay below 1",
    ),
    "Q": (["--local-steps", "0"], "local_steps is 0; it must be a whole number, at least 1"),
    "rounds": (["--rounds", "-1"], "rounds is -1; it must be a whole number, at least 0"),
    "no number": (["--rounds", "x"], "Invalid value for '--rounds': 'x' is not a valid integer"),
    "clients": (["--clients", "5000"], "5000"),
    "participation": (["--participation", "0"], "participation is 0.0; it must be a number, above 0 and at most 1"),
    "participation above": (["--participation", "1.5"], "participation is 1.5; it must be"),
    "everybody": (["--algorithm", "scaffnew"], "needs every client"),
    "drop": (["--drop", "1"], "drop is 1.0; it must be a number, at least 0 and below 1"),
    "device": (["--device", "gpu"], "device is 'gpu'"),
    "no numbers": (["--device", "meta"], "device is 'meta'"),
    "beyond counting": (["--batch-size", "99999999999999999999"], "batch_size: 99999999999999999999 is larger"),
    "set": (["--set", "fednmap.Q"], "--set takes METHOD.PARAMETER=VALUE"),
    "set value": (["--set", "fednmap.Q=0"], "Q is 0"),
    "config": (["--config", "nowhere.toml"], "cannot read nowhere.toml: No such file or directory"),
    "resume": (["--resume", "nowhere"], "nowhere is not a run folder: it has no run.toml"),
    "tracker": (["--track", "tensorbord"], "unknown tracker 'tensorbord'; did you mean 'tensorboard'?"),
    "numbers": (["--penalty", "l1:x"], "'x' in 'l1:x' is not a number"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_two(command, tmp_path, case):
    words, message = BAD[case]
    code, out, err = command("train", *([] if "--resume" in words else QUICK), *words)
    assert (code, out) == (2, "")
    assert err.startswith("fednmap: ")
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_several_mistakes_are_several_lines(command):
    code, _, err = command("train", "--rounds", "-1", "--drop", "2", "--data", "x")
    assert code == 2
    assert [line[:15] for line in err.splitlines()] == ["fednmap: data: ", "fednmap: rounds", "fednmap: drop i"]


def test_data_with_holes_is_refused(command, tmp_path):
    (tmp_path / "data.csv").write_text("a,b,label\n" + "1,2,0\nnan,1,1\n" * 10)
    code, _, err = command("train", "--data", "csv:data.csv", "--clients", "2")
    assert code == 2
    assert err.count("\n") == 1


def test_folders_that_hold_something_or_cannot_be_written(command, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("")
    code, _, err = command("train", *QUICK, "--out", "full")
    assert (code, err.count("\n")) == (2, 1)
    assert "full is not empty; choose another folder" in err
    code, _, err = command("train", *QUICK, "--out", "full/letter.txt/run")
    assert (code, err.count("\n")) == (1, 1)
    assert "cannot write to full/letter.txt/run: Not a directory" in err
    for words in (["report", "full"], ["show", "full"], ["show"], ["show", "--list", "full"], ["report"], ["lists"]):
        code, out, err = command(*words)
        assert (code, out, err.count("\n")) == (2, "", 1)


def test_ctrl_c_saves_and_prints_the_command_that_goes_on(command, tmp_path, monkeypatch):
    whole = json.loads(command("train", *QUICK, "--json", "--out", "whole")[1])

    def stop(self, record):
        if record["round"] == 9:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Lines, "on_record", stop)
        code, out, err = command("train", *QUICK, "--json", "--out", "my run")
    assert (code, out) == (130, "")
    assert err == "stopped and saved; continue with\n  fednmap train --resume 'my run'\n"
    code, out, _ = command("train", "--resume", "my run", "--json")
    found = json.loads(out)
    assert all(found[key] == whole[key] for key in KEYS if "seconds" not in key)


def test_a_run_that_diverges_says_so_and_keeps_what_it_has(command):
    code, out, err = command(
        "train", *QUICK, "--eta-a", "1e200", "--penalty", "none", "--model", "mlp:3:relu", "--json"
    )
    assert code == 1
    assert json.loads(out)["rounds"] == 0
    assert "smaller eta_a" in err.splitlines()[-1]


def test_too_large_for_the_memory(command):
    code, _, err = command("train", "--model", "mlp:9000000000000")
    assert (code, err.count("\n")) == (1, 1)
    assert "out of memory" in err


def test_a_bar_shows_rounds_and_numbers():
    from rich.console import Console

    console = Console(force_terminal=True, width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    bar = Bar(console)
    with bar.progress:
        bar.begin(RunInfo(Job("fednmap", 0), 0, 40, 1, {}))
        bar.on_record({"round": 10, "objective": 1.25, "stationarity": 3e-4, "zeros": 0.5, "bytes_up": 2.5e6})
    console.file.close()
    text = console.export_text()
    for word in ("fednmap", "10/40", "psi 1.25", "|F_nat|^2 3.00e-04", "zeros 50.0 %", "2.50 MB up"):
        assert word in text


@pytest.mark.parametrize(("method", "rounds"), [("fednmap", 300), ("my_module:MyMethodWithALongName", 100_000)])
def test_the_bar_fits_80_columns_with_its_counter_and_time(method, rounds):
    from rich.console import Console

    console = Console(force_terminal=True, width=80, color_system=None, file=io.StringIO())
    bar = Bar(console)
    with bar.progress:
        bar.begin(RunInfo(Job(method, 11), 0, rounds, 20, {}))
        bar.on_record({"round": 200, "objective": 1.25, "stationarity": 3e-4, "zeros": 0.5, "bytes_up": 2.5e6})
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    line = [part for part in re.split(r"[\r\n]+", shown) if part][-1]
    assert len(line) <= 80
    for word in (f"200/{rounds}", "--:--", "psi 1.25"):
        assert word in line


def test_what_takes_long_is_announced_unless_quiet(monkeypatch, capsys):
    monkeypatch.setattr("fednmap.report.progress.PATIENCE", 0.01)
    with waiting("loading digits"):
        time.sleep(0.3)
    with waiting("loading digits", quiet=True):
        time.sleep(0.3)
    assert capsys.readouterr().err == "loading digits\n"


def test_lines_call_a_method_by_its_label():
    from rich.console import Console

    lines = Lines(Console(file=io.StringIO()))
    lines.begin(RunInfo(Job("mine:MyMethod", 0), 0, 3, 1, {"labels": {"mine:MyMethod": "MyMethod"}}))
    lines.on_record({"round": 0, "objective": 1.25})
    assert lines.console.file.getvalue().startswith("MyMethod  round 0/3  psi 1.25")


def test_names_of_methods_may_have_empty_words_between_them(command):
    assert command("compare", *QUICK, "--algorithms", "fednmap,, zhang,", "--rounds", "0", "--json")[0] == 0
    code, _, err = command("compare", "--algorithms", ",")
    assert (code, err.count("\n")) == (2, 1)


def test_tensorboard_and_mlflow_get_every_measurement(command, tmp_path, monkeypatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    code, out, _ = command("train", *QUICK, "--track", "tensorboard", "--track", "mlflow", "--out", "run", "--json")
    assert code == 0
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard" / "fednmap-0")).Reload()
    assert [e.step for e in events.Scalars("objective")] == list(range(0, 25, 3))
    assert events.Scalars("objective")[-1].value == pytest.approx(json.loads(out)["objective"])
    from mlflow.tracking import MlflowClient

    client = MlflowClient((tmp_path / "run" / "mlflow").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("fednmap").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.metrics["objective"] == pytest.approx(json.loads(out)["objective"])
    assert run.data.params["participation"] == "0.5"
    assert len(client.get_metric_history(run.info.run_id, "zeros")) == 9


def test_help_is_readable(command):
    code, out, _ = command("--help")
    assert code == 0
    assert all(name in out for name in ("train", "compare", "show", "report", "list"))
    code, out, _ = command("train", "--help")
    assert code == 0
    assert "Communication rounds T. (default 200)" in " ".join(out.replace("│", " ").split())


def loaded_by(*words, heavy="torch numpy scipy sklearn matplotlib pandas"):
    """Which heavy packages a new Python has loaded after the command."""
    code = f"""
import atexit, sys
atexit.register(lambda: print("loaded", *(set("{heavy}".split()) & sys.modules.keys())))
sys.argv = ["fednmap", *{words!r}]
from fednmap.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return set(done.stdout.splitlines()[-1].split()) - {"loaded"}


def test_help_loads_nothing_heavy():
    assert loaded_by("--help") == set()
    assert loaded_by("train", "--help", heavy="scipy sklearn matplotlib pandas") == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_the_line_about_a_command_is_the_first_of_its_own_help(name):
    assert LazyCommand(name).loaded().help.splitlines()[0] == COMMANDS[name]


def test_the_package_gives_what_it_names():
    assert set(fednmap.__all__) <= set(dir(fednmap))
    assert all(getattr(fednmap, name) is not None for name in fednmap.__all__)
    assert fednmap.simulate is fednmap.simulation.simulate
    with pytest.raises(AttributeError, match="module 'fednmap' has no attribute 'runn'"):
        _ = fednmap.runn


def ended(error, monkeypatch, capsys):
    """Exit code and stderr of a command that raises this."""

    def listing() -> None:
        raise error

    monkeypatch.setattr("fednmap.commands.listing.listing", listing)
    monkeypatch.setattr(sys, "argv", ["fednmap", "list"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code, capsys.readouterr().err


KNOWN = [
    (2, InputError("eta_a is -1")),
    (1, fednmap.Diverged(3)),
    (1, FolderError("cannot write to runs")),
    (1, WorkerLost()),
    (1, TimeoutError("client-1 did not reply")),
    (1, MemoryError()),
    (1, torch.OutOfMemoryError("CUDA out of memory.")),
    (1, RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: ...")),
]
OURS = [
    ValueError("too many values to unpack"),
    TypeError("'NoneType' object is not callable"),
    RuntimeError("a view in memory that is not contiguous"),
    ZeroDivisionError("division by zero"),
    KeyError("stationarity"),
    FileNotFoundError(2, "No such file or directory", "x"),
]


@pytest.mark.parametrize(("code", "error"), KNOWN, ids=repr)
def test_what_may_happen_is_one_line(code, error, monkeypatch, capsys):
    found, err = ended(error, monkeypatch, capsys)
    assert (found, err.count("\n")) == (code, 1)
    assert err.startswith("fednmap: ")


def test_ctrl_c_anywhere(monkeypatch, capsys):
    assert ended(KeyboardInterrupt(), monkeypatch, capsys)[0] == 130


@pytest.mark.parametrize("error", OURS, ids=repr)
def test_a_fault_of_ours_keeps_its_traceback_and_asks_for_a_report(error, monkeypatch, capsys):
    code, err = ended(error, monkeypatch, capsys)
    assert code == 70
    assert err.startswith("Traceback")
    assert type(error).__name__ in err.splitlines()[-2]
    assert "please report it" in err.splitlines()[-1]


def test_a_mistake_of_a_validator_is_not_the_users(monkeypatch):
    from fednmap.runs.configuration import Config

    monkeypatch.setattr("fednmap.runs.configuration.look_up", lambda *_: int("x"))
    with pytest.raises(ValueError, match="invalid literal") as caught:
        Config.make()
    assert not isinstance(caught.value, InputError)


@pytest.mark.filterwarnings("default")
def test_a_warning_is_one_line(command):
    code, out, err = command("train", *QUICK, "--penalty", "topk:3,allow_nonconvex", "--quiet", "--json")
    assert (code, err.count("\n")) == (0, 1)
    assert err.startswith("fednmap: warning: TopK is not weakly convex")
    assert json.loads(out)["rounds"] == 24


OWN = """
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
import torch
from torch import Tensor, nn
from fednmap.core import Algorithm, FixedPoint, Regularizer, Traits
from fednmap.data import Dataset, load

Path("loaded").touch()

@dataclass(frozen=True)
class Ridge(Regularizer):
    weight: float
    def value(self, x): return self.weight * x.square().sum(-1)
    def prox(self, v, step): return v / (1 + 2 * self.weight * step)

@dataclass(frozen=True)
class Step(Algorithm):
    phi: Regularizer
    size: float
    eta_a: float = 0.1
    traits = Traits(composite=True, up=1, down=1, prox="0 + 1", fixed_point=FixedPoint.EXACT, rate="-")
    class Server(NamedTuple):
        x: Tensor
    class Client(NamedTuple):
        pass
    class Up(NamedTuple):
        g: Tensor
    def init(self, start): return self.Server(start), self.Client()
    def local(self, down, client, g): return self.Up(g(down.x, 0)), client
    def aggregate(self, server, up, share):
        step = self.size * self.eta_a
        return self.Server(self.phi.prox(server.x - step * up.g, step))
    def model(self, server): return server.x

def net(shape, outputs, units): return nn.Sequential(nn.Flatten(), nn.Linear(64, units), nn.Linear(units, outputs))
def digits(): return load("digits")
def nothing(): return 3
def fails(shape, outputs): return nn.Linear("8", outputs)
def odd(shape, outputs): return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs, dtype=torch.complex64))
number = 3
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module called `mine` in the current folder, as it was not loaded yet."""
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    yield tmp_path
    sys.modules.pop("mine", None)
    FOREIGN.clear()


MINE = ["--data", "mine:digits", "--model", "mine:net:5", "--penalty", "mine:Ridge:0.01", "--algorithm", "mine:Step"]
FEW = ["--clients", "4", "--rounds", "3", "--eval-every", "1", "--quiet", "--json"]


def test_things_of_ones_own_are_imported_by_name(command, mine):
    exact = ["--batch-size", "0", "--local-steps", "1", "--gamma", "1"]
    code, out, err = command("train", *MINE, *FEW, *exact, "--set", "mine:Step.size=0.5", "--out", "run")
    assert (code, err) == (0, "")
    own = json.loads(out)
    known = ["--model", "mine:net:5", "--penalty", "squared-l2:0.01", "--algorithm", "prox-sgd", "--eta-a", "0.1"]
    found = json.loads(command("train", *known, *FEW, *exact)[1])
    assert own["objective"] == pytest.approx(found["objective"], rel=1e-5)  # the same steps under other names
    assert 'algorithms = [\n    "mine:Step",\n]' in (mine / "run" / "run.toml").read_text()
    assert own["bytes_up"] == 3 * 4 * 4 * (64 * 5 + 5 + 5 * 10 + 10)
    code, out, _ = command("show", "run")
    assert (code, " Step " in out) == (0, True)  # as the class says
    assert (mine / "run" / "models" / "mine.Step-0.safetensors").exists()  # no colon, which Windows refuses
    assert "my_module:MyMethod" in command("list", "algorithms")[1]


def test_an_own_method_without_phi_or_the_step_that_was_typed_is_refused_in_one_line(command, mine):
    text = (mine / "mine.py").read_text()
    (mine / "bare.py").write_text(text.replace("    phi: Regularizer\n", "").replace("class Step", "class Bare"))
    step = ["--set", "mine:Step.size=0.5", "--eta-s", "2"]
    for method, option, words in (("mine:Step", step, "a method with eta_s"), ("bare:Bare", [], "a field phi")):
        code, out, err = command("train", "--data", "digits", "--algorithm", method, *option, "--out", "none")
        assert (code, out, err.count("\n"), words in err) == (2, "", 1, True)
    assert not (mine / "none").exists()


def test_a_label_is_what_tables_call_a_method_and_a_wrong_one_is_refused_before_there_is_a_folder(command, tmp_path):
    few = ["--preset", "digits", "--rounds", "1", "--algorithms", "fednmap,fedavg", "--quiet"]
    code, out, err = command("compare", *few, "--label", "fednmap=ours [1]", "--out", str(tmp_path / "run"))
    assert (code, err, " ours [1] " in out) == (0, "", True)
    assert " ours [1] " in command("show", str(tmp_path / "run"))[1]
    refused = {
        "fednmap": "expected --label METHOD=NAME",
        "zhang=x": "expected labels of",
        "fednmap=fedavg": "that differ",
    }
    for label, words in refused.items():
        code, out, err = command("compare", *few, "--label", label, "--out", str(tmp_path / "other"))
        assert (code, out, words in err, err.count("\n")) == (2, "", True, 1)
    assert not (tmp_path / "other").exists()


def test_a_file_that_names_code_loads_it_only_if_trusted(command, mine):
    command("train", *MINE, *FEW, "--set", "mine:Step.size=0.5", "--out", "run")
    (mine / "loaded").unlink()
    sys.modules.pop("mine")
    for words in (["train", "--resume", "run"], ["train", "--config", "run/run.toml", "--out", "b"], ["export", "run"]):
        code, out, err = command(*words)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "run.toml names code to load, mine:digits; if you trust it, add --trust-code" in err
    for words in (["show", "run"], ["report", "run"]):
        assert command(*words)[0] == 0
    assert not (mine / "loaded").exists()
    for words in (["train", "--resume", "run"], ["train", "--config", "run/run.toml", "--out", "b"], ["export", "run"]):
        assert command(*words, "--trust-code")[0] == 0
    for name in ("Step", "mine.Step", "mine:Step"):  # as tables, files and options call it
        assert command("export", "run", "--method", name, "--trust-code")[0] == 0
    assert (mine / "loaded").exists()


@pytest.mark.parametrize(
    ("model", "code", "last"),
    [
        ("mine:fails", 2, "the error is in mine, which is your own code; see the lines above"),
        ("mine:odd", 70, "this is an error in fednmap, or in what mine passed to it; if the latter is right"),
    ],
)
def test_a_fault_of_code_of_ones_own_is_told_as_that(mine, monkeypatch, capsys, model, code, last):
    monkeypatch.chdir(mine)
    monkeypatch.setattr(sys, "argv", ["fednmap", "train", "--model", model, *FEW])
    with pytest.raises(SystemExit) as end:
        cli.main()
    err = capsys.readouterr().err
    assert end.value.code == code
    assert err.startswith("Traceback")
    assert last in err.splitlines()[-1]


def test_the_command_that_goes_on_with_code_of_ones_own_works(command, mine, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Lines, "on_record", lambda self, record: signal.raise_signal(signal.SIGINT))
        few = ["--clients", "4", "--rounds", "3", "--checkpoint-every", "1", "--json"]
        err = command("train", "--penalty", "mine:Ridge:0.01", *few, "--out", "run")[2]
    again = err.splitlines()[-1].split()
    assert again == ["fednmap", "train", "--resume", "run", "--trust-code"]
    assert command(*again[1:])[0] == 0


def test_a_trial_of_a_federation_loads_no_code_from_a_file(command, mine):
    (mine / "a.toml").write_text('data = "mine:digits"\n')
    code, _, err = command("flower", "up", "--config", "a.toml")
    assert (code, err.count("\n")) == (2, 1)
    assert "a.toml names code, mine:digits, which a federation's settings cannot; write an app of your own" in err
    assert not (mine / "loaded").exists()


WRONG = {
    "no module": (["--penalty", "mime:Ridge:1"], "penalty: unknown regularizer 'mime'; choose from"),
    "nor a name": (["--model", "mpl:relu"], "did you mean 'mlp'?"),
    "no such name": (
        ["--penalty", "mine:Rigde:1"],
        "regularizer 'mine:Rigde': mine has no 'Rigde'; did you mean 'Ridge'?",
    ),
    "another kind": (["--penalty", "mine:Step"], "Step is not a class with all that Regularizer asks"),
    "abstract": (["--algorithm", "fednmap.core:Algorithm"], "Algorithm is not a class with all that"),
    "not callable": (["--data", "mine:number"], "number is not a function or class"),
    "another result": (["--data", "mine:nothing"], "gave int; it must give a fednmap.data.Dataset"),
    "arguments": (
        ["--penalty", "mine:Ridge:1,2"],
        "'mine:Ridge:1,2' does not fit: called with (1, 2), too many positional arguments",
    ),
    "a parameter": (["--algorithm", "mine:Step"], "mine:Step also needs size; give it with --set mine:Step.size=VALUE"),
    "its own mistake": (["--data", "broken:load"], "broken cannot be imported, ZeroDivisionError: division by zero"),
    "what it needs": (["--data", "needy:load"], "needy needs no_such_package, which is not installed"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_imported_is_told_in_one_line(command, mine, case):
    (mine / "broken.py").write_text("1 / 0")
    (mine / "needy.py").write_text("import no_such_package")
    words, message = WRONG[case]
    code, out, err = command("train", *FEW, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_settings_of_a_federation_name_no_code(mine):
    from fednmap.flower.settings import read

    with pytest.raises(InputError, match="'mine:digits' names code"):
        read({"names": "a,b", "run-folder": "run", "data": "mine:digits"})
    assert not (mine / "loaded").exists()


def test_help_tells_what_an_argument_is(command):
    code, out, _ = command("reproduce", "--help")
    assert code == 0
    assert "speedup-n" in out  # a newer click drops it


def test_a_misspelt_command_is_suggested_once(command):
    code, _, err = command("trian")
    assert code == 2
    assert err.count("Did you mean 'train'?") == 1
