"""Looking a name up, with an error that helps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar


class InputError(ValueError):
    """What was given cannot be used: the message says what, what is allowed, and what to do."""


T = TypeVar("T")


def unknown(kind: str, name: str, allowed: Iterable[str]) -> InputError:
    """The error for a name that is not among `allowed`, with the nearest match."""
    names = sorted(allowed)
    near = get_close_matches(name.lower(), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return InputError(f"unknown {kind} {name!r}; {hint}choose from {', '.join(names)}")


def choose(kind: str, name: str, table: Mapping[str, T]) -> T:
    """table[name], or an error naming what there is."""
    if name not in table:
        raise unknown(kind, name, table)
    return table[name]
