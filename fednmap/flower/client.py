"""The client's half: a Flower ClientApp made from one function that loads the client's data."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fednmap.core import Algorithm, State
from fednmap.flower import wire
from fednmap.flower.ledger import Store
from fednmap.flower.local import LocalProblem
from fednmap.flower.plan import Plan, Point, plan_from
from fednmap.flower.preflight import TEXT, Site
from fednmap.flower.settings import client_name, read
from fednmap.names import InputError
from fednmap.runs.experiment import architecture
from fednmap.simulation import schedules
from fednmap.simulation.loop import dry_run
from fednmap.simulation.traffic import Traffic

Load = Callable[[Context], LocalProblem]

log = logging.getLogger("flwr")


def client_app(load: Load) -> ClientApp:
    """The app that a node runs: it computes, keeps its state on its own disk, and measures the model.

    load: this client's data as a LocalProblem; called once per message, because Flower starts a process for each.

    The node's own configuration says who it is and where its state is kept:
    `flower-supernode --node-config "client='hospital-a' state-dir='/var/lib/fednmap'"`.
    """
    app = ClientApp()

    @app.query()
    def hello(message: Message, context: Context) -> Message:
        """Who this is; the model's size and first values if asked for."""
        content = RecordDict({"client": ConfigRecord({"name": _name(context)})})
        if message.content["ask"]["start"]:
            content["start"] = wire.pack(Point(load(context).start))
        return Message(content, reply_to=message)

    @app.query("site")
    def site(message: Message, context: Context) -> Message:
        """What this site has: sizes, names and versions; or why it cannot say so."""
        try:
            about = Site.of(load(context)).record()
        except Exception as error:  # whatever a user's `load` provokes: the server names the site and says why
            about = {"failed": f"{type(error).__name__}: {error}"[:TEXT]}
        return Message(RecordDict({"site": ConfigRecord(about)}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        """The local steps of one round; the new state is on disk before the reply leaves."""
        order: Any = message.content["round"]
        local = load(context)
        name = _name(context)
        if order["refused"]:
            log.warning("%s: the server refused the last reply: %.200s", name, order["refused"])
        store = Store(_state_dir(context), order["run"], name)
        with store.locked():
            up = _answer(_plan(context, local), local, message.content, order, store)
        content = RecordDict(
            {
                "up": wire.pack(up),
                "round": ConfigRecord({"ticket": order["ticket"]}),
                "about": MetricRecord({"samples": local.samples, "exact": int(local.exact_gradients)}),
            }
        )
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        """Loss and sample count; the exact gradient only where the federation's settings, known here, allow it."""
        local = load(context)
        _, federation = read(context.run_config)
        x = wire.unpack(message.content["model"], Point(local.start)).x
        numbers: dict[str, Any] = {"samples": local.samples, "loss": local.loss(x)}
        accuracy = local.accuracy(x)
        if accuracy is not None:
            numbers["accuracy"] = accuracy
        content = RecordDict({"about": MetricRecord(numbers)})
        if federation.measure_stationarity:
            content["gradient"] = wire.pack(Point(local.gradient(x)))
        return Message(content, reply_to=message)

    return app


def _plan(context: Context, local: LocalProblem) -> Plan:
    """The method and the regularizer of the settings, for this client's model."""
    config, _ = read(context.run_config)
    torch.set_num_threads(1)  # several nodes may share this machine
    return plan_from(config, local.start, architecture(local.problem))


def _answer(plan: Plan, local: LocalProblem, content: RecordDict, order: Any, store: Store) -> State:
    """One client's half of a round: the packed uplink. The new state is pending until a later message counts it."""
    algorithm = schedules.at(plan.algorithm, order.get("eta_a"), int(order["t"]))
    server, initial = algorithm.init(plan.start)
    message = dry_run(algorithm, server, initial)
    down = algorithm.broadcast(server)
    if "news" in content:
        received = _followed(plan.algorithm, content["news"], order, store, down, message)
    else:
        received = wire.unpack(content["down"], down)
    g = local.oracle(int(order["client"]), int(order["t"]))
    up, state = algorithm.local(received, store.current(order["counted"], initial), g)
    store.keep(order["ticket"], state, received if Traffic(algorithm, server, message).follows else None)
    return algorithm.pack(up)


def _followed(algorithm: Algorithm, news: Any, order: Any, store: Store, down: State, message: State) -> State:
    """What the server would broadcast now, from what it sent in the round that was counted last and its mean uplink."""
    then = schedules.at(algorithm, order.get("eta_a_before"), 0)
    before = store.received(order["counted"], down)
    received = then.follow(before, wire.unpack(news, message), float(order["share"]))
    if received is None or wire.digest(received) != order["digest"]:
        raise RuntimeError("what this machine makes of the news is not what the server has; send it whole")
    return received


def _name(context: Context) -> str:
    if "client" not in context.node_config:
        raise InputError("this node has no name; start it with --node-config \"client='hospital-a'\"")
    return client_name(context.node_config["client"])


def _state_dir(context: Context) -> Path:
    return Path(str(context.node_config.get("state-dir", Path.home() / ".fednmap" / "clients"))).expanduser()
