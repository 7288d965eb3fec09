"""Limits in which one method becomes another, and every method against its box written out."""

from functools import cache

import boxes
import numpy as np
import pytest
import torch
from lasso import gap, models
from stochastic import KINDS, least_squares

from fednmap import algorithms as A
from fednmap.problems import LeastSquares, Pooled
from fednmap.regularizers import L1, ElasticNet, Zero
from fednmap.simulation.schedules import InverseSqrt, StepDown

WEIGHT = 0.05
PHI = L1(WEIGHT)
P = boxes.soft(WEIGHT)
T = 50
a, s, Q = 0.02, 0.8, 4
ADAPTIVE = {"eta": 0.03, "beta1": 0.8, "beta2": 0.9, "tau": 0.02}


def setting(problem):
    """Oracle of one client, number of clients, a start away from zero."""
    oracle = cache(lambda i, t: problem.oracle(torch.tensor(i), t))

    def g(i, t, q, x):
        return oracle(i, t)(x, q)

    return g, problem.n, problem.start + torch.linspace(-0.5, 0.7, problem.dim, dtype=torch.float64)


def run(algorithm, problem, rounds=T, start=None):
    return models(algorithm, problem, rounds=rounds, start=setting(problem)[2] if start is None else start)


BOXES = {
    "FedNMap": (
        A.FedNMap(PHI, eta_a=a, eta_s=s, Q=Q, gamma=0.3),
        lambda *arg: boxes.fednmap(*arg, T, P, a=a, s=s, Q=Q, gamma=0.3),
    ),
    "CompressedFedNMap": (
        A.CompressedFedNMap(PHI, eta_a=a, eta_s=s, Q=Q, gamma=0.3, K=2),
        lambda *arg: boxes.compressed_fednmap(*arg, T, P, a=a, s=s, Q=Q, gamma=0.3, K=2),
    ),
    "Zhang": (A.Zhang(PHI, eta_a=a, eta_s=s, Q=Q), lambda *arg: boxes.zhang(*arg, T, P, a=a, s=s, Q=Q)),
    "FedCanon": (
        A.FedCanon(PHI, eta_a=a, eta_s=s, Q=Q),
        lambda *arg: boxes.fedcanon(*arg, T, P, a=a, Q=Q, alpha=a * s * Q),
    ),
    "FedCanon, alpha given": (
        A.FedCanon(PHI, eta_a=a, Q=Q, alpha=0.1),
        lambda *arg: boxes.fedcanon(*arg, T, P, a=a, Q=Q, alpha=0.1),
    ),
    "FedDA": (A.FedDA(PHI, eta_a=a, eta_s=s, Q=Q), lambda *arg: boxes.fedda(*arg, T, P, a=a, s=s, Q=Q)),
    "FedMiD": (
        A.FedMiD(PHI, eta_a=a, eta_s=s, Q=Q),
        lambda *arg: boxes.fedmid(*arg, T, P, a=a, s=s, Q=Q, server_only=False),
    ),
    "FedMiD, server only": (
        A.FedMiD(PHI, eta_a=a, eta_s=s, Q=Q, server_only=True),
        lambda *arg: boxes.fedmid(*arg, T, P, a=a, s=s, Q=Q, server_only=True),
    ),
    "FastFedDA": (
        A.FastFedDA(PHI, Q=Q, mu=0.3, gamma=20.0),
        lambda *arg: boxes.fast_fedda(*arg, T, P, Q=Q, mu=0.3, gamma=20.0),
    ),
    "EControlDA": (
        A.EControlDA(PHI, K=2, gamma=50.0),
        lambda *arg: boxes.econtrolda(*arg, T, P, K=2, gamma=50.0),
    ),
    "FedDR": (
        A.FedDR(PHI, eta_a=a, Q=Q, r=0.4, alpha=1.6),
        lambda *arg: boxes.feddr(*arg, T, P, a=a, Q=Q, r=0.4, alpha=1.6),
    ),
    "FedADMM": (
        A.FedADMM(PHI, eta_a=a, Q=Q, beta=3.0),
        lambda *arg: boxes.fedadmm(*arg, T, P, a=a, Q=Q, beta=3.0),
    ),
    "SCAFFOLD": (A.SCAFFOLD(eta_a=a, eta_s=s, Q=Q), lambda *arg: boxes.scaffold(*arg, T, a=a, s=s, Q=Q)),
    "FedAvg": (A.FedAvg(eta_a=a, eta_s=s, Q=Q), lambda *arg: boxes.fedprox(*arg, T, a=a, s=s, Q=Q, mu=0.0)),
    "FedProx": (
        A.FedProx(eta_a=a, eta_s=s, Q=Q, mu=0.7),
        lambda *arg: boxes.fedprox(*arg, T, a=a, s=s, Q=Q, mu=0.7),
    ),
    "FedAvgM": (
        A.FedAvgM(eta_a=a, eta_s=s, Q=Q, beta=0.6),
        lambda *arg: boxes.fedavgm(*arg, T, a=a, s=s, Q=Q, mu=0.0, beta=0.6),
    ),
    "FedAvgM, mu": (
        A.FedAvgM(of=A.FedProx(eta_a=a, eta_s=s, Q=Q, mu=0.7), beta=0.6),
        lambda *arg: boxes.fedavgm(*arg, T, a=a, s=s, Q=Q, mu=0.7, beta=0.6),
    ),
    "FedAdam, a fedopt": (
        A.FedAdam(eta_a=a, Q=Q, **ADAPTIVE),
        lambda *arg: boxes.fedopt(*arg, T, kind="adam", a=a, Q=Q, **ADAPTIVE),
    ),
    "FedAdam, a fedopt with mu": (
        A.FedAdam(of=A.FedProx(eta_a=a, Q=Q, mu=0.7), **ADAPTIVE),
        lambda *arg: boxes.fedopt(*arg, T, kind="adam", a=a, Q=Q, mu=0.7, **ADAPTIVE),
    ),
    "FedYogi, a fedopt": (
        A.FedYogi(eta_a=a, Q=Q, **ADAPTIVE),
        lambda *arg: boxes.fedopt(*arg, T, kind="yogi", a=a, Q=Q, **ADAPTIVE),
    ),
    "FedAdagrad, a fedopt": (
        A.FedAdagrad(eta_a=a, Q=Q, **ADAPTIVE),
        lambda *arg: boxes.fedopt(*arg, T, kind="adagrad", a=a, Q=Q, **ADAPTIVE),
    ),
    "FedPD": (A.FedPD(eta_a=a, Q=Q, r=0.4), lambda *arg: boxes.fedpd(*arg, T, a=a, Q=Q, r=0.4)),
    "Scaffnew": (A.Scaffnew(eta_a=a, Q=Q, seed=5), lambda *arg: boxes.scaffnew(*arg, T, a=lambda t: a, Q=Q, seed=5)),
}


@pytest.mark.parametrize("name", BOXES)
def test_a_method_is_its_box(name):
    problem = least_squares()
    algorithm, box = BOXES[name]
    reference = list(box(*setting(problem)))
    assert gap(run(algorithm, problem), reference) < 1e-12
    assert max(float(x.abs().max()) for x in reference) < 10
    assert gap(reference[:-1], reference[1:]) > 1e-3  # it moves


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["FedNMap", "Zhang", "FedCanon"])
def test_corrected_methods_are_their_boxes_on_every_kind_of_problem(kind, name):
    problem = KINDS[kind]()
    algorithm, box = BOXES[name]
    assert gap(run(algorithm, problem), box(*setting(problem))) < 1e-12


@pytest.mark.parametrize("name", ["ProxSGD", "NormalMapSGD"])
def test_central_methods_are_their_boxes(name):
    problem = least_squares()
    _, _, start = setting(problem)

    def g(t, q, x):
        return problem.oracle(torch.arange(problem.n), t)(x, q).mean(0)

    if name == "ProxSGD":
        algorithm, box = A.ProxSGD(PHI, eta_a=a, Q=Q), boxes.prox_sgd(g, start, T, P, a=a, Q=Q)
    else:
        algorithm = A.NormalMapSGD(PHI, eta_a=a, Q=Q, gamma=0.3)
        box = boxes.normal_map_sgd(g, start, T, P, a=a, Q=Q, gamma=0.3)
    assert gap(run(algorithm, Pooled(problem), start=start), box) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", [A.FedNMap, A.Zhang])
def test_without_phi_fednmap_and_zhang_are_scaffold(kind, method):
    problem = KINDS[kind]()
    options = {"eta_a": a, "eta_s": s, "Q": Q}
    assert gap(run(method(Zero(), **options), problem), run(A.SCAFFOLD(**options), problem)) < 1e-12


def test_without_phi_fednmap_is_scaffold_under_sampling_and_loss():
    problem, options = least_squares(), {"eta_a": a, "eta_s": s, "Q": Q}
    history = {"rounds": T, "participation": 0.5, "drop": 0.3, "seed": 3}
    pair = [models(m, problem, **history) for m in (A.FedNMap(Zero(), **options), A.SCAFFOLD(**options))]
    assert gap(*pair) < 1e-12


def test_fednmap_with_one_step_is_proximal_gradient_where_the_steps_multiply_to_gamma():
    problem = least_squares(batch_size=None)
    _, _, start = setting(problem)
    x, expected = P(start, a * s), []
    for _ in range(T):
        x = P(x - a * s * problem.gradient(x), a * s)
        expected.append(x)
    assert gap(run(A.FedNMap(PHI, eta_a=a, eta_s=s, Q=1, gamma=a * s), problem), expected) < 1e-12


ONE_STEP = {  # with Q = 1, and eta = eta_a eta_s: the central method on the mean of the same minibatches
    "FedNMap": (A.FedNMap(PHI, eta_a=a, eta_s=s, Q=1, gamma=0.3), A.NormalMapSGD(PHI, eta_a=a * s, gamma=0.3)),
    "Zhang": (A.Zhang(PHI, eta_a=a, eta_s=s, Q=1), A.ProxSGD(PHI, eta_a=a * s)),
    "FedCanon": (A.FedCanon(PHI, eta_a=a, eta_s=s, Q=1), A.ProxSGD(PHI, eta_a=a * s)),
    "FedMiD, server only": (A.FedMiD(PHI, eta_a=a, eta_s=s, Q=1, server_only=True), A.ProxSGD(PHI, eta_a=a * s)),
    "SCAFFOLD": (A.SCAFFOLD(eta_a=a, eta_s=s, Q=1), A.ProxSGD(Zero(), eta_a=a * s)),
    "FedAvg": (A.FedAvg(eta_a=a, eta_s=s, Q=1), A.ProxSGD(Zero(), eta_a=a * s)),
    "FedProx": (A.FedProx(eta_a=a, eta_s=s, Q=1, mu=0.7), A.ProxSGD(Zero(), eta_a=a * s)),
    "Scaffnew": (A.Scaffnew(eta_a=a, Q=1), A.ProxSGD(Zero(), eta_a=a)),
}


@pytest.mark.parametrize("name", ONE_STEP)
def test_with_one_local_step_it_is_the_central_method(name):
    problem = least_squares()
    federated, central = ONE_STEP[name]
    pooled = run(central, Pooled(problem), start=setting(problem)[2])
    assert gap(run(federated, problem), pooled) < 1e-12


@pytest.mark.parametrize("name", ONE_STEP)
def test_one_client_with_one_local_step_is_the_central_method(name):
    alone = LeastSquares([least_squares().data[1]], batch_size=3)
    federated, central = ONE_STEP[name]
    assert gap(run(federated, alone), run(central, alone)) < 1e-12


def test_normal_map_sgd_is_prox_sgd_where_the_step_is_gamma():
    problem = Pooled(least_squares())
    start = setting(least_squares())[2]
    x_0 = PHI.prox(start, a)
    pair = (
        run(A.NormalMapSGD(PHI, eta_a=a, gamma=a, Q=3), problem, start=start),
        run(A.ProxSGD(PHI, eta_a=a, Q=3), problem, start=x_0),
    )
    assert gap(*pair) < 1e-12


def test_fedprox_without_mu_is_fedavg():
    problem, options = least_squares(), {"eta_a": a, "eta_s": s, "Q": Q}
    assert gap(run(A.FedProx(mu=0.0, **options), problem), run(A.FedAvg(**options), problem)) == 0


@pytest.mark.parametrize("method", [A.FedAdam, A.FedYogi, A.FedAdagrad], ids=lambda m: f"fedopt-{m.__name__}")
def test_adaptive_steps_that_adapt_to_nothing_are_fedavg(method):
    """With a tau far above every change, m / (sqrt(v) + tau) is m / (2 tau): v stays at tau^2."""
    problem, tau = least_squares(), 1e6
    eta, history = s * 2 * tau, {"rounds": T, "participation": 0.5, "drop": 0.3, "seed": 3}
    beta2 = 1 - 1e-12 if method is A.FedAdam else 0.99  # v must not forget tau^2
    algorithm = method(eta_a=a, eta=eta, Q=Q, beta1=0.0, beta2=beta2, tau=tau)
    pair = [models(m, problem, **history) for m in (algorithm, A.FedAvg(eta_a=a, eta_s=s, Q=Q))]
    assert gap(*pair) < 1e-9


def test_fedadmm_without_phi_is_fedpd():
    problem, options = least_squares(), {"eta_a": a, "Q": Q}
    assert gap(run(A.FedADMM(Zero(), beta=2.5, **options), problem), run(A.FedPD(r=0.4, **options), problem)) < 1e-12


def dual_averaging(problem, eta):
    """x = P(x_0 - eta * sum of gradients, eta * their number)."""
    _, _, start = setting(problem)
    x, S = start, torch.zeros_like(start)
    for t in range(T):
        S = S + problem.oracle(torch.arange(problem.n), t)(x, 0).mean(0)
        x = P(start - eta * S, eta * (t + 1))
        yield x


def test_fedda_with_one_step_is_dual_averaging():
    problem = least_squares()
    assert gap(run(A.FedDA(PHI, eta_a=a, eta_s=s, Q=1), problem), dual_averaging(problem, a * s)) < 1e-12


@pytest.mark.parametrize("compressor", ["top", "random"])
@pytest.mark.parametrize("history", [{}, {"participation": 0.5, "drop": 0.3, "seed": 3}], ids=["all", "sampled"])
def test_compressed_fednmap_that_keeps_everything_is_fednmap(compressor, history):
    problem, options = least_squares(), {"eta_a": a, "eta_s": s, "Q": Q, "gamma": 0.3}
    whole = A.CompressedFedNMap(PHI, K=problem.dim, compressor=compressor, **options)
    pair = [models(m, problem, rounds=T, **history) for m in (whole, A.FedNMap(PHI, **options))]
    assert gap(*pair) < 1e-12


@pytest.mark.parametrize("compressor", ["top", "random"])
def test_econtrolda_that_keeps_everything_is_dual_averaging(compressor):
    problem = least_squares()
    algorithm = A.EControlDA(PHI, K=problem.dim, eta_a=a, compressor=compressor)
    assert gap(run(algorithm, problem), dual_averaging(problem, a)) < 1e-12


def test_scaffnew_that_always_communicates_is_gradient_descent():
    problem = least_squares(batch_size=None)
    x, expected = setting(problem)[2], []
    for _ in range(T):
        x = x - a * problem.gradient(x)
        expected.append(x)
    assert gap(run(A.Scaffnew(eta_a=a, Q=1), problem), expected) < 1e-12


@pytest.mark.parametrize("schedule", [InverseSqrt(a), StepDown(a, 0.1, 10)])
def test_scaffnew_is_its_box_under_a_schedule(schedule):
    """A client moves its control by the step that it took, not by the next one."""
    problem = least_squares()
    g, n, start = setting(problem)
    reference = list(boxes.scaffnew(g, n, start, T, a=schedule, Q=Q, seed=5))
    algorithm = A.Scaffnew(eta_a=a, Q=Q, seed=5)
    assert gap(models(algorithm, problem, rounds=T, start=start, eta_a=schedule), reference) < 1e-12


def test_scaffnew_communicates_every_q_steps_on_average():
    algorithm = A.Scaffnew(eta_a=a, Q=5, seed=1)
    server, _ = algorithm.init(torch.zeros(2))
    steps = np.array([int(algorithm.broadcast(server._replace(t=torch.tensor(t))).steps) for t in range(4000)])
    assert steps.min() == 1
    assert abs(steps.mean() - 5) < 4 * np.sqrt(20 / 4000)  # a geometric variable has variance Q^2 - Q
    assert abs((steps == 1).mean() - 0.2) < 0.03


def test_elastic_net_without_its_square_is_l1():
    problem = least_squares()
    pair = [run(A.FedNMap(phi, eta_a=a, Q=Q, gamma=0.3), problem) for phi in (PHI, ElasticNet(WEIGHT, 0.0))]
    assert gap(*pair) == 0
