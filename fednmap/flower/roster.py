"""Which node is which client, whether its data fits, and requests to several of them in parallel."""

from __future__ import annotations

import logging
import math
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from pydantic import ValidationError
from torch import Tensor

from fednmap.flower import wire
from fednmap.flower.identity import Identities, KnownKeys
from fednmap.flower.plan import Point
from fednmap.flower.preflight import Site, mismatches, usual, versions
from fednmap.flower.settings import FederationSettings, client_name
from fednmap.names import InputError

POLL = 0.3  # seconds between looks for replies; Flower waits 1 s for one that is announced and not there yet
STALLED = 5.0  # seconds after which the other clients do not wait for a reply that is announced and not there
LEAST = 1.0  # seconds that a reply has to arrive whole, even after the deadline
GRACE = 2.0  # seconds that Flower keeps a message beyond our deadline, so that the deadline is ours to judge
STUCK = 300.0  # seconds that a node may be busy with a message of a server that was killed while sending it

HELLO = 60.0  # seconds that a new node has to say its name: it starts Python and torch for that

log = logging.getLogger("flwr")

Content = Callable[[str], RecordDict]


class _Poller(threading.Thread):
    """Pulls the replies to messages, one after another, into a queue; and what went wrong.

    A node that is killed while it sends leaves a reply that is announced and never there. Flower waits for its parts
    for minutes, in which no other reply would be read.

    left:  the messages that are still to be answered; others may be added.
    began: when the last look at all of them began.
    busy:  the message whose reply is being pulled, and since when.
    """

    def __init__(self, grid: Grid, ids: Iterable[str], found: queue.SimpleQueue[Message | BaseException]) -> None:
        super().__init__(daemon=True)
        self.grid, self.left, self.found = grid, dict.fromkeys(ids), found
        self.ended, self.began, self.busy = False, -math.inf, ("", math.inf)

    def run(self) -> None:
        try:
            while not self.ended:
                began = time.monotonic()
                for id in list(self.left):
                    self.busy = id, time.monotonic()
                    for reply in () if self.ended else self.grid.pull_messages([id]):
                        self.left.pop(reply.metadata.reply_to_message_id, None)
                        self.found.put(reply)
                self.busy, self.began = ("", math.inf), began
                time.sleep(POLL)
        except BaseException as error:
            self.found.put(error)

    def without_the_stalled(self) -> _Poller:
        """Another one for the rest, if a reply does not come; this one ends with it."""
        id, since = self.busy
        if time.monotonic() - since < STALLED:
            return self
        self.ended = True
        other = _Poller(self.grid, [each for each in list(self.left) if each != id], self.found)
        other.start()
        return other


class Mailbox:
    """Messages in flight; their replies are taken as they come, while it is open.

    waiting: the number of each message that is not answered -> the client that it was sent to.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid, self.waiting = grid, dict[str, str]()
        self._found: queue.SimpleQueue[Message | BaseException] = queue.SimpleQueue()
        self._poller = _Poller(grid, (), self._found)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._poller.ended = True

    def send(self, nodes: Mapping[str, int], kind: str, content: Content, seconds: float) -> int:
        """Send content(name) to the node of every client, to be answered within this time; its bytes."""
        messages = {name: Message(content(name), node, kind, ttl=seconds + GRACE) for name, node in nodes.items()}
        ids = list(self.grid.push_messages(list(messages.values()))) if messages else []
        new = {id: name for id, name in zip(ids, messages, strict=False) if id}
        self.waiting |= new
        self._poller.left |= dict.fromkeys(new)
        if self._poller.ident is None:  # it begins with something to look for
            self._poller.start()
        return sum(wire.wire_bytes(m.content) for m in messages.values())

    def forget(self, name: str) -> None:
        """Do not wait for this client's reply, and ignore it."""
        for id in [id for id, other in self.waiting.items() if other == name]:
            del self.waiting[id]
            self._poller.left.pop(id, None)

    def replies(self, end: float) -> Iterator[tuple[str, Message]]:
        """Replies as they come, while some are waited for: until `end`, and those that are there by then."""
        while self.waiting:
            try:
                reply = self._found.get(timeout=POLL)
            except queue.Empty:
                self._poller = self._poller.without_the_stalled()
                if self._poller.began >= end or time.monotonic() > end + STALLED + LEAST:
                    return
                continue
            if isinstance(reply, BaseException):
                raise reply
            name = self.waiting.pop(reply.metadata.reply_to_message_id, None)
            if name is not None:  # otherwise a second answer to the same question, or to one that is forgotten
                yield name, reply


@dataclass
class Exchange:
    """What came of asking: replies by client, and the bytes of the messages as they travel."""

    wire_down: int = 0
    wire_up: int = 0
    replies: dict[str, RecordDict] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    """Of clients that sent an error, or a reply that `read` left out."""

    def add(self, name: str, reply: Message) -> None:
        if reply.has_error():
            self.errors[name] = f"{reply.error.reason or reply.error.code}"[:300]
            log.warning("%s: error %s: %.300s", name, reply.error.code, reply.error.reason)
        else:
            self.replies[name] = reply.content
            self.wire_up += wire.wire_bytes(reply.content)

    def read(self, read: Callable[[RecordDict], Any]) -> dict[str, Any]:
        """read(reply) by client, without the replies for which it fails: whatever a stranger's message provokes."""
        good: dict[str, Any] = {}
        for name, reply in self.replies.items():
            try:
                good[name] = read(reply)
            except (ValueError, KeyError, TypeError, RuntimeError, IndexError) as error:
                self.errors[name] = f"{error}"[:200]
                log.warning("%s: reply left out: %s", name, self.errors[name])
        return good


class Roster:
    """The connected nodes, by the names of their clients, without unknown, repeated and unsuitable ones.

    Names are not checked where the settings name no file of keys. After `check_sites` a node that joins must have the
    data that most of the first ones had.
    """

    def __init__(self, grid: Grid, federation: FederationSettings) -> None:
        self.grid, self.names, self.deadline = grid, federation.names, federation.deadline
        file = federation.clients_file
        self.identities = None if file is None else Identities(file, federation.pin_on_first_use)
        self._keys = KnownKeys() if self.identities is None else self.identities.read()
        """Whose key was whose when nodes were asked last."""
        self._proven: dict[str, str] = {}
        """The fingerprints with which clients have proven who they are."""
        self.nodes: dict[str, int] = {}
        self._asked: set[int] = set()
        self._refused: set[int] = set()
        """Nodes whose key was not their client's; they are asked again when the file of keys changes."""
        self.expected: Site | None = None
        self._checked: dict[str, int] = {}
        """Sites that were asked what they have, and the node that answered: another one may have other data."""
        self.unfit: set[str] = set()

    def ask(self, nodes: Mapping[str, int], kind: str, content: Content, seconds: float = math.inf) -> Exchange:
        """Send content(name) to every client in `nodes`; the replies that arrive in time, by default the deadline."""
        seconds = min(seconds, self.deadline)
        with Mailbox(self.grid) as mail:
            result = Exchange(mail.send(nodes, kind, content, seconds))
            for name, reply in mail.replies(time.monotonic() + seconds):
                result.add(name, reply)
            for name in mail.waiting.values():
                log.warning("%s: no reply within %g s", name, seconds)
        return result

    def refresh(self) -> dict[str, int]:
        """Ask those who are new for their name; forget those who are gone. The nodes by name, in the fixed order."""
        online = set(self.grid.get_node_ids())
        self._asked &= online
        self.nodes = {name: node for name, node in self.nodes.items() if node in online}
        if self.identities is not None:
            self._check_keys(self.identities.read())
        new = {str(node): node for node in sorted(online - self._asked)}
        if new:
            nonces = {label: secrets.token_hex(32) for label in new}
            found = self.ask(new, MessageType.QUERY, lambda label: _hello(start=False, nonce=nonces[label]), HELLO)
            self._asked |= {new[label] for label in found.replies.keys() | found.errors.keys()}
            for label, content in found.replies.items():
                self._enter(new[label], content, nonces[label])
        self.nodes = {name: self.nodes[name] for name in self.names if name in self.nodes}
        return self.nodes if self.expected is None else self._fitting(self.expected)

    def wait(self, least: int) -> dict[str, int]:
        """Until everybody is connected, or the deadline has passed and `least` are."""
        end = time.monotonic() + self.deadline
        while len(nodes := self.refresh()) + len(self.unfit & self.nodes.keys()) < len(self.names) and (
            time.monotonic() < end or len(nodes) < least
        ):
            if time.monotonic() > end + max(self.deadline, STUCK):
                missing = ", ".join(name for name in self.names if name not in nodes)
                raise TimeoutError(f"{len(nodes)} clients connected, at least {least} are needed; missing: {missing}")
            time.sleep(0.5)
        return nodes

    def start(self, dtype: str) -> Tensor:
        """The first model, as the first client that is connected has it."""
        assert self.expected is not None
        name, node = next(iter(self.nodes.items()))
        found = self.ask({name: node}, MessageType.QUERY, lambda _: _hello(start=True), HELLO)
        if name not in found.replies:
            raise TimeoutError(f"{name} did not send the first model")
        like = torch.zeros((), dtype=getattr(torch, dtype)).expand(self.expected.dimension)  # takes no memory
        first: Tensor = wire.unpack(found.replies[name].get("start"), Point(like)).x
        return first

    def check_sites(self, least: int) -> dict[str, Site]:
        """Before the first round: what every site has. What does not fit together stops the run."""
        sites, mistakes = self._ask_sites(self.nodes)
        if sites:
            self.expected = usual(sites)
            mistakes |= mismatches(sites, self.expected)
        if mistakes:
            words = ". ".join(f"{name}: {what}" for name, what in mistakes.items())
            raise InputError(f"the sites do not fit together. {words}. Correct this and begin again")
        if len(sites) < least or not sites:
            silent = ", ".join(name for name in self.nodes if name not in sites)
            raise TimeoutError(f"{silent}: no word within {self.deadline:g} s on what data is there")
        self._checked = {name: self.nodes[name] for name in sites}
        for name, site in sites.items():
            log.info("%s: %d samples, torch %s, Python %s", name, site.samples, site.torch, site.python)
        log.info("server: torch %(torch)s, Python %(python)s", versions())
        return sites

    def _fitting(self, expected: Site) -> dict[str, int]:
        """The nodes without those that joined since and do not fit; these are named once."""
        new = {name: node for name, node in self.nodes.items() if self._checked.get(name) != node}
        if new:
            sites, mistakes = self._ask_sites(new)
            mistakes |= mismatches(sites, expected)
            for name, what in mistakes.items():
                log.warning("%s: left out: %s", name, what)
            self.unfit = (self.unfit - new.keys()) | mistakes.keys()
            self._checked |= {name: new[name] for name in sites.keys() | mistakes.keys()}
        fit = self._checked.items() & self.nodes.items()
        return {name: node for name, node in self.nodes.items() if (name, node) in fit and name not in self.unfit}

    def _ask_sites(self, nodes: Mapping[str, int]) -> tuple[dict[str, Site], dict[str, str]]:
        """What sites say of themselves, and why some cannot."""
        found = self.ask(nodes, f"{MessageType.QUERY}.site", lambda _: RecordDict())
        return found.read(_site), found.errors

    def _check_keys(self, now: KnownKeys) -> None:
        """Leave out who proved a key that counts no more; ask who was refused again if the keys have changed."""
        for name, node in list(self.nodes.items()):
            if now.clients.get(name) != self._proven[name]:
                log.warning("%s: left out: its key counts no more", name)
                self._refused.add(node)
                del self.nodes[name]
        if now != self._keys:
            self._asked -= self._refused
            self._keys, self._refused = now, set()

    def _enter(self, node: int, content: RecordDict, nonce: str) -> None:
        """A restarted node takes over its name: it registered last."""
        try:
            name = client_name(content["client"]["name"])
        except (KeyError, ValueError, TypeError) as error:
            log.warning("node %d left out: %.200s", node, error)
            return
        if name not in self.names:
            log.warning("node %d left out: %s is not a client of this federation", node, name)
            return
        if self.identities is not None:
            try:
                proof: Any = content.get("proof") or {}
                self._proven[name] = self.identities.check(name, node, nonce, proof)
            except InputError as error:
                log.warning("node %d refused: %s", node, error)
                self._refused.add(node)
                return
        if name in self.nodes:
            log.warning("%s: node %d takes over from node %d", name, node, self.nodes[name])
        self.nodes[name] = node


def _hello(**ask: Any) -> RecordDict:
    return RecordDict({"ask": ConfigRecord(ask)})


def _site(content: RecordDict) -> Site:
    record: Any = content["site"]
    if "failed" in record:
        raise InputError(f"its data cannot be loaded: {record['failed']!s:.200}")
    try:
        return Site.model_validate(dict(record))
    except ValidationError:
        raise InputError("its report cannot be read; install the same fednmap as the server's") from None
