"""Whether a value is the one a run began with: its repr, or a digest of its source text and of what it holds."""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cached_property, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fednmap.names import InputError

STANDARD = {*sys.stdlib_module_names, "builtins"} - {"__main__"}
LIBRARIES = {"fednmap", "torch", "numpy", *STANDARD}
"""Packages whose functions and classes are identified by name; of others the source text is digested."""

Plain = bool | int | float | complex | str | bytes | None
"""What its repr describes in full."""

NAMED = (bool, int, float, str, tuple, list, Tensor, np.ndarray, FunctionType)
"""What counts of the globals that a function names."""


def described(value: object, tag: str | None = None) -> Any:
    """Return the value as settings keep it: itself, or its repr, with a digest where the repr is not enough."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    words = _words(value)
    return words if _repr_is_enough(value) and len(words) <= 200 else f"{words[:200]}, {identity(value, tag)}"


def identity(value: object, tag: str | None = None) -> str:
    """Return a short digest of the source text of the user's functions and classes and of the data they hold.

    tag: stands for the source text, which is then not read.
    """
    return _Digest(tag).of(value).hex()[:12]


def _words(value: object) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", " ".join(repr(value).split()))


def _repr_is_enough(value: object) -> bool:
    """Whether the value is numbers and words, in data classes of the library."""
    if not is_dataclass(value) or isinstance(value, type) or not _of_library(type(value)):
        return isinstance(value, Plain)
    return all(field.repr and _repr_is_enough(getattr(value, field.name)) for field in fields(value) if field.init)


class _Digest:
    def __init__(self, tag: str | None) -> None:
        self._tag = tag
        self._known: dict[int, tuple[object, bytes]] = {}  # by id; the objects are kept so that no id is used again

    def of(self, value: Any) -> bytes:
        if isinstance(value, Plain):
            return hashlib.sha256(repr(value).encode()).digest()
        if id(value) not in self._known:
            self._known[id(value)] = value, b"itself"  # for a value that holds itself
            found = hashlib.sha256(type(value).__qualname__.encode())
            for part in self._parts(value):
                found.update(self.of(part))
            self._known[id(value)] = value, found.digest()
        return self._known[id(value)][1]

    def _parts(self, value: Any) -> Iterator[Any]:
        if isinstance(value, Tensor):
            trained = isinstance(value, nn.Parameter) and value.requires_grad
            yield from (str(value.dtype), str(tuple(value.shape)), trained)
            yield value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        elif isinstance(value, np.ndarray) and value.dtype != object:
            yield from (str(value.dtype), str(value.shape), value.tobytes())
        elif isinstance(value, Mapping):
            for key in sorted(value, key=repr):
                yield from (repr(key), value[key])
        elif isinstance(value, set | frozenset):
            yield from sorted(self.of(each) for each in value)
        elif isinstance(value, list | tuple | np.ndarray):
            yield from value
        elif isinstance(value, MethodType):
            yield from (value.__func__, value.__self__)
        elif isinstance(value, partial):
            yield from (value.func, value.args, value.keywords)
        elif isinstance(value, FunctionType | BuiltinFunctionType | type) and _of_library(value):
            yield from (value.__module__, value.__qualname__)
        elif isinstance(value, FunctionType):
            closure = inspect.getclosurevars(value).nonlocals
            yield from (self._source(value), value.__defaults__, value.__kwdefaults__, closure)
            yield _named(value.__code__, value.__globals__)
        elif isinstance(value, type):
            source = self._source(value)
            yield from (source, value.__bases__)
            if self._tag is None:
                yield _named(compile(textwrap.dedent(source), "<source>", "exec"), vars(sys.modules[value.__module__]))
        elif isinstance(value, ModuleType | Enum) or "__dict__" not in dir(value) or _root(type(value)) in STANDARD:
            yield _words(value)
        else:
            yield from (type(value), _held(value))

    def _source(self, value: FunctionType | type) -> str:
        if self._tag is not None:
            return f"{value.__qualname__}, {self._tag}"
        try:
            source = inspect.getsource(value)
        except (OSError, TypeError):
            raise InputError(
                f"expected source text of {value.__qualname__}, got none; define it in a file, or name this version of "
                "your code with run(..., tag=)"
            ) from None
        return _lambda(value, source) if value.__name__ == "<lambda>" else source


def _lambda(value: Any, source: str) -> str:
    """The body of a lambda, if on one line: the line may have several."""
    spots = [spot for spot in value.__code__.co_positions() if spot[3]]
    columns = [column for spot in spots for column in spot[2:] if column is not None]
    one_line = columns and len({line for spot in spots for line in spot[:2]}) == 1 == len(source.splitlines())
    return source.encode()[min(columns) : max(columns)].decode() if one_line else source


def _named(code: CodeType, module: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers, tensors and functions of its module that code names, including code inside it."""
    own = [name for name in code.co_names if not name.startswith("__")]  # a class names the __name__ of its module
    found = {name: module[name] for name in own if isinstance(module.get(name), NAMED)}
    for inner in code.co_consts:
        found |= _named(inner, module) if isinstance(inner, CodeType) else {}
    return found


def _held(value: object) -> dict[str, Any]:
    """What an object holds, without cached properties."""
    cached = {name for kind in type(value).__mro__ for name, v in vars(kind).items() if isinstance(v, cached_property)}
    return {name: v for name, v in vars(value).items() if name not in cached}


def _of_library(value: Callable[..., Any]) -> bool:
    return _root(value) in LIBRARIES


def _root(value: Callable[..., Any]) -> str:
    """The package it comes from."""
    return (value.__module__ or "builtins").partition(".")[0]
