"""`fednmap reproduce`: the command of the package `reproduction`, which is in the repository and not in the wheel."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from fednmap.names import InputError


def __getattr__(name: str) -> Any:
    """Load the command when it is called, from the current folder or from where Python finds it."""
    if name != "reproduce":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    here = Path.cwd()
    if (here / "reproduction" / "command.py").is_file() and str(here) not in sys.path:
        sys.path.append(str(here))
    try:
        return import_module("reproduction.command").reproduce
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "reproduction":
            raise
        raise InputError(
            f"expected the folder reproduction/ of fednmap's repository in {here}, got none; "
            "do git clone the repository and run `fednmap reproduce` in its root"
        ) from None
