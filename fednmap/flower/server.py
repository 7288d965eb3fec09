"""The server's half: a Flower ServerApp that runs any method of the library, round by round.

A round is counted when enough replies have arrived; the server's state and who was counted are then on disk before
anybody is told. A client's state moves only when a message tells it that its reply was counted.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from fednmap.core import Algorithm, State, pack, unpack
from fednmap.flower import wire
from fednmap.flower.measuring import NOTHING, Measurement, summed, told
from fednmap.flower.plan import Plan, plan_from
from fednmap.flower.preflight import Sites
from fednmap.flower.roster import Exchange, Roster, end_pulls_with_the_deadline, exchange
from fednmap.flower.secure import SecureSum, Sum
from fednmap.flower.settings import Federation, read, threshold
from fednmap.measure import numbers, residual, rise
from fednmap.names import InputError
from fednmap.privacy import Privacy
from fednmap.runs import checkpoints
from fednmap.runs.configuration import Config
from fednmap.runs.execution import DONE, extendable, scheduled_step, settings, stops_of, summary
from fednmap.runs.files import from_json, locked, to_json, write_atomically
from fednmap.runs.folder import EXTENDABLE, Job, RunFolder
from fednmap.runs.uplink_config import grid_of
from fednmap.simulation import Diverged, Record, schedules
from fednmap.simulation.callbacks import heard
from fednmap.simulation.loop import dry_run, mean
from fednmap.simulation.participation import Uniform, sampler_of, take_part
from fednmap.simulation.trajectory import TOTALS
from fednmap.simulation.uplink import Federation as Everybody
from fednmap.simulation.uplink import Received, Traffic

FACTS = "federation.json"
CLIENTS = "clients.jsonl"
SITES = "sites.json"
UNHEARD = frozenset({"algorithms", "trials", "drop"})
"""Settings of a trial that its server is not told, or not all of."""
LOOK = 1.0  # seconds between looks whether the SuperLink is still there
MISSED = 3  # rounds in succession after which a client that is drawn and not counted is warned of

WIRE = ("wire_up", "wire_down", "eval_wire_up", "eval_wire_down")
"""Bytes of the messages as they travel: of the rounds, and of the measurements."""

log = logging.getLogger("flwr")

MakePlan = Callable[[Config, Callable[[], Tensor]], Plan]


def without_data(config: Config, start: Callable[[], Tensor]) -> Plan:
    """A server that holds nothing: the first model comes from a client."""
    return plan_from(config, start())


def server_app(plan: MakePlan = without_data) -> ServerApp:
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
        end_with_the_superlink()
        end_pulls_with_the_deadline()
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


class News(NamedTuple):
    """The last round that was counted, for those who were in it: its mean uplink tells them what is broadcast now."""

    ticket: str
    up: ArrayRecord
    facts: dict[str, Any]


class Coordinator:
    """One run between machines."""

    def __init__(self, grid: Grid, config: Config, federation: Federation, make_plan: MakePlan) -> None:
        self.grid, self.config, self.federation = grid, config, federation
        self.n, self.job = len(federation.names), Job(config.algorithms[0], 0)
        self.roster = Roster.of(grid, federation)
        self.sites = Sites(grid, federation.deadline)
        self.make_plan = make_plan
        self.totals = dict.fromkeys((*TOTALS, *WIRE), 0.0)
        self.counted = dict.fromkeys(federation.names, "")
        self.refused = dict.fromkeys(federation.names, "")
        self.took_part = dict.fromkeys(federation.names, 0)
        self.missed = dict.fromkeys(federation.names, 0)
        """Rounds in succession, up to the last one, in which a client was drawn and not counted."""
        self.news: News | None = None
        self.lost: set[str] = set()
        """Clients that could not follow the news once: they are sent everything."""
        self.exact = False
        """Whether the last round has counted everybody, with exact gradients."""
        self.stops = stops_of(config)
        self.quantised = grid_of(config, self.n)

    def run(self) -> dict[str, Any]:
        """All rounds that are not done yet; the closing numbers, also kept in the run folder.

        A folder that another server is using is refused before anything in it is touched.
        """
        self.folder = self._found()
        with locked(self.folder.path):
            self._open()
            with _log_to(self.folder.path / "server.log"):
                try:
                    return self._run()
                except Exception as error:
                    self._status(error=f"{type(error).__name__}: {error}")
                    raise

    def _run(self) -> dict[str, Any]:
        self._status(waiting=True)
        self.roster.wait(self._least(self.n), self.federation.deadline)
        all_have = self.sites.check(self.roster.nodes, self._least(self.n), self.folder.path / SITES)
        plan = self.plan = self.make_plan(self.config, lambda: self.roster.start(self.config.dtype))
        plan.check(self.config)
        self.counts = dict(zip(self.federation.names, plan.weights or (1.0,) * self.n, strict=True))
        if len(plan.start) != all_have.dimension:
            words = f"the sites' model has {all_have.dimension} parameters, the server's {len(plan.start)}"
            raise InputError(f"{words}; give both the same model")
        if plan.algorithm.traits.full_participation and self._least(self.n) < self.n:
            name = type(plan.algorithm).__name__
            raise InputError(f"{name} needs every client in every round; set min-clients = {self.n}, or use FedNMap")
        server, client = plan.algorithm.init(plan.start)
        self.eta_a = scheduled_step(plan.algorithm, self.config)
        self.up_like = dry_run(plan.algorithm, server, client)
        self.packed_like = pack(plan.algorithm, self.up_like)
        self.traffic = Traffic(plan.algorithm, server, self.up_like, plan.pipeline(self.config))
        if self.quantised is not None and self.plan.weights is not None:
            raise InputError("secagg sums clients that count the same, given weights by samples; leave one out")
        done, server = self._restore(server)
        reason, measured = None, 0.0
        for record in self.folder.records(*self.job):
            reason, measured = self._heard(record), record["round"]
        if reason and measured < done:  # by a tolerance that has been loosened since
            reason = self._heard(self._measure(done, server))
        reason = self._measure_if_due(done, server) or reason
        while done < self.config.rounds and not reason:
            before, server = server, self._round(done, server)
            done += 1
            reason = self._measure_if_due(done, server, before)
            self._status(done=done)
        return self._finish(done, server, reason)

    def _round(self, t: int, server: State) -> State:
        """Round t, repeated until enough replies are good: the server's new state, on disk."""
        began, algorithm = time.monotonic(), schedules.at(self.plan.algorithm, self.eta_a, t)
        self.exact = False
        if not (drawn := self._drawn(t)):  # a sampler may name nobody
            self._save(t, server)
            return server
        privacy = self.plan.privacy
        least = max(self._least(len(drawn)), 0 if privacy is None else privacy.among or 0)
        down = wire.pack(algorithm.broadcast(server))
        for attempt in range(self.federation.attempts):
            nodes = self._participants(drawn, least, t, attempt)
            ticket = _ticket(t)
            following = {name for name in nodes if self._follows(name)}
            content = self._order(t, ticket, down, algorithm, following)
            order, up, found = self._collect(nodes, content, ticket, least)
            self.lost |= following & found.heard - found.replies.keys()  # such as those who could not follow
            whole = self.traffic.down * (len(nodes) - len(following))
            self._spend(bytes_up=self.traffic.up * len(found.replies), wire_up=found.wire_up, wire_down=found.wire_down)
            self._spend(bytes_down=whole + self.traffic.following * len(following))
            if len(order) >= least:
                break
            log.warning("round %d: %d good replies, %d needed", t, len(order), least)
        else:
            why = "; ".join(f"{name}: {reason}" for name, reason in self._absent(drawn, order, found).items())
            times = f"round {t} failed {self.federation.attempts} times ({why})"
            raise TimeoutError(f"{times}; its state is saved, continue with resume = true")
        share = sum(self.counts[name] for name in order) / sum(self.counts.values())
        if privacy is not None:
            up, share = self._noised(privacy, t, order, up)
        server = algorithm.aggregate(server, up, share)
        if not all(bool(torch.isfinite(v).all()) for v in server):
            raise Diverged(t)
        self.counted |= dict.fromkeys(order, ticket)
        absent = self._absent(drawn, order, found)
        for name in order:
            self.took_part[name] += 1
            self.missed[name] = 0
        for name in absent:
            self.missed[name] += 1
        self.news = self._news(ticket, up, share, algorithm, server)
        self.exact = privacy is None and len(order) == self.n and all(_is_exact(found.replies[name]) for name in order)
        self.totals["train_seconds"] += time.monotonic() - began
        self._save(t, server)
        seconds = time.monotonic() - began
        without = f", without {', '.join(absent)}" if absent else ""
        log.info("round %d: %d of %d clients counted%s, %.1f s", t, len(order), len(drawn), without, seconds)
        for name in absent:
            if self.missed[name] == MISSED:
                log.warning(self._left_out()[name])
        return server

    def _absent(self, drawn: list[int], order: list[str], found: Exchange) -> dict[str, str]:
        """The clients that were drawn and are not counted, each with the reason."""
        late = f"no good reply within {self.federation.deadline:g} s"

        def reason(name: str) -> str:
            if name not in self.roster.nodes:
                return "not connected"
            return "its data does not fit" if name in self.sites.unfit else found.errors.get(name, late)

        return {name: reason(name) for name in (self.federation.names[i] for i in drawn) if name not in order}

    def _left_out(self) -> dict[str, str]:
        """The clients that have not been counted for some rounds, or never; each with what follows."""
        long = {n: k for n, k in self.missed.items() if k >= MISSED or (k and not self.took_part[n])}
        late = f"raise the deadline, now {self.federation.deadline:g} s, if it is slow"
        means = f"the optimum is then another one than that of all {self.n} clients"
        return {name: f"{name} was not counted in its last {k} rounds; {means}; {late}" for name, k in long.items()}

    def _noised(self, privacy: Privacy, t: int, order: list[str], up: State) -> tuple[State, float]:
        """What a mean of private uplinks counts, and for how much: that does not depend on who came."""
        weight = sum(self.counts[name] for name in order)
        numbers = torch.tensor([self.federation.names.index(name) for name in order])
        found = privacy.aggregate(self._everybody, Received(t, numbers, [v * weight for v in up], weight))
        return type(up)(*found.up), found.share

    @property
    def _everybody(self) -> Everybody:
        weights = None if self.plan.weights is None else torch.tensor(self.plan.weights, dtype=torch.float64)
        return Everybody(self.n, weights, Uniform(), 0.0, 0)

    def _least(self, drawn: int) -> int:
        """Replies that a round needs in which so many clients are drawn."""
        return drawn if self.federation.min_clients is None else min(self.federation.min_clients, drawn)

    def _collect(self, nodes: dict[str, int], content: Callable[[str], RecordDict], ticket: str, least: int) -> Sum:
        """The clients that are counted, if they are enough, and the mean of their uplinks."""
        if self.quantised is not None:
            return self.secure(nodes, MessageType.TRAIN, content, ticket, self.up_like, self.quantised, least)
        found = exchange(self.grid, nodes, MessageType.TRAIN, content, self.federation.deadline)
        ups = found.read(lambda content: self._uplink(content, ticket))
        self.refused |= {name: "" if name in ups else found.errors[name] for name in found.replies}
        order = [name for name in self.federation.names if name in ups]
        up = mean([ups[name] for name in order], [self.counts[name] for name in order]) if order else None
        return Sum(order, up, found)

    def _participants(self, drawn: list[int], least: int, t: int, attempt: int) -> dict[str, int]:
        """Those of the simulator's draw who are connected; a repeated round draws among whoever is.

        Unless it has been unmasked, in part perhaps, for some clients: then it is for these.
        """
        config = self.config
        nodes = self.sites.fitting(self.roster.refresh())
        settled = self.secure.settled(MessageType.TRAIN, t)
        if len(nodes) < least or not set(settled) <= nodes.keys():
            nodes = self.sites.fitting(self.roster.wait(least, self.federation.deadline))
        wanted = settled or [self.federation.names[i] for i in drawn]
        if attempt and len(drawn) < self.n and not settled:
            order = np.random.default_rng([config.seed, t, attempt]).permutation(len(nodes))
            wanted = [list(nodes)[i] for i in order[: len(drawn)]]
        return {name: nodes[name] for name in self.federation.names if name in nodes and name in wanted}

    def _drawn(self, t: int) -> list[int]:
        """The numbers of the clients that the simulator would draw."""
        sampler = sampler_of(self.config.sampler, self.config.participation)
        return list(take_part(self.n, t, sampler=sampler, drop=0.0, seed=self.config.seed).participants.tolist())

    def _news(self, ticket: str, up: State, share: float, algorithm: Algorithm, server: State) -> News | None:
        if not self.traffic.follows:
            return None
        facts = {"share": share, "digest": wire.digest(algorithm.broadcast(server))}
        step = {} if self.eta_a is None else {"eta_a_before": schedules.step_of(algorithm)}
        return News(ticket, wire.pack(up), facts | step)

    def _follows(self, name: str) -> bool:
        """Whether the client holds what was broadcast in the round of the news: it was counted then."""
        return self.news is not None and self.counted[name] == self.news.ticket and name not in self.lost

    def _order(
        self, t: int, ticket: str, down: Any, algorithm: Algorithm, following: set[str]
    ) -> Callable[[str], RecordDict]:
        step = {} if self.eta_a is None else {"eta_a": schedules.step_of(algorithm)}

        def content(name: str) -> RecordDict:
            order = {
                "run": self.run_id,
                "t": t,
                "ticket": ticket,
                "client": self.federation.names.index(name),
                "counted": self.counted[name],
                "refused": self.refused[name],
                **step,
            }
            if self.news is not None and name in following:
                return RecordDict({"news": self.news.up, "round": ConfigRecord(order | self.news.facts)})
            return RecordDict({"down": down, "round": ConfigRecord(order)})

        return content

    def _uplink(self, content: RecordDict, ticket: str) -> State:
        """The uplink, if it passes the check; a client whose reply did not is told so with its next message."""
        if content["round"]["ticket"] != ticket:
            raise InputError("a reply to another round")
        packed = wire.unpack(content.get("up"), self.packed_like)
        for name, v, due in zip(packed._fields, packed, self.packed_like, strict=True):
            if not v.ndim and not v.is_floating_point() and v != due:  # a size, which unpacking would trust
                raise InputError(f"{name} is {v.item()}, expected {due.item()}")
        up = unpack(self.plan.algorithm, packed, self.up_like)
        if [v.shape for v in up] != [v.shape for v in self.up_like]:
            raise InputError("it unpacks to other shapes than expected")
        bound = self.federation.norm_bound
        for name, v in up._asdict().items():  # codes and units say nothing of the vector that they stand for
            if not bool(torch.isfinite(v).all()):
                raise InputError(f"{name} unpacks to NaN or infinity")
            if bound is not None and float(v.norm()) > bound:
                raise InputError(f"{name} has norm {float(v.norm()):.3g}, above the bound {bound:g}")
        return up

    def _measure_if_due(self, done: int, server: State, before: State | None = None) -> str | None:
        """Unless it was measured before the run was continued; a reason to end here."""
        due = done % self.config.eval_every == 0 or done == self.config.rounds
        spent = heard(self.stops, lambda stop: stop.on_spent(self.totals)) if before is not None else None
        if due or spent or (before is not None and self._passes(before, server)):
            records = self.folder.records(*self.job)
            if not records or records[-1]["round"] < done:
                return self._heard(self._measure(done, server)) or spent
        return spent

    def _passes(self, before: State, server: State) -> bool:
        """Whether the round has told that the model before it is good enough for a reason to stop."""
        judges = [stop for stop in self.stops if stop.wants_residual]
        known = self.plan.algorithm.known_gradient(before, server) if judges and self.exact else None
        if known is None:
            return False
        size = float(residual(*known, self.plan.phi, self.plan.measure_gamma).norm())
        return any([stop.on_residual(size) for stop in judges])

    def _heard(self, record: Record) -> str | None:
        """A reason to end here. What only some clients have measured is of another f: nothing is judged by it."""
        if self.config.dp_noise:
            return None
        if (measured := record["clients_measured"]) < self.n:
            words = "round %d: %d of %d clients measured, so that it is not judged whether to end"
            log.warning(words, record["round"], measured, self.n)
            return None
        return heard(self.stops, lambda stop: stop.on_record(record))

    def _measure(self, done: int, server: State) -> Record:
        """The model as the clients see it: loss always, the exact gradient where the federation allows it."""
        plan, began = self.plan, time.monotonic()
        x = plan.algorithm.model(server)
        found = NOTHING if self.config.dp_noise else self._measuring(done, x)  # noise hides what clients have
        gradient = found.gradient
        if gradient is None and self.federation.measure_stationarity:
            gradient = torch.full_like(x, math.nan)
        record = {"round": done, **numbers(x, found.loss, gradient, plan.phi, plan.measure_gamma)}
        record |= {} if math.isnan(found.accuracy) else {"test_accuracy": found.accuracy}
        record |= {"clients_measured": found.clients, **{name: f(x) for name, f in plan.metrics.items()}}
        record |= {} if plan.privacy is None else plan.privacy.spent(self._everybody, done)
        self.totals["eval_seconds"] += time.monotonic() - began
        with (self.folder.path / CLIENTS).open("a") as file:
            file.writelines(json.dumps({"round": done, "client": name, **v}) + "\n" for name, v in found.told.items())
        record |= self.totals
        self.folder.append(self.job, record)  # last: what is not there was not measured
        return record

    def _measuring(self, done: int, x: Tensor) -> Measurement:
        nodes, exactly = self.sites.fitting(self.roster.refresh()), self.federation.measure_stationarity
        if self.quantised is None:
            found = told(self.grid, nodes, x, exactly, self.federation.deadline, self.counts)
        else:
            settled = self.secure.settled(MessageType.EVALUATE, done)
            nodes = {name: node for name, node in nodes.items() if name in (settled or nodes)}
            found = summed(self.secure, nodes, x, exactly, _ticket(done))
        self._spend(eval_wire_up=found.wire_up, eval_wire_down=found.wire_down)
        return found

    def _spend(self, **amounts: float) -> None:
        self.totals |= {name: self.totals[name] + amount for name, amount in amounts.items()}

    def _found(self) -> RunFolder:
        """The run folder: one to go on in, one that was made for this run, or a new one."""
        path = self.federation.run_folder
        if self.federation.resume or ((path / "run.toml").exists() and not (path / FACTS).exists()):
            return RunFolder.open(path)
        return RunFolder.create(path, self.config, "flower")

    def _open(self) -> None:
        """Check and repair the folder, which is ours now, and settle the number under which clients keep states."""
        facts = self.folder.path / FACTS
        known = from_json(facts, dict) if facts.exists() else {}
        if known and not self.federation.resume:
            raise InputError(f"{self.folder.path} has been used in the meantime; choose another folder")
        if tuple(known.get("names", self.federation.names)) != self.federation.names:
            raise InputError(f"{self.folder.path} belongs to the clients {', '.join(known['names'])}; keep the names")
        if self.federation.resume:
            self._check_settings()
        self.folder.repair()
        if self.federation.resume:  # what may be changed, and was, stands in run.toml from now on
            before = self.folder.config(trust=True)
            after = before.model_copy(update={name: getattr(self.config, name) for name in EXTENDABLE - UNHEARD})
            if after != before:
                write_atomically(self.folder.path / "run.toml", after.toml().encode())
        self.run_id = known.get("run") or secrets.token_hex(8)
        write_atomically(facts, to_json({"run": self.run_id, **self.federation.model_dump(mode="json")}))
        least, deadline = threshold(self.config, self.federation), self.federation.deadline
        self.secure = SecureSum(self.grid, self.federation.names, least, deadline, self.run_id, self.folder.path)

    def _check_settings(self) -> None:
        """Refuse to go on with other settings than the run began with: it would begin again at round 0."""
        now, place = self.config.model_dump(mode="json"), self.folder.path
        words = self.folder.changed(now, extendable(self.config) | UNHEARD)
        if words:
            raise InputError(f"{place}: {words}; put it back, or begin a new run")
        began = self.folder.environment().get("settings") or now
        if began["algorithms"][0] != self.job.method:
            raise InputError(f"{place} is a run of {began['algorithms'][0]}, not {self.job.method}; begin a new run")

    def _restore(self, server: State) -> tuple[int, State]:
        """After the newest intact checkpoint, or at the beginning."""
        if not self.federation.resume:
            return 0, server
        plan, folder = self.plan, self.folder.checkpoints(self.job)
        kept, refused = checkpoints.newest_server(folder, plan.algorithm, plan.start, settings(self.config))
        for line in refused:
            log.warning(line)
        if kept is None:
            self._forget_after(-1)
            return 0, server
        self.totals, self.counted = {name: kept.totals[name] for name in self.totals}, kept.totals["counted"]
        self.took_part |= kept.totals.get("took_part", {})
        self.missed |= kept.totals.get("missed", {})
        self._forget_after(kept.t + 1)
        log.info("continuing after round %d", kept.t)
        return kept.t + 1, kept.server

    def _forget_after(self, done: int) -> None:
        """Drop measurements of rounds that will be run again; what the last one has cost is in no checkpoint yet."""
        self.folder.forget_after(self.job, done)
        records = self.folder.records(*self.job)
        measured = records[-1]["round"] if records else -1
        if records and measured == done:
            self.totals = {name: records[-1][name] for name in self.totals}
        path = self.folder.path / CLIENTS
        if path.exists():
            lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            write_atomically(path, "".join(line for line in lines if json.loads(line)["round"] <= measured).encode())

    def _save(self, t: int, server: State) -> None:
        about = {"counted": self.counted, "took_part": self.took_part, "missed": self.missed}
        self.folder.flush()
        checkpoints.keep(
            self.folder.checkpoints(self.job), checkpoints.Kept(t, server, self.totals | about), settings(self.config)
        )

    def _status(self, **facts: Any) -> None:
        """Where the run is, for whoever watches the folder."""
        write_atomically(self.folder.path / "status.json", to_json({"pid": os.getpid(), **facts}))

    def _finish(self, done: int, server: State, reason: str | None) -> dict[str, Any]:
        records = self.folder.records(*self.job)
        first, last = records[0], records[-1]
        closing = summary(last) | {name: int(last[name]) for name in WIRE} | {"ended": reason or DONE}
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
        return closing


def _ticket(t: int) -> str:
    """Names one attempt at round t."""
    return f"{t:08d}-{secrets.token_hex(4)}"


@contextmanager
def _log_to(path: Path) -> Iterator[None]:
    """What is said meanwhile is also written to the file."""
    file = logging.FileHandler(path, delay=True)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(file)
    try:
        yield
    finally:
        log.removeHandler(file)
        file.close()


def _is_exact(content: RecordDict) -> bool:
    """Whether a client says that its gradients have no noise; if not so, the measurement that follows tells."""
    about = content.get("about")
    return isinstance(about, MetricRecord) and about.get("exact") == 1
