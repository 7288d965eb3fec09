"""Lists name everything there is to choose from; help loads nothing heavy."""

import subprocess
import sys

import pytest

from fednmap.algorithms import ALGORITHMS
from fednmap.commands.listing import LISTS, first_line
from fednmap.data.datasets import DATASETS
from fednmap.data.partition import PARTITIONS
from fednmap.decentralized import DECENTRALIZED
from fednmap.decentralized.topologies import TOPOLOGIES
from fednmap.models.build import MODELS
from fednmap.regularizers import REGULARIZERS, signature

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
            assert first_line((kind.__doc__ or "").strip()) in out, row
        if what == "regularizers":
            assert signature(name) in out


def test_traits(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    _, out, _ = command("list", "algorithms")
    lines = out.splitlines()
    head = next(line for line in lines if "solves" in line)
    where = [head.index(word) for word in ("name", "solves", "up", "down", "prox", "all clients", "fixed point")]
    for name, kind in ALGORITHMS.items():
        line = next(line for line in lines if line.split()[:1] == [name])
        cells = [line[a:b].strip() for a, b in zip(where, [*where[1:], None], strict=True)]
        assert (cells[1].startswith("f + phi"), "central" in cells[1]) == (kind.traits.composite, kind.traits.central)
        assert cells[2].partition(" ")[0] == str(kind.traits.up)
        assert (cells[5] == "needed") == kind.traits.full_participation
        assert cells[6] == kind.traits.fixed_point.value


def test_only_what_is_returned_gets_a_capital():
    assert first_line("phi(x) = 0\n\nmore") == "phi(x) = 0"
    assert first_line("Return a table.") == "A table."


def test_formulas_are_plain_text_in_the_terminal():
    assert first_line(r"SCAD: $\lambda |x_j|$ up to $a \le \infty$.") == "SCAD: lambda |x_j| up to a <= inf."
    assert first_line(r"$\sum_j w_{j+1} |x|_{(j)}$, $\text{lo}_{ij}$") == "sum_j w_(j+1) |x|_(j), lo_ij"
    for known in LISTED.values():
        for name, kind in known.items():
            assert not set("$\\{}") & set(first_line((kind.__doc__ or "").strip())), name


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
