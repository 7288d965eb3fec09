"""Our docstrings as reStructuredText: bars and stars are letters, `name:  text` lines are a list of arguments.

A formula is written as in our Markdown: $...$ in a sentence, $$...$$ on lines of its own. In one of several lines, a
line ends with two backslashes and is aligned at &; it needs no environment. Such a docstring begins with r.
"""

from __future__ import annotations

import re
from itertools import takewhile

MACROS = {"prox": r"\operatorname{prox}", "mean": r"\operatorname{mean}", "sign": r"\operatorname{sign}"}
"""What formulas may use beyond LaTeX; and phi is written as on our pages."""
ARGUMENT = re.compile(r"^(\w+(?:, \w+)*):\s+(\S.*)$")  # one name, or several that share an explanation
CODE = r"``[^`]+``|`[^`]+`"
FORMULA = r"(?<![\w\\$])\$[^\s$`](?:[^$`]*[^\s$`\\])?\$(?![\w$])"  # not $5 and $6, nor $HOME/$USER
AS_WRITTEN = re.compile(f"({CODE}|{FORMULA})")


def escaped(text: str) -> str:
    """Outside of `code` and formulas, what reStructuredText would take for markup is shown as it stands."""
    return "".join(_as_written(part) if k % 2 else _letters(part) for k, part in enumerate(AS_WRITTEN.split(text)))


def _as_written(part: str) -> str:
    # a backslash and a space end the role before a letter, and are not shown
    return part if part.startswith("`") else rf"\ :math:`{' '.join(part[1:-1].split())}`\ "


def _letters(text: str) -> str:
    text = re.sub(r"([|*\\])", r"\\\1", text)
    return re.sub(r"(\w)_(?=\W|$)", r"\1\\_", text)  # a trailing underline would be a link


def rewritten(lines: list[str]) -> list[str]:
    out: list[str] = []
    k = 0
    while k < len(lines):
        line = lines[k]
        indent = len(line) - len(line.lstrip())
        if line.lstrip().startswith("$$"):
            formula, used = _displayed(lines[k:])
            out += ["", ".. math::", "", *formula, ""]
            k += used
        elif line.lstrip().startswith(">>>"):
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
            names = ", ".join(f"``{name}``" for name in found[1].split(", "))
            out += ["", names, f"    {escaped(text)}", ""]
            k += 1 + len(more)
        elif indent and line.strip():  # an aside that is set apart stands as it is written
            block = _indented(lines[k:], 0)
            out += ["", "::", "", *block, ""]
            k += len(block)
        else:
            paragraph = list(takewhile(_in_a_sentence, lines[k:])) or [line]
            out += escaped("\n".join(paragraph)).split("\n")
            k += len(paragraph)
    return out


def _in_a_sentence(line: str) -> bool:
    return bool(line.strip()) and not (
        line.startswith((" ", ">>>", "$$")) or line.rstrip().endswith("::") or ARGUMENT.match(line)
    )


def _displayed(lines: list[str]) -> tuple[list[str], int]:
    """Return the formula between $$ and $$, indented, and the number of lines that it takes."""
    inside, found, rest = "\n".join(lines).strip().removeprefix("$$").partition("$$")
    if not found or rest.partition("\n")[0].strip():
        raise ValueError(f"expected $$ at the end of a line after {lines[0].strip()!r}, got none; write it there")
    return [f"    {line.strip()}" for line in inside.splitlines() if line.strip()], inside.count("\n") + 1


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
    page = app.env.temp_data.get("autodoc:module")  # type: ignore[attr-defined]
    if what == "module" and page and not str(getattr(thing, "__module__", page)).startswith(page):
        return True
    field = type(thing).__name__ == "_tuplegetter"  # of a NamedTuple, whose signature names them all
    if isinstance(thing, type) and "." in thing.__qualname__:  # the state of the method that another one wraps
        if name == "State":  # of a decentralized method: what its nodes keep
            return True
        here = app.env.temp_data.get("autodoc:class")  # type: ignore[attr-defined]
        if here and thing.__qualname__.rpartition(".")[0] != here:
            return True
    if field or str(getattr(thing, "__module__", "")).startswith(FOREIGN) or name.endswith(("_request", "InputError")):
        return True
    return None


def setup(app: object) -> dict[str, bool]:
    macros = {"tex": {"macros": {**MACROS, "phi": r"\varphi"}}}
    app.connect("config-inited", lambda _, config: setattr(config, "mathjax3_config", macros))  # type: ignore[attr-defined]
    app.connect("autodoc-process-docstring", process)  # type: ignore[attr-defined]
    app.connect("autodoc-skip-member", skip)  # type: ignore[attr-defined]
    return {"parallel_read_safe": True}
