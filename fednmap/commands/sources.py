"""What the sources say of themselves, read without being run: loading torch takes seconds, a list needs none of it."""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

Definition = ast.ClassDef | ast.FunctionDef


class Thing(NamedTuple):
    """A class or function and the module that it is written in."""

    module: str
    tree: Definition

    @property
    def first_line(self) -> str:
        return (ast.get_docstring(self.tree) or "").strip().splitlines()[0]

    def call(self, name: str) -> dict[str, Any]:
        """The keywords of the call that a class assigns to `name`; an enumeration's member as its value."""
        for line in self.tree.body:
            if isinstance(line, ast.Assign) and isinstance(line.value, ast.Call) and _names(line) == [name]:
                return {k.arg or "": self._value(k.value) for k in line.value.keywords}
        raise LookupError(f"{self.tree.name} says no {name}")

    def fields(self) -> dict[str, bool]:
        """The arguments of a dataclass in order, and whether each may be left out; with those of what it extends."""
        found: dict[str, bool] = {}
        for base in self.tree.bases if isinstance(self.tree, ast.ClassDef) else ():
            if isinstance(base, ast.Name) and base.id not in ("Regularizer", "ABC"):
                found |= thing(self.module, base.id).fields()
        for line in self.tree.body:
            if isinstance(line, ast.FunctionDef) and line.name == "__init__":
                names, free = [a.arg for a in line.args.args[1:]], len(line.args.defaults)
                return {name: k >= len(names) - free for k, name in enumerate(names)}
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and _is_argument(line):
                found[line.target.id] = line.value is not None
        return found

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            members = thing(self.module, node.value.id).tree.body
            return next(
                ast.literal_eval(m.value) for m in members if isinstance(m, ast.Assign) and _names(m) == [node.attr]
            )
        return ast.literal_eval(node)


def catalogue(module: str, name: str) -> dict[str, Thing]:
    """The dictionary of things by name that a module assigns to `name`."""
    for line in _parsed(module).body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.target.id == name:
            assert isinstance(line.value, ast.Dict)
            pairs = zip(line.value.keys, line.value.values, strict=True)
            return {
                ast.literal_eval(key): thing(module, value.id)
                for key, value in pairs
                if key is not None and isinstance(value, ast.Name)
            }
    raise LookupError(f"{module} has no {name}")


def keys(module: str, name: str) -> list[str]:
    """The keys of the dictionary that a module assigns to `name`."""
    for line in _parsed(module).body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.target.id == name:
            assert isinstance(line.value, ast.Dict)
            return [ast.literal_eval(key) for key in line.value.keys if key is not None]
    raise LookupError(f"{module} has no {name}")


def thing(module: str, name: str) -> Thing:
    """What `name` means in a module: defined there, or where it is imported from."""
    for line in _parsed(module).body:
        if isinstance(line, Definition) and line.name == name:
            return Thing(module, line)
        if isinstance(line, ast.ImportFrom) and line.module:
            for alias in line.names:
                if (alias.asname or alias.name) == name:
                    return thing(line.module, alias.name)
    raise LookupError(f"{module} has no {name}")


@cache
def _parsed(module: str) -> ast.Module:
    package = find_spec("fednmap")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent.joinpath(*module.split(".")[1:])
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(source.read_text(encoding="utf-8"))


def _names(line: ast.Assign) -> list[str]:
    return [target.id for target in line.targets if isinstance(target, ast.Name)]


def _is_argument(line: ast.AnnAssign) -> bool:
    """Whether a field is an argument of the constructor."""
    if isinstance(line.value, ast.Call):
        return not any(k.arg == "init" and ast.literal_eval(k.value) is False for k in line.value.keywords)
    return "ClassVar" not in ast.unparse(line.annotation)
