"""The house: imports point downward, room by room; the drawing in CONTRIBUTING.md is the one that the sources draw."""

import ast
import re
import sys
import tomllib
from graphlib import TopologicalSorter
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fednmap

PACKAGE = Path(fednmap.__file__).parent
REPRODUCTION = PACKAGE.parent / "reproduction"
CONTRIBUTING = PACKAGE.parent / "CONTRIBUTING.md"

FLOORS = [  # the highest first; rooms of one floor may use each other, but not in a circle
    ("reproduction",),  # outside the package
    ("__main__", "cli"),
    ("commands",),
    ("flower", "estimators"),
    ("report",),
    ("runs",),
    ("theory", "privacy", "testing"),
    ("decentralized", "asynchronous"),
    ("simulation",),
    ("algorithms", "problems", "models", "data"),
    ("tables",),
    ("regularizers",),
    ("measure",),
    ("core",),
    ("names",),
]
FLOOR = {room: len(FLOORS) - k for k, rooms in enumerate(FLOORS) for room in rooms}


def modules():
    """Dotted name inside the package -> its parsed source."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    return found


def imported(tree, known, everywhere=True):
    """The modules of the package that a source imports; with `everywhere` also inside functions."""
    nodes = ast.walk(tree) if everywhere else tree.body
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fednmap":
            base = ".".join(node.module.split(".")[1:])
            for alias in node.names:
                inner = f"{base}.{alias.name}".strip(".")
                if (target := inner if inner in known else base) in known and target:
                    yield target
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("fednmap."):
                    yield alias.name.removeprefix("fednmap.")


def rooms():
    """Room -> the rooms it imports."""
    known = modules()
    graph = {}
    for name, tree in known.items():
        if name:
            room = name.split(".")[0]
            graph.setdefault(room, set()).update(target.split(".")[0] for target in imported(tree, known))
    for path in REPRODUCTION.glob("*.py"):
        found = imported(ast.parse(path.read_text()), known)
        graph.setdefault("reproduction", set()).update(target.split(".")[0] for target in found)
    return {room: targets - {room} for room, targets in graph.items()}


def drawing():
    """The house as text: floors from the top, and behind each room what it stands on directly."""
    graph, lines = rooms(), []
    for floor in FLOORS:
        for room in floor:
            if room in graph and not room.startswith("__"):
                below = sorted(graph[room], key=lambda r: (-FLOOR[r], r))
                lines.append(f"{room:<12} {'-> ' + ', '.join(below) if below else ''}".rstrip())
    return "\n".join(lines)


def test_every_room_has_a_floor():
    assert set(rooms()) <= set(FLOOR)
    at_the_root = {p.stem for p in PACKAGE.glob("*.py")}
    assert at_the_root == {"__init__", "__main__", "cli", "core", "measure", "names"}


def test_imports_point_downward():
    upward = [
        f"{room} imports {target}" for room, below in rooms().items() for target in below if FLOOR[target] > FLOOR[room]
    ]
    assert not upward


def test_the_package_does_not_import_the_reproduction():
    """Except where `fednmap reproduce` loads its command by name."""
    naming = [
        path
        for path in PACKAGE.rglob("*.py")
        if re.search(r"import reproduction|[\"' ]reproduction\.", path.read_text())
    ]
    assert [path.relative_to(PACKAGE).as_posix() for path in naming] == ["cli.py"]


def test_no_circle_of_rooms():
    list(TopologicalSorter(rooms()).static_order())  # raises on a circle


def test_no_circle_of_files():
    known = modules()
    graph = {name: set(imported(tree, known, everywhere=False)) - {name} for name, tree in known.items() if name}
    list(TopologicalSorter(graph).static_order())


def test_the_drawing_is_true():
    assert drawing() in CONTRIBUTING.read_text(), f"CONTRIBUTING.md should hold\n\n{drawing()}"


def test_a_simulation_does_not_know_networks():
    known = modules()
    for name, tree in known.items():
        if name.startswith("simulation"):
            assert not [t for t in imported(tree, known) if t.startswith(("problems", "models", "data"))]


def packages(nodes):
    """The third-party packages that these nodes import, by the name they are imported by."""
    for node in nodes:
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        yield from {name.partition(".")[0] for name in names} - {"fednmap", "__future__"} - sys.stdlib_module_names


def declared():
    """Extra -> the requirements of pyproject.toml, by distribution; "" is what everybody installs."""
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    lists = {"": project["dependencies"], **project["optional-dependencies"]}
    lists = {extra: [Requirement(line) for line in lines] for extra, lines in lists.items() if extra != "all"}
    return {extra: {canonicalize_name(r.name): r for r in found} for extra, found in lists.items()}


def test_every_third_party_import_is_declared():
    """At the top of a module for everybody, in the room `flower` for its extra too; inside functions in any extra."""
    known, extras = metadata.packages_distributions(), declared()
    for name, tree in modules().items():
        everywhere = {package for own in extras.values() for package in own}
        at_import = extras[""].keys() | (extras["flower"].keys() if name.startswith("flower.") else set())
        for nodes, allowed in ((ast.walk(tree), everywhere), (tree.body, at_import)):
            for package in packages(nodes):
                found = {canonicalize_name(d) for d in known.get(package, [package])}
                assert found & allowed, f"{name} imports {package}, which pyproject.toml does not declare for it"


@pytest.mark.parametrize("extra", declared())
def test_what_is_installed_lies_in_the_ranges_that_are_declared(extra):
    if extra == "peft":
        pytest.importorskip("peft")  # large, and not part of `all`
    for name, requirement in declared()[extra].items():
        assert metadata.version(name) in requirement.specifier, requirement


def test_dependencies_has_a_line_for_each():
    page = (PACKAGE.parent / "docs" / "dependencies.md").read_text()
    words = {canonicalize_name(word.strip(",;()|")) for word in page.split() if word.strip(",;()|")}
    assert {package for own in declared().values() for package in own} <= words


TURNS = 12


def test_every_slow_test_of_real_processes_has_a_turn_in_ci():
    """The files that start processes of Flower; `make test-ci` and `.ci/run` go through the turns."""
    tests = PACKAGE.parent / "tests"
    turns = []
    for file in tests.rglob("test_*.py"):
        text = file.read_text()
        if "import fault_run" not in text and "launch import" not in text:
            continue
        for node in ast.parse(text).body:
            marks = " ".join(ast.unparse(d) for d in getattr(node, "decorator_list", ()))
            if "mark.slow" in marks:
                assert "mark.ci(turn=" in marks, (
                    f"{file.name}: {node.name} has no turn in CI; add pytest.mark.ci(turn=...)"
                )
            turns += [int(k) for k in re.findall(r"mark\.ci\(turn=(\d+)\)", marks)]
    assert set(turns) <= set(range(TURNS))
    assert f"% {TURNS})" in (PACKAGE.parent / "Makefile").read_text()
    assert "\nmake test-ci\n" in (PACKAGE.parent / ".ci" / "run").read_text()
