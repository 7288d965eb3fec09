"""Whether a value is the one a run began with: its repr, or a digest of its source text and of what it holds."""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cached_property, partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
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
"""What counts of the globals that the source text of a function or class names."""


def described(value: object, tag: str | None = None) -> Any:
    """Return the value as settings keep it: itself, or its repr, with a digest where the repr is not enough."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    words = _words(value)
    return words if _repr_is_enough(value) and len(words) <= 200 else f"{words[:200]}, {identity(value, tag)}"


def identity(value: object, tag: str | None = None) -> str:
    """Return a short digest of the source text of the user's functions and classes and of the data they hold.

    tag: stands for the source text, which is then not read.

    >>> identity([1, "a"]) == identity([1, "a"]) != identity([1, "b"])
    True
    """
    return _Digest(tag).of(value).hex()[:12]


def _words(value: object) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", " ".join(repr(value).split()))


def _repr_is_enough(value: object) -> bool:
    """Whether the value is numbers and words, in data classes of the library."""
    if not is_dataclass(value) or isinstance(value, type) or not _is_from(type(value), LIBRARIES):
        return isinstance(value, Plain)
    return all(field.repr and _repr_is_enough(getattr(value, field.name)) for field in fields(value) if field.init)


def _is_from(value: Callable[..., Any], packages: set[str]) -> bool:
    return (value.__module__ or "builtins").partition(".")[0] in packages


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
        elif isinstance(value, FunctionType | BuiltinFunctionType | type) and _is_from(value, LIBRARIES):
            yield from (value.__module__, value.__qualname__)
        elif isinstance(value, FunctionType):
            yield from self._code(value, value.__globals__)
            yield from (value.__defaults__, value.__kwdefaults__, inspect.getclosurevars(value).nonlocals)
        elif isinstance(value, type):
            yield from self._code(value, vars(sys.modules[value.__module__]))
            yield value.__bases__
        elif isinstance(value, ModuleType | Enum) or "__dict__" not in dir(value) or _is_from(type(value), STANDARD):
            yield _words(value)
        else:  # what it holds, without cached properties
            kinds = type(value).__mro__
            cached = {name for kind in kinds for name, v in vars(kind).items() if isinstance(v, cached_property)}
            yield from (type(value), {name: v for name, v in vars(value).items() if name not in cached})

    def _code(self, value: Any, module: Mapping[str, Any]) -> Iterator[Any]:
        """The source text, and the numbers, tensors and functions of its module that it names; or the tag."""
        if self._tag is not None:
            yield f"{value.__qualname__}, {self._tag}"
            return
        try:
            source = inspect.getsource(value)
        except (OSError, TypeError):
            raise InputError(
                f"expected source text of {value.__qualname__}, got none; define it in a file, or name this version of "
                "your code with run(..., tag=)"
            ) from None
        if value.__name__ == "<lambda>" and len(source.splitlines()) == 1:  # the line may have several
            columns = [column for spot in value.__code__.co_positions() for column in spot[2:] if column]
            source = source.encode()[min(columns, default=0) : max(columns, default=None)].decode()
        names = dict.fromkeys(re.findall(r"[^\W\d]\w*", source))
        yield from (source, {name: module[name] for name in names if isinstance(module.get(name), NAMED)})
