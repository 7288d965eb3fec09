"""Presets: settings of whole runs under a name. Each is an ordinary TOML file in this folder."""

from __future__ import annotations

from importlib.resources import files
from itertools import takewhile
from pathlib import Path

from fednmap.names import choose

FOLDER = Path(str(files(__name__)))


def presets() -> dict[str, str]:
    """Return the presets by name, each with the comment that its file begins with."""
    found = {}
    for path in sorted(FOLDER.glob("*.toml")):
        comment = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
        found[path.stem] = " ".join(line.removeprefix("#").strip() for line in comment)
    return found


def preset(name: str) -> Path:
    """Return the file of a preset."""
    choose("preset", name, presets())
    return FOLDER / f"{name}.toml"
