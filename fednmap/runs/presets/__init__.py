"""Presets: settings of whole runs under a name. Each is an ordinary TOML file beside this one."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from fednmap.names import unknown

FOLDER = Path(str(files(__name__)))


def presets() -> dict[str, str]:
    """The presets by name, with what each is: the comment that its file begins with."""
    return {path.stem: _about(path) for path in sorted(FOLDER.glob("*.toml"))}


def preset(name: str) -> Path:
    """The file of a preset."""
    path = FOLDER / f"{name}.toml"
    if name not in presets():
        raise unknown("preset", name, presets())
    return path


def _about(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = lines[: next(k for k, line in enumerate(lines) if not line.startswith("#"))]
    return " ".join(line.removeprefix("#").strip() for line in comment)
