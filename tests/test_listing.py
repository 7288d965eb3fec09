"""Lists are read from the sources: they must say what the loaded library says, and load nothing heavy."""

import subprocess
import sys
from dataclasses import asdict

import pytest

from fednmap.algorithms import ALGORITHMS
from fednmap.commands.listing import LISTS
from fednmap.commands.listing import signature as listed
from fednmap.commands.sources import catalogue, thing
from fednmap.data.datasets import DATASETS
from fednmap.data.partition import PARTITIONS
from fednmap.models.build import MODELS
from fednmap.regularizers.parse import REGULARIZERS, signature

HEAVY = ("torch", "numpy", "scipy", "sklearn", "matplotlib", "pandas", "pydantic")
WHERE = {
    ("fednmap.algorithms", "ALGORITHMS"): ALGORITHMS,
    ("fednmap.regularizers.parse", "REGULARIZERS"): REGULARIZERS,
    ("fednmap.data.datasets", "DATASETS"): DATASETS,
    ("fednmap.data.partition", "PARTITIONS"): PARTITIONS,
    ("fednmap.models.build", "MODELS"): MODELS,
}


@pytest.mark.parametrize("where", WHERE, ids=lambda where: where[1])
def test_names_and_first_lines(where):
    known = {name: (kind.__doc__ or "").strip().splitlines()[0] for name, kind in WHERE[where].items()}
    assert {name: found.first_line for name, found in catalogue(*where).items()} == known


def test_traits():
    for name, found in catalogue("fednmap.algorithms", "ALGORITHMS").items():
        traits = asdict(ALGORITHMS[name].traits)
        traits["fixed_point"] = traits["fixed_point"].value
        said = found.call("traits")
        assert said.items() <= traits.items()
        assert all(not traits[key] or key == "steps_may_change" for key in traits.keys() - said.keys())


def test_signatures():
    for name, kind in catalogue("fednmap.regularizers.parse", "REGULARIZERS").items():
        assert listed(name, kind) == signature(name)


def test_what_is_not_there():
    for refused in (lambda: thing("fednmap.core", "Nothing"), lambda: catalogue("fednmap.core", "Nothing")):
        with pytest.raises(LookupError, match="Nothing"):
            refused()
    with pytest.raises(LookupError, match="says no traits"):
        thing("fednmap.core", "Regularizer").call("traits")


def test_help_and_lists_load_nothing_heavy():
    words = [("--help",), *(("list", what) for what in LISTS)]
    code = f"""
import sys
from fednmap import cli
for words in {words!r}:
    sys.argv = ["fednmap", *words]
    try:
        cli.main()
    except SystemExit as end:
        assert not end.code, words
    assert not [name for name in {HEAVY!r} if name in sys.modules], words
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
