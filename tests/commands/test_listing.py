"""Lists name everything there is to choose from; help loads nothing heavy."""

import subprocess
import sys

import pytest

from fednmap.algorithms import ALGORITHMS
from fednmap.commands.listing import LISTS
from fednmap.data.datasets import DATASETS
from fednmap.data.partition import PARTITIONS
from fednmap.decentralized import DECENTRALIZED
from fednmap.decentralized.topologies import TOPOLOGIES
from fednmap.models.build import MODELS
from fednmap.regularizers.parse import REGULARIZERS, signature

HEAVY = ("torch", "numpy", "scipy", "sklearn", "matplotlib", "pandas", "pydantic")
LISTED = {
    "algorithms": {**ALGORITHMS, **DECENTRALIZED},
    "regularizers": REGULARIZERS,
    "datasets": DATASETS,
    "partitions": PARTITIONS,
    "models": MODELS,
    "topologies": TOPOLOGIES,
    "presets": {},
}


def test_every_list_is_checked():
    assert LISTED.keys() == LISTS.keys()


@pytest.mark.parametrize("what", LISTED)
def test_names_and_first_lines(what, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    code, out, err = command("list", what)
    assert code == 0, err
    for name, kind in LISTED[what].items():
        row = next(line for line in out.splitlines() if name in line)
        if what != "algorithms":
            assert (kind.__doc__ or "").strip().splitlines()[0] in out, row
        if what == "regularizers":
            assert signature(name) in out


def test_traits(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    _, out, _ = command("list", "algorithms")
    for name, kind in ALGORITHMS.items():
        cells = next([c.strip() for c in line.split("│")] for line in out.splitlines() if f"│ {name} " in line)
        assert (cells[2].startswith("f + phi"), "central" in cells[2]) == (kind.traits.composite, kind.traits.central)
        assert cells[3].partition(" ")[0] == str(kind.traits.up)
        assert (cells[6] == "required") == kind.traits.full_participation
        assert cells[7] == kind.traits.fixed_point.value


def test_help_loads_nothing_heavy():
    code = f"""
import sys
from fednmap import cli
sys.argv = ["fednmap", "--help"]
try:
    cli.main()
except SystemExit as end:
    assert not end.code
assert not [name for name in {HEAVY!r} if name in sys.modules]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
