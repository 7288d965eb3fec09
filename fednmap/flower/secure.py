"""Secure aggregation as messages: the four stages between the server's loop and the clients.

The server receives public keys, ciphertexts that it cannot read, masked numbers, and shares; of a client's vector it
sees nothing but its part in the sum. A client answers each stage of a ticket once, in order, and unmasks a round for
one list of survivors only.

Every sum has keys of its own. The first two stages of the next sum travel with the last two of this one, so that a sum
takes two exchanges; four where the next one is of other clients.
"""

from __future__ import annotations

import ast
import hashlib
import logging
import secrets as random
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict
from torch import Tensor

from fednmap.core import State
from fednmap.flower import masking, state_store, wire
from fednmap.flower.identity import Identities, prove
from fednmap.flower.masking import PublicKeys, Secrets
from fednmap.flower.roster import Content, Exchange, Roster
from fednmap.flower.settings import Node, Threshold, grid_for, threshold
from fednmap.flower.state_store import round_of
from fednmap.names import InputError
from fednmap.simulation.quantised import Levels, Quantised

STATE, NEXT = "secagg", "secagg-next"
BRIEF = 60.0  # seconds that the stages without computation may take at most
NOBODY = -1  # in place of a node's number: nobody can ask a node for such a signature when it says its name
STAGES = ("keys", "shares", "masked", "unmask")

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
    """What the clients have sent for a sum to come: public keys, and encrypted shares by sender and receiver."""

    ticket: str
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
        self.ready: Ready | None = None

    def settled(self, kind: str, t: int) -> list[str]:
        """Clients that must all be in the sum of round t: some of them may have unmasked it before; else nobody."""
        return state_store.settled(self._unmasked(kind), t)

    def _fits(self, ready: Ready, clients: set[int], least: int) -> bool:
        """Whether these clients can go on with what was prepared."""
        return clients <= ready.sealed.keys() and len(clients) >= max(least, self.threshold.summed(len(ready.keys)))

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
        """Ask `nodes` with messages content(name); the mean of what at least `least` of them computed.

        like: a vector as it is expected; its shapes count.
        """
        whole, left = Exchange(), dict(nodes)
        prepared: dict[int, Any] = {}
        expected = MaskedUplink(torch.zeros(quantised.length(like), dtype=getattr(torch, f"int{quantised.bits}")))
        numbers = {name: i for i, name in enumerate(self.roster.names)}

        def ask(
            stage: str,
            about: Callable[[int], dict[str, Any]],
            read: Callable[[RecordDict], Any],
            least: int,
            following: dict[str, Any] | None = None,
        ) -> dict[int, Any]:
            """One stage: what the clients that are left say, by number. Those who say nothing good are left no more.

            following: the order for the next sum, which travels with it; `prepared` then holds what they say to that.
            """
            vectors = stage == "masked"

            def order(name: str) -> RecordDict:
                own: dict[str, Any] = {STATE: ConfigRecord({"ticket": ticket, **about(numbers[name])})}
                if following is not None:
                    own[NEXT] = ConfigRecord({"ticket": upcoming, **following})
                return RecordDict({**content(name), **own} if vectors else own)

            kind_of_message, seconds = (kind, self.roster.deadline) if vectors else (f"train.{stage}", BRIEF)
            found = self.roster.ask(left, kind_of_message, order, seconds)
            whole.wire_down += found.wire_down
            whole.wire_up += found.wire_up
            if vectors:
                whole.replies, whole.errors = found.replies, found.errors
            good = found.read(read)
            if len(good) < least:
                raise InputError(f"{len(good)} good replies to stage {stage}, {least} needed")
            for name in left.keys() - good.keys():
                del left[name]
            prepared.clear()
            for name in left if following is not None else ():
                with suppress(ValueError, KeyError, TypeError):
                    said = RecordDict({STATE: found.replies[name][NEXT]})
                    prepared[numbers[name]] = _keys(said) if vectors else _boxes(said)
            return {numbers[name]: good[name] for name in sorted(left, key=numbers.__getitem__)}

        try:
            least = max(least, self.threshold.least)
            ready, self.ready, upcoming = self.ready, None, f"{ticket[:8]}-{random.token_hex(4)}"
            if ready is None or not self._fits(ready, {numbers[name] for name in left}, least):
                keys = ask("keys", lambda _: {}, _keys, least)
                dealt_by = max(least, self.threshold.summed(len(keys)))
                ready = Ready(ticket, keys, ask("shares", lambda _: _directory(keys), _boxes, dealt_by))
            keys, sealed = ready.keys, {numbers[name]: ready.sealed[numbers[name]] for name in left}
            enough, least = self.threshold.of(len(keys)), max(least, self.threshold.summed(len(keys)))

            def letters(i: int) -> dict[str, Any]:
                from_ = [j for j in sealed if j != i and i in sealed[j]]
                box = {"clients": from_, "sealed": [sealed[j][i] for j in from_]}
                return {"run": self.run, "keys": ready.ticket, **box}

            masked = ask("masked", letters, lambda reply: wire.unpack(reply.get("masked"), expected).levels, least, {})
            later = dict(prepared)
            names = [self.roster.names[i] for i in masked]
            words = "has been unmasked for {}; ask the same clients again"
            state_store.settle(self._unmasked(kind), round_of(ticket), names, words)
            lists = {"survivors": sorted(masked), "lost": sorted(sealed.keys() - masked.keys()), "keys": ready.ticket}
            told = ask("unmask", lambda _: lists, _boxes, enough, _directory(later))
            self.ready = Ready(upcoming, later, dict(prepared))
            dealt = {whose: [own[whose] for own in told.values() if whose in own] for whose in sealed}
            total = sum(v.numpy().view(f"u{v.itemsize}") for v in masked.values())
            levels = masking.uncover(total, masked, {i: keys[i] for i in sealed}, dealt, enough)
            return Sum(names, mean_of(masking.proved(levels), quantised, len(names), like), whole)
        except InputError as error:
            log.warning("secure sum of %s: %s", ticket, error)
            return Sum([], None, whole)


def flat(message: State, quantised: Quantised) -> Levels:
    """All vectors of a message as numbers of the ring, one after the other, with their check."""
    return masking.checked(np.concatenate([quantised.levels(v.reshape(-1)) for v in message]))


def mean_of(levels: Levels, quantised: Quantised, count: int, like: State) -> State:
    """The mean vector from the sum of `count` of them."""
    values = (quantised.sum(levels) / count).split([v.numel() for v in like])
    return type(like)(*(part.reshape(v.shape).to(v) for part, v in zip(values, like, strict=True)))


class SumClient:
    """A client in one attempt at a sum.

    content: of the message: what the server says of this sum, and of the next one.
    kind:    of the vector: of a round, or measurements.
    answers: what was answered before. Two messages at once would both find a stage due. A key that is dealt to two
             lists of clients could be told by one list and the seed by the other, which together uncover the vector;
             two vectors under the same masks tell their difference.
    """

    def __init__(self, node: Node, content: RecordDict, kind: str) -> None:
        self.node, self.state, self.kind, self.grid = node, node.context.state, kind, grid_for(node.config, kind)
        self.order: Any = content[STATE]
        self.next = content.get(NEXT)
        self.ticket = str(self.order.get("keys", self.order["ticket"]))
        self.me = node.federation.names.index(node.name)
        self.threshold = threshold(node.config, node.federation)
        self.answers = state_store.Answers(node.folder / "secagg" / node.name)

    def keys(self) -> RecordDict:
        """Stage 1: fresh public keys."""
        secrets, keys = masking.begin(self.ticket, self.me)
        if file := self.node.context.node_config.get("key"):
            proof = prove(Path(str(file)).expanduser(), _statement(self.ticket, keys), self.node.name, NOBODY)
            keys = keys._replace(**proof)
        self._keep(secrets)
        return RecordDict({STATE: ConfigRecord(keys._asdict())})

    def shares(self) -> RecordDict:
        """Stage 2: shares of the masks' secrets, encrypted for the other clients."""
        order, secrets = self.order, self._kept("shares")
        given = [order[name] for name in PublicKeys._fields if name in order]
        everybody = dict(zip(order["clients"], map(PublicKeys, *given), strict=True))
        if strangers := everybody.keys() - set(range(self.threshold.clients)):
            raise InputError(f"secagg: keys of client {min(strangers)}, of {self.threshold.clients}")
        if file := self.node.context.node_config.get("clients-file"):  # the server cannot put its own in their place
            known = Identities(Path(str(file)).expanduser())
            for i, keys in everybody.items():
                known.check(self.node.federation.names[i], NOBODY, _statement(self.ticket, keys), keys._asdict())
        secrets, sealed = masking.deal(secrets, everybody, self.threshold.of(len(everybody)))
        self.answers.once(self.ticket, "shares")  # what was refused above was not answered
        self._keep(secrets)
        return _boxed(sealed)

    def masked(self, message: State, noised: bool = False) -> RecordDict:
        """Stage 3: the vectors of a message, under masks.

        noised: two vectors of a round under the same noise would tell it.
        """
        assert self.grid is not None
        order, levels, secrets, sum = self.order, flat(message, self.grid), self._kept("masked"), self.order["ticket"]
        self.answers.once(self.ticket, "masked")
        if noised:
            digest, words = hashlib.sha256(levels.tobytes()).hexdigest(), "was answered with another vector under the"
            self.answers.settle(order["run"], "vectors", round_of(str(sum)), [digest], f"{words} same noise")
        letters = dict(zip(order["clients"], order["sealed"], strict=True))
        secrets, total = masking.mask(secrets, letters, self.threshold.of(len(secrets.keys)), levels)
        self._keep(secrets._replace(run=str(order["run"]), kind=self.kind, sum=str(sum)))
        sent = MaskedUplink(torch.from_numpy(total.view(f"i{total.dtype.itemsize}")))
        return self._with_next(RecordDict({"masked": wire.pack(sent)}), SumClient.keys)

    def unmask(self) -> RecordDict:
        """Stage 4: what the server needs to take the masks off the sum, and off nothing else.

        A second sum of the round over other clients is refused: the difference of the two would tell of single ones.
        """
        order, secrets = self.order, self._kept("unmask")
        self.answers.once(self.ticket, "unmask")
        least = self.threshold.summed(len(secrets.keys))
        after, told = masking.reveal(secrets, order["survivors"], order["lost"], least)
        words = "has been unmasked for the clients {}; a sum over others would tell single vectors"
        self.answers.settle(secrets.run, secrets.kind, round_of(secrets.sum), sorted(order["survivors"]), words)
        self._keep(after)
        return self._with_next(_boxed(told), SumClient.shares)

    def _with_next(self, reply: RecordDict, stage: Callable[[SumClient], RecordDict]) -> RecordDict:
        """The reply with the stage of the next sum that is asked for; a mistake there costs the next sum alone."""
        if self.next is not None:
            try:
                reply[NEXT] = stage(SumClient(self.node, RecordDict({STATE: self.next}), self.kind))[STATE]
            except InputError as error:
                log.warning("the next secure sum is not prepared: %s", error)
        return reply

    def _keep(self, secrets: Secrets) -> None:
        """In the node's memory, for this sum and the next; on no disk."""
        plain = tuple(secrets._replace(keys={i: tuple(keys) for i, keys in secrets.keys.items()}))  # type: ignore[misc]
        record: Any = self.state.get(STATE, {})
        known = {ticket: record[ticket] for ticket in record if ticket != secrets.ticket}
        self.state[STATE] = ConfigRecord(dict([*known.items(), (secrets.ticket, repr(plain))][-2:]))

    def _kept(self, stage: str) -> Secrets:
        """The secrets of this attempt. Its next stage must be `stage`: a second answer could tell what was hidden."""
        record: Any = self.state.get(STATE, {})
        secrets = Secrets(*ast.literal_eval(record[self.ticket])) if self.ticket in record else None
        ticket, before = self.ticket, STAGES[STAGES.index(stage) - 1]
        if secrets is None or (secrets.ticket, secrets.stage) != (ticket, before):
            raise InputError(
                f"secagg: stage {stage} of {ticket!s:.40} is not expected here; this client waits for the next round"
            )
        return secrets._replace(keys={i: PublicKeys(*keys) for i, keys in secrets.keys.items()})


GIVE = {"keys": SumClient.keys, "shares": SumClient.shares, "unmask": SumClient.unmask}
"""The stages in which no vector is sent."""


def _directory(keys: Mapping[int, PublicKeys]) -> dict[str, Any]:
    return {"clients": list(keys)} | {name: [getattr(k, name) for k in keys.values()] for name in PublicKeys._fields}


def _statement(ticket: str, keys: PublicKeys) -> str:
    return f"secure sum {ticket}: {keys.mask.hex()} {keys.share.hex()}"


def _boxed(data: Mapping[int, bytes]) -> RecordDict:
    return RecordDict({STATE: ConfigRecord({"clients": list(data), "data": list(data.values())})})


def _keys(reply: RecordDict) -> PublicKeys:
    record: Any = reply[STATE]
    return PublicKeys(*(_bytes(record[name]) for name in PublicKeys._fields))


def _boxes(reply: RecordDict) -> dict[int, bytes]:
    record: Any = reply[STATE]
    return {int(i): _bytes(data) for i, data in zip(record["clients"], record["data"], strict=True)}


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes) or len(value) > 4096:
        raise InputError("expected the bytes of a key or share")
    return value
