"""What the pages say is executed: every Python block, every command, every script of the gallery.

The blocks of a page run in their order, in one namespace and one temporary folder. A command runs with few rounds;
`runs/...` and `runs/LAST` stand for the newest run folder, `hospitals/` for the files of `fednmap example hospitals`.
`<!-- not executed: reason -->` on the line before a fence says why a block is left out.
"""

import ast
import doctest
import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from fednmap.cli import COMMANDS, app
from fednmap.data import cache

ROOT = Path(__file__).parents[2]
GALLERY = sorted((ROOT / "examples" / "gallery").rglob("plot_*.py"))
GENERATED = ("_build", "gallery", "reproduction")
PAGES = [
    ROOT / "README.md",
    *sorted(p for p in (ROOT / "docs").rglob("*.md") if not set(p.relative_to(ROOT).parts) & set(GENERATED)),
]
FENCE = re.compile(
    r"^(?P<indent> *)(?P<ticks>```+)(?P<kind>[^\n`]*)\n(?P<text>.*?)^(?P=indent)(?P=ticks) *$", re.M | re.S
)
UNTIL = re.compile(r"<!-- not executed: (?P<reason>\S.*?) -->\s*\Z", re.S)
INLINE = re.compile(r"`(fednmap [a-z][^`]*)`")

FEW = {
    "train": ["--rounds", "2"],
    "compare": ["--rounds", "2", "--trials", "1"],
    "tune": ["--budget", "10", "--rounds", "2"],
    "speedup": ["--rounds", "2", "--trials", "1"],
    "fit": ["--quiet"],
}
"""Appended to a command: the last word counts."""
PARSED = {"reproduce": "minutes", "flower": "starts processes", "audit": "reads what such processes logged"}
"""Commands that have tests of their own and are only parsed here."""
LONG = (
    "docs/sites.md",
    "README.md",
    "docs/estimators.md",
    "docs/privacy.md",
    "docs/tutorials/hospitals.md",
    "docs/tutorials/compare.md",
)
"""Pages whose blocks take more than some seconds."""
PUBLIC = {
    "heart-disease": ("heart_disease", "processed.va.data"),
    "mnist": ("mnist", "train-images-idx3-ubyte.gz"),
    "hospitals": ("heart_disease", "processed.va.data"),
}
AT_HAND = cache.find("heart_disease", ["processed.va.data"]) is not None


class Block(NamedTuple):
    line: int
    kind: str
    text: str
    reason: str | None


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def blocks(page):
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        indent = found["indent"]
        inside = "".join(line.removeprefix(indent) for line in found["text"].splitlines(keepends=True))
        before = UNTIL.search(text[: found.start()])
        line = text[: found.start()].count("\n") + 2
        yield Block(line, found["kind"].strip(), inside, before["reason"] if before else None)


def commands(text):
    """The command lines of a block that call fednmap or a script of ours, as words."""
    for line in text.replace("\\\n", " ").splitlines():
        line = line.strip().removeprefix("$ ")
        if re.match("fednmap [a-z]|python examples/", line):
            yield shlex.split(line, comments=True)


def runnable(page):
    return [b for b in blocks(page) if b.kind == "python" or (b.kind in ("", "sh") and any(commands(b.text)))]


def resolved(words):
    """The command that words name, and its arguments."""
    context = click.Context(app, info_name="fednmap")
    assert words[0] in COMMANDS, f"there is no command {words[0]}"
    command = app.get_command(context, words[0]).loaded()
    words = words[1:]
    while isinstance(command, click.Group):
        words = [words[0].partition("|")[0], *words[1:]]  # one of list|add|...
        assert words[0] in command.commands, f"there is no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    return command, words


def newest(folder):
    found = [path.parent for path in Path(folder).glob("runs/*/run.toml")]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


def shortened(words, folder):
    """The command with few rounds, on the newest run where a run is meant; None where it can only be parsed."""
    if words[0] in PARSED or any("my-tables" in word for word in words):  # what Flower would have made
        return None
    for word in words:
        if (
            word in PUBLIC
            and cache.find(PUBLIC[word][0], [PUBLIC[word][1], PUBLIC[word][1].removesuffix(".gz")]) is None
        ):
            return None
    if {"runs/...", "runs/LAST"} & set(words):
        run = newest(folder)
        assert run is not None, f"no run was made before: {words}"
        words = [str(run) if word in ("runs/...", "runs/LAST") else word for word in words]
    return words if "--resume" in words else words + FEW.get(words[0], [])


def costed(page):
    return pytest.param(page, id=name_of(page), marks=[pytest.mark.slow] if name_of(page) in LONG else [])


@pytest.mark.filterwarnings("default")  # the commands print them
@pytest.mark.parametrize("page", [costed(p) for p in PAGES if runnable(p)])
def test_what_a_page_shows_runs(page, command, tmp_path, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.syspath_prepend(str(tmp_path))
    namespace = {"__name__": "page"}
    for block in runnable(page):
        if block.reason is not None:
            continue
        where = f"{name_of(page)}:{block.line}"
        if block.kind == "python":
            code = compile("\n" * (block.line - 1) + block.text, str(page), "exec", dont_inherit=True)
            exec(code, namespace)
            continue
        for program, *words in commands(block.text):
            if "hospitals" in " ".join(words) and not AT_HAND:
                pytest.skip(f"{where} and what follows it needs the patients of heart_disease")
            if program == "python":
                subprocess.run([sys.executable, ROOT / words[0], *words[1:]], env=_environment(), check=True)
                continue
            if "csv:hospitals/" in " ".join(words) and not (tmp_path / "hospitals").exists():
                command("example", "hospitals")
            short = shortened(words, tmp_path)
            if short is None:
                function, rest = resolved(words)
                function.make_context(words[0], list(rest))
                continue
            code, _, err = command(*short)
            assert code == 0, f"{where}: fednmap {shlex.join(short)}\n{err}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_in_the_text_exist(page):
    """`fednmap COMMAND --option ...` in sentences and in blocks that are not executed: command and options exist."""
    text = page.read_text(encoding="utf-8")
    said = [shlex.split(" ".join(found.split())) for found in INLINE.findall(FENCE.sub("", text))]
    said += [words for block in blocks(page) for words in commands(block.text) if words[0] == "fednmap"]
    for words in said:
        if words[1] in ("...", "COMMAND"):
            continue
        function, rest = resolved(words[1:]) if not _is_group(words[1:]) else (None, [])
        shown = [p for p in function.params if not getattr(p, "hidden", False)] if function else []
        known = {option for p in shown for option in (*p.opts, *p.secondary_opts)}
        for word in rest:
            if word.startswith("--"):
                assert word.partition("=")[0] in known, f"{shlex.join(words)}: there is no option {word}"


def _is_group(words):
    return words == ["flower"]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_files_that_are_named_exist(page):
    """From the root, or inside the package."""
    text = page.read_text(encoding="utf-8")
    names = re.findall(r"(?:benchmarks|examples|tests)/[\w/]+\.(?:py|md)", text)
    for name in {*names, *re.findall(r"`(\w+(?:/\w+)+\.py)", text)}:
        assert (ROOT / name).is_file() or (ROOT / "fednmap" / name).is_file(), f"{page.name} names {name}"


def test_the_first_page_and_the_readme_quote_one_run():
    readme, first = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/index.md"))
    printed = re.findall(r"^ \S+ +(0\.\d{4}) +\S+ +(\S+) +\S+ +(\S+) ", readme, re.M)
    assert len(printed) == 6
    assert printed == re.findall(r"^\| .*\| \**(0\.\d{4})\** \| (\S+) % \| \**([\d.]+) %\** \|$", first, re.M)


def test_a_reason_is_given_where_nothing_is_executed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- not executed: your data -->\n```python\nx = X\n```\n\n```\nfednmap list \\\n  algorithms # all\n```\n"
    )
    first, second = runnable(page)
    assert (first.reason, first.line, second.reason) == ("your data", 3, None)
    assert list(commands(second.text)) == [["fednmap", "list", "algorithms"]]


@pytest.mark.parametrize("script", GALLERY, ids=lambda p: p.stem)
def test_gallery_uses_public_names(script):
    """Every script has a title, compiles, and takes from fednmap what a module offers in its `__all__`, or a module."""
    source = script.read_text(encoding="utf-8")
    tree = ast.parse(source)
    title = (ast.get_docstring(tree) or "").splitlines()
    assert title[1].startswith("===")
    assert script.name.startswith("plot_"), "sphinx-gallery executes plot_*.py"
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fednmap":
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert not alias.name.startswith("_")
                offered = getattr(module, "__all__", None)
                if offered is None or alias.name in offered:
                    assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"
                else:
                    importlib.import_module(f"{node.module}.{alias.name}")
        if isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_") or node.attr.startswith("__"), f"{script.name} uses {node.attr}"


@pytest.mark.slow
@pytest.mark.parametrize("script", GALLERY, ids=lambda p: p.stem)
def test_gallery_runs(script, tmp_path):
    call = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    words = [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", call, str(script)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=_environment(), check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def _environment():
    return os.environ | {"MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)}


def test_a_readme_away_from_the_repository_has_absolute_links():
    spec = importlib.util.spec_from_file_location("dist", ROOT / "tools" / "dist.py")
    dist = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(dist)
    assert doctest.testmod(dist).failed == 0
    text = dist.absolute((ROOT / "README.md").read_text(), "https://example.org/x", "v1")
    assert "](docs/" not in text
    assert "![Six methods on handwritten digits](https://example.org/x/raw/v1/docs/images/first-run.png)" in text
    project = tomllib.loads(dist.with_addresses((ROOT / "pyproject.toml").read_text(), "https://example.org/x", "v1"))
    assert project["project"]["urls"]["Changelog"] == "https://example.org/x/blob/v1/CHANGELOG.md"


@pytest.mark.parametrize(
    "text",
    [
        "x = prox_{gamma phi}(z) + |v|_2 * a",
        "coef_ and intercept_, as scikit-learn's",
        r"a \ b, W_ij (x_j)",
        "it costs $5 to $6 a month",
        "in $HOME/$USER, $ PWD $",
    ],
)
def test_docstrings_are_shown_as_they_are_written(text, docstring):
    page = docstring(text)
    assert page.astext() == text
    assert not found_in(page, "math")


@pytest.fixture
def docstring(monkeypatch):
    """Return what the site makes of a docstring: a document."""
    core = pytest.importorskip("docutils.core")
    monkeypatch.syspath_prepend(ROOT / "docs" / "_ext")
    rewritten = importlib.import_module("docstrings").rewritten
    return lambda text: core.publish_doctree(
        "\n".join(rewritten(text.splitlines())), settings_overrides={"halt_level": 2}
    )


def found_in(page, kind):
    return [node.astext() for node in page.findall() if node.tagname == kind]


def test_a_docstring_holds_formulas(docstring):
    page = docstring(
        r"""Solve $\min_x f(x) + \phi(x)$, $\phi$-convex with $h_i
    = |a|_*$ (of $n$ clients); a $p$-vector, ``$HOME``.

    $$
    z_i &= z \\

    h &= \bar{h}_i, \quad x_* = `|x|
    $$
    where $a^*$ is

    $$\psi(x) = 1$$

    gamma: the $\gamma$ of $\mathrm{prox}_{\gamma \phi}$,
           $\gamma \rho < 1$.

    Shell::

        echo $A $B

    >>> "$a$"
    '$a$'
    """.replace("\n    ", "\n")
    )
    inline = [r"\min_x f(x) + \phi(x)", r"\phi", "h_i = |a|_*", "n", "p", "a^*"]
    assert found_in(page, "math") == [*inline, r"\gamma", r"\mathrm{prox}_{\gamma \phi}", r"\gamma \rho < 1"]
    assert found_in(page, "math_block") == ["z_i &= z \\\\\nh &= \\bar{h}_i, \\quad x_* = `|x|", r"\psi(x) = 1"]
    assert found_in(page, "literal") == ["$HOME", "gamma"]
    assert found_in(page, "literal_block") == ["echo $A $B"]
    assert found_in(page, "doctest_block") == [">>> \"$a$\"\n'$a$'"]
    assert "(of n clients); a p-vector" in page.astext()


@pytest.mark.parametrize("text", ["$$\nx = 1", "$$x = 1$$, where x is"])
def test_a_formula_that_does_not_end_its_line_is_refused(text, docstring):
    with pytest.raises(ValueError, match=r"expected \$\$ at the end of a line after"):
        docstring(text)
