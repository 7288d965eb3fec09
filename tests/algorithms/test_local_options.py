"""Momentum and decay of local steps: a plain loop, exact fixed points, parities, refusals."""

import pytest
import torch
from lasso import PHI, PROBLEM, L, gap, models

from fednmap.algorithms import SCAFFOLD, FedAvg, FedNMap, FedProx
from fednmap.algorithms.kernels import plain_steps
from fednmap.names import InputError
from fednmap.regularizers import Zero
from fednmap.runs.configuration import Config
from fednmap.runs.experiment import prepare
from fednmap.testing import check_algorithm

Q = 4
OPTIONS = [{"local_momentum": 0.7}, {"local_decay": 0.6}, {"local_momentum": 0.5, "local_decay": 0.8}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("mu", [0.0, 0.3])
def test_fedavg_and_fedprox_are_a_loop_over_torchs_optimiser(options, mu):
    eta = 0.1 / L
    method = FedProx(eta_a=eta, Q=Q, mu=mu, **options) if mu else FedAvg(eta_a=eta, Q=Q, **options)
    x, expected = torch.zeros(PROBLEM.dim).double(), []
    for t in range(3):
        mean = torch.zeros_like(x)
        for i in range(PROBLEM.n):
            g, y = PROBLEM.oracle(torch.tensor(i), t), torch.nn.Parameter(x.clone())
            torch_sgd = torch.optim.SGD([y], lr=eta, momentum=options.get("local_momentum", 0.0))
            rule = torch.optim.lr_scheduler.ExponentialLR(torch_sgd, options.get("local_decay", 1.0))
            for q in range(Q):
                y.grad = g(y.detach(), q) + mu * (y.detach() - x)
                torch_sgd.step()
                rule.step()
            mean += y.detach() / PROBLEM.n
        x = mean
        expected.append(x)
    assert gap(models(method, PROBLEM, rounds=3, start=torch.zeros(PROBLEM.dim).double()), expected) < 1e-14


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", [FedNMap, SCAFFOLD])
def test_methods_with_a_correction_stay_exact(kind, options):
    def make(phi, L, Q):
        eta = 0.5 / (L * plain_steps(Q, options.get("local_momentum", 0), options.get("local_decay", 1)))
        return kind(phi, eta_a=eta, Q=Q, **({"gamma": 1 / L} if kind is FedNMap else {}), **options)

    check_algorithm(make)


@pytest.mark.parametrize("options", OPTIONS)
def test_fednmap_without_a_penalty_is_scaffold(options):
    for sampled in ({}, {"participation": 0.5, "drop": 0.2}):
        pair = [kind(Zero(), eta_a=0.1 / L, Q=Q, **options) for kind in (FedNMap, SCAFFOLD)]
        assert gap(*(models(method, PROBLEM, rounds=9, **sampled) for method in pair)) < 1e-13


def test_without_momentum_and_decay_steps_are_plain():
    plain, stated = (models(FedNMap(PHI, 0.1 / L, Q=Q, **o), PROBLEM, rounds=3) for o in ({}, {"local_decay": 1.0}))
    assert gap(plain, stated) == 0


def test_the_command_gives_the_options_to_the_methods_that_have_them():
    given = {"data": "digits", "model": "logistic", "clients": 3, "rounds": 1, "local_momentum": 0.9}
    made = prepare(Config.make(algorithms=("fednmap", "scaffold", "fedavg", "fedprox", "fedadam"), **given))
    found = [made.algorithm(name) for name in ("fednmap", "scaffold", "fedavg", "fedprox")]
    found.append(made.algorithm("fedadam").of)
    assert {method.local_momentum for method in found} == {0.9}
    for name in ("zhang", "fedda", "fedcanon"):
        with pytest.raises(InputError, match=f"{name} counts on equal local steps"):
            prepare(Config.make(algorithms=(name,), **given))


@pytest.mark.parametrize("wrong", [{"local_momentum": 1.0}, {"local_momentum": -0.1}, {"local_decay": 0.0}])
def test_values_are_checked(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        FedAvg(**wrong)


def test_a_default_option_is_not_named_so_that_older_run_folders_continue():
    assert repr(FedAvg(Q=3)) == "FedAvg(phi=Zero(), eta_a=0.1, eta_s=1.0, Q=3)"
    assert repr(FedAvg(local_momentum=0.5)).endswith("Q=10, local_momentum=0.5)")
