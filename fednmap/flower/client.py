"""The client's half: a Flower ClientApp made from one function that loads the client's data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fednmap.core import Algorithm, State, next_broadcast, pack
from fednmap.flower import secure, wire
from fednmap.flower.audit import LOG, Handler, audited
from fednmap.flower.identity import prove
from fednmap.flower.ledger import Answers, Store
from fednmap.flower.local import LocalProblem
from fednmap.flower.plan import Measured, Plan, Point, plan_from
from fednmap.flower.preflight import TEXT, Site
from fednmap.flower.settings import Federation, client_name, read, threshold
from fednmap.names import InputError
from fednmap.runs.configuration import Config
from fednmap.runs.experiment import architecture, regularized
from fednmap.runs.uplink_config import grid_of
from fednmap.simulation import schedules, uplink
from fednmap.simulation.loop import dry_run
from fednmap.simulation.participation import Uniform
from fednmap.simulation.quantised import Quantised
from fednmap.simulation.uplink import Traffic, client_round

Load = Callable[[Context], LocalProblem]
MakePlan = Callable[[Context, LocalProblem], Plan]
Settings = Callable[[Mapping[str, Any]], tuple[Config, Federation]]

log = logging.getLogger("flwr")


def client_app(load: Load, plan: MakePlan | None = None, settings: Settings = read) -> ClientApp:
    """The app that a node runs: it computes, keeps its state on its own disk, and measures the model.

    load: this client's data as a LocalProblem; called once per message, because Flower starts a process for each.
    plan, settings: for apps with settings of their own: the method, and what their settings mean. Default: as
          `fednmap.flower.settings` has it.

    The node's own configuration says who it is and where its state is kept:
    `flower-supernode --node-config "client='hospital-a' state-dir='/var/lib/fednmap'"`; besides, `key='FILE'` is the
    node's private key, with which it proves its name, and `require-secagg=true` refuses to send a vector unmasked.
    """
    app = ClientApp()
    make_plan = plan or _plan

    def logged(handler: Handler) -> Handler:
        return audited(handler, _log_file, lambda message, context: _treated(*settings(context.run_config), message))

    @app.query()
    @logged
    def hello(message: Message, context: Context) -> Message:
        """Who this is; the model's size and first values if asked for."""
        name, ask = _name(context), message.content["ask"]
        content = RecordDict({"client": ConfigRecord({"name": name})})
        if "key" in context.node_config and "nonce" in ask:
            key = Path(str(context.node_config["key"])).expanduser()
            content["proof"] = ConfigRecord(prove(key, str(ask["nonce"]), name, message.metadata.dst_node_id))
        if ask["start"]:
            content["start"] = wire.pack(Point(load(context).start))
        return Message(content, reply_to=message)

    @app.query("site")
    @logged
    def site(message: Message, context: Context) -> Message:
        """What this site has: sizes, names and versions; or why it cannot say so."""
        try:
            about: dict[str, Any] = Site.of(load(context)).model_dump(mode="json")
        except Exception as error:  # whatever a user's `load` provokes: the server names the site and says why
            about = {"failed": f"{type(error).__name__}: {error}"[:TEXT]}
        return Message(RecordDict({"site": ConfigRecord(about)}), reply_to=message)

    @app.train()
    @logged
    def train(message: Message, context: Context) -> Message:
        """The local steps of one round; the new state is on disk before the reply leaves."""
        order: Any = message.content["round"]
        local = load(context)
        name, masks = _name(context), _masks(*settings(context.run_config), context, message)
        if order["refused"]:
            log.warning("%s: the server refused the last reply: %.200s", name, order["refused"])
        store = Store(_state_dir(context), order["run"], name)
        plan = make_plan(context, local)
        plan.check(settings(context.run_config)[0])
        with store.locked():
            up = _answer(plan, local, message.content, order, store, plan.pipeline(settings(context.run_config)[0]))
            noised = plan.privacy is not None and plan.privacy.noise_multiplier > 0
            content = (
                RecordDict({"up": wire.pack(pack(plan.algorithm, up))}) if masks is None else masks.masked(up, noised)
            )
        content["round"] = ConfigRecord({"ticket": order["ticket"]})
        content["about"] = MetricRecord({"samples": local.samples, "exact": int(local.exact_gradients)})
        return Message(content, reply_to=message)

    for stage in secure.GIVE:

        @app.train(stage)
        @logged
        def give(message: Message, context: Context, stage: str = stage) -> Message:
            """A stage of secure aggregation in which no vector is sent."""
            config, federation = settings(context.run_config)
            me, least = federation.names.index(_name(context)), threshold(config, federation)
            order, answers = message.content[secure.STATE], _answers(context)
            return Message(secure.GIVE[stage](secure.SumClient(context, order, me, least, answers)), reply_to=message)

    @app.evaluate()
    @logged
    def evaluate(message: Message, context: Context) -> Message:
        """Loss and sample count; the exact gradient only where the federation's settings, known here, allow it."""
        local = load(context)
        config, federation = settings(context.run_config)
        if config.dp_noise:
            raise InputError("dp_noise hides what this client has, and measurements carry none; refused")
        masks = _masks(config, federation, context, message)
        x = wire.unpack(message.content["model"], Point(local.start)).x
        gradient = local.gradient(x) if federation.measure_stationarity else x.new_zeros(0)
        loss, accuracy = local.loss(x), local.accuracy(x)
        if masks is not None:
            told = (loss, 0.0, 0.0) if accuracy is None else (loss, accuracy, 1.0)
            return Message(masks.masked(Measured(torch.tensor(told, dtype=torch.float64), gradient)), reply_to=message)
        numbers: dict[str, Any] = {"samples": local.samples, "loss": loss}
        if accuracy is not None:
            numbers["accuracy"] = accuracy
        content = RecordDict({"about": MetricRecord(numbers)})
        if federation.measure_stationarity:
            content["gradient"] = wire.pack(Point(gradient))
        return Message(content, reply_to=message)

    return app


def _plan(context: Context, local: LocalProblem) -> Plan:
    """The method and the regularizer of the settings, for this client's model."""
    config, _ = read(context.run_config)
    torch.set_num_threads(1)  # several nodes may share this machine
    return plan_from(config, local.start, architecture(local.problem), regularized(local.problem))


def _masks(config: Config, federation: Federation, context: Context, message: Message) -> secure.SumClient | None:
    """None in a federation without secure aggregation; with it, nothing is sent in the clear."""
    if not config.secagg:
        if context.node_config.get("require-secagg"):
            raise InputError("this client takes part with secure aggregation alone; set secagg = true")
        return None
    if secure.STATE not in message.content:
        raise InputError("secagg: the server asks for a vector in the clear; refused")
    order: Any = message.content[secure.STATE]
    about: Any = message.content.get("round")
    if about is not None:
        told = (about["run"], about["ticket"], about["t"])
        if told != (order["run"], order["ticket"], secure.round_of(str(order["ticket"]))):
            raise InputError("secagg: the server names one round in the clear, and another one in the sum; refused")
    me, least = federation.names.index(_name(context)), threshold(config, federation)
    kind, grid = message.metadata.message_type, _grid(config, federation, message)
    return secure.SumClient(context, order, me, least, _answers(context), kind, grid)


def _answer(
    plan: Plan, local: LocalProblem, content: RecordDict, order: Any, store: Store, pipeline: uplink.Pipeline
) -> State:
    """One client's half of a round: the uplink. The new state is pending until a later message counts it."""
    algorithm = schedules.at(plan.algorithm, order.get("eta_a"), int(order["t"]))
    server, initial = algorithm.init(plan.start)
    message = dry_run(algorithm, server, initial)
    down = algorithm.broadcast(server)
    if "news" in content:
        received = _followed(plan.algorithm, content["news"], order, store, down, message)
    else:
        received = wire.unpack(content["down"], down)
    g = local.oracle_for(algorithm, int(order["client"]), int(order["t"]))
    before = store.current(order["counted"], initial)
    # what a client sends depends on nobody else; its noise is drawn from a secret of its own
    alone = uplink.Federation(1, None, Uniform(), 0.0, store.secret() if pipeline.stages else 0)
    number = torch.tensor(int(order["client"]))
    up, state = client_round(algorithm, pipeline, alone, int(order["t"]), number, received, before, g)
    store.keep(order["ticket"], state, received if Traffic(algorithm, server, message).follows else None)
    return up


def _followed(algorithm: Algorithm, news: Any, order: Any, store: Store, down: State, message: State) -> State:
    """What the server would broadcast now, from what it sent in the round that was counted last and its mean uplink."""
    then = schedules.at(algorithm, order.get("eta_a_before"), 0)
    before = store.received(order["counted"], down)
    received = next_broadcast(then, before, wire.unpack(news, message), float(order["share"]))
    if wire.digest(received) != order["digest"]:
        raise RuntimeError("what this machine makes of the news is not what the server has; send it whole")
    return received


def _name(context: Context) -> str:
    if "client" not in context.node_config:
        raise InputError("this node has no name; start it with --node-config \"client='hospital-a'\"")
    return client_name(context.node_config["client"])


def _log_file(context: Context) -> Path:
    """Where this client enters what it sends."""
    return _state_dir(context) / LOG / f"{_name(context)}.jsonl"


def _grid(config: Config, federation: Federation, message: Message) -> Quantised | None:
    """What is rounded to in the answer; measurements have a grid of their own."""
    n = len(federation.names)
    return Quantised(n) if message.metadata.message_type == MessageType.EVALUATE else grid_of(config, n)


def _treated(config: Config, federation: Federation, message: Message) -> dict[str, Any]:
    """What is done to vectors in the answer."""
    grid, uplinks = _grid(config, federation, message), message.metadata.message_type == MessageType.TRAIN
    rounded = {} if grid is None or not config.secagg else {"step": grid.step}
    return {"clipped": uplinks and config.dp_clip is not None, "noised": uplinks and bool(config.dp_noise), **rounded}


def _answers(context: Context) -> Answers:
    """Where this client enters what it has answered in secure sums."""
    return Answers(_state_dir(context) / "secagg" / _name(context))


def _state_dir(context: Context) -> Path:
    return Path(str(context.node_config.get("state-dir", Path.home() / ".fednmap" / "clients"))).expanduser()
