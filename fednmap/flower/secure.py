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
from fednmap.simulation.quantised import Levels, Quantised

STATE = "secagg"
BRIEF = 60.0  # seconds that the stages without computation may take at most
STAGES = ("keys", "shares", "masked", "unmask")

Read = Callable[[RecordDict], Any]
Ask = Callable[[str, Callable[[int], dict[str, Any]], Read, int], dict[int, Any]]

log = logging.getLogger("flwr")


class Masked(NamedTuple):
    """Levels under masks, on their way."""

    levels: Tensor

    @classmethod
    def like(cls, message: State, quantised: Quantised) -> Masked:
        """As they are due for such a message."""
        kind = torch.int32 if quantised.bits == 32 else torch.int64
        return cls(torch.zeros(quantised.length(message), dtype=kind))


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
        whole, left = Exchange(0), dict(nodes)
        due = Masked.like(like, quantised)

        def ask(stage: str, about: Callable[[int], dict[str, Any]], read: Read, least: int) -> dict[int, Any]:
            """One stage: what the clients that are left say, by number. Those who say nothing good are left no more."""
            vectors = stage == "masked"

            def order(name: str) -> RecordDict:
                own: dict[str, Any] = {STATE: ConfigRecord({"ticket": ticket, **about(self.numbers[name])})}
                return RecordDict({**content(name), **own} if vectors else own)

            seconds = self.deadline if vectors else min(BRIEF, self.deadline)
            found = exchange(self.grid, left, kind if vectors else f"train.{stage}", order, seconds)
            whole.take(found)
            if vectors:
                whole.replies, whole.heard, whole.errors = found.replies, found.heard, found.errors
            good = found.read(read)
            if len(good) < least:
                raise InputError(f"{len(good)} good replies to stage {stage}, {least} needed")
            for name in left.keys() - good.keys():
                del left[name]
            return {self.numbers[name]: good[name] for name in sorted(left, key=self.numbers.__getitem__)}

        try:
            names, levels = self._sum(ask, kind, ticket, due, max(least, self.threshold.least))
        except InputError as error:
            log.warning("secure sum of %s: %s", ticket, error)
            return Sum([], None, whole)
        return Sum(names, mean_of(levels, quantised, len(names), like), whole)

    def _sum(self, ask: Ask, kind: str, ticket: str, due: Masked, least: int) -> tuple[list[str], Levels]:
        """Whose levels are in the sum, and the sum; raises InputError where there is none."""
        keys = ask("keys", lambda i: {"client": i}, _keys, least)
        threshold, least = self.threshold.of(len(keys)), max(least, self.threshold.summed(len(keys)))
        of_all = [list(part) for part in zip(*keys.values(), strict=True)]
        everybody = {"clients": list(keys), "mask": of_all[0], "share": of_all[1]}
        sealed = ask("shares", lambda _: everybody, _boxes, least)

        def letters(i: int) -> dict[str, Any]:
            from_ = [j for j in sealed if j != i and i in sealed[j]]
            return {"run": self.run, "clients": from_, "sealed": [sealed[j][i] for j in from_]}

        masked = ask("masked", letters, lambda reply: wire.unpack(reply.get("masked"), due).levels.numpy(), least)
        names = [self.names[i] for i in masked]
        self._unmasked(kind).settle(round_of(ticket), names, "has been unmasked for {}; ask the same clients again")
        lists = {"survivors": sorted(masked), "lost": sorted(sealed.keys() - masked.keys())}
        told = ask("unmask", lambda _: lists, _boxes, threshold)
        shares: dict[int, list[bytes]] = {}
        for own in told.values():
            for whose, share in own.items():
                shares.setdefault(whose, []).append(share)
        total = sum(v.view(f"u{v.dtype.itemsize}") for v in masked.values())
        dealt = {i: keys[i] for i in sealed}
        return names, masking.proved(masking.uncover(total, masked, dealt, shares, threshold))


def flat(message: State, quantised: Quantised) -> Levels:
    """All vectors of a message as numbers of the ring, one after the other, with their check."""
    return masking.checked(np.concatenate([quantised.levels(v.reshape(-1)) for v in message]))


def mean_of(levels: Levels, quantised: Quantised, count: int, like: State) -> State:
    """The mean vector from the sum of `count` of them."""
    values = (quantised.sum(levels) / count).split([v.numel() for v in like])
    return type(like)(*(part.reshape(v.shape).to(v) for part, v in zip(values, like, strict=True)))


class SumClient(NamedTuple):
    """A client in one attempt at a sum.

    order:   what the server says.
    me:      the client's number.
    answers: what was answered before. Two messages at once would both find a stage due. A key that is dealt to two
             lists of clients could be told by one list and the seed by the other, which together uncover the vector;
             two vectors under the same masks tell their difference.
    kind, grid: of the vector: of a round, or measurements; by the client's own knowledge.
    """

    context: Context
    order: Any
    me: int
    threshold: Threshold
    answers: Answers
    kind: str = ""
    grid: Quantised | None = None

    def keys(self) -> RecordDict:
        """Stage 1: fresh public keys."""
        secrets, keys = masking.begin(str(self.order["ticket"]), self.me)
        self._keep(secrets)
        return RecordDict({STATE: ConfigRecord(keys._asdict())})

    def shares(self) -> RecordDict:
        """Stage 2: shares of the masks' secrets, encrypted for the other clients."""
        order, secrets = self.order, self._kept("shares")
        everybody = dict(zip(order["clients"], map(Keys, order["mask"], order["share"]), strict=True))
        strangers = everybody.keys() - set(range(self.threshold.clients))
        if strangers:
            raise InputError(f"secagg: keys of client {min(strangers)}, of {self.threshold.clients}")
        secrets, sealed = masking.deal(secrets, everybody, self.threshold.of(len(everybody)))
        self.answers.once(order["ticket"], "shares")  # what was refused above was not answered
        self._keep(secrets)
        return RecordDict({STATE: ConfigRecord({"clients": list(sealed), "data": list(sealed.values())})})

    def masked(self, message: State, noised: bool = False) -> RecordDict:
        """Stage 3: the vectors of a message, under masks.

        noised: two vectors of a round under the same noise would tell it.
        """
        assert self.grid is not None
        order, levels = self.order, flat(message, self.grid)
        secrets = self._kept("masked")
        self.answers.once(order["ticket"], "masked")
        if noised:
            digest = hashlib.sha256(levels.tobytes()).hexdigest()
            self.answers.vector(order["run"], round_of(secrets.ticket), digest)
        letters = dict(zip(order["clients"], order["sealed"], strict=True))
        secrets, total = masking.mask(secrets, letters, self.threshold.of(len(secrets.order)), levels)
        self._keep(secrets._replace(run=str(order["run"]), kind=self.kind))
        signed = total.view(f"i{total.dtype.itemsize}")
        return RecordDict({"masked": wire.pack(Masked(torch.from_numpy(signed)))})

    def unmask(self) -> RecordDict:
        """Stage 4: what the server needs to take the masks off the sum, and off nothing else."""
        order, secrets = self.order, self._kept("unmask")
        self.answers.once(order["ticket"], "unmask")
        least = self.threshold.summed(len(secrets.order))
        after, told = masking.reveal(secrets, order["survivors"], order["lost"], least)
        self.answers.unmask(secrets.run, secrets.kind, round_of(secrets.ticket), sorted(order["survivors"]))
        self._keep(after)
        return RecordDict({STATE: ConfigRecord({"clients": list(told), "data": list(told.values())})})

    def _keep(self, secrets: Secrets) -> None:
        """In the node's memory; on no disk."""
        plain = tuple(secrets._replace(keys=tuple(map(tuple, secrets.keys))))  # type: ignore[arg-type]
        self.context.state[STATE] = ConfigRecord({"secrets": repr(plain)})

    def _kept(self, stage: str) -> Secrets:
        """The secrets of this attempt. Its next stage must be `stage`: a second answer could tell what was hidden."""
        record: Any = self.context.state.get(STATE)
        secrets = Secrets(*ast.literal_eval(record["secrets"])) if record else None
        ticket, before = self.order["ticket"], STAGES[STAGES.index(stage) - 1]
        if secrets is None or (secrets.ticket, secrets.stage) != (ticket, before):
            raise InputError(
                f"secagg: stage {stage} of {ticket!s:.40} is not expected here; this client waits for the next round"
            )
        return secrets._replace(keys=tuple(Keys(*keys) for keys in secrets.keys))


GIVE = {"keys": SumClient.keys, "shares": SumClient.shares, "unmask": SumClient.unmask}
"""The stages in which no vector is sent."""


def round_of(ticket: str) -> int:
    """Tickets begin with the number of their round."""
    return int(ticket[:8])


def _keys(reply: RecordDict) -> Keys:
    record: Any = reply[STATE]
    return Keys(_bytes(record["mask"]), _bytes(record["share"]))


def _boxes(reply: RecordDict) -> dict[int, bytes]:
    record: Any = reply[STATE]
    return {int(i): _bytes(data) for i, data in zip(record["clients"], record["data"], strict=True)}


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes) or len(value) > 4096:
        raise InputError("expected the bytes of a key or share")
    return value
