"""Upper bounds of dependencies have reasons."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_upper_bound_has_a_reason():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    bounds = {f"{re.match('[a-zA-Z-]+', d)[0]}<{d.split('<')[1]}" for d in needed if "<" in d}
    rows = re.findall(r"^\| ([a-z-]+<[0-9.]+) \| (\S.*) \|$", (ROOT / "docs" / "dependencies.md").read_text(), re.M)
    assert {bound for bound, _ in rows} == bounds
