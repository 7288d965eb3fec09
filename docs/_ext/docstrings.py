"""Our docstrings as reStructuredText: bars and stars are letters, `name:  text` lines are a list of arguments."""

from __future__ import annotations

import re
from itertools import takewhile

ARGUMENT = re.compile(r"^(\w+):\s+(\S.*)$")
CODE = re.compile(r"(``[^`]+``|`[^`]+`)")


def escaped(text: str) -> str:
    """Outside of `code`, what reStructuredText would take for markup is shown as it stands."""
    parts = CODE.split(text)
    return "".join(p if p.startswith("`") else _names(re.sub(r"([|*\\])", r"\\\1", p)) for p in parts)


def _names(text: str) -> str:
    return re.sub(r"(\w)_(?=\W|$)", r"\1\\_", text)  # a trailing underline would be a link


def rewritten(lines: list[str]) -> list[str]:
    out: list[str] = []
    k = 0
    while k < len(lines):
        line = lines[k]
        indent = len(line) - len(line.lstrip())
        if line.lstrip().startswith(">>>"):
            block = list(takewhile(str.strip, lines[k:]))
            out += ["", *block, ""]
            k += len(block)
        elif line.rstrip().endswith("::"):
            body = _indented(lines[k + 1 :], indent)
            out += [escaped(line), "", *body, ""]
            k += 1 + len(body)
        elif found := ARGUMENT.match(line):
            more = _indented(lines[k + 1 :], indent)
            text = " ".join([found[2], *(part.strip() for part in more if part.strip())])
            out += ["", f"``{found[1]}``", f"    {escaped(text)}", ""]
            k += 1 + len(more)
        elif indent and line.strip():  # an aside that is set apart stands as it is written
            block = _indented(lines[k:], 0)
            out += ["", "::", "", *block, ""]
            k += len(block)
        else:
            out.append(escaped(line))
            k += 1
    return out


def _indented(lines: list[str], beyond: int) -> list[str]:
    """The lines that are set in deeper than `beyond`, with empty ones between them."""
    found: list[str] = []
    for line in lines:
        if line.strip() and len(line) - len(line.lstrip()) <= beyond:
            break
        found.append(line)
    while found and not found[-1].strip():
        found.pop()
    return found


def process(app: object, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    lines[:] = rewritten(lines)


FOREIGN = ("sklearn", "enum", "torch", "numpy")


def skip(app: object, what: str, name: str, thing: object, skipped: bool, options: object) -> bool | None:
    """What other libraries have put into our classes is on their pages, not on ours; a re-export is where it began."""
    field = type(thing).__name__ == "_tuplegetter"  # of a NamedTuple, whose signature names them all
    if isinstance(thing, type) and "." in thing.__qualname__:  # the state of the method that another one wraps
        here = app.env.temp_data.get("autodoc:class")  # type: ignore[attr-defined]
        if here and thing.__qualname__.rpartition(".")[0] != here:
            return True
    if field or str(getattr(thing, "__module__", "")).startswith(FOREIGN) or name.endswith(("_request", "InputError")):
        return True
    return None


def setup(app: object) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", process)  # type: ignore[attr-defined]
    app.connect("autodoc-skip-member", skip)  # type: ignore[attr-defined]
    return {"parallel_read_safe": True}
