"""The command: `python -m reproduction`, and `fednmap reproduce` in the repository and elsewhere."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python finds `reproduction` only in the current folder, as where fednmap was installed from its wheel."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "reproduction"]:
        monkeypatch.delitem(sys.modules, name)
    elsewhere = [path for path in sys.path if not Path(path or ".", "reproduction").is_dir()]
    monkeypatch.setattr(sys, "path", elsewhere)


def test_elsewhere_the_command_says_where_to_run_it(not_installed: None, command: Any, tmp_path: Path) -> None:
    code, out, err = command("reproduce", "nn", "--scale", "quick")
    assert (code, out) == (2, "")
    assert err == (
        f"fednmap: expected the folder reproduction/ of fednmap's repository in {tmp_path}, got none; "
        "do git clone the repository and run `fednmap reproduce` in its root\n"
    )


def test_the_command_in_the_repository(not_installed: None, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    code, out, _ = command("reproduce", "--help")
    assert code == 0
    assert "speedup-n" in out
    assert Path(sys.modules["reproduction"].__file__ or "").parent == ROOT / "reproduction"


def test_as_a_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["--help"], ["nn", "--finished", "--out", "out"]):
        monkeypatch.setattr(sys, "argv", ["reproduction", *words])
        with pytest.raises(SystemExit) as end:
            runpy.run_module("reproduction", run_name="__main__")
        written = capsys.readouterr()
        if words == ["--help"]:
            assert end.value.code == 0
            assert "Usage: python -m reproduction [OPTIONS] NAME" in " ".join(written.out.split())
        else:
            assert end.value.code == 2
            assert written.err.startswith("fednmap: expected trials of nn, scale quick, in out/nn/trials.csv, got no")
