"""An asynchronous server on Flower: replies as they come, with nodes inside this process, then between processes."""

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flower_grid import NAMES, Federation, make_problem
from flwr.app import MessageType

from fednmap.regularizers import L1
from fednmap.runs.folder import RunFolder
from fednmap.testing import optimum

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:flwr")


def residual(federation):
    """Distance to the optimum, and of the server's h to the mean of the clients' h_i."""
    server, _ = federation.server()
    best = optimum(federation.problem, L1(0.5))
    states = torch.stack([state.h for state in federation.client_states()])
    x = federation.coordinator.plan.algorithm.model(server)
    return float((x - best).norm()), float((server.h - states.mean(0)).norm())


@pytest.mark.parametrize(("method", "share"), [("fednmap", 1.0), ("zhang", 0.5)])
def test_waiting_for_all_is_the_synchronous_server(tmp_path, method, share):
    given = {"algorithm": method, "participation": share, "seed": 3, "batch_size": 4}
    federation = Federation(tmp_path, make_problem(batch_size=4), asynchronous="all", **given)
    closing = federation.start()
    (tmp_path / "b").mkdir()
    waiting = Federation(tmp_path / "b", make_problem(batch_size=4), **given)
    waiting.start()
    for a, b in zip(federation.server()[0], waiting.server()[0], strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)
    assert (closing["staleness"], closing["staleness_max"]) == (0, 0)
    assert closing["bytes_up"] == 6 * 4 * share * 6 * 8
    assert closing["bytes_down"] == 2 * closing["bytes_up"]


class Slow:
    """Nodes of which one is slow: its reply to a job comes when `after` more jobs of the others are done."""

    def __init__(self, name="dora", after=9):
        self.name, self.after, self.held = name, after, []

    def __call__(self, name, message, answer):
        if name == self.name and message.metadata.message_type == MessageType.TRAIN:
            self.held.append([self.after, answer()])
            return []
        if message.metadata.message_type == MessageType.TRAIN:
            for entry in self.held:
                entry[0] -= 1
        due = [reply for left, reply in self.held if left <= 0]
        self.held = [entry for entry in self.held if entry[0] > 0]
        return [answer(), *due]


def test_late_replies_count_and_the_answer_is_the_optimum(tmp_path):
    federation = Federation(tmp_path, asynchronous="buffer:2", rounds=60, eval_every=1000, eta_a=0.06)
    closing = federation.start(fault=Slow(after=6))
    error, drift = residual(federation)
    assert error < 1e-5
    assert drift < 1e-12
    assert closing["staleness_max"] >= 3
    assert closing["took_part"]["dora"] == closing["counted_least"] < closing["counted_most"] / 2
    assert sum(closing["took_part"].values()) == 2 * 60
    jobs = [name for name, m in federation.grid.asked if m.metadata.message_type == MessageType.TRAIN]
    assert jobs.count("dora") <= closing["took_part"]["dora"] + 1  # no job twice, nothing thrown away


def test_a_measurement_waits_for_the_slow_and_rounds_for_nobody(tmp_path):
    federation = Federation(tmp_path, asynchronous="buffer:1", rounds=40, eval_every=3)
    federation.start(fault=Slow(after=12))
    records = RunFolder.open(tmp_path / "run").records("fednmap", 0)
    rounds = [record["round"] for record in records]
    assert rounds == sorted(set(rounds))
    assert (rounds[0], rounds[1], rounds[-1]) == (0, 3, 40)
    assert 4 <= len(rounds) < 14  # every third round, but for those in which one was under way
    assert {record["clients_measured"] for record in records} == {4}
    plan, problem = federation.plan(), federation.problem
    assert records[0]["loss"] == pytest.approx(
        float(problem.loss(plan.algorithm.model(plan.algorithm.init(plan.start)[0])))
    )
    assert records[0]["objective"] > records[-1]["objective"]


@pytest.mark.slow
@pytest.mark.ci(turn=11)
def test_it_ends_at_a_tolerance(tmp_path):
    given = {"asynchronous": "buffer:3", "rounds": 400, "eval_every": 5, "tol_absolute": 1e-3}
    federation = Federation(tmp_path, **given)
    closing = federation.start(fault=Slow(after=5))
    assert closing["ended"].startswith("converged")
    assert closing["rounds"] < 400
    assert closing["stationarity"] <= 1e-6
    assert residual(federation)[0] < 1e-2


class Killed(Exception):
    """The server dies here."""


def hostile(seed):
    """Replies lost, doubled, late and spoiled; after a while the server is killed while it pulls a reply."""
    rng, held = np.random.default_rng(seed), []
    left = int(rng.integers(8, 30))

    def fault(name, message, answer):
        nonlocal left
        if message.metadata.message_type != MessageType.TRAIN:
            return [answer()]
        left -= 1
        reply, late = answer(), list(held)
        held.clear()
        if left <= 0:
            raise Killed
        chance = rng.random()
        if chance < 0.08:
            return late
        if chance < 0.4:
            held.append(reply)
            return late
        if chance < 0.45:
            reply.content["up"]["y"].data = b"spoiled"
        return [reply, reply, *late] if chance < 0.6 else [reply, *late]

    return fault


@pytest.mark.parametrize("rule", ["buffer:1", pytest.param("window:0.1", marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_killed_at_any_moment_h_is_the_mean_of_the_h_i(tmp_path, rule, seed):
    """Each time the nodes are others, with the states on their disks."""
    federation = Federation(tmp_path, asynchronous=rule, rounds=1000, eval_every=1000, eta_a=0.06, deadline=0.5)
    for life in range(4):
        nodes = {100 * life + i: name for i, name in enumerate(NAMES, 1)}
        with pytest.raises(Killed):
            federation.start(fault=hostile((seed, life)), nodes=nodes, resume=life > 0)
        if (tmp_path / "run" / "checkpoints").exists():
            assert residual(federation)[1] < 1e-12
    done = sum(federation.coordinator.rounds.took_part.values())
    federation.start(resume=True, rounds=done + 8, nodes={901 + i: name for i, name in enumerate(NAMES)})
    assert residual(federation)[1] < 1e-12


def test_a_staleness_bound_waits(tmp_path):
    federation = Federation(tmp_path, asynchronous="buffer:1", staleness=2, rounds=12, eval_every=12)
    assert federation.start(fault=Slow(after=1))["staleness_max"] <= 2


def test_nobody_at_work_stops_with_the_state_saved(tmp_path, monkeypatch):
    monkeypatch.setattr("fednmap.flower.late_replies.LOOK", 0.05)
    federation = Federation(tmp_path, asynchronous="buffer:1", attempts=3, deadline=0.1)

    def deaf(name, message, answer):
        late = message.metadata.message_type == MessageType.TRAIN and message.content["round"]["t"] >= 2
        return [] if late else [answer()]

    with pytest.raises(TimeoutError, match=r"round [2-5] failed 3 times"):  # jobs of rounds 0 and 1 still count
        federation.start(fault=deaf)
    federation.start(resume=True)
    assert residual(federation)[1] < 1e-12


REFUSED = {
    "secagg": ({"secagg": True}, "secure aggregation, privacy and robust rules are for rounds that end for all"),
    "clipping": ({"dp_clip": 1.0}, "secure aggregation, privacy and robust rules are for rounds that end for all"),
    "deadline": ({"asynchronous": "deadline:2"}, "leave it out, and give deadline and min-clients = 1"),
    "delays": ({"delays": "pareto:1.2"}, "time is real here; leave them out"),
    "slowdown": ({"slowdown": "1,1,1,20"}, "time is real here; leave them out"),
    "rule": ({"asynchronous": "window"}, "expected all, buffer:K, window:TIME or deadline:TIME, got 'window'"),
    "staleness": ({"staleness": -1}, "staleness"),
    "sampler": ({"sampler": "cyclic"}, "jobs go to clients without one; leave sampler out"),
}


@pytest.mark.parametrize(("given", "why"), REFUSED.values(), ids=REFUSED)
def test_bad_settings_are_refused_in_one_line(tmp_path, given, why):
    with pytest.raises(ValueError, match=why) as caught:
        Federation(tmp_path, **{"asynchronous": "window:2"} | given)
    assert "\n" not in str(caught.value)


def test_a_method_whose_uplink_does_not_tell_is_refused(tmp_path):
    with pytest.raises(ValueError, match="SCAFFOLD"):
        Federation(tmp_path, asynchronous="buffer:2", algorithm="scaffold", penalty="none").start()
