"""Whether a value is the one a run began with: a digest of all it holds, also of functions and of one's own objects."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cached_property, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

STANDARD = {*sys.stdlib_module_names, "builtins"} - {"__main__"}
LIBRARIES = {"fednmap", "torch", "numpy", *STANDARD}
"""Whose functions and classes are known by name; of others the code counts."""

Plain = bool | int | float | complex | str | bytes | None
"""What its repr says in full."""

Known = dict[int, tuple[object, bytes]]
"""Objects that were met before, by id, and their digests; they are kept so that no id is used again."""


def described(value: object) -> Any:
    """The value as settings keep it: itself, or its repr, with a digest where that does not say all."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    words = _words(value)
    return words if _says_all(value) and len(words) <= 200 else f"{words[:200]}, {identity(value)}"


def identity(value: object) -> str:
    """A short digest, the same for values that do the same: of all they hold, and of the code of functions."""
    return _digest(value, {}).hex()[:12]


def _words(value: object) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", " ".join(repr(value).split()))


def _says_all(value: object) -> bool:
    """Whether the repr is all there is to know: numbers and words, in data classes of the library."""
    if not is_dataclass(value) or isinstance(value, type) or not _of_library(type(value)):
        return isinstance(value, Plain)
    return all(field.repr and _says_all(getattr(value, field.name)) for field in fields(value) if field.init)


def _digest(value: Any, known: Known) -> bytes:
    if isinstance(value, Plain):
        return hashlib.sha256(repr(value).encode()).digest()
    if id(value) not in known:
        known[id(value)] = value, b"itself"  # what holds itself
        found = hashlib.sha256(type(value).__qualname__.encode())
        for part in _parts(value):
            found.update(_digest(part, known))
        known[id(value)] = value, found.digest()
    return known[id(value)][1]


def _parts(value: Any) -> Iterator[Any]:
    """The value taken apart."""
    if isinstance(value, Tensor):
        yield from (str(value.dtype), str(tuple(value.shape)), isinstance(value, nn.Parameter) and value.requires_grad)
        yield value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield from (str(value.dtype), str(value.shape), value.tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            yield from (repr(key), value[key])
    elif isinstance(value, set | frozenset):
        yield from sorted(identity(each) for each in value)
    elif isinstance(value, list | tuple | np.ndarray):
        yield from value
    elif isinstance(value, CodeType):
        yield from (value.co_code, value.co_consts, value.co_names)
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, FunctionType | BuiltinFunctionType | type) and _of_library(value):
        yield from (value.__module__, value.__qualname__)
    elif isinstance(value, FunctionType):
        yield from (value.__code__, value.__defaults__, value.__kwdefaults__, _enclosed(value), _globals(value))
    elif isinstance(value, type):
        yield from (value.__qualname__, _written(value), value.__bases__)
    elif isinstance(value, ModuleType | Enum) or "__dict__" not in dir(value) or _root(type(value)) in STANDARD:
        yield _words(value)
    else:
        yield from (type(value), _held(value))


def _enclosed(function: FunctionType) -> list[Any]:
    """What a function has from the one around it."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not there yet
            continue
    return found


def _globals(function: FunctionType) -> list[Any]:
    """What a function has from its module, where that decides what it gives: numbers, tensors, other functions."""
    named = (function.__globals__.get(name) for name in _names(function.__code__))
    return [
        v for v in named if isinstance(v, bool | int | float | str | tuple | list | Tensor | np.ndarray | FunctionType)
    ]


def _names(code: CodeType) -> list[str]:
    """What a function's lines name, also those of functions and comprehensions inside it."""
    inner = [name for const in code.co_consts if isinstance(const, CodeType) for name in _names(const)]
    return list(dict.fromkeys([*code.co_names, *inner]))


def _written(kind: type) -> dict[str, Any]:
    """What stands in a class of one's own: its functions, and numbers and words."""
    found: dict[str, Any] = {}
    for name, value in vars(kind).items():
        inner = value.fget if isinstance(value, property) else value
        inner = inner.func if isinstance(inner, cached_property) else inner
        inner = inner.__func__ if isinstance(inner, staticmethod | classmethod) else inner
        if isinstance(inner, FunctionType) or (isinstance(inner, Plain) and not name.startswith("__")):
            found[name] = inner
    return found


def _held(value: object) -> dict[str, Any]:
    """What an object holds, without what it has only computed once."""
    computed = {
        name for kind in type(value).__mro__ for name, v in vars(kind).items() if isinstance(v, cached_property)
    }
    return {name: v for name, v in vars(value).items() if name not in computed}


def _of_library(value: Callable[..., Any]) -> bool:
    return _root(value) in LIBRARIES


def _root(value: Callable[..., Any]) -> str:
    """The package it comes from."""
    return (value.__module__ or "builtins").partition(".")[0]
