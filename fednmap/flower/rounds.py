"""The rounds of a run between machines: who is asked, which replies count, and the server's state that follows.

A client's state moves only when a message says that its reply was counted.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import ConfigRecord, MessageType, MetricRecord, RecordDict
from torch import Tensor

from fednmap.core import Algorithm, State, pack, unpack
from fednmap.flower import wire
from fednmap.flower.plan import Measured, Plan, Point
from fednmap.flower.roster import Content, Exchange, Roster
from fednmap.flower.secure import SecureSum, Sum
from fednmap.flower.settings import FederationSettings, grid_for
from fednmap.names import InputError
from fednmap.runs.configuration import Config
from fednmap.runs.execution import scheduled_step
from fednmap.simulation import Diverged, Record, schedules
from fednmap.simulation.loop import dry_run, mean
from fednmap.simulation.participation import Uniform, sampler_of, take_part
from fednmap.simulation.trajectory import TOTALS
from fednmap.simulation.uplink import Federation, Received, Traffic

MISSED = 3  # rounds in succession after which a client that is drawn and not counted is warned of
REPLIES = ("replies_counted", "replies_lost")
"""Of the clients that were asked: how many replies were counted so far, and how many were not."""
WIRE = ("wire_up", "wire_down", "eval_wire_up", "eval_wire_down")
"""Bytes of the messages as they travel: of the rounds, and of the measurements."""
KEPT = ("counted", "took_part", "missed", "late")
"""What a checkpoint keeps in addition to the server's state and the totals."""

log = logging.getLogger("flwr")


class Step(NamedTuple):
    """The result of a round: the tickets of the clients that it counts, and the server's state after it.

    absent: clients that it asked, or whose job ended in it, and that are not counted; each with the reason.
    asked:  how many had work in this round.
    news:   the mean uplink and the share of the clients, if those who are counted can follow by it.
    exact:  whether it counts everybody, with exact gradients.
    late:   rounds by which each counted reply was late.
    """

    tickets: dict[str, str]
    server: State
    absent: dict[str, str]
    asked: int
    news: tuple[State, float] | None = None
    exact: bool = False
    late: tuple[int, ...] = ()


class RoundLoop(ABC):
    """The state and the steps that every kind of round shares.

    sites:     the sites' own metrics, by name.
    totals:    bytes, seconds and replies so far.
    counted:   client -> the ticket of its reply that was counted last.
    took_part: client -> in how many rounds it was counted.
    missed:    client -> rounds in succession, up to the last one, in which it was drawn and not counted.
    refused:   client -> why its last reply was left out.
    news:      the last round that was counted, for those who were in it: its ticket, its mean uplink, and how the
               current broadcast follows from it.
    lost:      clients that could not follow the news once: they are sent everything.
    late:      rounds by which replies were late: their sum over all that were counted, and the most.
    exact:     whether the last round has counted everybody, with exact gradients.
    """

    def __init__(
        self,
        roster: Roster,
        secure: SecureSum,
        config: Config,
        federation: FederationSettings,
        plan: Plan,
        metrics: tuple[str, ...],
    ) -> None:
        self.roster, self.secure, self.config, self.federation, self.plan = roster, secure, config, federation, plan
        self.names, self.n, self.metrics = federation.names, len(federation.names), ("accuracy", *metrics)
        self.totals: Record = dict.fromkeys((*TOTALS, *WIRE, *REPLIES), 0.0)
        self.counted, self.refused = dict.fromkeys(self.names, ""), dict.fromkeys(self.names, "")
        self.took_part, self.missed = dict.fromkeys(self.names, 0), dict.fromkeys(self.names, 0)
        self.news: tuple[str, Any, dict[str, Any]] | None = None
        self.lost: set[str] = set()
        self.late = {"sum": 0, "most": 0}
        self.exact = False
        self.counts = dict(zip(self.names, plan.weights or (1.0,) * self.n, strict=True))
        weights = None if plan.weights is None else torch.tensor(plan.weights, dtype=torch.float64)
        self.everybody = Federation(self.n, weights, Uniform(), 0.0, 0)
        self.initial = server, client = plan.algorithm.init(plan.start)
        self.eta_a = scheduled_step(plan.algorithm, config)
        self.up_like = dry_run(plan.algorithm, server, client)
        self.traffic = Traffic(plan.algorithm, server, self.up_like, plan.pipeline(config))

    @abstractmethod
    def step(self, t: int, server: State, algorithm: Algorithm) -> Step:
        """Return the result of round t, which begins with this state; `algorithm` has the round's step size."""

    @abstractmethod
    def measurement(self, done: int, x: Tensor, ends: bool) -> Sum | None:
        """Return what clients say of the model x after `done` rounds; None if that is waited for elsewhere."""

    def kept(self) -> dict[str, Any]:
        """Return what a checkpoint keeps in addition to the server's state."""
        return self.totals | {name: dict(getattr(self, name)) for name in KEPT}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Continue from what a checkpoint has kept."""
        self.totals |= {name: kept.get(name, 0.0) for name in self.totals}
        for name in KEPT:
            getattr(self, name).update(kept.get(name, {}))

    def play(self, t: int, server: State) -> Step:
        """Run round t and enter who is counted. Raises Diverged if the new state is not finite."""
        began, algorithm = time.monotonic(), schedules.at(self.plan.algorithm, self.eta_a, t)
        step = self.step(t, server, algorithm)
        order, absent = step.tickets, step.absent
        if not all(bool(torch.isfinite(v).all()) for v in step.server):
            raise Diverged(t)
        self.counted |= order
        self.took_part |= {name: self.took_part[name] + 1 for name in order}
        self.missed |= dict.fromkeys(order, 0) | {name: self.missed[name] + 1 for name in absent}
        self.late = {"sum": self.late["sum"] + sum(step.late), "most": max(self.late["most"], *step.late, 0)}
        if step.news is not None:
            (up, share), (ticket, *_) = step.news, order.values()
            facts = {"share": share, "digest": wire.digest(algorithm.broadcast(step.server))}
            self.news = ticket, wire.pack(up), facts | self._step("eta_a_before", algorithm)
        self.exact, seconds = step.exact, time.monotonic() - began
        self.spend(train_seconds=seconds, replies_counted=len(order), replies_lost=len(absent))
        words = f", without {', '.join(absent)}" if absent else ""
        words += f", up to {max(step.late)} rounds late" if any(step.late) else ""
        log.info("round %d: %d of %d clients counted%s, %.2f s", t, len(order), step.asked, words, seconds)
        for name in absent:
            if self.missed[name] == MISSED:
                log.warning(self.left_out()[name])
        return step

    def failed(self, t: int, absent: Mapping[str, str]) -> TimeoutError:
        why = "; ".join(f"{name}: {reason}" for name, reason in absent.items())
        times = f"round {t} failed {self.federation.attempts} times ({why})"
        return TimeoutError(f"{times}; its state is saved, continue with resume = true")

    def left_out(self) -> dict[str, str]:
        """The clients that have not been counted for some rounds, or never; each with what follows."""
        long = {n: k for n, k in self.missed.items() if k >= MISSED or (k and not self.took_part[n])}
        late = f"raise the deadline, now {self.federation.deadline:g} s, if it is slow"
        means = f"the optimum is then another one than that of all {self.n} clients"
        return {name: f"{name} was not counted in its last {k} rounds; {means}; {late}" for name, k in long.items()}

    def _collect(
        self,
        kind: str,
        nodes: Mapping[str, int],
        content: Content,
        ticket: str,
        like: State,
        read: Callable[[RecordDict], State],
        least: int,
    ) -> Sum:
        """The clients that are counted, and the mean of what they sent; under masks only if they are `least`.

        like: what a client sends, whose shapes count; `read` takes it from a reply in the clear.
        """
        if (grid := grid_for(self.config, kind)) is not None:
            return self.secure(nodes, kind, content, ticket, like, grid, least)
        return self.mean_of(self.roster.ask(nodes, kind, content), read)

    def mean_of(self, found: Exchange, read: Callable[[RecordDict], State]) -> Sum:
        """The clients whose replies can be read, and the mean of what is in them."""
        values = found.read(read)
        order = [name for name in self.names if name in values]
        weights = [self.counts[name] for name in order]
        return Sum(order, mean([values[name] for name in order], weights) if order else None, found)

    def _follows(self, name: str) -> bool:
        """Whether the client holds what was broadcast in the round of the news: it was counted then."""
        return self.news is not None and self.counted[name] == self.news[0] and name not in self.lost

    def _step(self, key: str, algorithm: Algorithm) -> dict[str, float]:
        return {} if self.eta_a is None else {key: schedules.step_of(algorithm)}

    def order(
        self, t: int, tickets: Mapping[str, str], server: State, algorithm: Algorithm, following: set[str]
    ) -> Content:
        """The messages of a round: the broadcast, or the news for those who can follow."""
        down = wire.pack(algorithm.broadcast(server))
        common: dict[str, Any] = {"run": self.secure.run, "t": t, **self._step("eta_a", algorithm)}

        def content(name: str) -> RecordDict:
            own = {"client": self.names.index(name), "ticket": tickets[name]}
            own |= {"counted": self.counted[name], "refused": self.refused[name]}
            if self.news is not None and name in following:
                _, up, facts = self.news
                return RecordDict({"news": up, "round": ConfigRecord(common | own | facts)})
            return RecordDict({"down": down, "round": ConfigRecord(common | own)})

        return content

    def uplink(self, ticket: str, content: RecordDict) -> State:
        """The uplink, if it passes the check; a client whose reply did not learns it with its next message."""
        if content["round"]["ticket"] != ticket:
            raise InputError("a reply to another round")
        due = pack(self.plan.algorithm, self.up_like)
        packed = wire.unpack(content.get("up"), due)
        for name, v, size in zip(packed._fields, packed, due, strict=True):
            if not v.ndim and not v.is_floating_point() and v != size:  # which unpacking would trust
                raise InputError(f"{name} is {v.item()}, expected {size.item()}")
        up = unpack(self.plan.algorithm, packed, self.up_like)
        if [v.shape for v in up] != [v.shape for v in self.up_like]:
            raise InputError("it unpacks to other shapes than expected")
        bound = self.federation.norm_bound or math.inf
        for name, v in up._asdict().items():  # codes and units say nothing of the vector that they stand for
            if not bool(torch.isfinite(v).all()):
                raise InputError(f"{name} unpacks to NaN or infinity")
            if float(v.norm()) > bound:
                raise InputError(f"{name} has norm {float(v.norm()):.3g}, above the bound {bound:g}")
        return up

    def ask_about(self, done: int, x: Tensor) -> Sum:
        """Who has measured the model x, and the mean of what they say."""
        exactly = self.federation.measure_stationarity
        message = RecordDict({"model": wire.pack(Point(x))})
        nodes, settled = self.roster.refresh(), self.secure.settled(MessageType.EVALUATE, done)
        nodes = {name: node for name, node in nodes.items() if name in (settled or nodes)}
        like = Measured.of(0.0, {}, self.metrics, x if exactly else x[:0])
        read = self.reader(x)
        return self._collect(MessageType.EVALUATE, nodes, lambda _: message, new_ticket(done), like, read, 2)

    def reader(self, x: Tensor) -> Callable[[RecordDict], Measured]:
        """How to read what a client says of the model x."""
        exactly = self.federation.measure_stationarity

        def read(content: RecordDict) -> Measured:
            said = self.numbers_of(content)
            gradient = wire.unpack(content.get("gradient"), Point(x)).x if exactly else x[:0]
            return Measured.of(said["loss"], said, self.metrics, gradient)

        return read

    def numbers_of(self, content: RecordDict) -> dict[str, float]:
        """Return what a client says of a model; what is not finite is left out. Raises InputError without a loss."""
        about: Any = content["about"]
        own: Any = content.get("metrics", {})
        values = {key: float(about[key]) for key in ("loss", "samples")}
        values |= {name: float(own[name]) for name in self.metrics if name in own}
        found = {key: v for key, v in values.items() if math.isfinite(v)}
        if "loss" not in found:
            raise InputError(f"numbers {values}; expected a finite loss")
        return found

    def spend(self, **amounts: float) -> None:
        self.totals |= {name: self.totals[name] + amount for name, amount in amounts.items()}


class AllReplies(RoundLoop):
    """Rounds that wait for everybody who is drawn, or for the deadline; other replies are thrown away."""

    def step(self, t: int, server: State, algorithm: Algorithm) -> Step:
        """Round t, repeated until enough replies are good."""
        sampler = sampler_of(self.config.sampler, self.config.participation)
        ids = take_part(self.n, t, sampler=sampler, drop=0.0, seed=self.config.seed).participants.tolist()
        drawn = [self.names[i] for i in ids]
        if not drawn:  # a sampler may name nobody
            return Step({}, server, {}, 0)
        privacy = self.plan.privacy
        least = max(least_replies(self.federation, len(drawn)), 0 if privacy is None else privacy.among or 0)
        for attempt in range(self.federation.attempts):
            nodes, ticket = self._participants(drawn, least, t, attempt), new_ticket(t)
            following = {name for name in nodes if self._follows(name)}
            content = self.order(t, dict.fromkeys(nodes, ticket), server, algorithm, following)
            order, up, found = self._collect(
                MessageType.TRAIN, nodes, content, ticket, self.up_like, partial(self.uplink, ticket), least
            )
            if not self.config.secagg:
                self.refused |= {name: "" if name in order else found.errors[name] for name in found.replies}
            self.lost |= following & found.errors.keys() - found.replies.keys()  # such as those who could not follow
            whole = self.traffic.down * (len(nodes) - len(following))
            self.spend(bytes_up=self.traffic.up * len(found.replies), wire_up=found.wire_up, wire_down=found.wire_down)
            self.spend(bytes_down=whole + self.traffic.following * len(following))
            absent = self._absent(drawn, order, found)
            if len(order) >= least:
                break
            log.warning("round %d: %d good replies, %d needed", t, len(order), least)
        else:
            raise self.failed(t, absent)
        weight = sum(self.counts[name] for name in order)
        share = weight / sum(self.counts.values())
        if privacy is not None:  # what such a mean counts, and for how much, does not depend on who came
            clients = torch.tensor([self.names.index(name) for name in order])
            noised = privacy.aggregate(self.everybody, Received(t, clients, [v * weight for v in up], weight))
            up, share = type(up)(*noised.up), noised.share
        exact = privacy is None and len(order) == self.n and all(_is_exact(found.replies[name]) for name in order)
        news, after = (up, share) if self.traffic.follows else None, algorithm.aggregate(server, up, share)
        return Step(dict.fromkeys(order, ticket), after, absent, len(drawn), news, exact)

    def _absent(self, drawn: list[str], order: list[str], found: Exchange) -> dict[str, str]:
        """The clients that were drawn and are not counted, each with the reason."""
        absent = {
            name: found.errors.get(name, f"no good reply within {self.federation.deadline:g} s") for name in drawn
        }
        absent |= {name: "not connected" for name in drawn if name not in self.roster.nodes}
        absent |= {name: "its data does not fit" for name in drawn if name in self.roster.unfit}
        return {name: reason for name, reason in absent.items() if name not in order}

    def _participants(self, drawn: list[str], least: int, t: int, attempt: int) -> dict[str, int]:
        """Those of the simulator's draw who are connected; a repeated round draws among whoever is.

        Unless it has been unmasked, in part perhaps, for some clients: then it is for these.
        """
        nodes, settled = self.roster.refresh(), self.secure.settled(MessageType.TRAIN, t)
        if len(nodes) < least or not set(settled) <= nodes.keys():
            nodes = self.roster.wait(least)
        wanted = settled or drawn
        if attempt and len(drawn) < self.n and not settled:
            order = np.random.default_rng([self.config.seed, t, attempt]).permutation(len(nodes))
            wanted = [list(nodes)[i] for i in order[: len(drawn)]]
        return {name: node for name, node in nodes.items() if name in wanted}

    def measurement(self, done: int, x: Tensor, ends: bool) -> Sum | None:
        return self.ask_about(done, x)


def least_replies(federation: FederationSettings, drawn: int) -> int:
    """Return how many replies a round needs in which so many clients are drawn."""
    return drawn if federation.min_clients is None else min(federation.min_clients, drawn)


def new_ticket(t: int) -> str:
    """Return a name for one attempt at round t."""
    return f"{t:08d}-{secrets.token_hex(4)}"


def _is_exact(content: RecordDict) -> bool:
    """Whether a client says that its gradients have no noise; if not, the next measurement decides."""
    about = content.get("about")
    return isinstance(about, MetricRecord) and about.get("exact") == 1
