"""Which node speaks for which client, and asking several of them at once."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.superlink.grid import http_grid
from torch import Tensor

from fednmap.flower import wire
from fednmap.flower.identity import Identities, challenge
from fednmap.flower.settings import Federation, client_name
from fednmap.names import InputError

POLL = 0.1  # seconds between looks for replies
GRACE = 2.0  # seconds that Flower keeps a message beyond our deadline, so that the deadline is ours to judge
STUCK = 300.0  # seconds that a node may be busy with a message of a server that was killed while sending it

HELLO = 60.0  # seconds that a new node has to say its name: it starts Python and torch for that

log = logging.getLogger("flwr")

Content = Callable[[str], RecordDict]


def exchange(grid: Grid, nodes: Mapping[str, int], kind: str, content: Content, deadline: float) -> Exchange:
    """Send content(name) to every client in `nodes`; the replies that arrive within `deadline` seconds."""
    messages = {name: Message(content(name), node, kind, ttl=deadline + GRACE) for name, node in nodes.items()}
    result = Exchange(sum(wire.wire_bytes(m) for m in messages.values()))
    ids = list(grid.push_messages(list(messages.values()))) if messages else []
    open_ids = {id: name for id, name in zip(ids, messages, strict=False) if id}
    end = _Pulls.until = time.monotonic() + deadline
    late = False
    while open_ids and not late:
        late = time.monotonic() >= end  # who waited behind a reply that never came whole is heard all the same
        for reply in grid.pull_messages(list(open_ids)):
            name = open_ids.pop(reply.metadata.reply_to_message_id, None)
            if name is not None:  # otherwise a second answer to the same question
                result.add(name, reply)
        if open_ids:
            time.sleep(POLL)
    for name in open_ids.values():
        log.warning("%s: no reply within %g s", name, deadline)
    return result


class _Pulls:
    """How long a reply may take to arrive whole, once it was announced."""

    until = math.inf
    LEAST = 1.0  # seconds, also after the deadline


def end_pulls_with_the_deadline() -> None:
    """A node that is killed while it sends leaves a reply that is announced and never there; Flower waits for minutes.

    Replies are taken one after another, so that everybody else's would wait too.
    """

    def pull(object_ids: list[str], pull_object_fn: Callable[[str], bytes]) -> dict[str, bytes]:
        left = max(_Pulls.LEAST, _Pulls.until - time.monotonic())
        own, most = POLL, _Pulls.LEAST  # between two tries; Flower's are 1 s and 10 s
        return pull_objects(object_ids, pull_object_fn, max_time=left, initial_backoff=own, backoff_cap=most)

    http_grid.pull_objects = pull  # type: ignore[attr-defined, assignment]


class Exchange:
    """What came of asking: replies by client, who answered at all, and the bytes of the messages as they travel."""

    def __init__(self, wire_down: int) -> None:
        self.replies: dict[str, RecordDict] = {}
        self.heard: set[str] = set()
        self.errors: dict[str, str] = {}
        """Of clients that sent an error, or a reply that `read` left out."""
        self.wire_down, self.wire_up = wire_down, 0

    def take(self, other: Exchange) -> None:
        """Count the bytes of another one too."""
        self.wire_down += other.wire_down
        self.wire_up += other.wire_up

    def add(self, name: str, reply: Message) -> None:
        self.heard.add(name)
        if reply.has_error():
            self.errors[name] = f"{reply.error.reason or reply.error.code}"[:300]
            log.warning("%s: error %s: %.300s", name, reply.error.code, reply.error.reason)
        else:
            self.replies[name] = reply.content
            self.wire_up += wire.wire_bytes(reply)

    def read(self, read: Callable[[RecordDict], Any], what: str = "reply") -> dict[str, Any]:
        """read(reply) by client, without the replies for which it fails: whatever a stranger's message provokes."""
        good: dict[str, Any] = {}
        for name, reply in self.replies.items():
            try:
                good[name] = read(reply)
            except (ValueError, KeyError, TypeError, RuntimeError, IndexError) as error:
                self.errors[name] = f"{error}"[:200]
                log.warning("%s: %s left out: %s", name, what, self.errors[name])
        return good


class Roster:
    """The connected nodes, each known by the name of its client; strangers and doubles are left out."""

    def __init__(
        self, grid: Grid, names: tuple[str, ...], patience: float, identities: Identities | None = None
    ) -> None:
        self.grid, self.names, self.patience, self.identities = grid, names, patience, identities
        self._proven: dict[str, str] = {}
        """The fingerprints with which clients have proven who they are."""
        self._known = None if identities is None else identities.read()
        """Whose key was whose when nodes were asked last."""
        self.nodes: dict[str, int] = {}
        self._asked: set[int] = set()
        self._refused: set[int] = set()
        """Nodes whose key was not their client's; they are asked again when it is written anew whose key is whose."""

    @classmethod
    def of(cls, grid: Grid, federation: Federation) -> Roster:
        """Names are believed where the settings name no file of keys."""
        file, patience = federation.clients_file, min(HELLO, federation.deadline)
        keys = None if file is None else Identities(file, federation.pin_on_first_use)
        return cls(grid, federation.names, patience, keys)

    def refresh(self) -> dict[str, int]:
        """Ask those who are new for their name; forget those who are gone. The nodes by name, in the fixed order."""
        online = set(self.grid.get_node_ids())
        self._asked &= online
        self.nodes = {name: node for name, node in self.nodes.items() if node in online}
        known = None if self.identities is None else self.identities.read()
        for name in list(self.nodes):
            if known is not None and known[0].get(name) != self._proven[name]:  # it may have been revoked since
                log.warning("%s: left out: its key counts no more", name)
                self._refused.add(self.nodes.pop(name))
        if known != self._known:  # who was refused may be welcome now
            self._asked -= self._refused
            self._known, self._refused = known, set()
        new = {str(node): node for node in sorted(online - self._asked)}
        if new:
            nonces = {label: challenge() for label in new}

            def ask(label: str) -> RecordDict:
                return RecordDict({"ask": ConfigRecord({"start": False, "nonce": nonces[label]})})

            found = exchange(self.grid, new, MessageType.QUERY, ask, self.patience)
            self._asked |= {new[label] for label in found.heard}
            for label, content in found.replies.items():
                self._enter(new[label], content, nonces[label])
        self.nodes = {name: self.nodes[name] for name in self.names if name in self.nodes}
        return self.nodes

    def wait(self, least: int, seconds: float) -> dict[str, int]:
        """Until everybody is connected, or `seconds` have passed and `least` are."""
        end = time.monotonic() + seconds
        while len(self.refresh()) < len(self.names) and (time.monotonic() < end or len(self.nodes) < least):
            if time.monotonic() > end + max(seconds, STUCK):
                missing = ", ".join(name for name in self.names if name not in self.nodes)
                raise TimeoutError(
                    f"{len(self.nodes)} clients connected, at least {least} are needed; missing: {missing}"
                )
            time.sleep(0.5)
        return self.nodes

    def start(self, dtype: str) -> Tensor:
        """The first model, as the first client that is connected has it."""
        ask = ConfigRecord({"start": True})
        name = next(iter(self.nodes))
        node = {name: self.nodes[name]}
        found = exchange(self.grid, node, MessageType.QUERY, lambda _: RecordDict({"ask": ask}), self.patience)
        if name not in found.replies:
            raise TimeoutError(f"{name} did not send the first model")
        return wire.first_vector(found.replies[name]["start"], dtype)

    def _enter(self, node: int, content: RecordDict, nonce: str) -> None:
        """A restarted node takes over its name: the server heard of it last."""
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
