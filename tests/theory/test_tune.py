"""Tuning: never an unstable pair, never over budget, as good as a grid."""

import json
import math
import os
from collections import Counter
from functools import partial

import pytest
import torch

from fednmap import data, simulate
from fednmap.algorithms import FedNMap
from fednmap.cli import app
from fednmap.measure import stationarity
from fednmap.names import InputError
from fednmap.problems import LeastSquares, Logistic
from fednmap.regularizers import L1, MCP, TopK, Zero
from fednmap.runs import experiment
from fednmap.runs.configuration import Config
from fednmap.runs.experiment import prepare
from fednmap.runs.folder import RunFolder
from fednmap.runs.process_pool import parallel_map
from fednmap.simulation.distributed import WorkerLost
from fednmap.testing import heterogeneous
from fednmap.theory.pilots import Pilot, _largest_gamma, _ranked, tune
from fednmap.theory.steps_from_smoothness import steps_from_smoothness


def logistic(batch_size=4, n=6, p=5):
    generator = torch.Generator().manual_seed(1)
    data = []
    for i in range(n):
        a = torch.randn(30, p, generator=generator) + 0.5 * i
        data.append((a, (a[:, 0] - a[:, 1] + 0.3 * torch.randn(30, generator=generator) > 0).long()))
    return Logistic(data, batch_size=batch_size)


def reached(problem, phi, eta_a, gamma, measure_gamma, rounds, Q):
    algorithm = FedNMap(phi, eta_a=eta_a, gamma=gamma, Q=Q)
    try:
        *_, a, b, c = (algorithm.model(r.server) for r in simulate(algorithm, problem, rounds=rounds))
    except ArithmeticError:
        return math.inf
    return sum(float(stationarity(problem, phi, x, measure_gamma)) for x in (a, b, c)) / 3


@pytest.mark.parametrize("batch_size", [None, 4])
def test_within_a_factor_2_of_the_best_of_a_grid(batch_size):
    problem, phi, rounds, Q = logistic(batch_size), L1(0.01), 24, 3
    found = tune(problem, phi, Q=Q, rounds=rounds)
    best = min(
        reached(problem, phi, scale / (found.L * Q), ratio * scale / found.L, found.measure_gamma, rounds, Q)
        for scale in (0.3, 1, 3, 10, 30)
        for ratio in (1, 4, 16)
    )
    assert found.pilot.score <= 2 * best
    # The pilot's number is that of the run it stands for.
    again = reached(problem, phi, found.eta_a, found.gamma, found.measure_gamma, rounds, Q)
    assert again == pytest.approx(found.pilot.score, rel=1e-5)


@pytest.mark.parametrize("budget", [None, 37])
def test_the_budget_is_kept(budget):
    found = tune(logistic(), L1(0.01), Q=3, rounds=8, budget=budget)
    assert found.rounds_used <= found.budget == (128 if budget is None else budget)
    assert found.pilot.rounds == min(8, found.budget // (16 if budget is None else 4))


def test_an_unstable_pair_is_never_chosen():
    # One eigenvalue: eta_hat = 16/L explodes, 4/L too.
    a = torch.eye(3)
    problem = LeastSquares([(a, torch.tensor([1.0, 2.0, 3.0]))])
    found = tune(problem, Zero(), Q=1, rounds=30)
    wild = [p for p in found.pilots if p.eta_a * found.L > 2.01]
    assert wild
    assert all(p.unstable for p in wild)
    assert found.eta_a * found.L < 2
    assert not found.pilot.unstable


def test_if_nothing_is_stable_the_guaranteed_pair_stands_in():
    class Uphill(LeastSquares):
        """Gradients with the wrong sign: every step makes psi larger."""

        def oracle(self, clients, t):
            g = super().oracle(clients, t)
            return lambda x, q: -g(x, q)

        def gradient(self, x):
            return -super().gradient(x)

    problem = Uphill([(torch.eye(2), torch.ones(2))])
    found = tune(problem, Zero(), Q=2, rounds=30)
    assert found.pilot is None
    assert all(p.unstable for p in found.pilots)
    assert (found.eta_a, found.gamma) == (found.guaranteed_eta_a, found.guaranteed_gamma)
    assert "none of 16 pilots" in found.lines()[1]


def test_the_guaranteed_pair_meets_theorem_1():
    found = tune(logistic(), L1(0.01), Q=5, rounds=12)
    assert found.guaranteed_eta_a <= found.steps.largest_eta_a
    assert found.guaranteed_eta_a * 5 <= found.steps.largest_eta_hat
    fast = tune(logistic(), L1(0.01), Q=5, eta_s=50.0, rounds=1)
    assert fast.guaranteed_eta_a * 50 * 5 <= fast.steps.largest_eta_hat
    assert found.guaranteed_gamma == pytest.approx(1 / (5 * found.L))
    assert found.guaranteed_eta_a < found.eta_a / 20  # careful indeed
    assert found.lines()[0].startswith("guaranteed  eta_a = ")
    assert found.lines()[1].startswith("chosen      eta_a = ")


@pytest.mark.parametrize("given", [dict(eta_a=0.05), dict(gamma=0.7)])
def test_what_is_given_is_kept(given):
    found = tune(logistic(), L1(0.01), Q=5, rounds=8, **given)
    ((name, value),) = given.items()
    assert all(getattr(p, name) == value for p in found.pilots)
    assert getattr(found, name) == value
    other = "gamma" if name == "eta_a" else "eta_a"
    assert len({getattr(p, other) for p in found.pilots}) >= 4


def test_tuning_is_deterministic_and_knows_participation():
    one, two = (tune(logistic(), L1(0.01), Q=3, rounds=6, participation=0.5, drop=0.1) for _ in range(2))
    assert one.pilots == two.pilots
    assert one.pilots != tune(logistic(), L1(0.01), Q=3, rounds=6).pilots


def test_gamma_respects_weak_convexity():
    class Hump(L1):
        rho = 2.0

        def value(self, x):
            return super().value(x) - x.square().sum(-1) * (x.abs() < 0.1).all(-1)

    found = tune(logistic(), Hump(0.01), Q=3, rounds=8)
    assert all(p.gamma <= 0.25 for p in found.pilots)


def test_eta_hat_never_exceeds_gamma():
    for given in (dict(gamma=0.3), dict(eta_s=3.0), dict(eta_a=0.5)):
        found = tune(logistic(), L1(0.01), Q=3, rounds=4, **given)
        assert all(p.eta_a * given.get("eta_s", 1.0) * 3 <= p.gamma * (1 + 1e-9) for p in found.pilots)


def test_gamma_does_not_erase_the_start():
    start = torch.full((4,), 0.5)
    gamma = _largest_gamma(L1(0.1), start, 1000.0)
    assert 0.25 <= float(L1(0.1).prox(start, gamma)[0]) < 0.35  # half is kept at gamma = 2.5, steps are sqrt 2
    assert _largest_gamma(L1(0.1), torch.zeros(4), 1000.0) == 1000.0


def test_a_saddle_with_a_small_residual_is_set_aside():
    saddle = Pilot(1.0, 1.0, 10, score=1e-9, first=2.3, psi=2.2999)
    trained = Pilot(0.5, 1.0, 10, score=1e-3, first=2.9, psi=2.1)
    exploded = Pilot(9.0, 1.0, 10, score=1e-12, first=2.9, psi=1.0, unstable="yes")
    assert _ranked([saddle, trained, exploded], 2.3) == [trained, saddle]
    assert _ranked([saddle, trained, exploded], -math.inf) == [saddle, trained]


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="rounds is 0"):
        tune(logistic(), L1(0.01), rounds=0)
    with pytest.raises(ValueError, match="at least one round each"):
        tune(logistic(), L1(0.01), budget=3)
    with pytest.warns(UserWarning, match="not weakly convex"):
        best_k = TopK(2, allow_nonconvex=True)
    with pytest.raises(ValueError, match="TopK has rho = inf, which no theorem covers"):
        tune(logistic(), best_k)
    flat = LeastSquares([(torch.zeros(2, 2), torch.ones(2))])
    with pytest.raises(ValueError, match="smoothness measured at the start is 0"):
        tune(flat, L1(0.01))


def test_steps_at_once_where_the_smoothness_is_known():
    """eta_hat = 1 / L, and 1 / (3 max_i L_i) where not everybody is heard; None for noise."""
    problem = heterogeneous()
    overall = float(torch.linalg.eigvalsh(problem.hessian(problem.start))[-1])
    steps = steps_from_smoothness(problem, L1(0.1), memory=5)
    assert steps.eta_a == steps.gamma == pytest.approx(1 / overall, rel=0.01)
    assert steps_from_smoothness(problem, L1(0.1)).gamma == pytest.approx(4 * steps.eta_a)
    largest = max(float(torch.linalg.eigvalsh(problem.alone(i).hessian(problem.start))[-1]) for i in range(problem.n))
    assert steps_from_smoothness(problem, L1(0.1), everybody=False).eta_a == pytest.approx(1 / (3 * largest), rel=0.02)
    assert steps_from_smoothness(problem, L1(0.1), Q=5, eta_s=0.01).eta_a == pytest.approx(
        1 / largest, rel=0.02
    )  # what a client bears
    phi = MCP(0.1, 1.5 / overall)
    steps = steps_from_smoothness(problem, phi)  # gamma rho < 1 still, and eta_hat at most gamma
    assert steps.eta_a <= steps.gamma <= 0.5 / phi.rho
    assert steps_from_smoothness(problem, L1(0.1), gamma=1e-3).eta_a == pytest.approx(1e-3)
    assert steps_from_smoothness(problem, L1(0.1), eta_a=0.01, memory=3) == pytest.approx(
        (0.01, 0.01, overall), rel=0.01
    )
    assert steps_from_smoothness(LeastSquares(problem.data, batch_size=2), L1(0.1)) is None


def test_auto_with_exact_gradients_needs_no_pilots(tmp_path, capsys):
    """One local step and float64 unless told otherwise; the run ends when it is done, and says so."""
    common = ["train", "--data", "sparse-regression", "--penalty", "l1:0.01"]
    common += ["--batch-size", "0", "--eta-a", "auto", "--gamma", "auto", "--memory", "10", "--tol", "1e-6", "--quiet"]
    app([*common, "--json", "--out", str(tmp_path / "a")], standalone_mode=False)
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert "no pilots; 1 local step, float64" in said.err
    assert found["ended"].startswith("converged")
    assert found["rounds"] < 120
    config = Config.read(tmp_path / "a" / "run.toml")
    assert (config.local_steps, config.dtype, config.memory) == (1, "float64", 10)
    app([*common, "--local-steps", "3", "--dtype", "float32", "--out", str(tmp_path / "b")], standalone_mode=False)
    config = Config.read(tmp_path / "b" / "run.toml")
    assert (config.local_steps, config.dtype) == (3, "float32")


AUTO = ["--data", "sparse-regression", "--penalty", "l1:0.1", "--eta-a", "auto", "--rounds", "40", "--quiet"]


def found_steps(tmp_path, *options):
    app(["train", *AUTO, *options, "--out", str(tmp_path)], standalone_mode=False)
    config = Config.read(tmp_path / "run.toml")
    return config.eta_a, config.gamma


@pytest.mark.parametrize("exact", [[], ["--batch-size", "0"]])
def test_auto_finds_the_steps_of_the_method_as_it_is_set(tmp_path, exact):
    given = found_steps(tmp_path / "a", *exact, "--local-steps", "2", "--eta-s", "0.5", "--dtype", "float64")
    own = ("--set", "fednmap.Q=2", "--set", "fednmap.eta_s=0.5", "--dtype", "float64")
    assert found_steps(tmp_path / "b", *exact, *own) == pytest.approx(given)


def test_pilots_take_part_as_the_run_does(tmp_path, capsys):
    """By a file that says who comes when, one client at a time, and not everybody."""
    (tmp_path / "trace").write_text("".join(f"{i}\n" for i in range(10)))

    def pilots(*options):
        app(["tune", *AUTO[:4], "--budget", "16", "--jobs", "1", "--json", *options], standalone_mode=False)
        return [p["score"] for p in json.loads(capsys.readouterr().out)["pilots"]]

    experiment = prepare(Config.make(data="sparse-regression", penalty="l1:0.1"))
    options = {"budget": 16, "rounds": 200, "measure_gamma": experiment.measure_gamma}
    alone = tune(experiment.problem, experiment.phi, sampler=lambda n, t, rng: [t % n], **options)
    assert pilots("--sampler", f"trace:{tmp_path / 'trace'}") == [p.score for p in alone.pilots]
    assert pilots() != [p.score for p in alone.pilots]


def test_the_steps_of_a_run_are_found_anew(tmp_path, capsys):
    """Every run.toml has an eta_a, also where nobody has said one."""
    config = Config.make(data="sparse-regression", penalty="l1:0.1", clients=10, rounds=20, gamma=0.1)
    (tmp_path / "run.toml").write_text(config.toml())
    found = []
    for words in (["--config", str(tmp_path / "run.toml")], [*AUTO[:4], "--rounds", "20"]):
        app(["tune", *words, "--budget", "16", "--jobs", "1", "--json"], standalone_mode=False)
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    assert len({p["eta_a"] for p in found[0]["pilots"]}) > 3
    with pytest.raises(InputError, match="nothing to find"):
        app(["tune", "--config", str(tmp_path / "run.toml"), "--eta-a", "0.1", "--gamma", "1"], standalone_mode=False)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--dp-clip", "1", "--dp-noise", "1"], "without clipping or noise, which no epsilon counts"),
        (["--async", "buffer:3"], "expected rounds that wait for all clients, got --async"),
        (["--local-momentum", "0.9"], "expected equal local steps, got local_momentum 0.9; give eta_a and gamma"),
        (["--local-decay", "0.5"], "expected equal local steps, got local_decay 0.5"),
        (["--dp-clip", "1", "--dp-noise", "1", "--batch-size", "0"], "give eta_a and gamma as numbers"),
        (["--set", "fednmap.eta_a=3"], "fednmap.eta_a is set, and eta_a is to be found; leave one of them out"),
    ],
)
def test_auto_does_not_find_steps_for_another_run(options, line):
    with pytest.raises(InputError, match=line):
        app(["train", *AUTO, *options], standalone_mode=False)
    if "--set" not in options:
        with pytest.raises(InputError, match=line):
            app(["tune", *AUTO[:4], *options], standalone_mode=False)


def test_pilots_of_auto_take_a_tenth_of_the_rounds():
    found = tune(LeastSquares(heterogeneous().data, batch_size=2), L1(0.1), Q=2, rounds=200, budget=20)
    assert found.rounds_used <= 20
    assert found.pilot is not None
    assert len({p.gamma / p.eta_a for p in found.pilots[:4]}) == 1


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--algorithm", "zhang", "--memory", "5"], "memory is 5, and zhang has none; leave it out, or use fednmap"),
        (["--memory", "-1"], "memory is -1; it must be a whole number, at least 0"),
    ],
)
def test_memory_that_cannot_be_meant(options, line):
    with pytest.raises(InputError, match=line):
        app(["train", *options], standalone_mode=False)


def test_memory_with_minibatches_is_doubted():
    with pytest.warns(UserWarning, match="differences of noise are not curvature"):
        prepare(Config.make(data="sparse-regression", memory=3, batch_size=8))


@pytest.mark.parametrize("count", [1, 3])
def test_pilots_side_by_side_find_the_same(count):
    options = {"Q": 3, "rounds": 16}
    one, several = (
        tune(logistic(), L1(0.01), **options, **more)
        for more in ({}, {"parallel_map": partial(parallel_map, count=count)})
    )
    assert several.pilots == one.pilots
    assert (several.eta_a, several.gamma) == (one.eta_a, one.gamma)


def test_a_pilot_that_fails_elsewhere_fails_here():
    def fails(end):
        raise InputError(f"no round {end}")

    with pytest.raises(InputError, match="no round 4"):
        parallel_map(fails, [4, 4], 2)
    with pytest.raises(WorkerLost, match="exit code 3"):
        parallel_map(os._exit, [3, 3], 2)


def test_a_pilot_whose_psi_turns_upward_is_unstable_even_below_its_start():
    class Returning(LeastSquares):
        """Descends for eight rounds and then climbs back."""

        def oracle(self, clients, t):
            g = super().oracle(clients, t)
            return g if t < 8 else lambda x, q: -g(x, q)

    problem = Returning([(torch.eye(2), torch.ones(2))])
    found = tune(problem, Zero(), Q=1, rounds=12, eta_a=0.1)
    assert found.pilot is None
    assert any(p.psi < p.first for p in found.pilots if p.rounds == 12)


def test_short_pilots_are_judged_by_psi_unless_by_the_residual_alone():
    for residual_only, key, other in ((False, "psi", "score"), (True, "score", "psi")):
        found = tune(logistic(), L1(0.01), Q=3, rounds=30, budget=80, residual_only=residual_only)
        full = [p for p in found.pilots if p.rounds == found.pilot.rounds and not p.unstable]
        assert getattr(found.pilot, key) == min(getattr(p, key) for p in full)
        assert residual_only or getattr(found.pilot, other) > min(getattr(p, other) for p in full)  # they disagree


def objectives(tmp_path, rounds, *options):
    """psi before the first round and after the last, on digits."""
    app(["train", "--rounds", str(rounds), *options, "--quiet", "--out", str(tmp_path)], standalone_mode=False)
    records = RunFolder(tmp_path).records("fednmap", 0)
    return records[0]["objective"], records[-1]["objective"]


def test_auto_trains_a_network_in_few_rounds(tmp_path):
    first, last = objectives(tmp_path, 20, "--eta-a", "auto")
    assert last < first / 2


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [40, 100, 200])
def test_auto_on_a_network_is_as_good_as_the_preset(tmp_path, rounds):
    _, preset = objectives(tmp_path / "preset", rounds)
    first, last = objectives(tmp_path / "auto", rounds, "--eta-a", "auto")
    assert last < first / 2
    assert last < 1.05 * preset


@pytest.mark.parametrize(
    ("words", "problems", "algorithms"),
    [(("--eta-a", 1e-3), 1, 1), (("--eta-a", "auto"), 1, 2), (("--eta-a", "auto", "--batch-size", 8), 1, 2)],
    ids=["numbers", "from the smoothness", "pilots"],
)
def test_a_run_loads_its_data_once_and_builds_a_method_once_per_step_size(
    command, monkeypatch, words, problems, algorithms
):
    calls = Counter()

    def counted(owner, name):
        function = getattr(owner, name)

        def wrapper(*args, **more):
            calls[name] += 1
            return function(*args, **more)

        monkeypatch.setattr(owner, name, wrapper)

    counted(data, "load")
    counted(experiment, "_problem")
    counted(experiment.Methods, "_build")
    code, *_, err = command("train", "--data", "sparse-regression", "--rounds", 3, *words, "--quiet", "--out", "run")
    assert code == 0, err
    assert calls == {"load": 1, "_problem": problems, "_build": algorithms}


def test_the_earlier_name_of_steps_from_smoothness_still_works():
    from fednmap.theory import at_once as earlier

    with pytest.warns(DeprecationWarning, match="steps_from_smoothness"):
        assert earlier.at_once is steps_from_smoothness
