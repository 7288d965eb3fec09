"""The adapter between methods and Flower, with nodes inside this process: every method, and every fault on demand."""

import ast
import asyncio
import importlib
import io
import json
import logging
import math
import os
import re
import socket
import sys
import threading
import time
import tomllib
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

import flower_grid
from flower_grid import NAMES, Federation, context, make_problem
from flwr.app import Array, ArrayRecord, Message, MessageType
from hypothesis import given
from hypothesis import strategies as st

from fednmap import simulate
from fednmap.algorithms import ALGORITHMS, FedNMap
from fednmap.commands import flower, watch
from fednmap.flower import loopback, new, roster
from fednmap.flower.identity import make
from fednmap.flower.launch import Launcher
from fednmap.flower.plan import plan_from
from fednmap.flower.settings import client_name, read
from fednmap.flower.state_store import Store
from fednmap.names import InputError
from fednmap.problems import Network
from fednmap.regularizers import L1
from fednmap.runs.atomic_files import locked
from fednmap.runs.folder import RunFolder
from fednmap.testing import optimum

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:flwr")


def settings_for(method):
    kind = ALGORITHMS[method]
    own = {"fast-fedda": "fast-fedda.mu=0.1 fast-fedda.gamma=20", "econtrolda": "econtrolda.K=3 econtrolda.gamma=20"}
    return {
        "algorithm": method,
        "penalty": "l1:0.5" if kind.traits.composite else "none",
        "set": own.get(method, ""),
        "min-clients": 4 if kind.traits.full_participation else 1,
    }


def assert_same(federation):
    """The server's state is the simulator's, up to the order of sums."""
    for ours, simulated in zip(federation.server()[0], federation.simulated(), strict=True):
        assert torch.allclose(ours, simulated, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", [m for m, kind in ALGORITHMS.items() if not kind.traits.central])
def test_every_method_follows_the_simulator(tmp_path, method):
    traits = ALGORITHMS[method].traits
    share, batch = 1.0 if traits.full_participation else 0.5, 0 if traits.hessians else 4
    problem = make_problem(batch_size=batch or None)
    federation = Federation(tmp_path, problem, batch_size=batch, participation=share, seed=3, **settings_for(method))
    federation.start()
    assert_same(federation)


def test_a_server_optimiser_of_another_method_follows_the_simulator(tmp_path):
    optimised = {"algorithm": "fedadam", "set": "fedadam.of=fednmap fedadam.eta=0.05"}
    federation = Federation(tmp_path, participation=0.5, seed=3, **settings_for("fednmap") | optimised)
    federation.start()
    assert_same(federation)


def test_a_round_in_which_nobody_is_drawn_leaves_the_server_as_it_is(tmp_path):
    from fednmap.simulation.participation import sampler_of

    federation = Federation(tmp_path, participation=0.2, sampler="poisson", seed=3, rounds=8)
    federation.start()
    plan, options = federation.plan(), {"sampler": sampler_of("poisson", 0.2), "seed": 3}
    rounds = list(simulate(plan.algorithm, federation.problem, rounds=8, start=plan.start, **options))
    assert not all(len(last.participants) for last in rounds)
    for ours, simulated in zip(federation.server()[0], rounds[-1].server, strict=True):
        assert torch.allclose(ours, simulated, rtol=0, atol=1e-12)


def test_reshuffled_minibatches_are_those_of_the_simulator(tmp_path):
    problem = make_problem(batch_size=5, minibatches="reshuffle", local_steps=5)
    federation = Federation(tmp_path, problem, batch_size=5, participation=0.5, seed=3, **settings_for("fednmap"))
    federation.start()
    assert_same(federation)


def test_measurements_are_those_of_the_simulator(tmp_path):
    federation = Federation(tmp_path)
    closing = federation.start()
    plan, problem = federation.plan(), federation.problem
    from fednmap.measure import evaluate

    due = evaluate(problem, plan.phi, plan.algorithm.model(federation.simulated()), plan.measure_gamma)
    assert {k: closing[k] for k in due} == pytest.approx(due, rel=1e-9)


def test_a_federation_whose_psi_ends_above_its_start_says_so(tmp_path, caplog):
    federation = Federation(tmp_path, eta_a=2.0, penalty="none", rounds=3)
    with caplog.at_level(logging.WARNING):
        closing = federation.start()
    first, *_, last = RunFolder.open(tmp_path / "run").records("fednmap", 0)
    assert last["objective"] > first["objective"]
    assert "above its start" in closing["warning"]
    assert closing["warning"] in caplog.text


@pytest.mark.parametrize(("given", "due"), [({}, 1.0), ({"measure_gamma": 0.25}, 0.25)])
def test_gamma_of_the_residual_does_not_follow_the_step_size(tmp_path, given, due):
    from fednmap.measure import stationarity

    federation = Federation(tmp_path, eta_a=0.01, rounds=1, **given)
    closing = federation.start()
    x = federation.plan().algorithm.model(federation.server()[0])
    assert closing["measure_gamma"] == due
    assert closing["stationarity"] == pytest.approx(float(stationarity(federation.problem, L1(0.5), x, due)), rel=1e-9)


def test_gradients_are_sent_only_where_the_federation_allows_it(tmp_path):
    federation = Federation(tmp_path, measure_stationarity=False)
    sent = []

    def watch(name, message, answer):
        reply = answer()
        if message.metadata.message_type == MessageType.EVALUATE:
            sent.append(sorted(reply.content))
        return [reply]

    assert "stationarity" not in federation.start(fault=watch)
    assert sent
    assert all(records == ["about"] for records in sent)


def test_a_client_without_test_rows_has_none_and_the_others_have_their_own(tmp_path):
    """Every fifth row of a client is for the test, so b, with three rows, has none; a feature says whose a row is."""
    from fednmap.flower import local_federation

    rows = {"a": 6, "b": 3, "c": 10, "d": 5}
    lines = [f"{name},{k},{i % 2}" for k, (name, count) in enumerate(rows.items()) for i in range(count)]
    (tmp_path / "clinics.csv").write_text("\n".join(["client,clinic,ill", *lines, ""]))
    settings = {"names": ",".join(rows), "run-folder": "x", "data": f"csv:{tmp_path / 'clinics.csv'}"}
    settings["model"] = "logistic"
    parts = [local_federation.load(context(name, settings, tmp_path)) for name in rows]
    assert [part.problem.data.x[:, 0].tolist() for part in parts] == [[0] * 5, [1] * 3, [2] * 8, [3] * 4]
    assert [None if p.test is None else p.test[0][:, 0].tolist() for p in parts] == [[0], None, [2, 2], [3]]


@pytest.mark.parametrize("sends_nan", [False, True])
def test_a_client_with_an_empty_test_part_is_measured_without_accuracy(tmp_path, sends_nan):
    from fednmap.flower.local import LocalProblem

    class Old(LocalProblem):
        """Another maker's client: it sends what a mean over nothing is."""

        def accuracy(self, x):
            return super().accuracy(x) if len(self.test[1]) else float("nan")

    class Tested(Federation):
        def load(self, context):
            local = super().load(context)
            kept = 0 if context.node_config["client"] == "bert" else 3
            return (Old if sends_nan else LocalProblem)(
                local.problem, (local.problem.data.x[:kept], local.problem.data.y[:kept])
            )

    federation = Tested(tmp_path)
    closing = federation.start()
    lines = [json.loads(line) for line in (tmp_path / "run" / "clients.jsonl").read_text().splitlines()]
    assert [sorted(v) for v in lines if v["client"] == "bert"] == [["client", "loss", "round", "samples"]] * 3
    assert all("accuracy" in v for v in lines if v["client"] != "bert")
    x = federation.plan().algorithm.model(federation.server()[0])
    assert closing["loss"] == pytest.approx(float(federation.problem.loss(x)), rel=1e-9)


@pytest.mark.parametrize("secagg", [False, True])
def test_results_have_the_mean_of_the_accuracies_that_clients_report(tmp_path, secagg, command):
    """As the loss is a mean over clients: one with few test samples counts as much as one with many."""
    from fednmap.flower.local import LocalProblem
    from fednmap.measure import accuracy
    from fednmap.problems import Logistic

    rng = torch.Generator().manual_seed(0)
    tests = []
    for kept in (3, 8, 0, 5):
        x = torch.randn(kept, 6, generator=rng, dtype=torch.float64)
        tests.append((x, (torch.rand(kept, generator=rng) < 0.5).long()))
    rows = [(torch.randn(12, 6, generator=rng, dtype=torch.float64), torch.arange(12) % 2) for _ in NAMES]
    problem = Logistic(rows, classes=2)

    class Tested(Federation):
        def load(self, context):
            return LocalProblem(super().load(context).problem, tests[NAMES.index(context.node_config["client"])])

    federation = Tested(tmp_path, problem, model="logistic", secagg=secagg, min_clients=4)
    closing = federation.start()
    x = federation.plan().algorithm.model(federation.server()[0])
    right = [accuracy(problem.predict(x, inputs), labels) for inputs, labels in tests if len(labels)]
    assert closing["test_accuracy"] == pytest.approx(sum(right) / 3, abs=1e-9)
    assert [r["test_accuracy"] for r in RunFolder.open(tmp_path / "run").records("fednmap", 0)][-1:] == [
        closing["test_accuracy"]
    ]
    assert f"{100 * closing['test_accuracy']:.1f}" in command("show", tmp_path / "run")[1]


@pytest.mark.parametrize("program", ["flwr-serverapp", "fednmap"])
def test_the_token_of_a_run_is_nowhere_to_be_read(tmp_path, command, monkeypatch, program):
    """Flower starts the server with a token, by which whoever has it may speak for the run.

    That command is nobody's; one that a person typed is shown without its secrets.
    """
    words = [program, "--token", "tok3n-a", "--app-password=tok3n-b", "-c", "db.secret='tok3n c' rounds=3"]
    monkeypatch.setattr("sys.argv", words)
    Federation(tmp_path).start()
    _, shown, _ = command("show", tmp_path / "run")
    assert command("report", tmp_path / "run")[0] == 0
    page = (tmp_path / "report.html").read_bytes()
    typed = program == "fednmap"
    assert ("fednmap --token '***' '--app-password=***' -c 'db.secret=*** rounds=3'" in shown) is typed
    assert (b"rounds=3" in page) is typed
    assert ("made by" in shown) is (b"made by: " in page) is typed
    assert not [name for name, data in everything(tmp_path).items() if b"tok3n" in data]


def network_of(whole, frozen=()):
    """The same data with a small network; the server knows its layers."""
    from torch import nn

    from fednmap.problems import Network

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 1), nn.Flatten(0)).double()
    for name in frozen:
        module.get_parameter(name).requires_grad_(False)
    return Network(module, nn.functional.mse_loss, [(x, y) for x, y in (whole.data[i] for i in range(whole.n))])


PROBLEMS = {
    "vector": make_problem(),
    "network": network_of(make_problem()),
    "partly frozen": network_of(make_problem(), ["0.weight"]),
}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_the_model_of_clients_that_keep_their_data_is_exported_as_it_was_saved(tmp_path, command, problem):
    from safetensors.torch import load_file

    Federation(tmp_path, problem, rounds=1).start()
    assert "least-squares" not in command("show", tmp_path / "run")[1]  # a setting; the clients have their own model
    saved = load_file(tmp_path / "run" / "models" / "fednmap-0.safetensors")
    for suffix, format, read_file in (("safetensors", "safetensors", load_file), ("pt", "torch", torch.load)):
        code, _, err = command("export", tmp_path / "run", "--format", format)
        assert code == 0, err
        found = read_file(tmp_path / "run" / f"fednmap-0.{suffix}")
        assert found.keys() == saved.keys()
        assert all(torch.equal(found[name], v) for name, v in saved.items())
    code, _, err = command("export", tmp_path / "run", "--format", "onnx")
    assert code == 2
    assert "use safetensors or torch" in err


def test_a_run_without_gradients_is_shown_listed_and_reported(tmp_path, command):
    """As the template's is by default: nothing is known of |F_nat|^2."""
    Federation(tmp_path, measure_stationarity=False).start()
    for words in (["show", tmp_path / "run"], ["show", "--list", tmp_path], ["report", tmp_path / "run"]):
        code, _, err = command(*words)
        assert code == 0, err


def vectors_down(federation):
    """For each round and client: whether it was sent the news alone."""
    orders = [
        (m.content["round"]["t"], name, "news" in m.content)
        for name, m in federation.grid.asked
        if "round" in m.content
    ]
    assert all(("news" in m.content) != ("down" in m.content) for _, m in federation.grid.asked if "round" in m.content)
    return orders


@pytest.mark.parametrize("method", ["fednmap", "zhang", "fedcanon"])
@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("schedule", ["constant", "sqrt"])
def test_who_was_counted_is_sent_one_vector_and_follows_to_the_bit(tmp_path, monkeypatch, method, share, schedule):
    from fednmap.simulation.uplink import Traffic

    settings = {"algorithm": method, "participation": share, "seed": 3, "schedule": schedule, "rounds": 8}
    settings |= {"batch_size": 4}
    federation = Federation(tmp_path, make_problem(batch_size=4), **settings)
    closing = federation.start()
    plan, config = federation.plan(), federation.config
    options = {"participation": share, "seed": config.seed, "start": plan.start}
    simulated = list(simulate(plan.algorithm, federation.problem, rounds=8, **options))
    assert closing["bytes_down"] == sum(r.bytes_down for r in simulated)
    sent = [news for _, _, news in vectors_down(federation)]
    assert closing["bytes_down"] == (2 * len(sent) - sum(sent)) * 6 * 8
    assert sum(sent) == 28 if share == 1 else 0 < sum(sent) < 14

    whole = Traffic.__init__

    def never(self, *arguments):
        whole(self, *arguments)
        self.follows = False

    monkeypatch.setattr(Traffic, "__init__", never)
    (tmp_path / "b").mkdir()
    plain = Federation(tmp_path / "b", make_problem(batch_size=4), **settings)
    assert plain.start()["bytes_down"] == 2 * len(sent) * 6 * 8
    assert not any(news for _, _, news in vectors_down(plain))
    assert all(torch.equal(a, b) for a, b in zip(federation.server()[0], plain.server()[0], strict=True))
    assert all(torch.equal(a.h, b.h) for a, b in zip(federation.client_states(), plain.client_states(), strict=True))


@pytest.mark.parametrize("why", ["another machine rounds otherwise", "the file is of an earlier version"])
def test_a_client_that_cannot_follow_is_sent_everything(tmp_path, monkeypatch, why):
    """It says so once, is left out of that round, and stays exact."""
    from fednmap.flower import client

    rounds = {}
    if why.startswith("another"):
        follow = client._followed

        def rounding(*arguments):
            received = follow(*arguments)
            raise RuntimeError(f"not what the server has {received is None}")

        def fault(name, message, answer):
            with monkeypatch.context() as patch:
                if name == "cleo":
                    patch.setattr(client, "_followed", rounding)
                return [answer()]
    else:
        keep = Store.keep

        def fault(name, message, answer):
            with monkeypatch.context() as patch:
                if name == "cleo":
                    patch.setattr(Store, "keep", lambda self, ticket, state, received=None: keep(self, ticket, state))
                return [answer()]

    federation = Federation(tmp_path, fault=fault, rounds=50, eval_every=50)
    federation.start()
    for t, name, news in vectors_down(federation):
        rounds.setdefault(name, []).append((t, news))
    assert rounds["cleo"] == [(0, False), (1, True), *[(t, False) for t in range(2, 50)]]
    assert rounds["anna"] == [(0, False), *[(t, True) for t in range(1, 50)]]
    error, drift = residual(federation)
    assert error < 1e-9
    assert drift < 1e-12


def test_a_resumed_server_sends_everything_once(tmp_path):
    federation = Federation(tmp_path, rounds=8)
    federation.start(rounds=4)
    federation.start(resume=True)
    assert [(t, news) for t, name, news in vectors_down(federation) if name == "anna"] == [
        (4, False),
        *[(t, True) for t in (5, 6, 7)],
    ]
    assert_same(federation)


ONE_STEP = {"local_steps": 1, "eta_a": 0.5, "gamma": 1.0, "rounds": 200, "eval_every": 150}


def test_a_run_ends_when_the_tolerance_is_met_without_asking_before(tmp_path):
    """With exact gradients and one step the mean uplink is the normal map: the clients measure at both ends only."""
    from fednmap import Tolerance, run

    federation = Federation(tmp_path, tol=1e-6, **ONE_STEP)
    closing = federation.start()
    plan = federation.plan()
    due = run(
        plan.algorithm,
        federation.problem,
        rounds=200,
        every=150,
        start=plan.start,
        measure_gamma=1.0,
        stop=Tolerance(1e-6),
    )
    assert (closing["rounds"], closing["ended"]) == (due.final["round"], due.ended)
    assert closing["ended"].startswith("converged")
    assert [r["round"] for r in federation.coordinator.folder.records("fednmap", 0)] == [0, closing["rounds"]]
    x = RunFolder.open(tmp_path / "run").model(federation.coordinator.job).parameters["x"]
    assert torch.allclose(x, due.x, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "noisy",
    [{"batch_size": 4}, {"local_steps": 2, "eta_a": 0.25}, {"participation": 0.75}],
    ids=["minibatches", "steps", "sampling"],
)
def test_without_that_knowledge_it_ends_at_a_measurement(tmp_path, noisy):
    settings = ONE_STEP | {"tol": 0.1, "eval_every": 4, "eta_a": 0.2} | noisy
    closing = Federation(tmp_path, make_problem(batch_size=noisy.get("batch_size")), **settings).start()
    assert closing["ended"].startswith("converged")
    records = RunFolder.open(tmp_path / "run").records("fednmap", 0)
    assert [r["round"] for r in records] == list(range(0, closing["rounds"] + 1, 4))


def test_an_ended_run_is_finished_until_asked_for_more(tmp_path):
    federation = Federation(tmp_path, tol=1e-2, **ONE_STEP)
    first = federation.start()
    assert federation.start(resume=True)["rounds"] == first["rounds"]
    assert not [m for _, m in federation.grid.asked if "round" in m.content]
    finer = federation.start(resume=True, tol=1e-6)
    (tmp_path / "b").mkdir()
    plain = Federation(tmp_path / "b", tol=1e-6, **ONE_STEP)
    assert plain.start()["rounds"] == finer["rounds"] > first["rounds"]
    assert all(torch.equal(a, b) for a, b in zip(federation.server()[0], plain.server()[0], strict=True))


class Without:
    """A client that takes part in rounds and is not heard when measurements number `first` to `last` are taken."""

    def __init__(self, name, first, last):
        self.name, self.first, self.last, self.measured = name, first, last, 0

    def __call__(self, name, message, answer):
        if name != self.name or message.metadata.message_type != MessageType.EVALUATE:
            return [answer()]
        self.measured += 1
        return [] if self.first <= self.measured <= self.last else [answer()]


@pytest.mark.parametrize("reason", [{"tol_absolute": 1e3}, {"tol": 0.9}, {"patience": 1}], ids=str)
def test_what_some_clients_have_measured_is_not_judged(tmp_path, reason):
    """The residual of three clients is not that of f: a run ends only by what all of them have measured."""
    settings = ONE_STEP | {"local_steps": 2, "eta_a": 0.02, "rounds": 12, "eval_every": 2, "deadline": 0.2} | reason
    federation = Federation(tmp_path, min_clients=3, fault=Without("dora", 1, 4), **settings)
    closing = federation.start()
    records = federation.coordinator.folder.records("fednmap", 0)
    assert [r["clients_measured"] for r in records][:5] == [3, 3, 3, 3, 4]
    assert closing["rounds"] >= 8


def test_patience_and_time_end_a_federation_too(tmp_path):
    settings = ONE_STEP | {"eval_every": 2, "measure_stationarity": False}
    assert "no progress" in Federation(tmp_path, patience=2, **settings).start()["ended"]
    (tmp_path / "b").mkdir()
    closing = Federation(tmp_path / "b", time_limit=1e-6, **settings).start()
    assert closing["ended"] == "time limit of 1e-06 s reached"
    with pytest.raises(ValueError, match="set measure-stationarity = true, or use patience") as caught:
        Federation(tmp_path, tol=1e-3, **settings)
    assert "\n" not in str(caught.value)


def residual(federation):
    """Distance to the optimum, and of the server's h to the mean of the clients'."""
    server, _ = federation.server()
    algorithm = federation.coordinator.plan.algorithm
    best = optimum(federation.problem, L1(0.5))
    states = torch.stack([state.h for state in federation.client_states()])
    return float((algorithm.model(server) - best).norm()), float((server.h - states.mean(0)).norm())


def unreliable(seed):
    """Replies lost after the client worked, sent twice, or arriving a round late."""
    rng = np.random.default_rng(seed)
    kept = []

    def fault(name, message, answer):
        if message.metadata.message_type != MessageType.TRAIN:
            return [answer()]
        reply, late = answer(), list(kept)
        kept.clear()
        chance = rng.random()
        if chance < 0.2:
            return late
        if chance < 0.3:
            kept.append(reply)
            return late
        return [reply, reply, *late] if chance < 0.5 else [reply, *late]

    return fault


def test_lost_late_and_double_replies_leave_the_method_exact(tmp_path):
    federation = Federation(tmp_path, fault=unreliable(5), rounds=50, eval_every=50, deadline=0.02)
    federation.start()
    error, drift = residual(federation)
    assert error < 1e-9
    assert drift < 1e-12


@pytest.mark.slow
@pytest.mark.ci(turn=10)
def test_the_same_run_stalls_if_a_lost_reply_moves_the_client(tmp_path, monkeypatch):
    monkeypatch.setattr(Store, "current", always_the_newest)
    federation = Federation(tmp_path, fault=unreliable(5), rounds=50, eval_every=50, deadline=0.02)
    federation.start()
    assert residual(federation)[0] > 1e-3


def always_the_newest(store, counted, initial):
    from safetensors.torch import load

    files = sorted(store.folder.glob("*.state"))
    if not files:
        return initial
    found = load(files[-1].read_bytes().split(b"\n", 1)[1])
    return type(initial)(*(found[name] for name in initial._fields))


def spoiled(how):
    """The reply of cleo, changed on the way by how(array)."""

    def fault(name, message, answer):
        reply = answer()
        if name == "cleo" and message.metadata.message_type == MessageType.TRAIN:
            content = reply.content
            content["up"] = ArrayRecord(how(content["up"]["y"].numpy().copy()))
            reply = Message(content, reply_to=message)
        return [reply]

    return fault


def with_nan(y):
    y[0] = np.nan
    return {"y": Array(y)}


def lying(y):
    honest = Array(y)
    return {"y": Array(dtype=honest.dtype, shape=honest.shape, stype=honest.stype, data=Array(y[:2]).data)}


BAD = {
    "NaN": (with_nan, "y holds NaN or infinity"),
    "shape": (lambda y: {"y": Array(y[:-1].copy())}, "y is float64 (5,), expected float64 (6,)"),
    "dtype": (lambda y: {"y": Array(y.astype(np.float32))}, "y is float32"),
    "names": (lambda y: {"z": Array(y)}, "arrays named 'z', expected y"),
    "more": (lambda y: {"y": Array(y), "z": Array(y)}, "arrays named 'y', 'z', expected y"),
    "nothing": (lambda y: {}, "arrays named nothing"),
    "long": (lambda y: {"y": Array(1e6 * y)}, "above the bound"),
    "lying": (lying, "y decodes to float64 (2,)"),
    "garbage": (lambda y: {"y": Array("float64", (6,), "numpy.ndarray", b"\x80\x04pickled")}, "cannot be decoded"),
    "fat": (lambda y: {"y": Array("float64", (6,), "numpy.ndarray", b"0" * 9999)}, "y has 9999 bytes"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_reply_is_named_left_out_and_answered(tmp_path, caplog, kind):
    how, why = BAD[kind]
    federation = Federation(tmp_path, fault=spoiled(how), rounds=2, norm_bound=1e4)
    with caplog.at_level(logging.WARNING, logger="flwr"):
        logging.getLogger("flwr").propagate = True
        federation.start()
    _, counted = federation.server()
    assert counted["cleo"] == ""
    assert all(counted[name].startswith("00000001-") for name in NAMES if name != "cleo")
    assert "cleo: reply left out: " in caplog.text
    assert why in caplog.text
    told = [
        m.content["round"]["refused"] for name, m in federation.grid.asked if name == "cleo" and "round" in m.content
    ]
    assert told[0] == ""
    assert why in told[1]


@pytest.mark.parametrize(("unit", "why"), [(20.0, "above the bound 50"), (1e308, "unpacks to NaN or infinity")])
def test_the_bound_is_for_vectors_not_for_the_codes_that_they_travel_as(tmp_path, unit, why):
    """Honest codes are long numbers for short vectors; a short code may stand for a long vector."""

    def fault(name, message, answer):
        reply = answer()
        if message.metadata.message_type == MessageType.TRAIN:
            up = {key: array.numpy().copy() for key, array in reply.content["up"].items()}
            sent[name] = float(np.linalg.norm(up["codes"].astype(float)))
            if name == "cleo":
                up = {**up, "codes": 0 * up["codes"], "unit": np.full_like(up["unit"], unit)}
                reply.content["up"] = ArrayRecord({key: Array(value) for key, value in up.items()})
                reply = Message(reply.content, reply_to=message)
        return [reply]

    sent = {}
    method = {"algorithm": "compressed-fednmap", "set": "compressed-fednmap.compressor=quantised"}
    federation = Federation(tmp_path, fault=fault, rounds=1, norm_bound=50.0, **method)
    federation.start()
    _, counted = federation.server()
    assert {name for name in NAMES if counted[name]} == {"anna", "bert", "dora"}
    assert why in federation.coordinator.rounds.refused["cleo"]
    assert min(sent.values()) > 50


def test_a_client_that_comes_back_to_its_senses_goes_on_exactly(tmp_path):
    """Left out for ten rounds, then counted again: the method still ends at the optimum."""
    wrong = spoiled(with_nan)

    def fault(name, message, answer):
        early = message.metadata.message_type == MessageType.TRAIN and message.content["round"]["t"] < 10
        return wrong(name, message, answer) if early else [answer()]

    federation = Federation(tmp_path, fault=fault, rounds=50, eval_every=50)
    federation.start()
    error, drift = residual(federation)
    assert error < 1e-9
    assert drift < 1e-12


def test_a_round_below_min_clients_is_repeated_not_counted(tmp_path):
    silent = {"left": 3}

    def fault(name, message, answer):
        if message.metadata.message_type == MessageType.TRAIN and name in ("anna", "bert") and silent["left"]:
            silent["left"] -= 1
            return []
        return [answer()]

    federation = Federation(tmp_path, fault=fault, deadline=0.3, min_clients=4)
    federation.start()
    tickets = {m.content["round"]["ticket"] for _, m in federation.grid.asked if "round" in m.content}
    assert len(tickets) == 6 + 2
    assert_same(federation)


def test_a_round_that_never_succeeds_stops_with_its_state_saved(tmp_path):
    def deaf(name, message, answer):
        late = message.metadata.message_type == MessageType.TRAIN and message.content["round"]["t"] >= 2
        return [] if late else [answer()]

    federation = Federation(tmp_path, deadline=0.1, attempts=3)
    with pytest.raises(TimeoutError, match="round 2 failed 3 times"):
        federation.start(fault=deaf)
    assert "round 2 failed" in json.loads((tmp_path / "run" / "status.json").read_text())["error"]
    federation.start(resume=True)
    assert_same(federation)


def test_a_dead_node_does_not_hold_up_the_others(tmp_path):
    federation = Federation(tmp_path, deadline=30.0)
    federation.start(nodes={101: "anna", 102: "bert", 103: "cleo"}, deadline=0.5)
    assert federation.server()[1]["dora"] == ""


MEMORY = {"local_steps": 1, "eta_a": 0.5, "gamma": 1.0, "set": "fednmap.memory=4", "rounds": 12}


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_with_memory_the_trajectory_is_the_simulators_and_both_vectors_are_sent(tmp_path, share):
    """What the server remembers, and so the next z, does not follow from the mean uplink."""
    federation = Federation(tmp_path, participation=share, seed=3, **MEMORY)
    closing = federation.start()
    server, simulated = federation.server()[0], federation.simulated()
    assert server._fields == simulated._fields
    assert len(server) > 2
    assert torch.allclose(server.z, simulated.z, rtol=0, atol=1e-9)
    assert torch.allclose(server.h, simulated.h, rtol=0, atol=1e-9)
    assert closing["bytes_down"] == 2 * closing["bytes_up"] == 12 * 4 * share * 2 * 6 * 8
    assert residual(federation)[1] < 1e-12


@pytest.mark.slow
@pytest.mark.ci(turn=5)
def test_with_memory_and_lost_late_and_double_replies_the_method_stays_exact(tmp_path):
    settings = MEMORY | {"rounds": 80, "eval_every": 80, "deadline": 0.02}
    federation = Federation(tmp_path, fault=unreliable(5), **settings)
    federation.start()
    error, drift = residual(federation)
    assert error < 1e-9
    assert drift < 1e-12


class Killed(Exception):
    """The server dies here."""


@pytest.mark.parametrize("memory", [0, 3])
@pytest.mark.parametrize("damaged", [0, 1, 2])
@pytest.mark.parametrize("when", ["before the replies", "after the replies"])
def test_a_killed_server_continues_the_same_trajectory(tmp_path, when, damaged, memory):
    def fault(name, message, answer):
        if message.metadata.message_type == MessageType.TRAIN and message.content["round"]["t"] == 4 and name == "dora":
            if when == "after the replies":
                answer()
            raise Killed
        return [answer()]

    federation = Federation(tmp_path, rounds=8, set=f"fednmap.memory={memory}")
    with pytest.raises(Killed):
        federation.start(fault=fault)
    # without the newest checkpoint the one before is used, and the clients still have the states it needs; without
    # both the run begins anew
    for newest in sorted((tmp_path / "run" / "checkpoints" / "fednmap-0").glob("*.safetensors"))[::-1][:damaged]:
        newest.write_bytes(newest.read_bytes()[:-8])
    federation.start(resume=True, nodes={201 + i: name for i, name in enumerate(NAMES)})
    assert_same(federation)
    assert [r["round"] for r in federation.coordinator.folder.records("fednmap", 0)] == [0, 3, 6, 8]
    assert residual(federation)[1] < 1e-12


@pytest.mark.parametrize("done", [0, 3, 6])
def test_a_server_killed_while_it_measures_measures_again(tmp_path, done):
    """Once, before round 1, between rounds, or at the end: each measurement is there once, and so is what it cost."""
    asked = []

    def fault(name, message, answer):
        if message.metadata.message_type == MessageType.EVALUATE:
            asked.append(name)
            if len(asked) == 4 * (1 + done // 3) - 1:
                raise Killed
        return [answer()]

    federation, whole = Federation(tmp_path / "a"), Federation(tmp_path / "b")
    for folder in (federation.folder, whole.folder):
        folder.mkdir()
    with pytest.raises(Killed):
        federation.start(fault=fault)
    closing, due = federation.start(resume=True), whole.start()
    assert [r["round"] for r in federation.coordinator.folder.records("fednmap", 0)] == [0, 3, 6]
    lines = [json.loads(line) for line in (federation.folder / "run" / "clients.jsonl").read_text().splitlines()]
    assert [(v["round"], v["client"]) for v in lines] == [(t, name) for t in (0, 3, 6) for name in NAMES]
    same = ("rounds", "objective", "stationarity", "bytes_up", "eval_wire_down")
    assert {k: closing[k] for k in same} == pytest.approx({k: due[k] for k in same}, rel=1e-9)


def everything(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("made", ["by a server", "for a server"])
def test_a_second_server_is_refused_and_touches_nothing(tmp_path, made, resume):
    federation, folder = Federation(tmp_path), tmp_path / "run"
    if made == "by a server":
        federation.start()
    else:
        RunFolder.create(folder, federation.config, "flower")
    (folder / ".status.json.1.part").write_text("half writ")
    (folder / "metrics.csv").write_bytes(b"method,trial,round,metric,value\nfednmap,0,0,zer")
    with locked(folder):
        before = everything(folder)
        with pytest.raises(ValueError, match="is in use by another run"):
            federation.start(resume=resume)
        assert everything(folder) == before


def test_up_does_not_continue_what_is_running(tmp_path, command):
    Federation(tmp_path).start()
    with locked(tmp_path / "run"):
        before = everything(tmp_path / "run")
        code, _, err = command("flower", "up", "--resume", tmp_path / "run")
        assert code == 2
        assert "is in use by another run" in err
        code, _, err = command("flower", "up", "--resume", tmp_path / "run", "--rounds", 10)
        due = "--resume takes those of its folder, but for --deadline and --min-clients; leave out --rounds"
        assert (code, err) == (2, f"fednmap: {due}\n")
        assert everything(tmp_path / "run") == before


def test_options_of_a_continued_run_count_or_are_refused(tmp_path, command, monkeypatch):
    Federation(tmp_path, data="digits", rounds=1).start()
    seen = []
    changed = []
    monkeypatch.setattr(
        flower, "_trial", lambda _, federation, *__, **given: (seen.append(federation), changed.append(given))
    )
    monkeypatch.setattr(flower, "_closing", lambda *_: None)
    for words in (("up", "--resume", tmp_path / "run"), ("resume", tmp_path / "run")):
        code, _, err = command("flower", *words, "--deadline", 30, "--min-clients", 2)
        assert code == 0, err
        assert (seen[-1].deadline, seen[-1].min_clients, seen[-1].resume) == (30, 2, True)
        code, _, err = command("flower", *words, "--min-clients", 9)
        assert (code, err) == (2, "fednmap: min-clients is 9, and 4 of 4 clients are drawn in a round\n")
    for option in (["--out", "x"], ["--measure-stationarity"], ["--secagg-threshold", 2], ["--pin-on-first-use"]):
        code, _, err = command("flower", "up", "--resume", tmp_path / "run", *option)
        assert code == 2
        assert err.endswith(f"leave out {option[0]}\n")
    new.write(tmp_path / "app")
    settings, app = tmp_path / "app" / "pyproject.toml", ("flower", "up", "--app", tmp_path / "app")
    place = {"run_folder": str(tmp_path / "app" / "runs" / "app"), "resume": False}
    command(*app, "--deadline", 30)
    assert (seen[-1].deadline, seen[-1].resume) == (30, False)
    given = {"app": tmp_path / "app", "warm": True}
    assert changed[-1] == given | place | {"deadline": 30}
    settings.write_text(re.sub("^deadline = .*\n", "", settings.read_text(), flags=re.MULTILINE))
    command(*app)
    assert changed[-1] == given | place  # Flower replaces what is there
    for option, word in (("--deadline", "has no setting deadline; add it"), ("--rounds", "leave out --rounds")):
        code, _, err = command(*app, option, 30)
        assert code == 2
        assert word in err


def test_the_run_of_an_app_is_not_continued_as_a_trial(tmp_path, command):
    Federation(tmp_path, rounds=1).start()
    code, _, err = command("flower", "resume", tmp_path / "run")
    assert code == 2
    assert f"continue it with fednmap flower up --app APP --resume {tmp_path / 'run'}" in err


@pytest.mark.parametrize(
    ("text", "why"), [("{", "was changed or cut short"), ('{"run": "0"}', "names: Field required")]
)
def test_up_does_not_continue_from_damaged_facts(tmp_path, command, text, why):
    Federation(tmp_path).start()
    (tmp_path / "run" / "federation.json").write_text(text)
    code, _, err = command("flower", "up", "--resume", tmp_path / "run")
    assert code == 2
    assert why in err


def test_a_refused_continuation_leaves_the_folder_as_it_was(tmp_path):
    Federation(tmp_path).start()
    before = everything(tmp_path / "run")
    with pytest.raises(ValueError, match="keep the names"):
        Federation(tmp_path, names=("anna", "bert", "cleo", "emil")).start(resume=True)
    assert everything(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("given", "now", "words"),
    [
        ({}, {"eval_every": 2}, "eval_every is 2 and was 3; put it back, or begin a new run"),
        (
            {},
            {"penalty": "l1:0.4", "seed": 1},
            "penalty is 'l1:0.4' and was 'l1:0.5', seed is 1 and was 0; ",
        ),
        ({"schedule": "cosine"}, {"rounds": 9}, "rounds is 9 and was 6; put it back"),
        ({}, {"algorithm": "fedda"}, "is a run of fednmap, not fedda; begin a new run"),
    ],
    ids=["measuring", "problem", "schedule", "method"],
)
def test_a_run_goes_on_with_its_own_settings_alone(tmp_path, given, now, words):
    """It would begin at round 0 and forget what was measured."""
    federation = Federation(tmp_path, **given)
    federation.start()
    before = everything(tmp_path / "run")
    with pytest.raises(InputError) as refused:
        federation.start(resume=True, **now)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert everything(tmp_path / "run") == before


def test_a_run_that_was_extended_says_so(tmp_path):
    federation = Federation(tmp_path)
    federation.start()
    before = everything(tmp_path / "run")["run.toml"]
    federation.start(resume=True)
    assert everything(tmp_path / "run")["run.toml"] == before
    assert federation.start(resume=True, rounds=8, tol=1e-9)["rounds"] == 8
    config = RunFolder.open(tmp_path / "run").config()
    assert (config.rounds, config.tol) == (8, 1e-9)
    assert config.model_copy(update={"rounds": 6, "tol": None}) == federation.config


def test_a_client_without_its_state_says_so_and_is_left_out(tmp_path):
    federation = Federation(tmp_path, rounds=2)
    federation.start()
    for file in (tmp_path / "states").glob("*/bert/*.state"):
        file.write_bytes(b"broken")
    with pytest.raises(RuntimeError, match="is not intact"):
        federation.client_states()


def test_strangers_and_impostors_are_left_out(tmp_path):
    federation = Federation(tmp_path)
    nodes = {101 + i: name for i, name in enumerate(NAMES)}
    federation.start(nodes=nodes | {301: "mallory", 302: "../../etc", 303: "anna/../bert"})
    assert {name for name, m in federation.grid.asked if m.metadata.message_type == MessageType.TRAIN} == set(NAMES)
    assert {p.name for p in (tmp_path / "states").glob("*/*") if p.is_dir()} == set(NAMES)


def test_a_restarted_node_takes_over_its_name(tmp_path):
    federation = Federation(tmp_path)
    federation.start(nodes={101 + i: name for i, name in enumerate(NAMES)} | {205: "bert"})
    assert {m.metadata.dst_node_id for name, m in federation.grid.asked if name == "bert" and "round" in m.content} == {
        205
    }


def test_uplink_is_half_of_scaffolds_and_the_rest_on_the_wire_is_a_fixed_header(tmp_path):
    totals = {}
    for method in ("fednmap", "scaffold"):
        for dim in (50, 400):
            folder = tmp_path / f"{method}-{dim}"
            folder.mkdir()
            problem = make_problem(n=2, dim=dim, rows=dim)
            totals[method, dim] = Federation(
                folder, problem, names=("anna", "bert"), rounds=2, eval_every=2, algorithm=method, penalty="none"
            ).start()
    for dim in (50, 400):
        assert 2 * totals["fednmap", dim]["bytes_up"] == totals["scaffold", dim]["bytes_up"] == 2 * 2 * 2 * 8 * dim
    for method, vectors in (("fednmap", 1), ("scaffold", 2)):
        headers = [(totals[method, d]["wire_up"] - totals[method, d]["bytes_up"]) / 4 for d in (50, 400)]
        assert max(headers) < 1200 + 500 * vectors
        assert abs(headers[0] - headers[1]) < 10


@given(st.text())
def test_a_name_that_is_accepted_is_safe_as_a_folder(text):
    try:
        name = client_name(text)
    except ValueError:
        return
    assert "/" not in name
    assert "\\" not in name
    assert name.isascii()
    assert not name.startswith(".")


@pytest.mark.parametrize("run", ["../../x", "", "0" * 15, 7, None, "0123456789abcdeg"])
def test_a_run_from_a_message_never_becomes_a_path_unchecked(tmp_path, run):
    with pytest.raises(ValueError, match="16 hexadecimal digits"):
        Store(tmp_path, run, "anna")


@pytest.mark.parametrize("ticket", ["../../x", "00000001-0000000g", "1-00000000", 3, "00000001-00000000/.."])
def test_a_ticket_from_a_message_never_becomes_a_path_unchecked(tmp_path, ticket):
    store = Store(tmp_path, "0123456789abcdef", "anna")
    state = FedNMap.Client(torch.zeros(2))
    with pytest.raises(ValueError, match="ticket"):
        store.keep(ticket, state)
    with pytest.raises(ValueError, match="ticket"):
        store.current(ticket, state)


def test_old_states_are_cleared_away(tmp_path):
    store = Store(tmp_path, "0123456789abcdef", "anna")
    initial = FedNMap.Client(torch.zeros(2))
    for t in range(20):
        store.current(f"{t - 1:08d}-00000000" if t else "", initial)
        store.keep(f"{t:08d}-00000000", FedNMap.Client(torch.full((2,), float(t))))
    assert float(store.current("00000019-00000000", initial).h[0]) == 19
    assert len(list(store.folder.glob("*.state"))) <= 5


@pytest.mark.parametrize("ticket", ["00000005-00000000", "00000005-80000000", "00000005-ffffffff"])
def test_a_state_that_may_be_counted_stays_whatever_its_ticket(tmp_path, ticket):
    """A round has been tried several times, and its tickets are in no order; messages come late."""
    store = Store(tmp_path, "0123456789abcdef", "anna")
    initial = FedNMap.Client(torch.zeros(2))
    store.keep("00000004-00000000", initial)
    store.keep(ticket, FedNMap.Client(torch.ones(2)))
    for k in range(1, 9):
        store.keep(f"00000005-{k}{k:07x}", initial)
    for t in range(6, 10):
        store.keep(f"{t:08d}-00000000", initial)
    for late in ("00000004-00000000", "", "00000006-00000000"):
        store.current(late, initial)
        assert float(store.current(ticket, initial).h[0]) == 1


def test_a_new_trajectory_finds_its_states_among_those_of_one_given_up(tmp_path):
    store = Store(tmp_path, "0123456789abcdef", "anna")
    initial = FedNMap.Client(torch.zeros(2))
    for t in range(80, 100):
        store.keep(f"{t:08d}-00000000", initial)
    store.keep("00000000-00000000", initial)
    store.keep("00000001-00000000", FedNMap.Client(torch.ones(2)))
    store.current("00000000-00000000", initial)
    assert float(store.current("00000001-00000000", initial).h[0]) == 1
    assert len(list(store.folder.glob("*.state"))) <= 1 + 2 + 2 * 8


def test_a_run_that_began_again_has_checkpoints_of_its_own(tmp_path):
    """Those of the trajectory before were later, and are not what it goes on from."""

    def killed(name, message, answer):
        if message.metadata.message_type == MessageType.TRAIN and message.content["round"]["t"] == 3:
            raise Killed
        return [answer()]

    federation = Federation(tmp_path)
    federation.start()
    states = tmp_path / "run" / "checkpoints" / "fednmap-0"
    for path in states.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(Killed):
        federation.start(resume=True, fault=killed)
    due = [f"round-0000000{t}.{kind}" for t in (1, 2) for kind in ("json", "safetensors")]
    assert sorted(path.name for path in states.iterdir()) == due
    federation.start(resume=True)
    assert min(m.content["round"]["t"] for _, m in federation.grid.asked if "round" in m.content) == 3
    assert_same(federation)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"names": "a,a"}, "named twice"),
        ({"names": "a,../b"}, "client's name"),
        ({"min-clients": 3}, "min-clients is 3, and 2 of 2"),
        ({"drop": 0.1}, "leave it out"),
        ({"deadline": -1}, "deadline"),
        ({"ronds": 3}, "ronds"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, why):
    with pytest.raises(ValueError, match=why):
        read({"names": "a,b", "run-folder": "x"} | settings)


def test_a_first_model_that_claims_to_be_long_is_refused_before_memory_is_taken(tmp_path):
    """Even if the site has said so before."""

    def long(name, message, answer):
        reply = answer()
        if "site" in reply.content:
            reply.content["site"]["dimension"] = 10**12
        if "start" in reply.content:
            reply.content["start"] = ArrayRecord({"x": Array("float64", (10**12,), "numpy.ndarray", b"short")})
        return [reply]

    federation = Federation(tmp_path)
    federation.plan = lambda: federation.coordinator.roster.start("float64")
    with pytest.raises(ValueError, match="x cannot be decoded"):
        federation.start(fault=long)


def test_a_reply_that_never_comes_whole_is_given_up_at_the_deadline(tmp_path, monkeypatch):
    """Flower asks for its parts for minutes: a node was killed after it had announced them. The others are heard."""
    monkeypatch.setattr(roster, "STALLED", 0.2)
    monkeypatch.setattr(roster, "LEAST", 0.1)
    ended = threading.Event()

    def stuck(name, message, answer):
        if name == "anna" and message.metadata.message_type == "train":
            ended.wait(60)
            return []
        return [answer()]

    federation = Federation(tmp_path, rounds=2, deadline=1.0, fault=stuck)
    began = time.monotonic()
    federation.start()
    ended.set()
    assert time.monotonic() - began < 30
    assert federation.coordinator.rounds.took_part == {"anna": 0, "bert": 2, "cleo": 2, "dora": 2}


def test_what_goes_wrong_while_replies_are_pulled_is_raised(tmp_path):
    def broken(name, message, answer):
        raise ZeroDivisionError(name)

    with pytest.raises(ZeroDivisionError):
        Federation(tmp_path).start(fault=broken)


@pytest.mark.parametrize("template", ["plain", "tables"])
def test_the_files_for_containers_fit_together(tmp_path, template):
    yaml = pytest.importorskip("yaml")
    new.write(tmp_path / "my-app", template)
    assert "@" not in (tmp_path / "my-app" / "Dockerfile").read_text()
    compose = yaml.safe_load((tmp_path / "my-app" / "compose.yaml").read_text())
    names = {"client-0", "client-1", "client-2"}
    assert compose["services"].keys() == names | {"superlink", "watch"}
    assert compose["services"]["watch"]["command"][2] == "runs/my-app"
    assert compose["volumes"].keys() == names | {"runs"}
    assert compose["services"]["superlink"]["ports"] == ["127.0.0.1:18000:18000"]
    for name in names:
        service = compose["services"][name]
        (about,) = [word for word in service["command"] if word.startswith("--node-config")]
        due = f"--node-config=client='{name}' state-dir='/state' key='/keys/{name}'"
        assert about == (due.replace(" key", f" file='/data/{name}.csv' key") if template == "tables" else due)
        assert f"./keys/{name}:/keys/{name}:ro" in service["volumes"]
        assert not any("server.key" in volume for volume in service["volumes"])
    parts = list(yaml.safe_load_all((tmp_path / "my-app" / "kubernetes.yaml").read_text()))
    found = {(part["kind"], part["metadata"]["name"]): part["spec"] for part in parts}
    assert len(found) == len(parts) == 6
    claims = {name for kind, name in found if kind == "PersistentVolumeClaim"}
    for (kind, _), spec in found.items():
        if kind == "Deployment":
            pod = spec["template"]["spec"]
            assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
            volumes = {v["name"]: v for v in pod["volumes"]}
            assert {m["name"] for c in pod["containers"] for m in c["volumeMounts"]} == volumes.keys()
            used = {v["persistentVolumeClaim"]["claimName"] for v in volumes.values() if "persistentVolumeClaim" in v}
            assert used <= claims
            assert pod["securityContext"]["runAsNonRoot"]
    labels = [spec["template"]["metadata"]["labels"] for (kind, _), spec in found.items() if kind == "Deployment"]
    assert found["Service", "my-app-superlink"]["selector"] in labels
    assert found["NetworkPolicy", "my-app-superlink"]["podSelector"]["matchLabels"] in labels


@pytest.fixture(scope="module")
def known_options():
    """The options of Flower's own commands."""
    known = {}
    for name in ("flower-superlink", "flower-supernode"):
        written = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(written):
            patch.setattr(sys, "argv", [name, "--help"])
            with pytest.raises(SystemExit):
                loopback.command(name)()
        known[name] = set(re.findall(r"--[a-z-]+", written.getvalue()))
    return known


def unknown_options(words, known):
    command = "flower-supernode" if "fednmap.flower.node" in words else words[0]
    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    return given - known[command] if command in known else set()


DOCKER = {"FROM", "RUN", "USER", "WORKDIR", "ENV"}
COMPOSE = {"build", "command", "depends_on", "restart", "read_only", "tmpfs", "cap_drop", "ports", "volumes"}
KUBERNETES = {
    "Service": ("v1", {"selector", "ports"}),
    "NetworkPolicy": ("networking.k8s.io/v1", {"podSelector", "policyTypes", "ingress"}),
    "PersistentVolumeClaim": ("v1", {"accessModes", "resources"}),
    "Deployment": ("apps/v1", {"replicas", "strategy", "selector", "template"}),
}
CONTAINER = {"name", "image", "command", "args", "ports", "readinessProbe", "resources", "securityContext"}
QUANTITY = re.compile(r"[0-9]+(m|Mi|Gi)?")
DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@pytest.mark.parametrize("template", ["plain", "tables"])
def test_the_files_for_containers_are_what_their_tools_expect(tmp_path, template, known_options):
    """Facts of the Dockerfile reference, the Compose specification and Kubernetes' schemas, checked one by one."""
    yaml = pytest.importorskip("yaml")
    app = tmp_path / "my-app"
    new.write(app, template)
    lines = [line for line in (app / "Dockerfile").read_text().splitlines() if line and line[0] != "#"]
    docker = [line.split(maxsplit=1) for line in lines]
    assert {word for word, _ in docker} <= DOCKER
    assert re.fullmatch(r"FROM \S+:[0-9]\S*", lines[0])  # a version, not the latest
    assert all("--no-cache-dir" in text for _, text in docker if "pip install" in text)
    assert [text for word, text in docker if word == "USER"] == ["fednmap"]
    assert all(text.startswith("/") for word, text in docker if word == "WORKDIR")

    compose = yaml.safe_load((app / "compose.yaml").read_text())
    assert {key for key in compose if not key.startswith("x-")} == {"services", "volumes"}
    make(app / "keys", [f"client-{i}" for i in range(3)], "superlink")
    for service in compose["services"].values():
        assert service.keys() <= COMPOSE - {"<<"}
        assert set(service.get("depends_on", ())) <= compose["services"].keys()
        assert service["restart"] == "unless-stopped"
        assert all(re.fullmatch(r"127\.0\.0\.1:[0-9]+:[0-9]+", port) for port in service.get("ports", ()))
        assert not unknown_options(service["command"], known_options)
        for source, target, *mode in (volume.split(":") for volume in service["volumes"]):
            assert source in compose["volumes"] or (app / source).exists() or source == "./data"
            assert target.startswith("/")
            assert mode in ([], ["ro"])

    text = (app / "kubernetes.yaml").read_text()
    secrets = dict(re.findall(r"kubectl create secret generic (\S+) (.*)", text))
    for part in yaml.safe_load_all(text):
        version, fields = KUBERNETES[part["kind"]]
        assert part.keys() == {"apiVersion", "kind", "metadata", "spec"}
        assert part["apiVersion"] == version
        assert part["spec"].keys() <= fields
        assert DNS_LABEL.fullmatch(part["metadata"]["name"])
        if part["kind"] == "PersistentVolumeClaim":
            assert QUANTITY.fullmatch(part["spec"]["resources"]["requests"]["storage"])
        if part["kind"] != "Deployment":
            continue
        pod = part["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert container.keys() <= CONTAINER | {"volumeMounts"}
        assert all(QUANTITY.fullmatch(v) for limits in container["resources"].values() for v in limits.values())
        words = [*container["command"], *container.get("args", ())]
        assert not unknown_options(words, known_options)
        (secret,) = (v["secret"] for v in pod["volumes"] if "secret" in v)
        assert 0o400 <= secret["defaultMode"] <= 0o777
        given = re.findall(r"--from-file=(\S+)", secrets[secret["secretName"]])
        held = {word.partition("=")[0].rpartition("/")[2] for word in given}
        assert set(re.findall(r"/keys/([a-z0-9.-]+)", " ".join(words))) <= held


def test_the_dashboard_shows_what_a_run_tells(tmp_path):
    new.write(tmp_path / "my-app")
    panels = json.loads((tmp_path / "my-app" / "grafana.json").read_text())["panels"]
    Federation(tmp_path, rounds=1).start()
    told = re.findall("^fednmap_[a-z_]+", watch.to_prometheus(RunFolder.open(tmp_path / "run")), re.MULTILINE)
    expressions = " ".join(target["expr"] for panel in panels for target in panel["targets"])
    asked = set(re.findall("fednmap_[a-z_]+", expressions))
    assert len(asked) == 9
    assert asked - {*told} == {"fednmap_epsilon"}  # without differential privacy
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


def test_the_pages_own_model_fits_its_server(tmp_path, monkeypatch):
    """The files that docs/flower.md shows, in an app that `new` has written."""
    page = (Path(__file__).parents[2] / "docs" / "flower.md").read_text(encoding="utf-8")
    app = tmp_path / "my-federation"
    new.write(app)
    files = re.findall(r"```python\n# (my_federation/\w+\.py)\n(.*?)```", page, re.DOTALL)
    assert len(files) == 3
    for name, text in files:
        (app / name).write_text(text)
    monkeypatch.syspath_prepend(str(app))
    parts = [importlib.import_module(f"my_federation.{name}") for name in ("model", "client_app", "server_app")]
    for part in parts:
        monkeypatch.delitem(sys.modules, part.__name__)
    settings = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    settings |= {"penalty": "l1:0.001", "penalty-only": "weights", "eta-a": 1.0}
    local = [parts[1].load(context(f"client-{i}", settings, tmp_path)) for i in range(3)]
    assert sum(client.samples + len(client.test[1]) for client in local) == 1797
    plan = plan_from(read(settings)[0], local[0].start, parts[0].network())
    assert all(torch.equal(client.start, plan.start) for client in local)
    assert plan.phi.value(torch.ones_like(plan.start)) == pytest.approx(0.001 * (64 * 32 + 32 * 10), rel=1e-5)


def test_nothing_but_flowers_public_modules_is_imported():
    """Others change with every release, and a release comes every two weeks."""
    public = {"flwr", "flwr.app", "flwr.clientapp", "flwr.serverapp"}
    for path in sorted(Path(loopback.__file__).parents[1].rglob("*.py")):
        for part in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in part.names] if isinstance(part, ast.Import) else []
            names += [part.module] if isinstance(part, ast.ImportFrom) and part.module else []
            assert {name for name in names if name.split(".")[0] == "flwr"} <= public, path


def test_data_is_loaded_once_in_a_run(tmp_path):
    federation, loads = Federation(tmp_path, rounds=4), []
    load = federation.load
    federation.load = lambda context: loads.append(context.node_config["client"]) or load(context)
    federation.start()
    assert sorted(loads) == sorted(NAMES)


def test_nodes_that_have_a_number_and_no_name_are_the_clients_in_their_order(tmp_path, monkeypatch, caplog):
    """As Flower's simulation starts them; a node more than there are names takes no part."""
    named = flower_grid.context

    def numbered(name, run_config, states):
        found = named(name, run_config, states)
        del found.node_config["client"]
        found.node_config["partition-id"] = NAMES.index(name) if name in NAMES else len(NAMES)
        return found

    monkeypatch.setattr(flower_grid, "context", numbered)
    federation = Federation(tmp_path)
    federation.start(nodes={101 + i: name for i, name in enumerate((*NAMES, "spare"))})
    assert_same(federation)
    assert "node 4 of a federation of 4; it takes no part" in caplog.text


def test_only_flowers_short_waits_are_shorter(monkeypatch):
    waited = []
    monkeypatch.setattr(threading.Event, "wait", lambda self, timeout=None: waited.append(timeout))
    loopback.wait_less()
    code = compile("for seconds in (1.0, 25.0, 0.1, None): event.wait(seconds)", "", "exec")
    for name in ("flwr.supercore.pull", "mine"):
        exec(code, {"__name__": name, "event": threading.Event()})
    assert waited == [0.1, 25.0, 0.1, None, 1.0, 25.0, 0.1, None]


def test_the_server_logs_json_lines_if_asked(tmp_path):
    logging.getLogger("flwr").setLevel(logging.INFO)
    Federation(tmp_path, log_json=True).start()
    lines = [json.loads(line) for line in (tmp_path / "run" / "server.log").read_text().splitlines()]
    assert all(sorted(line) == ["level", "message", "time"] for line in lines)
    assert [line["message"][:8] for line in lines if line["message"].startswith("round")] == [
        f"round {t}:" for t in range(6)
    ]


def test_a_connection_is_its_users_while_it_is_open_and_nobodys_afterwards():
    """A socket that its process has closed is listed with user 0: a server of root must not take it for its own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        ends = client.getsockname(), server.getsockname()
        kept, _ = server.accept()
        assert loopback.user_of(*ends) == os.getuid()
        assert loopback.user_of(ends[0], ("127.0.0.1", 1)) is None
        assert loopback.user_of(("::1", 1), ("a socket's file", None)) is None
        client.close()
        assert loopback.user_of(*ends) is None
        kept.close()
    assert loopback.tells_users()


@pytest.mark.parametrize(("user", "due"), [(0, 200), (1, 403)])
def test_requests_of_another_user_do_not_reach_the_app(monkeypatch, user, due):
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})

    async def send(message):
        sent.append(message)

    monkeypatch.setattr(loopback, "user_of", lambda client, server: os.getuid() + user)
    scope = {"type": "http", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)}
    asyncio.run(loopback.own_user_only(app)(scope, None, send))
    assert sent[0]["status"] == due
    sent.clear()
    asyncio.run(loopback.own_user_only(app)(scope | {"client": None}, None, send))
    assert sent[0]["status"] == 403  # of somebody unknown


def test_where_the_system_does_not_say_whose_a_connection_is_nothing_is_started(monkeypatch, tmp_path):
    monkeypatch.setattr(loopback, "SOCK_DIAG", 21)  # no such family
    with pytest.raises(InputError, match="run it on Linux"), Launcher(tmp_path):
        pass


def test_a_module_in_bfloat16_goes_over_the_wire_as_float32(tmp_path):
    rng = torch.Generator().manual_seed(0)
    data = [(torch.randn(8, 3, generator=rng), torch.randint(0, 2, (8,), generator=rng)) for _ in NAMES]
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).bfloat16()
    problem = Network(module, torch.nn.functional.cross_entropy, data, batch_size=4)
    federation = Federation(tmp_path, problem, batch_size=4, model="mlp:4:tanh", dtype="float32", penalty="l1:0.001")
    federation.start()
    for ours, simulated in zip(federation.server()[0], federation.simulated(), strict=True):
        assert ours.dtype == simulated.dtype == torch.float32
        torch.testing.assert_close(ours, simulated, rtol=0.02, atol=1e-4)  # gradients have two digits


@pytest.mark.parametrize("secagg", [False, True])
def test_metrics_of_the_clients_are_averaged_by_name(tmp_path, secagg):
    """A client whose metric is not a number, such as the AUC of one class, is left out of that mean."""
    federation = Federation(tmp_path, rounds=2, eval_every=2, secagg=secagg)
    load = federation.load

    def measuring(context):
        i = NAMES.index(context.node_config["client"])
        own = {"size": lambda x: float(x.abs().sum()) + i, "auc": lambda x: math.nan if i == 2 else float(i)}
        return replace(load(context), metrics=own)

    federation.load = measuring
    closing = federation.start()
    x = federation.plan().algorithm.model(federation.server()[0])
    assert closing["auc"] == pytest.approx((0 + 1 + 3) / 3, abs=1e-9)
    assert closing["size"] == pytest.approx(float(x.abs().sum()) + 1.5, abs=1e-9)
    records = federation.coordinator.folder.records("fednmap", 0)
    assert [record["auc"] for record in records] == pytest.approx([4 / 3] * 2, abs=1e-9)
    lines = [json.loads(line) for line in (tmp_path / "run" / "clients.jsonl").read_text().splitlines()]
    expected = ["*"] * 2 if secagg else ["anna", "bert", "dora"] * 2
    assert [line["client"] for line in lines if "auc" in line] == expected


def test_sites_with_other_metrics_do_not_fit(tmp_path):
    federation = Federation(tmp_path)
    load = federation.load

    def measuring(context):
        return replace(load(context), metrics={"f1": float} if context.node_config["client"] == "anna" else {})

    federation.load = measuring
    with pytest.raises(ValueError, match=r"anna: 1 metrics, expected 0: number 0 is 'f1'"):
        federation.start()
