"""The server's half: a Flower ServerApp that runs any method of the library, round by round.

A round is counted when enough replies have arrived; the server's state and who was counted are then on disk before
anybody is told. A client's state moves only when a message tells it that its reply was counted. Replies that a round
does not wait for are thrown away, or in an asynchronous run counted by a later round.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from fednmap.asynchronous import Asynchronous, draw
from fednmap.core import Algorithm, State, pack, unpack
from fednmap.flower import loopback, wire
from fednmap.flower.jobs import InFlight, Jobs, PendingMeasurement
from fednmap.flower.plan import Measured, Plan, Point, plan_from
from fednmap.flower.roster import Content, Exchange, Mailbox, Roster
from fednmap.flower.secure import SecureSum, Sum
from fednmap.flower.settings import FederationSettings, grid_for, read, threshold
from fednmap.measure import numbers, residual, rise
from fednmap.names import InputError
from fednmap.runs import checkpoints
from fednmap.runs.atomic_files import from_json, locked, to_json, write_atomically
from fednmap.runs.configuration import Config
from fednmap.runs.execution import DONE, extendable, scheduled_step, settings, stops_of, summary
from fednmap.runs.folder import EXTENDABLE, Job, RunFolder
from fednmap.simulation import Callback, Diverged, Record, Round, schedules
from fednmap.simulation.callbacks import Reason, first_reason
from fednmap.simulation.loop import dry_run, mean
from fednmap.simulation.participation import Uniform, sampler_of, take_part
from fednmap.simulation.states import Clients
from fednmap.simulation.trajectory import TOTALS, measure_rounds
from fednmap.simulation.uplink import Federation, Received, Traffic

FACTS = "federation.json"
CLIENTS = "clients.jsonl"
SITES = "sites.json"
LOOK = 1.0  # seconds between looks whether the SuperLink is still there
MISSED = 3  # rounds in succession after which a client that is drawn and not counted is warned of

REPLIES = ("replies_counted", "replies_lost")
"""Of the clients that were asked: how many replies were counted so far, and how many were not."""
KEPT = ("counted", "took_part", "missed", "late")
"""What a checkpoint keeps besides the server's state and the totals."""
WIRE = ("wire_up", "wire_down", "eval_wire_up", "eval_wire_down")
"""Bytes of the messages as they travel: of the rounds, and of the measurements."""

LINE = "%(asctime)s %(levelname)s %(message)s"  # of server.log

log = logging.getLogger("flwr")

MakePlan = Callable[[Config, Callable[[], Tensor]], Plan]


def server_app(plan: MakePlan = lambda config, start: plan_from(config, start())) -> ServerApp:
    """The app that the server runs.

    plan: from the settings, and a function that asks a client for the first model, to the Plan of the run. For a
          network give `lambda config, start: plan_from(config, start(), module)`, so that regularizers know its layers.
    """
    return app_of(lambda grid, context: Coordinator(grid, *read(context.run_config), plan).run())


def app_of(run: Callable[[Grid, Context], object]) -> ServerApp:
    """A ServerApp that ends with its SuperLink."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        torch.set_num_threads(1)
        loopback.wait_less()
        end_with_the_superlink()
        run(grid, context)

    return app


def end_with_the_superlink() -> None:
    """A server whose SuperLink was killed would try to reach it for ever, and hold its run folder meanwhile."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK)
        log.error("the SuperLink is gone; what was counted is saved, continue with resume = true")
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class Step(NamedTuple):
    """What a round has come to: the tickets of the clients that it counts, and the server's state after it.

    absent: clients that it asked, or whose job ended in it, and that are not counted; each with the reason.
    asked:  how many had work in this round.
    news:   the mean uplink and the share of the clients, if those who are counted can follow by it.
    late:   rounds by which each counted reply was late.
    """

    tickets: dict[str, str]
    server: State
    absent: dict[str, str]
    asked: int
    news: tuple[State, float] | None = None
    exact: bool = False
    late: tuple[int, ...] = ()


class Coordinator(Callback):
    """One run between machines.

    counted:   client -> the ticket of its reply that was counted last.
    took_part: client -> in how many rounds it was counted.
    missed:    client -> rounds in succession, up to the last one, in which it was drawn and not counted.
    refused:   client -> why its last reply was left out.
    news:      the last round that was counted, for those who were in it: its ticket, its mean uplink, and how to tell
               from it what is broadcast now.
    lost:      clients that could not follow the news once: they are sent everything.
    jobs:      of an asynchronous run: what clients work on, and a measurement that they make between two jobs.
    reason:    of an asynchronous run: why it ends, by a measurement that was waited for.
    late:      rounds by which replies were late: their sum over all that were counted, and the most.
    exact:     whether the last round has counted everybody, with exact gradients.
    """

    def __init__(self, grid: Grid, config: Config, federation: FederationSettings, make_plan: MakePlan) -> None:
        self.config, self.federation, self.make_plan = config, federation, make_plan
        self.names, self.n, self.job = federation.names, len(federation.names), Job(config.algorithms[0], 0)
        self.roster = Roster(grid, federation)
        self.totals = dict.fromkeys((*TOTALS, *WIRE, *REPLIES), 0.0)
        self.counted, self.refused = dict.fromkeys(self.names, ""), dict.fromkeys(self.names, "")
        self.took_part, self.missed = dict.fromkeys(self.names, 0), dict.fromkeys(self.names, 0)
        self.news: tuple[str, Any, dict[str, Any]] | None = None
        self.lost: set[str] = set()
        self.exact = False
        self.stops = stops_of(config)
        self.late = {"sum": 0, "most": 0}
        self.measuring: PendingMeasurement | None = None
        self.reason: Reason | None = None

    def run(self) -> dict[str, Any]:
        """All rounds that are not done yet; the closing numbers, also kept in the run folder.

        A folder that another server is using is refused before anything in it is touched.
        """
        path = self.federation.run_folder
        if self.federation.resume or ((path / "run.toml").exists() and not (path / FACTS).exists()):
            self.folder = RunFolder.open(path)  # to continue in, or made for this run
        else:
            self.folder = RunFolder.create(path, self.config, "flower")
        with locked(self.folder.path):
            self._open()
            file = logging.FileHandler(self.folder.path / "server.log", delay=True)
            file.setFormatter(_JsonLines() if self.federation.log_json else logging.Formatter(LINE))
            log.addHandler(file)
            try:
                return self._run()
            except Exception as error:
                self._status(error=f"{type(error).__name__}: {error}")
                raise
            finally:
                log.removeHandler(file)
                file.close()

    def _open(self) -> None:
        """Check and repair the folder, which is ours now, and settle the number under which clients keep states.

        Other settings than the run began with are refused: it would begin again at round 0.
        """
        path, resume, now = self.folder.path, self.federation.resume, self.config.model_dump(mode="json")
        known = from_json(path / FACTS, dict) if (path / FACTS).exists() else {}
        if known and not resume:
            raise InputError(f"{path} has been used in the meantime; choose another folder")
        if tuple(known.get("names", self.names)) != self.names:
            raise InputError(f"{path} belongs to the clients {', '.join(known['names'])}; keep the names")
        if resume:
            if words := self.folder.changed(now, extendable(self.config)):
                raise InputError(f"{path}: {words}; put it back, or begin a new run")
            began = (self.folder.environment().get("settings") or now)["algorithms"][0]
            if began != self.job.method:
                raise InputError(f"{path} is a run of {began}, not {self.job.method}; begin a new run")
        self.folder.remove_checksums()
        self.folder.repair()
        if resume:  # what may be changed, and was, stands in run.toml from now on
            before = self.folder.config(trust=True)
            after = before.model_copy(update={name: getattr(self.config, name) for name in EXTENDABLE})
            if after != before:
                write_atomically(path / "run.toml", after.toml().encode())
        self.run_id = known.get("run") or secrets.token_hex(8)
        write_atomically(path / FACTS, to_json({"run": self.run_id, **self.federation.model_dump(mode="json")}))
        self.secure = SecureSum(self.roster, threshold(self.config, self.federation), self.run_id, path)

    def _run(self) -> dict[str, Any]:
        self._status(waiting=True)
        least = self._least(self.n)
        self.roster.wait(least)
        sites = {name: site.model_dump(mode="json") for name, site in self.roster.check_sites(least).items()}
        write_atomically(self.folder.path / SITES, to_json(sites))
        plan = self.plan = self.make_plan(self.config, lambda: self.roster.start(self.config.dtype))
        self.metrics = ("accuracy", *next(iter(sites.values()))["metrics"])
        algorithm, pipeline, due = plan.algorithm, plan.pipeline(self.config), next(iter(sites.values()))["dimension"]
        if len(plan.start) != due:
            words = f"the sites' model has {due} parameters, the server's {len(plan.start)}"
            raise InputError(f"{words}; give both the same model")
        if algorithm.traits.full_participation and least < self.n:
            name = type(algorithm).__name__
            raise InputError(f"{name} needs every client in every round; set min-clients = {self.n}, or use FedNMap")
        if self.config.secagg and plan.weights is not None:
            raise InputError("secagg sums clients that count the same, given weights by samples; leave one out")
        self.counts = dict(zip(self.names, plan.weights or (1.0,) * self.n, strict=True))
        weights = None if plan.weights is None else torch.tensor(plan.weights, dtype=torch.float64)
        self.everybody = Federation(self.n, weights, Uniform(), 0.0, 0)
        server, client = algorithm.init(plan.start)
        self.eta_a = scheduled_step(algorithm, self.config)
        self.up_like = dry_run(algorithm, server, client)
        self.traffic = Traffic(algorithm, server, self.up_like, pipeline)
        done, server = self.last = self._restore(server)
        reason, begin = self._so_far(done)
        with Mailbox(self.roster.grid) as mail:
            self.jobs = Jobs(mail, self.federation.deadline)
            reason = reason or measure_rounds(
                self._rounds(done, server, client),
                server,
                self.totals,
                self._measure,
                self._revealed,
                rounds=self.config.rounds,
                every=self.config.eval_every,
                begin=begin,
                judged=self._judged,
                stops=self.stops,
                others=[self],
            )
        return self._finish(reason)

    def _so_far(self, done: int) -> tuple[Reason | None, int | None]:
        """Of a run that is continued: a reason to end, if it still holds; the rounds after which to measure first."""
        reason, measured = None, -1.0
        for record in self.folder.records(*self.job):
            reason, measured = self._reason_at(record), record["round"]
        if measured == done:
            return reason, None
        # by a tolerance that has been loosened since, or a measurement that a kill has prevented
        due = reason or done % self.config.eval_every == 0 or done == self.config.rounds
        return None, done if due else None

    def _rounds(self, done: int, server: State, client: State) -> Iterator[Round]:
        """The rounds that are not done yet, each on disk before it is handed out; clients keep their states."""
        nowhere = Clients(0, client).snapshot()
        for t in range(done, self.config.rounds):
            before = dict(self.totals)
            step = self._round(t, server)
            server, who = step.server, ([*step.tickets, *step.absent], step.tickets)
            self.last = t + 1, server
            drawn, counted = (torch.tensor([self.names.index(name) for name in names]) for names in who)
            up, down = (int(self.totals[key] - before[key]) for key in ("bytes_up", "bytes_down"))
            yield Round(t, server, nowhere, drawn, counted, up, down)

    def on_round(self, last: Round, totals: Record) -> Reason | None:
        """Say where the run is; a reason to end that has come since."""
        self._status(done=last.t + 1)
        return self.reason

    def _least(self, drawn: int) -> int:
        """Replies that a round needs in which so many clients are drawn."""
        return drawn if self.federation.min_clients is None else min(self.federation.min_clients, drawn)

    def _round(self, t: int, server: State) -> Step:
        """Round t, whose new state is then on disk."""
        began, late = time.monotonic(), self.plan.asynchronous
        algorithm = schedules.at(self.plan.algorithm, self.eta_a, t)
        if late is None:
            step = self._wait_for_all(t, server, algorithm)
        else:
            step = self._as_they_come(t, server, algorithm, schedules.at(late, self.eta_a, t))
        server, order, absent = step.server, step.tickets, step.absent
        if not all(bool(torch.isfinite(v).all()) for v in server):
            raise Diverged(t)
        self.counted |= order
        self.took_part |= {name: self.took_part[name] + 1 for name in order}
        self.missed |= dict.fromkeys(order, 0) | {name: self.missed[name] + 1 for name in absent}
        self.late = {"sum": self.late["sum"] + sum(step.late), "most": max(self.late["most"], *step.late, 0)}
        if step.news is not None:
            (up, share), (ticket, *_) = step.news, order.values()
            facts = {"share": share, "digest": wire.digest(algorithm.broadcast(server))}
            self.news = ticket, wire.pack(up), facts | self._step("eta_a_before", algorithm)
        self.exact = step.exact
        self._spend(train_seconds=time.monotonic() - began, replies_counted=len(order), replies_lost=len(absent))
        self._save(t, server)
        seconds = time.monotonic() - began
        words = f", without {', '.join(absent)}" if absent else ""
        words += f", up to {max(step.late)} rounds late" if any(step.late) else ""
        log.info("round %d: %d of %d clients counted%s, %.2f s", t, len(order), step.asked, words, seconds)
        for name in absent:
            if self.missed[name] == MISSED:
                log.warning(self._left_out()[name])
        return step

    def _wait_for_all(self, t: int, server: State, algorithm: Algorithm) -> Step:
        """Round t, repeated until enough replies are good."""
        sampler = sampler_of(self.config.sampler, self.config.participation)
        ids = take_part(self.n, t, sampler=sampler, drop=0.0, seed=self.config.seed).participants.tolist()
        drawn = [self.names[i] for i in ids]
        if not drawn:  # a sampler may name nobody
            return Step({}, server, {}, 0)
        privacy = self.plan.privacy
        least = max(self._least(len(drawn)), 0 if privacy is None else privacy.among or 0)
        for attempt in range(self.federation.attempts):
            nodes, ticket = self._participants(drawn, least, t, attempt), _ticket(t)
            following = {name for name in nodes if self._follows(name)}
            content = self._order(t, dict.fromkeys(nodes, ticket), server, algorithm, following)
            order, up, found = self._collect(
                MessageType.TRAIN, nodes, content, ticket, self.up_like, partial(self._uplink, ticket), least
            )
            if not self.config.secagg:
                self.refused |= {name: "" if name in order else found.errors[name] for name in found.replies}
            self.lost |= following & found.errors.keys() - found.replies.keys()  # such as those who could not follow
            whole = self.traffic.down * (len(nodes) - len(following))
            self._spend(bytes_up=self.traffic.up * len(found.replies), wire_up=found.wire_up, wire_down=found.wire_down)
            self._spend(bytes_down=whole + self.traffic.following * len(following))
            absent = self._absent(drawn, order, found)
            if len(order) >= least:
                break
            log.warning("round %d: %d good replies, %d needed", t, len(order), least)
        else:
            raise self._failed(t, absent)
        weight = sum(self.counts[name] for name in order)
        share = weight / sum(self.counts.values())
        if privacy is not None:  # what such a mean counts, and for how much, does not depend on who came
            clients = torch.tensor([self.names.index(name) for name in order])
            noised = privacy.aggregate(self.everybody, Received(t, clients, [v * weight for v in up], weight))
            up, share = type(up)(*noised.up), noised.share
        exact = privacy is None and len(order) == self.n and all(_is_exact(found.replies[name]) for name in order)
        news, after = (up, share) if self.traffic.follows else None, algorithm.aggregate(server, up, share)
        return Step(dict.fromkeys(order, ticket), after, absent, len(drawn), news, exact)

    def _as_they_come(self, t: int, server: State, algorithm: Algorithm, rule: Asynchronous) -> Step:
        """Round t of an asynchronous run: it counts the replies that have come by then; other jobs stay in flight.

        A client whose job has failed is asked again in the next round, or when nobody is at work.
        """
        jobs, attempts, window = self.jobs, 0, rule.window or math.inf
        end = time.monotonic() + window
        good: dict[str, tuple[InFlight, State]] = {}
        failed: dict[str, str] = {}
        while not rule.ready(len(good), len(jobs.open), jobs.oldest(t), time.monotonic() >= end):
            while not good and time.monotonic() >= end:  # windows follow one another until a reply has come
                end += window
            nodes = self.roster.refresh() or self.roster.wait(1)
            for name, (job, why) in jobs.give_up(nodes).items():
                self._without_uplink(name, job, why, failed)
            self._send_jobs(t, server, algorithm, nodes, good.keys() | failed.keys())
            if not jobs.open and not good:
                attempts += 1
                if attempts >= self.federation.attempts:
                    raise self._failed(t, {n: failed.get(n, "not connected") for n in self.names})
                time.sleep(LOOK)
                failed = {}
            for name, job, reply in jobs.replies(min(end, time.monotonic() + LOOK)):
                found = Exchange() if job.down is not None or self.measuring is None else self.measuring.found
                found.add(name, reply)
                if job.down is None or name not in found.replies:
                    self._without_uplink(name, job, found.errors.get(name, ""), failed)
                    if job.down is None:  # it has measured, and gets a job
                        break
                    continue
                self._spend(bytes_up=self.traffic.up, wire_up=found.wire_up)
                for up in found.read(partial(self._uplink, job.ticket)).values():
                    good[name] = job, rule.read(job.down, up, torch.tensor(t - job.t))
                self.refused[name] = found.errors.get(name, "")
                failed |= found.errors
                if rule.ready(len(good), len(jobs.open), jobs.oldest(t), time_is_up=False):  # a window takes all
                    break
        order = {name: good[name] for name in self.names if name in good}
        weights = [self.counts[name] for name in order]
        read = mean([value for _, value in order.values()], weights)
        return Step(
            {name: job.ticket for name, (job, _) in order.items()},
            rule.advance(server, read, sum(weights) / sum(self.counts.values())),
            failed,
            len(order) + len(failed) + len(jobs.open),
            late=tuple(t - job.t for job, _ in order.values()),
        )

    def _without_uplink(self, name: str, job: InFlight, why: str, failed: dict[str, str]) -> None:
        """A client is free again without an uplink: it has measured, or its job has failed."""
        if job.down is not None:
            failed[name] = why
        elif self.measuring is not None:
            self.measuring.left.discard(name)

    def _send_jobs(self, t: int, server: State, algorithm: Algorithm, nodes: Mapping[str, int], busy: set[str]) -> None:
        """Give free clients work: the pending measurement first, then jobs, as many as may work at a time.

        busy: clients that get no job in this round, because it counts them already, or because they failed.
        """
        jobs, end = self.jobs, time.monotonic() + self.federation.deadline
        if (pending := self.measuring) is not None:
            pending.left &= nodes.keys()
            asked = {name: InFlight(nodes[name], end, t) for name in pending.left - jobs.open.keys()}
            message = RecordDict({"model": wire.pack(Point(pending.x))})
            pending.found.wire_down += jobs.send(asked, MessageType.EVALUATE, lambda _: message)
            if not pending.left:
                self.measuring = None
                told = self._mean_of(pending.found, self._measured(pending.x))
                self.reason = self._reason_at(self._record(pending.done, pending.x, told)) or self.reason
        free = [i for i, name in enumerate(self.names) if name in nodes and name not in busy | jobs.open.keys()]
        at_work = len(busy) + sum(job.down is not None for job in jobs.open.values())
        slots = max(0, max(1, round(self.config.participation * self.n)) - at_work)
        drawn = [self.names[i] for i in draw(np.array(free, dtype=np.int64), slots, self.config.seed, t).tolist()]
        down, tickets = algorithm.broadcast(server), {name: _ticket(t) for name in drawn}
        new = {name: InFlight(nodes[name], end, t, ticket, down) for name, ticket in tickets.items()}
        spent = jobs.send(new, MessageType.TRAIN, self._order(t, tickets, server, algorithm, set()))
        self._spend(bytes_down=self.traffic.down * len(new), wire_down=spent)

    def _failed(self, t: int, absent: Mapping[str, str]) -> TimeoutError:
        why = "; ".join(f"{name}: {reason}" for name, reason in absent.items())
        times = f"round {t} failed {self.federation.attempts} times ({why})"
        return TimeoutError(f"{times}; its state is saved, continue with resume = true")

    def _absent(self, drawn: list[str], order: list[str], found: Exchange) -> dict[str, str]:
        """The clients that were drawn and are not counted, each with the reason."""
        absent = {
            name: found.errors.get(name, f"no good reply within {self.federation.deadline:g} s") for name in drawn
        }
        absent |= {name: "not connected" for name in drawn if name not in self.roster.nodes}
        absent |= {name: "its data does not fit" for name in drawn if name in self.roster.unfit}
        return {name: reason for name, reason in absent.items() if name not in order}

    def _left_out(self) -> dict[str, str]:
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
        return self._mean_of(self.roster.ask(nodes, kind, content), read)

    def _mean_of(self, found: Exchange, read: Callable[[RecordDict], State]) -> Sum:
        """The clients whose replies can be read, and the mean of what is in them."""
        values = found.read(read)
        order = [name for name in self.names if name in values]
        weights = [self.counts[name] for name in order]
        return Sum(order, mean([values[name] for name in order], weights) if order else None, found)

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

    def _follows(self, name: str) -> bool:
        """Whether the client holds what was broadcast in the round of the news: it was counted then."""
        return self.news is not None and self.counted[name] == self.news[0] and name not in self.lost

    def _step(self, key: str, algorithm: Algorithm) -> dict[str, float]:
        return {} if self.eta_a is None else {key: schedules.step_of(algorithm)}

    def _order(
        self, t: int, tickets: Mapping[str, str], server: State, algorithm: Algorithm, following: set[str]
    ) -> Content:
        """The messages of a round: the broadcast, or the news for those who can follow."""
        down = wire.pack(algorithm.broadcast(server))
        common = {"run": self.run_id, "t": t, **self._step("eta_a", algorithm)}

        def content(name: str) -> RecordDict:
            own = {"client": self.names.index(name), "ticket": tickets[name]}
            own |= {"counted": self.counted[name], "refused": self.refused[name]}
            if self.news is not None and name in following:
                _, up, facts = self.news
                return RecordDict({"news": up, "round": ConfigRecord(common | own | facts)})
            return RecordDict({"down": down, "round": ConfigRecord(common | own)})

        return content

    def _uplink(self, ticket: str, content: RecordDict) -> State:
        """The uplink, if it passes the check; a client whose reply did not is told so with its next message."""
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

    def _revealed(self, before: State, last: Round) -> float | None:
        """|F_nat| of the model before a round with exact gradients of everybody, by which the method knows it."""
        known = self.plan.algorithm.known_gradient(before, last.server) if self.exact else None
        return None if known is None else float(residual(*known, self.plan.phi, self.plan.measure_gamma).norm())

    def _judged(self, record: Record) -> bool:
        """Whether to judge by it if the run ends: what only some clients have measured is of another f."""
        if (measured := record["clients_measured"]) < self.n and not self.config.dp_noise:
            words = "round %d: %d of %d clients measured, so that it is not judged whether to end"
            log.warning(words, record["round"], measured, self.n)
        return measured == self.n

    def _reason_at(self, record: Record) -> Reason | None:
        return first_reason(self.stops, lambda stop: stop.on_record(record)) if self._judged(record) else None

    def _measure(self, done: int, server: State, ends: bool) -> Record | None:
        """The model as the clients see it: all are asked, and waited for.

        An asynchronous run waits for nobody before it ends: its record comes later.
        """
        began, x, late = time.monotonic(), self.plan.algorithm.model(server), self.plan.asynchronous
        if late is not None and (late.buffer or late.window) and not ends:
            self.measuring = self.measuring or PendingMeasurement(done, x, set(self.roster.nodes))
            return None
        told = Sum([], None, Exchange()) if self.config.dp_noise else self._ask_about(done, x)
        self._spend(eval_seconds=time.monotonic() - began)
        return self._record(done, x, told)

    def _record(self, done: int, x: Tensor, told: Sum) -> Record:
        """Enter what clients say of x: loss always, the exact gradient where the federation allows it."""
        plan, exactly, (names, of_all, found) = self.plan, self.federation.measure_stationarity, told
        said = of_all.values(self.metrics) if names else {}
        loss, gradient = said.get("loss", math.nan), torch.full_like(x, math.nan) if exactly else None
        if names and exactly:
            gradient = of_all.gradient
        self._spend(eval_wire_up=found.wire_up, eval_wire_down=found.wire_down)
        record = {"round": done, **numbers(x, loss, gradient, plan.phi, plan.measure_gamma)}
        record |= {"test_accuracy" if name == "accuracy" else name: v for name, v in said.items() if name != "loss"}
        record |= {"clients_measured": len(names), **{name: f(x) for name, f in plan.metrics.items()}}
        record |= {} if plan.privacy is None else plan.privacy.spent(self.everybody, done)
        if plan.asynchronous is not None:
            times = self.took_part.values()
            record |= {"staleness": self.late["sum"] / max(1, sum(times)), "staleness_max": self.late["most"]}
            record |= {"counted_least": min(times), "counted_most": max(times)}
        if self.config.secagg:  # only the sum over clients is known
            each = {"*": said} if names else {}
        else:
            each = {name: self._numbers(found.replies[name]) for name in names}
        with (self.folder.path / CLIENTS).open("a") as file:
            file.writelines(json.dumps({"round": done, "client": name, **v}) + "\n" for name, v in each.items())
        record |= self.totals
        self.folder.append(self.job, record)  # last: what is not there was not measured
        return record

    def _ask_about(self, done: int, x: Tensor) -> Sum:
        """Who has measured the model x, and the mean of what they say."""
        exactly = self.federation.measure_stationarity
        message = RecordDict({"model": wire.pack(Point(x))})
        nodes, settled = self.roster.refresh(), self.secure.settled(MessageType.EVALUATE, done)
        nodes = {name: node for name, node in nodes.items() if name in (settled or nodes)}
        like = Measured.of(0.0, {}, self.metrics, x if exactly else x[:0])
        read = self._measured(x)
        return self._collect(MessageType.EVALUATE, nodes, lambda _: message, _ticket(done), like, read, 2)

    def _measured(self, x: Tensor) -> Callable[[RecordDict], Measured]:
        """How to read what a client says of the model x."""
        exactly = self.federation.measure_stationarity

        def read(content: RecordDict) -> Measured:
            said = self._numbers(content)
            gradient = wire.unpack(content.get("gradient"), Point(x)).x if exactly else x[:0]
            return Measured.of(said["loss"], said, self.metrics, gradient)

        return read

    def _numbers(self, content: RecordDict) -> dict[str, float]:
        """Return what a client says of a model; what is not finite is left out. Raises InputError without a loss."""
        about: Any = content["about"]
        own: Any = content.get("metrics", {})
        values = {key: float(about[key]) for key in ("loss", "samples")}
        values |= {name: float(own[name]) for name in self.metrics if name in own}
        found = {key: v for key, v in values.items() if math.isfinite(v)}
        if "loss" not in found:
            raise InputError(f"numbers {values}; expected a finite loss")
        return found

    def _spend(self, **amounts: float) -> None:
        self.totals |= {name: self.totals[name] + amount for name, amount in amounts.items()}

    def _restore(self, server: State) -> tuple[int, State]:
        """After the newest intact checkpoint, or at the beginning; later measurements are dropped.

        What the last measurement has cost is in no checkpoint yet.
        """
        if not self.federation.resume:
            return 0, server
        plan, folder, rows = self.plan, self.folder.checkpoints(self.job), partial(self.folder.measured, self.job)
        kept, refused = checkpoints.newest_server(
            folder, plan.algorithm, plan.start, settings(self.config), measured=rows
        )
        for line in refused:
            log.warning(line)
        done = 0
        if kept is not None:
            done, server = kept.t + 1, kept.server
            self.totals |= {name: kept.totals.get(name, 0.0) for name in self.totals}
            for name in KEPT:
                getattr(self, name).update(kept.totals.get(name, {}))
            log.info("continuing after round %d", kept.t)
        self.folder.delete_after(self.job, done if kept is not None else -1)
        records = self.folder.records(*self.job)
        measured = records[-1]["round"] if records else -1
        if measured == done:
            self.totals |= {name: records[-1].get(name, 0.0) for name in self.totals}
        path = self.folder.path / CLIENTS
        if path.exists():
            lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            write_atomically(path, "".join(line for line in lines if json.loads(line)["round"] <= measured).encode())
        return done, server

    def _save(self, t: int, server: State) -> None:
        self.folder.flush()
        kept = checkpoints.Checkpoint(t, server, self.totals | {name: getattr(self, name) for name in KEPT})
        measured = self.folder.measured(self.job)
        checkpoints.write_checkpoint(self.folder.checkpoints(self.job), kept, settings(self.config), measured=measured)

    def _status(self, **facts: Any) -> None:
        """Where the run is, for whoever watches the folder."""
        write_atomically(self.folder.path / "status.json", to_json({"pid": os.getpid(), **facts}))

    def _finish(self, reason: str | None) -> dict[str, Any]:
        done, server = self.last
        if self.folder.records(*self.job)[-1]["round"] < done:  # what ended the run is of an earlier round
            self._measure(done, server, True)
        records = self.folder.records(*self.job)
        first, last = records[0], records[-1]
        closing = (
            summary(last)
            | {name: int(last[name]) for name in (*WIRE, *REPLIES) if name in last}
            | {"ended": reason or DONE}
        )
        closing["took_part"] = dict(self.took_part)
        if left_out := self._left_out():
            closing["warnings"] = list(left_out.values())
        if "stationarity" in last:
            closing["measure_gamma"] = self.plan.measure_gamma
        by_all = first["clients_measured"] == last["clients_measured"] == self.n
        if by_all and (warning := rise(first["objective"], last["objective"])):
            closing["warning"] = warning
            log.warning(warning)
        self.folder.finish(self.job, closing, self.plan.saved(self.plan.algorithm.model(server)))
        self._status(done=done, finished=True)
        self.folder.write_checksums()
        return closing


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps({"time": record.created, "level": record.levelname, "message": record.getMessage()})


def _ticket(t: int) -> str:
    """Names one attempt at round t."""
    return f"{t:08d}-{secrets.token_hex(4)}"


def _is_exact(content: RecordDict) -> bool:
    """Whether a client says that its gradients have no noise; if not so, the measurement that follows tells."""
    about = content.get("about")
    return isinstance(about, MetricRecord) and about.get("exact") == 1
