"""The page of the command line, written from the commands themselves when the site is built."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

PAGE = Path(__file__).parent.parent / "reference" / "commands.md"


def page() -> str:
    from fednmap.cli import COMMANDS, app

    lines = ["# Command line", "", "What `fednmap --help` and `fednmap COMMAND --help` say.", ""]
    with click.Context(app, info_name="fednmap") as context:
        for name in COMMANDS:
            command = app.get_command(context, name)
            lines += _described(f"fednmap {name}", command.loaded() if hasattr(command, "loaded") else command, 2)
    return "\n".join(lines) + "\n"


def _described(title: str, command: click.Command, level: int) -> Iterator[str]:
    yield from (f"{'#' * level} {title}", "", (command.help or "").strip(), "")
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from _described(f"{title} {name}", below, level + 1)
        return
    panel = None
    for parameter in command.params:
        if "--help" in parameter.opts or getattr(parameter, "hidden", False):
            continue
        if (here := getattr(parameter, "rich_help_panel", None) or "Options") != panel:
            yield from (*([""] if panel else []), f"| {here} | |", "|---|---|")
            panel = here
        names = parameter.opts[0] if parameter.param_type_name == "option" else (parameter.name or "").upper()
        text = " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "\\|")
        yield f"| `{names}` | {text} |"
    yield ""


def setup(app: object) -> dict[str, bool]:
    app.connect("builder-inited", lambda _: PAGE.write_text(page(), encoding="utf-8"))  # type: ignore[attr-defined]
    return {"parallel_read_safe": True}
