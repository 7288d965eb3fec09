"""One thread per process: the tests run side by side, and their products are small. And the command, run here."""

import os
import sys

import pytest
import torch
from hypothesis import settings

from fednmap import cli

settings.register_profile("busy", deadline=None)  # a test may take long on a busy machine
settings.load_profile("busy")
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """The command in this process: what it returns, and what it writes on stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fednmap.report.progress.PATIENCE", 3600.0)  # on a busy machine anything may take long

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["fednmap", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        written = capsys.readouterr()
        assert "Traceback" not in written.err
        return end.value.code, written.out, written.err

    return run
