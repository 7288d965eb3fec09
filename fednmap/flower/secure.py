"""Secure aggregation as messages: the four stages between the server's loop and the clients.

The server receives public keys, ciphertexts that it cannot read, masked numbers, and shares; of a client's vector it
sees nothing but its part in the sum. A client answers each stage of a ticket once, in order, and unmasks a round for
one list of survivors only.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from fednmap.core import State
from fednmap.flower import masking, wire
from fednmap.flower.ledger import Answers, Settled
from fednmap.flower.masking import Keys, Secrets
from fednmap.flower.roster import Content, Exchange, exchange
from fednmap.flower.settings import Threshold
from fednmap.names import InputError
from fednmap.simulation.quantised import SIGNED, WORDS, Levels, Quantised

STATE = "secagg"
BRIEF = 60.0  # seconds that the stages without computation may take at most
FIELDS = ("ticket", "stage", "me", "mask", "share", "seed", "run", "kind")
STAGES = ("keys", "shares", "masked", "unmask")
BAD = (ValueError, KeyError, TypeError, RuntimeError, IndexError)

log = logging.getLogger("flwr")


class Masked(NamedTuple):
    """Levels under masks, on their way."""

    levels: Tensor


class Sum(NamedTuple):
    """Whose vectors are in the sum, their mean, and what travelled."""

    names: list[str]
    mean: State
    """None where there is no sum."""
    found: Exchange
    """Replies of the stage in which the masked vectors came; bytes of all four."""


class SecureSum:
    """The server's side: sums of vectors that it does not see.

    threshold: clients who must stay to the end.
    run:       under which clients keep their states.
    folder:    where it is kept who is in the sum of a round whose unmasking has begun.
    """

    def __init__(
        self, grid: Grid, names: tuple[str, ...], threshold: Threshold, deadline: float, run: str, folder: Path
    ) -> None:
        self.grid, self.threshold, self.deadline = grid, threshold, deadline
        self.run, self.folder = run, folder
        self.numbers = {name: i for i, name in enumerate(names)}
        self.names = dict(enumerate(names))

    def settled(self, kind: str, t: int) -> list[str]:
        """Clients that must all be in the sum of round t: some of them may have unmasked it before; else nobody."""
        return self._unmasked(kind).of(t)

    def _unmasked(self, kind: str) -> Settled:
        return Settled(self.folder / f"unmasked-{kind}.json")

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

        like: a vector as it is due; its shapes count.
        """
        whole, least = Exchange(0), max(least, self.threshold.least)
        try:
            return self._sum(nodes, kind, content, ticket, like, quantised, least, whole)
        except _TooFew as few:
            log.warning("secure sum of %s: %s", ticket, few)
            return Sum([], None, whole)

    def _sum(
        self,
        nodes: Mapping[str, int],
        kind: str,
        content: Content,
        ticket: str,
        like: State,
        quantised: Quantised,
        least: int,
        whole: Exchange,
    ) -> Sum:
        keys = self._ask(nodes, "keys", lambda n: {"client": n}, ticket, least, whole, _keys)
        numbers, threshold = sorted(keys), self.threshold.of(len(keys))
        least = max(least, self.threshold.summed(len(keys)))
        everybody = {
            "clients": numbers,
            "mask": [keys[i].mask for i in numbers],
            "share": [keys[i].share for i in numbers],
        }
        nodes = self._those(nodes, keys)
        sealed = self._ask(nodes, "shares", lambda _: everybody, ticket, least, whole, _boxes)
        nodes = self._those(nodes, sealed)

        def letters(i: int) -> dict[str, Any]:
            from_ = [j for j in sealed if j != i and i in sealed[j]]
            return {"clients": from_, "sealed": [sealed[j][i] for j in from_]}

        def order(name: str) -> RecordDict:
            about = ConfigRecord({"ticket": ticket, "run": self.run, **letters(self.numbers[name])})
            return RecordDict({**content(name), STATE: about})

        found = exchange(self.grid, nodes, kind, order, self.deadline)
        whole.take(found)
        whole.replies, whole.heard, whole.errors = found.replies, found.heard, found.errors
        due = Masked(torch.zeros(quantised.length(like), dtype=_torch(quantised)))
        masked = self._good(found, lambda c: wire.unpack(c.get("masked"), due).levels.numpy())
        self._enough(masked, least, "masked")
        names = [self.names[i] for i in sorted(masked)]
        try:
            self._unmasked(kind).settle(round_of(ticket), names, "has been unmasked for {}, who are due again")
        except InputError as error:
            raise _TooFew(str(error)) from None
        lists = {"survivors": sorted(masked), "lost": sorted(sealed.keys() - masked.keys())}
        told = self._ask(self._those(nodes, masked), "unmask", lambda _: lists, ticket, threshold, whole, _boxes)
        shares: dict[int, list[bytes]] = {}
        for own in told.values():
            for whose, share in own.items():
                shares.setdefault(whose, []).append(share)
        total = sum(v.view(WORDS[quantised.bits]) for v in masked.values())
        try:
            dealt = {i: keys[i] for i in sealed}
            levels = masking.proved(masking.uncover(total, masked, dealt, shares, threshold))
        except InputError as error:
            raise _TooFew(str(error)) from None
        return Sum(names, mean_of(levels, quantised, len(names), like), whole)

    def _ask(
        self,
        nodes: Mapping[str, int],
        stage: str,
        content: Callable[[int], dict[str, Any]],
        ticket: str,
        least: int,
        whole: Exchange,
        read: Callable[[RecordDict], Any],
    ) -> dict[int, Any]:
        """One of the stages without computation: what clients say, by number."""

        def order(name: str) -> RecordDict:
            return RecordDict({STATE: ConfigRecord({"ticket": ticket, **content(self.numbers[name])})})

        found = exchange(self.grid, nodes, f"train.{stage}", order, min(BRIEF, self.deadline))
        whole.take(found)
        good = self._good(found, read)
        self._enough(good, least, stage)
        return good

    def _good(self, found: Exchange, read: Callable[[RecordDict], Any]) -> dict[int, Any]:
        good = {}
        for name, reply in found.replies.items():
            try:
                good[self.numbers[name]] = read(reply)
            except BAD as error:
                log.warning("%s: reply left out: %.200s", name, error)
        return good

    def _enough(self, good: Mapping[int, Any], least: int, stage: str) -> None:
        if len(good) < least:
            raise _TooFew(f"{len(good)} good replies to stage {stage}, {least} needed")

    def _those(self, nodes: Mapping[str, int], numbers: Iterable[int]) -> dict[str, int]:
        return {self.names[i]: nodes[self.names[i]] for i in sorted(numbers)}


class _TooFew(Exception):
    """The sum cannot be had; the round is repeated."""


def flat(message: State, quantised: Quantised) -> Levels:
    """All vectors of a message as numbers of the ring, one after the other, with their check."""
    return masking.checked(np.concatenate([quantised.levels(v.reshape(-1)) for v in message]))


def mean_of(levels: Levels, quantised: Quantised, count: int, like: State) -> State:
    """The mean vector from the sum of `count` of them."""
    values = (quantised.sum(levels) / count).split([v.numel() for v in like])
    return type(like)(*(part.reshape(v.shape).to(v) for part, v in zip(values, like, strict=True)))


def give_keys(context: Context, order: Any, me: int) -> RecordDict:
    """Stage 1 on the client."""
    secrets, keys = masking.begin(str(order["ticket"]), me)
    _keep(context, secrets)
    return RecordDict({STATE: ConfigRecord(keys._asdict())})


def give_shares(context: Context, order: Any, threshold: Threshold, answers: Answers) -> RecordDict:
    """Stage 2 on the client.

    answers: two messages at once would both find the stage due, and of a key that is dealt to two lists of clients one
             list could tell the key and the other the seed: together they uncover the vector.
    """
    secrets = _kept(context, order["ticket"], "shares")
    everybody = dict(zip(order["clients"], map(Keys, order["mask"], order["share"]), strict=True))
    strangers = everybody.keys() - set(range(threshold.clients))
    if strangers:
        raise InputError(f"secagg: keys of client {min(strangers)}, of {threshold.clients}")
    secrets, sealed = masking.deal(secrets, everybody, threshold.of(len(everybody)))
    answers.once(order["ticket"], "shares")  # what was refused above was not answered
    _keep(context, secrets)
    return RecordDict({STATE: ConfigRecord({"clients": list(sealed), "data": list(sealed.values())})})


def give_masked(
    context: Context,
    order: Any,
    kind: str,
    threshold: Threshold,
    levels: Levels,
    answers: Answers,
    noised: bool = False,
) -> RecordDict:
    """Stage 3 on the client: its vectors, under masks.

    kind:    of the vectors: of a round, or measurements; by the client's own knowledge.
    answers: two messages at once would both find the stage due, and two vectors under the same masks tell their
             difference.
    noised:  two vectors of a round under the same noise would tell it too.
    """
    secrets = _kept(context, order["ticket"], "masked")
    answers.once(order["ticket"], "masked")
    if noised:
        answers.vector(order["run"], round_of(secrets.ticket), hashlib.sha256(levels.tobytes()).hexdigest())
    letters = dict(zip(order["clients"], order["sealed"], strict=True))
    secrets, total = masking.mask(secrets, letters, threshold.of(len(secrets.order)), levels)
    _keep(context, secrets._replace(run=str(order["run"]), kind=kind))
    signed = total.view(SIGNED[8 * total.dtype.itemsize])
    return RecordDict({"masked": wire.pack(Masked(torch.from_numpy(signed)))})


def give_unmasking(context: Context, order: Any, threshold: Threshold, answers: Answers) -> RecordDict:
    """Stage 4 on the client."""
    secrets = _kept(context, order["ticket"], "unmask")
    answers.once(order["ticket"], "unmask")
    least = threshold.summed(len(secrets.order))
    after, told = masking.reveal(secrets, order["survivors"], order["lost"], least)
    answers.unmask(secrets.run, secrets.kind, round_of(secrets.ticket), sorted(order["survivors"]))
    _keep(context, after)
    return RecordDict({STATE: ConfigRecord({"clients": list(told), "data": list(told.values())})})


def round_of(ticket: str) -> int:
    """Tickets begin with the number of their round."""
    return int(ticket[:8])


def _keep(context: Context, secrets: Secrets) -> None:
    """In the node's memory; on no disk."""
    context.state[STATE] = ConfigRecord(
        {
            **{name: getattr(secrets, name) for name in FIELDS},
            "order": list(secrets.order),
            "keys": [key for keys in secrets.keys for key in keys],
            "whose": [whose for whose, _, _ in secrets.shares],
            "shares": [part for _, of_seed, of_key in secrets.shares for part in (of_seed, of_key)],
        }
    )


def _kept(context: Context, ticket: object, stage: str) -> Secrets:
    """The secrets of this attempt, whose next stage must be `stage`: a second answer could tell what the first hid."""
    record: Any = context.state.get(STATE, {})
    before = STAGES[STAGES.index(stage) - 1]
    if record.get("ticket") != ticket or record.get("stage") != before:
        raise InputError(
            f"secagg: stage {stage} of {ticket!s:.40} is not due here; this client waits for the next round"
        )
    keys, shares = list(record["keys"]), list(record["shares"])
    return Secrets(
        **{name: record[name] for name in FIELDS},
        order=tuple(record["order"]),
        keys=tuple(map(Keys, keys[::2], keys[1::2])),
        shares=tuple(zip(record["whose"], shares[::2], shares[1::2], strict=True)),
    )


def _keys(reply: RecordDict) -> Keys:
    record: Any = reply[STATE]
    return Keys(_bytes(record["mask"]), _bytes(record["share"]))


def _boxes(reply: RecordDict) -> dict[int, bytes]:
    record: Any = reply[STATE]
    return {int(i): _bytes(data) for i, data in zip(record["clients"], record["data"], strict=True)}


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes) or len(value) > 4096:
        raise InputError("no key or share where one was due")
    return value


def _torch(quantised: Quantised) -> torch.dtype:
    return torch.int32 if quantised.bits == 32 else torch.int64
