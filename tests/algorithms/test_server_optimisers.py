"""FedAvgM, FedAdam, FedYogi and FedAdagrad as the server of any method that takes a step there."""

import itertools
import pickle
from dataclasses import replace

import boxes
import pytest
import torch
from lasso import gap, models
from methods import MAKE
from small import begin, outcome, small
from stochastic import least_squares

from fednmap import algorithms as A
from fednmap import simulate
from fednmap.core import with_fields
from fednmap.names import InputError
from fednmap.privacy import Privacy
from fednmap.regularizers import L1, Zero
from fednmap.runs.experiment import prepare
from fednmap.simulation.quantised import Quantised
from fednmap.simulation.schedules import InverseSqrt
from fednmap.testing import check_algorithm

PHI = L1(0.05)
STEPS = {"eta_a": 0.02, "eta_s": 0.8, "Q": 4}
BELOW = {
    "FedAvg": A.FedAvg(**STEPS),
    "FedProx": A.FedProx(**STEPS, mu=0.7),
    "PrunedFedAvg": A.PrunedFedAvg(**STEPS, zeros=0.3),
    "SCAFFOLD": A.SCAFFOLD(**STEPS),
    "FedNMap": A.FedNMap(PHI, **STEPS),
    "CompressedFedNMap": A.CompressedFedNMap(PHI, **STEPS, K=2),
}
OPTIMISERS = {
    "FedAvgM": lambda of: A.FedAvgM(of=of, beta=0.6),
    "FedAdam": lambda of: A.FedAdam(of=of, eta=0.1, tau=0.1),
    "FedYogi": lambda of: A.FedYogi(of=of, eta=0.1, tau=0.1),
    "FedAdagrad": lambda of: A.FedAdagrad(of=of, eta=0.2, tau=0.1),
}
HISTORIES = {"all": {}, "sampled": {"participation": 0.5, "drop": 0.3, "seed": 3}}


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("name", BELOW)
def test_fedavgm_without_momentum_is_the_method_to_the_bit(name, history):
    of, problem = BELOW[name], least_squares()
    pair = [models(method, problem, rounds=50, **HISTORIES[history]) for method in (of, A.FedAvgM(of=of, beta=0.0))]
    assert all(torch.equal(one, other) for one, other in zip(*pair, strict=True))
    assert gap(pair[0][:-1], pair[0][1:]) > 1e-4  # it moves


def test_fedavgm_as_published_is_of_fedavg():
    problem = least_squares()
    assert A.FedAvgM(eta_a=0.02, Q=4) == A.FedAvgM(of=A.FedAvg(eta_a=0.02, Q=4))
    pair = [models(m, problem, rounds=50) for m in (A.FedAvgM(eta_a=0.02, Q=4, beta=0.0), A.FedAvg(eta_a=0.02, Q=4))]
    assert all(torch.equal(one, other) for one, other in zip(*pair, strict=True))


def after_one(of, problem, server, clients, t):
    """One round of a method with everybody, by its own functions."""
    down, ups, new = of.broadcast(server), [], []
    for i, client in enumerate(clients):
        up, state = of.local(down, client, problem.oracle(torch.tensor(i), t))
        ups.append(up)
        new.append(state)
    mean = type(ups[0])(*(torch.stack(v).mean(0) for v in zip(*ups, strict=True)))
    return of.aggregate(server, mean, 1.0), new


@pytest.mark.parametrize("name", BELOW)
@pytest.mark.parametrize("kind", ["adam", "yogi", "adagrad"])
def test_server_optimiser_of_a_method_is_algorithm_2_on_its_steps(name, kind):
    """fedopt: Reddi et al., Algorithm 2, lines 11 to 15, coordinate by coordinate."""
    of, problem, numbers = BELOW[name], least_squares(), {"eta": 0.03, "beta1": 0.8, "beta2": 0.9, "tau": 0.02}
    algorithm = {"adam": A.FedAdam, "yogi": A.FedYogi, "adagrad": A.FedAdagrad}[kind](of=of, **numbers)
    start = problem.start + 0.4
    server, client = of.init(start)
    clients, expected, optimiser = [client] * problem.n, [], boxes.Algorithm2(kind, len(start), **numbers)
    for t in range(30):
        name_of_x = of.traits.server_variable
        x = getattr(server, name_of_x)
        server, clients = after_one(of, problem, server, clients, t)
        server = server._replace(
            **{of.traits.server_variable: optimiser(x, getattr(server, of.traits.server_variable) - x)}
        )
        expected.append(of.model(server))
    assert gap(models(algorithm, problem, rounds=30, start=start), expected) < 1e-12
    assert gap(expected[:-1], expected[1:]) > 1e-3


EXACT = [name for name in BELOW if BELOW[name].traits.fixed_point.value == "exact"]
SLOW = {("FedAdagrad", "SCAFFOLD"), ("FedAdagrad", "FedNMap"), *((name, "CompressedFedNMap") for name in OPTIMISERS)}
SLOW |= {("FedYogi", "SCAFFOLD"), ("FedAdam", "SCAFFOLD")}


@pytest.mark.slow
@pytest.mark.ci(turn=0)
@pytest.mark.parametrize(
    ("optimiser", "name"),
    [
        pytest.param(*pair, marks=pytest.mark.slow if pair in SLOW else ())
        for pair in itertools.product(OPTIMISERS, EXACT)
    ],
)
def test_server_optimiser_of_an_exact_method_is_exact(optimiser, name):
    """Also of half of the clients, and with lost replies: h stays the mean of the h_i."""
    rounds = 6000 if optimiser == "FedAdagrad" else 1500
    report = check_algorithm(lambda phi, L, Q: OPTIMISERS[optimiser](MAKE[name](phi, L, Q)), rounds=rounds)
    assert max(report) < 1e-10


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_server_optimiser_is_of_a_method_that_takes_a_step(optimiser):
    others = {name: make(Zero(), 1.0, 1) for name, make in MAKE.items()}
    others["memory"] = A.FedNMapMemory(PHI, memory=5)
    refused = {name for name, other in others.items() if other.traits.server_variable is None}
    assert set(BELOW) == set(others) - refused
    for name in refused:
        with pytest.raises(InputError, match=rf"^{optimiser} cannot be of [^\n]*takes no step[^\n]*$"):
            getattr(A, optimiser)(of=others[name])


@pytest.mark.parametrize("of", ["scaffold", A.SCAFFOLD, None, 3])
def test_server_optimiser_of_what_is_no_method_is_refused(of):
    with pytest.raises(InputError, match=r"^FedAdam: of is [^\n]*; it must be a method[^\n]*$"):
        A.FedAdam(of=of)


def test_what_server_optimiser_is_given_goes_to_its_method():
    other = L1(0.3)
    algorithm = A.FedAdam(other, eta_a=0.5, Q=3, of=A.FedNMap(PHI, eta_a=0.1, gamma=2.0))
    assert algorithm.of == A.FedNMap(other, eta_a=0.5, Q=3, gamma=2.0)
    assert (algorithm.phi, algorithm.eta_a, algorithm.eta_s, algorithm.Q) == (other, 0.5, 1.0, 3)
    assert algorithm.prox_parameter == 2.0
    assert algorithm.traits.composite
    assert not algorithm.traits.broadcast_follows  # clients do not know m
    assert replace(algorithm, eta_a=0.1).of.eta_a == 0.1
    with pytest.raises(InputError, match=r"^FedAvg is for smooth problems[^\n]*$"):
        A.FedAdam(L1(0.1))

    seeded = with_fields(A.FedAvgM(of=A.CompressedFedNMap(PHI, compressor="random")), seed=7)
    assert seeded.of.seed == 7
    assert with_fields(A.FedAvgM(of=A.SCAFFOLD()), forget=0.5).of.forget == 0.5


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_server_optimiser_follows_a_schedule_and_goes_on_from_a_round(optimiser):
    problem, algorithm = least_squares(), OPTIMISERS[optimiser](BELOW["FedNMap"])
    options = {"rounds": 20, "eta_a": InverseSqrt(0.05), "participation": 0.5}
    whole = list(simulate(algorithm, problem, **options))
    *_, last = simulate(algorithm, problem, **options, after=whole[7])
    assert torch.equal(algorithm.model(last.server), algorithm.model(whole[-1].server))
    assert gap(models(algorithm, problem, rounds=20, participation=0.5), [algorithm.model(r.server) for r in whole]) > 0


def test_a_run_names_the_method_of_a_server_optimiser(tmp_path):
    settings = {"algorithms": ("fedadam", "fedavgm"), "penalty": "l1:0.01"}
    chosen = {"fedadam.of": "fednmap", "fedadam.eta": 0.05, "fedavgm.of": "fedprox", "fedprox.mu": 0.3}
    folder = begin(tmp_path / "run", **settings, set=chosen)
    plain = begin(tmp_path / "plain", **settings)
    assert outcome(folder) != outcome(plain)


def test_a_run_leaves_the_method_of_a_server_optimiser_its_own_seed():
    chosen = {"fedadam.of": "compressed-fednmap", "compressed-fednmap.compressor": "random"}
    for own, due in (({}, 3), ({"compressed-fednmap.seed": 7}, 7)):
        experiment = prepare(small(algorithms=("fedadam",), penalty="l1:0.01", seed=3, set=chosen | own))
        assert experiment.algorithm("fedadam").of.seed == due


def test_the_state_of_a_server_optimiser_can_be_pickled():
    *_, last = simulate(A.FedAdam(of=BELOW["SCAFFOLD"]), least_squares(), rounds=2)
    again = pickle.loads(pickle.dumps(last.server))
    assert type(again) is type(last.server)
    assert all(torch.equal(v, w) for v, w in zip(again, last.server, strict=True))


@pytest.mark.parametrize("of", ["fedadam", "norm-ed", "nothing", 3.0, "zhang"])
def test_a_run_refuses_what_cannot_have_a_server_optimiser(of):
    with pytest.raises(InputError, match=r"^[^\n]+$"):
        prepare(small(algorithms=("fedadam",), set={"fedadam.of": of}))


@pytest.mark.parametrize("name", ["FedAvg", "SCAFFOLD", "FedNMap"])
@pytest.mark.parametrize("options", [{"uplink": Privacy(1e3)}, {"uplink": Quantised(4)}], ids=["clipped", "masked"])
def test_server_optimiser_lets_uplinks_be_changed_as_its_method_does(name, options):
    """Nothing is clipped here, and rounding is far below 1e-6."""
    algorithm, problem = A.FedAdam(of=BELOW[name], eta=0.1, tau=0.1), least_squares()
    pair = [models(algorithm, problem, rounds=9, participation=0.5, **given) for given in ({}, options)]
    assert gap(*pair) < 1e-6
