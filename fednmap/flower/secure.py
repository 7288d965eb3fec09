"""Secure aggregation as messages: the four stages between the server's loop and the clients.

The server receives public keys, ciphertexts that it cannot read, masked numbers, and shares; of a client's vector it
sees nothing but its part in the sum. A client answers each stage of a ticket once, in order, and unmasks a round for
one list of survivors only.
"""

from __future__ import annotations

import ast
import hashlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict
from torch import Tensor

from fednmap.core import State
from fednmap.flower import ledger, masking, wire
from fednmap.flower.ledger import round_of
from fednmap.flower.masking import PublicKeys, Secrets
from fednmap.flower.roster import Content, Exchange, Roster
from fednmap.flower.settings import Node, Threshold, grid_for, threshold
from fednmap.names import InputError
from fednmap.simulation.quantised import Levels, Quantised

STATE = "secagg"
BRIEF = 60.0  # seconds that the stages without computation may take at most
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


class SecureSum:
    """The server's side: sums of vectors that it does not see.

    threshold: clients who must stay to the end.
    run:       under which clients keep their states.
    folder:    where it is kept who is in the sum of a round whose unmasking has begun.
    """

    def __init__(self, roster: Roster, threshold: Threshold, run: str, folder: Path) -> None:
        self.roster, self.threshold, self.run, self.folder = roster, threshold, run, folder

    def settled(self, kind: str, t: int) -> list[str]:
        """Clients that must all be in the sum of round t: some of them may have unmasked it before; else nobody."""
        return ledger.settled(self._unmasked(kind), t)

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
        expected = MaskedUplink(torch.zeros(quantised.length(like), dtype=getattr(torch, f"int{quantised.bits}")))
        numbers = {name: i for i, name in enumerate(self.roster.names)}

        def ask(
            stage: str, about: Callable[[int], dict[str, Any]], read: Callable[[RecordDict], Any], least: int
        ) -> dict[int, Any]:
            """One stage: what the clients that are left say, by number. Those who say nothing good are left no more."""
            vectors = stage == "masked"

            def order(name: str) -> RecordDict:
                own: dict[str, Any] = {STATE: ConfigRecord({"ticket": ticket, **about(numbers[name])})}
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
            return {numbers[name]: good[name] for name in sorted(left, key=numbers.__getitem__)}

        try:
            least = max(least, self.threshold.least)
            keys = ask("keys", lambda i: {"client": i}, _keys, least)
            enough, least = self.threshold.of(len(keys)), max(least, self.threshold.summed(len(keys)))
            masks, shares = zip(*keys.values(), strict=True)
            everybody = {"clients": list(keys), "mask": list(masks), "share": list(shares)}
            sealed = ask("shares", lambda _: everybody, _boxes, least)

            def letters(i: int) -> dict[str, Any]:
                from_ = [j for j in sealed if j != i and i in sealed[j]]
                return {"run": self.run, "clients": from_, "sealed": [sealed[j][i] for j in from_]}

            masked = ask("masked", letters, lambda reply: wire.unpack(reply.get("masked"), expected).levels, least)
            names = [self.roster.names[i] for i in masked]
            words = "has been unmasked for {}; ask the same clients again"
            ledger.settle(self._unmasked(kind), round_of(ticket), names, words)
            lists = {"survivors": sorted(masked), "lost": sorted(sealed.keys() - masked.keys())}
            told = ask("unmask", lambda _: lists, _boxes, enough)
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

    order:   what the server says.
    kind:    of the vector: of a round, or measurements.
    answers: what was answered before. Two messages at once would both find a stage due. A key that is dealt to two
             lists of clients could be told by one list and the seed by the other, which together uncover the vector;
             two vectors under the same masks tell their difference.
    """

    def __init__(self, node: Node, order: Any, kind: str) -> None:
        self.state, self.order, self.kind, self.grid = node.context.state, order, kind, grid_for(node.config, kind)
        self.me = node.federation.names.index(node.name)
        self.threshold = threshold(node.config, node.federation)
        self.answers = ledger.Answers(node.folder / "secagg" / node.name)

    def keys(self) -> RecordDict:
        """Stage 1: fresh public keys."""
        secrets, keys = masking.begin(str(self.order["ticket"]), self.me)
        self._keep(secrets)
        return RecordDict({STATE: ConfigRecord(keys._asdict())})

    def shares(self) -> RecordDict:
        """Stage 2: shares of the masks' secrets, encrypted for the other clients."""
        order, secrets = self.order, self._kept("shares")
        everybody = dict(zip(order["clients"], map(PublicKeys, order["mask"], order["share"]), strict=True))
        if strangers := everybody.keys() - set(range(self.threshold.clients)):
            raise InputError(f"secagg: keys of client {min(strangers)}, of {self.threshold.clients}")
        secrets, sealed = masking.deal(secrets, everybody, self.threshold.of(len(everybody)))
        self.answers.once(order["ticket"], "shares")  # what was refused above was not answered
        self._keep(secrets)
        return _boxed(sealed)

    def masked(self, message: State, noised: bool = False) -> RecordDict:
        """Stage 3: the vectors of a message, under masks.

        noised: two vectors of a round under the same noise would tell it.
        """
        assert self.grid is not None
        order, levels, secrets = self.order, flat(message, self.grid), self._kept("masked")
        self.answers.once(order["ticket"], "masked")
        if noised:
            digest, words = hashlib.sha256(levels.tobytes()).hexdigest(), "was answered with another vector under the"
            self.answers.settle(order["run"], "vectors", round_of(secrets.ticket), [digest], f"{words} same noise")
        letters = dict(zip(order["clients"], order["sealed"], strict=True))
        secrets, total = masking.mask(secrets, letters, self.threshold.of(len(secrets.keys)), levels)
        self._keep(secrets._replace(run=str(order["run"]), kind=self.kind))
        return RecordDict({"masked": wire.pack(MaskedUplink(torch.from_numpy(total.view(f"i{total.dtype.itemsize}"))))})

    def unmask(self) -> RecordDict:
        """Stage 4: what the server needs to take the masks off the sum, and off nothing else.

        A second sum of the round over other clients is refused: the difference of the two would tell of single ones.
        """
        order, secrets = self.order, self._kept("unmask")
        self.answers.once(order["ticket"], "unmask")
        least = self.threshold.summed(len(secrets.keys))
        after, told = masking.reveal(secrets, order["survivors"], order["lost"], least)
        words = "has been unmasked for the clients {}; a sum over others would tell single vectors"
        self.answers.settle(secrets.run, secrets.kind, round_of(secrets.ticket), sorted(order["survivors"]), words)
        self._keep(after)
        return _boxed(told)

    def _keep(self, secrets: Secrets) -> None:
        """In the node's memory; on no disk."""
        plain = tuple(secrets._replace(keys={i: tuple(keys) for i, keys in secrets.keys.items()}))  # type: ignore[misc]
        self.state[STATE] = ConfigRecord({"secrets": repr(plain)})

    def _kept(self, stage: str) -> Secrets:
        """The secrets of this attempt. Its next stage must be `stage`: a second answer could tell what was hidden."""
        record: Any = self.state.get(STATE)
        secrets = Secrets(*ast.literal_eval(record["secrets"])) if record else None
        ticket, before = self.order["ticket"], STAGES[STAGES.index(stage) - 1]
        if secrets is None or (secrets.ticket, secrets.stage) != (ticket, before):
            raise InputError(
                f"secagg: stage {stage} of {ticket!s:.40} is not expected here; this client waits for the next round"
            )
        return secrets._replace(keys={i: PublicKeys(*keys) for i, keys in secrets.keys.items()})


GIVE = {"keys": SumClient.keys, "shares": SumClient.shares, "unmask": SumClient.unmask}
"""The stages in which no vector is sent."""


def _boxed(data: Mapping[int, bytes]) -> RecordDict:
    return RecordDict({STATE: ConfigRecord({"clients": list(data), "data": list(data.values())})})


def _keys(reply: RecordDict) -> PublicKeys:
    record: Any = reply[STATE]
    return PublicKeys(_bytes(record["mask"]), _bytes(record["share"]))


def _boxes(reply: RecordDict) -> dict[int, bytes]:
    record: Any = reply[STATE]
    return {int(i): _bytes(data) for i, data in zip(record["clients"], record["data"], strict=True)}


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes) or len(value) > 4096:
        raise InputError("expected the bytes of a key or share")
    return value
