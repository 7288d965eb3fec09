"""What a newcomer meets: presets, the pruned baseline, the last lines, the version, completion."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fednmap
from fednmap import algorithms as A
from fednmap.commands.show import sparkline
from fednmap.report.closing import ending
from fednmap.runs.configuration import Config
from fednmap.runs.folder import RunFolder
from fednmap.runs.presets import preset, presets

FEW = ("--rounds", "2", "--clients", "3", "--quiet")


@pytest.mark.parametrize("name", presets())
def test_a_preset_is_an_ordinary_file_of_settings(name):
    config = Config.read(preset(name))
    assert config.algorithms[0] == "fednmap"
    assert presets()[name].endswith((".", "?"))


def test_the_default_comparison_is_the_preset_of_digits(command, tmp_path):
    for k, words in enumerate((("compare",), ("compare", "--preset", "digits"))):
        assert command(*words, *FEW, "--out", f"run{k}")[0] == 0
    first, second = (RunFolder(tmp_path / f"run{k}") for k in (0, 1))
    assert first.config() == second.config()
    strip = [{k: v for k, v in r.items() if "seconds" not in k} for f in (first, second) for r in f.results()]
    assert strip[: len(strip) // 2] == strip[len(strip) // 2 :]


def test_train_takes_the_first_method_of_a_preset_and_options_go_before_it(command):
    code, out, _ = command("train", "--preset", "paper", "--penalty", "l1:0.1", *FEW, "--out", "run", "--json")
    assert code == 0
    assert json.loads(out)["method"] == "fednmap"
    config = RunFolder.open(Path("run")).config()
    assert (config.penalty, config.model, config.eta_a) == ("l1:0.1", "mlp:64:sigmoid", 0.1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--preset", "papre"), "unknown preset 'papre'; did you mean 'paper'?"),
        (("--preset", "paper", "--config", "x.toml"), "--preset paper and --config both give settings; use one"),
        (("--preset", "paper", "--resume", "x"), "--preset paper and --resume both give settings; use one"),
    ],
)
def test_presets_are_refused_in_a_line(command, words, said):
    code, out, err = command("train", *words)
    assert (code, out) == (2, "")
    assert said in err


def test_pruning_keeps_the_largest_and_leaves_fedavg_alone():
    x = torch.tensor([0.5, -3.0, 2.0, 0.0, -1.0], dtype=torch.float64)
    for zeros, kept in ((0.0, 5), (0.2, 4), (0.6, 2), (0.99, 1)):
        method = A.PrunedFedAvg(zeros=zeros)
        model = method.model(method.Server(x))
        assert int((model != 0).sum()) == min(kept, 4)  # one is 0 by itself
        assert model.dtype == x.dtype
    assert torch.equal(x, torch.tensor([0.5, -3.0, 2.0, 0.0, -1.0], dtype=torch.float64))
    hundred = A.PrunedFedAvg(zeros=0.29)  # 0.29 * 100 is a little less than 29
    assert int((hundred.model(hundred.Server(torch.arange(1.0, 101.0))) == 0).sum()) == 29
    with pytest.raises(ValueError, match=r"zeros is 1.0; it must be a number, at least 0 and below 1"):
        A.PrunedFedAvg(zeros=1.0)


def test_the_last_lines_name_the_lowest_psi_and_the_dense_rival(command):
    command("compare", "--algorithms", "fedavg,fednmap", *FEW[:-1], "--quiet", "--out", "run")
    folder = RunFolder.open(Path("run"))
    results = [
        {"method": "fedavg", "trial": 0, "objective": 2.0, "zeros": 0.0, "test_accuracy": 0.9},
        {"method": "fednmap", "trial": 0, "objective": 1.0, "zeros": 0.8, "test_accuracy": 0.95},
        {"method": "zhang", "trial": 0, "objective": 0.1, "error": "diverged"},
    ]
    lines = ending(folder, results)
    assert lines[0] == "result: fednmap (lowest psi): 80.0 % zeros, 95.0 % accuracy"
    assert lines[1] == "        fedavg (dense): 0.0 % zeros, 90.0 % accuracy"
    assert lines[-1].strip() == "fednmap export run --method fednmap --prune"
    assert [line.partition(":")[0] for line in ending(folder, results[2:])] == ["run folder", "picture"]
    second = [{"method": "zhang", "trial": 1, "objective": 0.1, "zeros": 0.5}]  # of a method that failed before
    assert ending(folder, results + second) == lines
    no_accuracy = [{k: v for k, v in r.items() if k != "test_accuracy"} for r in results[:2]]
    assert ending(folder, no_accuracy)[:1] == ["result: fednmap (lowest psi): 80.0 % zeros"]


def test_sparklines_share_a_scale():
    assert sparkline([0, 1], scale=[0, 7]) == "▁▂"
    assert sparkline([7, 0], scale=[0, 7]) == "█▁"
    assert sparkline([1e3, 1e0], log=True, scale=[1e0, 1e7]) == "▄▁"


def test_the_version_is_told(command):
    assert command("--version")[:2] == (0, f"fednmap {fednmap.__version__}\n")


def test_the_shell_completes_options():
    words = {"_FEDNMAP_COMPLETE": "complete_bash", "COMP_WORDS": "fednmap train --pe", "COMP_CWORD": "2"}
    told = subprocess.run(
        [Path(sys.executable).with_name("fednmap")],
        env={**os.environ, **words},
        capture_output=True,
        text=True,
        check=False,
    )
    assert {"--penalty", "--penalty-only"} <= set(re.split(r"\s+", told.stdout))


@pytest.mark.slow
@pytest.mark.ci(turn=9)
def test_a_machine_that_never_drew_a_picture_gets_one(tmp_path):
    """There pyplot takes seconds to import, in a thread beside the jobs; who needs it then waits for it."""
    words = ["compare", "--algorithms", "fednmap,fedavg", "--rounds", "1", "--clients", "3", "--jobs", "2", "--quiet"]
    told = subprocess.run(
        [Path(sys.executable).with_name("fednmap"), *words, "--out", "run"],
        env={**os.environ, "MPLCONFIGDIR": str(tmp_path / "empty")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    assert (tmp_path / "run" / "plot.png").exists()
