"""The server's half: a Flower ServerApp that runs any method of the library, and records it in a run folder.

A round is counted when enough replies have arrived; the server's state and who was counted are on disk before
any client is notified.
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
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from fednmap.core import State
from fednmap.flower import loopback
from fednmap.flower.late_replies import LateReplies
from fednmap.flower.plan import Plan, plan_from
from fednmap.flower.roster import Exchange, Mailbox, Roster
from fednmap.flower.rounds import REPLIES, WIRE, AllReplies, RoundLoop, least_replies
from fednmap.flower.secure import SecureSum, Sum
from fednmap.flower.settings import FederationSettings, read, threshold
from fednmap.measure import numbers, residual, rise
from fednmap.names import InputError
from fednmap.runs.atomic_files import from_json, locked, to_json, write_atomically
from fednmap.runs.checkpoints import Checkpoint
from fednmap.runs.configuration import Config
from fednmap.runs.execution import DONE, Recorder, extendable, stops_of
from fednmap.runs.folder import EXTENDABLE, Job, RunFolder
from fednmap.simulation import Callback, Record, Round
from fednmap.simulation.callbacks import Reason, first_reason
from fednmap.simulation.states import Clients
from fednmap.simulation.trajectory import measure_rounds

FACTS = "federation.json"
CLIENTS = "clients.jsonl"
SITES = "sites.json"
LOOK = 1.0  # seconds between looks whether the SuperLink is still there
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


@contextmanager
def logged(folder: Path, as_json: bool = False) -> Iterator[None]:
    """Write what is logged into server.log of this folder too."""
    file = logging.FileHandler(folder / "server.log", delay=True)
    file.setFormatter(_JsonLines() if as_json else logging.Formatter(LINE))
    log.addHandler(file)
    try:
        yield
    finally:
        log.removeHandler(file)
        file.close()


def run_number(folder: Path, federation: FederationSettings) -> str:
    """Return the number under which clients keep their states of this run; it is drawn and kept at first."""
    known = from_json(folder / FACTS, dict) if (folder / FACTS).exists() else {}
    run = str(known.get("run") or secrets.token_hex(8))
    write_atomically(folder / FACTS, to_json({"run": run, **federation.model_dump(mode="json")}))
    return run


class Coordinator(Callback):
    """One run between machines.

    rounds: who is asked and counted.
    reason: of an asynchronous run: why it ends, by a measurement that was waited for.
    """

    rounds: RoundLoop

    def __init__(self, grid: Grid, config: Config, federation: FederationSettings, make_plan: MakePlan) -> None:
        self.config, self.federation, self.make_plan = config, federation, make_plan
        self.names, self.n, self.job = federation.names, len(federation.names), Job(config.algorithms[0], 0)
        self.roster = Roster(grid, federation)
        self.stops = stops_of(config)
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
            with logged(self.folder.path, self.federation.log_json):
                try:
                    return self._run()
                except Exception as error:
                    self._status(error=f"{type(error).__name__}: {error}")
                    raise

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
        self.run_id = run_number(path, self.federation)
        self.recorder = Recorder(self.config, self.folder)

    def _run(self) -> dict[str, Any]:
        self._status(waiting=True)
        least = least_replies(self.federation, self.n)
        self.roster.wait(least)
        sites = self.roster.check_sites(least)
        write_atomically(
            self.folder.path / SITES, to_json({name: site.model_dump(mode="json") for name, site in sites.items()})
        )
        plan = self.plan = self.make_plan(self.config, lambda: self.roster.start(self.config.dtype))
        site, traits, late = next(iter(sites.values())), plan.algorithm.traits, plan.asynchronous
        if len(plan.start) != site.dimension:
            words = f"the sites' model has {site.dimension} parameters, the server's {len(plan.start)}"
            raise InputError(f"{words}; give both the same model")
        if traits.full_participation and least < self.n:
            name = type(plan.algorithm).__name__
            raise InputError(f"{name} needs every client in every round; set min-clients = {self.n}, or use FedNMap")
        if self.config.secagg and plan.weights is not None:
            raise InputError("secagg sums clients that count the same, given weights by samples; leave one out")
        secure = SecureSum(self.roster, threshold(self.config, self.federation), self.run_id, self.folder.path)
        given = self.roster, secure, self.config, self.federation, plan, site.metrics
        with Mailbox(self.roster.grid) as mail:
            self.rounds = AllReplies(*given) if late is None else LateReplies(late, mail, self._record_late, *given)
            server, client = self.rounds.initial
            done, server = self.last = self._restore(server)
            reason, begin = self._so_far(done)
            reason = reason or measure_rounds(
                self._rounds(done, server, client),
                server,
                self.rounds.totals,
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
        """Yield the rounds that are not done yet, each when it is on disk; clients keep their states."""
        nowhere, totals = Clients(0, client).snapshot(), self.rounds.totals
        for t in range(done, self.config.rounds):
            before = dict(totals)
            step = self.rounds.play(t, server)
            server, who = step.server, ([*step.tickets, *step.absent], step.tickets)
            self.last = t + 1, server
            drawn, counted = (torch.tensor([self.names.index(name) for name in names]) for names in who)
            up, down = (int(totals[key] - before[key]) for key in ("bytes_up", "bytes_down"))
            self.recorder.save(Checkpoint(t, server, self.rounds.kept()))
            yield Round(t, server, nowhere, drawn, counted, up, down)

    def on_round(self, last: Round, totals: Record) -> Reason | None:
        """Say where the run is; a reason to end that has come since."""
        self._status(done=last.t + 1)
        return self.reason

    def _revealed(self, before: State, last: Round) -> float | None:
        """|F_nat| of the model before a round with exact gradients of everybody, by which the method knows it."""
        known = self.plan.algorithm.known_gradient(before, last.server) if self.rounds.exact else None
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
        """Return the record of the model as the clients see it; None if an asynchronous run does not wait for it."""
        began, x = time.monotonic(), self.plan.algorithm.model(server)
        told = Sum([], None, Exchange()) if self.config.dp_noise else self.rounds.measurement(done, x, ends)
        if told is None:
            return None
        self.rounds.spend(eval_seconds=time.monotonic() - began)
        return self._record(done, x, told)

    def _record_late(self, done: int, x: Tensor, told: Sum) -> None:
        """Enter a measurement that was waited for while rounds went on."""
        self.reason = self._reason_at(self._record(done, x, told)) or self.reason

    def _record(self, done: int, x: Tensor, told: Sum) -> Record:
        """Enter what clients say of x: loss always, the exact gradient where the federation allows it."""
        plan, exactly, (names, of_all, found) = self.plan, self.federation.measure_stationarity, told
        said = of_all.values(self.rounds.metrics) if names else {}
        loss, gradient = said.get("loss", math.nan), torch.full_like(x, math.nan) if exactly else None
        if names and exactly:
            gradient = of_all.gradient
        self.rounds.spend(eval_wire_up=found.wire_up, eval_wire_down=found.wire_down)
        record = {"round": done, **numbers(x, loss, gradient, plan.phi, plan.measure_gamma)}
        record |= {"test_accuracy" if name == "accuracy" else name: v for name, v in said.items() if name != "loss"}
        record |= {"clients_measured": len(names), **{name: f(x) for name, f in plan.metrics.items()}}
        record |= {} if plan.privacy is None else plan.privacy.spent(self.rounds.everybody, done)
        if plan.asynchronous is not None:
            times, late = self.rounds.took_part.values(), self.rounds.late
            record |= {"staleness": late["sum"] / max(1, sum(times)), "staleness_max": late["most"]}
            record |= {"counted_least": min(times), "counted_most": max(times)}
        if self.config.secagg:  # only the sum over clients is known
            each = {"*": said} if names else {}
        else:
            each = {name: self.rounds.numbers_of(found.replies[name]) for name in names}
        with (self.folder.path / CLIENTS).open("a") as file:
            file.writelines(json.dumps({"round": done, "client": name, **v}) + "\n" for name, v in each.items())
        record |= self.rounds.totals
        self.recorder.on_record(record)  # last: what is not there was not measured
        return record

    def _restore(self, server: State) -> tuple[int, State]:
        """After the newest intact checkpoint, or at the beginning; later measurements are dropped.

        What the last measurement has cost is in no checkpoint yet.
        """
        if not self.federation.resume:
            return 0, server
        kept, refused = self.recorder.latest(self.plan.algorithm, self.plan.start)
        for line in refused:
            log.warning(line)
        done = 0
        if kept is not None:
            done, server = kept.t + 1, kept.server
            self.rounds.restore(kept.totals)
            log.info("continuing after round %d", kept.t)
        records = self.recorder.restart(kept)
        measured = records[-1]["round"] if records else -1
        if measured == done:
            self.rounds.totals |= {name: records[-1].get(name, 0.0) for name in self.rounds.totals}
        path = self.folder.path / CLIENTS
        if path.exists():
            lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            write_atomically(path, "".join(line for line in lines if json.loads(line)["round"] <= measured).encode())
        return done, server

    def _status(self, **facts: Any) -> None:
        """Where the run is, for whoever watches the folder."""
        write_atomically(self.folder.path / "status.json", to_json({"pid": os.getpid(), **facts}))

    def _finish(self, reason: str | None) -> dict[str, Any]:
        done, server = self.last
        if self.folder.records(*self.job)[-1]["round"] < done:  # what ended the run is of an earlier round
            self._measure(done, server, True)
        records = self.folder.records(*self.job)
        first, last = records[0], records[-1]
        closing: dict[str, Any] = {name: int(last[name]) for name in (*WIRE, *REPLIES) if name in last}
        closing["ended"] = reason or DONE
        closing["took_part"] = dict(self.rounds.took_part)
        if left_out := self.rounds.left_out():
            closing["warnings"] = list(left_out.values())
        if "stationarity" in last:
            closing["measure_gamma"] = self.plan.measure_gamma
        by_all = first["clients_measured"] == last["clients_measured"] == self.n
        if by_all and (warning := rise(first["objective"], last["objective"])):
            closing["warning"] = warning
            log.warning(warning)
        closing = self.recorder.finish(self.plan.saved(self.plan.algorithm.model(server)), **closing)
        self._status(done=done, finished=True)
        self.folder.write_checksums()
        return closing


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps({"time": record.created, "level": record.levelname, "message": record.getMessage()})
