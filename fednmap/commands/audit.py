"""`fednmap audit`: everything that left the clients of a run between machines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Column, Table
from rich.text import Text

from fednmap.commands.options import Json
from fednmap.names import InputError
from fednmap.report.terminal import console
from fednmap.runs.atomic_files import from_json, json_text

if TYPE_CHECKING:
    from fednmap.flower.audit_log import AuditRow


HEADS = ("what", "rounds", "messages", "bytes", "counted", "contents")


def audit(
    run: Annotated[Path, typer.Argument(help="Run folder of a trial, or a client's state-dir.")],
    client: Annotated[str | None, typer.Option(help="Of this client alone.")] = None,
    json: Json = False,
) -> None:
    """List everything that left the clients in a run: names, shapes, bytes, rounds; from the clients' own logs."""
    from fednmap.flower.audit_log import logs, of_run, rows

    facts = run / "federation.json"
    number = from_json(facts, dict)["run"] if facts.exists() else None
    found = logs(run / "clients" if (run / "clients").is_dir() else run)
    if not found:
        raise InputError(f"{run} holds no logs of clients; on a client's machine give its state-dir")
    if client is not None and client not in found:
        raise InputError(f"there is no log of {client!r}; there are {', '.join(found)}")
    chosen = {name: lines for name, lines in found.items() if client in (None, name)}
    listed = [row for name, lines in chosen.items() for row in rows(name, of_run(lines, number))]
    if json:
        print(json_text([row._asdict() for row in listed]))
        return
    screen = console()
    for name in chosen:
        columns = (Column(head, overflow="fold") for head in HEADS)  # no name is cut
        table = Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=Text(name), title_justify="left")
        for row in (row for row in listed if row.client == name):
            span = "-" if row.rounds is None else "-".join(map(str, dict.fromkeys(row.rounds)))
            counted = f"{row.counted}" if row.kind == "uplink" else ""
            contents = "\n".join([*row.items, *([f"({row.treated})"] if row.treated else [])])
            cells = [row.kind, span, f"{row.messages}", f"{row.bytes}", counted, contents]
            table.add_row(*map(Text, cells))
        screen.print(table)
    vectors = [row for row in listed if row.kind == "uplink"]
    clear = sum(row.messages for row in vectors if "masked" not in row.treated)
    words = f"uplinks: {sum(row.messages for row in vectors)}, of them in the clear {clear}"
    rest = f"clipped {_how_many(vectors, 'clipped')}, noised {_how_many(vectors, 'noised')}"
    screen.print(f"{words}, masked {_how_many(vectors, 'masked')}, {rest}", highlight=False)
    screen.print(
        "counted: replies that the server has confirmed; it confirms those of the last round in the next message"
    )


def _how_many(rows: list[AuditRow], word: str) -> int:
    return sum(row.messages for row in rows if word in row.treated)
