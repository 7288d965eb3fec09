"""A linear model of tables between real machines: every node reads its own file, and the fit is the estimator's.

The estimator runs at the server and asks the nodes about their rows by messages (`fednmap.estimators.remote`); it needs
only sums over sites. Before it begins, a handshake agrees on columns, levels and classes
(`fednmap.estimators.handshake`). The agreement goes to every site, which keeps it on its
disk and answers questions about nothing else. The run folder is that of `fednmap fit`; it also keeps the sums, so that
a run that was stopped continues where it was.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import tempfile
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from fednmap.estimators import fit_folder
from fednmap.estimators.fit_config import LOCAL, assignments, with_formula, with_weight
from fednmap.estimators.handshake import (
    AFTER,
    POINTS,
    Agreement,
    Disagreement,
    RemoteFitConfig,
    answer,
    negotiate,
    own_effects,
    reply,
    side,
)
from fednmap.estimators.remote import RemoteRows
from fednmap.estimators.rows import Floats
from fednmap.flower import client as plain
from fednmap.flower import wire
from fednmap.flower.audit_log import in_words, refusal
from fednmap.flower.disclosure import weights
from fednmap.flower.plan import Point
from fednmap.flower.roster import Roster
from fednmap.flower.secure import STATE, SecureSum, SumClient
from fednmap.flower.server import app_of, logged, run_number
from fednmap.flower.settings import FederationSettings, Node, check_together, grid_for, split, threshold
from fednmap.names import InputError
from fednmap.runs.atomic_files import digest, from_json, locked, to_json, write_atomically
from fednmap.runs.configuration import Config
from fednmap.runs.folder import RunFolder
from fednmap.simulation import lock
from fednmap.simulation.quantised import Quantised
from fednmap.tables import Table, table
from fednmap.tables.statistics import NARROWINGS, Answers, Question, carry
from fednmap.tables.table import SiteError

AGREEMENT = "agreement.json"
SUMS = "sums.jsonl"
QUESTION = f"{MessageType.QUERY}.tables"
SUMMED = 1 << 24  # numbers in one answer, at most

FAMILIES = ("gaussian", "logistic", "poisson", "negative-binomial", "gamma", "ordinal", "huber", "cox")
"""Those of a fit between machines."""
KIND = {"hessian": "curvature", "curvature": "curvature", "information": "information", "outer": "square"}
"""By what rows are weighed in an answer at a point; otherwise by the slope of their loss."""
HIGH, LOW = 2.0**-30, 2.0**12
"""Units of the two halves in which a number travels under masks: up to 2^50, with a step of about 2^-52."""

LoadTable = Callable[[Context], Any]

log = logging.getLogger("flwr")


def read(run_config: Mapping[str, Any]) -> tuple[RemoteFitConfig, FederationSettings]:
    """What is fitted and who takes part, from kebab-case keys; "" stands for a default."""
    own, given = split(run_config, RemoteFitConfig)
    federation = FederationSettings.make(**own)
    given |= {name: assignments(given[name]) for name in ("penalty_factor", "bounds") if name in given}
    given = {name: v for name, v in given.items() if v != RemoteFitConfig.model_fields[name].default}
    task = RemoteFitConfig.make(**with_weight(with_formula(given)))
    alone = [name for name in LOCAL if getattr(task, name) != RemoteFitConfig.model_fields[name].default]
    alone += [f"family {task.family}"] if task.family not in FAMILIES else []
    if alone:
        raise InputError(f"{alone[0]} is for `fednmap fit` in one process; a fit between machines does not have it yet")
    federation = federation.model_copy(update={"min_clients": len(federation.names)})
    check_together(_config(task, federation), federation)
    return task, federation


def _config(task: RemoteFitConfig, federation: FederationSettings) -> Config:
    about = {"data": "own", "clients": len(federation.names), "rounds": task.rounds, "secagg": task.secagg}
    return Config.make(**about, batch_size=0, dtype="float64")


def common_settings(run_config: Mapping[str, Any]) -> tuple[Config, FederationSettings]:
    """What the common part of the app reads."""
    task, federation = read(run_config)
    return _config(task, federation), federation


def client_app(load: LoadTable) -> ClientApp:
    """The app of a site's node.

    load: this site's rows, as a frame or a `fednmap.tables.Table` with named columns; called once per run.
    """
    load = plain.once(load)

    def asked(message: Message, node: Node) -> RecordDict:
        """The answer to a question, or why there is none; or what was agreed, to keep."""
        try:
            task, question = read(node.context.run_config)[0], json.loads(str(message.content["question"]["json"]))
            if node.context.node_config.get("require-secagg") and not task.secagg:
                raise Disagreement("this client takes part with secure aggregation alone; set secagg = true")
            rules, ask = node.rules, str(question["ask"])
            rules.asked(ask)
            rules.spend(None, node.folder, node.name)
            _ask_once(node, question, message)
            own = task.complete(Table(table(load(node.context)).columns, node.name))
            columns = task.used(own)
            if ask not in POINTS:  # which look at every row
                rules.same_rows(own, node.folder, node.name)
            if task.formula_encoder is not None:
                rules.formula(task.formula_encoder)
            own = rules.table(own, *columns)
            if ask == "agree":  # kept if this site is part of it
                offered = Agreement.model_validate(question["agreement"])
                offered.check(task, own)
                rules.model(len(offered.names) * offered.outputs, own.rows)
                if task.formula_encoder is not None:
                    rules.matrix(offered.values(own, {})[0], offered.names)
                write_atomically(_place(node), to_json(question["agreement"]))
                return RecordDict({"answer": ConfigRecord({"json": "{}"})})
            inside, part, later = None, own, ask in (*AFTER, *POINTS)
            known = _agreed(node, own) if "part" in question or later else None
            if known is not None and question.get("part") is not None:
                inside = side(question, known, own)
                part = rules.part(own, inside, *columns)
            if ask not in POINTS and part.rows:
                counted = (np.full(own.rows, True) if inside is None else inside).astype(float)[:, None]
                rules.points(
                    "rows", torch.from_numpy(counted.T), lambda _: counted, node.rules.place(node.folder, node.name)
                )
            if known is not None and later:
                return _vector(message, node, _reply(message, known, node, question, own, inside))
            asked_of = part if ask == "target" else task.features(part)
            said = rules.answer(question, answer(rules.coarse(question, asked_of), part, task), asked_of)
            words, numbers = _apart(ask, said) if task.secagg else (said, {})
            if STATE in message.content:
                return _vector(message, node, np.array([*numbers.values()]))
            return RecordDict({"answer": ConfigRecord({"json": json.dumps(words)})})
        except Exception as error:  # Flower sends the words of one that is raised
            return RecordDict({"refused": ConfigRecord(refusal(node.name, error))})

    return plain.app_of({"query": plain.hello(), QUESTION: asked}, common_settings)


def _reply(message: Message, known: Agreement, node: Node, question: Question, own: Table, inside: Any) -> Floats:
    """The vector of a site's rows, those inside or all; the rules look at every point before."""
    points = None
    if "points" in question:
        count = int(question["points"])
        if not 0 < count * known.dim <= SUMMED:
            raise Disagreement(f"the server asks about {count} points; refused")
        points = wire.unpack(message.content.get("points"), Point(torch.zeros(count, known.dim, dtype=torch.float64))).x

    def look(ask: str, f: Any, points: Tensor) -> None:
        if ask == "cells":
            node.rules.cells(points, node.rules.place(node.folder, node.name))
            return
        kind = KIND.get(ask, "slope")

        def weigh(x: Tensor) -> Floats:
            found = weights(kind, f, x)
            if len(found) == own.rows:
                return found
            whole = np.zeros((len(inside), found.shape[1]))
            whole[inside] = found
            return whole

        rules = node.rules
        rules.model(f.dim, len(f.data.x))
        about = json.dumps([question.get(name) for name in ("shift", "factor", "fill")])
        rows = "" if inside is None else hashlib.sha256(inside.tobytes()).hexdigest()
        rules.points(kind, points, weigh, node.rules.place(node.folder, node.name), about, rows)

    if question["ask"] != "effects":
        return reply(question, points, known, own, look, inside)
    if points is None or inside is not None or known.task.site_effects == "none":
        raise Disagreement("the settings do not lead to the question 'effects'; refused")
    found = own_effects(question, points, known, own, look)
    path = _place(node, "effects")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, to_json(found))
    log.info("%s: its own effects are in %s", node.name, path)
    return np.full(known.length(question), known.weight(own.name) * found["intercept"])


def _vector(message: Message, node: Node, numbers: Floats) -> RecordDict:
    """A vector as it is, or under masks where the federation has them."""
    if not np.isfinite(numbers).all():
        raise SiteError("the answer is not finite", "range")
    vector, grid = torch.from_numpy(numbers), grid_for(node.config, QUESTION)
    if grid is None:
        return RecordDict({"sum": wire.pack(Point(vector))})
    if STATE not in message.content:
        raise Disagreement("secagg: the server asks for a vector in the clear; refused")
    high = grid.rounded(HIGH * vector)
    halves = torch.cat([high, LOW * (vector - high / HIGH)])
    return SumClient(node, message.content, QUESTION).masked(Point(halves))


def _leaves(said: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """An answer with change(place, leaf) for each of its leaves; what has a name is at that place in any order."""
    if isinstance(said, dict):
        return {key: _leaves(part, change, f"{path}/{key}") for key, part in said.items()}
    if isinstance(said, list):
        names = [part["name"] if isinstance(part, dict) else k for k, part in enumerate(said)]
        return [_leaves(part, change, f"{path}/{name}") for name, part in zip(names, said, strict=True)]
    return change(path, said)


def _apart(ask: str, said: Any) -> tuple[Any, dict[str, float]]:
    """An answer without its numbers, and these by their places; numbers of rows are no secret."""
    numbers: dict[str, float] = {}

    def change(place: str, leaf: Any) -> Any:
        if leaf is not None and (isinstance(leaf, str) or (ask, place) == ("target", "/rows")):
            return leaf
        numbers[place] = float(leaf or 0.0)
        return None

    words = _leaves(said, change)
    return words, dict(sorted(numbers.items()))


def server_app() -> ServerApp:
    """The app of the server: the agreement, the estimator, the run folder."""
    return app_of(lambda grid, context: fit(grid, *read(context.run_config)))


def fit(grid: Grid, task: RemoteFitConfig, federation: FederationSettings) -> dict[str, Any]:
    """One fit between machines; the closing numbers. The run folder holds the model."""
    path, sites, began = federation.run_folder, SiteQuestions(grid, task, federation), time.monotonic()
    if federation.resume:
        known = Agreement.model_validate(from_json(path / AGREEMENT, dict))
        if known.task != task:
            raise InputError(f"the settings differ from those of {path}; keep them, or begin a new run")
        folder = RunFolder.open(path)
    else:
        known = agree(sites, task, path)
        folder = RunFolder.create(path, _about(known), "flower", {AGREEMENT: to_json(known.model_dump())})
    with locked(path), _logged(path), sites.kept_in(path):
        folder.remove_checksums()
        folder.repair()
        return _fit(folder, known, RemoteRows(known, sites), began)


def _fit(folder: RunFolder, known: Agreement, remote: RemoteRows, began: float) -> dict[str, Any]:
    task, (mean, spread) = known.task, remote.moments()
    estimator = task.estimator(known.preprocessor, known.classes)
    estimator.feature_names_in_, estimator.n_features_in_ = np.array(known.names, object), len(known.names)
    if known.classes:
        estimator.classes_ = np.array(known.classes)
    return fit_folder.fit_into(
        folder,
        task,
        estimator,
        known.preprocessor,
        known.classes,
        (remote.rows(),),
        data="own",
        began=began,
        mean=mean,
        spread=spread,
        say=log.info,
        warn=log.warning,
    )[0]


def _about(known: Agreement) -> dict[str, Any]:
    """What run.toml says of the fit, and its settings."""
    task = known.task
    about: dict[str, Any] = {"made_in": "fit", "data": "own", "model": f"{task.family} of {' and '.join(task.goals)}"}
    about |= {"penalty": f"penalty {task.penalty}", "clients": len(known.rows), "algorithms": [f"fit-{task.family}"]}
    return about | {"settings": {name: v for name, v in task.model_dump(mode="json").items() if v is not None}}


@contextmanager
def _logged(path: Path) -> Iterator[None]:
    """Write warnings and what is logged into the run folder too."""
    with logged(path), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: log.warning("%s", message)
        yield


def agree(sites: SiteQuestions, task: RemoteFitConfig, path: Path) -> Agreement:
    """Ask every site until the server knows the columns and classes of the fit; then all of them know it."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path} exists already; choose another run-folder, or set resume = true")
    sites.roster.wait(len(sites.roster.names))
    with tempfile.TemporaryDirectory() as place, sites.kept_in(Path(place)):
        known = carry(negotiate(task), sites.answers)
        sites.ask({"ask": "agree", "agreement": known.model_dump()})
    log.info("%d sites agree on %d columns of %d rows", len(known.rows), len(known.names), sum(known.rows.values()))
    return known


class SiteQuestions:
    """The sites as an estimator asks them. Answers are kept in the run folder: none is asked for twice."""

    def __init__(self, grid: Grid, task: RemoteFitConfig, federation: FederationSettings) -> None:
        self.roster, self.federation, self.task = Roster(grid, federation), federation, task
        self.config = _config(task, federation)
        self.known: OrderedDict[str, Any] = OrderedDict()
        self.file: Path | None = None
        self.secure: SecureSum | None = None

    @contextmanager
    def kept_in(self, folder: Path) -> Iterator[None]:
        """Keep answers in this folder; those that it has are known."""
        self.file, run = folder / SUMS, run_number(folder, self.federation)
        lines = self.file.read_text().splitlines(keepends=True) if self.file.exists() else []
        entries = [json.loads(line) for line in lines if line.endswith("\n")]
        write_atomically(self.file, "".join(line for line in lines if line.endswith("\n")).encode())
        self.known = OrderedDict((entry["question"], entry["answer"]) for entry in entries)
        if self.task.secagg:
            self.secure = SecureSum(self.roster, threshold(self.config, self.federation), run, folder)
        yield

    def answers(self, question: Question) -> Answers:
        """Every site's answer; under masks the numbers are sums over sites, and stand at the first of them."""
        said = self.ask(question, read=lambda content: json.loads(str(content["answer"]["json"])))
        if self.secure is None:
            return said
        places = [[*_apart(question["ask"], part)[1]] for part in said.values()]
        if not any(places):
            return said
        sums: dict[str, float] = {}
        if all(other == places[0] for other in places):  # else the conversation says what does not fit
            sums = dict(zip(places[0], self.sum(question, len(places[0])).tolist(), strict=True))
        first = next(iter(said))

        def number(site: str) -> Callable[[str, Any], Any]:
            own = sums if site == first else {}
            whole = {place: int(v) if v.is_integer() else v for place, v in own.items()}  # a count is a whole number
            return lambda place, leaf: whole.get(place, 0) if leaf is None else leaf

        return {site: _leaves(part, number(site)) for site, part in said.items()}

    def sum(self, question: Question, length: int, points: Tensor | None = None) -> Floats:
        def found() -> Any:
            if self.secure is not None:
                return self._masked(question, length, points).tolist()
            return np.sum(list(self._vectors(question, length, points).values()), axis=0).tolist()

        return np.array(self._kept(["sum", question], points, found), float)

    def each(self, question: Question, length: int, points: Tensor | None = None) -> Mapping[str, Floats]:
        if self.secure is not None:
            return {}

        def found() -> Any:
            return {site: part.tolist() for site, part in self._vectors(question, length, points).items()}

        said = self._kept(["each", question], points, found)
        return {site: np.array(part, float) for site, part in said.items()}

    def _kept(self, question: Any, points: Tensor | None, ask: Callable[[], Any]) -> Any:
        at = "" if points is None else hashlib.sha256(points.numpy().tobytes()).hexdigest()
        mark = digest([question, at])
        if mark not in self.known:
            self.known[mark] = ask()
            assert self.file is not None
            with self.file.open("a") as file:
                file.write(json.dumps({"question": mark, "answer": self.known[mark]}) + "\n")
        return self.known[mark]

    def _vectors(self, question: Question, length: int, points: Tensor | None) -> dict[str, Floats]:
        like = Point(torch.zeros(length, dtype=torch.float64))
        return self.ask(question, points, lambda content: wire.unpack(content.get("sum"), like).x.numpy())

    def _masked(self, question: Question, length: int, points: Tensor | None) -> Floats:
        """The sum over all sites, of which the server sees nothing else."""
        content, n, grid = _content(question, points), len(self.roster.names), grid_for(self.config, QUESTION)
        assert self.secure is not None
        assert isinstance(grid, Quantised)
        like = Point(torch.zeros(2 * length, dtype=torch.float64))
        for _ in range(self.federation.attempts):
            nodes, ticket = self.roster.refresh(), f"{len(self.known):08d}-{secrets.token_hex(4)}"
            if len(nodes) < n:
                nodes = self.roster.wait(n)
            told = self.secure(nodes, QUESTION, lambda _: content, ticket, like, grid, n)
            for name, said in told.found.replies.items():
                _check_refused(name, said)
            if told.names:
                high, low = (n * told.mean.x.numpy()).reshape(2, -1)
                return np.asarray(high / HIGH + low / LOW)
        raise TimeoutError(f"no secure sum for {question['ask']!r}; continue with resume = true when all are connected")

    def ask(
        self, question: Question, points: Tensor | None = None, read: Callable[[RecordDict], Any] = lambda content: None
    ) -> dict[str, Any]:
        """The answers of all sites, in the fixed order; a site that refuses ends the run, with its reason."""
        content, roster, found = _content(question, points), self.roster, dict[str, Any]()
        for _ in range(self.federation.attempts):
            nodes = {name: node for name, node in roster.refresh().items() if name not in found}
            for name, said in roster.ask(nodes, QUESTION, lambda _: content).replies.items():
                _check_refused(name, said)
                found[name] = read(said)
            if len(found) == len(roster.names):
                return {name: found[name] for name in roster.names}
            roster.wait(len(roster.names))
        missing = ", ".join(name for name in roster.names if name not in found)
        raise TimeoutError(f"no answer about {question['ask']!r} from {missing}; begin again when they are connected")


def _content(question: Question, points: Tensor | None) -> RecordDict:
    if points is None:
        return RecordDict({"question": ConfigRecord({"json": json.dumps(question)})})
    asked = ConfigRecord({"json": json.dumps({**question, "points": len(points)})})
    return RecordDict({"question": asked, "points": wire.pack(Point(points))})


def _check_refused(name: str, reply: RecordDict) -> None:
    if "refused" in reply:
        why = in_words(reply["refused"])
        raise InputError(why if repr(name) in why or why.startswith(name) else f"{name}: {why}")


def _ask_once(node: Node, question: Question, message: Message) -> None:
    """Refuse a second question of a kind about the same rows in a run; the same again is answered."""
    ask, part = question["ask"], question.get("part")
    if ask in ("effects", "predictions"):
        question = question | {"at": hashlib.sha256(repr(message.content.get("points")).encode()).hexdigest()}
    elif ask in POINTS:
        return
    path = _place(node).with_suffix(f".{node.context.run_id}.asked.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    with lock.exclusive(path.with_suffix(".lock")):
        known = from_json(path, dict) if path.exists() else {}
        mark, before = digest(question), known.setdefault(f"{ask} {part}", [])
        formula = read(node.context.run_config)[0].formula_encoder
        counts = NARROWINGS if formula is None else formula.narrowings
        most = {"counts": counts, "ranges": 1 if formula is None else len(formula.asked["ranges"])}
        if mark not in before and len(before) >= most.get(ask, 1):
            raise Disagreement(f"the server asks about {ask!r:.20} again in this run, in other words; refused")
        known[f"{ask} {part}"] = list(dict.fromkeys([*before, mark]))
        write_atomically(path, to_json(known))


def _agreed(node: Node, own: Table) -> Agreement:
    """What this site agreed to, about as many rows as it has."""
    path = _place(node)
    if not path.exists():
        raise Disagreement(f"{path} is not there, so that this site has agreed to nothing; keep state-dir during a run")
    known = Agreement.model_validate(from_json(path, dict))
    if known.rows[own.name] != own.rows:
        raise Disagreement(f"{own.where}the table has other rows than when the run began; begin a new run")
    return known


def _place(node: Node, what: str = "agreements") -> Path:
    """Where a site keeps what was agreed, or its own effects, for the run of these settings."""
    task, federation = read(node.context.run_config)
    which = json.dumps([task.model_dump(), list(federation.names), str(federation.run_folder)])
    return node.folder / what / node.name / f"{hashlib.sha256(which.encode()).hexdigest()[:16]}.json"
