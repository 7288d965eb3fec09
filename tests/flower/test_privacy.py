"""Differential privacy between machines: every client adds its part of the noise, the server sees their sum."""

import json
import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("flwr")
pytest.importorskip("dp_accounting")

from flower_grid import NAMES, FakeGrid, Federation, make_problem

from fednmap import simulate
from fednmap.algorithms import FedNMap
from fednmap.flower import wire
from fednmap.flower.client import client_app
from fednmap.flower.plan import plan_from
from fednmap.flower.server import Coordinator
from fednmap.flower.settings import read
from fednmap.flower.state_store import Store
from fednmap.privacy import Privacy, accounting
from fednmap.regularizers import L1
from fednmap.runs import atomic_files as files
from fednmap.runs.uplink_config import grid_of, privacy_of
from fednmap.testing import optimum

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:flwr", "ignore:epsilon is")

NOISE = {"secagg": True, "dp_clip": 0.5, "dp_noise": 0.3, "dp_among": 3, "measure_stationarity": False}


def simulated(federation, rounds):
    plan, config = federation.plan(), federation.config
    way, grid = privacy_of(config), grid_of(config, len(NAMES))
    *_, end = simulate(
        plan.algorithm, federation.problem, rounds=rounds, start=plan.start, uplink=[p for p in (way, grid) if p]
    )
    return end


@pytest.fixture
def public(monkeypatch):
    """Noise by the seed of the run, as the simulator's: a client's own seed is its secret."""
    monkeypatch.setattr(Store, "secret", lambda self: 0)


@pytest.mark.parametrize("method", ["fednmap", "zhang", "fedcanon", "scaffold", "fedavg"])
def test_the_trajectory_is_the_simulators(tmp_path, method, public):
    reg = "none" if method in ("scaffold", "fedavg") else "l1:0.5"
    federation = Federation(tmp_path, algorithm=method, penalty=reg, rounds=4, eval_every=4, batch_size=4, **NOISE)
    federation.start()
    end = simulated(federation, 4)
    for ours, theirs in zip(federation.server()[0], end.server, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
    kept = end.clients[torch.arange(4)]
    for i, state in enumerate(federation.client_states()):
        for ours, theirs in zip(state, kept, strict=True):
            assert torch.allclose(ours, theirs[i], rtol=0, atol=1e-12)


def test_the_seed_of_the_noise_is_each_clients_secret_and_stays(tmp_path):
    ends = []
    for place in (tmp_path / "a", tmp_path / "b"):
        federation = Federation(place, rounds=2, eval_every=2, **NOISE)
        federation.start()
        ends.append(federation.server()[0].z)
        root, run = federation.folder / "states", federation.coordinator.run_id
        secrets = {Store(root, run, name).secret() for name in NAMES}
        assert len(secrets) == 4
        assert min(secrets) > 2**64
        assert secrets == {Store(root, run, name).secret() for name in NAMES}
        assert all((root / run / name / "secret").stat().st_mode & 0o77 == 0 for name in NAMES)
    assert float((ends[0] - ends[1]).norm()) > 1e-3
    assert float((ends[0] - simulated(federation, 2).server.z).norm()) > 1e-3


def test_the_seed_is_never_in_a_file_that_others_may_read(tmp_path, monkeypatch):
    store, seen, to_disk = Store(tmp_path, "0123456789abcdef", "anna"), {}, files.to_disk

    def watched(path, *mode):
        if path.is_file():
            seen[path.name] = path.stat().st_mode & 0o777
        to_disk(path, *mode)

    monkeypatch.setattr(files, "to_disk", watched)
    former = os.umask(0)
    try:
        secret = store.secret()
    finally:
        os.umask(former)
    assert list(seen.values()) == [0o600]
    assert (store.folder / "secret").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in store.folder.iterdir()] == ["secret"]
    assert store.secret() == secret


def test_clipping_alone_ends_at_the_optimum_with_masks_and_without(tmp_path):
    for secagg in (False, True):
        given = {"rounds": 16, "eval_every": 16, "local_steps": 1, "eta_a": 0.7, "gamma": 1.0, "dp_clip": 2.0}
        federation = Federation(tmp_path / str(secagg), secagg=secagg, **given)
        federation.start()
        best = optimum(federation.problem, L1(0.5))
        assert float((federation.plan().algorithm.model(federation.server()[0]) - best).norm() / best.norm()) < 1e-9
        largest = max(float(federation.problem.alone(i).gradient(best).norm()) for i in range(4))
        assert largest > 7  # and what is sent is at most 2


def test_epsilon_goes_on_where_the_run_goes_on_and_nothing_is_measured(tmp_path):
    federation = Federation(tmp_path, rounds=3, eval_every=3, **NOISE)
    closing = federation.start()
    assert closing["epsilon"] == accounting.epsilon(0.3, 1.0, 3, 1e-5).pld
    closing = federation.start(resume=True, rounds=5)
    assert closing["epsilon"] == accounting.epsilon(0.3, 1.0, 5, 1e-5).pld
    assert closing["epsilon_rdp"] == accounting.epsilon(0.3, 1.0, 5, 1e-5).rdp
    assert closing["loss"] is None
    assert not [m for _, m in federation.grid.asked if m.metadata.message_type == "evaluate"]
    assert json.loads((tmp_path / "run" / "results.json").read_text())[0]["took_part"] == dict.fromkeys(NAMES, 5)


def test_a_round_with_too_little_noise_is_repeated(tmp_path, public):
    """Two clients of four are lost, and three must add theirs."""
    losses = [True, True]

    def fault(name, message, answer):
        reply, kind = answer(), message.metadata.message_type
        return [] if kind == "train" and name in ("anna", "bert") and losses and losses.pop() else [reply]

    federation = Federation(tmp_path, rounds=3, eval_every=3, fault=fault, deadline=0.5, **NOISE)
    closing = federation.start()
    assert closing["took_part"] == dict.fromkeys(NAMES, 3)
    for ours, theirs in zip(federation.server()[0], simulated(federation, 3).server, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)


def test_a_lost_client_leaves_the_denominator_as_it_is(tmp_path, public):
    """The sum is divided by the number of all: whoever knew how many came could tell whether one did."""

    def fault(name, message, answer):
        reply, kind = answer(), message.metadata.message_type
        return [] if kind == "train" and name == "dora" else [reply]

    federation = Federation(tmp_path, rounds=1, eval_every=1, fault=fault, deadline=0.5, **NOISE)
    federation.start()
    plan, way = federation.plan(), privacy_of(federation.config)
    three = lambda n, t, rng: [0, 1, 2]  # noqa: E731
    assert isinstance(way, Privacy)
    server, _ = plan.algorithm.init(plan.start)
    *_, mean = simulate(plan.algorithm, federation.problem, rounds=1, start=plan.start, sampler=three)
    moved = federation.server()[0].z - server.z
    step = plan.algorithm.Q * plan.algorithm.eta_s * plan.algorithm.eta_a
    assert float(moved.norm()) < step * (3 * 0.5 / 4 + 0.3 * 0.5 * 3)
    assert float((moved - (mean.server.z - server.z)).norm()) > 0.1


def test_a_second_vector_of_a_round_is_not_sent_under_the_same_noise(tmp_path):
    """A server that asks for round 0 again with another model would learn the difference."""
    seen = []

    def fault(name, message, answer):
        if message.metadata.message_type == "train" and name == "anna":
            seen.append(name)
            model = torch.full((6,), float(len(seen)), dtype=torch.float64)
            message.content["down"] = wire.pack(FedNMap.Server(model, torch.zeros_like(model)))
        return [answer()]

    federation = Federation(tmp_path, rounds=1, fault=fault, deadline=0.5, attempts=2, min_clients=4, **NOISE)

    def lost(name, message, answer):
        reply = fault(name, message, answer)
        return [] if message.metadata.message_type == "train.unmask" else reply

    with pytest.raises(TimeoutError, match="round 0 failed 2 times"):
        federation.start(fault=lost)
    lines = (tmp_path / "states" / "sent" / "anna.jsonl").read_text()
    assert "round 0 was answered with another vector under the same noise" in lines


def test_a_measurement_is_refused_by_the_client(tmp_path):
    federation = Federation(tmp_path, rounds=1, **NOISE)
    federation.start()
    plain = Federation(tmp_path / "plain", rounds=1, secagg=True)
    plain.start()
    asked = next(m for _, m in plain.grid.asked if m.metadata.message_type == "evaluate")
    assert "measurements carry none" in federation.grid.answer("anna", asked).error.reason


def test_the_audit_says_what_was_clipped_and_noised(tmp_path):
    Federation(tmp_path, rounds=1, **NOISE).start()
    lines = [json.loads(line) for line in (tmp_path / "states" / "sent" / "anna.jsonl").read_text().splitlines()]
    treated = [(line["masked"], line["clipped"], line["noised"]) for line in lines if line["kind"] == "train"]
    assert treated == [(True, True, True)]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"dp-noise": 1.0}, "add secagg = true, and dp_among"),
        ({"dp-noise": 1.0, "secagg": True}, "add secagg = true, and dp_among"),
        ({"dp-noise": 1.0, "dp-among": 2}, "add secagg = true, and dp_among"),
        ({"dp-noise": 1.0, "dp-among": 5, "secagg": True}, "dp_among is 5, of 4 clients"),
        ({"dp-epsilon": 2.0, "dp-among": 2, "secagg": True, "rounds": 10}, r"give dp_noise = 6\.\d+, which 10 rounds"),
        (
            {"dp-noise": 1.0, "dp-among": 2, "secagg": True, "participation": 0.5, "sampler": "poisson"},
            "sampling adds no privacy against it",
        ),
        (
            {"dp-noise": 1.0, "dp-among": 2, "secagg": True, "patience": 3},
            "patience or measure-stationarity is given with dp-noise",
        ),
        (
            {"dp-noise": 1.0, "dp-among": 2, "secagg": True, "measure-stationarity": True},
            "measure-stationarity is given with dp-noise",
        ),
        ({"dp-noise": 1.0, "dp-delta": 0.3, "dp-among": 2, "secagg": True}, "below 1/4"),
        ({"dp-unit": "example", "dp-noise": 1.0}, "dp_unit = example is for simulations"),
        ({"aggregate": "median", "dp-clip": ""}, "aggregate and attack are for simulations"),
    ],
)
def test_what_would_look_private_and_is_not_is_refused_in_a_line(given, why):
    with pytest.raises(ValueError, match=why) as caught:
        read({"names": "a,b,c,d", "run-folder": "x", "dp-clip": 1.0} | given)
    assert "\n" not in str(caught.value)


def test_a_method_that_cannot_is_refused(tmp_path):
    with pytest.raises(ValueError, match="FedDR has no state_after_sending"):
        Federation(tmp_path, make_problem(), algorithm="feddr", dp_clip=1.0).start()


def test_a_sum_with_too_little_noise_is_not_unmasked_by_the_clients(tmp_path):
    """A server that is content with three clients' noise where four must add theirs is not told the sum."""

    def fault(name, message, answer):
        reply, kind = answer(), message.metadata.message_type
        return [] if kind == "train" and name == "dora" else [reply]

    honest = Federation(tmp_path, rounds=1, eval_every=1, deadline=0.5, attempts=1, **NOISE | {"dp_among": 4})
    states = tmp_path / "states"
    grid = FakeGrid(dict(enumerate(NAMES, 101)), client_app(honest.load), honest.settings, states, fault)
    lying = read(honest.settings | {"dp-among": 2})
    server = Coordinator(grid, *lying, lambda config, start: plan_from(config, honest.problem.start))
    with pytest.raises(TimeoutError, match="round 0 failed 1 times"):
        server.run()
    assert "a sum of 3 clients, expected at least 4" in (states / "sent" / "anna.jsonl").read_text()


def test_a_plan_without_the_privacy_of_the_settings_is_refused_on_either_side(tmp_path):
    federation = Federation(tmp_path, rounds=1, attempts=1, **NOISE)
    bare = lambda *_: replace(federation.plan(), privacy=None)  # noqa: E731
    app = client_app(federation.load, plan=bare)
    nodes = dict(enumerate(NAMES, 101))
    grid = FakeGrid(nodes, app, federation.settings, tmp_path / "states")
    with pytest.raises(ValueError, match="the plan's privacy is None, and the settings ask for Privacy"):
        Coordinator(grid, federation.config, federation.federation, bare).run()
    other = read(federation.settings | {"run-folder": str(tmp_path / "other")})
    with pytest.raises(TimeoutError, match="the plan's privacy is None"):
        Coordinator(grid, *other, lambda *_: federation.plan()).run()


def test_noise_that_has_no_room_in_the_sum_is_refused_before_the_first_round(tmp_path):
    """In the round its client would say how long it is, and the same again whenever it is repeated."""
    federation = Federation(tmp_path, rounds=1, secagg_bound=1.5, **NOISE)
    with pytest.raises(ValueError, match=r"secagg_bound is 1\.5, and an uplink is up to 1\.5\d long with its noise"):
        federation.start()
    assert not [m for _, m in federation.grid.asked if m.metadata.message_type == "train"]
    Federation(tmp_path / "wide", rounds=1, secagg_bound=1.6, **NOISE).start()


def test_weights_of_clients_that_clip_are_shares_of_one(tmp_path):
    """Clipping at a length that nothing has changes nothing, also where weights are no float32 numbers."""
    ends = []
    for given in ({}, {"dp_clip": 1e6}):
        federation = Federation(tmp_path / str(len(given)), rounds=4, eval_every=4, **given)
        plan = replace(federation.plan(), weights=(0.1, 0.2, 0.3, 0.7))
        federation.plan = lambda plan=plan: plan
        federation.start()
        ends.append(federation.server()[0])
    for one, other in zip(*ends, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-14)
