"""A Round is a value; who takes part, with which step, and when a run ends are arguments."""

import gc
import math
import re
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from lasso import PHI, last
from methods import MAKE

from fednmap import algorithms as A
from fednmap import run, simulate
from fednmap.decentralized import Decentralized, NormED, Ring
from fednmap.measure import problem_gamma, stationarity
from fednmap.names import InputError
from fednmap.problems import LeastSquares, Pooled
from fednmap.regularizers import L1, MCP, Zero
from fednmap.simulation import Callback, Patience, TimeLimit, Tolerance, schedules
from fednmap.simulation.participation import Cyclic, PoissonSampler, Trace, Uniform, Weighted, sampler_of, take_part
from fednmap.simulation.schedules import Cosine, InverseSqrt, StepDown, schedule_of
from fednmap.simulation.states import Clients
from fednmap.testing import heterogeneous, smoothness

SIX = heterogeneous(n=6)
L = smoothness(SIX)
EVERYBODY = torch.arange(6)
HISTORIES = [{}, {"participation": 0.5, "drop": 0.3, "seed": 3}, {"participation": 0.34, "chunk": 1, "seed": 1}]


def method(Q=3, **more):
    return A.FedNMap(PHI, eta_a=0.5 / (L * Q), Q=Q, **more)


def same(a, b):
    return all(torch.equal(u, v) for u, v in zip(a, b, strict=True))


@pytest.mark.parametrize("history", HISTORIES, ids=["everybody", "lossy", "one by one"])
@pytest.mark.parametrize("name", MAKE)
def test_going_on_from_any_round_gives_the_same_bits(name, history):
    algorithm = MAKE[name](PHI if MAKE[name](Zero(), L, 1).traits.composite else Zero(), L, 1)
    if algorithm.traits.full_participation and history:
        pytest.skip("needs everybody")
    problem = Pooled(SIX) if algorithm.traits.central else SIX
    rounds = list(simulate(algorithm, problem, rounds=12, **history))
    ids = torch.arange(problem.n)
    for k in (0, 4, 4, 10):
        *_, end = simulate(algorithm, problem, rounds=12, after=rounds[k], **history)
        assert same(end.server, rounds[-1].server)
        assert same(end.clients[ids], rounds[-1].clients[ids])


def test_what_was_yielded_does_not_change():
    """Checked against copies taken at the time, also of clients that had no state yet."""
    running, kept = simulate(method(), SIX, rounds=30, participation=0.34, drop=0.2), []
    for round_ in running:
        kept.append((round_, [v.clone() for v in round_.clients[EVERYBODY]], len(round_.clients)))
    for round_, states, count in kept:
        assert same(round_.clients[EVERYBODY], states)
        assert len(round_.clients) == count
        assert len(round_.clients.tensors()["ids"]) == count
        for i in (0, 3):
            assert torch.equal(round_.clients[torch.tensor(i)].h, states[0][i])


def test_two_runs_go_on_from_one_round_without_disturbing_each_other():
    first = next(simulate(method(), SIX, rounds=1))
    one, two = (simulate(method(), SIX, rounds=9, after=first) for _ in range(2))
    together = [(next(one), next(two)) for _ in range(8)]
    assert all(same(a.server, b.server) for a, b in together)


def test_a_snapshot_nobody_holds_costs_nothing():
    clients = Clients(4, method().Client(torch.zeros(2)))
    empty = clients.snapshot()
    clients[torch.arange(3)] = method().Client(torch.ones(3, 2))
    assert not clients._snapshots  # it needs the initial state alone
    held, dropped = clients.snapshot(), clients.snapshot()
    del dropped
    gc.collect()
    clients[torch.arange(2)] = method().Client(torch.full((2, 2), 2.0))
    assert len(clients._snapshots) == 1
    clients[torch.arange(4)] = method().Client(torch.full((4, 2), 3.0))
    assert not clients._snapshots  # it has all that it needs
    assert held[torch.arange(4)].h[:, 0].tolist() == [1, 1, 1, 0]
    assert float(empty[torch.arange(4)].h.sum()) == 0


def test_states_on_disk_belong_to_one_run(tmp_path):
    running = simulate(method(), SIX, rounds=5, store=tmp_path)
    next(running)
    with pytest.raises(InputError, match="in use by another run"):
        simulate(method(), SIX, rounds=5, store=tmp_path)
    del running
    gc.collect()
    assert len(list(simulate(method(), SIX, rounds=5, store=tmp_path))) == 5


def test_states_on_disk_go_on_from_the_last_round_alone(tmp_path):
    whole = list(simulate(method(), SIX, rounds=8))
    part = list(simulate(method(), SIX, rounds=5, store=tmp_path))
    with pytest.raises(InputError, match="newest round only"):
        simulate(method(), SIX, rounds=8, store=tmp_path, after=part[2])
    with pytest.raises(InputError, match="expected store="):
        simulate(method(), SIX, rounds=8, after=part[-1])
    later = list(simulate(method(), SIX, rounds=8, store=tmp_path, after=part[-1]))
    assert same(later[-1].server, whole[-1].server)
    list(simulate(method(), SIX, rounds=1, store=tmp_path))  # a new run, in the same files
    with pytest.raises(InputError, match="newest round only"):
        later[-1].clients[EVERYBODY]


# who takes part


def drawn(sampler, rounds=400, n=10, seed=0):
    return [take_part(n, t, sampler=sampler, drop=0.0, seed=seed).participants.tolist() for t in range(rounds)]


def test_uniform_is_the_default():
    a, b = (
        list(simulate(method(), SIX, rounds=9, **how)) for how in ({"participation": 0.5}, {"sampler": Uniform(0.5)})
    )
    assert all(same(x.server, y.server) for x, y in zip(a, b, strict=True))


def test_poisson_takes_everyone_by_a_coin():
    rounds = drawn(PoissonSampler(0.3))
    counts = np.array([len(r) for r in rounds])
    assert abs(counts.mean() - 3) < 4 * math.sqrt(10 * 0.3 * 0.7 / 400)
    assert counts.var() > 1.2  # 2.1 expected; a fixed number would give 0
    together = np.mean([0 in r and 1 in r for r in rounds])
    assert abs(together - 0.09) < 4 * math.sqrt(0.09 * 0.91 / 400)


def test_a_round_without_anybody_changes_nothing():
    rounds = list(simulate(method(), SIX, rounds=40, sampler=PoissonSampler(0.05)))
    empty = [k for k, r in enumerate(rounds) if not len(r.participants) and k]
    assert empty
    assert all(same(rounds[k].server, rounds[k - 1].server) and rounds[k].bytes_up == 0 for k in empty)


def test_weighted_follows_the_odds():
    seen = np.bincount(np.concatenate(drawn(Weighted([1, 3, 0, 1, 1, 1, 1, 1, 1, 10], share=0.1))), minlength=10) / 400
    assert seen[2] == 0
    assert abs(seen[9] - 0.5) < 4 * math.sqrt(0.25 / 400)
    assert abs(seen[1] - 0.15) < 4 * math.sqrt(0.15 * 0.85 / 400)


def test_cyclic_and_trace():
    assert drawn(Cyclic(0.4), rounds=3) == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 8, 9]]
    assert drawn(Trace([[3, 1], [], [2]]), rounds=4) == [[1, 3], [], [2], [1, 3]]


WHO = [PoissonSampler(0.4), Cyclic(0.34), Trace([[0, 1], [2, 3, 4], [5], []]), Weighted([9, 1, 1, 1, 1, 1], 0.5)]


@pytest.mark.parametrize("sampler", WHO)
def test_fednmap_is_exact_whoever_takes_part(sampler):
    algorithm = method()
    end = last(algorithm, SIX, rounds=1500, sampler=sampler, drop=0.1)
    assert float(stationarity(SIX, PHI, algorithm.model(end.server), 1 / L)) < 1e-18
    assert float((end.clients[EVERYBODY].h.mean(0) - end.server.h).abs().max()) < 1e-12


UNEVEN = [Weighted([3, 1], 0.5), Trace([[0], [0], [0], [1]])]


@pytest.mark.parametrize("sampler", UNEVEN, ids=["Weighted", "Trace"])
def test_who_comes_more_often_weighs_more_without_client_state_and_that_is_said(sampler):
    """f_i = (x - b_i)^2 / 2 with b = 1, -1: the optimum is 0; with client 0 in 3 of 4 rounds FedAvg is near 1/2."""
    one = torch.ones(1, 1, dtype=torch.float64)
    problem = LeastSquares([(one, one[0]), (one, -one[0])])
    with pytest.warns(UserWarning, match="FedAvg keeps no client state, and the sampler draws some clients more often"):
        late = [r.server.x for r in simulate(A.FedAvg(eta_a=0.01, Q=1), problem, rounds=4000, sampler=sampler)][1000:]
    assert abs(float(torch.stack(late).mean()) - 0.5) < 0.1
    end = run(A.FedNMap(Zero(), eta_a=0.1, Q=1), problem, rounds=600, every=600, sampler=sampler)  # says nothing
    assert abs(float(end.x)) < 1e-9
    for alike in (Weighted([1, 1], 0.5), Weighted([3, 1], 1.0), Trace([[1], [0]]), Cyclic(0.5)):
        simulate(A.FedAvg(eta_a=0.01, Q=1), problem, rounds=1, sampler=alike)


def test_a_trace_from_a_file(tmp_path):
    (tmp_path / "trace.txt").write_text("0 2\n\n1,2\n")
    assert sampler_of(f"trace:{tmp_path / 'trace.txt'}", 1.0).rounds == [[0, 2], [], [1, 2]]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: simulate(method(), SIX, rounds=1, sampler=lambda n, t, rng: [0, 0]),
            "different client numbers from 0 to 5",
        ),
        (
            lambda: simulate(method(), SIX, rounds=1, sampler=lambda n, t, rng: [7]),
            "different client numbers from 0 to 5",
        ),
        (lambda: simulate(A.Scaffnew(), SIX, rounds=1, sampler=PoissonSampler(0.5)), "needs every client"),
        (lambda: simulate(method(), SIX, rounds=1, sampler=Weighted([1, 1], 0.5)), "2 odds"),
        (lambda: sampler_of("poison", 0.5), "did you mean 'poisson'"),
        (lambda: sampler_of("trace:nowhere", 0.5), "cannot read the trace"),
        (lambda: PoissonSampler(0.0), "participation is 0.0"),
        (lambda: Trace([]), "empty"),
        (lambda: simulate(SIX, method(), rounds=1), "as the first argument, got an object of type LeastSquares"),
        (lambda: simulate(A.FedNMap, SIX, rounds=1), "as the first argument, got the class FedNMap"),
        (lambda: simulate(method(), 3, rounds=1), "as the second argument, got an object of type int"),
        (
            lambda: simulate(method(), SIX, rounds=1, start=[0.0] * SIX.dim),
            "a tensor of length 8, got an object of type list",
        ),
        (lambda: run(SIX, method(), rounds=1), "the first argument"),
    ],
)
def test_refusals_are_one_line(make, words):
    with pytest.raises(InputError, match=re.escape(words)) as caught:
        list(make())
    assert "\n" not in str(caught.value)


# step sizes


def test_a_schedule_gives_the_step_of_each_round():
    steps = [0.3, 0.2, 0.05, 0.1]
    scheduled = list(simulate(method(gamma=1.0), SIX, rounds=4, eta_a=lambda t: steps[t] / L))
    server = None
    for t, eta in enumerate(steps):
        algorithm = A.FedNMap(PHI, eta_a=eta / L, Q=3, gamma=1.0)
        after = scheduled[t - 1] if t else None
        (round_,) = islice(simulate(algorithm, SIX, rounds=t + 1, after=after), 1)
        server = round_.server
        assert same(server, scheduled[t].server)


def test_the_server_step_of_fedcanon_follows_the_schedule_unless_it_is_given():
    """The server goes as far as the clients do, in every round: x - eta_a(t) eta_s Q mean y_i, here without phi."""
    step = InverseSqrt(0.1)
    for given in (None, 0.3):
        canon = A.FedCanon(Zero(), eta_a=0.1, eta_s=2.0, Q=3, alpha=given)
        for t in (0, 3, 99):
            then = schedules.at(canon, step, t)
            server, _ = then.init(torch.zeros(2))
            moved = then.aggregate(server, then.Up(torch.ones(2)), 1.0).x
            torch.testing.assert_close(moved, torch.full((2,), -(step(t) * 2.0 * 3 if given is None else given)))
        assert schedules.at(schedules.at(canon, step, 99), 0.1, 0) == canon


@pytest.mark.parametrize(
    "schedule", [Cosine(0.5 / L, 1500, 0.05 / L), InverseSqrt(0.5 / L), StepDown(0.5 / L, 0.5, 100)]
)
def test_fednmap_ends_at_the_same_point_under_a_schedule(schedule):
    algorithm = A.FedNMap(PHI, eta_a=0.1, Q=1, gamma=1 / L)
    first, end = (last(algorithm, SIX, rounds=rounds, eta_a=schedule) for rounds in (1, 600))
    ratio = [float(stationarity(SIX, PHI, algorithm.model(r.server), 1 / L)) for r in (first, end)]
    assert ratio[1] < 1e-3 * ratio[0]


def test_schedules_by_name():
    assert schedule_of("constant", 0.1, 9) is None
    assert schedule_of("cosine:0.01", 0.1, 9) == Cosine(0.1, 9, 0.01)
    assert schedule_of("steps:0.5,30", 0.1, 9) == StepDown(0.1, 0.5, 30)
    cosine = Cosine(1.0, 100)
    assert (cosine(0), cosine(50), cosine(100)) == pytest.approx((1.0, 0.5, 0.0))
    assert [InverseSqrt(1.0)(t) for t in (0, 3)] == [1.0, 0.5]
    assert [StepDown(1.0, 0.5, 10)(t) for t in (0, 9, 10, 25)] == [1.0, 1.0, 0.5, 0.25]


@pytest.mark.parametrize("schedule", [Cosine(0.1, 5), StepDown(0.1, 1e-200, 2), lambda t: 0.1 if t < 5 else math.nan])
def test_a_schedule_that_ends_before_the_run_is_refused_at_its_start(schedule):
    with pytest.raises(InputError, match="must be above 0 in all 9 rounds"):
        simulate(method(), SIX, rounds=9, eta_a=schedule)
    assert len(list(simulate(method(), SIX, rounds=4, eta_a=schedule))) == 4
    with pytest.raises(InputError, match="in all 9 rounds"):
        run(method(), SIX, rounds=9, after=run(method(), SIX, rounds=4, eta_a=schedule), eta_a=schedule)


def test_a_cosine_with_a_last_step_stays_there():
    steps = list(simulate(method(), SIX, rounds=9, eta_a=Cosine(0.01, 5, 0.001)))
    assert len(steps) == 9


BAD = ["", "x", "constant:1", "cosine:x", "cosine:-1", "sqrt:1", "steps", "steps:0.5", "steps:1,0.5", "steps:nan,3"]


@pytest.mark.parametrize("spec", BAD)
def test_a_bad_schedule_is_one_line(spec):
    with pytest.raises(InputError) as caught:
        schedule_of(spec, 0.1, 10)
    assert "\n" not in str(caught.value)


# measuring, stopping, going on


@pytest.mark.parametrize("eta", [1e-3, 1e-1, 1e3])
def test_the_yardstick_belongs_to_the_problem(eta):
    """Neither the step size nor a parameter called gamma decides with which gamma a method is measured."""
    expected = problem_gamma(SIX, PHI, SIX.start)
    hessian = sum(a.T @ a / len(a) for a, _ in SIX.data) / SIX.n
    assert expected == pytest.approx(1 / float(torch.linalg.eigvalsh(hessian)[-1]), rel=0.1)
    for algorithm in (
        A.FedNMap(PHI, eta_a=eta),
        A.FastFedDA(PHI, eta_a=eta),
        A.EControlDA(PHI, eta_a=eta),
        A.Zhang(PHI, eta_a=eta),
    ):
        result = run(algorithm, SIX, rounds=0)
        assert result.measure_gamma == expected
        x = algorithm.model(algorithm.init(SIX.start)[0])
        assert result.final["stationarity"] == pytest.approx(float(stationarity(SIX, PHI, x, expected)))


def test_the_yardstick_respects_weak_convexity():
    assert problem_gamma(SIX, MCP(0.1, 1e-3), SIX.start) == pytest.approx(0.5e-3)


def test_a_linear_f_is_measured_with_1():
    class Linear:
        n, dim = 1, 2

        def oracle(self, clients, t):
            return lambda x, q: torch.ones_like(x)

        def loss(self, x):
            return x.sum()

        def gradient(self, x):
            return torch.ones_like(x)

    assert problem_gamma(Linear(), Zero(), torch.zeros(2)) == 1.0


class Ends(Callback):
    def __init__(self, at, answer):
        self.at, self.answer, self.first_reason = at, answer, []

    def on_round(self, round, totals):
        self.first_reason.append(round.t)
        if round.t == self.at:
            if self.answer is StopIteration:
                raise StopIteration
            return self.answer
        return None


@pytest.mark.parametrize(
    ("answer", "reason"), [(True, "ended by Ends"), ("enough", "enough"), (StopIteration, "ended by Ends")]
)
def test_a_callback_can_end_a_run(answer, reason):
    callback = Ends(6, answer)
    result = run(method(), SIX, rounds=50, callbacks=[callback])
    assert (result.ended, callback.first_reason, result.last.t) == (reason, list(range(7)), 6)
    assert result.column("round") == [0, 7]  # what it ended with is measured
    assert same([result.x], [method().model(result.last.server)])


def test_functions_are_callbacks():
    seen = []
    result = run(method(), SIX, rounds=20, callbacks=seen.append)
    assert seen == result.records
    assert run(method(), SIX, rounds=90, stop=lambda record: record["round"] >= 30).final["round"] == 30


@pytest.mark.parametrize(
    ("stop", "words"),
    [(Tolerance(1e-5), "converged"), (Patience(2, least=1e-6), "no progress"), (TimeLimit(1e-9), "time limit")],
)
def test_reasons_to_stop(stop, words):
    for _ in range(2):  # a reason can be used again
        result = run(method(), SIX, rounds=3000, stop=stop)
        assert words in result.ended
        assert result.final["round"] < 3000
    assert run(method(), SIX, rounds=2, stop=Tolerance(1e-9)).ended == ""


def test_a_tolerance_is_met():
    result = run(method(), SIX, rounds=3000, every=1, stop=Tolerance(1e-5))
    residuals = np.sqrt(result.column("stationarity"))
    limit = 1e-5 * residuals[0]
    assert residuals[-1] <= limit < residuals[-2]


def test_a_result_can_be_continued():
    whole = run(method(), SIX, rounds=35, participation=0.5)
    part = run(method(), SIX, rounds=20, participation=0.5)
    for _ in range(2):
        result = run(method(), SIX, rounds=35, participation=0.5, after=part)
        assert torch.equal(result.x, whole.x)
        assert [r["objective"] for r in result.records] == [r["objective"] for r in whole.records]
        assert result.totals["bytes_up"] == whole.totals["bytes_up"]


@pytest.mark.parametrize("after", [lambda part: part, lambda part: part.last], ids=["Result", "Round"])
@pytest.mark.parametrize("rounds", [20, 5, 0])
def test_rounds_count_from_the_start(rounds, after):
    """As many more as asked for, or none, would both be guesses: fewer than one more is refused."""
    part = run(method(), SIX, rounds=20)
    assert [r.t for r in simulate(method(), SIX, rounds=23, after=part.last)] == [20, 21, 22]
    due = f"above the 20 that are done, got {rounds}; .* give rounds={20 + max(rounds, 1)} for {max(rounds, 1)} more$"
    for call in (run, simulate) if rounds and after(part) is part.last else (run,):
        with pytest.raises(InputError, match=due):
            call(method(), SIX, rounds=rounds, after=after(part))


def test_rounds_of_a_network_count_from_the_start():
    graph = Decentralized(NormED(PHI, eta_a=0.1 / L, gamma=1 / L), Ring(6))
    first = run(graph, SIX, rounds=4)
    assert run(graph, SIX, rounds=6, after=first).final["round"] == 6
    with pytest.raises(InputError, match="expected rounds above the 4 that are done, got 4"):
        run(graph, SIX, rounds=4, after=first)


@pytest.mark.parametrize("name", ["loss", "round", "stationarity", "bytes_up"])
def test_a_metric_may_not_hide_another(name):
    with pytest.raises(InputError, match="another name"):
        run(method(), SIX, rounds=1, metrics={name: lambda x: 0.0})


@pytest.mark.parametrize("bad", [3, "loss", Callback])
def test_what_is_not_a_callback_is_refused(bad):
    with pytest.raises(InputError, match="Callback"):
        run(method(), SIX, rounds=1, callbacks=bad)


@pytest.mark.parametrize(
    "make", [lambda: Tolerance(0), lambda: Tolerance(-1), lambda: TimeLimit(0), lambda: Patience(0)]
)
def test_reasons_that_make_no_sense(make):
    with pytest.raises(InputError, match="above 0"):
        make()


def test_a_problem_needs_the_protocol_alone():
    class Own:
        n, dim = 2, 3

        def oracle(self, clients, t):
            return lambda x, q: x - clients.to(x).reshape(-1, 1)

        def loss(self, x):
            return 0.25 * (x.square().sum() + (x - 1).square().sum())

        def gradient(self, x):
            return x - 0.5

    result = run(A.FedNMap(L1(0.1), eta_a=0.1, Q=2), Own(), rounds=200)
    assert torch.allclose(result.x, torch.full((3,), 0.4), atol=1e-5)
    with pytest.raises(InputError, match="not made from a torch module"):
        result.module()


def dual_averaging_by_hand(problem, phi, eta_a, rounds, Q):
    """FedDA from its box, with a step for each round: the prox weighs what was stepped so far."""
    z, stepped = problem.start.clone(), 0.0
    for t in range(rounds):
        ends = []
        for i in range(problem.n):
            z_i, g = z, problem.oracle(torch.tensor(i), t)
            for q in range(Q):
                z_i = z_i - eta_a(t) * g(phi.prox(z_i, stepped + eta_a(t) * q), q)
            ends.append(z_i)
        z, stepped = torch.stack(ends).mean(0), stepped + eta_a(t) * Q
    return phi.prox(z, stepped)


@pytest.mark.parametrize("schedule", [InverseSqrt(0.04), StepDown(0.04, 0.5, 7), lambda t: 0.04 / (t + 1)])
def test_dual_averaging_weighs_the_steps_that_were_taken(schedule):
    result = run(A.FedDA(PHI, eta_a=0.04, Q=3), SIX, rounds=25, eta_a=schedule)
    assert torch.allclose(result.x, dual_averaging_by_hand(SIX, PHI, schedule, 25, 3), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("eta_a", [InverseSqrt(0.1), 0.01])
@pytest.mark.parametrize("algorithm", [A.FastFedDA(PHI), A.EControlDA(PHI), A.FedNewton(PHI)], ids=lambda a: a.name)
def test_a_step_that_cannot_change_is_not_ignored(algorithm, eta_a):
    given = replace(algorithm, eta_a=0.3, gamma=algorithm.gamma)
    assert torch.equal(run(given, SIX, rounds=2).x, run(algorithm, SIX, rounds=2).x)  # gamma is all that it sets
    with pytest.raises(InputError, match="only to set gamma, once: it cannot follow a schedule"):
        run(algorithm, SIX, rounds=2, eta_a=eta_a)


@pytest.mark.parametrize("name", MAKE)
def test_every_method_heeds_a_schedule_or_refuses_it(name):
    algorithm = MAKE[name](PHI if MAKE[name](Zero(), L, 1).traits.composite else Zero(), L, 1)
    problem = Pooled(SIX) if algorithm.traits.central else SIX
    plain = run(algorithm, problem, rounds=6)
    if algorithm.traits.steps_may_change:
        assert not torch.equal(run(algorithm, problem, rounds=6, eta_a=lambda t: algorithm.eta_a / (t + 1)).x, plain.x)


def test_one_client_s_states_do_not_change_either():
    running = simulate(method(), SIX, rounds=4)
    first = next(running)
    (h,) = first.clients[torch.tensor(3)]
    before = h.clone()
    list(running)
    assert torch.equal(h, before)
    assert torch.equal(first.clients[torch.tensor(3)].h, before)


OTHERS = {
    "method": lambda last: simulate(A.Zhang(PHI, eta_a=0.01), SIX, rounds=9, after=last),
    "number of clients": lambda last: simulate(method(), heterogeneous(n=5), rounds=9, after=last),
    "more clients": lambda last: simulate(method(), heterogeneous(n=7), rounds=9, after=last),
    "precision": lambda last: simulate(method(), SIX, rounds=9, start=SIX.start.float(), after=last),
    "kind": lambda last: simulate(method(), SIX, rounds=9, after=4),
    "result": lambda last: simulate(method(), SIX, rounds=9, after=run(method(), SIX, rounds=1)),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_round_of_another_run_is_refused(other):
    with pytest.raises(InputError, match=r"expected a round of this run|expected a Round"):
        OTHERS[other](last(method(), SIX, rounds=3))


def test_a_result_without_a_last_round_is_not_begun_anew(tmp_path):
    """It would begin at round 0 again and put its records behind the others."""
    finished = run(method(), SIX, rounds=20, folder=tmp_path / "run")
    with pytest.raises(InputError, match="expected a Result with its last round"):
        run(method(), SIX, rounds=40, after=finished)
    nothing = run(method(), SIX, rounds=0)
    assert torch.equal(run(method(), SIX, rounds=5, after=nothing).x, run(method(), SIX, rounds=5).x)


@pytest.mark.parametrize("answer", [np.True_, torch.tensor(True), True, "enough"], ids=repr)
def test_what_ends_a_run(answer):
    assert run(method(), SIX, rounds=9, every=2, callbacks=lambda record: answer).final["round"] == 0

    class Own(Callback):
        def on_round(self, round, totals):
            return answer

    assert run(method(), SIX, rounds=9, every=2, callbacks=Own()).final["round"] == 1


@pytest.mark.parametrize("answer", [1, 0.5, "", {"a": 1}, torch.ones(2), np.False_], ids=repr)
def test_what_does_not_end_a_run(answer):
    class Own(Callback):
        def on_record(self, record):
            return answer

    assert run(method(), SIX, rounds=4, every=2, callbacks=[Own(), lambda record: answer]).final["round"] == 4


@pytest.mark.parametrize("named", [[0.9, 1.7], [True, False], np.array([False, True]), 2, [[0, 1]]], ids=repr)
def test_a_sampler_names_whole_numbers(named):
    """[True, False] is not the clients 1 and 0."""
    with pytest.raises(InputError, match="different client numbers"):
        next(simulate(method(), heterogeneous(n=2), rounds=1, sampler=lambda n, t, rng: named))


def test_a_sampler_may_name_a_set_or_a_tensor():
    for named in ({4, 1}, torch.tensor([4, 1]), (4, 1)):
        (round_,) = simulate(method(), SIX, rounds=1, sampler=lambda n, t, rng, named=named: named)
        assert round_.participants.tolist() == [1, 4]


EVERYDAY = {
    "sampler": {"sampler": "poisson"},
    "sampler, class": {"sampler": PoissonSampler},
    "eta_a, class": {"eta_a": Cosine},
    "rounds": {"rounds": 3.0},
    "seed": {"seed": -1},
    "no seed": {"seed": None},
    "participation": {"participation": "0.5"},
    "drop": {"drop": "0.1"},
    "every": {"every": 2.5},
    "metrics": {"metrics": [len]},
    "metric": {"metrics": {"a": 1}},
    "gamma": {"measure_gamma": 0},
    "patience": {"stop": Patience(3, "accuracy")},
}


@pytest.mark.parametrize("mistake", EVERYDAY)
def test_everyday_mistakes_are_one_line(mistake):
    with pytest.raises(InputError) as caught:
        run(method(), SIX, **{"rounds": 3, **EVERYDAY[mistake]})
    assert "\n" not in str(caught.value)


def test_states_may_be_kept_in_a_folder_given_by_name(tmp_path):
    *_, on_disk = simulate(method(), SIX, rounds=3, store=str(tmp_path / "states"))
    assert same(on_disk.server, last(method(), SIX, rounds=3).server)
