"""Look up names, with errors that suggest; a name may also be the user's code, package.module:Name."""

from __future__ import annotations

import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any, TypeVar


class InputError(ValueError):
    """What was given cannot be used: the message says what, what is allowed, and what to do."""


T = TypeVar("T")


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's `__getattr__` under which its old names, old -> new, still work, with a DeprecationWarning.

    A new name with a colon, package.module:Name, is in another module.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        place, _, new = names[name].rpartition(":")
        warnings.warn(
            f"{module}.{name} is now {place or module}.{new}; use that name", DeprecationWarning, stacklevel=2
        )
        return getattr(import_module(place or module), new)

    return find


def current(
    values: Mapping[str, T], renamed: Mapping[str, str], show: Callable[[str], str] | None = str
) -> dict[str, T]:
    """Return the settings under today's names; each old name (old -> new in `renamed`) gives a FutureWarning.

    show: how a name is written in the warning; None for files of our own, which do not warn.

    >>> current({"reg": "l1:0.1"}, {"reg": "penalty"}, show=None)
    {'penalty': 'l1:0.1'}
    """
    found = {renamed.get(name, name): value for name, value in values.items()}
    for old, new in renamed.items():
        if old in values and new in values:
            raise InputError(f"expected {new} once, got {old} too, which is its former name; leave {old} out")
        if old in values and show:
            warnings.warn(f"{show(old)} is now {show(new)}; use that name", FutureWarning, stacklevel=3)
    return found


def unknown(kind: str, name: str, allowed: Iterable[str]) -> InputError:
    """Return the error for a name that is not among `allowed`, with the nearest match."""
    names = sorted(allowed)
    near = get_close_matches(name.lower(), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return InputError(f"unknown {kind} {name!r}; {hint}choose from {', '.join(names)}")


def choose(kind: str, name: str, known: Mapping[str, T]) -> T:
    """Return known[name], or an error naming what there is."""
    if name not in known:
        raise unknown(kind, name, known)
    return known[name]


def some_of(names: Iterable[str], most: int = 20) -> str:
    """Return the names for a message, or the first of them; long ones are cut.

    >>> some_of(["age", "sex"]), some_of("abcde", most=3)
    ('age, sex', 'a, b, c and 2 more')
    """
    each = [name if len(name) <= 60 else f"{name[:60]}..." for name in names]
    more = f" and {len(each) - most} more" if len(each) > most else ""
    return ", ".join(each[:most]) + more


CODE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(:.*)?", re.DOTALL)


FOREIGN: dict[str, str] = {}
"""The modules that were loaded because a name was the user's code: file -> name."""


def is_code(spec: str, known: Container[str]) -> bool:
    """Return whether `spec` is package.module:Name, with or without arguments, rather than a known name.

    >>> is_code("my.penalties:Huber:0.1", ["l1"]), is_code("l1:0.1", ["l1"])
    (True, False)
    """
    return spec.partition(":")[0] not in known and CODE.fullmatch(spec) is not None


def parted(spec: str, known: Container[str]) -> tuple[str, str]:
    """Return the name and what follows its colon.

    >>> parted("my.penalties:Huber:0.1", ["l1"]), parted("l1:0.1", ["l1"])
    (('my.penalties:Huber', '0.1'), ('l1', '0.1'))
    """
    name, _, argument = spec.partition(":")
    if not is_code(spec, known):
        return name, argument
    attribute, _, argument = argument.partition(":")
    return f"{name}:{attribute}", argument


def imported(kind: str, spec: str, known: Iterable[str], base: type | None = None) -> Any:
    """Return what package.module:Name stands for; the current folder is searched too, last.

    base: the class that it must be made from; without one it must be callable.
    """
    module_name, name = spec.split(":")[:2]
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if f"{module_name}.".startswith(f"{error.name}."):
            raise InputError(f"{unknown(kind, module_name, known)}; nor is there a module {error.name!r}") from None
        raise InputError(f"{kind} {spec!r}: {module_name} needs {error.name}, which is not installed") from None
    except Exception as error:  # any error in the user's module
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise InputError(f"{kind} {spec!r}: {module_name} cannot be imported, {said}") from error
    FOREIGN[str(vars(module).get("__file__"))] = module_name
    if name not in dir(module):
        near = get_close_matches(name, dir(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"{kind} {spec!r}: {module_name} has no {name!r}{hint}")
    found = getattr(module, name)
    right = callable(found) if base is None else isinstance(found, type) and issubclass(found, base)
    if not right or inspect.isabstract(found):
        what = "a function or class" if base is None else f"a class with all that {base.__qualname__} asks"
        raise InputError(f"{kind} {spec!r}: {name} is not {what}")
    return found


def look_up(kind: str, name: str, known: Mapping[str, T], base: type | None = None) -> T:
    """Return known[name], or what package.module:Name stands for."""
    if is_code(name, known):
        found: T = imported(kind, name, known, base)
        return found
    return choose(kind, name, known)


def parsed(text: str) -> bool | int | float | str:
    """Return a word of a command line: a number, true, false, or itself."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def is_number(word: str) -> bool:
    """Return whether a word of a table is a number, also nan and inf."""
    try:
        float(word)
    except ValueError:
        return False
    return True


def called(spec: str, make: Callable[..., T], first: Sequence[Any], argument: str) -> T:
    """Return make(*first, ...) with the words of `argument`, separated by commas; refused where they do not fit."""
    arguments = [*first, *(parsed(word.strip()) for word in argument.split(",") if argument)]
    try:
        inspect.signature(make).bind(*arguments)
    except TypeError as error:
        shown = ", ".join(f"{argument!r:.40}" for argument in arguments)
        raise InputError(f"{spec!r} does not fit: called with ({shown}), {error}") from None
    return make(*arguments)
