"""Secure aggregation as messages: the four stages between the server's loop and the clients.

The server receives public keys, ciphertexts that it cannot read, masked numbers, and shares; of a client's vector it
sees nothing but its part in the sum. A client answers each stage of a sum once, in order, and unmasks a round for one
list of survivors only.

Every sum has its own keys. The first two stages prepare those of several sums at a time. A sum then takes two
exchanges: masked vectors of all clients, and shares of as many survivors as suffice to unmask their sum.
"""

from __future__ import annotations

import ast
import hashlib
import logging
import secrets as random
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict
from torch import Tensor

from fednmap.core import State
from fednmap.flower import masking, state_store, wire
from fednmap.flower.identity import Identities, prove
from fednmap.flower.masking import KEY, SEALED, PublicKeys, Secrets, Shares
from fednmap.flower.roster import Content, Exchange, Roster
from fednmap.flower.settings import Node, Threshold, grid_for, threshold
from fednmap.flower.state_store import round_of
from fednmap.names import InputError
from fednmap.simulation.quantised import Levels, Quantised

STATE = "secagg"
PREPARED = 16  # sums that are prepared at a time
BRIEF = 60.0  # seconds that the stages without computation may take at most
NOBODY = -1  # in place of a node's number: nobody can ask a node for such a signature when it says its name

log = logging.getLogger("flwr")


class MaskedUplink(NamedTuple):
    """Levels under masks, on their way."""

    levels: Tensor


class Sum(NamedTuple):
    """Whose vectors are in the sum, their mean, and what travelled."""

    names: list[str]
    mean: State
    """None where there is no sum."""
    found: Exchange
    """Replies of the stage in which the vectors came; bytes of all stages."""


class Ready(NamedTuple):
    """What the clients have sent for the sums to come: public keys, and encrypted shares by sender and receiver."""

    ticket: str
    sums: int
    keys: dict[int, PublicKeys]
    sealed: dict[int, dict[int, bytes]]


class SecureSum:
    """The server's side: sums of vectors that it does not see.

    threshold: clients who must stay to the end.
    run:       under which clients keep their states.
    folder:    where it is kept who is in the sum of a round whose unmasking has begun.
    """

    def __init__(self, roster: Roster, threshold: Threshold, run: str, folder: Path) -> None:
        self.roster, self.threshold, self.run, self.folder = roster, threshold, run, folder
        self.numbers = {name: i for i, name in enumerate(roster.names)}
        self.ready: Ready | None = None
        self.used = 0

    def settled(self, kind: str, t: int) -> list[str]:
        """Return the clients that must all be in the sum of round t, because some of them may have unmasked it."""
        return state_store.settled(self._unmasked(kind), t)

    def _unmasked(self, kind: str) -> Path:
        return self.folder / f"unmasked-{kind}.json"

    def __call__(
        self,
        nodes: Mapping[str, int],
        kind: str,
        content: Content,
        ticket: str,
        like: State,
        quantised: Quantised,
        least: int,
    ) -> Sum:
        """Ask `nodes` with messages content(name); return the mean of what at least `least` of them computed.

        like: a vector as it is expected; its shapes count.
        """
        whole, spent = Exchange(), dict[str, float]()

        def ask(
            stage: str,
            clients: Iterable[int],
            about: Callable[[int], dict[str, Any]],
            read: Callable[[RecordDict], Any],
        ) -> dict[int, Any]:
            """Return what the good replies to a stage say, by the clients' numbers, in the order of their arrival."""
            vectors = stage == "masked"

            def order(name: str) -> RecordDict:
                own = ConfigRecord(about(self.numbers[name]))
                return RecordDict({**(content(name) if vectors else {}), STATE: own})

            some = {name: nodes[name] for name in (self.roster.names[i] for i in clients)}
            kind_of_message, seconds = (kind, self.roster.deadline) if vectors else (f"train.{stage}", BRIEF)
            began = time.monotonic()
            found = self.roster.ask(some, kind_of_message, order, seconds)
            spent[stage] = spent.get(stage, 0.0) + time.monotonic() - began
            whole.wire_down += found.wire_down
            whole.wire_up += found.wire_up
            if vectors:
                whole.replies, whole.errors = found.replies, found.errors
            return {self.numbers[name]: value for name, value in found.read(read).items()}

        try:
            clients = {self.numbers[name] for name in nodes}
            least = max(least, self.threshold.least)
            ready = self.ready
            if ready is None or self.used == ready.sums or not self._fits(ready, clients, least):
                ready, self.used = self._prepare(ask, clients, f"{ticket[:8]}-{random.token_hex(4)}", least), 0
            # whoever is left out of this sum is asked for keys before the next one
            self.ready, k, self.used = None, self.used, self.used + 1
            sealed = {i: ready.sealed[i] for i in sorted(clients & ready.sealed.keys())}
            enough, least = self.threshold.of(len(ready.keys)), max(least, self.threshold.summed(len(ready.keys)))
            about = {"ticket": ticket, "run": self.run, "keys": ready.ticket, "sum": k}

            def letters(i: int) -> dict[str, Any]:
                own = {j: boxes[i][k * SEALED : (k + 1) * SEALED] for j, boxes in sealed.items() if i in boxes}
                return about | {"clients": list(own), "sealed": list(own.values())}

            expected = MaskedUplink(torch.zeros(quantised.length(like), dtype=getattr(torch, f"int{quantised.bits}")))
            masked = ask("masked", sealed, letters, lambda reply: wire.unpack(reply.get("masked"), expected).levels)
            _check_enough("masked", masked, least)
            names = [self.roster.names[i] for i in sorted(masked)]
            words = "has been unmasked for {}; ask the same clients again"
            state_store.settle(self._unmasked(kind), round_of(ticket), names, words)
            lists = about | {"survivors": sorted(masked), "lost": sorted(sealed.keys() - masked.keys())}
            told, waiting = dict[int, dict[int, bytes]](), list(masked)
            while waiting and (missing := enough - len(told)) > 0:  # those who were fastest; others if these fail
                told |= ask("unmask", waiting[:missing], lambda _: lists, _boxes)
                waiting = waiting[missing:]
            _check_enough("unmask", told, enough)
            dealt = {whose: [own[whose] for own in told.values() if whose in own] for whose in sealed}
            total = sum(v.numpy().view(f"u{v.itemsize}") for v in masked.values())
            public = {i: ready.keys[i].mask[k * KEY : (k + 1) * KEY] for i in sealed}
            levels = masking.proved(masking.uncover(total, masked, public, dealt, enough))
            self.ready = ready if masked.keys() == clients else None
            log.info("secure sum of %s: %s", ticket, ", ".join(f"{stage} {v:.2f} s" for stage, v in spent.items()))
            return Sum(names, mean_of(levels, quantised, len(names), like), whole)
        except InputError as error:
            log.warning("secure sum of %s: %s", ticket, error)
            return Sum([], None, whole)

    def _fits(self, ready: Ready, clients: set[int], least: int) -> bool:
        """Return whether these clients can continue with what was prepared."""
        return clients <= ready.sealed.keys() and len(clients) >= max(least, self.threshold.summed(len(ready.keys)))

    def _prepare(self, ask: Callable[..., dict[int, Any]], clients: set[int], ticket: str, least: int) -> Ready:
        """Ask for keys and encrypted shares: for several sums if all clients are asked, else others are drawn next."""
        sums = PREPARED if len(clients) == len(self.numbers) else 1
        order = {"ticket": ticket, "sums": sums}
        keys = ask("keys", clients, lambda _: order, _keys)
        _check_enough("keys", keys, least)
        order |= {"clients": list(keys)} | {n: [getattr(v, n) for v in keys.values()] for n in PublicKeys._fields}
        sealed = ask("shares", keys, lambda _: order, lambda reply: _boxes(reply, sums * SEALED))
        _check_enough("shares", sealed, max(least, self.threshold.summed(len(keys))))
        return Ready(ticket, sums, keys, sealed)


def _check_enough(stage: str, good: Mapping[int, Any], least: int) -> None:
    if len(good) < least:
        raise InputError(f"{len(good)} good replies to stage {stage}, {least} needed")


def mean_of(levels: Levels, quantised: Quantised, count: int, like: State) -> State:
    """Return the mean vector from the sum of `count` of them."""
    values = (quantised.sum(levels) / count).split([v.numel() for v in like])
    return type(like)(*(part.reshape(v.shape).to(v) for part, v in zip(values, like, strict=True)))


class Opened(NamedTuple):
    """What a client keeps of sum k, to which it has sent a vector: what that belongs to, and shares of all clients."""

    ticket: str
    k: int
    run: str
    kind: str
    sum: str
    shares: Shares


class SumClient:
    """A client in one stage of a sum.

    content: of the message: what the server says of this sum.
    kind:    of the vector: of a round, or measurements.
    answers: what was answered before. Two concurrent messages would both pass as the expected stage. Were secrets dealt
             to two lists of clients, one list could reveal the key and the other the seed, which together uncover the
             vector; two vectors under the same masks reveal their difference.
    """

    def __init__(self, node: Node, content: RecordDict, kind: str) -> None:
        self.node, self.state, self.kind, self.grid = node, node.context.state, kind, grid_for(node.config, kind)
        self.order: Any = content[STATE]
        self.ticket = str(self.order.get("keys", self.order["ticket"]))
        self.me = node.federation.names.index(node.name)
        self.threshold = threshold(node.config, node.federation)
        self.answers = state_store.Answers(node.folder / "secagg" / node.name)

    def keys(self) -> RecordDict:
        """Stage 1: return fresh public keys. What was prepared before is forgotten."""
        if not 1 <= (sums := int(self.order["sums"])) <= PREPARED:
            raise InputError(f"secagg: keys of {sums} sums, of 1 to {PREPARED}")
        secrets, keys = masking.begin(self.ticket, self.me, sums)
        if file := self.node.context.node_config.get("key"):
            proof = prove(Path(str(file)).expanduser(), _statement(self.ticket, keys), self.node.name, NOBODY)
            keys = keys._replace(**proof)
        self._keep(secrets)
        return RecordDict({STATE: ConfigRecord(keys._asdict())})

    def shares(self) -> RecordDict:
        """Stage 2: return shares of the masks' secrets, encrypted for the other clients."""
        order, secrets = self.order, self._secrets()
        given = [order[name] for name in PublicKeys._fields if name in order]
        everybody = dict(zip(order["clients"], map(PublicKeys, *given), strict=True))
        if strangers := everybody.keys() - set(range(self.threshold.clients)):
            raise InputError(f"secagg: keys of client {min(strangers)}, of {self.threshold.clients}")
        if file := self.node.context.node_config.get("clients-file"):  # the server cannot put its own in their place
            known = Identities(Path(str(file)).expanduser())
            for i, keys in everybody.items():
                known.check(self.node.federation.names[i], NOBODY, _statement(self.ticket, keys), keys._asdict())
        dealt, sealed = masking.deal(secrets, everybody, self.threshold.of(len(everybody)))
        self._check(not secrets.keys, "shares")
        self.answers.once(self.ticket, "shares")  # what was refused above was not answered
        self._keep(dealt)
        return _boxed(sealed)

    def masked(self, message: State, noised: bool = False) -> RecordDict:
        """Stage 3: return the vectors of a message, under masks.

        noised: two vectors of a round under the same noise would reveal it.
        """
        assert self.grid is not None
        order, secrets, k = self.order, self._secrets(), int(self.order["sum"])
        levels = masking.checked(np.concatenate([self.grid.levels(v.reshape(-1)) for v in message]))
        self._check(secrets.is_left(k), "masked")
        self.answers.once(self.ticket, f"masked-{k}")
        if noised:
            digest, words = hashlib.sha256(levels.tobytes()).hexdigest(), "was answered with another vector under the"
            self.answers.settle(
                order["run"], "vectors", round_of(str(order["ticket"])), [digest], f"{words} same noise"
            )
        letters = dict(zip(order["clients"], order["sealed"], strict=True))
        secrets, shares, total = masking.mask(secrets, k, letters, self.threshold.of(len(secrets.keys)), levels)
        belongs = str(order["run"]), self.kind, str(order["ticket"])
        self._keep(secrets, Opened(self.ticket, k, *belongs, shares))
        sent = MaskedUplink(torch.from_numpy(total.view(f"i{total.dtype.itemsize}")))
        return RecordDict({"masked": wire.pack(sent)})

    def unmask(self) -> RecordDict:
        """Stage 4: return what the server needs to take the masks off the sum, and off nothing else.

        A second sum of the round over other clients is refused: the difference of the two would reveal single ones.
        """
        order, secrets, k = self.order, self._secrets(), int(self.order["sum"])
        record: Any = self.state[STATE]
        self._check("opened" in record, "unmask")
        opened = Opened(*ast.literal_eval(record["opened"]))
        self._check((opened.ticket, opened.k) == (self.ticket, k), "unmask")
        self.answers.once(self.ticket, f"unmask-{k}")
        least = self.threshold.summed(len(secrets.keys))
        told = masking.reveal(opened.shares, self.me, order["survivors"], order["lost"], least)
        words = "has been unmasked for the clients {}; a sum over others would reveal single vectors"
        self.answers.settle(opened.run, opened.kind, round_of(opened.sum), sorted(order["survivors"]), words)
        self._keep(secrets)
        return _boxed(told)

    def _keep(self, secrets: Secrets, opened: Opened | None = None) -> None:
        """Keep these in the node's memory alone."""
        plain = secrets._replace(keys={i: tuple(keys) for i, keys in secrets.keys.items()})  # type: ignore[misc]
        both = {"secrets": plain} | ({"opened": opened} if opened is not None else {})
        self.state[STATE] = ConfigRecord({name: repr(tuple(each)) for name, each in both.items()})

    def _secrets(self) -> Secrets:
        """Return the secrets of this preparation, of which those of answered stages are left out."""
        record: Any = self.state.get(STATE, {})
        found = ast.literal_eval(record["secrets"]) if "secrets" in record else ("",)
        self._check(found[0] == self.ticket, self.kind)
        secrets = Secrets(*found)
        return secrets._replace(keys={i: PublicKeys(*keys) for i, keys in secrets.keys.items()})

    def _check(self, due: bool, stage: str) -> None:
        """Refuse a stage that is not the next one: a second answer could reveal what was hidden."""
        if not due:
            raise InputError(
                f"secagg: {stage} of {self.ticket:.40} is not expected here; this client waits for the next round"
            )


GIVE = {"keys": SumClient.keys, "shares": SumClient.shares, "unmask": SumClient.unmask}
"""The stages in which no vector is sent."""


def _statement(ticket: str, keys: PublicKeys) -> str:
    return f"secure sum {ticket}: {keys.mask.hex()} {keys.share.hex()}"


def _boxed(data: Mapping[int, bytes]) -> RecordDict:
    return RecordDict({STATE: ConfigRecord({"clients": list(data), "data": list(data.values())})})


def _keys(reply: RecordDict) -> PublicKeys:
    record: Any = reply[STATE]
    return PublicKeys(*(_bytes(record[name]) for name in PublicKeys._fields))


def _boxes(reply: RecordDict, size: int | None = None) -> dict[int, bytes]:
    record: Any = reply[STATE]
    found = {int(i): _bytes(data) for i, data in zip(record["clients"], record["data"], strict=True)}
    if size is not None and any(len(data) != size for data in found.values()):
        raise InputError(f"expected shares of {size} bytes for each client")
    return found


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes) or len(value) > 4096:
        raise InputError("expected the bytes of a key or share")
    return value
