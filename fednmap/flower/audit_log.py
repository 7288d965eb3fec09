"""The audit log of a client: one line for every message that it sent, and a summary of them."""

from __future__ import annotations

import json
import logging
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import Context, Message, MessageType, RecordDict

from fednmap.flower import wire
from fednmap.flower.settings import FederationSettings, Node, client_name, grid_for
from fednmap.names import InputError
from fednmap.runs.configuration import Config
from fednmap.tables.table import REFUSALS, SiteError

LOG = "sent"  # the folder of the logs: a client's log may be in the folder of its key, whose name is the client's

WORDS = {
    "query": "name",
    "query.site": "what it has",
    "query.tables": "answer about its table",
    "train": "uplink",
    "evaluate": "measurement",
    "train.keys": "secagg: public keys",
    "train.shares": "secagg: encrypted shares",
    "train.unmask": "secagg: shares to unmask",
}
"""Kinds of messages, in words."""

PLAIN = tuple(
    f"fednmap.{room}" for room in ("flower.", "runs.", "simulation.", "algorithms.", "regularizers.", "names")
)
"""Modules whose InputErrors are about a message or a setting; the words of others, such as a user's, may show cells."""

Settings = Callable[[Mapping[str, Any]], tuple[Config, FederationSettings]]
Answer = Callable[[Message, Node], RecordDict]
"""Makes the content of a reply."""

log = logging.getLogger("flwr")


def refusal(site: str, error: Exception) -> dict[str, Any]:
    """Return what leaves a site of an error: a code and a column. Its words, which may show cells, are logged here."""
    code, column = (error.code, error.column) if isinstance(error, SiteError) else (type(error).__name__, "")
    if code == "settings":
        return {"code": code, "column": "", "why": str(error)}
    log.error("%s refused: %s", site, error, exc_info=None if isinstance(error, InputError) else error)
    return {"code": code, "column": column}


def in_words(refused: Mapping[str, Any]) -> str:
    """Return the sentence for what `refusal` returned at a site."""
    if (code := str(refused["code"])) == "settings":
        return str(refused["why"])
    words = REFUSALS.get(code, f"the site refused ({code[:60]})").format(column=str(refused["column"])[:60])
    return f"{words}; the site's own log says more"


@contextmanager
def private(site: str) -> Iterator[None]:
    """Replace the words of any error in this block, where the site's own data is loaded, by those of its code."""
    try:
        yield
    except Exception as error:  # Flower sends the words of one that is raised
        raise InputError(in_words(refusal(site, error))) from None


def audited(answer: Answer, settings: Settings) -> Callable[[Message, Context], Message]:
    """A handler of messages whose replies are entered in the client's log before they leave; so is what an error says.

    What was done to vectors on their way is entered by the settings that the client has.
    """

    def handler(message: Message, context: Context) -> Message:
        node = Node(context)
        kind = message.metadata.message_type
        line: dict[str, Any] = {"time": round(time.time(), 3), "flower_run": str(context.run_id), "kind": kind}
        for name in ("round", "secagg"):  # what the message is about, and what it says of earlier rounds
            record: Any = message.content.get(name, {})
            line |= {key: record[key] for key in ("run", "t", "ticket", "counted") if key in record}
        try:
            if "question" in message.content:
                question = json.loads(str(message.content["question"]["json"]))
                line |= {name: str(question[name])[:20] for name in ("ask", "part") if question.get(name) is not None}
            node.config, node.federation = settings(context.run_config)
            content = answer(message, node)
        except Exception as error:
            plain = type(error) is InputError and _module_of(error).startswith(PLAIN)
            said = error if plain else InputError(in_words(refusal(node.name, error)))
            _append(node, line | {"error": str(said)[:300]})
            raise said from None
        masked, config = "masked" in content, node.config
        uplink = kind == MessageType.TRAIN and (masked or "up" in content)
        line |= {"masked": masked, "clipped": uplink and config.dp_clip is not None}
        line["noised"] = uplink and bool(config.dp_noise)
        if masked and (grid := grid_for(config, kind)):
            line["step"] = grid.step
        _append(node, line | {"items": list(wire.items(content))})
        return Message(content, reply_to=message)

    return handler


def _module_of(error: Exception) -> str:
    """The module that raised an error."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__"))


def _append(node: Node, line: Mapping[str, Any]) -> None:
    path = node.folder / LOG / f"{node.name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")  # one write: messages may be answered in parallel


class AuditRow(NamedTuple):
    """Messages of one kind that a client sent, with equal contents, in rounds that follow each other."""

    client: str
    kind: str
    rounds: tuple[int, int] | None
    messages: int
    items: tuple[str, ...]
    bytes: int
    counted: int
    """How many of these the server has said that it counted."""
    treated: str


def logs(root: Path) -> dict[str, list[dict[str, Any]]]:
    """Client -> the lines of its log, from a folder of states; a line that was cut off is left out."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((root / LOG).glob("*.jsonl")):
        lines = found.setdefault(client_name(path.stem), [])
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):
                lines.append(json.loads(line))
    return found


def of_run(lines: list[dict[str, Any]], run: str | None) -> list[dict[str, Any]]:
    """The lines of run `run`, by the number that Flower gave it; all without one."""
    if run is None or not any(line.get("run") for line in lines):
        return lines
    flower = {line["flower_run"] for line in lines if line.get("run") == run}
    return [line for line in lines if line["flower_run"] in flower]


def rows(client: str, lines: Iterable[dict[str, Any]]) -> list[AuditRow]:
    """What one client sent, equal messages together."""
    counted, found = set(), dict[tuple[Any, ...], list[dict[str, Any]]]()
    for line in lines:
        counted.add(line.get("counted", ""))
        kind = WORDS.get(line["kind"], line["kind"]) + (f": {line['ask']}" if "ask" in line else "")
        found.setdefault((kind, _contents(line), _treated(line)), []).append(line)
    rows = []
    for (kind, items, treated), same in found.items():
        rounds = [int(line.get("t", line.get("ticket", "")[:8])) for line in same if "t" in line or "ticket" in line]
        size = sum(item["bytes"] for line in same for item in line.get("items", ()))
        told = sum(line["kind"] == "train" and line.get("ticket") in counted for line in same)
        span = (min(rounds), max(rounds)) if rounds else None
        rows.append(AuditRow(client, kind, span, len(same), items, size, told, treated))
    return rows


def _contents(line: Mapping[str, Any]) -> tuple[str, ...]:
    if "error" in line:
        return (f"error: {line['error']}",)
    return tuple(
        f"{item['name']} {item['kind']}"
        + (f" ({', '.join(map(str, item['shape']))})" if item["shape"] else "")
        + (f" {item['value']!r}" if "value" in item else "")
        for item in line.get("items", ())
    )


def _treated(line: Mapping[str, Any]) -> str:
    words = [word for word in ("masked", "clipped", "noised") if line.get(word)]
    if step := line.get("step"):
        words.append(f"rounded to {step:.3g}")
    vectors = any(item["name"].startswith(("up.", "gradient.", "start.")) for item in line.get("items", ()))
    return ", ".join(words) or ("as it is" if vectors else "")
