"""The client's half: a Flower ClientApp made from one function that loads the client's data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from fednmap.core import Algorithm, State, next_broadcast, pack
from fednmap.flower import secure, wire
from fednmap.flower.audit_log import Answer, Settings, audited, private
from fednmap.flower.identity import prove
from fednmap.flower.local import LocalProblem
from fednmap.flower.plan import Measured, Plan, Point, plan_from
from fednmap.flower.preflight import TEXT, Site
from fednmap.flower.settings import Node, read
from fednmap.flower.state_store import Store, round_of
from fednmap.flower.worker import resident
from fednmap.names import InputError
from fednmap.runs.experiment import architecture, regularized
from fednmap.simulation import lock, schedules, uplink
from fednmap.simulation.loop import dry_run
from fednmap.simulation.participation import Uniform
from fednmap.simulation.uplink import Traffic, client_round

Load = Callable[[Context], LocalProblem]
MakePlan = Callable[[Context, LocalProblem], Plan]

T = TypeVar("T")

log = logging.getLogger("flwr")


def client_app(
    load: Load,
    plan: MakePlan | None = None,
    settings: Settings = read,
) -> ClientApp:
    """The app that a node runs: it computes, keeps its state on its own disk, and measures the model.

    load: this client's data as a LocalProblem; called once per run on a node of `fednmap.flower.node`, and once per
          message on Flower's own, which starts a process for each.
    plan, settings: for apps with other settings: the method, and what their settings mean. Default: as
          `fednmap.flower.settings` has it.

    The node's own configuration says who it is and where its state is kept:
    `flower-supernode --node-config "client='hospital-a' state-dir='/var/lib/fednmap'"`; and `key='FILE'` is the
    node's private key, with which it proves its name and signs its keys of secure sums; `clients-file='FILE'` is its
    own copy of clients.toml, by which it checks those of others; `require-secagg=true` refuses to send a vector
    unmasked; `rules='FILE'` are the site's own limits (`fednmap.flower.disclosure`).
    """
    load = once(load)

    def guarded(node: Node, question: str) -> LocalProblem:
        """This client's problem, as far as its rules let it answer."""
        with private(node.name):
            node.rules.asked(question)
            return node.rules.guarded(load(node.context), node.folder, node.name)

    def site(message: Message, node: Node) -> RecordDict:
        """What this site has: sizes, names and versions; or that it cannot say so."""
        try:
            about: dict[str, Any] = Site.of(guarded(node, "site")).model_dump(mode="json")
        except InputError as error:  # the server names the site and says why
            about = {"failed": str(error)[:TEXT]}
        return RecordDict({"site": ConfigRecord(about)})

    def train(message: Message, node: Node) -> RecordDict:
        """The local steps of one round; the new state is on disk before the reply leaves."""
        order: Any = message.content["round"]
        local, masks = guarded(node, "train"), masks_of(message, node)
        node.rules.spend(node.config.dp_noise, node.folder, node.name)
        if order["refused"]:
            log.warning("%s: the server refused the last reply: %.200s", node.name, order["refused"])
        store, made = Store(node.folder, order["run"], node.name), (plan or _plan)(node.context, local)
        pipeline, privacy = made.pipeline(node.config), made.privacy
        with lock.exclusive(store.folder / "lock"):  # a node that was replaced may not have noticed
            up = _answer(made, local, message.content, store, pipeline)
            if masks is None:
                content = RecordDict({"up": wire.pack(pack(made.algorithm, up))})
            else:
                content = masks.masked(up, noised=privacy is not None and privacy.noise_multiplier > 0)
        content["round"] = ConfigRecord({"ticket": order["ticket"]})
        content["about"] = MetricRecord({"samples": local.samples, "exact": int(local.exact_gradients)})
        return content

    def evaluate(message: Message, node: Node) -> RecordDict:
        """Loss and sample count; the exact gradient only where the federation's settings, known here, allow it."""
        local, exactly = guarded(node, "evaluate"), node.federation.measure_stationarity
        if node.config.dp_noise:
            raise InputError("dp_noise hides what this client has, and measurements carry none; refused")
        node.rules.spend(None, node.folder, node.name)
        masks = masks_of(message, node)
        x = wire.unpack(message.content["model"], Point(local.start)).x
        gradient = local.gradient(x) if exactly else x.new_zeros(0)
        loss, measured = local.loss(x), local.measured(x)
        if masks is not None:
            return masks.masked(Measured.of(loss, measured, ("accuracy", *local.metrics), gradient))
        content = RecordDict({"about": MetricRecord({"samples": local.samples, "loss": loss})})
        if measured:
            content["metrics"] = MetricRecord(dict(measured))
        if exactly:
            content["gradient"] = wire.pack(Point(gradient))
        return content

    answers: dict[str, Answer] = {"query": hello(lambda context: load(context).start), "query.site": site}
    return app_of(answers | {"train": train, "evaluate": evaluate}, settings)


def app_of(answers: Mapping[str, Answer], settings: Settings) -> ClientApp:
    """The app that gives these answers, by kind of message, and takes part in secure sums."""
    app, known = ClientApp(), {**answers, **{f"train.{stage}": give for stage in secure.GIVE}}

    def answer(message: Message, context: Context) -> Message:
        return audited(known[message.metadata.message_type], settings)(message, context)

    for kind in known:
        category, _, action = kind.partition(".")
        getattr(app, category)(*([action] if action else []))(resident(answer))
    return app


def hello(start: Callable[[Context], Tensor] | None = None) -> Answer:
    """Who this is; the model's first values if asked for."""

    def said(message: Message, node: Node) -> RecordDict:
        ask: Any = message.content["ask"]
        content = RecordDict({"client": ConfigRecord({"name": node.name})})
        if "key" in node.context.node_config and "nonce" in ask:
            key = Path(str(node.context.node_config["key"])).expanduser()
            content["proof"] = ConfigRecord(prove(key, str(ask["nonce"]), node.name, message.metadata.dst_node_id))
        if ask["start"] and start is not None:
            with private(node.name):
                content["start"] = wire.pack(Point(start(node.context)))
        return content

    return said


def give(message: Message, node: Node) -> RecordDict:
    """A stage of secure aggregation in which no vector is sent."""
    kind = message.metadata.message_type
    return secure.GIVE[kind.partition(".")[2]](secure.SumClient(node, message.content, kind))


def once(load: Callable[[Context], T]) -> Callable[[Context], T]:
    """`load`, called once for each run and node."""
    known: dict[tuple[int, int], T] = {}

    def loaded(context: Context) -> T:
        which = context.run_id, context.node_id
        if which not in known:
            known[which] = load(context)
        return known[which]

    return loaded


def _plan(context: Context, local: LocalProblem) -> Plan:
    """The method and the regularizer of the settings, for this client's model."""
    config, _ = read(context.run_config)
    torch.set_num_threads(1)  # several nodes may share this machine
    return plan_from(config, local.start, architecture(local.problem), regularized(local.problem))


def masks_of(message: Message, node: Node) -> secure.SumClient | None:
    """None in a federation without secure aggregation; with it, nothing is sent in the clear."""
    if not node.config.secagg:
        if node.context.node_config.get("require-secagg"):
            raise InputError("this client takes part with secure aggregation alone; set secagg = true")
        return None
    if secure.STATE not in message.content:
        raise InputError("secagg: the server asks for a vector in the clear; refused")
    order: Any = message.content[secure.STATE]
    about: Any = message.content.get("round")
    if about is not None:
        told, summed = (about["run"], about["ticket"], about["t"]), (order["run"], order["ticket"])
        if told != (*summed, round_of(str(order["ticket"]))):
            raise InputError("secagg: the server names one round in the clear, and another one in the sum; refused")
    return secure.SumClient(node, message.content, message.metadata.message_type)


def _answer(plan: Plan, local: LocalProblem, content: RecordDict, store: Store, pipeline: uplink.Pipeline) -> State:
    """One client's half of a round: the uplink. The new state is pending until a later message counts it."""
    order: Any = content["round"]
    t, number = int(order["t"]), int(order["client"])
    algorithm = schedules.at(plan.algorithm, order.get("eta_a"), t)
    server, initial = algorithm.init(plan.start)
    message, down = dry_run(algorithm, server, initial), algorithm.broadcast(server)
    if "news" in content:
        received = _followed(plan.algorithm, content["news"], order, store, down, message)
    else:
        received = wire.unpack(content["down"], down)
    g, before = local.oracle_for(algorithm, number, t), store.current(order["counted"], initial)
    # what a client sends depends on nobody else; its noise is drawn from the client's secret
    alone = uplink.Federation(1, None, Uniform(), 0.0, store.secret() if pipeline.stages else 0)
    up, state = client_round(algorithm, pipeline, alone, t, torch.tensor(number), received, before, g)
    store.keep(order["ticket"], state, received if Traffic(algorithm, server, message).follows else None)
    return up


def _followed(algorithm: Algorithm, news: Any, order: Any, store: Store, down: State, message: State) -> State:
    """What the server would broadcast now, from what it sent in the round that was counted last and its mean uplink."""
    then = schedules.at(algorithm, order.get("eta_a_before"), 0)
    before = store.received(order["counted"], down)
    received = next_broadcast(then, before, wire.unpack(news, message), float(order["share"]))
    if wire.digest(received) != order["digest"]:
        raise InputError("what this machine makes of the news is not what the server has; send it whole")
    return received
