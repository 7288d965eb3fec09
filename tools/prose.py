"""Count what makes text hard to read.

    python tools/prose.py            sentences and lines of README.md and docs/; class names; options per help panel
    python tools/prose.py --pages    the same, with a line per page
    python tools/prose.py --docstrings [ROOM]   what docstrings and comments of the package lack, or have too much
A sentence ends with . ! or ?, or with its paragraph or list item. Code blocks, tables, headings and directives are
not counted; inline code and a formula count as one word each.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).parent.parent
GENERATED = {"_build", "gallery", "generated", "commands.md", "api.md"}
LONGEST = 160

BLOCK = re.compile(r"^( *)(```+)[^\n]*\n.*?^\1\2 *$|^ *\$\$.*?\$\$ *$|<!--.*?-->|^(?: {4}[^\n]*\n)+", re.M | re.S)
DIRECTIVE = re.compile(r"^\s*:{3,}.*$|^\s*:\w[\w-]*:.*$|^\s*\|.*$|^\s*#.*$|^\s*!\[.*$", re.M)
ONE_WORD = re.compile(r"`[^`]+`|\$[^$\n]+(?:\n[^$\n]+)?\$")
LINK = re.compile(r"\]\([^)]*\)")
ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+", re.M)
END = re.compile(r"(?<=[.!?])[)\"*_]*\s+")
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|et al|cf|vs|Eq|Sec)\.")

EXACT = re.compile(r"\$\$.*?\$\$|\$[^$]+\$|`[^`]*`|^ *>>>.*?(?=\n\s*\n|\Z)|::\n.*?(?=\n\S|\Z)", re.M | re.S)
FORMULA = re.compile(r"\|\w+\|_?\d?|\w\^|\w_\w\b(?= [=<>+])|[\w)] (?:<=|>=|<|>|=) (?:[\d(|-]|\w\b)|\b(?:argmin|sum)_\w")
STUMBLE = re.compile(
    r"\b(anew|besides?|told|tells?|by hand|hands?|handed|at once|of (?:its|their|his|a|one's) own|whom|goe?s? on|hear|"
    r"side by side|lives?|fewer of what|asked for by|is due|was due|heard|believe[sd]?|at hand|come by|said once)\b"
)
VERB = re.compile(
    r"(Add|Apply|Ask|Build|Call|Check|Choose|Compare|Compute|Copy|Count|Create|Cut|Delete|Describe|Download|Encode|"
    r"Decode|Estimate|Evaluate|Export|Find|Fit|Forget|Format|Generate|Give|Keep|Load|Make|Map|Measure|Merge|Number|Open|"
    r"Pack|Parse|Plan|Plot|Predict|Print|Put|Raise|Read|Receive|Record|Refuse|Remove|Repeat|Replace|Report|Restore|Return|"
    r"Run|Save|Score|Select|Send|Set|Share|Show|Simulate|Solve|Split|Start|Stop|Store|Sum|Take|Test|Train|Transform|Tune|"
    r"Turn|Unpack|Update|Use|Warn|Sort|Close|Draw|Write|Yield)\b"
)


def pages() -> list[Path]:
    found = [p for p in (ROOT / "docs").rglob("*.md") if not GENERATED & set(p.relative_to(ROOT).parts)]
    return [ROOT / "README.md", *sorted(p for p in found if p.name != "verdict.md")]


def prose(text: str) -> str:
    """The text without code, tables, headings and directives."""
    return DIRECTIVE.sub("", BLOCK.sub("\n", text))


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page, in order.

    >>> list(sentences("# Title\\n\\nOne `a b c` here. Two, i.e. more:\\n\\n- three\\n- four\\n\\n| a | b |\\n"))
    ['One X here.', 'Two, ie more:', 'three', 'four']
    """
    text = ABBREVIATION.sub(lambda found: found[1].replace(".", ""), LINK.sub("]", ONE_WORD.sub("X", prose(text))))
    for paragraph in re.split(r"\n\s*\n", ITEM.sub("\n\n", text)):
        for sentence in END.split(" ".join(paragraph.split())):
            if re.search(r"\w", sentence):
                yield sentence


def long_lines(text: str) -> list[str]:
    """Lines of prose, maths included, that are longer than LONGEST."""
    return [line for line in prose(text).splitlines() if len(line) > LONGEST]


def lengths(text: str) -> list[int]:
    """Words of each sentence."""
    return [len(sentence.split()) for sentence in sentences(text)]


def classes_named_twice() -> dict[str, list[str]]:
    """Names of classes at the top of two or more modules of the package."""
    found = defaultdict(list)
    for path in sorted((ROOT / "fednmap").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(path.relative_to(ROOT).as_posix())
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def modules_named_twice() -> list[str]:
    """Names of two modules, or of a module and a room; a command's module has the command's name."""
    paths = [p for p in (ROOT / "fednmap").rglob("*.py") if not p.name.startswith("__")]
    rooms = Counter(p.name for p in (ROOT / "fednmap").iterdir() if (p / "__init__.py").is_file())
    found = Counter(p.stem for p in paths)
    rooms.update({p.stem for p in paths if p.parent.name != "commands"})
    return sorted(name for name in found | rooms if max(found[name], rooms[name]) > 1)


def public() -> Iterator[tuple[str, Any]]:
    """The classes and functions of the site's reference, by full name, with their public methods."""
    sys.path.insert(0, str(ROOT / "docs" / "_ext"))
    interface: Any = import_module("interface")
    for module in ("fednmap", *interface.BY_CLASS, *interface.MODULES):
        found = import_module(module)
        for name in getattr(found, "__all__", vars(found)):
            thing = getattr(found, name)
            here = str(getattr(thing, "__module__", "")).startswith(module)
            if name.startswith("_") or not here or not (inspect.isclass(thing) or inspect.isroutine(thing)):
                continue
            yield f"{module}.{name}", thing
            for below, inner in vars(thing).items() if inspect.isclass(thing) else ():
                inner = getattr(inner, "__func__", inner)
                if not below.startswith("_") and inspect.isfunction(inner) and inner.__doc__:
                    yield f"{module}.{name}.{below}", inner


def lacks(thing: Any) -> Iterator[str]:
    """What the docstring of a public class or function lacks."""
    text = thing.__doc__ or ""
    first = text.partition(" ")[0]
    if inspect.isclass(thing) and VERB.match(first):
        yield f"a class begins with a noun, not {first!r}"
    elif not inspect.isclass(thing) and not VERB.match(first):
        yield f"a function begins with a verb, not {first!r}"
    for found in FORMULA.findall(EXACT.sub("", textwrap.dedent(text))):
        yield f"formula outside $: {found}"
    if not inspect.isclass(thing) and "raise " in inspect.getsource(thing) and not re.search("[Rr](aise|efuse)", text):
        yield "raises"
    # Interfaces, which users implement, and kinds of class that the library alone constructs need no example.
    interface = inspect.isabstract(thing) or getattr(thing, "_is_protocol", False)
    made_by_others = interface or (inspect.isclass(thing) and issubclass(thing, (tuple, Exception, Enum)))
    if not made_by_others and not re.search(">>>|returns it", text) and "." not in thing.__qualname__:
        yield "no example"


def stumbling(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of a module's docstrings, comments and messages with a word at which a reader stumbles."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type in (tokenize.STRING, tokenize.COMMENT):
                for offset, line in enumerate(token.string.splitlines()):
                    for found in STUMBLE.findall(line):
                        yield token.start[0] + offset, f"{found}: {line.strip()}"


def docstrings(room: str) -> None:
    for name, thing in public():
        if name.startswith(f"fednmap.{room}"):
            for text in lacks(thing):
                print(f"{name}: {text}")
    for path in sorted((ROOT / "fednmap").rglob("*.py")):
        where = path.relative_to(ROOT).as_posix()
        if where.startswith(f"fednmap/{room}"):
            for number, text in stumbling(path):
                print(f"{where}:{number}: {text}")


def panels() -> dict[str, Counter[str]]:
    """Command -> options in each panel of its help."""
    from fednmap.cli import COMMANDS, app

    found: dict[str, Counter[str]] = {}

    def count(name: str, command: click.Command) -> None:
        if isinstance(command, click.Group):
            for below, inner in command.commands.items():
                count(f"{name} {below}", inner)
            return
        shown = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
        found[name] = Counter(getattr(p, "rich_help_panel", None) or "Options" for p in shown)

    with click.Context(app, info_name="fednmap") as context:
        for name in COMMANDS:
            command: Any = app.get_command(context, name)
            count(name, command.loaded())
    return found


def counted(words: list[int]) -> str:
    return f"{sum(words) / len(words):5.1f} words per sentence, {sum(w > 30 for w in words):3} of {len(words)} above 30"


def main(by_page: bool) -> None:
    everything: list[int] = []
    lines = 0
    for page in pages():
        text = page.read_text(encoding="utf-8")
        everything, lines = everything + lengths(text), lines + len(long_lines(text))
        if by_page and lengths(text):
            print(f"{page.relative_to(ROOT).as_posix():36} {counted(lengths(text))}")
    print(f"{'all':36} {counted(everything)}")
    print(f"{lines} lines of prose over {LONGEST} characters")
    twice = classes_named_twice()
    print(f"{len(twice)} class names defined twice{': ' if twice else ''}{', '.join(sorted(twice))}")
    modules = modules_named_twice()
    print(f"{len(modules)} module names used twice{': ' if modules else ''}{', '.join(modules)}")
    for command, counts in panels().items():
        print(f"{command}: {', '.join(f'{panel} {k}' for panel, k in counts.items())}")


if __name__ == "__main__":
    if "--docstrings" in sys.argv[1:]:
        docstrings("".join(sys.argv[2:]))
    else:
        main("--pages" in sys.argv[1:])
