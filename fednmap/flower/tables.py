"""A linear model of tables between real machines: every node reads its own file, and the fit is the estimator's.

Before round 0 the server puts questions to the sites (`fednmap.estimators.handshake`): which columns and levels there
are, sums and squared deviations, the classes of the target, the curvature. What comes of it, the agreement, goes to
every site, which keeps it on its disk. Then rounds as ever: FedNMap with exact gradients, one local step and memory,
until |F_nat| is small. The run folder ends with `model.json`, the model on the scale of the tables' own columns.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fednmap.estimators import folder as kept
from fednmap.estimators.fit_config import FitConfig, listed, with_weight
from fednmap.estimators.handshake import Agreement, Disagreement, answer, negotiate
from fednmap.estimators.penalties import told_lam
from fednmap.flower import client as plain
from fednmap.flower.audit import in_words, refusal
from fednmap.flower.local import LocalProblem
from fednmap.flower.plan import Plan
from fednmap.flower.roster import Roster
from fednmap.flower.server import Coordinator, app_of
from fednmap.flower.settings import FederationSettings, Node, split
from fednmap.names import InputError
from fednmap.runs.configuration import Config
from fednmap.runs.files import digest, from_json, to_json, write_atomically
from fednmap.runs.folder import Model, RunFolder
from fednmap.simulation import lock
from fednmap.tables import Table, table
from fednmap.tables.statistics import NARROWINGS, Answers, Question, carry

AGREEMENT = "agreement.json"
QUESTION = f"{MessageType.QUERY}.tables"

FAMILIES = ("gaussian", "logistic", "poisson", "huber", "cox")
"""Those of a fit between machines."""

LoadTable = Callable[[Context], Any]

log = logging.getLogger("flwr")


def read(run_config: Mapping[str, Any]) -> tuple[FitConfig, FederationSettings]:
    """What is fitted and who takes part, from kebab-case keys; "" stands for a default."""
    own, given = split(run_config, FitConfig)
    federation = FederationSettings.make(**own | {"measure_stationarity": True})
    if federation.secagg_threshold is not None:
        raise InputError("secagg-threshold is given, and a fit of tables has no secure aggregation; leave it out")
    task = FitConfig.make(**with_weight(given))
    used: dict[str, Any] = {"offset": task.offset, "exposure": task.exposure, "formula": task.formula}
    used |= {"penalty-factor": task.penalty_factor or None, "bounds": task.bounds or None}
    alone = [name for name, value in used.items() if value is not None]
    alone += [f"family {task.family}"] if task.family not in FAMILIES else []
    if alone:
        raise InputError(f"{alone[0]} is for `fednmap fit` in one process; a fit between machines does not have it yet")
    return task, federation.model_copy(update={"min_clients": len(federation.names)})


def common_settings(run_config: Mapping[str, Any]) -> tuple[Config, FederationSettings]:
    """What the common part of the app reads; the method is the agreement's."""
    task, federation = read(run_config)
    about = {"data": "own", "clients": len(federation.names), "rounds": task.rounds}
    return Config.make(**about, batch_size=0, dtype="float64"), federation


def client_app(load: LoadTable) -> ClientApp:
    """The app of a site's node.

    load: this site's rows, as a frame or a `fednmap.tables.Table` with named columns; called once per run.
    """

    load = plain.once(load)

    def rows(node: Node) -> Table:
        own, task = Table(table(load(node.context)).columns, node.name), read(node.context.run_config)[0]
        return node.rules.table(own, task.goals, list(task.features(own).columns), listed(task.categorical))

    def local(context: Context) -> LocalProblem:
        node, known = Node(context), _agreed(Node(context))
        return LocalProblem(known.local(rows(node)), weight=known.weight(node.name) * len(known.rows))

    def asked(message: Message, node: Node) -> RecordDict:
        """The answer to a question about the columns, or why there is none; or what was agreed, to keep."""
        try:
            question = json.loads(str(message.content["question"]["json"]))
            if node.context.node_config.get("require-secagg"):
                raise Disagreement("this client takes part with secure aggregation alone; a fit of tables has none")
            rules = node.rules
            rules.asked(str(question["ask"]))
            rules.spend(None, node.folder, node.name)
            _ask_once(node, question)
            said, own, task = {}, rows(node), read(node.context.run_config)[0]
            if question["ask"] == "agree":  # kept if this site is part of it
                Agreement.model_validate(question["agreement"]).check(task, own)
                write_atomically(_place(node), to_json(question["agreement"]))
            else:
                said = rules.answer(question, answer(rules.coarse(question, own), own, task), own)
            if "agreement" in question:
                known = Agreement.model_validate(question["agreement"])
                rules.model(len(known.names) * known.outputs, own.rows)
            return RecordDict({"answer": ConfigRecord({"json": json.dumps(said)})})
        except Exception as error:
            return RecordDict({"refused": ConfigRecord(refusal(node.name, error))})

    return plain.client_app(
        local, lambda context, _: plan_of(_agreed(Node(context))), settings=common_settings, more={QUESTION: asked}
    )


def server_app() -> ServerApp:
    """The app of the server: the agreement, the rounds, the model."""
    return app_of(lambda grid, context: fit(grid, *read(context.run_config)))


def fit(grid: Grid, task: FitConfig, federation: FederationSettings) -> dict[str, Any]:
    """One fit between machines; the closing numbers. The run folder holds the model."""
    path = federation.run_folder
    if federation.resume:
        known = Agreement.model_validate(from_json(path / AGREEMENT, dict))
        if known.task != task:
            raise InputError(f"the settings differ from those of {path}; keep them, or begin a new run")
    else:
        known = agree(grid, task, federation)
        RunFolder.create(path, config_of(known), "flower", {AGREEMENT: to_json(known.model_dump())})
    coordinator = Coordinator(grid, config_of(known), federation, lambda *_: plan_of(known))
    closing = coordinator.run()
    save(path, known, closing, coordinator)
    return closing


def agree(grid: Grid, task: FitConfig, federation: FederationSettings) -> Agreement:
    """Ask every site until the server knows what the fit needs; then all of them know it."""
    path = federation.run_folder
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path} exists already; choose another run-folder, or set resume = true")
    roster = Roster(grid, federation)
    roster.wait(len(federation.names))

    def ask(question: Question) -> Answers:
        return ask_all(roster, federation.attempts, question)

    known = carry(negotiate(task), ask)
    ask({"ask": "agree", "agreement": known.model_dump()})
    log.info("%d sites agree on %d columns of %d rows", len(known.rows), len(known.names), sum(known.rows.values()))
    return known


def ask_all(roster: Roster, attempts: int, question: Question) -> Answers:
    """The answers of all sites, in the fixed order; a site that refuses ends the run, with its reason."""
    content = RecordDict({"question": ConfigRecord({"json": json.dumps(question)})})
    found: dict[str, dict[str, Any]] = {}
    for _ in range(attempts):
        nodes = {name: node for name, node in roster.refresh().items() if name not in found}
        for name, reply in roster.ask(nodes, QUESTION, lambda _: content).replies.items():
            if "refused" in reply:
                why = in_words(reply["refused"])
                raise InputError(why if repr(name) in why or why.startswith(name) else f"{name}: {why}")
            found[name] = json.loads(str(reply["answer"]["json"]))
        if len(found) == len(roster.names):
            return {name: found[name] for name in roster.names}
        roster.wait(len(roster.names))
    missing = ", ".join(name for name in roster.names if name not in found)
    raise TimeoutError(f"no answer about {question['ask']!r} from {missing}; begin again when they are connected")


def plan_of(known: Agreement) -> Plan:
    """The same on the server and at every site."""
    method, scaling = known.method(), known.scaling
    scale = [1 / v if v else 1.0 for v in scaling.factor.tolist()]
    about: dict[str, Any] = {"inputs": (len(known.names),), "features": known.names, "labels": known.classes}
    about |= {"scaling": (scaling.shift.tolist(), scale), "intercept": known.family.level}
    return Plan(method, method.phi, known.layout.start, lambda x: Model.of({"x": x}, about), known.gamma)


def config_of(known: Agreement) -> Config:
    """What run.toml says of the fit; `model.json` and `agreement.json` say the rest."""
    task, method = known.task, known.method()
    model = {"gaussian": "least-squares", "logistic": "logistic"}.get(task.family, "auto")
    return Config.make(
        algorithms=("fednmap",),
        data="own",
        model=model,
        clients=len(known.rows),
        penalty="none",
        memory=method.memory,
        gamma=method.gamma,
        eta_a=method.eta_a,
        local_steps=1,
        batch_size=0,
        rounds=task.rounds,
        eval_every=task.rounds,
        tol_absolute=task.tol_absolute * known.layout.unit,
        dtype="float64",
        measure_gamma=known.gamma,
    )


def save(path: Path, known: Agreement, closing: dict[str, Any], coordinator: Coordinator) -> None:
    """The model on the scale of the tables' columns, by their names, where `fednmap predict` looks for it."""
    found = coordinator.folder.model(coordinator.job)
    if found is None:
        return
    task, parameters = known.task, known.layout.parameters(found.parameters["x"])
    model = kept.FittedModel(
        task.family,
        " and ".join(task.goals),
        tuple(known.names),
        parameters.coef,
        parameters.intercept,
        known.classes,
        known.preprocessor,
        tuple(parameters.constants.tolist()),
    )
    about = {
        "data": "own",
        "penalty": task.penalty,
        "lam": told_lam(task.penalty, task.lam),
        "standardize": task.standardize,
        "weights": task.weights,
        "rounds": closing["rounds"],
        "bytes_sent": closing["bytes_up"] + closing["bytes_down"],
        "objective": closing["objective"],
        "converged": str(closing["ended"]).startswith("converged"),
        "sites": [{"site": s, "rows": n, "weight": known.weight(s)} for s, n in known.rows.items()],
    }
    kept.save(path, about, model)
    write_atomically(path / "coefficients.csv", model.coefficient_table().csv().encode())


def _ask_once(node: Node, question: Question) -> None:
    """Refuse a second question of a kind in a run, and other statistics than the first; the same again is answered."""
    path = _place(node).with_suffix(f".{node.context.run_id}.asked.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    with lock.exclusive(path.with_suffix(".lock")):
        known = from_json(path, dict) if path.exists() else {}
        marks = {question["ask"]: question}
        if "agreement" in question:
            marks["statistics"] = {name: question["agreement"][name] for name in ("statistics", "rows", "classes")}
        for kind, asked in marks.items():
            mark, before = digest(asked), known.setdefault(kind, [])
            if mark not in before and len(before) >= (NARROWINGS if kind == "counts" else 1):
                raise Disagreement(f"the server asks about {kind!r:.20} again in this run, in other words; refused")
            known[kind] = list(dict.fromkeys([*before, mark]))
        write_atomically(path, to_json(known))


def _agreed(node: Node) -> Agreement:
    path = _place(node)
    if not path.exists():
        raise Disagreement(f"{path} is not there, so that this site has agreed to nothing; keep state-dir during a run")
    return Agreement.model_validate(from_json(path, dict))


def _place(node: Node) -> Path:
    """Where a site keeps what was agreed for the run of these settings."""
    task, federation = read(node.context.run_config)
    which = json.dumps([task.model_dump(), list(federation.names), str(federation.run_folder)])
    return node.folder / "agreements" / node.name / f"{hashlib.sha256(which.encode()).hexdigest()[:16]}.json"
